"""A user's own cost, router, autoscaler, arrivals and length predictor, `kind: "module:Class"`, the class being the
config that builds it; and trace reader."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from batchsim.base.errors import ScenarioError, TraceError
from batchsim.base.installed import installed
from batchsim.base.plain import value_at
from batchsim.base.reading import Later, kind_named
from batchsim.cost.kinds import COSTS
from batchsim.policies.named_policy import check_allowed, own_code
from batchsim.scenario.check_values import check_values
from batchsim.scenario.config import ScenarioFile
from batchsim.scenario.document import Document
from batchsim.scenario.document import Path as Keys
from batchsim.scenario.long_forms import costs
from batchsim.workload.traces.own_reader import reader_class

if TYPE_CHECKING:
    from batchsim.workload.predictors import OwnPredictor
    from batchsim.workload.traces.trace_config import TraceConfig

_BASES = {
    "router": Later("batchsim.base.ranges:Config"),
    "autoscaler": Later("batchsim.drive.fleet.scaling.autoscaler:AutoscalerConfig"),
    "arrivals": Later("batchsim.workload.processes:OwnArrivals"),
    "cost": Later("batchsim.cost.own_cost:OwnCost"),
    "predictor": Later("batchsim.workload.predictors:OwnPredictor"),
}
"""By the key whose kind may be a class of the user's, the class that it derives from."""
_PLACES: tuple[Keys, ...] = (
    ("replicas", "router"),
    ("replicas", "autoscaler"),
    ("plan", "router"),
    ("workload", "arrivals"),
)
"""Where a scenario has such keys; it has a cost in several places, and predictors in its policies."""
_METHODS = {"router": ("build", "(self, seed)"), "arrivals": ("times_s", "(self, random)")}
_METHODS["cost"] = ("step_ns", "(self, step)")
_METHODS["predictor"] = ("predicted_tokens", "(self, request, true_tokens, random)")
"""What such a class must define, with its signature; `build(self)` unless said here."""


_GROUPS = {"arrivals": "arrivals"}
"""The entry points of a key's kinds, where they are not called by its plural."""


def _routers() -> set[str]:
    from batchsim.drive.fleet.routing import ROUTERS

    return {*ROUTERS}


def _kinds(union: str) -> set[str]:
    """The kinds of the members of a union of configs, that is at `module:NAME`."""
    config = Later(union).config()
    members = get_args(get_args(config)[0]) if get_origin(config) is Annotated else get_args(config)
    return {str(kind_named(member)) for member in members}


_SHIPPED: dict[str, Callable[[], set[str]]] = {
    "router": _routers,
    "autoscaler": lambda: _kinds("batchsim.drive.fleet.scaling.kinds:Scaler"),
    "arrivals": lambda: _kinds("batchsim.workload.workload_config:Arrivals"),
    "cost": lambda: {*COSTS, "deployment"},
    "predictor": lambda: _kinds("batchsim.workload.predictors:PredictorConfig"),
}
"""The shipped kinds by key."""


def own_configs(document: Document, *, allow_code: bool) -> dict[str, Any]:
    """The configs of the user's own classes that a scenario names, each by the JSON of what the scenario writes for it;
    importing them runs their modules.

    ScenarioError unless `allow_code`, and for a class that is no such config.
    """
    configs = {}
    _name_reader(value_at(document.value, ("workload", "trace")))
    for path in (*_PLACES, *((*path, "cost") for path, _ in costs(document.value))):
        entry = value_at(document.value, path)
        if (config := _own_config(entry, document, path, allow_code=allow_code)) is not None:
            configs[json.dumps(entry)] = config
    return configs


def own_predictor(entry: object, document: Document, path: Keys, *, allow_code: bool) -> OwnPredictor | None:
    """The predictor of the user's own that `entry`, at `path`, names; None for one of ours. Errors of `own_configs`."""
    return _own_config(entry, document, path, allow_code=allow_code)


def _own_config(entry: object, document: Document, path: Keys, *, allow_code: bool) -> Any:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(kind, str):
        return None
    what = str(path[-1])
    if ":" not in kind:
        shipped = _SHIPPED[what]()
        if kind in shipped or (target := installed(_GROUPS.get(what, f"{what}s"), shipped).get(kind)) is None:
            return None
        entry["kind"] = kind = target
    try:
        check_allowed(kind, allow_code=allow_code)
        with own_code(what, kind):
            config = _config_class(kind, what)
    except ScenarioError as error:
        raise ScenarioError(f"{document.where((*path, 'kind'))}: {error}") from None
    return check_values(config, {key: entry[key] for key in entry if key != "kind"}, document, path)


def _name_reader(trace: Any) -> None:
    """Writes out a reader of `trace` that an installed package adds."""
    reader = trace.get("reader") if isinstance(trace, dict) else None
    if isinstance(reader, str) and ":" not in reader:
        trace["reader"] = installed("readers").get(reader, reader)


def check_reader(document: Document, trace: TraceConfig | None, *, allow_code: bool) -> None:
    """ScenarioError unless the trace's own reader, where it has one, is allowed and is one; importing it runs it."""
    if trace is None or trace.reader is None:
        return
    try:
        check_allowed(trace.reader, allow_code=allow_code)
        with own_code("trace reader", trace.reader):
            reader_class(trace.reader)
    except (ScenarioError, TraceError) as error:
        raise ScenarioError(f"{document.where(('workload', 'trace', 'reader'))}: {error}") from None


def _config_class(kind: str, what: str) -> type:
    base = _BASES[what].config()
    module, _, name = kind.partition(":")
    config = getattr(importlib.import_module(module), name)
    if not (isinstance(config, type) and is_dataclass(config) and issubclass(config, base)):
        raise ScenarioError(
            f"{kind} is no dataclass that derives from {base.__name__}. Name the config that builds the {what}, and"
            f" write @dataclass(frozen=True) class {name}({base.__name__}), from {base.__module__}."
        )
    method, signature = _METHODS.get(what, ("build", "(self)"))
    if getattr(config, method, None) is getattr(base, method, None):
        raise ScenarioError(f"{kind} has no {method}. Write def {method}{signature} for it.")
    return config


def own_kinds(file: ScenarioFile) -> Iterator[type]:
    """The classes of costs, router, autoscaler, arrivals and trace reader that a scenario names, where these are the
    user's own."""
    trace = file.workload.trace
    if trace is not None and trace.reader is not None:
        yield reader_class(trace.reader)
    configs: list[Any] = [file.workload.arrivals, file.cost]
    if file.replicas is not None:
        configs += [file.replicas.router, file.replicas.autoscaler]
        configs += [group.cost for group in (file.replicas.groups or {}).values()]
    if file.plan is not None:
        configs += [file.plan.router, *(offer.cost for offer in file.plan.gpus.values())]
    yield from (type(config) for config in configs if not type(config).__module__.startswith(("batchsim.", "builtins")))
