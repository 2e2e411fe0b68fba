"""From a document as it is written to the ScenarioFile that it is: every key checked, what is short written out."""

from __future__ import annotations

from pathlib import Path

from batchsim.base.errors import ScenarioError
from batchsim.scenario.check_values import check_values
from batchsim.scenario.config import ScenarioFile
from batchsim.scenario.document import Document
from batchsim.scenario.fitted_config import take_fits
from batchsim.scenario.long_forms import costs, lengthen, name_policy, override, place_files, read_logs
from batchsim.scenario.own_code import own_configs, stand_ins, with_own


def check_keys(document: Document, folder: Path, overrides: tuple[str, ...], *, allow_code: bool) -> ScenarioFile:
    """The file that `document`, of `folder`, is with `overrides`, which are written into it as all short forms are.

    ScenarioError with the place of the first key that is none, or has no such value.
    """
    if not isinstance(document.value, dict):
        raise ScenarioError(f"{document.source}: holds no keys. Write at least model, deployment, workload and slo.")
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
    return with_own(check_values(ScenarioFile, stand_ins(document.value, own), document, ()), own)
