"""Offline jobs beside interactive requests: they fill what is free, give way, hurry before a deadline, and expire."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import BatchsimError
from batchsim.drive.live import live
from batchsim.drive.simulate import simulate
from batchsim.drive.source import VirtualClock
from batchsim.kernel.record import FINISHED, PRUNED
from batchsim.metrics.measure import measure
from batchsim.results.keep import point_inputs
from batchsim.scenario import load_scenario
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.capacity.study import with_load
from batchsim.study.curves.run import run_scenario
from batchsim.workload.offline import OfflineLog, OfflineWorkload

SCENARIO = """
model: llama-3.1-8b
cost: {kind: linear, base: 10ms, per_sequence: 200us, per_token: 20us}
kv: {tokens: 400000}
workload:
  arrivals: {kind: on_off, mean_rate: 5/s, on: 6s, off: 6s}
  duration: 40s
  output_cap: exact
  lengths:
    prompt: {kind: fixed, tokens: 80}
    output: {kind: lognormal, mean: 100, cv: 1.0, max: 500}
  classes:
    chat: {share: 100%}
    batch: {offline: {requests: 120, fill_to: 12}}
policies: {vllm: {}}
slo: e2e<10min @ 99%
seeds: 1
"""
JOB = "workload.classes.batch.offline"
MS = 1_000_000


def setup_of(folder: Path, *overrides: str) -> Setup:
    (folder / "mine.yaml").write_text(SCENARIO)
    return Setup.of(load_scenario(str(folder / "mine.yaml"), overrides=overrides))


def played(setup: Setup) -> tuple[Run, OfflineLog]:
    run = simulate_point(setup, setup.scenario.points()[0])
    assert isinstance(run.workload, OfflineWorkload)
    return run, run.workload.log


def in_flight(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """After each sending of an offline request: how many requests are in flight, and how many of these are others."""
    requests, classes = run.records.requests, np.array(run.records.texts)[run.records.requests["request_class"]]
    sent, ended = requests["sent_ns"], requests["ended_ns"]
    at = sent[classes == "batch"]
    both = [((sent <= ns) & (ended > ns)).sum() for ns in at]
    return np.array(both), np.array([((sent <= ns) & (ended > ns) & (classes == "chat")).sum() for ns in at])


def test_offline_requests_fill_what_others_leave_free(tmp_path: Path) -> None:
    """Never more than 12 in flight as one is sent, and 12 whenever there is work; all get done, each once."""
    run, log = played(setup_of(tmp_path))
    both, _ = in_flight(run)
    assert both.max() == 12 and np.median(both) == 12
    assert [piece.outcome for piece in log.pieces] == ["done"] * 120
    outputs = run.workload.source  # what is drawn is what is made
    assert outputs is not None
    for piece in log.pieces:
        assert piece.made == piece.job.requests.output_tokens[piece.row] == sum(made for _, made in piece.parts)
    requests = run.records.requests
    aborted = requests[requests["outcome"] == PRUNED]
    assert len(aborted) == sum(piece.aborts for piece in log.pieces) > 10
    prompts = dict(zip(requests["request_id"].tolist(), requests["prompt_tokens"].tolist(), strict=True))
    again = sum(prompts[part] for piece in log.pieces for part, _ in piece.parts[1:])
    assert 0 < again <= log.prefilled_again_tokens


def test_those_that_give_way_are_the_latest(tmp_path: Path) -> None:
    """Where they do not, interactive requests find more in flight; where they do, one that was begun first stays."""
    gives, log = played(setup_of(tmp_path))
    stays, kept = played(setup_of(tmp_path, f"{JOB}.gives_way=false"))
    assert not any(piece.aborts for piece in kept.pieces) and kept.prefilled_again_tokens == 0

    def seen(run: Run) -> float:
        requests, classes = run.records.requests, np.array(run.records.texts)[run.records.requests["request_class"]]
        sent, ended = requests["sent_ns"], requests["ended_ns"]
        chats = requests[classes == "chat"]["sent_ns"] + 60 * MS
        return float(np.mean([((sent <= ns) & (ended > ns)).sum() for ns in chats]))

    assert seen(gives) < seen(stays)
    assert min(piece.aborts for piece in log.pieces[:6]) == 0


def test_interactive_requests_are_the_same_with_and_without(tmp_path: Path) -> None:
    """Their times and lengths depend on no job; their latencies do, by what runs beside them."""
    run, _ = played(setup_of(tmp_path))
    alone = setup_of(tmp_path, "workload.classes={chat: {share: 100%}}")
    base = simulate_point(alone, alone.scenario.points()[0])
    ids = base.records.requests["request_id"]
    beside = run.records.requests[np.isin(run.records.requests["request_id"], ids)]
    for name in ("sent_ns", "prompt_tokens", "output_tokens"):
        assert base.records.requests[name].tolist() == beside[name].tolist()
    assert (beside["delivered_ns"] >= base.records.requests["delivered_ns"]).mean() > 0.9


@pytest.mark.parametrize("policy", ["vllm", "sglang"])
@pytest.mark.parametrize("job", ["window=20s", "at=7s", "gives_way=false"])
def test_both_drivers_and_a_fleet_of_one_leave_equal_records(tmp_path: Path, policy: str, job: str) -> None:
    """The client's calls come between steps alike in simulated time, in leaps, by a clock, and behind a router."""
    setup = setup_of(tmp_path, f"policies={{{policy}: {{}}}}", f"{JOB}.{job}")
    cores = []
    for leap in (True, False, None):
        workload = setup.workload(1.0, 0)
        core = setup.engine(setup.scenario.specs[0], workload)
        if leap is None:
            live(core, workload, VirtualClock())
        else:
            simulate(core, workload, leap=leap)
        core.check_returned()
        cores.append(core.recorder.records().requests.tolist())
    assert cores[0] == cores[1] == cores[2]
    fleet, _ = played(setup_of(tmp_path, f"policies={{{policy}: {{}}}}", f"{JOB}.{job}", "replicas={count: 1}"))
    assert fleet.records.requests.tolist() == cores[0]


