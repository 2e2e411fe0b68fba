"""A named check of an extension, and the random cases that the checks of one extension are held on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from batchsim.base.errors import ScenarioError, cut

T = TypeVar("T")
CASES = 20
"""The random cases that a check is held on unless it is said how many."""


class NotAsDeclared(AssertionError):  # noqa: N818 - as batchsim's other errors
    """A deviation is declared of a thing, and none of the cases shows it."""


@dataclass(frozen=True)
class Check:
    """A property of an extension by its name. Calling it raises AssertionError where the property does not hold, or
    whatever the extension itself raises.

    `deviation`: why the extension is declared not to have it (its `deviations`). Then that is no failure, but
    NotAsDeclared is where all of enough `cases` have it.
    """

    name: str
    hold: Callable[[], None]
    deviation: str = ""
    cases: int = CASES

    @property
    def __name__(self) -> str:  # the id that pytest gives a parameter
        return self.name

    def __call__(self) -> None:
        if not self.deviation:
            self.hold()
            return
        try:
            self.hold()
        except AssertionError:
            return
        if self.cases >= CASES:
            raise NotAsDeclared(
                f"{self.name}: declared ({self.deviation}), and no case shows it. Drop it from deviations."
            )


@dataclass
class Cases(Generic[T]):
    """`count` random cases of a strategy, the same in every run, drawn when the first check asks for them."""

    strategy: st.SearchStrategy[T]
    count: int = CASES
    whose: str = "it"
    _settings: dict[str, Any] = field(
        default_factory=lambda: {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    )

    @cached_property
    def drawn(self) -> list[T]:
        """The cases. ScenarioError where hardly any draw makes one."""
        cases = list[T]()

        @settings(max_examples=self.count, derandomize=True, phases=[Phase.generate], **self._settings)
        @given(self.strategy)
        def draw(case: T) -> None:
            cases.append(case)

        try:
            draw()
        except Unsatisfiable:
            raise ScenarioError(
                f"{self.whose}: random knobs hardly ever make a config. Fix those that must fit each other:"
                " --set KNOB=VALUE (in Python knobs={...})."
            ) from None
        return cases

    def all(self, holds: Callable[[T], None]) -> Callable[[], None]:
        """A check that `holds` of every case; where not, it raises what `holds` does of the smallest of those, which
        stands in a note."""

        def hold() -> None:
            failed = [(len(repr(case)), number, case, error) for number, case in enumerate(self.drawn)
                      if (error := _raised(case, holds)) is not None]  # fmt: skip
            if failed:
                _, _, case, error = min(failed, key=lambda one: one[:2])
                error.add_note(f"{len(failed)} of {self.count} cases; the smallest: {case}")
                raise error

        return hold


def _raised(case: T, holds: Callable[[T], None]) -> Exception | None:
    try:
        holds(case)
    except Exception as error:
        return error
    return None


def named(thing: Any, holds: Mapping[str, Callable[[], None]], cases: int = CASES) -> list[Check]:
    """The checks by name, each on as many `cases`, with what `thing` declares in its `deviations`: a mapping from a
    check's name to a reason.

    ScenarioError where it declares a deviation that no check has.
    """
    declared: Mapping[str, str] = getattr(thing, "deviations", {})
    if unknown := sorted(set(declared) - set(holds)):
        raise ScenarioError(f"{name_of(thing)}.deviations: no check is called {cut(', '.join(unknown))}.")
    return [Check(name, hold, declared.get(name, ""), cases) for name, hold in holds.items()]


def name_of(thing: Any) -> str:
    """The name of a class, or of an instance's class."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def refused_in_one_line(config: Any, knobs: Mapping[str, Any]) -> Any:
    """The config of these knobs; None where it refuses them. AssertionError where that is no sentence on one line."""
    try:
        return config(**knobs)
    except ValueError as error:
        one_line(error)
        return None


def one_line(error: BaseException) -> None:
    """AssertionError unless the text of `error` is a sentence on one line."""
    text = str(error)
    assert text.strip() and "\n" not in text, f"{type(error).__name__} is no line: {text!r}"
