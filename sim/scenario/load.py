"""From a file's text to a checked Scenario. Every error is one line that begins with file:line."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any, ParamSpec

from batchsim.base.errors import ScenarioError, TraceError, bounded, nearest, shown
from batchsim.base.files import read_text, reason_text
from batchsim.base.plain import texts_in
from batchsim.base.ranges import MAX_CHOICES
from batchsim.kernel.policy_config import Device
from batchsim.policies.named_policy import find_policy
from batchsim.policies.registry import POLICIES
from batchsim.scenario.check_values import check_values
from batchsim.scenario.config import PolicySpec, Scenario, ScenarioFile
from batchsim.scenario.device import device_of
from batchsim.scenario.document import Document, read_document
from batchsim.scenario.document import Path as Keys
from batchsim.scenario.fitted_config import take_fits
from batchsim.scenario.long_forms import costs, lengthen, name_policy, override, place_files, read_logs
from batchsim.scenario.own_code import check_reader, own_configs, own_predictor, stand_ins, with_own
from batchsim.scenario.replaced import check_replaced
from batchsim.workload.build import apply_load, classes_of_rows
from batchsim.workload.predictors import PredictorConfig
from batchsim.workload.traces import read_trace
from batchsim.workload.workload_config import ClosedLoop

P = ParamSpec("P")

SHIPPED = "batchsim.scenarios"
MAX_LABEL = 40  # letters: what a column of a table can hold
_NAME_SHOWN = 200  # letters of a name in an error


def load_scenario(
    name_or_path: str,
    *,
    overrides: Sequence[str] = (),
    trace_folders: Sequence[Path] = (),
    allow_code: bool = False,
) -> Scenario:
    """The scenario at a path, or shipped under a name; `overrides` are texts like `seeds=1` or `policies.x.y=2`.

    A relative trace path is looked for beside the scenario, then in the current folder, then in `trace_folders`.
    Policies, costs, routers and autoscalers named `module:Class` are imported, which runs their module, with
    `allow_code` alone. Raises ScenarioError in one line: where, what, what to do.
    """
    for each in trace_folders:
        if not each.is_dir():
            raise ScenarioError(f"{each}: no such folder to look for traces in. Correct --traces, or leave it out.")
    text, source, folder = _find(name_or_path)
    scenario = parse_scenario(text, source, folder, tuple(overrides), tuple(trace_folders), allow_code)
    check_replaced(scenario)
    return scenario


def changed(scenario: Scenario, overrides: Sequence[str]) -> Scenario:
    """`scenario` with further `overrides`, which win over those that it was loaded with."""
    folder = Path(scenario.source).parent
    every = (*scenario.overrides, *overrides)
    return parse_scenario(scenario.text, scenario.source, folder, every, scenario.trace_folders, scenario.allow_code)


def _echo_bounded(read: Callable[P, Scenario]) -> Callable[P, Scenario]:
    """`read`, whose first argument is a scenario's text: its errors repeat little of any long text that was written."""

    @wraps(read)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Scenario:
        try:
            return read(*args, **kwargs)
        except ScenarioError as error:
            written: list[object] = [*args[1:], *kwargs.values()]
            with suppress(ScenarioError):
                written.append(read_document(str(args[0]), "").value)
            raise type(error)(bounded(str(error), texts_in(written))) from None

    return wrapped


@_echo_bounded
def parse_scenario(
    text: str,
    source: str,
    folder: Path,
    overrides: tuple[str, ...] = (),
    trace_folders: tuple[Path, ...] = (),
    allow_code: bool = False,
) -> Scenario:
    """The scenario that a file `source` in `folder` with this text would hold. Raises as `load_scenario` does."""
    document = read_document(text, source)
    if not isinstance(document.value, dict):
        raise ScenarioError(f"{source}: holds no keys. Write at least model, deployment, workload and slo.")
    for each in overrides:
        lengthen(document)
        override(document, each)
    lengthen(document)
    name_policy(document.value)
    take_fits(document, folder)
    read_logs(document, folder)
    scenario = _build(document, text, folder, trace_folders, allow_code)
    scenario = replace(scenario, overrides=overrides, trace_folders=trace_folders, allow_code=allow_code)
    return replace(scenario, variants=_variants(scenario, document)) if scenario.vary_key else scenario


