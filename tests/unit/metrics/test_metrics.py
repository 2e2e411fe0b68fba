"""Metrics of one run and of several seeds, against numbers worked out by hand or token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.drive.simulate import simulate
from batchsim.kernel.events import EngineEvent, Tokens
from batchsim.kernel.in_flight import LaunchedStep
from batchsim.kernel.record import CANCELLED, FINISHED, REJECTED, UNFINISHED
from batchsim.metrics.gaps import token_gaps
from batchsim.metrics.intervals import unseen
from batchsim.metrics.latencies import LATENCY_COLUMNS, OF_TOKENS, values_ns
from batchsim.metrics.measure import LATENCIES, PERCENTILES, Measured, combine, measure, percentile
from batchsim.metrics.slo import parse_slo
from batchsim.metrics.stability import _time_in_system, is_too_short, is_unstable
from batchsim.results.keep import point_inputs
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.build import build_workload, turn_of
from batchsim.workload.traces.trace_config import Columns, TraceConfig
from batchsim.workload.traces.trace_rows import TraceRows
from batchsim.workload.workload_config import TraceArrivals, WorkloadConfig
from tests.support.metrics_helpers import MS, POLICIES, arrival, inputs_of, records_of, run, static, traffic, vllm
from tests.support.random_cases import random_cases

S = 1_000_000_000


def _answer(sent_ms: float, ttft_ms: float, tpot_ms: float, output: int, **more: int) -> dict[str, int]:
    """A streamed request's row."""
    sent, first = round(sent_ms * MS), round((sent_ms + ttft_ms) * MS)
    delivered = first + round(tpot_ms * MS) * (output - 1)
    row = {"sent_ns": sent, "first_delivery_ns": first, "delivered_ns": delivered, "ended_ns": delivered}
    return row | {"output_tokens": output, "prompt_tokens": 10} | more


@pytest.mark.parametrize("policy", ["vllm", "swapping"])
@random_cases(50, derandomize=True)
@given(arrivals=traffic(), num_blocks=st.integers(9, 40))
def test_pooled_gaps_equal_those_token_by_token(policy, arrivals, num_blocks):
    """Pooled ITL with preemption, swap and sat-out steps equals the differences of every token's logged time."""
    made = run(arrivals, POLICIES[policy], num_blocks, num_swap_blocks=12)
    finished = made.records.requests["outcome"] == FINISHED
    times = made.token_times()
    done = made.records.requests["request_id"][finished]
    expected = sorted(gap for request_id in done for gap in np.diff(times[request_id]).tolist())
    gaps, counts = token_gaps(made.records, finished)
    assert sorted(np.repeat(gaps, counts).tolist()) == expected


@random_cases(20, derandomize=True)
@given(arrivals=traffic(), wanted=st.integers(0, 11))
def test_gaps_of_one_request(arrivals, wanted):
    """A mask picks whose gaps are pooled: those of one finished request are its own."""
    made = run(arrivals, num_blocks=12)
    requests = made.records.requests
    mask = (requests["request_id"] == wanted) & (requests["outcome"] == FINISHED)
    gaps, counts = token_gaps(made.records, mask)
    expected = np.diff(made.token_times()[wanted]).tolist() if mask.any() else []
    assert sorted(np.repeat(gaps, counts).tolist()) == sorted(expected)


def test_the_last_token_may_come_of_a_recompute():
    """Preempted with 5 of 6 tokens, the last one ends its recompute: the long gap before it counts like any other."""
    made = run([arrival(0, 0, 4, 6), arrival(1, 0, 4, 6)], num_blocks=5)
    assert made.records.requests["num_preemptions"].tolist() == [0, 1]
    times = made.token_times()
    gaps, counts = token_gaps(made.records, np.array([False, True]))
    assert sorted(np.repeat(gaps, counts).tolist()) == sorted(np.diff(times[1]).tolist())
    assert max(gaps) == times[1][-1] - times[1][-2] > 2 * sorted(gaps)[-2]


_TIGHT = """\
model: llama-3.1-8b
cost: {kind: linear, base: 10ms, per_token: 50us}
kv: {tokens: 20000}
max_model_len: 8192
workload:
  arrivals: {kind: closed_loop, users: 32, think_time: 0s, ramp: 0s, shared_list: true}
  requests: 100
  lengths: {prompt: {kind: uniform, min: 100, max: 300}, output: {kind: uniform, min: 800, max: 1200}}
  output_cap: 1200
policies: {vllm: {}}
load: {users: [32]}
slo: p99(itl)<1s
seeds: 1
"""


