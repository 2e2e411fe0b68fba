"""A point's knobs, as sliders show them, and the point simulated again with several of them changed at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.explain.counterfactual import Counterfactual, counterfactual, numbers_of
from batchsim.report.reading import load_name
from batchsim.results.read import Results

LOAD = "load"
"""The knob that is no key of the scenario: the load on its axis."""
FACTORS = (0.1, 10.0)
"""By how much a knob may be changed: a load ten times as high still ends while one waits."""
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(.*)\Z", re.DOTALL)

At = tuple[str, float, int]
"""Policy, load and seed of a point."""


def knobs(results: Results, at: At, folders: Sequence[Path], allow_code: bool) -> list[dict[str, Any]]:
    """The knobs of a point that have a number: key, name, value, unit (\"\" without), and whether it is whole.

    ScenarioError where the point cannot be simulated here at all.
    """
    numbers = numbers_of(results, *at, folders=folders, allow_code=allow_code)
    axis, rows = load_name(results), []
    if axis and not results.manifest.get("live"):
        rows.append(_knob(LOAD, at[1], whole=axis == "users"))
    return rows + [_knob(key, value, whole=isinstance(value, int)) for key, value in numbers.items()]


def _knob(key: str, value: float | str, *, whole: bool) -> dict[str, Any]:
    number, unit = value, ""
    if isinstance(value, str):
        match = _QUANTITY.match(value)
        assert match is not None, "numbers_of has only texts that begin with a number"
        number, unit = float(match[1]), match[2]
    name = key.split(".")[-1] if key.startswith("policies.") else key
    return {"key": key, "name": name, "value": number, "unit": unit, "whole": whole}


def changed(
    results: Results, at: At, factors: Mapping[str, float], folders: Sequence[Path], allow_code: bool
) -> tuple[Counterfactual, list[dict[str, Any]]]:
    """The point simulated again with `factors` times its knobs, by key; and name, before and after of each, as text.

    ScenarioError for no factor, a knob that the point has not, or a factor outside FACTORS.
    """
    known = {knob["key"]: knob for knob in knobs(results, at, folders, allow_code)}
    if not factors:
        raise ScenarioError("no knob is changed. Move a slider.")
    changes, said, other_load = [], [], None
    for key, factor in factors.items():
        if key not in known:
            raise ScenarioError(f"{key}: is no knob of {at[0]} here. Choose one of {', '.join(known) or 'none'}.")
        if not FACTORS[0] <= factor <= FACTORS[1]:
            raise ScenarioError(f"{factor:g}: is not from {FACTORS[0]:g} to {FACTORS[1]:g}. Choose a smaller change.")
        knob = known[key]
        after = scaled(knob, factor)
        if key == LOAD:
            other_load = float(after)
        else:
            changes.append(f"{key}={after}{knob['unit']}")
        said.append({"name": knob["name"], "before": _text(knob, knob["value"]), "after": _text(knob, after)})
    comparison = counterfactual(results, *at, changes, folders=folders, allow_code=allow_code, other_load=other_load)
    return comparison, said


def scaled(knob: Mapping[str, Any], factor: float) -> int | float:
    """A knob's number times a factor: a whole one stays whole and at least 1, others have four digits."""
    if knob["whole"]:
        return max(round(knob["value"] * factor), 1)
    return float(f"{knob['value'] * factor:.4g}")


def _text(knob: Mapping[str, Any], value: float) -> str:
    return f"{value:,}{knob['unit']}" if isinstance(value, int) else f"{value:,.4g}{knob['unit']}"
