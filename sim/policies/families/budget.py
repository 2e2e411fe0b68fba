"""The knobs of policies that fill every step up to a number of sequences and of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchsim.base.ranges import PositiveInt
from batchsim.kernel.policy_config import PolicyConfig, Traits

_NO_CAP = 1 << 62


@dataclass(frozen=True)
class BudgetConfig(PolicyConfig):
    """Knobs."""

    max_num_seqs: PositiveInt
    """The most sequences that run at once."""
    max_num_batched_tokens: PositiveInt | None
    """The most tokens of a step; null: no cap."""
    chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps."""
    order: Literal["decode_first", "prefill_first"] = "decode_first"
    """Whether decodes or prompts have a step's tokens first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # All running sequences may decode in one step, a token each.
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs"
                f" {self.max_num_seqs}, or null for no cap"
            )

    @property
    def budget(self) -> int:
        """The most tokens of a step."""
        return _NO_CAP if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            knobs=("max_num_seqs", "max_num_batched_tokens"),
        )
