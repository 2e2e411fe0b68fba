"""What one change would have done: a point of a finished run, simulated again with the same requests but for that.

    kv.tokens=+20%                        a fifth more of what the run had, be it stated or derived
    policies.continuous.max_num_seqs=128  any key of the scenario, as with --set

Both sides are simulations. Where the results are those of this very code and inputs their records are taken as they
are; else, and for a live run, whose durations were measured, the unchanged point is simulated too: `rerun` says why.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.plain import value_at
from batchsim.explain.causes import Objectives, slo_misses
from batchsim.kernel.record import Records
from batchsim.metrics.measure import measure
from batchsim.results.keep import check_cohort, point_inputs
from batchsim.results.provenance import identity, point_hash
from batchsim.results.read import Results, scenario_of, varied
from batchsim.scenario import Point, PolicySpec, Scenario, load_scenario
from batchsim.scenario.document import read_document
from batchsim.scenario.load import SHIPPED
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup
from batchsim.scenario.unread_keys import replaced_by
from batchsim.workload.workload_config import Arrivals, ClosedLoop

LIVE = "measured live; both sides here are simulations"
NOT_KEPT = "kept without steps"
OTHER_CODE = "made by other code, trace or paths"
_RELATIVE = re.compile(r"([+-]\d+(?:\.\d+)?)\s*%\Z")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(.*)\Z", re.DOTALL)
_CODES = ("request_class", "tenant", "reason")
_AXES = ("load", "seeds")  # which points there are, not what one is


@dataclass(frozen=True)
class Change:
    """One key and its values, as a scenario writes them. `before` is None where it is neither stated nor known."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Side:
    """A point as simulated: its records, its misses as `batchsim.explain.causes` has them, its metrics by name.

    `judged` are the requests that can miss: those sent after the warm-up.
    """

    records: Records
    misses: pd.DataFrame
    values: dict[str, float | None]
    judged: NDArray[np.bool_]


@dataclass(frozen=True)
class Counterfactual:
    """A point with and without the changes. `rerun`: why the unchanged point was simulated anew, "" if it was not.

    `closed_loop`: answers decide when requests are sent. `same_ids`: an id is the same user's turn on both sides.
    """

    point: Point
    changes: tuple[Change, ...]
    base: Side
    changed: Side
    rerun: str
    closed_loop: bool
    same_ids: bool

    @property
    def shared(self) -> set[int]:
        """The ids that both sides judge, of equal prompts, and sent at the same time unless answers decide when."""
        if not self.same_ids:
            return set()
        base, changed = (side.records.requests[side.judged] for side in (self.base, self.changed))
        ids, i, j = np.intersect1d(base["request_id"], changed["request_id"], return_indices=True)
        same = base["prompt_tokens"][i] == changed["prompt_tokens"][j]
        if not self.closed_loop:
            same &= base["sent_ns"][i] == changed["sent_ns"][j]
        return set(ids[same].tolist())

    @property
    def no_effect(self) -> bool:
        """Whether every request's row is the same, but for codes, which each run numbers in its own way."""
        base, changed = self.base.records.requests, self.changed.records.requests
        names = [name for name in base.dtype.names or () if name not in _CODES]
        return len(base) == len(changed) and all((base[name] == changed[name]).all() for name in names)