def test_what_is_late_expires_and_a_job_waits_for_its_start(tmp_path: Path) -> None:
    """Nothing is sent before 5 s, nor is anything done after 15 s; what was under way is given up."""
    setup = setup_of(tmp_path, f"{JOB}={{requests: 400, fill_to: 12, at: 5s, window: 10s}}")
    run, log = played(setup)
    requests, classes = run.records.requests, np.array(run.records.texts)[run.records.requests["request_class"]]
    assert requests["sent_ns"][classes == "batch"].min() == 5_000 * MS
    done = [piece for piece in log.pieces if piece.outcome == "done"]
    expired = [piece for piece in log.pieces if piece.outcome == "expired"]
    assert len(done) + len(expired) == 400 and min(len(done), len(expired)) > 20
    assert max(piece.done_ns for piece in done) <= 15_020 * MS
    values = measure(point_inputs(setup, run)).values
    assert values["offline_done_share"] == len(done) / 400 and values["offline_expired_share"] == len(expired) / 400
    assert values["offline_makespan_s"] == pytest.approx(max(piece.done_ns for piece in done) / 1e9 - 5)
    assert values["in_slo[batch]"] == len(done) / 400 and values["slo_met"] == 0


def test_where_all_expire_no_objective_is_met(tmp_path: Path) -> None:
    """Requests with no row, or one of a part given up, are missed, in their class's objective and over all classes."""
    setup = setup_of(
        tmp_path,
        "workload.classes.batch={slo: e2e<1h @ 90%, offline: {requests: 50, fill_to: 12, at: 1s, window: 1ns}}",
    )
    run, log = played(setup)
    values = measure(point_inputs(setup, run)).values
    assert [piece.outcome for piece in log.pieces] == ["expired"] * 50
    assert (values["in_slo[batch]"], values["in_slo[chat]"], values["slo_met"]) == (0, 1, 0)
    chat = len(run.records.requests) - sum(piece.request_id >= 0 for piece in log.pieces)
    assert values["in_slo"] == chat / (chat + 50)


def test_the_job_with_the_earliest_deadline_goes_first(tmp_path: Path) -> None:
    """Of two jobs there at the start the one that was written last, since it is due first."""
    later = "workload.classes.batch={offline: {requests: 60, fill_to: 8, window: 2min}}"
    sooner = "workload.classes.soon={offline: {requests: 30, fill_to: 8, window: 1min}}"
    _, log = played(setup_of(tmp_path, later, sooner))
    jobs = {job.name: [piece.done_ns for piece in job.pieces] for job in log.jobs}
    assert np.median(jobs["soon"]) < np.percentile(jobs["batch"], 10)


def test_an_urgent_job_fills_more(tmp_path: Path) -> None:
    """At 12 in flight it is late; where its tokens over the time left are above 300 a second it may have 40."""
    job = "requests: 300, fill_to: 6, window: 35s"
    _, slow = played(setup_of(tmp_path, f"{JOB}={{{job}}}"))
    run, fast = played(setup_of(tmp_path, f"{JOB}={{{job}, urgent_above: 300, urgent_fill_to: 40}}"))
    assert sum(piece.outcome == "done" for piece in slow.pieces) < 300
    assert sum(piece.outcome == "done" for piece in fast.pieces) == 300
    assert in_flight(run)[0].max() == 40


