"""KPIs of the engine by hand, and what is said to bind it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchsim.cost.work import useful_flops_bytes, work_columns
from batchsim.deployment.catalog import load_model
from batchsim.deployment.deployment import Deployment
from batchsim.drive.fleet.fleet_plan import DRAINING, STARTING, UP, ReplicaSpan
from batchsim.drive.fleet.fleet_records import EngineLife, merged
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import BLOCKED, DECODE, FINISHED, MISSING, PREFILL, REJECTED, UNFINISHED, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.metrics.host_lane import (
    device_spans_ns,
    ends_before_ns,
    host_spans_ns,
    host_waits_ns,
    stage_spans_ns,
)
from batchsim.metrics.kpis import bound_by, totals_of
from batchsim.metrics.measure import measure
from batchsim.metrics.point_inputs import FleetInputs
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.metrics_helpers import MS, LinearCost, arrival, inputs_of, records_of, run, vllm
from tests.support.whole_batches import Listed

STEPS = [
    # 10 ms of a prefill of 30 tokens with 10 padded ones; 2 of 4 slots, 20 of 100 blocks
    {"start_ns": 0, "duration_ns": 10 * MS, "num_chunks": 2, "num_prefill_tokens": 30, "pad_prefill_tokens": 10,
     "num_running": 2, "free_blocks": 80},
    # 30 ms of a decode of 2 with one dead row; both run: 32 + 2 tokens in 10 blocks of 4
    {"start_ns": 10 * MS, "duration_ns": 30 * MS, "num_decode": 2, "pad_decode_rows": 1, "context_tokens": 32,
     "num_running": 2, "free_blocks": 90, "swap_blocks": 3},
    # begins in the window and ends 10 ms after it
    {"start_ns": 90 * MS, "duration_ns": 20 * MS, "num_decode": 4, "num_running": 4, "free_blocks": 0,
     "context_tokens": 396},
    # begins as the window ends
    {"start_ns": 100 * MS, "duration_ns": 20 * MS, "num_decode": 4, "num_running": 4, "swap_blocks": 9},
]  # fmt: skip
REQUEST = {"sent_ns": 0, "ended_ns": 40 * MS, "output_tokens": 2, "num_preemptions": 1, "recomputed_tokens": 12}
WINDOW = (0, 100 * MS)


def _values(**more: object) -> dict[str, float | None]:
    return measure(inputs_of(records_of([REQUEST, REQUEST], STEPS), window_ns=WINDOW, **more)).values


def test_kpis_by_hand():
    """Each KPI of three steps in the window, one of them half outside."""
    values = _values(max_num_seqs=4)
    expected = {
        "slot_occupancy": (10 * 0.5 + 30 * 0.5 + 10 * 1.0) / 50,
        "pad_share": 11 / (36 + 11),
        "kv_utilisation_mean": (10 * 0.2 + 30 * 0.1 + 10 * 1.0) / 50,
        "kv_utilisation_p99": 1.0,
        "kv_utilisation_peak": 1.0,
        "kv_fragmentation": (30 * (1 - 34 / 40) + 10 * 0.0) / 40,
        "preemption_rate": 1.0,
        "recomputed_tokens": 24,
        "swapped_blocks": 3,
        "engine_busy_share": 0.5,
        "mean_batch": 8 / 3,
        "num_steps": 3,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_drafts_by_hand():
    """Three decodes with two drafts each, three of which are accepted, beside 6 prompt tokens; none without drafts."""
    step = {"num_decode": 3, "num_decode_tokens": 9, "num_accepted_tokens": 3, "num_prefill_tokens": 6, "num_chunks": 1}
    found = measure(inputs_of(records_of([REQUEST], [{"start_ns": 0, "duration_ns": MS, **step}]), window_ns=WINDOW))
    assert (found.values["acceptance_length"], found.values["rejected_share"]) == (6 / 3, 3 / 15)
    plain = _values()
    assert plain["acceptance_length"] is plain["rejected_share"] is None


def test_the_time_of_steps_that_overlap_in_a_pipeline_counts_once():
    """Two of 40 ms, the second begun 20 ms after the first, take 60 of 100 ms; on two replicas they take 80."""
    steps = [{"start_ns": at * MS, "duration_ns": 40 * MS, "num_decode": 1, "free_blocks": 50} for at in (0, 20)]
    lanes = [(at * MS, at * MS, (at + 40) * MS, 0) for at in (0, 20)]
    more = {"window_ns": WINDOW, "cost_terms": {"flops": np.array([30.0, 30.0])}, "peak_flops": 1e3}
    values = measure(inputs_of(records_of([REQUEST], steps, lanes=lanes), **more)).values
    assert values["engine_busy_share"] == 0.6 and values["mfu"] == 60 / (1e3 * 0.06)
    lives = [EngineLife(k, records_of([], [steps[k]], lanes=[lanes[k]])) for k in (0, 1)]
    assert ends_before_ns(merged(lives)).tolist() == [0, 0]


def test_demand_is_of_the_times_at_which_requests_were_meant_to_be_sent():
    """A request that its client never sent is open to the end; the window ends with the last that was meant."""
    sent = [REQUEST | {"request_id": 1, "sent_ns": 9 * MS}, REQUEST | {"request_id": 0, "sent_ns": 7 * MS}]
    meant, window_ns = inputs_of(
        records_of(sent), window_ns=(2 * MS, 5 * MS), intended_ns=np.array([1, 3, 8]) * MS
    ).demand
    assert window_ns == (2 * MS, 8 * MS)
    assert (meant["sent_ns"] / MS).tolist() == [1, 3, 8]
    assert meant["outcome"].tolist() == [FINISHED, FINISHED, UNFINISHED]
    assert meant["ended_ns"].tolist() == [40 * MS, 40 * MS, np.iinfo(np.int64).max]
    early = inputs_of(records_of(sent), window_ns=(9 * MS, 10 * MS), intended_ns=np.array([1, 3, 8]) * MS)
    assert early.demand[1] == (9 * MS, 9 * MS)


def test_what_a_device_waits_for_its_host_by_hand():
    """2 ms for the first call; none for a step launched in time; 5 from a step's end over its results to the launch;
    of a rest of 20 only the last call's 2. Steps before and after the window count for what is in it."""
    times = [(2, 10), (12, 10), (27, 10), (57, 50), (108, 9)]  # start and duration
    lanes = [(0, 2, 15, 0), (2, 4, 25, 3), (25, 27, 40, 0), (55, 57, 107, 1), (107, 108, 120, 7)]
    steps = [{"start_ns": at * MS, "duration_ns": ns * MS, "num_decode": 1} for at, ns in times]
    ahead = records_of([REQUEST], steps, lanes=[(a * MS, b * MS, c * MS, lost) for a, b, c, lost in lanes])
    waits_ns = host_waits_ns(ahead)
    assert (waits_ns / MS).tolist() == [2, 0, 5, 2, 1]
    assert waits_ns.dtype == np.int64  # beyond 2^53 ns a float is no longer exact
    values = measure(inputs_of(ahead, window_ns=(1 * MS, 101 * MS))).values
    assert (values["host_bound_share"], values["wasted_tokens"]) == (0.08, 4)
    terms = {"weights": np.full(5, 2.0 * MS), "kv_reads": np.full(5, 1.0 * MS)}
    for wait, bound in ((ahead, "host, slots"), (replace(ahead, lanes=ahead.lanes[:0]), "weights, slots")):
        inputs = inputs_of(wait, cost_terms=terms)
        found = bound_by(totals_of(inputs, (0, 60 * MS)), {"pad_share": 0.0}, {"queued:no_slot": 1})
        assert found == bound
    values = measure(inputs_of(records_of([REQUEST], steps))).values
    assert values["host_bound_share"] is values["wasted_tokens"] is None


