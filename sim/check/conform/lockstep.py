"""Replays ranks that step together and compares them with their recording; its form is `lockstep_form`'s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from batchsim.base.errors import PolicyError, SchedulerStalled
from batchsim.base.units import NS_PER_S
from batchsim.check.conform.compare_steps import (
    FactDifference,
    StepComparison,
    shown_fact,
    unequal_facts,
    unequal_requests,
)
from batchsim.check.conform.fields import BadRecording
from batchsim.check.conform.lockstep_form import DUMMIES, SUMMED, TABLES, RecordedRanks, Row, recorded_ranks
from batchsim.check.conform.observer import Observer, Step
from batchsim.check.conform.recording import Facts
from batchsim.check.conform.replay import RecordedArrivals, WatchedCore, new_engine
from batchsim.check.conform.times import RecordedTimes
from batchsim.drive.fleet.lockstep.balancer import Choice
from batchsim.drive.fleet.lockstep.coordinator import RankLoad
from batchsim.drive.fleet.lockstep.passes import Launched, LockstepCost, Pass
from batchsim.drive.fleet.lockstep.rank import Rank
from batchsim.drive.fleet.lockstep.simulate_ranks import Lockstep
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import EngineEvent, Finished
from batchsim.kernel.types import Arrival

KV_TOLERANCE = 1e-6
"""Of a share of KV blocks in use, a float that may have been rounded; a block is a larger share of any pool."""
MOST_BEYOND = 1000
"""Messages to clients beyond the recorded ones, which differ then, after which a replay is given up."""


class _GoesOnError(Exception):
    """The replay goes on long after the recording has ended."""


# ---- replaying


class _WatchedRank(Rank):
    """A rank that writes down what it does."""

    core: WatchedCore

    def __init__(self, number: int, core: EngineCore, others: _Watched) -> None:
        super().__init__(number, core, others)
        self.steps: list[Step] = []
        self.requests = 0
        self._log = others

    def _ask(self, now_ns: int) -> tuple[Batch | None, int]:
        asked = super()._ask(now_ns)
        throttled = self.counter % self._log.interval != 0
        facts = {"step_counter": self.counter, "wave": self.wave, "throttled": throttled, "pass": None}
        self.core.observer.also(facts)
        return asked

    def launch(self, batch: Batch, launch_ns: int, made: Pass) -> int:
        end_ns = super().launch(batch, launch_ns, made)
        self.core.observer.also({"pass": made.number})
        self.core.observer.launched(launch_ns, end_ns)
        return end_ns

    def launched_nothing(self, now_ns: int) -> None:
        self.core.observer.launched(now_ns, None)

    def processed(self, events: list[EngineEvent], now_ns: int) -> None:
        observer = self.core.observer
        observer.processed(now_ns, [event.request.id for event in events if isinstance(event, Finished)])
        while observer.done:
            self.steps.append(observer.done.popleft())

    def took(self, arrival: Arrival, now_ns: int) -> None:
        self.requests += 1
        self._log.taken_ns[arrival.request.id] = now_ns


class _Watched(Lockstep):
    """Ranks that write down what they do together."""

    def __init__(self, recorded: RecordedRanks, cores: list[WatchedCore]) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in recorded.tables}
        self.taken_ns: dict[int, int] = {}
        first = recorded.ranks[0]
        self._left = len(recorded.tables["published"]) + MOST_BEYOND
        self.interval = first.config.prefill_schedule_interval
        self.watched: list[_WatchedRank] = []
        super().__init__(cores, recorded.law, recorded.plan, RecordedArrivals(first.arrivals), self._rank)

    def _rank(self, number: int, core: EngineCore, others: Lockstep) -> Rank:
        rank = _WatchedRank(number, core, self)
        self.watched.append(rank)
        return rank

    def routed(self, now_ns: int, request_id: int, choice: Choice) -> None:
        rank, loads, in_flight, first = choice
        self.rows["routed"].append((now_ns, request_id, rank, [list(load) for load in loads], in_flight, first))

    def published(self, loads: list[RankLoad] | None, wave: int, is_running: bool) -> None:
        self._left -= 1
        if self._left < 0:
            raise _GoesOnError
        super().published(loads, wave, is_running)

    def heard(self, now_ns: int, loads: list[RankLoad] | None, wave: int, is_running: bool) -> None:
        listed = None if loads is None else [list(load) for load in loads]
        self.rows["published"].append((now_ns, listed, wave, is_running))

    def waved(self, now_ns: int, what: str, wave: int, rank: int) -> None:
        self.rows["waves"].append((now_ns, what, wave, rank))

    def reduced(self, now_ns: int, number: int, unfinished: int) -> None:
        self.rows["waves"].append((now_ns, "sync", number, unfinished))

    def passed(self, made: Pass, launched: Sequence[Launched]) -> None:
        self.rows["passes"].append((*made[:4], list(made.tokens)))
        for i, (batch, launch_ns) in enumerate(launched):
            if batch is None:
                self.rows[f"ranks[{i}].dummies"].append((made.number, launch_ns))


def _replayed(recorded: RecordedRanks) -> _Watched:
    cores: list[WatchedCore] = []
    for rank in recorded.ranks:
        cost = LockstepCost(RecordedTimes(rank.law, (), rank.host_ns))
        core, _ = new_engine(rank, cost)
        core.observer = Observer(core, len(rank.arrivals))
        cores.append(core)
    return _Watched(recorded, cores)


# ---- comparing


@dataclass(frozen=True)
class _Difference:
    """A difference: when, where, and the facts that differ; `around` describes what is near."""

    time_ns: int
    where: str
    facts: tuple[FactDifference, ...] = ()
    around: tuple[str, ...] = field(default=())


def compare_lockstep(path: Path, data: dict[str, Any], policy: str | None, order: str | None) -> StepComparison:
    """Replays the ranks and returns the verdict. BadRecording if they cannot be run as recorded."""
    if order not in (None, "exact"):
        raise BadRecording("lists batches of ranks in the engine's order. Drop --order.")
    recorded = recorded_ranks(data, policy)
    first = recorded.ranks[0]
    replay = _replayed(recorded)
    verdict = partial(StepComparison, path, first.policy, read_when=first.read_when)
    notes = (first.note,) if first.note else ()
    failure = ""
    try:
        replay.run()
    except (SchedulerStalled, PolicyError) as error:
        failure = str(error)
    except _GoesOnError:
        failure = "it goes on long after the recording has ended"
    differences = [*_of_tables(recorded, replay), *_of_steps(recorded, replay), *_of_taken(recorded, replay)]
    count = sum(len(rank.steps) for rank in replay.watched)
    if differences:
        one = min(differences, key=lambda difference: difference.time_ns)
        at = f"({one.time_ns / NS_PER_S:.6f} s)"
        names = ", ".join(fact.name for fact in one.facts)
        text = f"{one.where} differs in {names} {at}" if names else f"{one.where} {at}"
        why = (f"the replay ends early: {failure}",) if failure else ()
        return verdict(count, text, one.facts, (*one.around, *why, *notes))
    if failure:
        return verdict(count, f"after {count} steps of all ranks the next cannot be made: {failure}")
    totals = tuple(_of_totals(recorded, replay))
    if totals:
        names = ", ".join(fact.name for fact in totals)
        return verdict(count, f"all {count} steps are equal, the totals differ in {names}", totals, notes)
    return verdict(count)


def _of_tables(recorded: RecordedRanks, replay: _Watched) -> Iterator[_Difference]:
    """The first difference of each table."""
    for name, theirs in recorded.tables.items():
        columns = TABLES.get(name, DUMMIES)
        ours = [dict(zip(columns, row, strict=True)) for row in replay.rows[name]]
        for i, (here, there) in enumerate(zip(ours, theirs, strict=False)):
            facts = tuple(_unequal_row(here, there))
            if facts:
                yield _Difference(min(_time_of(here), _time_of(there)), f"{name}[{i}]", facts)
                break
        else:
            yield from _of_lengths(name, [_time_of(row) for row in ours], [_time_of(row) for row in theirs])


def _time_of(row: Row) -> int:
    return row.get("time_ns", row.get("launched_ns", 0))


def _of_lengths(name: str, ours: list[int], theirs: list[int]) -> Iterator[_Difference]:
    """The first row, by their times, that one side alone has."""
    count = min(len(ours), len(theirs))
    if len(ours) > count:
        yield _Difference(ours[count], f"{name}[{count}] is here and not in the recording, which has {count}")
    elif len(theirs) > count:
        yield _Difference(theirs[count], f"{name}[{count}] is not here, the recording has {len(theirs)}")


def _unequal_row(here: Row, there: Row) -> Iterator[FactDifference]:
    for name, value in there.items():
        same = _same_loads(here[name], value) if name == "loads" else here[name] == value
        if not same:
            yield FactDifference(name.removesuffix("_ns"), shown_fact(name, here[name]), shown_fact(name, value))


def _same_loads(here: Any, there: Any) -> bool:
    if here is None or there is None or len(here) != len(there):
        return here == there
    return all(a[:2] == b[:2] and abs(a[2] - b[2]) <= KV_TOLERANCE for a, b in zip(here, there, strict=True))


def _of_steps(recorded: RecordedRanks, replay: _Watched) -> Iterator[_Difference]:
    """The first difference of each rank's steps, and of the requests that are settled by them."""
    for i, (theirs, rank) in enumerate(zip(recorded.ranks, replay.watched, strict=True)):
        name = f"ranks[{i}].steps"
        for k, (step, facts) in enumerate(zip(rank.steps, theirs.steps, strict=False)):
            unequal = (*unequal_facts(facts, step.facts, theirs), *unequal_requests(step, theirs))
            if unequal:
                yield _Difference(min(step.facts["called_ns"], _called(facts)), f"{name}[{k}]", unequal)
                break
        else:
            called = [step.facts["called_ns"] for step in rank.steps]
            yield from _of_lengths(name, called, [_called(facts) for facts in theirs.steps])


