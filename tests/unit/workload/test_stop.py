"""Which answers end by a stop token, and which by length: what clients ask for, and what an engine ahead wastes."""

from __future__ import annotations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.types import Arrival
from batchsim.scenario import load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup

SCENARIO = """
model: llama-3.1-8b
cost: {kind: linear, base: 5ms}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: uniform, min: 2, max: 30}}
  output_cap: 25
  requests: 400
policies:
  vllm: {}
slo: ttft<1s @ 99%
seeds: 1
"""
USERS = "workload.arrivals={kind: closed_loop, users: 40, think_time: 100ms}"
SESSIONS = (
    "workload.sessions={turns: {kind: fixed, tokens: 3}, think_time: 10ms}",
    "workload.requests=null",
    "workload.duration=20s",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("stop") / "some.yaml"
    file.write_text(SCENARIO, encoding="utf-8")
    return str(file)


def arrivals(path: str, *overrides: str) -> list[Arrival]:
    """The requests that are sent without waiting for an answer."""
    return list(Setup.of(load_scenario(path, overrides=overrides)).workload(1.0, 0).arrivals())


@pytest.mark.parametrize("others", [(), (USERS,), SESSIONS], ids=["open", "users", "sessions"])
def test_a_share_of_the_clients_asks_for_as_many_tokens_as_come(path: str, others: tuple[str, ...]) -> None:
    """With stop tokens ignored; the others ask as before, and nothing else of any request changes."""
    before, after = arrivals(path, *others), arrivals(path, *others, "workload.stop={by_eos: 40%}")
    assert len(before) == len(after) >= 40
    ending = 0
    for one, other in zip(before, after, strict=True):
        assert (one.output_tokens, one.request.arrival_ns) == (other.output_tokens, other.request.arrival_ns)
        assert not one.request.ignore_eos and one.request.max_output_tokens == 25
        ending += other.request.ignore_eos
        asked = one.output_tokens if other.request.ignore_eos else 25
        assert other.request.max_output_tokens == asked
    assert ending / len(after) == pytest.approx(0.6, abs=0.15)


def test_which_answers_end_by_length_does_not_depend_on_their_number(path: str) -> None:
    """The first of ten are the first of four hundred, and a larger share has all of a smaller one."""
    many = [arrival.request.ignore_eos for arrival in arrivals(path, "workload.stop={by_eos: 40%}")]
    few = arrivals(path, "workload.stop={by_eos: 40%}", "workload.requests=10")
    assert [arrival.request.ignore_eos for arrival in few] == many[:10]
    fewer = [arrival.request.ignore_eos for arrival in arrivals(path, "workload.stop={by_eos: 70%}")]
    assert 0 < sum(fewer) < sum(many) and all(a or not b for a, b in zip(many, fewer, strict=True))


@pytest.mark.parametrize("by_eos", ["100%", "30%", "0%"])
def test_an_engine_ahead_computes_a_token_in_vain_for_each_end_by_a_stop_token(path: str, by_eos: str) -> None:
    """None for an end by length, which it foresees; an engine in lockstep has nothing in flight to waste."""
    scenario = load_scenario(path, overrides=(f"workload.stop={{by_eos: {by_eos}}}", "workload.requests=100"))
    setup = Setup.of(scenario)
    records = simulate_point(setup, scenario.points()[0]).records
    requests = records.requests
    by_stop_token = (requests["output_tokens"] < requests["max_output_tokens"]).sum()
    assert records.lanes["wasted_tokens"].sum() == by_stop_token
    assert (by_stop_token > 0) == (by_eos != "0%")


def test_notes_say_how_many_end_by_length(path: str) -> None:
    """And nothing where all end by a stop token."""
    setups = [Setup.of(load_scenario(path, overrides=(f"workload.stop={{by_eos: {s}}}",))) for s in ("0%", "100%")]
    notes = [" ".join(setup.workload(1.0, 0).notes) for setup in setups]
    assert "100 % of 400 requests ignore stop tokens and end by length (stop.by_eos)" in notes[0]
    assert "stop" not in notes[1]


def test_a_share_beside_an_exact_cap_is_refused(path: str) -> None:
    """Both would say how answers end."""
    with pytest.raises(ScenarioError, match="with output_cap exact all answers end by length"):
        load_scenario(path, overrides=("workload.stop={by_eos: 50%}", "workload.output_cap=exact"))
