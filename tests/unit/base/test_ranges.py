"""Every number that a config takes has a finite range, and the config refuses what lies outside."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import INT32_MAX, PositiveInt, Range
from batchsim.base.reading import Later
from batchsim.base.units import YEAR_NS, Duration, Rate, Share
from batchsim.cost.profile import Profile, SwapCost
from batchsim.policies.registry import POLICIES
from batchsim.scenario import load_scenario
from batchsim.scenario.config import ScenarioFile
from batchsim.scenario.schema import scenario_schema
from batchsim.workload.predictors import PredictorConfig


@cache
def _hints(config: Any) -> dict[str, Any]:
    return get_type_hints(config, include_extras=True)


def configs() -> list[Any]:
    """Every dataclass that a scenario, a policy's knobs or a profile is read into."""
    roots = [ScenarioFile, PredictorConfig, Profile, *(config for config, _ in POLICIES.values())]
    return list(dict.fromkeys(found for root in roots for found in _inside(root, set())))


def _inside(hint: Any, seen: set[Any]) -> Iterator[Any]:
    if isinstance(hint, type) and is_dataclass(hint) and hint not in seen:
        seen.add(hint)
        yield hint
        hints = _hints(hint)
        for field in fields(hint):
            yield from _inside(hints[field.name], seen)
    for part in get_args(hint):
        yield from _inside(part.config() if isinstance(part, Later) else part, seen)


def numbers_of(config: Any) -> Iterator[tuple[str, Any, Range | None]]:
    """(field, int or float, its range if it states one) of every number that `config` may hold."""
    for name, hint in _hints(config).items():
        if any(field.name == name and field.init for field in fields(config)):
            yield from ((name, *number) for number in _numbers(hint, None))


def _numbers(hint: Any, within: Range | None) -> Iterator[tuple[Any, Range | None]]:
    if hint in (int, float):
        yield hint, within
    elif get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        own = [mark for mark in marks if isinstance(mark, Range)]
        yield from _numbers(inner, own[-1] if own else within)
    else:  # a union, a list, a mapping; a Literal has no types inside
        for part in get_args(hint):
            yield from _numbers(part, within)


NUMBERS = [(config, *number) for config in configs() for number in numbers_of(config)]
NAMES = [f"{config.__name__}.{name}" for config, name, *_ in NUMBERS]


def test_the_walk_finds_the_configs() -> None:
    """The walk reaches nested configs, unions of kinds, items of lists and keys of mappings."""
    assert {"StaticConfig.batch_size", "Linear.per_token", "ModelQueuePolicy.max_queue_size"} <= set(NAMES)
    assert {"TraceConfig.rows", "TritonConfig.priority_queue_policy", "NoisyConfig.sigma", "Grid.ns"} <= set(NAMES)
    assert {"LoadConfig.users", "QueueScaler.every", "RateScale.factor", "Growth.months"} <= set(NAMES)


def test_every_number_has_a_finite_range_and_is_held_to_it() -> None:
    """What lies just outside the range, far outside or nowhere is refused with field, value and range; a fraction
    where a whole number belongs as such."""
    assert [name for name, (*_, within) in zip(NAMES, NUMBERS, strict=True) if within is None] == []
    for number in NUMBERS:
        _held_to_its_range(*number)


def _held_to_its_range(config: Any, name: str, kind: type, within: Range) -> None:
    assert math.isfinite(within.low) and math.isfinite(within.high) and within.low < within.high
    step = 1 if kind is int else 1e-9
    beside = [within.low - (0 if within.above else max(step, abs(within.low) * step))]
    beside += [within.high + (0 if within.below else max(step, within.high * step))]
    floats = [math.nan, math.inf, -math.inf, 1e308]
    hostile = [*([10**400] if kind is int else floats), 2**63, *([-1] if -1 not in within else [])]
    for value in (*beside, *hostile):
        message = _refusal(config, name, value)
        assert message.endswith(f"It must be {within}.") and within.show(kind(value)) in message, message
    for value in [1.5, *floats] if kind is int else [10**400]:
        assert ", expected " in _refusal(config, name, value)


def _refusal(config: Any, name: str, value: Any) -> str:
    with pytest.raises(ValueError) as refused:
        _post_init(config, name, value)
    message = str(refused.value)
    assert message.startswith(name) and len(message) < 200 and "\n" not in message, (config, message)
    return message


def _post_init(config: Any, name: str, value: Any) -> None:
    """Has the checks of `config` look at `value` in the place of a number of the field, and at nothing else."""
    bare = object.__new__(config)
    for field in fields(config):
        object.__setattr__(bare, field.name, None)
    object.__setattr__(bare, name, _placed(_hints(config)[name], value))
    bare.__post_init__()


