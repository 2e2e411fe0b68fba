"""The file of a fit, `cost: mine.json`: its numbers take the place of its name, and its way from the client that of
`workload.frontend`, where the scenario states none; where it states another, the heading says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.files import Kind, parse_json, read_text, reason_text
from batchsim.base.units import format_duration, parse_duration_ns
from batchsim.scenario.document import Document
from batchsim.scenario.long_forms import costs, place_files

FORMAT = "batchsim fit 1"
KIND = Kind("fit", rb'\{\s*"format": "batchsim fit ')
FIT_AGAIN = "Write it anew with batchsim calibrate --bench, or --steps."


def take_fits(document: Document, folder: Path) -> None:
    """Writes the numbers of every `cost: mine.json` that is a fit's file, beside the scenario or from the current
    folder, in its place. ScenarioError for a fit's file that is none any more."""
    for path, owner in costs(document.value):
        cost = owner.get("cost")
        if not isinstance(cost, dict) or cost.get("kind") != "profile":
            continue
        name = cost.get("profile")
        if not isinstance(name, str) or not name.endswith(".json"):
            continue
        file = folder / name if (folder / name).is_file() else Path(name)
        fit = _read(file)
        if fit is None:
            continue
        try:
            owner["cost"] = _cost(fit, cost, file)
            if unused := _take_way(document.value, fit, is_own=not path):
                owner["cost"]["words"] += f", with {unused} from the client, which workload.frontend does not have"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            where = document.where((*path, "cost"))
            raise ScenarioError(f"{where}: {file}: is no whole fit: {reason_text(error)}. {FIT_AGAIN}") from None


def _read(file: Path) -> dict[str, Any] | None:
    """What the file of a fit holds; None for any other file, whose error is left to the reader of profiles."""
    try:
        content = parse_json(read_text(file))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and str(content.get("format", "")).startswith("batchsim fit ") else None


def _cost(fit: dict[str, Any], written: dict[str, Any], file: Path) -> dict[str, Any]:
    """The cost that a fit's file stands for; what was `written` beside its name stays, and is checked like any key."""
    if fit["format"] != FORMAT:
        raise ScenarioError(
            f"{file}: its format is {shown(fit['format'])}, this batchsim reads {FORMAT!r}. {FIT_AGAIN}"
        )
    kernel, claims = fit["kernel"], fit["claims"]
    place_files(kernel, file.parent)
    beside = {key: value for key, value in written.items() if key not in ("kind", "profile")}
    words, terms = f"{fit['words']} ({file.name})", dict(fit["terms"])
    if terms.pop("further_pass", 0.0):  # of a version whose `base` was of steps
        raise ScenarioError(f"{file}: terms.further_pass: a pass beyond a step's first costs the base now. {FIT_AGAIN}")
    fitted = {"terms": terms, "kernel": kernel, "kernel_source": fit["kernel_source"], "words": words}
    return {"kind": "fitted", **fitted, "tpot_error": claims.get("tpot_mean_s", claims.get("step_time")), **beside}


def _take_way(scenario: dict[str, Any], fit: dict[str, Any], *, is_own: bool) -> str:
    """Writes the fit's way from the client where the scenario, whose cost it `is_own`, states none. In words the way of
    a fit to whole runs where the scenario's is another, else ""."""
    workload = scenario.get("workload")
    delays_ns = {name: ns for name, part in fit["frontend"].items() if (ns := round(part))}
    if not isinstance(workload, dict):
        return ""
    stated = workload.get("frontend")
    if is_own and stated is None:
        workload["frontend"] = {name: f"{ns}ns" for name, ns in delays_ns.items()}
        return ""
    try:
        there = {name: ns for name, text in (stated or {}).items() if (ns := parse_duration_ns(text))}
    except (AttributeError, ValueError):  # no frontend: refused where it is read
        return ""
    if there == delays_ns or "step_time" in fit["claims"]:
        return ""
    return " and ".join(f"{name} {format_duration(ns)}" for name, ns in delays_ns.items()) or "no time"
