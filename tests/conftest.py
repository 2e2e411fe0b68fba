"""How many random cases the tests draw that do not say so themselves: few in `make test`, more in `make test-all`."""

from __future__ import annotations

import pytest
from hypothesis import settings

QUICK, THOROUGH = 3, 12


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("quick", max_examples=QUICK)
    settings.register_profile("thorough", max_examples=THOROUGH)
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "thorough")