def test_what_the_host_did_by_hand():
    """Calls and results follow each other: results wait for a launch (40) or for those before them (42); a rest belongs
    to nobody, what was never processed has no length, and a call ends where results come before its launch."""
    times = [(2, 10), (12, 10), (27, 10), (37, 8), (70, 9)]
    lanes = [(0, 2, 15, 0), (2, 4, 25, 0), (25, 27, 42, 0), (27, 40, 46, 0), (50, 70, MISSING, 0)]
    steps = [{"start_ns": at, "duration_ns": ns, "num_decode": 1} for at, ns in times]
    calls, results = host_spans_ns(records_of([REQUEST], steps, lanes=lanes))
    assert calls.tolist() == [[0, 2], [2, 4], [25, 27], [27, 40], [50, 70]]
    assert results[:4].tolist() == [[12, 15], [22, 25], [40, 42], [45, 46]]
    assert results[4, 0] == results[4, 1]
    lanes[3] = (38, 44, 46, 0)  # launched after the results of the step before it
    calls, results = host_spans_ns(records_of([REQUEST], steps, lanes=lanes))
    assert (calls[3].tolist(), results[2].tolist()) == ([38, 38], [38, 42])
    assert [spans.shape for spans in host_spans_ns(records_of([REQUEST]))] == [(0, 2), (0, 2)]


