"""How many random cases the tests draw: few in `make test`, more in `make test-all` (tests/support/random_cases.py).
And which slow tests run where only a share of them is to: `--drawn 1/12:SEED`, as `.ci/run` has it for each commit.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Generator
from fractions import Fraction

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads that wait for small matrices to be split take most of the time

import pytest
from hypothesis import settings

from tests.support.random_cases import QUICK, THOROUGH


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drawn", metavar="SHARE:SEED", help="of the slow tests this share alone (1/12), drawn by the seed"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """What is imported and collected stays: the garbage collector need not look through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    drawn: str | None = config.getoption("--drawn")
    if drawn is None:
        return
    share, _, seed = drawn.partition(":")
    below = int(Fraction(share) * (1 << 256))
    kept, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        # The blocks of the docs go on from each other: all of them or none.
        drawn_by = item.path.name if item.path.parent.name == "docs" else item.nodeid
        number = int(hashlib.sha256(f"{seed} {drawn_by}".encode()).hexdigest(), 16)
        (kept if number < below or not item.get_closest_marker("slow") else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("quick", max_examples=QUICK)
    settings.register_profile("thorough", max_examples=THOROUGH)
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "thorough")