def _placed(hint: Any, value: Any) -> Any:
    """`value` in a list, as a key or under one where the hint wants it there."""
    if get_origin(hint) in (tuple, list):
        return (_placed(get_args(hint)[0], value),)
    if get_origin(hint) is dict:
        return {value: None} if [*_numbers(get_args(hint)[0], None)] else {"key": value}
    for part in get_args(hint):
        if (placed := _placed(part, value)) is not value:
            return placed
    return value


def test_a_word_is_no_number() -> None:
    """A text where only a number may stand is refused; where a word may stand beside it, that word is not."""
    with pytest.raises(ValueError, match=r"base is '1', expected a number\."):
        SwapCost("1", 2.0, assumed=False)  # type: ignore[arg-type]
    file = load_scenario("chat", overrides=["workload.output_cap=exact"]).file
    assert file.workload.output_cap == "exact"


def test_a_range_can_leave_its_ends_out() -> None:
    """`above` leaves out the low end, `below` the high one; the text says which."""
    closed, above, below = Range(1, 5), Range(0, 1, above=True), Range(0, 1, below=True)
    assert [x in closed for x in (0, 1, 5, 6)] == [False, True, True, False]
    assert [x in above for x in (0, 1e-9, 1)] == [False, True, True]
    assert [x in below for x in (0, 0.5, 1)] == [True, True, False]
    assert [str(r) for r in (closed, above, below)] == [
        "from 1 to 5",
        "above 0 and at most 1",
        "at least 0 and below 1",
    ]
    assert str(Range(0, 1, above=True, below=True)) == "above 0 and below 1"


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (PositiveInt, 2**63, f"9223372036854775808. It must be from 1 to {INT32_MAX}."),
        (Duration, 36 * 10**41, "1.142e+26years. It must be from 0s to a year."),
        (Duration, -1, "-1ns. It must be from 0s to a year."),
        (Rate, 1e308, "1e+308/s. It must be from 1e-06/s to 1e+06/s."),
        (Share, 1.5, "150%. It must be from 0% to 100%."),
    ],
)
def test_value_and_range_are_told_in_the_units_of_a_scenario(kind: Any, value: float, text: str) -> None:
    """A quantity's range is written as a scenario writes the quantity."""
    within = [mark for mark in get_args(kind) if isinstance(mark, Range)][-1]
    with pytest.raises(ValueError) as refused:
        within.checked(value)
    assert str(refused.value) == f"is {text}"


def test_the_innermost_range_of_a_quantity_is_replaced() -> None:
    """A narrower range around a quantity is the one that counts."""
    assert get_args(Annotated[Duration, Range(5, YEAR_NS)])[-1] == Range(5, YEAR_NS)
    (every,) = [within for name, _, within in numbers_of(_config("QueueScaler")) if name == "every"]
    assert str(every) == "from 1ns to a year"


def _config(name: str) -> Any:
    return next(config for config in configs() if config.__name__ == name)


def test_the_schema_states_the_ranges() -> None:
    """`batchsim schema` gives bounds for plain numbers, and in words for those with a unit."""
    schema = scenario_schema()["$defs"]
    seqs = schema["policy_continuous"]["properties"]["max_num_seqs"]["anyOf"][0]
    assert (seqs["minimum"], seqs["maximum"]) == (1, INT32_MAX)
    assert schema["Constant"]["properties"]["step"]["description"].endswith("; from 1ns to 3,600s")


HOSTILE = [
    ("seeds=9223372036854775808", "seeds is"),
    ("policies.static.batch_size=9223372036854775808", "policies.static: batch_size is"),
    ("policies={dynamic: {max_batch_size: 8, priority_levels: 2147483648}}", "policies.dynamic: priority_levels is"),
    ("policies={ray_serve: {batch_wait_timeout_s: 1e308}}", "policies.ray_serve: batch_wait_timeout_s is"),
    ("cost={kind: constant, step: 1e30h}", "cost: step is"),
    (
        "replicas={count: 2, router: {kind: prefix_affinity, prefix_tokens: 64, load_factor: 1e308}}",
        "replicas.router: load_factor is",
    ),
    ("load.mean_rate=[1e30/s]", "load: mean_rate[0] is"),
]


@pytest.mark.parametrize(("override", "where"), HOSTILE, ids=[where for _, where in HOSTILE])
def test_a_scenario_with_such_a_number_is_refused(override: str, where: str) -> None:
    """One line says where the number stands, what it is and what it may be."""
    with pytest.raises(ScenarioError) as refused:
        load_scenario("bursty", overrides=[override])
    message = str(refused.value)
    assert message.startswith("--set ") and f": {where} " in message and " It must be " in message
