"""How many random cases a test draws: in `make test` an eighth of those that it draws elsewhere, mutants included."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from hypothesis import given, settings

QUICK, THOROUGH = 3, 12
"""The cases of tests that do not say how many."""
_SHARE = 8


def random_cases(examples: int, **more: Any) -> settings:
    """Settings of a test that draws so many cases, in `make test` an eighth of them."""
    few = settings.get_current_profile_name() == "quick"
    return settings(max_examples=max(examples // _SHARE, QUICK) if few else examples, deadline=None, **more)


def few_and_many(check: Callable[..., object], *cases: Any, few: int, many: int) -> tuple[Any, Any]:
    """Two tests of `check` on random `cases`, whatever it returns: one of so few, and a slow one of so many."""

    @wraps(check)
    def checked(**drawn: Any) -> None:
        check(**drawn)

    return random_cases(few)(given(*cases)(checked)), pytest.mark.slow(random_cases(many)(given(*cases)(checked)))
