"""batchsim: simulates how batching policies serve LLM requests. One pure scheduler, two drivers.

    import sim
    results = sim.load_results("results/bursty")    # what `batchsim run bursty` left, as DataFrames

The names are fetched when asked for, so that a machine without pandas can import the parts that need none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.capacity.run import find_capacities
    from sim.curves.precision import Precision
    from sim.planning.plan import plan_tables
    from sim.report.capacity import capacity_picture, capacity_text
    from sim.report.causes import causes as misses
    from sim.report.causes import causes_picture as misses_picture
    from sim.report.closeup import latency_cdf, timeline
    from sim.report.plots import p99_vs_qps
    from sim.report.story import story as life
    from sim.report.story import story_text as life_text
    from sim.results.read import Results, load_results
    from sim.run import run_scenario
    from sim.scenario import load_scenario
    from sim.sweep.points import Sweep

_HOME = {
    "Precision": "sim.curves.precision",
    "Results": "sim.results.read",
    "Sweep": "sim.sweep.points",
    "capacity_picture": "sim.report.capacity",
    "capacity_text": "sim.report.capacity",
    "find_capacities": "sim.capacity.run",
    "latency_cdf": "sim.report.closeup",
    "life": "sim.report.story:story",
    "life_text": "sim.report.story:story_text",
    "load_results": "sim.results.read",
    "load_scenario": "sim.scenario",
    "misses": "sim.report.causes:causes",
    "misses_picture": "sim.report.causes:causes_picture",
    "p99_vs_qps": "sim.report.plots",
    "plan_tables": "sim.planning.plan",
    "run_scenario": "sim.run",
    "timeline": "sim.report.closeup",
}
"""Where each name is, and after a colon what it is called there, since modules have the shorter names."""

__all__ = [
    "Precision", "Results", "Sweep", "capacity_picture", "capacity_text", "find_capacities", "latency_cdf", "life",
    "life_text", "load_results", "load_scenario", "misses", "misses_picture", "p99_vs_qps", "plan_tables",
    "run_scenario", "timeline",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    module, _, there = _HOME[name].partition(":")
    return getattr(import_module(module), there or name)
