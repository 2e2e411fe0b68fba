"""Offline jobs beside interactive requests: their client fills what these leave free, and gives way as they come.

Rule: of all classes together at most `fill_to` requests are in flight on account of offline ones. While fewer are, the
next one of the job with the earliest deadline is sent; where interactive arrivals make it more, the offline requests
sent last are aborted, and sent again with the tokens that they have. A job whose remaining output tokens, over the time
to its deadline, are more a second than `urgent_above` fills up to `urgent_fill_to`. What is not done at its deadline
expires.

Simplifications: the client sees what is in flight, not the queues and the KV of engines, so `fill_to` stands for what
these hold within the SLO; order by length knows the true lengths.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.kernel.events import Ended, Finished, Pruned, Reaction
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.workload.arrivals import check_count
from batchsim.workload.offline_config import Offline
from batchsim.workload.open_loop import ClientOfList, OpenWorkload
from batchsim.workload.request_columns import Describe, RequestColumns
from batchsim.workload.texts import answer_to, own_text, shared_text


@dataclass(eq=False)
class Piece:
    """A request of an offline job, at `row` of its columns: `made` of its tokens so far, in `parts` of the requests
    that made them. `outcome` is "" until it is `done`, `expired` or `failed`."""

    job: Job
    row: int
    made: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    request_id: int = -1
    outcome: str = ""
    done_ns: int = -1
    aborts: int = 0


@dataclass(eq=False)
class Job:
    """The requests of an offline class, by `name`. `waiting` is a heap of (place in the order, piece's number)."""

    name: str
    config: Offline
    requests: RequestColumns
    pieces: list[Piece] = field(default_factory=list[Piece])
    waiting: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    tokens_left: int = 0

    @property
    def deadline_ns(self) -> float:
        """When what is not done expires; inf without a window."""
        return inf if self.config.window is None else self.config.at + self.config.window

    def is_urgent(self, now_ns: int) -> bool:
        """Whether the tokens left need a higher rate than the one stated to be done by the deadline."""
        above = self.config.urgent_above
        return above is not None and self.tokens_left * NS_PER_S > above * (self.deadline_ns - now_ns)

    def fill_to(self, now_ns: int) -> int:
        """Requests in flight, of all classes, up to which its own are sent."""
        return (self.config.urgent_fill_to or 0) if self.is_urgent(now_ns) else self.config.fill_to


def order_of(config: Offline, requests: RequestColumns) -> list[int]:
    """The rows of a job in the order of sending: as drawn, by longest output first, or prefix by prefix."""
    rows = np.arange(len(requests))
    if config.order == "longest_first":
        rows = np.lexsort((rows, -requests.output_tokens))
    elif config.order == "by_prefix":
        if not (requests.group >= 0).any():
            raise ScenarioError(
                "workload: offline: order by_prefix needs prompts that share a prefix, and no request of the job has"
                " one. Write shared_prefix, or another order."
            )
        rows = np.lexsort((rows, requests.group))
    return rows.tolist()


@dataclass(frozen=True)
class OfflineLog:
    """What became of the offline requests of a run; `prefilled_again_tokens` were computed again after an abort."""

    jobs: tuple[Job, ...]
    prefilled_again_tokens: int

    @property
    def pieces(self) -> list[Piece]:
        """The requests of all jobs."""
        return [piece for job in self.jobs for piece in job.pieces]


class OfflineWorkload(ClientOfList):
    """Interactive requests as `listed` has them, and offline jobs. Ids of the latter go on behind, one a sending."""

    def __init__(self, listed: OpenWorkload, jobs: list[tuple[str, Offline, RequestColumns]]) -> None:
        super().__init__(listed)
        self._drawn = jobs
        self._arrivals_ns = np.sort(listed.arrival_ns).tolist()
        self._begin()

    def _begin(self) -> None:
        self._jobs: list[Job] = []
        for name, config, requests in self._drawn:
            job = Job(name, config, requests)
            job.pieces = [Piece(job, row) for row in range(len(requests))]
            job.waiting = [(place, row) for place, row in enumerate(order_of(config, requests))]
            heapify(job.waiting)
            job.tokens_left = int(requests.output_tokens.sum())
            self._jobs.append(job)
        self._jobs.sort(key=lambda job: job.deadline_ns)
        self._place = {id(job): {row: place for place, row in job.waiting} for job in self._jobs}
        self._sent: list[Piece] = []  # by id, less those of interactive requests
        self._in_flight: dict[Piece, None] = {}  # in order of sending
        self._aborting: set[Piece] = set()
        self._num_ended = self._prefilled_again = 0  # interactive requests
        self._due_ns: int | None = 0  # when something may change without an answer
        self._asked_ns: int | None = 0  # the last time asked for
        self._reacts: tuple[list[Arrival], list[int]] = ([], [])

    # ---- what drivers call

    def arrivals(self) -> Iterator[Arrival]:
        """The interactive requests by (arrival_ns, id). Begins anew, whatever was sent before."""
        self._begin()
        yield from self.listed.arrivals()

    def ended(self, event: Ended, now_ns: int) -> Reaction:
        """What follows on the end of a request of any class."""
        self._advance(now_ns - 1)
        number = event.request.id - len(self._arrivals_ns)
        if number < 0:
            self._num_ended += 1
        else:
            self._note(self._sent[number], event, now_ns)
        self._settle(now_ns)
        return self._reaction(now_ns)

    def called(self, now_ns: int) -> Reaction:
        """What follows on the arrival of an interactive request, the start of a job or its deadline."""
        self._advance(now_ns)
        return self._reaction(now_ns)

    def _advance(self, limit_ns: int) -> None:
        """Does what is due up to `limit_ns`, at its own times."""
        while self._due_ns is not None and self._due_ns <= limit_ns:
            self._settle(self._due_ns)
            self._due_ns = self._next_ns(self._due_ns)

    def _reaction(self, now_ns: int) -> Reaction:
        (arrivals, given_up), self._reacts = self._reacts, ([], [])
        if self._due_ns is None:
            self._due_ns = self._next_ns(now_ns)
        call_ns = self._due_ns if self._due_ns != self._asked_ns else None
        self._asked_ns = self._due_ns
        return Reaction(tuple(arrivals), tuple(given_up), call_ns)

    def _next_ns(self, now_ns: int) -> int | None:
        """When something may change without an answer: an arrival, a job's start or its deadline."""
        if not self._in_flight and not any(job.waiting for job in self._jobs):
            return None
        at = bisect_right(self._arrivals_ns, now_ns)
        times: list[float] = [job.config.at for job in self._jobs] + [job.deadline_ns for job in self._jobs]
        times = [each for each in times if now_ns < each < inf] + self._arrivals_ns[at : at + 1]
        return int(min(times)) if times else None

    def acceptance(self, request: Request) -> float:
        """The probability that a draft token is right where the ones before it are; NaN where no trace says so."""
        number = request.id - len(self._arrivals_ns)
        return self.listed.acceptance(request) if number < 0 else float("nan")

    def true_output_tokens(self, request: Request) -> int:
        """The true output length in tokens, hidden from schedulers."""
        number = request.id - len(self._arrivals_ns)
        if number < 0:
            return self.listed.true_output_tokens(request)
        piece = self._sent[number]
        before = sum(made for part, made in piece.parts if part < request.id)
        return int(piece.job.requests.output_tokens[piece.row]) - before

    # ---- what reports ask for

    @property
    def log(self) -> OfflineLog:
        """What became of the offline requests, as far as the run is."""
        return OfflineLog(tuple(self._jobs), self._prefilled_again)

    @property
    def all_at_once(self) -> bool:
        return False

    @property
    def num_offered(self) -> int | None:
        return None

    @property
    def mean_output_tokens(self) -> dict[str, float]:
        """The mean true output in tokens, by class name."""
        drawn = {name: float(requests.output_tokens.mean()) for name, _, requests in self._drawn}
        return self.listed.mean_output_tokens | drawn

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            *self.listed.notes,
            *(f"{len(requests):,} offline requests of class {name} beside" for name, _, requests in self._drawn),
        )

    @property
    def describe(self) -> Describe:
        text = f"{self.listed.describe['text']}; {sum(len(each) for _, _, each in self._drawn):,} offline requests"
        return self.listed.describe | {"text": text}

    # ---- the client of the jobs

    def _settle(self, now_ns: int) -> None:
        """Lets expire what is late, gives way to interactive requests, and sends what there is room for."""
        for job in self._jobs:
            if job.deadline_ns <= now_ns:
                self._expire(job)
        interactive = bisect_right(self._arrivals_ns, now_ns) - self._num_ended
        staying = [piece for piece in self._in_flight if piece not in self._aborting]
        for piece in reversed(staying):
            if interactive + len(staying) <= piece.job.fill_to(now_ns) or not piece.job.config.gives_way:
                continue
            staying.remove(piece)
            self._abort(piece)
        for job in self._jobs:
            while job.waiting and job.config.at <= now_ns and interactive + len(self._in_flight) < job.fill_to(now_ns):
                self._send(job.pieces[heappop(job.waiting)[1]], now_ns)

    def _expire(self, job: Job) -> None:
        for _, row in job.waiting:
            job.pieces[row].outcome = "expired"
        job.waiting = []
        for piece in [each for each in self._in_flight if each.job is job and not each.outcome]:
            piece.outcome = "expired"
            self._abort(piece)

    def _abort(self, piece: Piece) -> None:
        if piece not in self._aborting:
            self._aborting.add(piece)
            self._reacts[1].append(piece.request_id)

    def _send(self, piece: Piece, now_ns: int) -> None:
        requests, row, number = piece.job.requests, piece.row, len(self._arrivals_ns) + len(self._sent)
        group, shared = int(requests.group[row]), int(requests.group_tokens[row])
        text = [shared_text(group, shared)] if group >= 0 else []
        first = piece.parts[0][0] if piece.parts else number  # its own text is that of its first sending
        text.append(own_text(first, int(requests.prompt_tokens[row]) - shared))
        text += [answer_to(part, made) for part, made in piece.parts]
        request_class, prompt, output, cap, *others = (int(column[row]) for column in requests.carried)
        prompt, output, cap = prompt + piece.made, output - piece.made, cap - piece.made
        self._prefilled_again += prompt if piece.made else 0
        delay_ns = self.frontend.request + self.frontend.per_prompt_token * prompt
        piece.request_id = number
        self._sent.append(piece)
        self._in_flight[piece] = None
        carried = (request_class, prompt, output, cap, *others)
        tokens = TokenIds.of(text)
        self._reacts[0].append(self.source.arrival(number, now_ns, now_ns + delay_ns, *carried, tokens=tokens))

    def _note(self, piece: Piece, event: Ended, now_ns: int) -> None:
        job, made = piece.job, event.output_tokens
        del self._in_flight[piece]
        self._aborting.discard(piece)
        piece.made += made
        job.tokens_left -= made
        if made:
            piece.parts.append((event.request.id, made))
        if piece.outcome:
            return
        if isinstance(event, Finished) or piece.made >= int(job.requests.output_tokens[piece.row]):
            piece.outcome, piece.done_ns = "done", now_ns
        elif isinstance(event, Pruned):
            piece.aborts += 1
            heappush(job.waiting, (self._place[id(job)][piece.row], piece.row))
        else:
            piece.outcome = "failed"


def with_offline(listed: OpenWorkload) -> OpenWorkload | OfflineWorkload:
    """`listed` with the offline jobs of its classes beside; itself where there are none."""
    source = listed.source
    jobs = []
    for index, (name, traffic) in enumerate(zip(source.names, source.classes, strict=True)):
        if traffic.offline is not None:
            count = traffic.offline.requests
            check_count(count + len(listed.sent_ns))
            drawn = source.draw(count, user=index + 1, request_class=np.full(count, index))
            jobs.append((name, traffic.offline, drawn))
    return OfflineWorkload(listed, jobs) if jobs else listed