def test_gaps_are_known_where_a_recompute_ends_in_flight_as_it_is_preempted() -> None:
    """An engine ahead delivers that token while its request waits: every gap is there, and adds up to the decodes."""
    scenario = parse_scenario(_TIGHT, "tight.yaml", Path())
    (point,) = scenario.points()
    records = simulate_point(Setup.of(scenario), point).records
    requests = records.requests
    gaps, counts = token_gaps(records, np.ones(len(requests), bool))
    assert requests["num_preemptions"].sum() > 50
    assert counts.sum() == (requests["output_tokens"] - 1).sum()
    assert (gaps * counts).sum() == (requests["delivered_ns"] - requests["first_delivery_ns"]).sum()


@pytest.mark.parametrize("tokens", [3000, 9000, 20000, 60000])
@pytest.mark.parametrize("policy", ["vllm: {}", "vllm: {async_scheduling: false}", "sglang: {}"])
def test_gaps_in_either_loop_are_those_that_a_server_tells(policy: str, tokens: int) -> None:
    """Whatever KV memory there is: the times of the token events that a served engine sends, without leaps."""
    text = _TIGHT.replace("vllm: {}", policy).replace("tokens: 20000", f"tokens: {tokens}").replace("100\n", "40\n")
    scenario = parse_scenario(text, "tight.yaml", Path())
    setup, (point,) = Setup.of(scenario), scenario.points()
    workload = setup.workload(point.load, point.seed)
    core = setup.engine(point.spec, workload)
    core.tells_tokens = True
    times: dict[int, list[int]] = {}
    deliver = core.deliver

    def listening(step: LaunchedStep, now_ns: int) -> list[EngineEvent]:
        events = deliver(step, now_ns)
        for event in events:
            if isinstance(event, Tokens):
                times.setdefault(event.request.id, []).extend([now_ns] * event.count)
        return events

    core.deliver = listening
    simulate(core, workload, leap=False)
    records = core.recorder.records()
    gaps, counts = token_gaps(records, np.ones(len(records.requests), bool))
    expected = np.sort(np.concatenate([np.diff(told) for told in times.values()]))
    assert np.array_equal(np.sort(np.repeat(gaps, counts)), expected) and len(expected) > 30_000
    assert records.requests["num_preemptions"].any() == (tokens < 60000 and (tokens > 3000 or "sglang" not in policy))


@pytest.mark.parametrize(("tokens", "p99_ms"), [(12000, 67.3), (20000, 49.0), (60000, 22.4)])
def test_both_loops_have_the_same_p99_of_gaps(tokens: int, p99_ms: float) -> None:
    """To 2 %: where KV is ample it is a step of 31 decodes and a prompt of 220, where it is short one with a context
    that is computed again."""
    for ahead in ("true", "false"):
        policy = f"vllm: {{enable_prefix_caching: false, async_scheduling: {ahead}}}"
        scenario = parse_scenario(
            _TIGHT.replace("vllm: {}", policy).replace("tokens: 20000", f"tokens: {tokens}"), "tight.yaml", Path()
        )
        (point,) = scenario.points()
        records = simulate_point(Setup.of(scenario), point).records
        gaps, counts = token_gaps(records, np.ones(len(records.requests), bool))
        p99 = np.quantile(np.repeat(gaps, counts), 0.99, method="inverted_cdf")
        assert p99 / 1e6 == pytest.approx(p99_ms, rel=0.02)


_SESSIONS = """\
model: llama-3.1-8b
cost: {kind: linear, base: 10ms}
kv: {tokens: 200000}
max_model_len: 8192
workload:
  arrivals: {kind: poisson, mean_rate: 2/s}
  sessions: {turns: {kind: fixed, tokens: 5}, think_time: 2s}
  lengths: {prompt: {kind: fixed, tokens: 200}, output: {kind: fixed, tokens: 50}}
  output_cap: 64
  duration: 30s
policies: {vllm: {}}
slo: ttft<1s @ 90%
seeds: 1
"""


