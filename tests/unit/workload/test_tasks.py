"""Tasks by a law: stages that fan out and join, what their prompts share, and how they are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import BatchsimError
from batchsim.drive.live import live
from batchsim.drive.simulate import simulate
from batchsim.drive.source import VirtualClock
from batchsim.kernel.record import FINISHED, PRUNED, REJECTED, UNFINISHED
from batchsim.metrics.measure import measure
from batchsim.metrics.slo import parse_slo
from batchsim.metrics.tasks import task_lives
from batchsim.policies.registry import POLICIES
from batchsim.results.keep import point_inputs
from batchsim.scenario import load_scenario
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.tasks import TaskWorkload
from tests.support.metrics_helpers import MS, inputs_of, records_of
from tests.unit.workload.test_replayed_sessions import SCENARIO as LOG
from tests.unit.workload.test_replayed_sessions import TREE, common, expanded

SCENARIO = """
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 400000}
workload:
  arrivals: {kind: constant, mean_rate: 6/s}
  output_cap: exact
  duration: 3s
  tasks:
    stages:
      - {prompt: {kind: fixed, tokens: 100}, output: {kind: fixed, tokens: 10}}
      - fan_out: 2
        shared_prompt: {kind: fixed, tokens: 50}
        prompt: {kind: fixed, tokens: 20}
        output: {kind: uniform, min: 3, max: 9}
        wait: 40ms
      - {shared_prompt: {kind: fixed, tokens: 7}, fan_out: 3, output: {kind: fixed, tokens: 2}, wait: 5ms}
