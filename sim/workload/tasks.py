"""Tasks of several requests: stages that fan out into requests side by side and join before the next is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.kernel.tokens import Segment, TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.workload.arrivals import arrival_times_ns, check_count
from batchsim.workload.laws import Law, draw_tokens
from batchsim.workload.open_loop import OpenWorkload
from batchsim.workload.processes import Process, process_name
from batchsim.workload.replayed_sessions import Links, ReplayedSessions
from batchsim.workload.request_columns import RequestColumns, RequestSampler, mean_lengths
from batchsim.workload.task_config import Tasks
from batchsim.workload.texts import answer_to, own_text, shared_text
from batchsim.workload.traces.arrival_stats import describe_arrivals
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_rows import Ints
from batchsim.workload.workload_config import WorkloadConfig


@dataclass(frozen=True)
class Branches:
    """The place of each request in its task, by place: the number of its stage, its level, and the request above it.

    `above` is a place; -1 of the first level. `ranges` has the places of each stage, `leaves` those of its last level.
    """

    stage: tuple[int, ...]
    level: tuple[int, ...]
    above: tuple[int, ...]
    ranges: tuple[range, ...]
    leaves: tuple[range, ...]

    @classmethod
    def of(cls, tasks: Tasks) -> Branches:
        """The places of a task's requests: stage by stage, level by level."""
        stages: list[int] = []
        levels: list[int] = []
        above: list[int] = []
        ranges: list[range] = []
        leaves: list[range] = []
        for number, stage in enumerate(tasks.stages):
            begin = len(stages)
            level_above = range(0)
            for level, count in enumerate(stage.levels):
                first = len(stages)
                stages += [number] * count
                levels += [level] * count
                above += [-1] * count if not level else [level_above[i // stage.fan_out] for i in range(count)]
                level_above = range(first, first + count)
            ranges.append(range(begin, len(stages)))
            leaves.append(level_above)
        return cls(tuple(stages), tuple(levels), tuple(above), tuple(ranges), tuple(leaves))

    def path(self, place: int) -> list[int]:
        """The places of the tree from its first level down to `place`."""
        places = [place]
        while (place := self.above[place]) >= 0:
            places.append(place)
        return places[::-1]


@dataclass
class TaskWorkload(ReplayedSessions):
    """The requests of tasks, task by task and place by place of `branches`; request id = row.

    `shared_tokens[i]` of row i's prompt are the new text that its stage shares; `succeeds[i]`: its answer, once it
    finishes, makes the others of its stage needless. What is sent after the window's end belongs to tasks that began
    within it; it is run, and no part of the requests measured.
    """

    tasks: Tasks = None  # type: ignore[assignment]
    branches: Branches = None  # type: ignore[assignment]
    shared_tokens: Ints = None  # type: ignore[assignment]
    succeeds: NDArray[np.bool_] = None  # type: ignore[assignment]
    _winner: dict[int, int] = field(default_factory=dict[int, int])  # by the first row of a stage of a task
    _ended: set[int] = field(default_factory=set[int])  # rows of stages that may be pruned

    @property
    def num_offered(self) -> int | None:  # type: ignore[override]
        return None

    @property
    def window_ns(self) -> tuple[int, int]:
        return self.listed.window_ns

    @property
    def task_of(self) -> Ints:
        """The number of each request's task, by request id."""
        return np.arange(len(self.listed.sent_ns)) // self.tasks.num_requests

    @property
    def prunable(self) -> NDArray[np.bool_]:
        """Which requests may be pruned, or never be sent, by request id."""
        of_task = [self.tasks.stages[stage].success is not None for stage in self.branches.stage]
        return np.tile(np.array(of_task, bool), len(self.listed.sent_ns) // len(of_task))

    def arrivals(self) -> Iterator[Arrival]:
        """The first requests of every task, by (arrival_ns, id). Begins anew, whatever was sent before."""
        self._winner.clear()
        self._ended.clear()
        yield from super().arrivals()

    def pruned_by(self, request: Request) -> tuple[int, ...]:
        """The others of the stage of `request`, which has finished, that were sent and have not ended, where its answer
        is the first to succeed; none otherwise."""
        row = request.id
        rows = self._stage_of(row)
        if not self.succeeds[row] or rows[0] in self._winner:
            return ()
        self._winner[rows[0]] = row
        return tuple(each for each in rows if each != row and each in self._sent_ns and each not in self._ended)

    def responded(self, request: Request, now_ns: int) -> tuple[Arrival, ...]:
        """The requests that wait for `request` alone by now, which ended at `now_ns`: those of the next stage where the
        stage is joined."""
        row = request.id
        number = self.branches.stage[row % self.tasks.num_requests]
        if self.tasks.stages[number].success is None:
            return super().responded(request, now_ns)
        rows = self._stage_of(row)
        self._ended.add(row)
        winner = self._winner.get(rows[0])
        if winner is None:
            return super().responded(request, now_ns)
        if winner != row or number + 1 == len(self.tasks.stages):
            return ()
        following = self._places(row, self.branches.ranges[number + 1])
        first_level = [each for each in following if not self.branches.level[each % self.tasks.num_requests]]
        return tuple(self._sent(each, self._due_ns(each, now_ns + self.frontend.per_chunk)) for each in first_level)

    def _stage_of(self, row: int) -> range:
        """The rows of the stage that `row` is of."""
        return self._places(row, self.branches.ranges[self.branches.stage[row % self.tasks.num_requests]])

    def _places(self, row: int, places: range) -> range:
        """The rows of these places in the task of `row`."""
        first = int(self.links.root[row])
        return range(first + places.start, first + places.stop)

    def _text(self, row: int) -> TokenIds:
        """The prompt of `row`: its group's text, the stages before that are held with their answers, its stage's text,
        the prompts and answers above it in the stage's tree, and its own."""
        requests, first = self.listed.requests, int(self.links.root[row])
        group, place = int(requests.group[row]), row - first
        segments = [shared_text(group, int(requests.group_tokens[row]))] if group >= 0 else []
        number = self.branches.stage[place]
        for stage, places in zip(self.tasks.stages[:number], self.branches.ranges[:number], strict=True):
            if stage.is_held:
                segments += self._spent(first, places.start, list(places))
        *above, last = self.branches.path(place)
        begin = self.branches.ranges[number].start
        segments += [*self._spent(first, begin, above), self._own(first, begin, last)]
        return TokenIds.of([segment for segment in segments if segment[2]])

    def _spent(self, first: int, begin: int, places: list[int]) -> list[Segment]:
        """The text that the stage which begins at `begin` shares, and the new text and the answers at `places`."""
        segments = [own_text(first + begin, int(self.shared_tokens[first + begin]))]
        for place in places:
            answer = int(self.listed.requests.output_tokens[first + place])
            segments += self._own(first, begin, place), answer_to(first + place, answer)
        return segments

    def _own(self, first: int, begin: int, place: int) -> Segment:
        """The new text of the request at `place` alone. That of a stage's first one goes on where the stage's ends."""
        row = first + place
        own = int(self.listed.requests.own_tokens[row])
        stream, _, _ = own_text(row, own)
        return stream, int(self.shared_tokens[row]) if place == begin else 0, own


def build_tasks(
    config: WorkloadConfig, tasks: Tasks, process: Process, source: RequestSampler, seed: int
) -> TaskWorkload:
    """The workload of a config whose `tasks` begin by `process`. ScenarioError where too many would."""
    assert config.duration is not None, "checked by the config"
    each = tasks.num_requests
    try:
        start_ns = arrival_times_ns(replace(process, mean_rate=process.mean_rate / each), seed, config.duration, None)
    except ValueError as error:
        raise ScenarioError(f"workload: of tasks the {error}") from None
    count = len(start_ns)
    check_count(count * each)
    classes = source.classes_of(count)
    drawn = source.draw(count * each, request_class=np.repeat(classes, each))
    branches = Branches.of(tasks)
    requests, shared_tokens = _grown(tasks, branches, source, drawn, seed, config.prompt_scale)
    requests = replace(requests, priority=_values(tasks, branches, requests.priority, seed))
    sent_ns = np.repeat(start_ns, each)
    stats, mean_rate = describe_arrivals(start_ns), process.mean_rate
    listed = OpenWorkload(
        sent_ns=sent_ns,
        arrival_ns=sent_ns + (config.frontend.request + config.frontend.per_prompt_token * requests.prompt_tokens),
        requests=requests,
        source=source,
        window_ns=(config.warmup, config.duration),
        all_at_once=False,
        notes=(
            f"{mean_rate / each:.3g} tasks/s begin, for {mean_rate:g} requests/s at {each} requests a task; all that"
            " belongs to them is sent",
            *source.notes(requests, f"{len(requests):,} requests"),
        ),
        describe={
            "kind": process.kind,
            "text": f"{process_name(process.kind)} arrivals of {count:,} tasks, {_shape(tasks)} requests each",
            "tasks": count,
            "tasks_rps": stats.rate_rps,
            "cv": stats.cv,
            "trace": None,
            **mean_lengths(requests),
        },
        frontend=config.frontend,
        seed=seed,
    )
    return TaskWorkload(
        listed,
        _links(tasks, branches, count, seed),
        by_tree=True,
        tasks=tasks,
        branches=branches,
        shared_tokens=shared_tokens,
        succeeds=_luck(tasks, branches, count, seed),
    )


def _shape(tasks: Tasks) -> str:
    """The requests of the stages: `1 + 3 + 1`."""
    return " + ".join(str(stage.num_requests) for stage in tasks.stages)


def _links(tasks: Tasks, branches: Branches, count: int, seed: int) -> Links:
    """What waits for what: a stage's first level for the last one of the stage before, each other for that above it."""
    each = tasks.num_requests
    wait_ns = np.zeros((count, each), np.int64)
    parents: list[tuple[int, ...]] = []
    before = range(0)
    for number, (stage, places) in enumerate(zip(tasks.stages, branches.ranges, strict=True)):
        shares = np.ones(count)
        if stage.wait_kind == "exponential":
            shares = random_stream(seed, f"tasks/{number}/wait").standard_exponential(count)
        waits_ns = np.rint(shares * stage.wait).astype(np.int64)[:, None]
        wait_ns[:, places.start : places.start + stage.fan_out] = waits_ns
        parents += [(branches.above[place],) if branches.level[place] else tuple(before) for place in places]
        before = branches.leaves[number]
    root = np.arange(count) * each
    linked = tuple(tuple(first + place for place in places) for first in root.tolist() for places in parents)
    return Links(linked, np.repeat(root, each), wait_ns.ravel(), ())


def _luck(tasks: Tasks, branches: Branches, count: int, seed: int) -> NDArray[np.bool_]:
    """Whose answers succeed, by row."""
    succeeds = np.zeros((count, tasks.num_requests), bool)
    for number, (stage, places) in enumerate(zip(tasks.stages, branches.leaves, strict=True)):
        if stage.success is not None:
            drawn = random_stream(seed, f"tasks/{number}/success").random((count, len(places)))
            succeeds[:, places.start : places.stop] = drawn < stage.success
    return succeeds.ravel()


def _values(tasks: Tasks, branches: Branches, priority: Ints, seed: int) -> Ints:
    """`priority` of every row, replaced in stages that say the value of their branches."""
    values = priority.reshape(-1, tasks.num_requests).copy()
    for number, (stage, places) in enumerate(zip(tasks.stages, branches.ranges, strict=True)):
        if stage.priorities is not None:
            rng = random_stream(seed, f"tasks/{number}/priority")
            drawn = rng.integers(len(stage.priorities), size=(len(values), stage.fan_out))
            first = slice(places.start, places.start + stage.fan_out)
            values[:, first] = np.array(stage.priorities)[drawn]
            for place in places[stage.fan_out :]:
                values[:, place] = values[:, branches.above[place]]
    return values.ravel()


def _grown(
    tasks: Tasks, branches: Branches, source: RequestSampler, drawn: RequestColumns, seed: int, scale: float
) -> tuple[RequestColumns, Ints]:
    """`drawn` with the prompts and outputs of its stages, and the tokens that each row's stage shares."""
    each = tasks.num_requests
    count = len(drawn) // each
    first = np.repeat(np.arange(count) * each, each)
    drawn = replace(drawn, adapter=drawn.adapter[first])
    group, group_tokens = drawn.group[first], drawn.group_tokens[first]
    held = np.zeros((count, 1), np.int64)  # tokens of the stages before
    spent = np.zeros((count, each), np.int64)  # of the prompts and answers of a tree, down to each of its requests
    shared_tokens = np.zeros((count, each), np.int64)
    parts: list[RequestColumns] = []
    rows_of: list[Ints] = []
    for number, (stage, places) in enumerate(zip(tasks.stages, branches.ranges, strict=True)):
        shape = (count, len(places))
        own = _drawn(stage.prompt, seed, f"tasks/{number}/prompt", shape, scale)
        shared = _drawn(stage.shared_prompt, seed, f"tasks/{number}/shared", (count, 1), scale)
        asked = draw_tokens(stage.output, random_stream(seed, f"tasks/{number}/output"), own.size).tokens.reshape(shape)
        shared_tokens[:, places.start : places.stop] = shared
        begin = 0
        for size in stage.levels:
            at = slice(begin, begin + size)
            level = np.arange(places.start + begin, places.start + begin + size)
            above = [branches.above[place] for place in level]
            context = held + shared + (spent[:, above] if above[0] >= 0 else 0)
            rows = (np.arange(count)[:, None] * each + level).ravel()
            of_level = _prompts(source, drawn, rows, context, own[:, at], asked[:, at], group, group_tokens)
            answered = of_level.output_tokens.reshape(count, size)
            spent[:, level] = own[:, at] + answered + (spent[:, above] if above[0] >= 0 else 0)
            parts.append(of_level)
            rows_of.append(rows)
            begin += size
        if stage.is_held:
            held = held + shared + spent[:, places.start : places.stop].sum(axis=1, keepdims=True)
    order = np.argsort(np.concatenate(rows_of))
    return _joined(parts).picked(order), shared_tokens.ravel()


def _prompts(
    source: RequestSampler,
    drawn: RequestColumns,
    rows: Ints,
    context: Ints,
    own: Ints,
    asked: Ints,
    group: Ints,
    group_tokens: Ints,
) -> RequestColumns:
    """`drawn` at `rows` with prompts of their context and new text, and outputs as asked."""
    context = np.broadcast_to(context, own.shape).ravel()
    own, asked = own.ravel(), asked.ravel()
    requests = replace(drawn.picked(rows), asked_tokens=asked, drawn_prompt=own, drawn_output=asked)
    prompt = group_tokens[rows] + context + own
    return source.with_prompts(
        requests, prompt, group=group[rows], group_tokens=group_tokens[rows], context_tokens=context
    )


def _joined(parts: list[RequestColumns]) -> RequestColumns:
    names = vars(parts[0]).keys() - {"items"}  # which no task has
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return RequestColumns(**columns)


def _drawn(law: Law | None, seed: int, purpose: str, shape: tuple[int, int], scale: float) -> Ints:
    """Lengths of new text, times `scale`, at least 1 token; 0 without a law."""
    if law is None:
        return np.zeros(shape, np.int64)
    tokens = draw_tokens(law, random_stream(seed, purpose), shape[0] * shape[1]).tokens.reshape(shape)
    return tokens if scale == 1 else np.maximum(np.rint(tokens * scale), 1).astype(np.int64)