@pytest.mark.parametrize("closed", [False, True])
def test_hits_are_told_by_turn(closed: bool) -> None:
    """By hand: of 450 tokens of the second turn's prompt 240, in whole blocks, are of the first and its answer."""
    text = _SESSIONS
    if closed:
        text = text.replace("kind: poisson, mean_rate: 2/s", "kind: closed_loop, users: 3, think_time: 1s")
        text = text.replace(", think_time: 2s}", "}")
    scenario = parse_scenario(text, "s.yaml", Path())
    (point,) = scenario.points()
    setup = Setup.of(scenario)
    values = measure(point_inputs(setup, simulate_point(setup, point))).values
    hits = [values[f"prefix_hit_rate_turn_{turn}"] for turn in ("1", "2", "3")]
    assert hits == [0.0, pytest.approx(240 / 450), pytest.approx(496 / 700)]
    later = values["prefix_hit_rate_turn_4_on"]
    assert later is not None and hits[2] is not None and later > hits[2]


def test_turns_of_a_replay_are_the_rows_before_in_line() -> None:
    """A row of two parents stands behind the longer line of them."""
    times, tokens = np.zeros(5, np.int64), np.full(5, 9)
    labels = {"id": np.arange(5), "parent": np.array([-1, 0, 1, -1, 2]), "recorded": times}
    texts = {"id": tuple("abcde"), "parent": ('["a"]', '["b"]', '["c", "d"]')}
    rows = TraceRows(times, tokens, tokens, "t.csv", "mapping", labels=labels, texts=texts)
    config = WorkloadConfig(
        TraceArrivals(), 64, trace=TraceConfig("t.csv", columns=Columns("p", "o", id="i", parent="q"))
    )
    workload = build_workload(config, load={}, seed=0, max_model_len=99, base=Path(), rows=rows)
    found = turn_of(workload, np.arange(5))
    assert found is not None and found.tolist() == [0, 1, 2, 0, 3]


def test_one_token_or_nobody_has_no_gaps():
    """Of two that start together, the one with three decode steps has three; a single token and nobody have none."""
    made = run([arrival(0, 0, 4, 4), arrival(1, 0, 4, 1)])
    for wanted, expected in (([True, False], [1007, 1007, 1007]), ([False, True], []), ([False, False], [])):
        gaps, counts = token_gaps(made.records, np.array(wanted))
        assert (gaps.tolist(), counts.tolist()) == (expected, [1] * len(expected))


def test_latencies_by_hand():
    """Two requests: each latency's mean and percentiles are those of its formula, from the time of sending."""
    rows = [
        _answer(0, 100, 10, 11, arrival_ns=5 * MS, scheduled_ns=20 * MS),
        _answer(50, 300, 30, 21, arrival_ns=55 * MS, scheduled_ns=150 * MS),
    ]
    values = measure(inputs_of(records_of(rows))).values
    expected_mean = {"ttft": 200, "tpot": 20, "e2e": 550, "queue_time": 55, "norm_latency": (200 / 11 + 900 / 21) / 2}
    for name, mean_ms in expected_mean.items():
        assert values[f"{name}_mean_s"] == pytest.approx(mean_ms / 1000)
    assert (values["ttft_p50_s"], values["ttft_p99_s"]) == (0.1, 0.3)


def test_percentiles_are_observations():
    """The q quantile is the smallest value that a share q of the values does not exceed; `beyond` counts the rest."""
    values = np.arange(1.0, 101.0)
    assert percentile(values, 99) == (99.0, 1)
    assert percentile(values, 50) == (50.0, 50)
    assert percentile(np.array([5.0]), 99) == (5.0, 0)


def test_percentiles_do_not_depend_on_the_order():
    """That k of 1 to 1,000 shuffled do not exceed is k, whatever k; so it is where each counts three times."""
    values, ranks = np.random.default_rng(0).permutation(np.arange(1.0, 1001.0)), range(1, 1001)
    assert [percentile(values, k / 10) for k in ranks] == [(k, 1000 - k) for k in ranks]
    for k in (500, 990):
        assert percentile(values, k / 10, np.full(1000, 3)) == (k, 3 * (1000 - k))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=8), st.sampled_from(PERCENTILES))
def test_weights_are_repeated_observations(pairs, percent):
    """A weighted percentile equals the plain one of the values written out."""
    values = np.array([float(value) for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs])
    assert percentile(values, percent, weights) == percentile(np.repeat(values, weights), percent)


