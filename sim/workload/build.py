"""From the `workload:` block to arrivals: an open stream of known requests, sessions, or a closed loop of users.

All satisfy the Workload protocol and say besides what a report needs. For the same seed every request is the same
request under every policy and at every load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchsim.base.errors import ScenarioError
from batchsim.workload.closed_loop import ClosedLoopWorkload, build_closed
from batchsim.workload.limited_client import LimitedClient, limited
from batchsim.workload.offline import OfflineWorkload, with_offline
from batchsim.workload.open_loop import OpenWorkload, build_open
from batchsim.workload.popularity import shares_of
from batchsim.workload.replayed_sessions import ReplayedSessions, response_driven
from batchsim.workload.request_columns import RequestSampler
from batchsim.workload.rollout import RolloutWorkload, build_rollout
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.sessions import OpenSessions, build_sessions
from batchsim.workload.tasks import TaskWorkload, build_tasks
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.scale import rescale
from batchsim.workload.traces.trace_rows import Ints, TraceRows
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop, TraceArrivals, TrafficClass, WorkloadConfig

BuiltWorkload = (
    OpenWorkload
    | OpenSessions
    | ReplayedSessions
    | ClosedLoopWorkload
    | LimitedClient
    | RolloutWorkload
    | OfflineWorkload
)


def build_workload(
    config: WorkloadConfig,
    *,
    load: dict[str, float | int],
    seed: int,
    max_model_len: int,
    base: Path,
    rows: TraceRows | None = None,
) -> BuiltWorkload:
    """The workload of `config` at one load and seed. ScenarioError or TraceError where it cannot be made.

    `load` replaces one axis of the block (see `apply_load`). `base` is the folder that relative trace paths start
    from. `rows` is the trace as `read_trace` returned it for this seed, so that many points read it once.
    """
    config = apply_load(config, load)
    if isinstance(config.arrivals, Rollout):
        return build_rollout(config, config.arrivals, seed, max_model_len)
    if config.trace is not None:
        rows = _trace_rows(config, rows, seed, base)
        config = classes_of_rows(config, rows)
    source = RequestSampler(config, rows, seed, max_model_len)
    if isinstance(config.arrivals, ClosedLoop):
        return build_closed(config, config.arrivals, source, rows, seed)
    if config.tasks is not None:
        assert not isinstance(config.arrivals, AllAtOnce | Rollout | TraceArrivals), "checked by the config"
        return build_tasks(config, config.tasks, config.arrivals, source, seed)
    if config.sessions is not None:
        assert not isinstance(config.arrivals, AllAtOnce | Rollout | TraceArrivals), "checked by the config"
        return build_sessions(config, config.sessions, config.arrivals, source, rows, seed)
    listed = build_open(config, source, rows, seed)
    if isinstance(config.arrivals, TraceArrivals) and rows is not None and rows.linked:
        assert config.trace is not None, "checked by the config"
        if config.trace.replay != "as_recorded":
            return response_driven(config, listed, rows.picked(slice(listed.num_offered), listed.sent_ns))
    return with_offline(listed) if config.max_concurrency is None else limited(listed, config.max_concurrency)


def known_requests(workload: BuiltWorkload) -> OpenWorkload | None:
    """The list of requests of a workload that has all of them in advance; None where answers decide what is asked."""
    if isinstance(workload, TaskWorkload):
        return None
    listed = workload.listed if isinstance(workload, LimitedClient | OfflineWorkload | ReplayedSessions) else workload
    return listed if isinstance(listed, OpenWorkload) else None


def intended_ns(workload: BuiltWorkload) -> Ints | None:
    """When each request, by its id, was to be sent, in ns, where its client may have to keep it until others end; None
    where requests are sent when they are meant to be."""
    return workload.listed.sent_ns if isinstance(workload, LimitedClient) and not workload.users else None


def task_of(workload: BuiltWorkload) -> Ints | None:
    """The number of each request's task, by request id, -1 of one that is of none; None where there are no tasks."""
    workload = workload.listed if isinstance(workload, LimitedClient) else workload
    return workload.task_of if isinstance(workload, ReplayedSessions | OpenWorkload) else None


def turn_of(workload: BuiltWorkload, ids: Ints) -> Ints | None:
    """How many turns of its session were before each of the requests `ids`; None of a workload without sessions."""
    if isinstance(workload, OpenSessions):
        return ids - workload.turns.first[ids]
    if isinstance(workload, ReplayedSessions) and not isinstance(workload, TaskWorkload):
        return workload.depth[ids]
    return workload.users.turns_before(ids) if isinstance(workload, ClosedLoopWorkload) else None


