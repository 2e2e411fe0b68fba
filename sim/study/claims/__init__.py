"""The folklore of batching, tested: `nouns` is what a claim is, `measures` what runs say, `folklore` the sayings."""

from batchsim.study.claims.folklore import FOLKLORE
from batchsim.study.claims.nouns import Claim, Condition, Finding, check_claims

__all__ = ["FOLKLORE", "Claim", "Condition", "Finding", "check_claims"]