def counterfactual(
    results: Results,
    policy: str,
    load: float,
    seed: int,
    changes: Sequence[str],
    *,
    folders: Sequence[Path] = (),
    allow_code: bool = False,
    other_load: float | None = None,
) -> Counterfactual:
    """The point of `results`, and the same with `changes`. Traces and model files are looked for in `folders`.

    A policy of the user's own, `module:Class`, is imported with `allow_code` alone. With `other_load` the changed side
    is at that load, on the axis of the scenario: its requests are then others, and no two are compared.

    ScenarioError for a change of an unknown key, a change that this point cannot have, or a point that cannot be made.
    """
    keep = results.keeps(policy)
    if keep == "minutes":  # a run of too many requests to hold their rows at once
        raise ScenarioError(
            f"{results.path}: rows of requests were not kept, since the scenario says keep: minutes, and a change is"
            " told request by request. Run it again with --set keep=requests or keep=all."
        )
    named = policy
    folders, plain, row, policy, scenario, setup, spec = _stated(results, policy, load, seed, folders, allow_code)
    _check_axis(scenario, changes)
    parsed = tuple(_change(text, plain, spec, setup) for text in changes)
    pinned = plain | {"policies": {policy: _pinned(plain["policies"][policy], spec)}}
    if any(change.key == "kv.tokens" for change in parsed):  # the memory is then stated, and no share of the GPU's
        derived = ("utilisation", "memory", "source")
        pinned["kv"] = {key: value for key, value in (plain.get("kv") or {}).items() if key not in derived}
    altered = _scenario(results, pinned, parsed, folders, allow_code)
    if len(altered.specs) != 1:
        raise ScenarioError(
            f"--counterfactual {' '.join(changes)}: best_of is {len(altered.specs)} points, and one is simulated. Give"
            " one value."
        )
    point = Point(spec, load, seed)
    if results.manifest.get("live"):
        rerun = LIVE
    elif keep != "all":
        rerun = NOT_KEPT
    else:
        rerun = "" if point_hash(identity(setup), point) == row["point"] else OTHER_CODE
    if rerun:
        base = _simulated(setup, point)
    else:
        values = {str(name): None if pd.isna(x) else float(x) for name, x in row.items() if isinstance(x, int | float)}
        base = _side(results.records(named, load, seed), scenario, values)
    changed = _simulated(Setup.of(altered), Point(altered.specs[0], load if other_load is None else other_load, seed))
    asked = scenario.file.workload
    sent_on_answers = isinstance(asked.arrivals, ClosedLoop) or asked.sessions or asked.tasks or asked.max_concurrency
    users = [_owners(one.file.workload.arrivals) for one in (scenario, altered)]
    same_ids = users[0] == users[1] and other_load in (None, load)
    return Counterfactual(point, parsed, base, changed, rerun, bool(sent_on_answers), same_ids)


def numbers_of(
    results: Results, policy: str, load: float, seed: int, *, folders: Sequence[Path] = (), allow_code: bool = False
) -> dict[str, int | float | str]:
    """What a point had of the numbers that `changes` may scale, by key: the policy's knobs, `kv.tokens` unless groups
    of replicas have their own, `cost_factor`. As a scenario writes them, with units; none is 0.

    Raises as `counterfactual` does.
    """
    _, plain, _, label, scenario, setup, spec = _stated(results, policy, load, seed, folders, allow_code)
    paths = [("policies", label, field.name) for field in fields(spec.config)]
    replicas = scenario.file.replicas
    paths += [("kv", "tokens")] if replicas is None or replicas.groups is None else []
    values = {".".join(path): _before(path, plain, spec, setup) for path in paths}
    values["cost_factor"] = plain.get("cost_factor", 1.0)
    return {key: value for key, value in values.items() if _is_scalable(value)}


def _is_scalable(value: Any) -> bool:
    if isinstance(value, str):
        match = _NUMBER.match(value)
        return match is not None and float(match[1]) > 0
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


class _Stated(NamedTuple):
    """A point's scenario as its run has it; `label` is its policy's there, without the value of a varied key."""

    folders: list[Path]
    plain: dict[str, Any]
    row: dict[str, Any]
    label: str
    scenario: Scenario
    setup: Setup
    spec: PolicySpec


def _stated(
    results: Results, policy: str, load: float, seed: int, folders: Sequence[Path], allow_code: bool
) -> _Stated:
    folders = [*folders, Path(str(resources.files(SHIPPED)))]
    plain = _with_paths(scenario_of(results, policy), folders)
    if results.keeps(policy) != "all":
        plain["keep"] = "all"
    row = _row(results, policy, load, seed)
    variant = varied(results, policy)
    label = policy if variant is None else variant["policy"]
    scenario = _scenario(results, plain, (), folders, allow_code)
    return _Stated(
        folders, plain, row, label, scenario, Setup.of(scenario), _spec(scenario, label, row["variant"], results)
    )