def test_few_observations_are_marked():
    """p99 of 1,999 requests has 19 beyond and is marked; p99 of 2,000 has 20 and is not."""
    for count, weak in ((1999, True), (2000, False)):
        rows = [_answer(0.1 * i, 1 + i / 1000, 1, 2) for i in range(count)]
        measured = measure(inputs_of(records_of(rows)))
        assert ("ttft_p99_s" in measured.weak_percentiles) is weak
        assert "ttft_p50_s" not in measured.weak_percentiles


def test_whole_responses_have_no_pace():
    """A response delivered whole has ttft = e2e and neither tpot nor itl nor user pace: None, not 0."""
    made = run([arrival(i, 1000 * i, 6, 4 + i) for i in range(6)], static)
    values = measure(inputs_of(made.records, streams=False)).values
    assert values["ttft_p50_s"] == values["e2e_p50_s"]
    assert all(values[f"{name}_p{p}_s"] is None for name in ("tpot", "itl") for p in PERCENTILES)
    assert values["tpot_mean_s"] is values["user_tokens_per_s_p50"] is None
    assert values["attr_response_held_share"] > 0


def test_whole_responses_never_pass_a_tpot_bound():
    """The most generous tpot bound is missed by a response delivered whole, and kept by one of a single token."""
    rows = [_answer(0, 10, 1, 2), _answer(0, 10, 1, 1)]
    for text, shares in (("tpot<1h @ 50%", (0.5, 1.0)), ("p50(tpot)<1h", (None, None))):
        for streams, share in zip((False, True), shares, strict=True):
            values = measure(inputs_of(records_of(rows), streams=streams, slo=parse_slo(text))).values
            assert values["in_slo"] == share
    assert values["slo_met"] == 1.0
    values = measure(inputs_of(records_of(rows), streams=False, slo=parse_slo("p50(itl)<1h"))).values
    assert values["slo_met"] == 0.0


def test_cohort_and_window():
    """Warm-up arrivals are no cohort; completions after the window are no throughput but count for latency."""
    rows = [
        _answer(50, 10, 10, 11),  # warm-up; completes inside the window
        _answer(200, 10, 10, 11),
        _answer(1000, 500, 10, 11),  # sent at the very end; drains
        _answer(1001, 9, 1, 2),  # after the window
    ]
    values = measure(inputs_of(records_of(rows), window_ns=(100 * MS, 1100 * MS - 100 * MS))).values
    assert values["submitted"] == values["finished"] == 4
    assert values["cohort"] == 2
    assert values["offered_rps"] == pytest.approx(2 / 0.9)
    assert values["throughput_rps"] == pytest.approx(2 / 0.9)
    assert values["output_tokens_per_s"] == pytest.approx(22 / 0.9)
    assert values["total_tokens_per_s"] == pytest.approx(42 / 0.9)
    assert (values["ttft_mean_s"], values["ttft_p99_s"]) == ((0.01 + 0.5) / 2, 0.5)
    assert values["makespan_throughput_rps"] == pytest.approx(2 / 1.4)


def test_all_at_once_rates_are_over_the_makespan():
    """Without an arrival window rates count from the first request to the last response, and nothing is offered."""
    rows = [_answer(0, 100, 10, 11), _answer(0, 400, 10, 11)]
    measured = measure(inputs_of(records_of(rows), window_ns=(0, 0), all_at_once=True, num_gpus=2))
    assert measured.values["throughput_rps"] == measured.values["makespan_throughput_rps"] == pytest.approx(4)
    assert measured.values["output_tokens_per_s_per_gpu"] == pytest.approx(22)
    assert measured.values["offered_rps"] is None and not measured.unstable
    with pytest.raises(ValueError, match="no length"):
        inputs_of(records_of(rows), window_ns=(0, 0))


def _with_losses() -> list[dict[str, int]]:
    lost = [(REJECTED, 1), (CANCELLED, 2), (UNFINISHED, 3)]
    return [
        _answer(0, 100, 10, 11),
        _answer(0, 900, 10, 11),
        *({"sent_ns": 0, "ended_ns": 10 * MS, "outcome": outcome, "reason": reason} for outcome, reason in lost),
    ]


