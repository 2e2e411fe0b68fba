"""Configs that are imported for a value of them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from batchsim.base.later import later
from batchsim.base.ranges import Config, PositiveInt
from batchsim.scenario.scenario_cost import ScenarioCost

Inner = later(f"{__name__}:Group")
Broken = later(f"{__name__}.absent:Nothing")


@dataclass(frozen=True)
class Group(Config):
    """Some of them."""

    count: PositiveInt
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Owner(Config):
    """What has a group, and could have what is not there."""

    group: Inner | None = None
    other: Broken | None = None


def read(value: object) -> Any:
    return TypeAdapter(Owner).validate_json(json.dumps(value))


def test_a_value_is_read_as_the_dataclass_that_is_named() -> None:
    """With lists as tuples, as JSON has them; what no value asks for is not imported."""
    assert read({"group": {"count": 2, "sizes": [1, 2]}}) == Owner(Group(2, (1, 2)))
    assert read({}) == Owner() and f"{__name__}.absent" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        read({"other": {}})


def test_errors_stand_at_the_keys_of_the_whole() -> None:
    """All of a value's errors, each with its path from the outermost mapping on."""
    with pytest.raises(ValidationError) as caught:
        read({"group": {"count": "two", "sizes": [1, "x"], "more": 1}})
    places = {error["loc"]: error["type"] for error in caught.value.errors()}
    assert places == {
        ("group", "count"): "int_type",
        ("group", "sizes", 1): "int_type",
        ("group", "more"): "unexpected_keyword_argument",
    }


@pytest.mark.parametrize("member", get_args(ScenarioCost))
def test_every_kind_of_cost_is_that_of_its_class(member: Any) -> None:
    """The kind by which a scenario names a cost is the default of the field of the class at its path."""
    mark = get_args(member)[1]
    assert mark.config().__dataclass_fields__["kind"].default == mark.kind
