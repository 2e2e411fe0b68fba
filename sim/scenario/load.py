"""A scenario by its path, or by the name under which it is shipped."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError, nearest
from batchsim.base.files import read_text, reason_text
from batchsim.scenario.unread_keys import check_replaced

if TYPE_CHECKING:
    from batchsim.scenario.config import Scenario

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
    from batchsim.scenario.parse import parse_scenario  # which takes longer to import than to say that no file is there

    scenario = parse_scenario(text, source, folder, tuple(overrides), tuple(trace_folders), allow_code)
    check_replaced(scenario)
    return scenario


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
