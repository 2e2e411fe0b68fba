"""KV that passes between engines, as one of them sees it: what it pulls, what it keeps for others, what it notices.

A scheduler with a `KvConnector` says which sequences are to be pulled and which ended ones keep their blocks. The
engine's worker begins pulls as a step is launched, one without tokens too, and looks then which transfers are over; the
scheduler learns of these once that step's results are processed. How long a transfer takes is the affair of a `KvLink`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from batchsim.kernel.batch import Batch
from batchsim.kernel.types import Request, Sequence


@dataclass(slots=True)
class Noticed:
    """The transfers that a worker saw to be over: sequences pulled (`loaded`), those of them whose pull `failed`, and
    sequences of this engine whose KV others have read (`sent`)."""

    loaded: list[Sequence] = field(default_factory=list[Sequence])
    failed: list[Sequence] = field(default_factory=list[Sequence])
    sent: list[Sequence] = field(default_factory=list[Sequence])

    @property
    def is_empty(self) -> bool:
        """Whether no transfer was over."""
        return not (self.loaded or self.sent)


class KvLink(Protocol):
    """The transfers of one engine. Times in ns, of this engine's clock."""

    def pulls(self, request: Request) -> bool:
        """Whether another engine has the KV of the prompt of `request`."""
        ...

    def keeps(self, request: Request) -> bool:
        """Whether another engine will pull the KV of `request` once it has ended here."""
        ...

    def begin(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        """Begins to pull `num_blocks` KV blocks of `seq`."""
        ...

    def keep(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        """Takes note that `seq` ended with `num_blocks` KV blocks, kept until its KV is sent."""
        ...

    def over(self, now_ns: int) -> Noticed:
        """The transfers that are over by `now_ns` and were not returned before."""
        ...


class ForeseenLink(KvLink, Protocol):
    """A link of which it is known when something happens on it."""

    def due_ns(self) -> float:
        """The time in ns before which a look finds nothing that is over, unless a pull begins; inf if none is known."""
        ...


NOTHING = Noticed()


class KvConnector:
    """What passes between a scheduler and its worker.

    `pulling`: (sequence, tokens, blocks) of the pulls that the latest call asked for, until they begin; `hits`:
    (sequence, tokens) that it found in the prefix cache, of these and of others it admitted, in order. `kept` has the
    ended sequences whose blocks are kept, with their number, `abandoned` the ones that ended while their KV is still on
    its way into their blocks; `noticed` is what came with the latest step processed. `leaps`: how steps alike may be
    leapt over: while it is `quiet`, as the `scheduler` lets them be repeated, or not at all ("").
    """

    def __init__(self, link: KvLink) -> None:
        self.link = link
        self.leaps: Literal["", "quiet", "scheduler"] = ""
        self.pulling: list[tuple[Sequence, int, int]] = []
        self.hits: list[tuple[Sequence, int]] = []
        self.kept: dict[Sequence, int] = {}
        self.abandoned: set[Sequence] = set()
        self.noticed = Noticed()
        self._reports: deque[Noticed] = deque()
        self._untold = 0  # of the reports, those of which something is to be told

    def quiet_until_ns(self) -> int:
        """A time in ns: looks at launches before it find nothing new, and begin nothing."""
        return 0

    @property
    def is_busy(self) -> bool:
        """Whether the blocks of any ended request are kept, since transfers read or write them."""
        return bool(self.kept or self.abandoned)

    def before_launch(self, now_ns: int, computed_ns: int) -> int:
        """The step of the scheduler's latest call is to be launched at `now_ns`, while the device computes until
        `computed_ns`; returns when it is, in ns."""
        return now_ns

    def launched(self, now_ns: int, computed_ns: int = 0) -> None:
        """The step of the scheduler's latest call is launched, and the device computes until `computed_ns`: its pulls
        begin, and the worker looks what is over."""
        for seq, _, num_blocks in self.pulling:
            self.link.begin(seq, num_blocks, now_ns)
        self.pulling = []
        self._report(self.link.over(now_ns))

    def _report(self, report: Noticed) -> None:
        self._reports.append(report)
        self._untold += not report.is_empty

    @property
    def is_quiet(self) -> bool:
        """Whether no pull is about to begin, and the scheduler has heard of all that the worker saw."""
        return not (self.pulling or self._untold)

    def leapt(self, num_in_flight: int) -> None:
        """Takes note of launches that were leapt over, whose looks found nothing; `num_in_flight` are not processed."""
        while len(self._reports) < num_in_flight:
            self._reports.append(NOTHING)

    def relaunched(self, now_ns: int) -> None:
        """Takes note of a launch at `now_ns` that was leapt over; a step was processed whose look had found nothing."""
        self._reports.popleft()
        self._report(self.link.over(now_ns))

    def processed(self) -> Noticed:
        """What the worker saw at the launch of the oldest step in flight, which is now processed."""
        self.noticed = self._reports.popleft()
        self._untold -= not self.noticed.is_empty
        return self.noticed


class Connected(Protocol):
    """What a scheduler with a connector offers besides."""

    connector: KvConnector

    def notice(self) -> None:
        """Takes in what the worker saw at the launch of the step that is processed now. By `complete` of a step; by the
        engine where the scheduler's call had nothing to run."""
        ...

    def leapt(self, batches: list[Batch]) -> None:
        """Takes note of a leap, behind which `batches` are in flight, oldest first."""
        ...


def connected(scheduler: object) -> Connected | None:
    """`scheduler` if it has a connector."""
    return cast(Connected, scheduler) if hasattr(scheduler, "connector") else None


def foreseen_link(connected: Connected | None) -> ForeseenLink | None:
    """The link of a scheduler with a connector, if it is known when something happens on it."""
    if connected is None or not hasattr(connected.connector.link, "due_ns"):
        return None
    return cast(ForeseenLink, connected.connector.link)


def keeps_kv(connected: Connected | None) -> bool:
    """Whether an engine has transfers to wait for, with no request left too."""
    return connected is not None and connected.connector.is_busy


NewLink = Callable[[], KvLink]
"""Makes the link of an engine that is about to be made."""