policies: {vllm: {}}
slo: task_e2e<1s @ 50%
seeds: 1
"""


def setup_of(folder: Path, *overrides: str, text: str = SCENARIO) -> Setup:
    (folder / "mine.yaml").write_text(text)
    return Setup.of(load_scenario(str(folder / "mine.yaml"), overrides=overrides))


def played(setup: Setup) -> Run:
    return simulate_point(setup, setup.scenario.points()[0])


def tasks_of(setup: Setup) -> TaskWorkload:
    workload = setup.workload(1.0, 0)
    assert isinstance(workload, TaskWorkload)
    return workload


def test_stages_fan_out_and_join_to_the_nanosecond(tmp_path: Path) -> None:
    """A task a second, alone. 100 ms of answer; 40 ms; two side by side, of which the longer counts; 5 ms; 20 ms."""
    run = played(setup_of(tmp_path))
    requests = run.records.requests
    sent, ended = requests["sent_ns"].reshape(-1, 6), requests["delivered_ns"].reshape(-1, 6)
    outputs = requests["output_tokens"].reshape(-1, 6)
    assert sent[:, 0].tolist() == [0, 1_000 * MS, 2_000 * MS] and (outputs[:, 1] != outputs[:, 2]).any()
    for task in range(len(sent)):
        longest = outputs[task, 1:3].max()
        start = sent[task, 0]
        assert sent[task, 1:3].tolist() == [start + 140 * MS] * 2
        assert sent[task, 3:].tolist() == [start + (140 + 10 * longest + 5) * MS] * 3
        assert ended[task].max() == start + (140 + 10 * longest + 5 + 20) * MS
    lives = task_lives(point_inputs(setup_of(tmp_path), run))
    assert lives.e2e_ns.tolist() == (ended.max(axis=1) - sent[:, 0]).tolist()


@pytest.mark.parametrize("policy", ["vllm", "static: {batch_size: 2}", "sglang", "tensorrt_llm"])
def test_live_leaves_the_records_of_the_simulation(tmp_path: Path, policy: str) -> None:
    """With a virtual clock, bit for bit; every request of every task is on record."""
    kind, _, knobs = policy.partition(": ")
    setup = setup_of(tmp_path, "workload.duration=8s", f"policies={{{kind}: {knobs or '{}'}}}")
    run = played(setup)
    workload, clock = setup.workload(run.point.load, 0), VirtualClock()
    core = setup.engine(setup.scenario.specs[0], workload)
    live(core, workload, clock)
    assert (core.recorder.records().requests == run.records.requests).all()
    assert (run.records.requests["outcome"] == FINISHED).all() and len(run.records.requests) == 6 * 8


@pytest.mark.parametrize("router", ["round_robin", "session_affinity", "power_of_two"])
def test_tasks_behind_a_router_are_the_same_tasks(tmp_path: Path, router: str) -> None:
    """Requests, prompts and outputs are those of one engine; every one finishes."""
    alone = played(setup_of(tmp_path)).records.requests
    fleet = played(setup_of(tmp_path, f"replicas={{count: 2, router: {router}}}")).records.requests
    for column in ("request_id", "prompt_tokens", "output_tokens", "outcome"):
        assert (alone[column] == fleet[column]).all()


def test_prompts_hold_the_stages_before(tmp_path: Path) -> None:
    """Every prompt begins with all prompts and answers before it; siblings part where their own text begins."""
    workload = tasks_of(setup_of(tmp_path, "workload.shared_prefix={groups: 1, added_tokens: 30}"))
    texts = [expanded(workload._text(row)) for row in range(6)]
    prompts = workload.listed.requests.prompt_tokens[:6].tolist()
    outputs = workload.listed.requests.output_tokens[:6].tolist()
    assert [len(text) for text in texts] == prompts
    assert prompts[:3] == [130, 130 + 10 + 50 + 20, 130 + 10 + 50 + 20]
    assert prompts[3:] == [130 + 10 + 50 + 20 + outputs[1] + 20 + outputs[2] + 7] * 3
    assert common(texts[0], texts[1]) == 130 and common(texts[1], texts[2]) == 130 + 10 + 50
    assert common(texts[1], texts[3]) == prompts[1] and texts[3] == texts[4] == texts[5]
    held = texts[3][prompts[1] + outputs[1] :]
    assert held[:20] == texts[2][-20:], "the other branch's own text follows the first one's answer"
    other = [expanded(workload._text(row)) for row in range(6, 12)]
    assert common(texts[0], other[0]) == 30, "tasks share no more than the common prefix"


def test_the_rate_is_that_of_all_requests_and_tasks_are_the_same_at_every_load(tmp_path: Path) -> None:
    """6 requests/s of tasks of 6 are a task a second; at another rate a task has the same lengths."""
    slow, fast = (tasks_of(setup_of(tmp_path, f"workload.arrivals.mean_rate={rate}/s")) for rate in (6, 60))
    assert len(slow.listed.sent_ns) == 3 * 6 and "1 tasks/s begin, for 6 requests/s" in slow.notes[0]
    assert len(fast.listed.sent_ns) == 30 * 6
    assert (fast.listed.requests.prompt_tokens[:18] == slow.listed.requests.prompt_tokens).all()


def test_exponential_waits_are_drawn_by_task(tmp_path: Path) -> None:
    """All requests of a stage wait alike; on average as long as asked for."""
    stages = "workload.tasks.stages=[{prompt: {kind: fixed, tokens: 9}, output: {kind: fixed, tokens: 1}}, {prompt: "
    stages += (
        "{kind: fixed, tokens: 9}, output: {kind: fixed, tokens: 1}, fan_out: 2, wait: 1s, wait_kind: exponential}]"
    )
    workload = tasks_of(setup_of(tmp_path, stages, "workload.duration=2000s"))
    wait_ns = workload.links.wait_ns.reshape(-1, 3)
    assert (wait_ns[:, 1] == wait_ns[:, 2]).all() and not wait_ns[:, 0].any()
    assert abs(wait_ns[:, 1].mean() / 1e9 - 1) < 4 / np.sqrt(len(wait_ns))


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["workload.arrivals={kind: closed_loop, users: 2, think_time: 0s}"], "tasks need arrivals over time"),
        (["workload.arrivals={kind: all_at_once}"], "all_at_once"),
        (["workload.duration=null", "workload.requests=10"], "tasks end with a duration"),
        (["workload.sessions={turns: {kind: fixed, tokens: 2}, think_time: 1s}"], "sessions: requests of tasks wait"),
        (["workload.max_concurrency=2"], "max_concurrency: requests of tasks wait"),
        (["workload.lengths={prompt: {kind: fixed, tokens: 2}, output: {kind: fixed, tokens: 2}}"], "Drop lengths"),
        (["workload.tasks.stages=[]"], "tasks.stages is empty"),
        (["workload.tasks.stages=[{output: {kind: fixed, tokens: 2}}]"], "neither prompt nor shared_prompt"),
        (
            ["workload.tasks.stages=[{prompt: {kind: fixed, tokens: 2}, output: {kind: fixed, tokens: 2}, wait: 1s}]"],
            "the first stage has a wait",
        ),
        (["workload.tasks.tree={depth: 2}"], "tree"),
        (["slo=task_e2e<1s & ttft<1s @ 99%"], "'p99(task_e2e)<1s, p99(ttft)<1s'"),
    ],
)
def test_what_does_not_go_with_tasks(tmp_path: Path, overrides: list[str], blamed: str) -> None:
    """Each is one line, with what to do."""
    with pytest.raises(BatchsimError) as caught:
        setup = setup_of(tmp_path, *overrides)
        parse_slo(setup.scenario.file.slo)
    assert blamed in str(caught.value) and "\n" not in str(caught.value)


def test_an_objective_of_tasks_without_tasks_is_refused(tmp_path: Path) -> None:
    """Before anything is simulated; where a log's rows name their parents, there are tasks."""
    from batchsim.study.curves.run import check_inputs

    (tmp_path / "log.csv").write_text("ts,in,out,me,after,took\n0,100,10,a,,50\n60,200,3,b,a,10\n900,90,3,c,,10\n")
    log = LOG.replace("COLUMNS", TREE)
    setup = setup_of(tmp_path, "slo=task_e2e<1s @ 99%", text=log)
    check_inputs(setup)
    values = measure(point_inputs(setup, played(setup))).values
    assert (values["tasks"], values["tasks_undone_share"], values["in_slo"]) == (2, 0, 1)
    assert values["task_e2e_p99_s"] == 0.140 and values["goodput_rps"] is None
    recorded = setup_of(tmp_path, "slo=task_e2e<1s @ 99%", "workload.trace.replay=as_recorded", text=log)
    with pytest.raises(BatchsimError, match="task_e2e is of tasks, and this workload has none"):
        check_inputs(recorded)