def test_every_offered_request_is_the_denominator():
    """Rejected, cancelled and unfinished requests, and one never let in, are misses; percentiles leave them out."""
    records = records_of(_with_losses(), texts=("", "queue_full", "deadline", "cut"))
    slo = parse_slo("ttft<500ms & tpot<50ms @ 99%")
    measured = measure(inputs_of(records, slo=slo, num_offered=6, window_ns=(0, 2 * S)))
    values = measured.values
    assert values["in_slo"] == pytest.approx(1 / 6) and values["slo_met"] == 0.0
    assert values["goodput_rps"] == pytest.approx(0.5) and values["throughput_rps"] == pytest.approx(1.0)
    assert values["uncompleted_share"] == pytest.approx(4 / 6)
    assert (
        values["submitted"] == 6 == values["finished"] + sum(values[n] for n in ("rejected", "cancelled", "unfinished"))
    )
    assert measured.reasons == {
        "rejected": {"queue_full": 1},
        "cancelled": {"deadline": 1},
        "unfinished": {"cut": 1, "never_let_in": 1},
    }
    assert inputs_of(records, num_offered=5).num_missing == 0
    with pytest.raises(ValueError, match="only 4 were offered"):
        inputs_of(records, num_offered=4)


def test_goodput_counts_what_is_delivered_in_the_window():
    """One sent before it and delivered in it counts, one sent in it and delivered after it does not."""
    rows = [_answer(50, 100, 10, 11), _answer(850, 100, 10, 11), _answer(300, 100, 10, 11), _answer(310, 100, 10, 11)]
    slo = parse_slo("ttft<500ms & tpot<50ms @ 99%")
    for kept, rate in ((rows[:1], 1 / 0.8), (rows[1:2], 0.0), (rows, 3 / 0.8)):
        values = measure(inputs_of(records_of(kept), slo=slo, window_ns=(100 * MS, 900 * MS))).values
        assert values["goodput_rps"] == values["throughput_rps"] == pytest.approx(rate)


def test_goodput_exists_for_the_per_request_form_only():
    """A population objective has a verdict but no goodput and no share of requests; no objective has neither."""
    rows = [_answer(10 * i, 100, 10, 11) for i in range(50)]
    values = measure(inputs_of(records_of(rows), slo=parse_slo("p90(ttft)<101ms, p90(tpot)<1s"))).values
    assert (values["slo_met"], values["goodput_rps"], values["in_slo"]) == (1.0, None, None)
    values = measure(inputs_of(records_of(rows))).values
    assert (values["slo_met"], values["goodput_rps"], values["in_slo"]) == (None, None, None)


def test_a_request_is_judged_by_its_class():
    """The class's objective replaces the scenario's; one class that misses breaks the verdict of the point."""
    rows = [_answer(0, 100, 10, 11, request_class=1), _answer(0, 100, 10, 11, request_class=2)]
    records = records_of(rows, texts=("", "chat", "batch"))
    strict, loose = parse_slo("ttft<50ms @ 99%"), parse_slo("ttft<1s @ 99%")
    values = measure(inputs_of(records, slo=strict, class_slos={"batch": loose})).values
    assert (values["in_slo"], values["slo_met"], values["slo_margin"]) == (0.5, 0.0, -0.99)
    values = measure(inputs_of(records, class_slos={"batch": loose, "absent": strict})).values
    assert (values["in_slo"], values["slo_met"]) == (1.0, 1.0)


def test_attribution_shares_sum_to_one():
    """The shares of the parts are of the cohort's whole E2E."""
    made = run([arrival(i, 300 * i, 12, 6) for i in range(8)], num_blocks=9)
    values = measure(inputs_of(made.records)).values
    shares = [value for name, value in values.items() if name.startswith("attr_")]
    assert sum(shares) == pytest.approx(1) and values["attr_queued_share"] > 0


def test_the_front_end_has_its_share():
    """500 ns for each of two requests, of all the time from sending to delivery."""
    made = run([arrival(0, 0, 6, 4), arrival(1, 9000, 6, 4)], per_chunk_ns=500)
    requests = made.records.requests
    values = measure(inputs_of(made.records, per_chunk_ns=500)).values
    whole_ns = int((requests["delivered_ns"] - requests["sent_ns"]).sum())
    assert values["attr_frontend_share"] == pytest.approx(1000 / whole_ns)