def test_when_each_stage_of_a_pipeline_was_busy_by_hand():
    """The second step waits for the long one before it in the second stage; the third finds both free."""
    steps = [{"start_ns": at, "duration_ns": ns, "num_decode": 1} for at, ns in ((0, 10), (2, 11), (20, 4))]
    records = records_of([REQUEST], steps, lanes=[(0, 0, 10, 0), (2, 2, 13, 0), (20, 20, 24, 0)])
    first, second = stage_spans_ns(records, np.array([[2, 8], [3, 3], [2, 2]]))
    assert first.tolist() == [[0, 2], [2, 5], [20, 22]]
    assert second.tolist() == [[2, 10], [10, 13], [22, 24]]
    assert device_spans_ns(records).tolist() == [[0, 10], [10, 13], [20, 24]]


def test_a_step_counts_for_the_time_it_runs_within_the_window():
    """A full pool for 1 ms of 100, the last of a step that began long before: not what is exceeded for 1 % of the time.
    Of ten steps one is full: by steps it would be."""
    full = {"start_ns": 0, "duration_ns": 101 * MS, "num_decode": 1, "free_blocks": 0}
    rest = [
        {"start_ns": (101 + 11 * i) * MS, "duration_ns": 11 * MS, "num_decode": 1, "free_blocks": 60} for i in range(9)
    ]
    values = measure(inputs_of(records_of([REQUEST], [full, *rest]), window_ns=(100 * MS, 200 * MS))).values
    assert values["engine_busy_share"] == 1.0
    assert values["kv_utilisation_mean"] == pytest.approx(0.01 * 1.0 + 0.99 * 0.4)
    assert values["kv_utilisation_p99"] == 0.4


def test_what_is_not_defined_is_none():
    """No limit on slots, no cost terms: no occupancy, no MFU, and no zeros for them."""
    values = _values()
    assert values["slot_occupancy"] is values["mfu"] is values["mbu"] is None
    nothing = measure(inputs_of(records_of([]))).values
    assert nothing["pad_share"] is nothing["kv_utilisation_peak"] is nothing["mean_batch"] is None
    assert nothing["engine_busy_share"] == 0.0


def test_energy_is_the_power_of_steps_over_their_time_within_the_window():
    """600 W for 10 ms and 500 W for 30 and 10 of 20 ms: 26 J over 50 ms of steps, and over 4 tokens; else unknown. With
    100 W for the other 50 ms it is 31 J over 100 ms."""
    values = _values(step_watts=np.array([600.0, 500.0, 500.0, 500.0]))
    assert values["power_w"] == pytest.approx(26 / 0.05)
    assert values["energy_j_per_output_token"] == pytest.approx(26 / 4)
    assert values["energy_j"] is _values()["power_w"] is _values()["energy_j_per_output_token"] is None
    values = _values(step_watts=np.array([600.0, 500.0, 500.0, 500.0]), idle_watts=100.0)
    assert values["energy_j"] == pytest.approx(26 + 100 * 0.05) and values["mean_power_w"] == pytest.approx(310)
    assert values["energy_with_idle_j_per_output_token"] == pytest.approx(31 / 4)


def test_mfu_is_work_over_peak_and_time():
    """FLOPs and bytes of the window's steps over peak × the steps' 60 ms."""
    terms = {"flops": np.array([1e12, 2e12, 3e12, 9e12]), "bytes": np.array([1e9, 1e9, 1e9, 9e9])}
    values = _values(cost_terms=terms, peak_flops=1e15, memory_bandwidth=1e12)
    assert values["mfu"] == pytest.approx(6e12 / (1e15 * 0.06))
    assert values["mbu"] == pytest.approx(3e9 / (1e12 * 0.06))


def test_hit_rate_by_hand():
    """Of 100 + 60 prompt tokens 30 were found; a preemption needed 25 again, of which 15 were found."""
    requests = [
        REQUEST | {"prompt_tokens": 100, "recomputed_tokens": 10, "cached_tokens": 30, "cached_tokens_all": 45},
        REQUEST | {"prompt_tokens": 60, "recomputed_tokens": 0},
        REQUEST | {"prompt_tokens": 999, "recomputed_tokens": 0, "scheduled_ns": MISSING, "outcome": REJECTED},
        REQUEST | {"sent_ns": 200 * MS, "prompt_tokens": 999, "cached_tokens": 9, "cached_tokens_all": 9},
    ]
    records = records_of(requests, STEPS)
    values = measure(inputs_of(records, window_ns=WINDOW, has_prefix_cache=True)).values
    assert values["prefix_hit_rate"] == pytest.approx(45 / (160 + 10 + 15))
    assert _values()["prefix_hit_rate"] is None and _values(has_prefix_cache=True)["prefix_hit_rate"] == 0