def _called(facts: Facts) -> int:
    return facts["t_start"][1]


def _of_taken(recorded: RecordedRanks, replay: _Watched) -> Iterator[_Difference]:
    for i, there in recorded.taken_ns.items():
        here = replay.taken_ns.get(i)
        if here != there:
            ours = "never" if here is None else shown_fact("taken_ns", here)
            fact = FactDifference("taken", ours, shown_fact("taken_ns", there))
            yield _Difference(there if here is None else min(here, there), f"per_request.{i}", (fact,))


def _of_totals(recorded: RecordedRanks, replay: _Watched) -> Iterator[FactDifference]:
    ranks = replay.watched
    totals = [rank.core.observer.totals for rank in ranks]
    ours: dict[str, Any] = {
        "requests": sum(rank.requests for rank in ranks),
        "passes": len(replay.rows["passes"]),
        "steps": [len(rank.steps) for rank in ranks],
        "dummies": [len(replay.rows[f"ranks[{i}].dummies"]) for i in range(len(ranks))],
        "waves": sum(row[1] == "wave_complete" for row in replay.rows["waves"]),
        "preemptions": sum(total.preemptions for total in totals),
        "per_rank": [rank.requests for rank in ranks],
        "makespan": max(total.end_ns for total in totals),
    }
    if recorded.totals.keys() - ours.keys():
        each = [rank.core.observer.run_facts() for rank in ranks]
        ours |= {name: sum(facts[name] for facts in each) for name in SUMMED}
    for name, there in recorded.totals.items():
        if ours[name] != there:
            fact = "makespan_ns" if name == "makespan" else name
            yield FactDifference(name, shown_fact(fact, ours[name]), shown_fact(fact, there))