def apply_load(config: WorkloadConfig, load: dict[str, float | int]) -> WorkloadConfig:
    """`config` with `mean_rate` (requests/s), `users` or `rate_scale` (the trace's factor) replaced.

    ScenarioError if the axis is none of these or the arrivals have no such thing.
    """
    for axis, value in load.items():
        kind = config.arrivals.kind
        try:
            if axis == "rate_scale" and isinstance(config.arrivals, TraceArrivals):
                assert config.trace is not None, "checked by the config"
                if config.trace.rate_scale is None:
                    raise ScenarioError("load.rate_scale: how is not said. Write workload.trace.rate_scale.by.")
                scale = replace(config.trace.rate_scale, factor=float(value))
                config = replace(config, trace=replace(config.trace, rate_scale=scale))
            elif axis == "users" and isinstance(config.arrivals, ClosedLoop):
                if value != int(value):
                    raise ScenarioError(f"load.users is {value:g}. Users are counted whole.")
                config = replace(config, arrivals=replace(config.arrivals, users=int(value)))
            elif axis == "mean_rate" and not isinstance(
                config.arrivals, ClosedLoop | TraceArrivals | AllAtOnce | Rollout
            ):
                config = replace(config, arrivals=replace(config.arrivals, mean_rate=float(value)))
            else:
                axes = {"closed_loop": "users", "trace": "rate_scale", "all_at_once": "none", "rollout": "none"}
                right = axes.get(kind, "mean_rate")
                raise ScenarioError(f"load.{axis} does not fit {kind} arrivals. The load axis of these: {right}.")
        except (ValueError, OverflowError) as error:
            raise ScenarioError(f"load.{axis}: {error}") from error
    return config


def classes_of_rows(config: WorkloadConfig, rows: TraceRows) -> WorkloadConfig:
    """`config` with the classes of `rows`, each with its share of them; `config` itself where they have none.

    Classes that `config` names come first, in its order. ScenarioError for one without rows.
    """
    if not config.by_row or any(traffic.share is not None for traffic in config.classes.values()):
        return config
    counts = rows.class_counts
    for name in config.classes:
        if name not in counts:
            known = ", ".join(sorted(counts)[:12])
            raise ScenarioError(f"{rows.source}: no row is of class {name}; there are {known}. Correct classes.{name}.")
    classes = {name: config.classes.get(name, TrafficClass()) for name in [*config.classes, *sorted(counts)]}
    classes = {name: replace(each, share=counts[name] / len(rows)) for name, each in classes.items()}
    return replace(config, classes=classes, assign="by_row")


def classes_by_popularity(config: WorkloadConfig) -> WorkloadConfig:
    """`config` with the share of each class as its law of popularity has it; `config` itself where it has none."""
    if config.popularity is None:
        return config
    shares = shares_of(config.popularity, len(config.classes))
    classes = {
        name: replace(each, share=share) for (name, each), share in zip(config.classes.items(), shares, strict=True)
    }
    return replace(config, classes=classes, popularity=None)


def _trace_rows(config: WorkloadConfig, rows: TraceRows | None, seed: int, base: Path) -> TraceRows:
    assert config.trace is not None, "called for traces only"
    scale = config.trace.rate_scale
    if rows is None:
        rows = read_trace(replace(config.trace, rate_scale=None), base, seed)
    tasks = "task" in rows.labels
    if not isinstance(config.arrivals, TraceArrivals):
        return _without_tasks(rows, config.arrivals.kind) if tasks else rows
    if rows.arrival_ns is None:
        raise ScenarioError(f"{rows.source}: this trace has no times. Use arrivals of another kind with its lengths.")
    if tasks and scale is not None and scale.by != "compress":
        raise ScenarioError(
            f"workload.trace.rate_scale by {scale.by}: rows of this trace are parts of tasks, which this tears apart."
            " Write by: compress, or drop columns.task."
        )
    return rows if scale is None else rescale(rows, scale, seed)


def _without_tasks(rows: TraceRows, kind: str) -> TraceRows:
    """`rows` whose lengths alone are used, with a note that their tasks are not."""
    labels = {role: column for role, column in rows.labels.items() if role != "task"}
    note = f"tasks of the rows not used: {kind} arrivals send requests one by one"
    return replace(rows, labels=labels, notes=(*rows.notes, note))