def test_what_was_found_in_the_cache_is_no_work():
    """MFU counts the 36 tokens that a step computes, not the 64 before them; shared blocks have no fragmentation."""
    shared = TokenIds.of([(0, 0, 100)])
    arrivals = [Arrival(Request(i, 40_000 * i, 100, 2, tokens=shared), 2) for i in range(2)]
    executor, recorder = SimExecutor(LinearCost(), 200), Recorder()
    config = VllmConfig(async_scheduling=False, max_num_seqs=4, max_num_batched_tokens=200)
    scheduler = Vllm(config, PolicyContext(BlockHashKV(50, 64), 200))
    live(EngineCore(scheduler, executor, recorder, max_model_len=200), Listed(arrivals), VirtualClock())
    records = recorder.records()
    assert records.steps["cached_tokens"].tolist() == [0, 0, 64, 0]
    assert records.steps["num_prefill_tokens"].tolist() == [100, 0, 36, 0]
    model = load_model("llama-3.1-8b")
    flops, _ = useful_flops_bytes(Deployment(model), work_columns(records.steps))
    less = 64 * model.matmul_flops_per_token + 64 * 65 // 2 * model.attention_flops_per_pair
    assert flops[0] - flops[2] == pytest.approx(less)
    values = measure(inputs_of(records, num_blocks=50, block_size=64, has_prefix_cache=True)).values
    assert values["prefix_hit_rate"] == 64 / 200 and values["kv_fragmentation"] is None


def test_fragmentation_counts_what_is_reserved_ahead():
    """One request of 5 tokens in 2 blocks of 4 wastes 3 of 8 places in its only decode step."""
    made = run([arrival(0, 0, 4, 2)])
    values = measure(inputs_of(made.records, num_blocks=1000)).values
    assert values["kv_fragmentation"] == pytest.approx(1 - 5 / 8)


def test_fragmentation_is_of_steps_in_which_all_who_run_decode():
    """2 + 1 tokens in a block of 4; not of a step that someone sits out, nor of one that only moves KV, nobody left."""
    decode = {"duration_ns": 10 * MS, "num_decode": 1, "num_running": 1, "context_tokens": 2, "free_blocks": 99}
    others = [{"num_running": 2}, {"num_decode": 0, "num_running": 0, "context_tokens": 0, "swap_blocks": 1}]
    steps = [decode | other | {"start_ns": 20 * MS * i} for i, other in enumerate([{}, *others])]
    assert measure(inputs_of(records_of([REQUEST], steps))).values["kv_fragmentation"] == 0.25


