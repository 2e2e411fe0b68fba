"""vLLM's `speculative_config`: who drafts tokens, how many, and what a simulation supposes of their worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from batchsim.base.ranges import Config, Range
from batchsim.kernel.policy_config import DraftMethod, Speculation
from batchsim.policies.systems.acceptance_law import MAX_DRAFTS, Laws, Probability, shares_by_class


@dataclass(frozen=True)
class SpeculativeConfig(Config):
    """Every decode verifies up to `num_speculative_tokens` draft tokens beside its own, by vLLM's names.

    Supposed in a simulation: `acceptance`, a law, or one by request class, in which "" stands for all other classes;
    and for `ngram`, which drafts only where the text repeats itself, `found`, the share of steps for which it does. The
    time that drafting takes is the cost's (`batchsim.cost.drafter`).
    """

    method: DraftMethod
    num_speculative_tokens: Annotated[int, Range(1, MAX_DRAFTS)]
    acceptance: Laws
    found: Probability = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.positions  # refuses a law that is none
        if self.found != 1 and self.method != "ngram":
            raise ValueError(f"found is {self.found:g}, but {self.method} always drafts. Leave it out")

    @property
    def positions(self) -> dict[str, tuple[float, ...]]:
        """By request class, "" for all others: for each position the share of steps in which its draft is accepted."""
        return shares_by_class(self.acceptance, self.num_speculative_tokens, "num_speculative_tokens")

    @property
    def speculation(self) -> Speculation:
        """What the world, of which the scheduler knows nothing, is supposed to do with drafts."""
        return Speculation(self.method, self.positions, self.found)

    # ---- numbers by method; source: vllm/config/vllm.py and vllm/config/speculative.py of the 0.33.0 wheel

    @property
    def lookahead(self) -> int:
        """Tokens beyond the scheduled ones for which a step takes KV blocks, which the drafter writes."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def slots(self) -> int:
        """Tokens of the step's budget that the drafter takes for each sequence."""
        return int(self.method == "draft_model")

    @property
    def hash_lookahead(self) -> int:
        """Tokens after a block on which its contents depend, since the draft head writes it too."""
        return int(self.method in ("eagle", "eagle3", "mtp"))