def request(number: int, sent: int, delivered: int, **more: Any) -> dict[str, Any]:
    return {"request_id": number, "sent_ns": sent * MS, "delivered_ns": delivered * MS, "output_tokens": 2, **more}


def test_a_task_whose_request_failed_or_was_not_sent_misses() -> None:
    """Tasks of two requests: one done in 90 ms, one with a rejected one, one cut short, one of which half was sent."""
    rows = [
        request(0, 10, 40),
        request(1, 50, 100),
        request(2, 10, 40),
        request(3, 50, 50, outcome=REJECTED),
        request(4, 20, 60),
        request(5, 70, 99, outcome=UNFINISHED),
        request(6, 30, 50),
    ]
    given = inputs_of(records_of(rows), task_of=np.arange(8) // 2, slo=parse_slo("task_e2e<100ms @ 25%"))
    values = measure(given).values
    assert task_lives(given).e2e_ns.tolist() == [90 * MS, np.inf, np.inf, np.inf]
    assert (values["tasks"], values["tasks_undone_share"]) == (4, 0.75)
    assert (values["in_slo"], values["slo_met"], values["task_e2e_mean_s"]) == (0.25, 1, 0.09)
    both = measure(inputs_of(given.records, task_of=given.task_of, slo=parse_slo("p50(task_e2e)<1s, p50(ttft)<1s")))
    assert (both.values["slo_met"], both.values["in_slo"]) == (0, None)


def test_a_class_of_tasks_is_judged_by_its_own() -> None:
    """Of two classes one bounds tasks and one requests: the share counts tasks of the one, requests of the other."""
    rows = [request(0, 10, 40), request(1, 50, 300), request(2, 10, 40, request_class=1), request(3, 11, 400)]
    rows[3]["request_class"] = 1
    given = inputs_of(
        records_of(rows, texts=("agent", "chat")),
        task_of=np.array([0, 0, 1, 2]),
        class_names=("agent", "chat"),
        class_slos={"agent": parse_slo("task_e2e<1s @ 50%"), "chat": parse_slo("e2e<100ms @ 50%")},
    )
    values = measure(given).values
    assert (values["in_slo[agent]"], values["in_slo[chat]"], values["in_slo"]) == (1, 0.5, 2 / 3)


# ---- trees and pruning

TREE_STAGE = """
      - fan_out: 2
        depth: 2
        prompt: {kind: fixed, tokens: 20}
        output: {kind: uniform, min: 2, max: 30}
        success: 50%
"""
AFTER = "      - {prompt: {kind: fixed, tokens: 30}, output: {kind: fixed, tokens: 3}, wait: 25ms}\n"
STAGES = SCENARIO.partition("    stages:\n")[0] + "    stages:\n"
REST = "policies: {vllm: {}}" + SCENARIO.partition("policies: {vllm: {}}")[2]
FIRST = "      - {prompt: {kind: fixed, tokens: 100}, output: {kind: fixed, tokens: 10}}"
PRUNING = (STAGES + FIRST + TREE_STAGE + AFTER + REST).replace("mean_rate: 6/s", "mean_rate: 8/s")


def best_of(folder: Path, success: str, *overrides: str) -> Setup:
    """A task a second: three samples of 5 to 30 tokens from one prompt, then a request 25 ms later."""
    stage = f"""
      - fan_out: 3
        shared_prompt: {{kind: fixed, tokens: 64}}
        output: {{kind: uniform, min: 5, max: 30}}
        success: {success}
"""
    text = (STAGES + stage.lstrip("\n") + AFTER + REST).replace("mean_rate: 6/s", "mean_rate: 4/s")
    text = text.replace("duration: 3s", "duration: 20s")
    return setup_of(folder, "policies={vllm: {async_scheduling: false}}", *overrides, text=text)


def test_the_first_success_prunes_the_others_to_the_nanosecond(tmp_path: Path) -> None:
    """Where all succeed the shortest wins: the rest end with its step, and what follows is sent 25 ms later."""
    run = played(best_of(tmp_path, "100%"))
    requests, workload = run.records.requests, run.workload
    assert isinstance(workload, TaskWorkload)
    asked = workload.listed.requests.output_tokens.reshape(-1, 4)[:, :3]
    pruned = 0
    for lengths, rows in zip(asked, requests.reshape(-1, 4), strict=True):
        start, best = rows["sent_ns"][0], lengths.min()
        for length, row in zip(lengths, rows[:3], strict=True):
            assert row["ended_ns"] == start + 10 * MS * best and row["output_tokens"] == best
            assert row["outcome"] == (FINISHED if length == best else PRUNED)
            pruned += length != best
        assert rows["sent_ns"][3] == start + 10 * MS * best + 25 * MS
        assert rows["delivered_ns"][3] == start + 10 * MS * (best + 3) + 25 * MS
    assert len(requests) == 80 and pruned > 30
    values = measure(point_inputs(best_of(tmp_path, "100%"), run)).values
    assert (values["pruned"], values["tasks"], values["tasks_undone_share"]) == (pruned, 20, 0)
    assert (values["submitted"], values["finished"], values["cancelled"]) == (80, 80 - pruned, 0)
    assert values["uncompleted_share"] == 0 and values["in_slo"] == 1


def test_where_none_succeeds_all_are_awaited(tmp_path: Path) -> None:
    """The stage is joined by the longest, and nothing is pruned."""
    run = played(best_of(tmp_path, "0%"))
    for rows in run.records.requests.reshape(-1, 4):
        assert rows["sent_ns"][3] == rows["delivered_ns"][:3].max() + 25 * MS
    assert (run.records.requests["outcome"] == FINISHED).all()


def test_a_tree_of_two_levels_to_the_nanosecond(tmp_path: Path) -> None:
    """Children follow their own parent's answer at once; the first leaf that succeeds ends all that live; what it
    leaves unsent is never sent, and the task goes on."""
    sync = "policies={vllm: {async_scheduling: false}}"
    setup = setup_of(tmp_path, "workload.duration=30s", sync, text=PRUNING)
    run = played(setup)
    requests, workload = run.records.requests, run.workload
    assert isinstance(workload, TaskWorkload)
    lengths, luck = workload.listed.requests.output_tokens.reshape(-1, 8), workload.succeeds.reshape(-1, 8)
    rows_of = {int(row["request_id"]): row for row in requests}
    unsent = 0
    for task in range(30):
        start = requests["sent_ns"][requests["request_id"] == 8 * task][0] + 100 * MS
        sent = {1: start, 2: start}
        ends = {place: start + 10 * MS * lengths[task, place] for place in (1, 2)}
        for parent, children in ((1, (3, 4)), (2, (5, 6))):
            for child in children:
                sent[child], ends[child] = ends[parent], ends[parent] + 10 * MS * lengths[task, child]
        wins = [ends[leaf] for leaf in (3, 4, 5, 6) if luck[task, leaf]]
        joined = min(wins, default=max(ends.values()))
        for place in range(1, 7):
            row = rows_of.get(8 * task + place)
            # A success and its children's parent may end in one step: the success is told first, or the parent is.
            if sent[place] > joined or (sent[place] == joined and row is None):
                assert row is None
                unsent += 1
                continue
            assert row is not None and row["sent_ns"] == sent[place]
            assert row["ended_ns"] == min(ends[place], joined)
            assert row["outcome"] == (FINISHED if ends[place] <= joined else PRUNED)
        assert rows_of[8 * task + 7]["sent_ns"] == joined + 25 * MS
    assert unsent > 5 and (requests["outcome"] == PRUNED).sum() > 10
    assert measure(point_inputs(setup, run)).values["tasks_undone_share"] == 0


def test_a_tree_shares_its_paths(tmp_path: Path) -> None:
    """A child begins with its parent's prompt and answer; what follows the tree holds nothing of it."""
    workload = tasks_of(setup_of(tmp_path, text=PRUNING))
    texts = [expanded(workload._text(row)) for row in range(8)]
    requests = workload.listed.requests
    prompts, outputs = requests.prompt_tokens[:8].tolist(), requests.output_tokens[:8].tolist()
    assert [len(text) for text in texts] == prompts
    assert prompts[1] == 100 + 10 + 20 and prompts[4] == prompts[1] + outputs[1] + 20
    assert common(texts[1], texts[3]) == prompts[1] and common(texts[3], texts[4]) == prompts[1] + outputs[1]
    assert common(texts[4], texts[5]) == common(texts[1], texts[2]) == 110
    assert prompts[7] == 110 + 30 and common(texts[7], texts[6]) == 110


def test_luck_is_the_same_at_every_load_and_as_likely_as_told(tmp_path: Path) -> None:
    """Drawn beforehand, from a stream of its own."""
    few, many = (best_of(tmp_path, "30%", f"workload.duration={span}s").workload(1.0, 0) for span in (20, 4000))
    assert isinstance(few, TaskWorkload) and isinstance(many, TaskWorkload)
    assert (many.succeeds[: len(few.succeeds)] == few.succeeds).all()
    share = many.succeeds.reshape(-1, 4)[:, :3].mean()
    assert abs(share - 0.3) < 4 * np.sqrt(0.3 * 0.7 / (3 * 4000)) and not many.succeeds.reshape(-1, 4)[:, 3].any()


SLOTS = "{max_num_seqs: 8, max_num_batched_tokens: 512}"
KNOBS = {
    "static": "{batch_size: 4}",
    "dynamic": "{max_batch_size: 4, max_queue_delay: 20ms}",
    "continuous": SLOTS,
    "preemptive": SLOTS,
    "tf_serving": "{num_batch_threads: 1, max_batch_size: 4, max_enqueued_batches: 999,"
    " pad_variable_length_inputs: true}",
    "clipper": "{slo_micros: 60000000}",
    "aimd": "{latency_objective: 1s}",
    "clockwork": "{default_slo: 60s}",
    "nexus": "{latency_sla: 60s, alpha: 100ms, beta: 500ms, batch: 4}",
    "adaptive_shared_batch": "{num_batch_threads: 4, max_batch_size: 4, max_enqueued_batches: 999}",
    "serial_device_batch": "{num_batch_threads: 4, max_batch_size: 4, max_enqueued_batches: 999}",
    **dict.fromkeys(("tbt_model", "tbt_feedback", "memory_seqs", "exclusive"), SLOTS),
}


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_every_policy_prunes_alike_in_simulation_and_live(tmp_path: Path, kind: str) -> None:
    """Stepping, leaping and live leave equal records under load, all KV comes back, and no request is lost."""
    rate = "workload.arrivals={kind: poisson, mean_rate: 60/s}"
    setup = setup_of(tmp_path, rate, f"policies={{{kind}: {KNOBS.get(kind, '{}')}}}", text=PRUNING)
    records = []
    for drive in ("leap", "step", "live"):
        workload, clock = setup.workload(60.0, 0), VirtualClock()
        core = setup.engine(setup.scenario.specs[0], workload)
        if drive == "live":
            live(core, workload, clock)
        else:
            simulate(core, workload, leap=drive == "leap")
        core.check_returned()
        records.append(core.recorder.records())
    for other in records[1:]:
        assert (other.requests == records[0].requests).all() and (other.steps == records[0].steps).all()
    outcomes = records[0].requests["outcome"]
    assert set(outcomes.tolist()) <= {FINISHED, PRUNED} and (outcomes == PRUNED).any()
    assert isinstance(workload, TaskWorkload)
    needed = np.flatnonzero(~workload.prunable)
    assert set(needed) <= set(records[0].requests["request_id"].tolist())


@pytest.mark.parametrize("replicas", ["{count: 2, router: round_robin}", "{count: 3, router: power_of_two}"])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "static: {batch_size: 4}"])
def test_pruning_reaches_every_replica(tmp_path: Path, replicas: str, kind: str) -> None:
    """Branches on other engines end as well, no sooner than the success, and what is left is whole."""
    name, _, knobs = kind.partition(": ")
    rate = "workload.arrivals={kind: poisson, mean_rate: 60/s}"
    setup = setup_of(tmp_path, rate, f"replicas={replicas}", f"policies={{{name}: {knobs or '{}'}}}", text=PRUNING)
    run = played(setup)
    requests, workload = run.records.requests, run.workload
    assert isinstance(workload, TaskWorkload) and (requests["outcome"] == PRUNED).any()
    assert set(requests["outcome"].tolist()) <= {FINISHED, PRUNED}
    assert not np.isinf(task_lives(point_inputs(setup, run)).e2e_ns).any()
    won = {winner // 8: winner for winner in workload._winner.values()}
    ended = dict(zip(requests["request_id"].tolist(), requests["ended_ns"].tolist(), strict=True))
    pruned = requests[requests["outcome"] == PRUNED]
    assert all(row["ended_ns"] >= ended[won[int(row["request_id"]) // 8]] for row in pruned)


def test_what_a_gate_holds_is_pruned_at_the_router(tmp_path: Path) -> None:
    """A sample that waits for its turn at the router ends there when another has succeeded."""
    gate = "replicas={count: 1, router: round_robin, admission: {max_outstanding: 1}}"
    requests = played(best_of(tmp_path, "100%", gate)).records.requests
    pruned = requests[requests["outcome"] == PRUNED]
    assert len(pruned) == 40 and (pruned["output_tokens"] == 0).all()


@pytest.mark.parametrize(
    ("stage", "blamed"),
    [
        ("fan_out: 20, depth: 16", "at most 65,536 are possible"),
        ("depth: 0", "depth"),
        ("success: 120%", "success"),
    ],
)
def test_trees_that_cannot_be(tmp_path: Path, stage: str, blamed: str) -> None:
    """A tree with too many branches, or none, and a probability that is none are refused in one line."""
    given = f"{{prompt: {{kind: fixed, tokens: 2}}, output: {{kind: fixed, tokens: 2}}, {stage}}}"
    with pytest.raises(BatchsimError) as caught:
        setup_of(tmp_path, f"workload.tasks.stages=[{given}]")
    assert blamed in str(caught.value) and "\n" not in str(caught.value)


THOUGHTS = """
model: llama-3.1-8b
cost: {kind: linear, base: 10ms, per_sequence: 1ms}
kv: {tokens: 4000}
workload:
  arrivals: {kind: poisson, mean_rate: 12/s}
  output_cap: exact
  duration: 20s
  classes: {thoughts: {share: 80%, priority: 5}, urgent: {share: 20%, priority: 0}}
  tasks:
    stages:
      - fan_out: 3
        depth: 2
        priorities: [1, 5, 9]
        prompt: {kind: fixed, tokens: 40}
        output: {kind: uniform, min: 60, max: 160}
policies:
  preemptive:
    {max_num_seqs: 64, max_num_batched_tokens: 2048, waiting_order: priority, victim: lowest_priority, by: swap}
slo: e2e<10min @ 99%
seeds: 1
"""


def test_branches_of_little_value_are_paused_first(tmp_path: Path) -> None:
    """Each branch has a priority of the list, requests below it its own; short of KV the least valuable make way."""
    setup = setup_of(tmp_path, "kv.swap_space=4GB", text=THOUGHTS)
    run, workload = played(setup), tasks_of(setup)
    requests = run.records.requests
    value = requests["priority"].reshape(-1, 12)
    assert set(np.unique(value[:, :3]).tolist()) == {1, 5, 9}
    assert (value[:, 3:] == np.repeat(value[:, :3], 3, axis=1)).all()
    assert workload.branches.above[3:] == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    paused = {each: requests["num_preemptions"][requests["priority"] == each].mean() for each in (1, 5, 9)}
    assert paused[1] < paused[5] < paused[9]
    spent = {
        each: np.mean((requests["delivered_ns"] - requests["sent_ns"])[requests["priority"] == each]) for each in paused
    }
    assert spent[1] < spent[5] < spent[9]


def test_branches_without_values_have_the_priority_of_their_class(tmp_path: Path) -> None:
    """And an empty list is a mistake."""
    text = THOUGHTS.replace("        priorities: [1, 5, 9]\n", "")
    requests = played(setup_of(tmp_path, "kv.swap_space=4GB", text=text)).records.requests
    assert set(requests["priority"].tolist()) == {0, 5}
    with pytest.raises(BatchsimError, match="priorities is empty"):
        setup_of(tmp_path, text=THOUGHTS.replace("[1, 5, 9]", "[]"))
