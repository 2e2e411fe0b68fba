"""vLLM's `speculative_config`: the drafter, the number of drafts, and their assumed acceptance in a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from batchsim.base.ranges import Config, PositiveInt, Range
from batchsim.kernel.policy_config import DraftMethod, PromptLookup, Speculation
from batchsim.policies.systems.acceptance_law import MAX_DRAFTS, Laws, Probability, shares_by_class


@dataclass(frozen=True)
class SpeculativeConfig(Config):
    """Every decode verifies draft tokens beside its own, by vLLM's names.

    `acceptance` and `found` are supposed in a simulation. The time that drafting takes is the cost's
    (`batchsim.cost.drafter`). A live run is one of `ngram`, and supposes nothing: it looks up the last
    `prompt_lookup_min` to `prompt_lookup_max` tokens.
    """

    method: DraftMethod
    """How drafts are made."""
    num_speculative_tokens: Annotated[int, Range(1, MAX_DRAFTS)]
    """The most draft tokens that a decode verifies beside its own."""
    acceptance: Laws
    """A law of accepted drafts, or one by request class, in which "" stands for all other classes; or `trace`: for each
    request the probability of each draft in its row of the workload's trace (`columns.acceptance`)."""
    found: Probability = 1.0
    """Part of the steps for which `ngram` finds drafts, which it does only where the text repeats itself."""
    prompt_lookup_min: PositiveInt | None = None
    """Tokens that a live run looks up at least; as `prompt_lookup_max` unless given, 5 without both."""
    prompt_lookup_max: PositiveInt | None = None
    """Tokens that a live run looks up at most; as `prompt_lookup_min` unless given, 5 without both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.positions  # refuses a law that is none
        if self.found != 1 and self.method != "ngram":
            raise ValueError(f"found is {self.found:g}, but {self.method} always drafts. Leave it out")
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if self.method != "ngram" and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)}, but {self.method} looks nothing up. Leave it out")
        if self.lookup is not None and self.lookup.shortest > self.lookup.longest:
            raise ValueError(
                f"prompt_lookup_min {self.lookup.shortest} must be at most prompt_lookup_max {self.lookup.longest}"
            )

    @property
    def positions(self) -> dict[str, tuple[float, ...]]:
        """By request class, "" for all others: for each position the share of steps in which its draft is accepted;
        empty where a trace says it of each request."""
        return shares_by_class(self.acceptance, self.num_speculative_tokens, "num_speculative_tokens")

    @property
    def speculation(self) -> Speculation:
        """What the world, of which the scheduler knows nothing, is supposed to do with drafts."""
        return Speculation(self.method, self.num_speculative_tokens, self.positions, self.found, lookup=self.lookup)

    @property
    def lookup(self) -> PromptLookup | None:
        """The n-grams of method `ngram`; None for others. Source: vllm/config/speculative.py, for the default too."""
        if self.method != "ngram":
            return None
        shortest = self.prompt_lookup_min or self.prompt_lookup_max or 5
        return PromptLookup(self.num_speculative_tokens, shortest, self.prompt_lookup_max or shortest)

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
