"""The public names of batchsim and where each is, for type checkers and, at run time, for `__init__.py`."""

from batchsim.api.results import Results, load_results
from batchsim.api.studies import capacity, plan, run
from batchsim.api.typed import (
    ClosedLoop,
    Constant,
    Deployment,
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
from batchsim.scenario.constructor import scenario as Scenario  # noqa: N812 - it is called as one calls a class
from batchsim.study.capacity.find import find_capacities
from batchsim.study.curves.precision import Precision
from batchsim.study.curves.run import run_scenario
from batchsim.study.planning.plan_tables import plan_tables
from batchsim.study.sweep.points import Sweep
from batchsim.workload.laws import FixedTokens as Fixed
from batchsim.workload.laws import LognormalTokens as Lognormal
from batchsim.workload.laws import UniformTokens as Uniform
from batchsim.workload.lengths import Lengths
from batchsim.workload.workload_config import AllAtOnce

__version__: str

__all__ = [
    "AllAtOnce", "ClosedLoop", "Constant", "Deployment", "Diurnal", "Fixed", "Gamma", "Kv", "Lengths", "Load",
    "Lognormal", "OnOff", "Poisson", "Precision", "Replicas", "Results", "Scenario", "Sweep", "Uniform", "Weibull",
    "Workload", "capacity", "capacity_picture", "capacity_text", "find_capacities", "latency_cdf", "life",
    "life_text", "load_results", "load_scenario", "misses", "misses_picture", "p99_vs_qps", "plan", "plan_tables",
    "run", "run_scenario", "timeline",
]  # fmt: skip
