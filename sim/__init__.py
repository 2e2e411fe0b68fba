"""batchsim: simulates how batching policies serve LLM requests. One pure scheduler, two drivers.

    import batchsim
    results = batchsim.load_results("results/bursty")    # what `batchsim run bursty` left, as DataFrames

    workload = batchsim.Workload(batchsim.Poisson("8/s"), output_cap=512, duration="2min", lengths=batchsim.Lengths(
        batchsim.Lognormal(mean=900, cv=1.2), batchsim.Fixed(200)))
    scenario = batchsim.Scenario(model="llama-3.1-8b", deployment=batchsim.Deployment("vllm", "h100_sxm"),
                                 workload=workload, slo="ttft<1s & tpot<50ms @ 99%")
    results = batchsim.run(scenario)
    results.requests("vllm", 1.0, seed=0)[["ttft_s", "tpot_s", "e2e_s"]].describe()

The names are fetched when asked for, so that a machine without pandas can import the parts that need none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchsim.base.version import VERSION

if TYPE_CHECKING:
    from batchsim.api.results import Results, load_results
    from batchsim.api.studies import capacity, plan, run
    from batchsim.api.typed import (
        ClosedLoop,
        Constant,
        Diurnal,
        Gamma,
        Kv,
        Load,
        OnOff,
        Poisson,
        Replicas,
        Weibull,
        Workload,
    )
    from batchsim.report.pictures.capacity_picture import capacity_picture
    from batchsim.report.pictures.causes_picture import causes_picture as misses_picture
    from batchsim.report.pictures.closeup import latency_cdf, timeline
    from batchsim.report.pictures.plots import p99_vs_qps
    from batchsim.report.text.capacity_text import capacity_text
    from batchsim.report.text.causes_text import causes as misses
    from batchsim.report.text.story_text import story as life
    from batchsim.report.text.story_text import story_text as life_text
    from batchsim.scenario import load_scenario
    from batchsim.scenario.deployment_config import DeploymentConfig as Deployment
    from batchsim.scenario.made import scenario as Scenario  # noqa: N812 - it is called as one calls a class
    from batchsim.study.capacity.find import find_capacities
    from batchsim.study.curves.precision import Precision
    from batchsim.study.curves.run import run_scenario
    from batchsim.study.planning.plan_tables import plan_tables
    from batchsim.study.sweep.points import Sweep
    from batchsim.workload.laws import FixedTokens as Fixed
    from batchsim.workload.laws import LognormalTokens as Lognormal
    from batchsim.workload.laws import UniformTokens as Uniform
    from batchsim.workload.workload_config import AllAtOnce, Lengths

__version__ = VERSION

_HOME = {
    "AllAtOnce": "batchsim.workload.workload_config",
    "ClosedLoop": "batchsim.workload.workload_config",
    "Constant": "batchsim.workload.processes:ConstantArrivals",
    "Deployment": "batchsim.scenario.deployment_config:DeploymentConfig",
    "Diurnal": "batchsim.workload.processes:DiurnalArrivals",
    "Fixed": "batchsim.workload.laws:FixedTokens",
    "Gamma": "batchsim.workload.processes:GammaArrivals",
    "Kv": "batchsim.scenario.kv_config:KvConfig",
    "Lengths": "batchsim.workload.workload_config",
    "Load": "batchsim.scenario.config:LoadConfig",
    "Lognormal": "batchsim.workload.laws:LognormalTokens",
    "OnOff": "batchsim.workload.processes:OnOffArrivals",
    "Poisson": "batchsim.workload.processes:PoissonArrivals",
    "Precision": "batchsim.study.curves.precision",
    "Replicas": "batchsim.scenario.replicas_config:ReplicasConfig",
    "Results": "batchsim.api.results",
    "Scenario": "batchsim.scenario.made:scenario",
    "Sweep": "batchsim.study.sweep.points",
    "Uniform": "batchsim.workload.laws:UniformTokens",
    "Weibull": "batchsim.workload.processes:WeibullArrivals",
    "Workload": "batchsim.workload.workload_config:WorkloadConfig",
    "capacity": "batchsim.api.studies",
    "capacity_picture": "batchsim.report.pictures.capacity_picture",
    "capacity_text": "batchsim.report.text.capacity_text",
    "find_capacities": "batchsim.study.capacity.find",
    "latency_cdf": "batchsim.report.pictures.closeup",
    "life": "batchsim.report.text.story_text:story",
    "life_text": "batchsim.report.text.story_text:story_text",
    "load_results": "batchsim.api.results",
    "load_scenario": "batchsim.scenario",
    "misses": "batchsim.report.text.causes_text:causes",
    "misses_picture": "batchsim.report.pictures.causes_picture:causes_picture",
    "p99_vs_qps": "batchsim.report.pictures.plots",
    "plan": "batchsim.api.studies",
    "plan_tables": "batchsim.study.planning.plan_tables",
    "run": "batchsim.api.studies",
    "run_scenario": "batchsim.study.curves.run",
    "timeline": "batchsim.report.pictures.closeup",
}
"""Where each name is, and after a colon what it is called there, since modules have the shorter names."""

__all__ = [
    "AllAtOnce", "ClosedLoop", "Constant", "Deployment", "Diurnal", "Fixed", "Gamma", "Kv", "Lengths", "Load",
    "Lognormal", "OnOff", "Poisson", "Precision", "Replicas", "Results", "Scenario", "Sweep", "Uniform", "Weibull",
    "Workload", "capacity", "capacity_picture", "capacity_text", "find_capacities", "latency_cdf", "life",
    "life_text", "load_results", "load_scenario", "misses", "misses_picture", "p99_vs_qps", "plan", "plan_tables",
    "run", "run_scenario", "timeline",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'batchsim' has no attribute {name!r}")
    module, _, there = _HOME[name].partition(":")
    return getattr(import_module(module), there or name)