def test_longest_first_is_near_the_best(tmp_path: Path) -> None:
    """On three engines of one slot: at most 4/3 − 1/9 of the best makespan, and no later than in the order drawn."""
    ends = {}
    changes = ["policies={continuous: {max_num_seqs: 1, max_num_batched_tokens: 4096}}"]
    changes += ["cost={kind: constant, step: 10ms}", "replicas={count: 3, router: shortest_queue}"]
    changes += ["workload.arrivals={kind: constant, mean_rate: 1/s}", "workload.duration=1s"]
    for order in ("as_drawn", "longest_first"):
        run, log = played(setup_of(tmp_path, *changes, f"{JOB}={{requests: 14, fill_to: 3, order: {order}}}"))
        assert (run.records.requests["outcome"] == FINISHED).sum() == 15
        ends[order] = max(piece.done_ns for piece in log.pieces)
        tokens = [int(piece.made) for piece in log.pieces]
    best_ns = 10 * MS * max(sum(tokens) / 3, max(tokens))
    assert ends["longest_first"] <= (4 / 3 - 1 / 9) * best_ns + 10 * MS * 100  # and the one interactive answer
    assert ends["longest_first"] <= ends["as_drawn"]


def test_prefix_order_finds_more_in_a_small_cache(tmp_path: Path) -> None:
    """One shared text after the other, where the cache holds few of them."""
    hits = {}
    shared = "workload.classes.batch.shared_prefix={groups: 12, added_tokens: 1600}"
    for order in ("as_drawn", "by_prefix"):
        setup = setup_of(tmp_path, shared, "kv.tokens=12000", f"{JOB}={{requests: 120, fill_to: 4, order: {order}}}")
        hits[order] = measure(point_inputs(setup, played(setup)[0])).values["prefix_hit_rate"] or 0.0
    assert hits["by_prefix"] > hits["as_drawn"] + 0.1


def test_an_order_by_prefix_needs_prefixes(tmp_path: Path) -> None:
    """Where no prompts share one, the order would change nothing, and is refused."""
    with pytest.raises(BatchsimError, match="order by_prefix needs prompts that share a prefix"):
        played(setup_of(tmp_path, f"{JOB}={{requests: 20, fill_to: 8, order: by_prefix}}"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([f"{JOB}.requests=0"], "requests"),
        ([f"{JOB}.fill_to=0"], "fill_to"),
        ([f"{JOB}.order=shortest"], "order"),
        ([f"{JOB}.urgent_above=100"], "urgent_above and urgent_fill_to belong together"),
        ([f"{JOB}={{requests: 3, fill_to: 2, urgent_above: 10, urgent_fill_to: 4}}"], "only a job with a deadline"),
        (["workload.classes.batch.share=10%"], "classes.batch.share: an offline job has requests and a window"),
        (["workload.classes.batch.patience={mean: 5s}"], "classes.batch.patience: an offline job has"),
        (["workload.patience={mean: 5s}"], "cannot be beside patience of the whole workload"),
        (["workload.max_concurrency=3"], "cannot be beside max_concurrency of the whole workload"),
        (
            ["workload.classes={batch: {offline: {requests: 3, fill_to: 2}}}"],
            "no class beside",
        ),
        (["workload.arrivals={kind: closed_loop, users: 3, think_time: 1s}"], "beside it, not closed_loop"),
        (["workload.classes.batch.lengths={kind: list, prompt: [1], output: [2]}"], "an offline job draws its lengths"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, changes: list[str], said: str) -> None:
    """Where, what, with the numbers, and what to do."""
    with pytest.raises(BatchsimError) as error:
        setup_of(tmp_path, *changes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_only_a_simulation_gives_way(tmp_path: Path) -> None:
    """No real client is asked to."""
    with pytest.raises(BatchsimError, match="offline jobs can only be simulated"):
        setup_of(tmp_path).check_can_be_real()


def test_a_job_beside_the_arrivals_is_no_traffic_for_capacity_and_auto(tmp_path: Path) -> None:
    """Its requests come whatever the rate of the others: neither is searched, and one line names the class."""
    scenario = setup_of(tmp_path, "load={mean_rate: auto}").scenario
    with pytest.raises(BatchsimError, match=r"auto: the offline job classes\.batch fills what others leave"):
        run_scenario(scenario, out=tmp_path)
    with pytest.raises(BatchsimError, match=r"classes\.batch fills what others leave, so that there is no capacity"):
        with_load(scenario)