def _owners(arrivals: Arrivals) -> int | None:
    """The number of users with requests of their own, which ids count; None where all are of one list."""
    return arrivals.users if isinstance(arrivals, ClosedLoop) and not arrivals.shared_list else None


def check_changes(changes: Sequence[str]) -> set[str]:
    """The labels of the policies that `changes` name. ScenarioError for a text that is no change of a point."""
    labels, keys = set(), []
    for text in changes:
        key, equals, value = (part.strip() for part in text.partition("="))
        path = key.split(".")
        if not equals or not value or not all(path):
            raise ScenarioError(
                f"--counterfactual {text}: not of the form KEY=VALUE. Write for example kv.tokens=+20%."
            )
        if path[0] in _AXES:
            raise ScenarioError(
                f"--counterfactual {text}: {path[0]} says which points there are, not what one is. Use batchsim run"
                f" --set {text}."
            )
        if path[0] == "policies":
            if len(path) < 3:
                raise ScenarioError(f"--counterfactual {text}: names no knob. Write policies.LABEL.KNOB=VALUE.")
            labels.add(path[1])
        if any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in keys):
            raise ScenarioError(f"--counterfactual {text}: another change is of the same key. Give one of them.")
        keys.append(key)
    if len(labels) > 1:
        raise ScenarioError(
            f"--counterfactual: changes knobs of {' and '.join(sorted(labels))}, but each policy is simulated alone."
            " Change one of them at a time."
        )
    return labels


def _check_axis(scenario: Scenario, changes: Sequence[str]) -> None:
    """ScenarioError for a change of a key that the point's load replaces anyway."""
    for text in changes:
        other = replaced_by(text.partition("=")[0].strip(), scenario.plain)
        if other.startswith("load."):
            raise ScenarioError(
                f"--counterfactual {text}: {other} stands in its place. Choose another tested load with --load, or use"
                f" batchsim run --set 'load={{{scenario.load_name}: [...]}}'."
            )


# ---- the scenario of a run


