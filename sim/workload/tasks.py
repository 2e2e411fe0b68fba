"""Tasks of several requests: stages that fan out into requests side by side and join before the next is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.kernel.tokens import Segment, TokenIds
from batchsim.workload.arrivals import arrival_times_ns, check_count
from batchsim.workload.laws import Law, draw_tokens
from batchsim.workload.open_loop import OpenWorkload
from batchsim.workload.processes import Process, process_name
from batchsim.workload.replayed_sessions import Links, ReplayedSessions
from batchsim.workload.request_columns import RequestColumns, RequestSampler, mean_lengths
from batchsim.workload.task_config import Tasks, TaskStage
from batchsim.workload.texts import answer_to, own_text, shared_text
from batchsim.workload.traces.arrival_stats import describe_arrivals
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_rows import Ints
from batchsim.workload.workload_config import WorkloadConfig


@dataclass
class TaskWorkload(ReplayedSessions):
    """The requests of tasks, task by task and stage by stage; request id = row, `first[i]` the first row of its task.

    `shared_tokens[i]` of row i's prompt are the new text that its stage shares. What is sent after the window's end
    belongs to tasks that began within it; it is run, and no part of the requests measured.
    """

    tasks: Tasks = None  # type: ignore[assignment]
    shared_tokens: Ints = None  # type: ignore[assignment]

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

    def _text(self, row: int) -> TokenIds:
        """The prompt of `row`: its group's text, the stages before with their answers, its stage's text and its own."""
        requests, first = self.listed.requests, int(self.links.root[row])
        group = int(requests.group[row])
        segments = [shared_text(group, int(requests.group_tokens[row]))] if group >= 0 else []
        begin = first
        for stage in self.tasks.stages:
            rows = range(begin, begin + stage.fan_out)
            segments.append(own_text(begin, int(self.shared_tokens[begin])))
            if row in rows:
                segments.append(self._own(row, begin))
                break
            for each in rows:
                segments += self._own(each, begin), answer_to(each, int(requests.output_tokens[each]))
            begin += stage.fan_out
        return TokenIds.of([segment for segment in segments if segment[2]])

    def _own(self, row: int, begin: int) -> Segment:
        """The new text that `row` alone has. That of a stage's first row goes on where the text of the stage ends."""
        own = int(self.listed.requests.own_tokens[row])
        stream, _, _ = own_text(row, own)
        return stream, int(self.shared_tokens[row]) if row == begin else 0, own


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
    requests, shared_tokens = _grown(tasks, source, drawn, seed, config.prompt_scale)
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
    return TaskWorkload(listed, _links(tasks, count, seed), True, tasks=tasks, shared_tokens=shared_tokens)


def _shape(tasks: Tasks) -> str:
    """The fan-outs of the stages: `1 + 3 + 1`."""
    return " + ".join(str(stage.fan_out) for stage in tasks.stages)


def _stages(tasks: Tasks) -> Iterator[tuple[int, int, TaskStage]]:
    """Each stage with its number and the place of its first request in a task."""
    begin = 0
    for number, stage in enumerate(tasks.stages):
        yield number, begin, stage
        begin += stage.fan_out


def _links(tasks: Tasks, count: int, seed: int) -> Links:
    """What waits for what: each request of a stage for all of the stage before."""
    each = tasks.num_requests
    root = np.repeat(np.arange(count) * each, each)
    wait_ns = np.zeros((count, each), np.int64)
    before = range(0)
    offsets: list[range] = []
    for number, begin, stage in _stages(tasks):
        shares = np.ones(count)
        if stage.wait_kind == "exponential":
            shares = random_stream(seed, f"tasks/{number}/wait").standard_exponential(count)
        wait_ns[:, begin : begin + stage.fan_out] = np.rint(shares * stage.wait).astype(np.int64)[:, None]
        offsets += [before] * stage.fan_out
        before = range(begin, begin + stage.fan_out)
    parents = tuple(
        tuple(first + place for place in places) for first in range(0, count * each, each) for places in offsets
    )
    return Links(parents, root, wait_ns.ravel(), ())


def _grown(
    tasks: Tasks, source: RequestSampler, drawn: RequestColumns, seed: int, scale: float
) -> tuple[RequestColumns, Ints]:
    """`drawn` with the prompts and outputs of its stages, and the tokens that each row's stage shares."""
    each = tasks.num_requests
    count = len(drawn) // each
    first = np.repeat(np.arange(count) * each, each)
    group, group_tokens = drawn.group[first], drawn.group_tokens[first]
    held = np.zeros(count, np.int64)
    shared_tokens = np.zeros(len(drawn), np.int64)
    parts: list[RequestColumns] = []
    places: list[Ints] = []
    for number, begin, stage in _stages(tasks):
        rows = (np.arange(count)[:, None] * each + np.arange(begin, begin + stage.fan_out)).ravel()
        own = _drawn(stage.prompt, seed, f"tasks/{number}/prompt", len(rows), scale)
        shared = np.repeat(_drawn(stage.shared_prompt, seed, f"tasks/{number}/shared", count, scale), stage.fan_out)
        asked = draw_tokens(stage.output, random_stream(seed, f"tasks/{number}/output"), len(rows)).tokens
        context = np.repeat(held, stage.fan_out) + shared
        mine = replace(drawn.picked(rows), asked_tokens=asked, drawn_prompt=own, drawn_output=asked)
        prompt = group_tokens[rows] + context + own
        mine = source.with_prompts(
            mine, prompt, group=group[rows], group_tokens=group_tokens[rows], context_tokens=context
        )
        shared_tokens[rows] = shared
        spent = (own + mine.output_tokens).reshape(count, stage.fan_out).sum(axis=1)
        held = held + shared[:: stage.fan_out] + spent
        parts.append(mine)
        places.append(rows)
    order = np.argsort(np.concatenate(places))
    return _joined(parts).picked(order), shared_tokens


def _joined(parts: list[RequestColumns]) -> RequestColumns:
    names = vars(parts[0])
    return RequestColumns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _drawn(law: Law | None, seed: int, purpose: str, size: int, scale: float) -> Ints:
    """`size` lengths of new text, times `scale`, at least 1 token; 0 without a law."""
    if law is None:
        return np.zeros(size, np.int64)
    tokens = draw_tokens(law, random_stream(seed, purpose), size).tokens
    return tokens if scale == 1 else np.maximum(np.rint(tokens * scale), 1).astype(np.int64)
