"""From a file whose keys are checked to a Scenario: its policies, and what fits together of workload, loads and memory.

`load` imports this file once the keys are right: the schedulers and workloads below it take longer than the check.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError, TraceError, nearest, shown
from batchsim.base.installed import installed
from batchsim.base.ranges import MAX_CHOICES
from batchsim.engines.engine_config import EngineConfig
from batchsim.engines.engine_scheduler import EngineScheduler
from batchsim.kernel.policy_config import Device
from batchsim.policies.named_policy import check_allowed, find_policy
from batchsim.policies.registry import POLICIES
from batchsim.scenario.check_values import check_values
from batchsim.scenario.config import PolicySpec, Scenario, ScenarioFile
from batchsim.scenario.device import device_of
from batchsim.scenario.document import Document
from batchsim.scenario.document import Path as Keys
from batchsim.scenario.own_code import check_reader, own_predictor
from batchsim.workload.build import apply_load, classes_of_rows
from batchsim.workload.predictors import PredictorConfig
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.workload_config import ClosedLoop

MAX_LABEL = 40  # letters: what a column of a table can hold
ENGINE = "engine"
"""The kind of a policy that is the scheduler of an installed engine."""


def build(
    file: ScenarioFile, document: Document, text: str, folder: Path, trace_folders: Sequence[Path], allow_code: bool
) -> Scenario:
    """The scenario of `file`, which is `document` checked. ScenarioError, with its place, for what does not fit
    together, and for policies that are not there or have other knobs."""
    plain = document.value
    check_reader(document, file.workload.trace, allow_code=allow_code)
    _check_loads(file, document)
    model = folder / file.model
    model_path = str(model) if os.path.exists(model) else file.model
    device = device_of(file, model_path)
    specs = _all_specs(document, list(file.policies), allow_code, device)
    if isinstance(file.workload.arrivals, ClosedLoop):
        listed = file.load.axis[1] if file.load else ()
        users = int(min(listed)) if listed else file.workload.arrivals.users
        for spec in specs if not (file.load and file.load.is_auto) else ():
            _check_in_flight(spec, users, f"the closed loop has {users} users", document)
    elif (most := file.workload.max_concurrency) is not None:
        for spec in specs:
            _check_in_flight(spec, most, f"workload.max_concurrency lets {most} be in flight", document)
    admission = None if file.replicas is None else file.replicas.admission
    if admission is not None and (most := admission.max_outstanding) is not None:
        for spec in specs:
            _check_in_flight(spec, most, f"admission lets {most} be at a replica", document)
    for spec in specs:
        needs = spec.config.traits.waits_for
        if needs is not None and file.max_waiting is not None and file.max_waiting < needs:
            raise ScenarioError(
                f"{document.where(('policies', spec.label))}: {spec.name} waits for {needs} requests and max_waiting"
                f" lets {file.max_waiting} wait, so no batch would ever fill. Set max_wait, or a larger max_waiting."
            )
    swaps = any(spec.config.traits.needs_swap_space for spec in specs)
    if file.kv.swap_space and not swaps:
        where = document.where(("kv", "swap_space"))
        raise ScenarioError(f"{where}: kv.swap_space is given and no policy swaps. Remove it.")
    trace = file.workload.trace
    folders = [folder, Path.cwd(), *trace_folders]
    base = next((f for f in folders if trace is not None and os.path.exists(f / trace.path)), folder)
    if trace is not None and file.workload.by_row:
        with _placed(document, ("workload", "trace")):
            rows = read_trace(replace(trace, rate_scale=None, jitter=0), base)
            if any(each.share is not None for each in file.workload.classes.values()):
                raise ScenarioError("classes have a share and assign by_row. Drop the shares.")
            file = replace(file, workload=classes_of_rows(file.workload, rows))
    load_name, loads = file.load.axis if file.load else ("", (1.0,))
    return Scenario(
        name=_name(document.source),
        source=document.source,
        base=base,
        model_path=model_path,
        file=file,
        text=text,
        plain=plain,
        specs=specs,
        places={key: document.where((key,)) for key in plain}
        | {f"policies.{label}": document.where(("policies", label)) for label in file.policies},
        load_name=load_name,  # type: ignore[arg-type]
        loads=tuple(float(value) for value in loads),
        device=device,
    )


def _name(source: str) -> str:
    """The scenario's name, by which its results have a folder. ScenarioError where it would be no folder's of its own,
    or cannot be shown."""
    name = Path(source).name.removesuffix(".yaml")
    if name in ("", ".", "..") or not name.isprintable():
        raise ScenarioError(f"{source}: its results would have the folder {shown(name)}. Give the file another name.")
    return name


@contextmanager
def _placed(document: Document, path: Keys) -> Iterator[None]:
    """A context whose errors begin with the place of `path` in the file."""
    try:
        yield
    except (ScenarioError, TraceError) as error:
        raise type(error)(f"{document.where(path)}: {error}") from None


def _check_loads(file: ScenarioFile, document: Document) -> None:
    """ScenarioError, with its place, where a listed load is none that the arrivals can have."""
    if file.load is None or file.load.is_auto:
        return
    name, loads = file.load.axis
    for load in loads:
        try:
            apply_load(file.workload, {name: load})
        except ScenarioError as error:
            raise ScenarioError(f"{document.where(('load', name))}: {error}") from None


# ---- policies


def _all_specs(
    document: Document, labels: Sequence[str], allow_code: bool, device: Device | None
) -> tuple[PolicySpec, ...]:
    """The policies of `labels`. ScenarioError with the errors of all of them."""
    specs: list[PolicySpec] = []
    errors: list[str] = []
    for label in labels:
        try:
            specs += _specs(label, document, allow_code, device)
        except ScenarioError as error:
            errors += error.lines
    if errors:
        raise ScenarioError(*errors)
    return tuple(specs)


def _specs(label: str, document: Document, allow_code: bool, device: Device | None) -> Iterator[PolicySpec]:
    """The policy of a label on its device, or one for every choice of its `best_of` knobs."""
    path: Keys = ("policies", label)
    entry = dict(document.value["policies"][label] or {})
    if not label.strip() or not label.isprintable() or "$" in label or len(label) > MAX_LABEL:
        raise ScenarioError(
            f"{document.where(path)}: the policy's label {label[:50]!r} does not fit tables and pictures: 1 to"
            f" {MAX_LABEL} printable letters, not blank, without $. Shorten or rename it."
        )
    kind = entry.pop("kind", label)
    where = document.where(path)
    if not isinstance(kind, str):
        raise ScenarioError(f"{where}: policies.{label}.kind is {kind!r}. Write the name of a policy.")
    if kind not in (*POLICIES, ENGINE) and ":" not in kind:
        kind = installed("policies", POLICIES).get(kind, kind)
    config_type, policy = _policy(kind, where, allow_code)
    predictor = entry.pop("predictor", None)
    if predictor is not None:
        place = (*path, "predictor")
        own = own_predictor(predictor, document, place, allow_code=allow_code)
        predictor = own or check_values(PredictorConfig, predictor, document, place)
    choices = {}
    for knob, value in entry.items():
        if isinstance(value, dict) and set(value) == {"best_of"}:
            choices[knob] = value["best_of"]
            if not isinstance(choices[knob], list) or not choices[knob]:
                raise ScenarioError(f"{document.where((*path, knob))}: best_of needs a list of values, like [4, 8].")
    if (count := prod(map(len, choices.values()))) > MAX_CHOICES:
        raise ScenarioError(f"{where}: best_of asks for {count:,} variants of {label}. List at most {MAX_CHOICES:,}.")
    for picked in itertools.product(*choices.values()):
        chosen = dict(zip(choices, picked, strict=True))
        knobs = entry | chosen
        knobs |= config_type.stated_defaults(knobs)
        by_device = {} if device is None else config_type.device_defaults(device, knobs)
        config = check_values(config_type, knobs | by_device, document, path)
        if isinstance(config, EngineConfig):
            _check_engine(config, where, allow_code=allow_code)
        if predictor is not None and not config.traits.needs_predictor:
            raise ScenarioError(f"{where}: {label} asks for no predicted lengths. Remove its predictor.")
        variant = ", ".join(f"{_initials(knob)} {value}" for knob, value in chosen.items())
        yield PolicySpec(label, kind, config, variant, predictor, policy=policy, knobs=knobs, by_device=by_device)


def _initials(knob: str) -> str:
    """`batch_size` as `bs`, to name variants in tables."""
    return "".join(word[0] for word in knob.split("_"))


def _policy(kind: str, where: str, allow_code: bool) -> tuple[Any, Any]:
    """Config and class of a registered policy, or of one named by import path `module:Class`."""
    if kind in POLICIES:
        return POLICIES[kind]
    if kind == ENGINE:
        return EngineConfig, EngineScheduler
    if ":" not in kind:
        advice = nearest(kind, [*POLICIES, ENGINE, *installed("policies", POLICIES)])
        raise ScenarioError(f"{where}: there is no policy {kind}. {advice} Your own is named module:Class.")
    try:
        return find_policy(kind, allow_code=allow_code)
    except ScenarioError as error:
        raise ScenarioError(f"{where}: {error}") from None


def _check_engine(config: EngineConfig, where: str, *, allow_code: bool) -> None:
    """ScenarioError where the policy names a program to run, or a class, and the caller does not allow that."""
    for name in filter(None, (config.python, config.scheduler_cls)):
        try:
            check_allowed(name, allow_code=allow_code)
        except ScenarioError as error:
            raise ScenarioError(f"{where}: {error}") from None


def _check_in_flight(spec: PolicySpec, most: int, why: str, document: Document) -> None:
    """ScenarioError for a policy that waits for more requests than clients ever have in flight, `most`: for ever, in a
    real engine."""
    needs = spec.config.traits.waits_for
    if needs is not None and most < needs:
        raise ScenarioError(
            f"{document.where(('policies', spec.label))}: {spec.name} waits for {needs} requests and {why}, so no batch"
            f" would ever fill. Set max_wait, or a batch of at most {most}."
        )
