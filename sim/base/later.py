"""What is imported when it is needed first: what is wrong in a scenario is said in half the time.

numpy is, as something of it is read: a module that a scenario's check reads writes `from batchsim.base.later import np`
in the place of `import numpy as np`. A config is, as a scenario has it: `Later`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

from batchsim.base.plain import adapter, kind_of

__all__ = ["Later", "kind_named", "later", "np", "one_of"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)  # so that it is asked for once
            return value

    np = _Numpy()


@dataclass(frozen=True)
class Later:
    """Marks `Annotated[Any, Later("module:Class")]`: that dataclass, whose module is imported for a value of it; of a
    class that is there, `Later(Class)`, a validator is made for a value.

    Of a union's member `kind` is its kind. The two dunder methods are pydantic's protocol.
    """

    path: str | type
    kind: str = ""

    def config(self) -> Any:
        """The dataclass."""
        if isinstance(self.path, type):
            return self.path
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> dict[str, Any]:
        return {"type": "function-plain", "function": {"type": "with-info", "function": self._read}}

    def __get_pydantic_json_schema__(self, schema: object, handler: Any) -> Any:
        config = self.config()
        ref = f"{config.__module__}.{config.__qualname__}:{id(config)}"  # as pydantic has it, so that "$defs" has one
        named = {**adapter(config).core_schema, "ref": ref}
        return handler({"type": "definitions", "schema": named, "definitions": []})

    def _read(self, value: object, info: Any) -> Any:
        """`value` as the dataclass. A ValidationError of it stays one of the key that it stands at."""
        return adapter(self.config()).validate_json(json.dumps(value), context=info.context)


def later(path: str | type, kind: str = "") -> Any:
    """The type of the dataclass at `module:Class`, or that is given, as `Later` has it."""
    return Annotated[Any, Later(path, kind)]


def one_of(kinds: Mapping[str, str]) -> Any:
    """The union of the dataclasses at `module:Class` by their kinds."""
    return Union[tuple(later(path, kind) for kind, path in kinds.items())]  # noqa: UP007 - of types not yet there


def kind_named(member: Any) -> object:
    """The `kind` of a union's member: of a dataclass, or of one that is yet to be imported."""
    mark = next((mark for mark in get_args(member) if isinstance(mark, Later)), None)
    return kind_of(member) if mark is None else mark.kind
