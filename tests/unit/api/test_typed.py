"""What type checkers are told of a class is what it takes."""

from __future__ import annotations

import ast
import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import batchsim
from batchsim.api import typed
from batchsim.base.units import Quantity

TYPED: dict[str, Any] = {
    name: kind for name, kind in vars(typed).items() if isinstance(kind, type) and kind.__module__ == typed.__name__
}


@pytest.mark.parametrize("name", TYPED)
def test_the_arguments_are_those_of_the_config_in_its_order(name: str) -> None:
    """All but `kind`, which the class says; those without a default are asked for, the others have the config's."""
    config: Any = getattr(batchsim, name)
    assert TYPED[name].__mro__[1] is config
    told = list(inspect.signature(TYPED[name].__init__).parameters.values())[1:]
    takes = [field for field in fields(config) if field.init and field.name != "kind"]
    assert [each.name for each in told] == [field.name for field in takes]
    for each, field in zip(told, takes, strict=True):
        asked = field.default is MISSING and field.default_factory is MISSING
        assert (each.default is inspect.Parameter.empty) == asked
        assert asked or each.default in (field.default, ...)


def test_every_class_with_a_quantity_says_that_it_may_be_a_text() -> None:
    """Those of the package whose numbers have units, found by their fields."""
    from typing import get_type_hints

    def has_quantity(kind: Any) -> bool:
        return any(Quantity.__name__ in repr(hint) for hint in get_type_hints(kind, include_extras=True).values())

    kinds = {name: getattr(batchsim, name) for name in batchsim.__all__}
    with_units = {name for name, kind in kinds.items() if hasattr(kind, "__dataclass_fields__") and has_quantity(kind)}
    assert with_units - {"Precision", "Sweep", "Results"} <= set(TYPED)


def test_type_checkers_are_told_of_all_names_that_are_there() -> None:
    """The names that the stub imports, from which those at run time are made, are those that it exports."""
    stub = ast.parse(Path(batchsim.__file__).with_suffix(".pyi").read_text())
    (exported,) = (node.value for node in stub.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(exported) == batchsim.__all__
