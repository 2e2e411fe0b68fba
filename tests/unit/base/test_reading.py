"""Configs that are imported for a value of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from batchsim.base.ranges import Config, PositiveInt
from batchsim.base.reading import later, read
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


def test_a_value_is_read_as_the_dataclass_that_is_named() -> None:
    """With lists as tuples, as JSON has them; what no value asks for is not imported."""
    assert read(Owner, {"group": {"count": 2, "sizes": [1, 2]}}) == Owner(Group(2, (1, 2)))
    assert read(Owner, {}) == Owner() and f"{__name__}.absent" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        read(Owner, {"other": {}})


def test_errors_stand_at_the_keys_of_the_whole() -> None:
    """All of a value's errors, each with its path from the outermost mapping on."""
    with pytest.raises(ValidationError) as caught:
        read(Owner, {"group": {"count": "two", "sizes": [1, "x"], "more": 1}})
    places = {error["loc"]: error["type"] for error in caught.value.errors()}
    assert places == {
        ("group", "count"): "int_type",
        ("group", "sizes", 1): "int_type",
        ("group", "more"): "unexpected_keyword_argument",
    }


@dataclass(frozen=True)
class Lot(Config):
    """Owners in a list, and one by itself."""

    owners: tuple[Owner, ...]
    rest: Group | None = None


def test_problems_know_the_dataclass_that_they_are_of() -> None:
    """The innermost: an unknown key as its owner, a number outside its range by its keys there."""
    value = {"owners": [{}, {"group": {"count": 0}, "more": 1}], "rest": {"count": 1, "more": 1}, "more": 1}
    with pytest.raises(ValidationError) as caught:
        read(Lot, value)
    problems = {error["loc"]: error for error in caught.value.errors()}
    owners = {loc: problem["ctx"]["owner"] for loc, problem in problems.items() if loc[-1] == "more"}
    assert owners == {("owners", 1, "more"): Owner, ("rest", "more"): Group, ("more",): Lot}
    assert problems["owners", 1, "group", "count"]["ctx"]["error"].keys == ("count",)


@pytest.mark.parametrize("member", get_args(ScenarioCost))
def test_every_kind_of_cost_is_that_of_its_class(member: Any) -> None:
    """The kind by which a scenario names a cost is the default of the field of the class at its path."""
    mark = get_args(member)[1]
    assert mark.config().__dataclass_fields__["kind"].default == mark.kind
