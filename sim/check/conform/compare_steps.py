"""Compares a replay with its recording and reports the first step that differs, with the state around that step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchsim.base.errors import PolicyError, SchedulerStalled
from batchsim.base.units import NS_PER_S
from batchsim.check.conform.kv_transfers import SETS
from batchsim.check.conform.observer import State, Step
from batchsim.check.conform.recording import ARRIVAL, EXACT, FREE, Facts, Recording
from batchsim.check.conform.replay import Replay

MOST_SHOWN = 8
"""Running or waiting requests that a report lists one by one; of more only the number is given."""
IN_BATCH_ORDER = {"scheduled", "cached", "finished", "wasted", "stale", "ignored"}
"""Facts of a step whose lists are in the order of its batch."""


@dataclass(frozen=True)
class FactDifference:
    """One fact that differs between replay (`here`) and recording, both values as text."""

    name: str
    here: str
    recorded: str


@dataclass(frozen=True)
class StepComparison:
    """A comparison: the steps compared, and the first difference in one line, "" if there is none.

    `differences` are all facts that differ in that step, `around` the lines that describe the state around it. Times
    within `tolerance_ns` of each other count as equal. `order` says in which order the rows of a batch were compared,
    `read_when`, for facts that change within a step, at which moment the recording reads them.
    """

    path: Path
    policy: str
    num_steps: int
    difference: str = ""
    differences: tuple[FactDifference, ...] = ()
    around: tuple[str, ...] = ()
    tolerance_ns: int = 0
    order: str = EXACT
    read_when: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        within = f", times within {self.tolerance_ns / NS_PER_S:g} s" if self.tolerance_ns else ""
        within += {FREE: ", order within a batch not compared", ARRIVAL: ", batches by arrival"}.get(self.order, "")
        lines = [f"{self.path.name}: {self.difference or f'equal, {self.num_steps} steps ({self.policy}){within}'}"]
        for difference in self.differences:
            when = f" ({self.read_when[difference.name]})" if difference.name in self.read_when else ""
            lines += [
                f"  {difference.name}{when}:",
                f"    here      {difference.here}",
                f"    recorded  {difference.recorded}",
            ]
        return "\n".join(lines + [f"  {line}" for line in self.around])


def compare(path: Path, recording: Recording) -> StepComparison:
    """Replays `recording` and returns its verdict. BadRecording if the policy cannot be run with the recorded knobs."""
    comparing = Comparing(path, recording, Replay(recording))
    steps = comparing.replay.steps()
    while True:
        try:
            step = next(steps, None)
        except (SchedulerStalled, PolicyError) as error:
            return comparing.stopped(error)
        if step is None:
            break
        verdict = comparing.step(step)
        if verdict is not None:
            return verdict
    return comparing.end() or comparing.totals() or comparing.equal()


@dataclass
class Comparing:
    """The comparison, step by step, of one engine's `replay` with its `recording`. `name` is the engine's, where a file
    has several. Each method returns the verdict if it is found there, else None."""

    path: Path
    recording: Recording
    replay: Replay
    name: str = ""
    count: int = 0
    _last: Step | None = None

    def __post_init__(self) -> None:
        self._places = {arrival.request.id: i for i, arrival in enumerate(self.recording.arrivals)}

    def unequal(
        self, what: str, around: tuple[str, ...] = (), differences: tuple[FactDifference, ...] = ()
    ) -> StepComparison:
        recording = self.recording
        lines = (*around, recording.note) if recording.note else around
        what = f"{self.name}: {what}" if self.name else what
        read_when = recording.read_when
        return StepComparison(self.path, recording.policy, self.count, what, differences, lines, read_when=read_when)

    def stopped(self, error: Exception) -> StepComparison:
        """The verdict where no further step can be made."""
        at = f"{self.recording.steps_name}[{self.count}]"
        return self.unequal(f"step {self.count + 1} ({at}) cannot be made: {error}")

    def step(self, step: Step) -> StepComparison | None:
        """Compares the next step."""
        recording, replay = self.recording, self.replay
        self.count = count = self.count + 1
        if count > len(recording.steps):
            what = f"step {count} is made where the recording has ended after {count - 1}"
            here = f"step {count} here: {_summary(step)}"
            return self.unequal(what, (here, *_around(step.before, replay, self._last, count - 1)))
        facts = _by_arrival(step.facts, self._places) if recording.order == ARRIVAL else step.facts
        differences = (*unequal_facts(recording.steps[count - 1], facts, recording), *unequal_requests(step, recording))
        if differences:
            names = ", ".join(difference.name for difference in differences)
            at = f"({recording.steps_name}[{count - 1}], {step.facts['called_ns'] / NS_PER_S:.6f} s)"
            around = _around(step.before, replay, self._last, count - 1)
            return self.unequal(f"step {count} differs in {names} {at}", around, differences)
        self._last = step
        return None

    def end(self) -> StepComparison | None:
        """Compares the number of steps, once the replay is over."""
        if self.count == len(self.recording.steps):
            return None
        what = f"ends after {self.count} steps, the recording has {len(self.recording.steps)}"
        return self.unequal(what, _around(None, self.replay, self._last, self.count))

    def totals(self) -> StepComparison | None:
        """Compares the totals, once all steps are equal."""
        differences = tuple(unequal_facts(self.recording.totals, self.replay.observer.run_facts(), self.recording))
        if not differences:
            return None
        names = ", ".join(difference.name for difference in differences)
        return self.unequal(f"all {self.count} steps are equal, the totals differ in {names}", (), differences)

    def equal(self) -> StepComparison:
        recording = self.recording
        return StepComparison(
            self.path, recording.policy, self.count, tolerance_ns=recording.tolerance_ns, order=recording.order
        )


def _by_arrival(facts: dict[str, Any], places: dict[int, int]) -> dict[str, Any]:
    """`facts` with the batch's rows sorted by arrival, prompts before decodes; `places` is each request's place."""
    ids = [i for i, _ in facts["scheduled"]]
    at = {i: (phase == "decode", places[i]) for i, phase in zip(ids, facts["phase"], strict=True)}
    return facts | {
        name: sorted(facts[name], key=lambda row: at[row[0] if isinstance(row, list) else row])
        for name in IN_BATCH_ORDER & facts.keys()
    }


def unequal_requests(step: Step, recording: Recording) -> Iterator[FactDifference]:
    """Differences in the requests' facts that are final with this step, such as the time of the first token."""
    for i, ours in step.requests:
        for one in unequal_facts(recording.requests.get(i, {}), ours, recording):
            yield FactDifference(f"{one.name} of request {i}", one.here, one.recorded)