def test_an_empty_run_measures_nothing():
    """No requests: no latencies and no verdict, but no error and no zeros in their place."""
    values = measure(inputs_of(records_of([]), slo=parse_slo("ttft<1s @ 99%"))).values
    assert all(values[f"{name}_mean_s"] is None for name in LATENCIES)
    assert values["in_slo"] is values["slo_met"] is values["uncompleted_share"] is None
    assert values["throughput_rps"] == 0.0
    at_once = measure(inputs_of(records_of([]), all_at_once=True, slo=parse_slo("ttft<1s @ 99%"))).values
    rates = ("throughput_rps", "offered_rps", "goodput_rps", "engine_busy_share")
    assert all(at_once[name] is None for name in rates)


def _queue(rho: float, count: int, seed: int, service_s: float = 1.0) -> tuple[np.ndarray, tuple[int, int]]:
    """M/M/1 rows by Lindley's recursion, and the window of the arrivals."""
    rng = np.random.default_rng(seed)
    sent = np.cumsum(rng.exponential(service_s / rho, count))
    service = rng.exponential(service_s, count)
    left = np.empty(count)
    free = 0.0
    for i in range(count):
        free = left[i] = max(sent[i], free) + service[i]
    started = left - service
    rows = [
        {
            "sent_ns": int(a * S),
            "scheduled_ns": int(start * S),
            "last_token_ns": int(b * S),
            "delivered_ns": int(b * S),
            "ended_ns": int(b * S),
        }
        for a, start, b in zip(sent, started, left, strict=True)
    ]
    return records_of(rows).requests, (0, int(sent[-1] * S))


@pytest.mark.parametrize(
    ("rho", "least", "most"),
    [
        (0.8, 0, 1),
        (1.2, 19, 20),
        pytest.param(0.5, 0, 0, marks=pytest.mark.slow),
        pytest.param(1.5, 20, 20, marks=pytest.mark.slow),
    ],
)
def test_unstable_tells_a_growing_queue_from_a_long_one(rho, least, most):
    """Of 20 M/M/1 runs of 1,500 requests almost none is called unstable at ρ = 0.8, almost all are at 1.2."""
    found = sum(is_unstable(*_queue(rho, 1500, seed)) for seed in range(20))
    assert least <= found <= most


