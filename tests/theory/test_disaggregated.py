"""When prefill and decode apart hold more than as many mixed engines: reported findings, and the shipped question.

Where a curve bends is held, not its heights: lengths and GPU are ours. `mixed` are engines of the same GPU behind round
robin.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from batchsim.scenario import Point, load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario

TTFT_MS, SHARE = 1_000, 0.95


def _pools(prefill: int, decode: int) -> tuple[str, ...]:
    return (f"pools.prefill.count={prefill}", f"pools.decode.count={decode}")


def _mixed(count: int) -> tuple[str, ...]:
    return ("pools=null", f"replicas={{count: {count}, router: round_robin}}")


def _requests(engines: tuple[str, ...], load: str, *more: str) -> NDArray[np.void]:
    """The requests of one run of the shipped scenario on `engines` at a `load`, with changes."""
    changes = (*engines, "vary=null", f"load={load}", "workload.warmup=0s", *more)
    scenario = load_scenario("disaggregated", overrides=changes)
    point = Point(scenario.specs[0], scenario.loads[0], 0)
    return simulate_point(Setup.of(scenario), point).records.requests


def _rate(requests: NDArray[np.void]) -> float:
    """Requests that end a second, in the middle of the run."""
    ended = np.sort(requests["ended_ns"])
    first, last = len(ended) // 5, 4 * len(ended) // 5
    return (last - first) / float(ended[last] - ended[first]) * 1e9


def _share(requests: NDArray[np.void], tpot_ms: float) -> float:
    """Of the requests after the first tenth, the share with a TTFT below TTFT_MS and a TPOT below `tpot_ms`."""
    steady = requests[len(requests) // 10 :]
    ttft_ms = (steady["first_token_ns"] - steady["sent_ns"]) / 1e6
    pace_ms = (steady["last_token_ns"] - steady["first_token_ns"]) / (steady["output_tokens"] - 1) / 1e6
    return float(((ttft_ms < TTFT_MS) & (pace_ms < tpot_ms)).mean())


@pytest.mark.slow
def test_one_prefill_engine_before_six_decode_engines_is_full_between_16_and_32_users() -> None:
    """Beyond the knee the rate is the prefill engine's, whatever comes after it; eight mixed engines go on growing."""
    fixed = "workload.lengths={prompt: {kind: fixed, tokens: 2048}, output: {kind: fixed, tokens: 64}}"
    rates: dict[str, list[float]] = {"apart": [], "mixed": []}
    for users in (8, 16, 32, 48):
        closed = f"workload.arrivals={{kind: closed_loop, users: {users}, think_time: 0s, ramp: 0s}}"
        for name, engines in (("apart", _pools(1, 6)), ("mixed", _mixed(8))):
            more = fixed, closed, f"workload.requests={12 * users}"
            rates[name].append(_rate(_requests(engines, f"{{users: [{users}]}}", *more)))
    eight, sixteen, thirty_two, more_users = rates["apart"]
    assert sixteen > 1.2 * eight
    assert more_users == pytest.approx(thirty_two, rel=0.03) and thirty_two < 1.05 * sixteen
    assert all(later > 1.25 * earlier for earlier, later in zip(rates["mixed"], rates["mixed"][1:], strict=False))


@pytest.mark.slow
def test_answers_of_six_tokens_are_carried_by_two_mixed_engines_at_twice_the_rate() -> None:
    """1,024 tokens in and 6 out: the decode engine of a pair has next to nothing to do."""
    short = "workload.lengths={prompt: {kind: fixed, tokens: 1024}, output: {kind: fixed, tokens: 6}}"
    piled = ("workload.arrivals={kind: all_at_once}", "workload.requests=1500", "policies={vllm: {}}")
    pair = _rate(_requests(_pools(1, 1), "null", short, *piled))
    mixed = _rate(_requests(_mixed(2), "null", short, *piled))
    assert 1.8 < mixed / pair < 2.05


@pytest.mark.slow
def test_the_shipped_scenario_has_the_shares_of_its_page(tmp_path: Path) -> None:
    """The table of docs/pools.md, in percent at 10, 20 and 40 requests a second."""
    shares: dict[tuple[str, int], list[int]] = {}
    for name, changes in (("pools", ()), ("mixed", _mixed(4))):
        summary = run_scenario(load_scenario("disaggregated", overrides=changes), out=tmp_path / name).summary
        for tokens in (64, 256):
            rows = summary[(summary["vary"] == tokens) & (summary["load"] > 5)]
            shares[name, tokens] = [round(100 * share) for share in rows["in_slo"]]
    assert shares == {
        ("pools", 64): [100, 100, 100],
        ("mixed", 64): [99, 89, 41],
        ("pools", 256): [98, 2, 0],
        ("mixed", 256): [99, 67, 5],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "rate", "tpot_ms", "pools", "mixed"),
    [
        pytest.param(64, 10, 10, True, True, id="short_answers_at_a_tight_pace_and_a_low_load"),
        pytest.param(64, 20, 10, True, False, id="short_answers_at_a_tight_pace_and_a_higher_load"),
        pytest.param(64, 40, 10, True, False, id="short_answers_at_a_tight_pace"),
        pytest.param(256, 20, 10, False, False, id="longer_answers_at_a_tight_pace"),
        pytest.param(256, 35, 25, False, True, id="longer_answers_at_a_loose_pace"),
        pytest.param(6, 80, 1000, False, True, id="six_tokens_by_ttft_alone"),
    ],
)
def test_which_engines_hold_the_load(tokens: int, rate: int, tpot_ms: float, pools: bool, mixed: bool) -> None:
    """Three prefill engines and one for decodes against four mixed ones: which have 95 % within the SLO."""
    asked = f"workload.lengths.output.tokens={tokens}", "workload.requests=600"
    load = f"{{mean_rate: [{rate}/s]}}"
    held = {
        name: _share(_requests(engines, load, *asked), tpot_ms) >= SHARE
        for name, engines in (("pools", _pools(3, 1)), ("mixed", _mixed(4)))
    }
    assert held == {"pools": pools, "mixed": mixed}
