"""Scenarios of sessions whose prompts come back, with KV in the memory of the host, and what each of their runs is held
to."""

from __future__ import annotations

import pytest

from batchsim.kernel.record import TIER_LOAD, TIER_STORE, Records
from batchsim.metrics.measure import measure
from batchsim.results.keep import point_inputs
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.testing.life_sums import check_lives
from tests.support.scenarios import setup_of
from tests.support.tier_lives import moved

TOKEN_BYTES = 131_072
"""Of the KV of Llama-3.1-8B."""


def tier_text(tier: str, policy: str) -> str:
    """A scenario of `policy` with one `tier`, both as YAML."""
    return f"""model: llama-3.1-8b
cost: {{kind: roofline, gpu: h100}}
kv: {{tokens: 40000, tiers: [{tier}]}}
workload:
  arrivals: {{kind: poisson, mean_rate: 2/s}}
  sessions: {{turns: {{kind: fixed, tokens: 4}}, think_time: 10s}}
  lengths: {{prompt: {{kind: fixed, tokens: 3000}}, output: {{kind: fixed, tokens: 20}}}}
  duration: 60s
  output_cap: 50
policies:
  {policy}
slo: ttft<1s @ 90%
load: {{mean_rate: [1/s]}}
seeds: 1
"""


def changed(text: str, *changes: tuple[str, str]) -> Setup:
    """What `text` is settled as with each (before, after) replaced."""
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return setup_of(text)


def counted_run(setup: Setup) -> tuple[dict[str, float | None], Records]:
    """The metrics and records of the first point, whose loads, tokens and bytes agree, and all lives sum."""
    run = simulate_point(setup, setup.scenario.points()[0])
    values = measure(point_inputs(setup, run)).values
    loads, stores = moved(run.records, TIER_LOAD), moved(run.records, TIER_STORE)
    assert values["host_loads"] == (run.records.states["state"] == TIER_LOAD).sum() > 1
    assert values["host_loaded_bytes"] == sum(loads.values()) * TOKEN_BYTES
    assert values["host_stored_bytes"] == sum(stores.values()) * TOKEN_BYTES
    prompts = int(run.records.requests["prompt_tokens"].sum())
    assert values["host_hit_rate"] == pytest.approx(sum(loads.values()) / prompts)
    check_lives(run.records)
    return values, run.records


def one_replica_is_the_engine_alone(text: str) -> None:
    """A replica has a host of its own: by itself it loads what the engine without a router does."""
    alone, replica = changed(text), changed(text, ("seeds: 1", "seeds: 1\nreplicas: {count: 1}"))
    point = alone.scenario.points()[0]
    one, behind = (simulate_point(setup, point).records for setup in (alone, replica))
    assert len(moved(one, TIER_LOAD)) > 3
    assert one.requests["first_token_ns"].tolist() == behind.requests["first_token_ns"].tolist()
