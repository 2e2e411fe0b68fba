"""Dataclasses as JSON values and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from batchsim.base.plain import from_plain, to_plain
from batchsim.workload.tagged import ByKind


@dataclass(frozen=True)
class Square:
    side: float
    kind: Literal["square"] = "square"


@dataclass(frozen=True)
class Circle:
    radius: float
    kind: Literal["circle"] = "circle"


@dataclass(frozen=True)
class Drawing:
    shapes: tuple[Annotated[Square | Circle, ByKind()], ...]
    size: tuple[int, int]
    names: dict[int, str]
    scale: int | Literal["auto"] | None = None
    extra: Any = None


DRAWINGS = [
    Drawing((Square(1.5), Circle(2)), (3, 4), {7: "seven"}, "auto", [1, {"a": None}]),
    Drawing((), (0, 0), {}, 5),
]


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_plain_values_come_back_equal(drawing: Drawing) -> None:
    """Unions by kind, fixed tuples, integer keys and literals survive JSON."""
    assert from_plain(Drawing, json.loads(json.dumps(to_plain(drawing)))) == drawing


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"size": [1]}, "size[1] is missing"),
        ({"size": 1}, "size is 1, expected a list"),
        ({"names": {"x": "y"}}, "names.x is 'x', expected a whole number"),
        ({"shapes": [{"side": 1.0, "kind": "oval"}]}, "shapes[0].kind is 'oval', expected one of 'square', 'circle'"),
        ({"shapes": [{"side": 1.0, "kind": "circle"}]}, "shapes[0].radius is missing"),
        ({"scale": 1.5}, "scale is 1.5, expected a whole number"),
        ({"scale": True}, "scale is True, expected a whole number"),
    ],
)
def test_plain_values_that_do_not_fit_are_named(change: dict[str, Any], complaint: str) -> None:
    """The first wrong value is told with its path."""
    plain = {"shapes": [], "size": [0, 0], "names": {}, "scale": None, "extra": None} | change
    with pytest.raises(ValueError) as caught:
        from_plain(Drawing, plain)
    assert complaint in str(caught.value)


def test_what_json_cannot_hold_is_refused() -> None:
    """A set, or a knob of a class of its own, has no plain form."""
    with pytest.raises(TypeError, match="set has no plain form"):
        to_plain({"a": [{1}]})
