"""How many random cases a test draws: in `make test` an eighth of those that it draws elsewhere, mutants included."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

QUICK, THOROUGH = 3, 12
"""The cases of tests that do not say how many."""
_SHARE = 8


def random_cases(examples: int, **more: Any) -> settings:
    """Settings of a test that draws so many cases, in `make test` an eighth of them."""
    few = settings.get_current_profile_name() == "quick"
    return settings(max_examples=max(examples // _SHARE, QUICK) if few else examples, deadline=None, **more)
