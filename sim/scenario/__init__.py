"""A scenario: the YAML file, its checks, and the points it asks to run."""

from batchsim.scenario.config import KvConfig, LoadConfig, Point, PolicySpec, Scenario
from batchsim.scenario.load import changed, load_scenario

__all__ = [
    "KvConfig",
    "LoadConfig",
    "Point",
    "PolicySpec",
    "Scenario",
    "changed",
    "load_scenario",
]
