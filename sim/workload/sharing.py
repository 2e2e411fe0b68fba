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
    """Prompts begin with one of several texts, as system prompts do.

    The law of prompt lengths, or the trace, gives what follows. Group k of 1, 2, ... is drawn with a chance in
    proportion to k^-zipf.
    """

    groups: Groups
    """Number of texts."""
    added_tokens: PositiveInt
    """Tokens of each text: a prompt is as much longer than the law or the trace has it."""
    zipf: Exponent = 0.0
    """Exponent of how unevenly prefixes are used; 0: all alike."""

    def drawn(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """The group, from 0, that each of `uniform` draws, random numbers in [0, 1)."""
        return zipf_drawn(uniform, self.groups, self.zipf)


def zipf_drawn(uniform: NDArray[np.float64], count: int, exponent: float) -> NDArray[np.int64]:
    """The number from 0 below `count` that each of `uniform` draws, random numbers in [0, 1): k with a chance in
    proportion to (k + 1)^-exponent."""
    chances = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    edges = np.cumsum(chances / chances.sum())[:-1]
    return np.searchsorted(edges, uniform, side="right")


@dataclass(frozen=True)
class Sessions(Config):
    """Conversations: a turn's prompt is the prompt before, its answer, and new text of the drawn prompt length.

    A turn whose prompt and output would exceed max_model_len is not sent: the session ends before it. The answer in a
    later prompt is the whole true output, even where its client gave up, so that prompts are the same under every
    policy. In a closed loop a user holds one session after the other, thinks as `arrivals` says, and stays in one
    class. Other arrivals are those of sessions, at the rate that makes `mean_rate` the rate of all turns once sessions
    end as often as they begin, and a session is of one class.
    """

    turns: Law
    """The law of the number of turns."""
    think_time: Duration | None = None
    """Mean time from an answer to the next turn; not in a closed loop, where `arrivals` says it."""
    think_kind: Literal["constant", "exponential"] | None = None
    """How times to think are drawn: all alike, or exponential."""


def check_sessions(sessions: Sessions, kind: str, requests: int | None, *, shared_list: bool | None) -> None:
    """ValueError where `sessions` cannot come by arrivals of this `kind`, of which there are `requests`, or do not say
    what these need; `shared_list`: whether the users of a closed loop take from one list, None in no such loop."""
    if kind in ("trace", "all_at_once"):
        raise ValueError(f"sessions need arrivals over time that are drawn, not {kind}. Write poisson, say.")
    if shared_list is not None:
        if shared_list:
            raise ValueError("arrivals.shared_list: turns of a session belong to one user. Drop one of the two.")
        if sessions.think_time is not None or sessions.think_kind is not None:
            raise ValueError("sessions.think_time is for open arrivals. Users think as arrivals.think_time says.")
        return
    if sessions.think_time is None:
        raise ValueError(f"sessions with {kind} arrivals need think_time, from an answer to the next turn.")
    if requests is not None:
        raise ValueError(f"sessions with {kind} arrivals end with a duration, not with a number of requests.")
