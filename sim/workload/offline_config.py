"""What a scenario says of offline jobs: requests that are sent while there is room beside other traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import Duration, PositiveDuration

Users = Annotated[int, Range(1, 1_000_000)]
"""Users of a closed loop: each is an object while the loop runs. Requests in flight of a client likewise."""
MAX_REQUESTS = 20_000_000
"""Requests of a run: about 1 GB of columns; more is a slip of a unit."""
Requests = Annotated[int, Range(1, MAX_REQUESTS)]


@dataclass(frozen=True)
class Offline(Config):
    """A job of requests that wait for room: they are sent while few others are in flight, and give way to these.

    With a window the job has a deadline, by which the jobs of several classes are ordered; what is not done by then
    expires.
    """

    requests: Requests
    """Requests of the job."""
    fill_to: Users
    """Requests in flight, of all classes together, up to which those of the job are sent."""
    at: Duration = 0
    """When the job is there."""
    window: PositiveDuration | None = None
    """Time from then to its deadline."""
    order: Literal["as_drawn", "longest_first", "by_prefix"] = "as_drawn"
    """Which of its requests are sent first: as drawn, those with the longest answers, or one shared prefix after the
    other."""
    gives_way: bool = True
    """Whether its requests are aborted, the latest first, where others make it more than `fill_to`; they are sent again
    with the tokens that they have."""
    urgent_above: Annotated[float, Range(0, 1e9, above=True)] | None = field(default=None, metadata=LEFT_OUT)
    """Output tokens a second: where it would need more to be done by its deadline, it is urgent."""
    urgent_fill_to: Users | None = field(default=None, metadata=LEFT_OUT)
    """`fill_to` while it is urgent."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if (self.urgent_above is None) != (self.urgent_fill_to is None):
            raise ValueError("offline: urgent_above and urgent_fill_to belong together. Write both, or neither.")
        if self.urgent_above is not None and self.window is None:
            raise ValueError("offline: only a job with a deadline is ever urgent. Write window, or drop urgent_above.")


def check_beside(name: str, kind: str, given: Sequence[str], *, alone: bool) -> None:
    """ValueError where the job of class `name` cannot be beside arrivals of this `kind`, or the keys `given`; `alone`:
    all classes are jobs."""
    if kind in ("closed_loop", "all_at_once", "rollout", "trace"):
        raise ValueError(
            f"classes.{name}.offline needs drawn arrivals over time beside it, not {kind}. Write poisson, say."
        )
    for key in given:
        drop = "Write it in the other classes." if key in ("deadline", "patience") else "Drop one of the two."
        raise ValueError(f"classes.{name}.offline cannot be beside {key} of the whole workload. {drop}")
    if alone:
        raise ValueError(f"classes.{name}.offline has no class beside it. Write one with share: 100%.")
