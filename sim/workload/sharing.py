"""What a scenario says of prompts that begin alike: common prefixes, and sessions whose context grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sim.units import Duration
from sim.workload.laws import MAX_TOKENS, STRICT, Law

MAX_GROUPS = 10**6  # a table of chances is held of them
MAX_EXPONENT = 10.0  # at 10 all but a thousandth falls to the first group already


@dataclass(frozen=True)
class SharedPrefix:
    """Prompts begin with one of `groups` texts of `added_tokens` tokens, as system prompts do.

    The law of prompt lengths, or the trace, gives what follows: a prompt is `added_tokens` longer than that. Group k of
    1, 2, ... is drawn with a chance in proportion to k^-zipf; 0 makes all equally likely.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    groups: int
    added_tokens: int
    zipf: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= MAX_GROUPS:
            raise ValueError(f"shared_prefix.groups is {self.groups}. It must be from 1 to {MAX_GROUPS}.")
        if not 1 <= self.added_tokens <= MAX_TOKENS:
            raise ValueError(f"shared_prefix.added_tokens is {self.added_tokens}. It must be from 1 to {MAX_TOKENS}.")
        if not 0 <= self.zipf <= MAX_EXPONENT:
            raise ValueError(f"shared_prefix.zipf is {self.zipf:g}. It must be from 0 to {MAX_EXPONENT:g}.")

    def drawn(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """The groups, from 0, for numbers uniform in [0, 1)."""
        chances = np.arange(1, self.groups + 1, dtype=np.float64) ** -self.zipf
        edges = np.cumsum(chances / chances.sum())[:-1]
        return np.searchsorted(edges, uniform, side="right")


@dataclass(frozen=True)
class Sessions:
    """Conversations: a turn's prompt is the prompt before, its answer, and new text of the drawn prompt length.

    `turns` is the law of their number. A turn whose prompt and output would exceed max_model_len is not sent: the
    session ends before it. The answer in a later prompt is the whole true output, even where its client gave up, so
    that prompts are the same under every policy. In a closed loop a user holds one session after the other, thinks as
    `arrivals` says, and stays in one class. Other arrivals are those of sessions, so many that `mean_rate` is the rate
    of all turns once sessions end as often as they begin; a turn follows the answer to the one before after
    `think_time`, and a session is of one class.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    turns: Law
    think_time: Duration | None = None
    think_kind: Literal["constant", "exponential"] | None = None
