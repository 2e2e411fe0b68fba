"""The folklore of batching, tested: `nouns` is what a claim is, `measures` what runs say, `folklore` the sayings."""

from sim.claims.folklore import FOLKLORE
from sim.claims.nouns import Claim, Condition, Finding, check_claims

__all__ = ["FOLKLORE", "Claim", "Condition", "Finding", "check_claims"]
