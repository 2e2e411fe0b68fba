"""Fitted traffic as the text of a scenario, which needs the trace no more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from batchsim.base.errors import cut
from batchsim.base.plain import to_plain
from batchsim.base.ranges import INT32_MAX
from batchsim.base.units import Quantity, parse_duration_ns, parse_rate_rps, parse_share
from batchsim.workload.workload_config import WorkloadConfig

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*", re.ASCII)  # what YAML reads as the same word without quotes
_NOT_OURS = ("workload", "load", "plan", "vary", "seeds", "replicas")
SEEDS = 3
_COMMENT = 1000  # letters of a line


def scenario_text(engine: Mapping[str, Any], workload: WorkloadConfig, comments: tuple[str, ...]) -> str:
    """The YAML text of a scenario of `workload` for the engine of another, whose plain values are `engine`."""
    lines = [f"# {cut(comment, _COMMENT)}" for comment in comments]  # they name the trace's file, whatever is in that
    kept = {name: value for name, value in engine.items() if name not in _NOT_OURS}
    lines += [f"{name}: {flow(value)}" for name, value in kept.items() if name not in ("policies", "slo")]
    lines.append("workload:")
    lines += [f"  {name}: {flow(value)}" for name, value in written(workload).items()]
    rate = workload.arrivals.mean_rate  # type: ignore[union-attr]
    rates = ", ".join(f"{rate * times:.6g}/s" for times in (0.5, 1, 1.5))
    lines += [f"policies: {flow(kept['policies'])}", f"load: {{mean_rate: [{rates}]}}", f"slo: {flow(kept['slo'])}"]
    return "\n".join([*lines, f"seeds: {SEEDS}", ""])


def written(config: Any) -> dict[str, Any]:
    """The fields of a config as a scenario writes them, with units; without those at their defaults, but for `kind`."""
    hints = get_type_hints(type(config), include_extras=True)
    document: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if each.name == "kind" or value != default:
            document[each.name] = _written(value, hints[each.name])
    if "kind" in document:
        document = {"kind": document.pop("kind"), **document}
    return document


def _written(value: Any, hint: Any) -> Any:
    quantity = _quantity(hint)
    if is_dataclass(value):
        return written(value)
    if isinstance(value, Mapping):
        return {name: _written(item, get_args(hint)[-1]) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_written(item, get_args(hint)[0]) for item in value]
    if quantity is None or value is None or isinstance(value, str):
        return to_plain(value)
    if quantity.parse is parse_duration_ns:
        return _duration(value)
    if quantity.parse is parse_rate_rps:
        return f"{value!r}/s"
    assert quantity.parse is parse_share, "the quantities of a workload"
    return f"{100 * value!r}%"


def _quantity(hint: Any) -> Quantity | None:
    """The unit by which a field of type `hint` is written, None without one."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return next((mark for mark in marks if isinstance(mark, Quantity)), None) or _quantity(inner)
    return next(filter(None, map(_quantity, get_args(hint))), None)


def _duration(ns: int) -> str:
    for unit, scale in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        text = f"{ns / scale:.6g}{unit}"
        if parse_duration_ns(text) == ns:
            return text
    return f"{ns}ns"


def cap_above(longest: int) -> int:
    """A cap on output tokens that cuts no answer of up to `longest`: the smallest such power of two from 64 on, but at
    most INT32_MAX."""
    return min(max(64, 1 << (longest - 1).bit_length()), INT32_MAX)


def flow(value: Any) -> str:
    """Plain values on one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(str(name))}: {flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in ("true", "false", "null")
        return (
            value if plain or (value[:1].isdigit() and value[-1:] in "s%" and " " not in value) else json.dumps(value)
        )
    return json.dumps(value)