def _variants(scenario: Scenario, document: Document) -> tuple[Scenario, ...]:
    """The scenario with each value of the key that it varies. ScenarioError names the value that does not fit."""
    key, found = scenario.vary_key, []
    for value in (scenario.file.vary or {})[key]:
        override = f"{key}={json.dumps(value, ensure_ascii=False)}"
        try:
            found.append(changed(scenario, ["vary=null", override]))
        except ScenarioError as error:
            where = document.where(("vary", key))
            message = str(error).removeprefix(f"--set {override}: ")
            raise ScenarioError(f"{where}: vary {key}, value {value}: {message}") from None
        if [*found[-1].file.policies] != [*scenario.file.policies]:
            own, its = ", ".join(scenario.file.policies), ", ".join(found[-1].file.policies)
            raise ScenarioError(
                f"{document.where(('vary', key))}: vary {key}, value {value}: the policy would be {its}, not {own},"
                f" since none is stated. Write policies, like {{{own}: {{}}, {its}: {{}}}}."
            )
    return tuple(found)


def shipped_scenarios() -> list[str]:
    """The names of the scenarios that come with batchsim."""
    return sorted(
        item.name.removesuffix(".yaml") for item in resources.files(SHIPPED).iterdir() if ".yaml" in item.name
    )


def _find(name_or_path: str) -> tuple[str, str, Path]:
    """The text, the name for messages, and the folder of a scenario."""
    if not name_or_path.strip():
        raise ScenarioError(f"no scenario is named. Give a scenario: a YAML file, or {', '.join(shipped_scenarios())}.")
    path = Path(name_or_path)
    try:
        shipped = resources.files(SHIPPED) / f"{name_or_path}.yaml"
        if path.name == name_or_path and not path.is_file() and shipped.is_file():
            path = Path(str(shipped))
        return read_text(path), str(path), path.parent
    except FileNotFoundError:
        names = shipped_scenarios()
        advice = nearest(path.name.removesuffix(".yaml"), names, f"Shipped are {', '.join(names)}.")
        raise ScenarioError(f"{name_or_path}: no such scenario. {advice}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the name
        shown = name_or_path if len(name_or_path) <= _NAME_SHOWN else name_or_path[:_NAME_SHOWN] + "…"
        raise ScenarioError(f"{shown}: cannot be read: {reason_text(error)}. Give a YAML text file.") from None


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


def _build(document: Document, text: str, folder: Path, trace_folders: Sequence[Path], allow_code: bool) -> Scenario:
    plain = document.value
    for _, owner in costs(plain):
        place_files(owner.get("cost"), folder)
    own = own_configs(document, allow_code=allow_code)
    file: ScenarioFile = with_own(check_values(ScenarioFile, stand_ins(plain, own), document, ()), own)
    check_reader(document, file.workload.trace, allow_code=allow_code)
    _check_loads(file, document)
    model = folder / file.model
    model_path = str(model) if os.path.exists(model) else file.model
    device = device_of(file, model_path)
    specs = tuple(spec for label in file.policies for spec in _specs(label, document, allow_code, device))
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


# ---- policies


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
        by_device = {} if device is None else config_type.device_defaults(device, knobs)
        config = check_values(config_type, knobs | by_device, document, path)
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
    if ":" not in kind:
        advice = nearest(kind, POLICIES)
        raise ScenarioError(f"{where}: there is no policy {kind}. {advice} Your own is named module:Class.")
    try:
        return find_policy(kind, allow_code=allow_code)
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