def _with_paths(plain: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """The scenario's plain values with the paths of its model and profile as they are found from here."""
    located = json.loads(json.dumps(plain))
    cost = located["cost"]
    for owner, key in ((located, "model"), (cost, "profile")) if isinstance(cost, dict) else ((located, "model"),):
        name = owner.get(key)
        if isinstance(name, str) and not Path(name).exists():
            owner[key] = next((str(folder / name) for folder in folders if (folder / name).exists()), name)
    return located


def _scenario(
    results: Results, plain: Mapping[str, Any], changes: Sequence[Change], folders: Sequence[Path], allow_code: bool
) -> Scenario:
    """The scenario that a run's manifest holds, with changes. It has no folder of its own."""
    name = str(results.manifest["scenario_name"])
    overrides = [f"{change.key}={json.dumps(change.after, ensure_ascii=False)}" for change in changes]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(json.dumps(plain, ensure_ascii=False), encoding="utf-8")
        try:
            scenario = load_scenario(str(path), overrides=overrides, trace_folders=folders, allow_code=allow_code)
        except ScenarioError as error:
            raise ScenarioError(_said(str(error), path, results)) from None
    places = {key: _said(place, path, results) for key, place in scenario.places.items()}
    # What was found nowhere is missed in the first of the folders, which the user knows.
    base = folders[0] if scenario.base == path.parent and folders else scenario.base
    return replace(scenario, source=str(results.path), places=places, base=base)


def _said(text: str, path: Path, results: Results) -> str:
    """`text` with the names that the user knows, of the option and of the results."""
    return (
        text.replace("--set ", "--counterfactual ")
        .replace(f"{path}:1:", f"{results.path}:")
        .replace(f"{path}:1", str(results.path))
    )


def _row(results: Results, policy: str, load: float, seed: int) -> dict[str, Any]:
    points = results.points
    rows = points[(points["policy"] == policy) & (points["load"] == load) & (points["seed"] == seed)]
    if rows.empty:
        results.requests(policy, load, seed)  # says which there are
    return {str(name): value for name, value in rows.iloc[0].items()}


def _spec(scenario: Scenario, policy: str, variant: str, results: Results) -> PolicySpec:
    for spec in scenario.specs:
        if (spec.label, spec.variant) == (policy, variant):
            return spec
    raise ScenarioError(f"{results.path}: its scenario has no policy {policy} {variant}. Run the scenario again.")


def _pinned(entry: Mapping[str, Any] | None, spec: PolicySpec) -> dict[str, Any]:
    """The policy's entry with its `best_of` knobs at the values that were best."""
    chosen = dict(entry or {})
    for knob, value in chosen.items():
        if isinstance(value, dict) and set(value) == {"best_of"}:
            chosen[knob] = spec.knobs[knob]
    return chosen


# ---- changes


def _change(text: str, plain: Mapping[str, Any], spec: PolicySpec, setup: Setup) -> Change:
    """The change that `KEY=VALUE` asks for; a value like `+20%` is relative to the point's."""
    key, _, value = (part.strip() for part in text.partition("="))
    path = key.split(".")
    if path[0] == "policies" and path[1] != spec.label:
        raise ScenarioError(
            f"--counterfactual {text}: is of another policy than {spec.label}. Write --policy {path[1]}."
        )
    before = _before(path, plain, spec, setup)
    relative = _RELATIVE.match(value)
    if relative is None:
        return Change(key, before, read_document(value, f"--counterfactual {text}").value)
    if before is None:
        raise ScenarioError(
            f"--counterfactual {text}: {key} is not stated, or no number, so {value} is of nothing. Write {key}=VALUE."
        )
    return Change(key, before, _scaled(before, 1 + Fraction(relative[1]) / 100, text))


def _before(path: Sequence[str], plain: Mapping[str, Any], spec: PolicySpec, setup: Setup) -> Any:
    """The value of a key in the point: stated, or known though it was not; else None."""
    stated = value_at(plain if path[0] != "policies" else {"policies": {spec.label: spec.knobs}}, path)
    if stated is not None:
        return stated
    if list(path) == ["kv", "tokens"]:
        return setup.kv.num_blocks * setup.kv.block_size
    if list(path) == ["max_model_len"]:
        return setup.max_model_len
    owner = spec.config if path[0] == "policies" and len(path) == 3 else None
    owner = setup.scenario.file.kv if path[0] == "kv" and len(path) == 2 else owner
    if owner is None or path[-1] not in {field.name for field in fields(owner)}:
        return None
    value = getattr(owner, path[-1])
    # A default with a unit is not how a scenario writes it.
    return value if isinstance(value, int) and not isinstance(value, bool) and not _has_unit(owner, path[-1]) else None


def _has_unit(owner: Any, name: str) -> bool:
    kind = str(next(field.type for field in fields(owner) if field.name == name))
    return any(unit in kind for unit in ("Duration", "Rate", "Size", "Bandwidth", "Share"))


def _scaled(value: Any, factor: Fraction, text: str) -> Any:
    """`factor` times a number, with its unit if it has one. Whole numbers stay whole, rounded to the nearest."""
    if isinstance(value, int) and not isinstance(value, bool):
        return round(value * factor)
    if isinstance(value, float):
        return float(Fraction(repr(value)) * factor)
    match = _NUMBER.match(value) if isinstance(value, str) else None
    if match is None:
        raise ScenarioError(f"--counterfactual {text}: {value!r} is no number. Write the value itself.")
    number = float(Fraction(match[1]) * factor)
    return f"{number:.15g}{match[2]}"


# ---- the two sides


def _simulated(setup: Setup, point: Point) -> Side:
    run: Run = simulate_point(setup, point)
    check_cohort(run)
    return _side(run.records, setup.scenario, measure(point_inputs(setup, run)).values)


def _side(records: Records, scenario: Scenario, values: dict[str, float | None]) -> Side:
    objectives = Objectives.of(scenario.plain)
    return Side(records, slo_misses(records, objectives), values, objectives.cohort(records))
