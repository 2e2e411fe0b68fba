"""batchsim: simulates how batching policies serve LLM requests. One pure scheduler, two drivers.

    import sim
    results = sim.load_results("results/bursty")    # what `batchsim run bursty` left, as DataFrames

The names are fetched when asked for, so that a machine without pandas can import the parts that need none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.results import Results, load_results
    from sim.run import run_scenario
    from sim.scenario import load_scenario

_HOME = {
    "Results": "sim.results",
    "load_results": "sim.results",
    "load_scenario": "sim.scenario",
    "run_scenario": "sim.run",
}

__all__ = ["Results", "load_results", "load_scenario", "run_scenario"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