def test_a_queue_that_grew_before_the_second_half_is_not_unstable():
    """Of ten requests a second those of the first fifty seconds never end; the next take a second each."""
    stuck = [{"sent_ns": i * S // 10, "ended_ns": 200 * S, "outcome": UNFINISHED} for i in range(500)]
    served = [{"sent_ns": i * S // 10, "ended_ns": (i + 10) * S // 10} for i in range(500, 1000)]
    assert not is_unstable(records_of(stuck + served).requests, (0, 100 * S))
    assert is_unstable(records_of(stuck + served).requests, (0, 50 * S))


@pytest.mark.parametrize(("completed", "verdict"), [(97, True), (98, False), (100, False)])
def test_a_queue_that_is_served_in_time_is_not_unstable(completed, verdict):
    """Of a hundred that come at 76 s and are answered at 99 or 101 s, 98 within the 100 s are just enough."""
    rows = [{"sent_ns": 76 * S + i, "ended_ns": (99 if i < completed else 101) * S} for i in range(100)]
    requests = records_of([row | {"scheduled_ns": row["ended_ns"]} for row in rows]).requests
    assert is_unstable(requests, (0, 100 * S)) is verdict


@pytest.mark.parametrize(("at_ms", "verdict"), [(98_100, False), (97_900, True)])
def test_a_queue_grows_where_it_does_so_by_more_than_chance(at_ms, verdict):
    """A hundred that stay for the last 1.9 and 2.1 of 25 s are 7.6 and 8.4 of them as a mean; √(200/3) is 8.2."""
    rows = [{"sent_ns": at_ms * MS, "ended_ns": 200 * S, "outcome": UNFINISHED}] * 100
    assert is_unstable(records_of(rows).requests, (0, 100 * S)) is verdict


def test_a_window_of_two_ns_shows_no_growth():
    """It has no quarters."""
    rows = [{"sent_ns": 1, "ended_ns": S, "outcome": UNFINISHED}]
    assert not is_unstable(records_of(rows).requests, (0, 2))


def test_an_engine_that_only_fills_up_is_not_judged():
    """Requests that run for most of the arrivals' time pile up without any queue: too short to tell."""
    second = [
        {"sent_ns": i * S, "scheduled_ns": i * S, "last_token_ns": (i + 30) * S, "delivered_ns": (i + 30) * S}
        for i in range(40)
    ]
    requests = records_of([row | {"ended_ns": row["delivered_ns"]} for row in second]).requests
    assert is_too_short(requests, (0, 40 * S))
    assert not is_unstable(requests, (0, 40 * S))
    assert not is_too_short(requests, (0, 120 * S))
    assert is_too_short(requests, (0, 119 * S)) and is_too_short(requests, (100 * S, 219 * S))


def test_time_in_system_is_the_integral_of_the_number_in_it():
    """Of two that are there from 2 to 5 and from 3 to 9 there are 0, 3, 6 and 9 request · ns up to 2, 4, 6 and 12."""
    sent, left = np.array([2, 3]), np.array([5, 9])
    integral = _time_in_system(sent, left, np.array([2, 4, 6, 12]))
    assert (integral.tolist(), integral.dtype) == ([0, 3, 6, 9], np.float64)


def test_a_run_in_which_nothing_ended_is_not_too_short():
    """Nobody ran for too long, as far as it was seen."""
    rows = [{"sent_ns": 0, "ended_ns": S, "outcome": UNFINISHED}]
    assert not is_too_short(records_of(rows).requests, (0, S))


def test_backpressure_is_not_growth():
    """A full queue that rejects does not grow: completions lag arrivals, yet percentiles mean something."""
    rows = [_answer(10 * i, 100, 10, 2, outcome=FINISHED if i % 2 else REJECTED) for i in range(400)]
    requests = records_of(rows).requests
    assert not is_unstable(requests, (0, 4 * S))


def test_closed_loops_and_batches_are_never_unstable():
    """Users who wait for their answers, and work that is all there, cannot outrun the engine."""
    requests, window = _queue(1.5, 500, 0)
    records = records_of([])
    records = type(records)(requests, records.steps, records.states, records.texts, {})
    assert measure(inputs_of(records, window_ns=window)).unstable
    assert not measure(inputs_of(records, window_ns=window, closed_loop=True)).unstable
    assert not measure(inputs_of(records, window_ns=window, all_at_once=True)).unstable


def test_only_steady_runs_have_a_warm_up_to_tell():
    """The beginning of a stable queue with drawn arrivals is judged by TTFT; nothing else has a steady state."""
    requests, window = _queue(0.5, 2000, 0)
    requests = requests.copy()
    slow = requests["sent_ns"] < 50 * S
    requests["first_delivery_ns"] = requests["delivered_ns"] + np.where(slow, 40 * S, 0)
    records = records_of([])
    records = type(records)(requests, records.steps, records.states, records.texts, {})

    def needed(**facts: object) -> float | None:
        return measure(inputs_of(records, window_ns=window, **facts)).values["warmup_needed_s"]

    first_left = requests["sent_ns"][~slow].min() / S
    assert needed(stationary=True) == pytest.approx(first_left, abs=10)
    assert needed() is None
    growing, its_window = _queue(1.5, 500, 0)
    records = type(records)(growing, records.steps, records.states, records.texts, {})
    assert measure(inputs_of(records, window_ns=its_window, stationary=True)).values["warmup_needed_s"] is None


def test_a_run_that_is_steady_from_its_first_request_on_needs_no_warm_up():
    """Not the seconds until that one is sent."""
    rows = [_answer(5000 + i, 10, 1, 1) for i in range(200)]
    assert measure(inputs_of(records_of(rows), window_ns=(0, 10 * S), stationary=True)).values["warmup_needed_s"] == 0.0


def test_requests_sent_together_are_in_the_order_of_their_ids():
    """Sixty come at 1 s and sixty at 2 s, in turns; the first 45 of those at 1 s wait, and the others of 1 s do not."""
    rows = [_answer(1000 * (1 + i % 2), 10 if i % 2 or i >= 90 else 1000, 1, 1) for i in range(120)]
    found = measure(inputs_of(records_of(rows), window_ns=(0, 10 * S), stationary=True)).values["warmup_needed_s"]
    assert found == 1.0


def _seed(value: float | None, *, unstable: bool = False, bound: str = "load", weak: tuple[str, ...] = ()) -> Measured:
    return Measured({"x": value}, frozenset(weak), {"rejected": {"queue_full": 2}}, unstable, bound)


def test_combine_is_the_t_interval_over_seeds():
    """Mean ± t(0.975, 2) · s/√3 of 1, 2, 3; reasons add up; weak percentiles of any seed stay marked."""
    combined = combine([_seed(1.0, weak=("x",)), _seed(2.0, bound="slots"), _seed(3.0, bound="slots")])
    assert combined.mean == {"x": 2.0}
    assert combined.half_width["x"] == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert combined.reasons == {"rejected": {"queue_full": 6}}
    assert (combined.weak_percentiles, combined.bound_by, combined.num_seeds) == (frozenset({"x"}), "slots", 3)


def test_what_none_of_so_many_did_may_still_be_done_by_some():
    """Clopper and Pearson's upper 95 % bounds where none of 10 and none of 100 missed: 30.85 % and 3.62 %."""
    assert [round(unseen(count), 4) for count in (10, 100)] == [0.3085, 0.0362]


def test_one_seed_has_no_interval():
    """With one seed the half-width is unknown, never 0."""
    assert combine([_seed(1.0)]).half_width == {"x": None}


def test_two_seeds_have_an_interval():
    """Mean ± t(0.975, 1) · s/√2 of 1 and 2: t is 12.706 and s/√2 one half."""
    assert combine([_seed(1.0), _seed(2.0)]).half_width["x"] == pytest.approx(12.7062 / 2, rel=1e-5)


def test_a_seed_without_a_value_leaves_none():
    """The mean of the seeds that happen to have a value would flatter."""
    combined = combine([_seed(1.0), _seed(None), _seed(3.0)])
    assert (combined.mean, combined.half_width) == ({"x": None}, {"x": None})


@pytest.mark.parametrize(
    ("unstable", "verdict"), [((1, 1, 0), True), ((1, 0, 0), False), ((1, 0), False), ((1,), True)]
)
def test_unstable_in_most_seeds(unstable, verdict):
    """A point is unstable when more than half of its seeds are."""
    assert combine([_seed(1.0, unstable=bool(flag)) for flag in unstable]).unstable is verdict


def test_measure_of_a_real_run_agrees_with_its_log():
    """itl and throughput of a vLLM run with preemptions are those of its tokens written out."""
    made = run([arrival(i, 700 * i, 9, 15) for i in range(20)], lambda kv: vllm(kv), num_blocks=12)
    assert made.records.requests["num_preemptions"].sum() > 0
    end = int(made.records.requests["delivered_ns"].max())
    values = measure(inputs_of(made.records, window_ns=(0, end))).values
    gaps = np.concatenate([np.diff(times) for times in made.token_times().values()])
    assert values["itl_mean_s"] == pytest.approx(gaps.mean() / S)
    assert values["itl_p99_s"] == pytest.approx(np.quantile(gaps, 0.99, method="inverted_cdf") / S)
    assert values["output_tokens_per_s"] == pytest.approx(20 * 15 * S / end)


def test_of_two_tokens_one_gap_is_the_pace_and_of_one_token_there_is_none() -> None:
    """Sent at 0, first at 10, all at 30 ns: 20 ns a token after the first of two; normalised by 2 tokens, and by 1."""
    columns = {
        "sent_ns": np.array([0, 0]),
        "arrival_ns": np.array([0, 0]),
        "scheduled_ns": np.array([4, 4]),
        "first_delivery_ns": np.array([10, 30]),
        "delivered_ns": np.array([30, 30]),
        "output_tokens": np.array([2, 1]),
    }
    found = values_ns(columns)
    assert found["tpot"][0] == 20
    assert np.isnan(found["tpot"][1])
    assert found["norm_latency"].tolist() == [15, 30]


def test_a_request_without_a_token_has_the_latencies_that_need_none() -> None:
    """Those that are not OF_TOKENS are known of it, the others are not."""
    columns = {name: np.array([1]) for name in LATENCY_COLUMNS} | {"output_tokens": np.array([0])}
    found = values_ns(columns)
    assert {name for name, values in found.items() if np.isnan(values[0])} == set(OF_TOKENS) - {"itl"}
    assert {"e2e", "queue_time"} == set(found) - set(OF_TOKENS)
