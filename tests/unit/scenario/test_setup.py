"""A setup is what a sweep sends to its processes."""

from __future__ import annotations

import pickle

import pytest

from batchsim.scenario import load_scenario
from batchsim.scenario.load import shipped_scenarios
from batchsim.scenario.setup import Setup


@pytest.mark.parametrize("name", shipped_scenarios())
def test_the_setup_of_a_shipped_scenario_travels_to_another_process(name: str) -> None:
    """With the scenario and the KV memory as they are, where batchsim is compiled too."""
    setup = Setup.of(load_scenario(name))
    there = pickle.loads(pickle.dumps(setup))
    assert (there.scenario, there.kv) == (setup.scenario, setup.kv)
