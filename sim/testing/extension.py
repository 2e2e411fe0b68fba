"""The checks of a thing by its name: a shipped one, one of an installed package, or `module:Class` of a user's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from batchsim.base.errors import ScenarioError, nearest, shown
from batchsim.base.installed import installed
from batchsim.base.ranges import Config
from batchsim.base.reading import Later, adapter
from batchsim.cost.kinds import COSTS
from batchsim.cost.own_cost import OwnCost
from batchsim.drive.fleet.routing import ROUTERS
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig
from batchsim.policies.named_policy import own_code, policy_and_config
from batchsim.policies.registry import POLICIES
from batchsim.testing.check import CASES, Check
from batchsim.testing.cost_checks import check_cost
from batchsim.testing.fleets import SCALERS
from batchsim.testing.load_checks import check_arrivals, check_predictor, check_reader
from batchsim.testing.policy_checks import check_policy
from batchsim.testing.router_checks import check_autoscaler, check_router
from batchsim.workload.predictors import OwnPredictor, PredictorConfig
from batchsim.workload.processes import OwnArrivals, Process

KINDS = ("policy", "router", "cost", "autoscaler", "arrivals", "predictor", "reader")
_GROUPS = dict(
    zip(KINDS, ("policies", "routers", "costs", "autoscalers", "arrivals", "predictors", "readers"), strict=True)
)
_CHECKS = {
    "router": check_router,
    "cost": check_cost,
    "autoscaler": check_autoscaler,
    "arrivals": check_arrivals,
    "predictor": check_predictor,
}
_BASES = {"cost": OwnCost, "autoscaler": AutoscalerConfig, "arrivals": OwnArrivals, "predictor": OwnPredictor}


def _by_kind(configs: Iterable[Any]) -> dict[str, Any]:
    return {config.kind: config for config in configs if isinstance(getattr(config, "kind", None), str)}


def shipped(kind: str) -> dict[str, Any]:
    """The shipped things of a kind by their names, but for trace readers, which are formats; costs are imported."""
    if kind == "policy":
        return {name: name for name in POLICIES}
    if kind == "cost":
        return {name: Later(path).config() for name, path in COSTS.items() if name != "free"}
    tables: dict[str, Iterable[Any]] = {
        "router": ROUTERS.values(),
        "autoscaler": SCALERS,
        "arrivals": get_args(Process),
        "predictor": get_args(get_args(PredictorConfig)[0]),
    }
    return _by_kind(tables.get(kind, ()))


def extension(name: str, kind: str = "") -> tuple[str, Any]:
    """(Its kind, what is checked) of a shipped thing, or of `module:Class`, whose module is imported. ScenarioError
    where there is none, or several kinds have one and none is said by `kind`."""
    if ":" not in name:
        name = _of_a_package(name, kind) or name
    if ":" in name:
        with own_code(kind or "extension", name):
            module, _, there = name.partition(":")
            thing = getattr(import_module(module), there)
        return kind or _kind_of(thing, name), thing
    kinds = [each for each in ((kind,) if kind else KINDS) if name in shipped(each)]
    if not kinds:
        known = [each for one in ((kind,) if kind else KINDS) for each in shipped(one)]
        raise ScenarioError(f"{shown(name)} is nothing shipped. {nearest(name, known)} Your own is named module:Class.")
    if len(kinds) > 1:
        raise ScenarioError(f"{name} is the name of {' and of '.join(kinds)}. Say which: --kind {kinds[0]}.")
    return kinds[0], shipped(kinds[0])[name]


def _of_a_package(name: str, kind: str) -> str:
    """The `module:Class` that an installed package gives the `name`, of this kind or of any; "" of none."""
    targets = {each: installed(_GROUPS[each], shipped(each)).get(name, "") for each in KINDS if kind in ("", each)}
    return next((target for target in targets.values() if target), "")


def _kind_of(thing: Any, name: str) -> str:
    for kind, base in _BASES.items():
        if isinstance(thing, type) and issubclass(thing, base):
            return kind
    if isinstance(thing, type) and issubclass(thing, Config) and callable(getattr(thing, "build", None)):
        return "router"
    for kind, method in (("reader", "records"), ("policy", "schedule")):
        if callable(getattr(thing, method, None)):
            return kind
    raise ScenarioError(f"{name} is none of {', '.join(KINDS)}. Name a policy's class, a reader's, or a config's.")


def checks_of(
    kind: str, thing: Any, *, knobs: Mapping[str, str] | None = None, cases: int = CASES, file: Path | None = None
) -> list[Check]:
    """The checks of a thing as `extension` returns it. `knobs` are values as a scenario writes them, `file` is what a
    reader is to read. ScenarioError for a knob that is none, and a reader without a file."""
    if kind == "reader":
        if file is None:
            raise ScenarioError("a trace reader is checked on a file that it can read. Name one: --file LOG.")
        return check_reader(thing, file)
    if file is not None:
        raise ScenarioError(f"--file is for trace readers, and this is of kind {kind}. Drop it.")
    config = policy_and_config(thing)[0] if kind == "policy" else thing
    typed = {name: _typed(config, name, text) for name, text in (knobs or {}).items()}
    return (check_policy if kind == "policy" else _CHECKS[kind])(thing, knobs=typed, cases=cases)


def _typed(config: Any, name: str, text: str) -> Any:
    """The value of the knob `name` that `text` says, as in a scenario."""
    hints = get_type_hints(config, include_extras=True)
    if name not in hints:
        raise ScenarioError(f"--set {name}: {config.__name__} has no such knob. {nearest(name, hints)}")
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    try:
        return adapter(hints[name]).validate_json(json.dumps(value))
    except ValidationError as error:
        said = str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, ").rstrip(".")
        raise ScenarioError(f"--set {name}={text}: {said}.") from None