def unequal_facts(recorded: Facts, ours: dict[str, Any], recording: Recording) -> Iterator[FactDifference]:
    """The recorded facts that differ from the replay's `ours`; a fact that `ours` lacks is not compared."""
    for name, (fact, value) in recorded.items():
        if fact not in ours:
            continue
        here = ours[fact]
        if fact in SETS or (recording.order == FREE and fact in IN_BATCH_ORDER):
            here, value = sorted(here), sorted(value)
        if not _same(fact, here, value, recording.tolerance_ns):
            yield FactDifference(name, shown_fact(fact, here), shown_fact(fact, value))


def _same(fact: str, ours: Any, recorded: Any, tolerance_ns: int) -> bool:
    if not fact.endswith("_ns") or ours is None or recorded is None:
        return ours == recorded
    if not isinstance(ours, list):
        ours, recorded = [ours], [recorded]
    if None in (*ours, *recorded):
        return ours == recorded
    return len(ours) == len(recorded) and all(abs(a - b) <= tolerance_ns for a, b in zip(ours, recorded, strict=True))


def shown_fact(fact: str, value: Any) -> str:
    """A value in words; seconds where the name of the `fact` ends in _ns."""
    if not fact.endswith("_ns") or value is None:
        return str(value)
    if isinstance(value, list):
        return ", ".join(shown_fact(fact, one) for one in value) or "none"
    return f"{value / NS_PER_S:.9f}".rstrip("0") + " s"


def _summary(step: Step) -> str:
    facts = step.facts
    parts = [f"scheduled {facts['scheduled']}"]
    parts += [f"{name} {facts[name]}" for name in ("cached", "preempted", "finished") if facts.get(name)]
    parts += [f"free blocks {facts['free_blocks_sched']} once scheduled"]
    parts += [f"{facts['free_blocks_processed']} when next asked"] if "free_blocks_processed" in facts else []
    return ", ".join(parts)


def _around(before: State | None, replay: Replay, last: Step | None, index: int) -> tuple[str, ...]:
    """Lines on the replay's state before step `index` (from 0), and on the step before, the last one that is equal."""
    lines = []
    if before is not None:
        running = [f"{i} ({computed} of {known})" for i, computed, known in before.running]
        waiting = [str(i) for i in before.waiting]
        lines.append(f"before it: free blocks: {before.free_blocks}")
        lines.append(f"           {len(running)} running (computed of known tokens): {_listed(running)}")
        lines.append(f"           {len(waiting)} waiting, by arrival: {_listed(waiting)}")
        head = replay.observer.blocked_head()
        lines += [f"           last head of the queue that was blocked: {head}"] if head else []
    if replay.rejected:
        lines.append(f"rejected here so far: {replay.rejected}: {replay.why_rejected()}")
    if last is not None:
        lines.append(f"step {index}, the last equal one: {_summary(last)}")
    return tuple(lines)


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return (", ".join(names[:MOST_SHOWN]) or "none") + more
