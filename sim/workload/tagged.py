"""How a config field says that its `kind:` key chooses among several dataclasses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from batchsim.base.problems import OTHER
from batchsim.base.reading import kind_named, later


@dataclass(frozen=True)
class ByKind:
    """Marks `Annotated[A | B, ByKind()]`: the `kind` a scenario writes names the one class that is meant.

    Without it a validator would try every class and report the errors of all. `default` is the kind of a mapping that
    has none. The dunder method is the protocol by which a validator picks this up without being imported here.
    """

    default: str | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: Any) -> dict[str, Any]:
        discriminator: str | Callable[[object], object] = "kind"
        if self.default is not None:
            discriminator = self._kind
        kinds = {kind_named(cls): later(cls) if isinstance(cls, type) else cls for cls in get_args(source)}
        choices = {kind: handler.generate_schema(cls) for kind, cls in kinds.items()}
        union = {"type": "tagged-union", "choices": choices, "discriminator": discriminator}
        return {"type": "function-wrap", "function": {"type": "with-info", "function": self._own}, "schema": union}

    def _own(self, value: object, handler: Callable[[object], Any], info: Any) -> Any:
        """The config that the validator's context has for `value` of the user's own kind, else one of the classes."""
        own = (info.context or {}).get("own")
        return own[text] if own and (text := json.dumps(value)) in own else handler(value)

    def _kind(self, value: object) -> object:
        if isinstance(value, dict):
            return value.get("kind", self.default)
        return getattr(value, "kind", self.default)


@dataclass(frozen=True)
class OrWord:
    """Marks `Annotated[A | Literal[WORD], OrWord(WORD)]`: either that word or an A, whose errors alone are reported.

    Without a word, in `Annotated[A | str, OrWord()]`: any text, or an A.
    """

    word: str | None = None

    def __get_pydantic_core_schema__(self, source: object, handler: Any) -> dict[str, Any]:
        other, literal = get_args(source)
        choices = {"word": handler.generate_schema(literal), OTHER: handler.generate_schema(other)}
        return {"type": "tagged-union", "choices": choices, "discriminator": self._which}

    def _which(self, value: object) -> str:
        return "word" if isinstance(value, str) and self.word in (None, value) else OTHER
