"""From a file's text to a checked Scenario. Every error is one line that begins with file:line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from batchsim.base.errors import ScenarioError, bounded
from batchsim.base.plain import texts_in
from batchsim.scenario.check_values import check_values
from batchsim.scenario.config import Scenario, ScenarioFile
from batchsim.scenario.document import Document, read_document
from batchsim.scenario.fit_file import take_fits
from batchsim.scenario.long_forms import costs, lengthen, name_policy, override, place_files, read_logs
from batchsim.scenario.own_code import own_configs


def changed(scenario: Scenario, overrides: Sequence[str]) -> Scenario:
    """`scenario` with further `overrides`, which win over earlier ones."""
    folder = Path(scenario.source).parent
    every = (*scenario.overrides, *overrides)
    return parse_scenario(scenario.text, scenario.source, folder, every, scenario.trace_folders, scenario.allow_code)


def parse_scenario(
    text: str,
    source: str,
    folder: Path,
    overrides: tuple[str, ...] = (),
    trace_folders: tuple[Path, ...] = (),
    allow_code: bool = False,
) -> Scenario:
    """The scenario that a file `source` in `folder` with this text would hold. Raises as `load_scenario` does."""
    written = [source, *overrides]
    try:
        document = read_document(text, source)
        written += texts_in(document.value)
        file = _checked(document, folder, overrides, allow_code=allow_code)
        from batchsim.scenario.build import build  # after the check of the keys, which takes less time than this

        scenario = build(file, document, text, folder, trace_folders, allow_code)
        scenario = replace(scenario, overrides=overrides, trace_folders=trace_folders, allow_code=allow_code)
        return replace(scenario, variants=_variants(scenario, document)) if scenario.vary_key else scenario
    except ScenarioError as error:  # which repeats little of any long text that was written
        texts = list(written)
        raise type(error)(*(bounded(line, texts) for line in error.lines)) from None


def _checked(document: Document, folder: Path, overrides: tuple[str, ...], *, allow_code: bool) -> ScenarioFile:
    """The file that `document`, of `folder`, is with `overrides`, which are written into it as all short forms are.

    ScenarioError with the place of the first key that is none, or has no such value.
    """
    if not isinstance(document.value, dict):
        raise ScenarioError(f"{document.source}: holds no keys. Write at least model, deployment, workload and slo.")
    if "training" in document.value:
        raise ScenarioError(f"{document.where(('training',))}: a training block is for batchsim train. Run it by that.")
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
    return check_values(ScenarioFile, document.value, document, (), own)


def _variants(scenario: Scenario, document: Document) -> tuple[Scenario, ...]:
    """The scenario with each value of the key that it varies. ScenarioError names the value that does not fit."""
    key, variants = scenario.vary_key, []
    for value in (scenario.file.vary or {})[key]:
        override = f"{key}={json.dumps(value, ensure_ascii=False)}"
        try:
            variants.append(changed(scenario, ["vary=null", override]))
        except ScenarioError as error:
            where = document.where(("vary", key))
            message = str(error).removeprefix(f"--set {override}: ")
            raise ScenarioError(f"{where}: vary {key}, value {value}: {message}") from None
        if (variants[-1].file.replicas is None) != (variants[0].file.replicas is None):
            raise ScenarioError(
                f"{document.where(('vary', key))}: vary {key}, value {value}: one engine beside several, whose tables"
                " have other columns. Leave that value out and run it by itself."
            )
        if [*variants[-1].file.policies] != [*scenario.file.policies]:
            own, new = ", ".join(scenario.file.policies), ", ".join(variants[-1].file.policies)
            raise ScenarioError(
                f"{document.where(('vary', key))}: vary {key}, value {value}: the policy would be {new}, not {own},"
                f" since none is stated. Write policies, like {{{own}: {{}}, {new}: {{}}}}."
            )
    return tuple(variants)