def test_kpis_of_several_replicas_by_hand():
    """Replica 1 has half the blocks of replica 0 and twice its GPUs and peak, and is held from 200 to 700 of 1,000 ms.

    The window is from 100 to 900 ms: who is held before it or after it does not count.
    """
    first = {"start_ns": 100 * MS, "duration_ns": 500 * MS, "num_decode": 1, "num_running": 1, "free_blocks": 50}
    second = {"start_ns": 300 * MS, "duration_ns": 100 * MS, "num_chunks": 1, "num_running": 1, "free_blocks": 10}
    request = {"sent_ns": 150 * MS, "delivered_ns": 600 * MS, "output_tokens": 8, "num_retries": 2}
    lives = [EngineLife(0, records_of([request], [first])), EngineLife(1, records_of([], [second]))]
    spans = [
        (0, UP, 0, 1000), (1, STARTING, 200, 300), (1, UP, 300, 600), (1, DRAINING, 600, 700),
        (2, UP, 0, 50), (2, UP, 900, 1000), (1, UP, 900, 1000), (3, UP, 0, 60),
    ]  # fmt: skip
    fleet = FleetInputs(
        group=("", "", "", ""),
        num_blocks=np.array([100, 50, 100, 100]),
        num_gpus=np.array([1, 2, 1, 1]),
        peak_flops=np.array([1e3, 2e3, 1e3, 1e3]),
        memory_bandwidth=None,
        idle_watts=np.array([10.0, 20.0, 10.0, 10.0]),
        spans=tuple(ReplicaSpan(replica, state, start * MS, end * MS) for replica, state, start, end in spans),
    )
    terms = {"flops": np.array([100.0, 50.0]), "bytes": np.array([1.0, 1.0])}
    watts = np.array([100.0, 300.0])
    given = {"fleet": fleet, "cost_terms": terms, "step_watts": watts}
    inputs = inputs_of(merged(lives), window_ns=(100 * MS, 900 * MS), **given)
    values = measure(inputs).values
    expected = {
        "replica_seconds": 1.3, "num_replicas_mean": 1.3 / 0.8, "num_replicas_max": 2, "retries": 2,
        "kv_utilisation_mean": (500 * 0.5 + 100 * 0.8) / 600, "engine_busy_share": 600 / (800 + 400),
        "output_tokens_per_s_per_gpu": 8 / 0.8 / ((800 + 2 * 500) / 800), "mfu": 150 / (1e3 * 0.5 + 2e3 * 0.1),
        "energy_j": 100 * 0.5 + 10 * 0.3 + 300 * 0.1 + 20 * 0.4, "power_w": 80 / 0.6,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert values["mbu"] is None


def _bound(reason: str, *, pad_rows: int = 0, queued_ms: int = 50, **terms: float) -> str:
    """What binds a request that waits `queued_ms` of 100 ms for `reason` and then runs in one step."""
    step = {"start_ns": queued_ms * MS, "duration_ns": (100 - queued_ms) * MS, "num_chunks": 1}
    records = records_of(
        [{"sent_ns": 0, "ended_ns": 100 * MS}],
        [step | {"num_prefill_tokens": 10, "pad_prefill_tokens": pad_rows}],
        [(0, 0, BLOCKED, 1, MISSING), (queued_ms * MS, 0, PREFILL, 0, MISSING)],
        ("", reason),
    )
    cost_terms = {name: np.array([value]) for name, value in terms.items()} or None
    return measure(inputs_of(records, cost_terms=cost_terms)).bound_by


@pytest.mark.parametrize(
    ("reason", "more", "bound"),
    [
        ("no_slot", {}, "slots"),
        ("no_slot", {"weights": 5.0, "kv_reads": 3.0}, "weights, slots"),
        ("kv_blocks", {"weights": 5.0, "kv_reads": 8.0}, "KV reads, KV"),
        ("token_budget", {"weights": 5.0, "matmul": 3.0, "attention": 4.0}, "matmul, token budget"),
        ("batch_running", {"pad_rows": 5, "weights": 5.0}, "padding, slots"),
        ("batch_running", {"pad_rows": 4, "host": 5.0}, "host, slots"),
        ("batch_window", {"other": 9.0}, "batch window"),
        ("my_own_rule", {}, "my own rule"),
        ("my:rule", {}, "my:rule"),
        ("no_slot", {"queued_ms": 10, "weights": 5.0}, "load"),
        ("no_slot", {"queued_ms": 11, "weights": 5.0}, "weights, slots"),
    ],
)
def test_bound_by(reason, more, bound):
    """The largest term of the steps and the longest reason of the queue; `load` where hardly anyone queued."""
    assert _bound(reason, **more) == bound


def test_reasons_of_one_bound_count_together():
    """3 + 3 ns for want of a slot are longer than 5 for want of KV memory."""
    part_ns = {"queued:no_slot": 3, "queued:kv_blocks": 5, "queued:batch_running": 3, "decode_alone": 1}
    assert bound_by(totals_of(inputs_of(records_of([])), WINDOW), {"pad_share": None}, part_ns) == "slots"


def test_only_steps_that_start_in_the_window_bind_it():
    """From its beginning on and before its end: reads of KV there, weights before and after it."""
    steps = [{"start_ns": at * MS, "duration_ns": 10 * MS, "num_decode": 1} for at in (90, 100, 900)]
    terms = {"weights": np.array([9.0, 0.0, 9.0]), "kv_reads": np.array([0.0, 5.0, 0.0])}
    inputs = inputs_of(records_of([], steps), cost_terms=terms)
    assert (
        bound_by(totals_of(inputs, (100 * MS, 900 * MS)), {"pad_share": 0.0}, {"queued:no_slot": 1})
        == "KV reads, slots"
    )


def test_nothing_ended_is_not_a_light_load():
    """Of a cohort of which nobody finished it is not known what it waited for."""
    rows = [{"sent_ns": 0, "ended_ns": 100 * MS, "outcome": UNFINISHED}]
    assert measure(inputs_of(records_of(rows))).bound_by == "nothing ended"


def test_an_engine_with_room_is_bound_by_its_load():
    """Requests that come one at a time wait for nothing."""
    made = run([arrival(i, MS * i, 6, 4) for i in range(10)])
    assert measure(inputs_of(made.records)).bound_by == "load"
    crowded = run([arrival(i, i, 6, 10) for i in range(30)], lambda kv: vllm(kv, max_num_seqs=1))
    assert measure(inputs_of(crowded.records)).bound_by == "slots"
    assert DECODE in crowded.records.states["state"]
