"""From a file's text to a checked Scenario. Every error is one line that begins with file:line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from importlib import resources
from pathlib import Path
from typing import ParamSpec

from batchsim.base.errors import ScenarioError, bounded, nearest
from batchsim.base.files import read_text, reason_text
from batchsim.base.plain import texts_in
from batchsim.scenario.check_values import check_values
from batchsim.scenario.config import Scenario, ScenarioFile
from batchsim.scenario.document import Document, read_document
from batchsim.scenario.fitted_config import take_fits
from batchsim.scenario.long_forms import costs, lengthen, name_policy, override, place_files, read_logs
from batchsim.scenario.own_code import own_configs, stand_ins, with_own
from batchsim.scenario.replaced import check_replaced

P = ParamSpec("P")

SHIPPED = "batchsim.scenarios"
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

    >>> batchsim.load_scenario("bursty", overrides=["seeds=1"]).name
    'bursty'
    """
    for each in trace_folders:
        if not each.is_dir():
            raise ScenarioError(f"{each}: no such folder to look for traces in. Correct --traces, or leave it out.")
    text, source, folder = _find(name_or_path)
    scenario = parse_scenario(text, source, folder, tuple(overrides), tuple(trace_folders), allow_code)
    check_replaced(scenario)
    return scenario


def changed(scenario: Scenario, overrides: Sequence[str]) -> Scenario:
    """`scenario` with further `overrides`, which win over earlier ones."""
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
            texts = list(texts_in(written))
            raise type(error)(*(bounded(line, texts) for line in error.lines)) from None

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
    for _, owner in costs(document.value):
        place_files(owner.get("cost"), folder)
    own = own_configs(document, allow_code=allow_code)
    file = with_own(check_values(ScenarioFile, stand_ins(document.value, own), document, ()), own)
    from batchsim.scenario.build import build  # after the check of the keys, which takes less time than this

    scenario = build(file, document, text, folder, trace_folders, allow_code)
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
