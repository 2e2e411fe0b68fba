"""Records what an engine's own scheduler does with the requests of a scenario, in the form that `conform` reads.

The scheduler is the object that the installed engine has (`batchsim.engines`); time is virtual, and steps take what the
scenario's cost says. The engine runs to the end of its last request, whatever `drain` says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.base.files import Kind, replacing
from batchsim.base.units import NS_PER_S
from batchsim.check.conform.observer import Step
from batchsim.check.conform.recording import Recording
from batchsim.check.conform.replay import Replay, WatchedCore
from batchsim.check.conform.step_forms import FORMS, StepForm
from batchsim.engines.engine_config import PASSED, EngineConfig
from batchsim.engines.engine_scheduler import EngineScheduler
from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.setup import Setup

KIND = Kind("recording", rb'\{"meta": ')
HOST = ("host_schedule", "host_update")


@dataclass(frozen=True)
class Recorded:
    """A recording as JSON values, and the `version` of the engine it is of."""

    data: dict[str, Any]
    version: str

    def write(self, path: Path) -> None:
        """Writes it to `path`, a step a line. OSError as `replacing`."""
        rows = ",\n".join(json.dumps(row) for row in self.data["steps"])
        rest = {name: value for name, value in self.data.items() if name != "steps"}
        head = json.dumps(rest, sort_keys=False)
        with replacing(path, KIND) as file:
            file.write(f'{head[:-1]}, "steps": [\n{rows}\n]}}\n'.encode())


class _Core(WatchedCore):
    """An engine core that notes the requests it is given."""

    entered: list[Arrival]

    def submit(self, arrival: Arrival) -> None:
        self.entered.append(arrival)
        super().submit(arrival)


def engine_spec(spec: PolicySpec, python: str | None, scheduler_cls: str | None) -> PolicySpec:
    """The policy `spec`, of vLLM or an engine, with the knobs it states, as the scheduler of an installed engine.

    ScenarioError for another policy, and for a knob that is not passed to the real scheduler.
    """
    config = spec.config
    if not isinstance(config, VllmConfig) or type(config) not in (VllmConfig, EngineConfig):
        raise ScenarioError(f"record: {spec.name} is of kind {spec.kind}, and only vllm is recorded. Choose a policy.")
    knobs = {each.name: getattr(config, each.name) for each in fields(config)}
    knobs |= {name: value for name, value in (("python", python), ("scheduler_cls", scheduler_cls)) if value}
    try:
        made = EngineConfig(**knobs)
    except ValueError as error:
        raise ScenarioError(f"record: {spec.name}: {error}.") from None
    return replace(spec, config=made, policy=EngineScheduler)


def record_engine(setup: Setup, spec: PolicySpec, load: float, seed: int) -> Recorded:
    """A recording of the scheduler of `spec`, made by `engine_spec`, with the requests of `load` and `seed`.

    ScenarioError where the scenario has what recordings lack: replicas, tiers, clients that give up, a bounded queue.
    """
    _check(setup)
    workload = setup.workload(load, seed)
    config: EngineConfig = spec.config
    cost = setup.cost_under(config)
    loop = config.traits.loop.over(cost.stages)
    executor = SimExecutor(cost, setup.max_model_len, loop)
    kv = setup.new_kv(config)
    core = setup.engine_on(executor, spec, workload, kv, cost, cost.stages, kind=_Core)
    assert isinstance(core, _Core)
    core.stop_ns, core.entered = None, []
    shell = Recording("vllm", config, kv.num_blocks, kv.block_size, setup.max_model_len, [], [], [], loop=loop)
    replay = Replay(shell, (core, executor), workload)
    steps = list(_steps(replay))
    arrivals = sorted(core.entered, key=lambda each: each.request.id)
    core.check_returned()
    form = FORMS[loop.kind]
    scheduler = core.scheduler
    assert isinstance(scheduler, EngineScheduler)
    meta = {
        "scheduler": scheduler.class_path,
        "engine_version": scheduler.version,
        "block_size": kv.block_size,
        "usable_blocks": kv.num_blocks,
        "max_model_len": setup.max_model_len,
        **_knobs(config),
        **_host(steps, executor, loop),
    }
    requests = [_request(arrival, with_tokens=config.enable_prefix_caching) for arrival in arrivals]
    rows = [_row(step.facts, form.step, form.if_any) for step in steps]
    per_request = _per_request(steps, form)
    data = {"meta": meta, "requests": requests, "per_request": per_request, "steps": rows}
    return Recorded(data, scheduler.version)


def _check(setup: Setup) -> None:
    """ScenarioError where the scenario has what a recording of one scheduler cannot have."""
    file, places = setup.scenario.file, setup.scenario.places
    for key, is_there in (("replicas", file.replicas is not None), ("max_waiting", setup.max_waiting is not None)):
        if is_there:
            raise ScenarioError(f"{places.get(key, key)}: {key} is not recorded, only one engine's scheduler. Drop it.")
    if setup.tier is not None:
        raise ScenarioError(f"{places['kv']}: KV beyond the GPU is not recorded. Drop its tiers.")


def _steps(replay: Replay) -> Iterator[Step]:
    """The steps as they are made. ScenarioError where a request is refused, or given up."""
    for step in replay.steps():
        if replay.rejected:
            raise ScenarioError(
                f"record: request {replay.rejected[0]} is rejected ({replay.why_rejected()}). Give more KV blocks, or"
                " shorter requests."
            )
        yield step


def _knobs(config: EngineConfig) -> dict[str, Any]:
    return {"async_scheduling": config.async_scheduling} | {name: getattr(config, name) for name in PASSED}


def _host(steps: list[Step], executor: SimExecutor, loop: EngineLoop) -> dict[str, Any]:
    """What the host takes to schedule a step and to process its results, in seconds: of each step that ran, where they
    differ, and of calls that had nothing to run."""
    if loop.kind == "sync":
        return {}
    each = [step.batch.host_ns or (0, 0) for step in steps if step.rows and step.batch is not None]
    empty = executor.host_ns(None)
    meta: dict[str, Any] = {"idle_sleep": loop.nap_ns / NS_PER_S}
    if set(each) <= {empty}:
        return meta | {name: ns / NS_PER_S for name, ns in zip(HOST, empty, strict=True)}
    meta |= {name: [ns[place] / NS_PER_S for ns in each] for place, name in enumerate(HOST)}
    return meta | {"host_empty": [ns / NS_PER_S for ns in empty]}


def _request(arrival: Arrival, *, with_tokens: bool) -> dict[str, Any]:
    request, output = arrival.request, arrival.output_tokens
    if arrival.cancel_ns is not None or request.deadline_ns is not None:
        raise ScenarioError(
            f"record: request {request.id} may be given up by its client, which is not recorded. Drop patience and"
            " deadlines."
        )
    assert output is not None, "simulated requests have lengths"
    row: dict[str, Any] = {"id": request.id, "arrival": request.arrival_ns / NS_PER_S}
    row |= {"prompt_len": request.prompt_tokens, "output_len": output}
    row |= {"max_new_tokens": request.max_output_tokens} if request.max_output_tokens != output else {}
    row |= {"priority": request.priority} if request.priority else {}
    row |= {"ignore_eos": True} if request.ignore_eos else {}
    if with_tokens:
        segments = [[f"u{request.id}", 0, request.prompt_tokens]]
        if request.tokens is not None:
            segments = [[_stream(stream), start, length] for stream, start, length in request.tokens.segments]
        row["prompt"] = segments
    return row


def _stream(stream: int) -> str:
    """The name of a stream of tokens, as recordings have it: outputs are `o` and the request."""
    return f"o{stream // 2}" if stream % 2 else f"p{stream // 2}"


def _row(facts: Mapping[str, Any], names: Mapping[str, tuple[str, Any]], if_any: Mapping[str, Any]) -> dict[str, Any]:
    """`facts` by the names that a recording has for them; those left out that say no more than their absence."""
    row: dict[str, Any] = {}
    for name, (ours, _) in names.items():
        value = facts[ours]
        if name not in if_any or value != if_any[name]:
            row[name] = value / NS_PER_S if ours.endswith("_ns") and value is not None else value
    return row


def _per_request(steps: list[Step], form: StepForm) -> dict[str, dict[str, Any]]:
    facts: dict[int, dict[str, Any]] = {}
    for step in steps:
        for i, more in step.requests:
            facts.setdefault(i, {}).update(more)
    return {str(i): _row(facts[i], form.request, form.if_any) for i in sorted(facts)}
