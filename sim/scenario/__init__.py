"""A scenario: the YAML file, its checks, and the points it asks to run."""

from sim.scenario.config import KvConfig, LoadConfig, Point, PolicySpec, Scenario
from sim.scenario.load import load_scenario, scenario_schema

__all__ = ["KvConfig", "LoadConfig", "Point", "PolicySpec", "Scenario", "load_scenario", "scenario_schema"]
