"""What a scenario says of prompts that begin alike: common prefixes, and sessions whose context grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from batchsim.base.later import np
from batchsim.base.ranges import Config, PositiveInt, Range
from batchsim.base.units import Duration
from batchsim.workload.laws import Law

if TYPE_CHECKING:
    from numpy.typing import NDArray

Groups = Annotated[int, Range(1, 1_000_000)]
"""Groups of prompts that begin alike; a table holds the chance of each."""
Exponent = Annotated[float, Range(0, 10)]
"""Zipf exponent of the groups: at 10 all but a thousandth of the prompts fall to the first group already."""


@dataclass(frozen=True)
class SharedPrefix(Config):
    """Prompts begin with one of `groups` texts of `added_tokens` tokens, as system prompts do.

    The law of prompt lengths, or the trace, gives what follows: a prompt is `added_tokens` longer than that. Group k of
    1, 2, ... is drawn with a chance in proportion to k^-zipf; 0 makes all equally likely.
    """

    groups: Groups
    added_tokens: PositiveInt
    zipf: Exponent = 0.0

    def drawn(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """The group, from 0, that each of `uniform` draws, random numbers in [0, 1)."""
        chances = np.arange(1, self.groups + 1, dtype=np.float64) ** -self.zipf
        edges = np.cumsum(chances / chances.sum())[:-1]
        return np.searchsorted(edges, uniform, side="right")


@dataclass(frozen=True)
class Sessions(Config):
    """Conversations: a turn's prompt is the prompt before, its answer, and new text of the drawn prompt length.

    `turns` is the law of their number. A turn whose prompt and output would exceed max_model_len is not sent: the
    session ends before it. The answer in a later prompt is the whole true output, even where its client gave up, so
    that prompts are the same under every policy. In a closed loop a user holds one session after the other, thinks as
    `arrivals` says, and stays in one class. Other arrivals are those of sessions, at the rate that makes `mean_rate`
    the rate of all turns once sessions end as often as they begin; a turn follows the answer to the one before after
    `think_time`, and a session is of one class.
    """

    turns: Law
    think_time: Duration | None = None
    think_kind: Literal["constant", "exponential"] | None = None
