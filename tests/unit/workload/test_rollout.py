"""Rollouts: who waits for whom under each scheme, what becomes of every group, how old it is when it is trained on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import BatchsimError
from batchsim.drive.live import live
from batchsim.drive.simulate import simulate
from batchsim.drive.source import VirtualClock
from batchsim.kernel.record import FINISHED, PRUNED
from batchsim.metrics.intervals import half_width
from batchsim.scenario import load_scenario
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.rollout import RolloutWorkload
from batchsim.workload.rollout_config import Success
from batchsim.workload.rollout_log import RolloutLog

SCENARIO = """
model: llama-3.1-8b
cost: {kind: linear, base: 10ms, per_sequence: 100us, per_token: 10us}
kv: {tokens: 400000}
workload:
  arrivals:
    kind: rollout
    prompts: 4
    answers: 3
    updates: 12
    scheme: {kind: synchronous}
    correlation: 0.5
    trainer: {time: 2s, per_token: 300us}
    sync: 500ms
  output_cap: exact
  lengths:
    prompt: {kind: uniform, min: 20, max: 60}
    output: {kind: lognormal, mean: 150, cv: 1.0, max: 700}
policies: {vllm: {}}
slo: e2e<10min @ 99%
seeds: 1
"""
SCHEMES = {
    "synchronous": "{kind: synchronous}",
    "oversampled": "{kind: synchronous, submit: 6}",
    "partial": "{kind: synchronous, submit: 7, partial: true}",
    "tail_batching": "{kind: tail_batching, speculation: 1.4}",
    "one_step_off": "{kind: one_step_off}",
    "queue_of_one": "{kind: one_step_off, ahead: 1}",
    "verl": "{kind: verl_fully_async, staleness_threshold: 0.5, trigger_parameter_sync_step: 2}",
    "verl_drain": "{kind: verl_fully_async, staleness_threshold: 1.0, pause: drain, concurrency: 6}",
    "areal": "{kind: areal, max_head_offpolicyness: 2, max_concurrent_rollouts: 9}",
    "trl": "{kind: trl_async, max_staleness: 2}",
    "nemo": "{kind: nemo_rl, max_trajectory_age_steps: 2, pause: in_flight}",
}
OUTCOMES = ("used", "filtered", "stale", "aborted", "failed", "left")
MS = 1_000_000


def setup_of(folder: Path, *overrides: str, scheme: str = "", text: str = SCENARIO) -> Setup:
    (folder / "mine.yaml").write_text(text)
    chosen = [f"workload.arrivals.scheme={SCHEMES.get(scheme, scheme)}"] if scheme else []
    return Setup.of(load_scenario(str(folder / "mine.yaml"), overrides=[*chosen, *overrides]))


def played(setup: Setup, seed: int = 0) -> tuple[Run, RolloutLog]:
    run = simulate_point(setup, next(point for point in setup.scenario.points() if point.seed == seed))
    assert isinstance(run.workload, RolloutWorkload)
    return run, run.workload.log


def rows_of(core: Any) -> list[Any]:
    records = core.recorder.records()
    return [records.requests.tolist(), records.states.tolist(), records.steps["start_ns"].tolist()]


GIVEN = ["workload.lengths={kind: list, prompt: [1, 1, 1, 1, 1, 1, 1, 1], output: [5, 7, 4, 9, 3, 4, 2, 2]}"]
ONE_AT_A_TIME = [*GIVEN, "workload.arrivals.prompts=1", "workload.arrivals.answers=2", "workload.arrivals.updates=3"]
ONE_AT_A_TIME += ["workload.arrivals.correlation=0", "cost={kind: constant, step: 10ms}"]


def test_trainer_and_engines_wait_for_each_other_to_the_nanosecond(tmp_path: Path) -> None:
    """Groups of two answers: 70, 90, 40 ms of the longer. A training of 2 s and 300 us a token; 500 ms of loading."""
    run, log = played(setup_of(tmp_path, *ONE_AT_A_TIME))
    starts, expected = [each.start_ns for each in log.updates], []
    sent = 0
    for longer, tokens in ((7, 14), (9, 15), (4, 9)):
        expected.append(sent + 10 * longer * MS)
        sent = expected[-1] + 2_000 * MS + tokens * 300_000 + 500 * MS
    assert starts == expected
    assert [each.wait_ns for each in log.updates] == [70 * MS, 90 * MS, 40 * MS]
    assert log.end_ns == sent - 500 * MS == run.window_ns[1]
    assert [each.loaded_ns - each.end_ns for each in log.updates[:2]] == [500 * MS] * 2 and log.updates[
        2
    ].loaded_ns == -1


def test_one_step_off_trains_while_the_next_batch_is_generated(tmp_path: Path) -> None:
    """The first batch at 70 ms, the next sent then; a cycle is a training and a loading, since these take longer."""
    _, log = played(setup_of(tmp_path, *ONE_AT_A_TIME, scheme="one_step_off"))
    assert log.updates[0].start_ns == log.groups[1].sent_ns == 70 * MS
    assert log.updates[1].start_ns == 70 * MS + 2_000 * MS + 14 * 300_000 + 500 * MS == log.groups[2].sent_ns
    assert log.staleness().tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_group_ends_once_and_every_token_is_counted_once(tmp_path: Path, scheme: str) -> None:
    """Each group is used, dropped or left, whatever the scheme, and no token of an answer is lost from the count."""
    run, log = played(setup_of(tmp_path, "workload.arrivals.success={mean: 70%, spread: 0.2}", scheme=scheme))
    assert {group.outcome for group in log.groups} <= set(OUTCOMES)
    taken = [group.update for group in log.groups if group.outcome == "used"]
    assert np.bincount(taken).tolist() == [4] * 12 and len(log.updates) == 12
    assert all((group.update >= 0) == (group.outcome == "used") for group in log.groups)
    assert sum(log.tokens_of(name) for name in OUTCOMES) == log.generated_tokens  # type: ignore[arg-type]
    requests = run.records.requests
    assert int(requests["output_tokens"].sum()) == log.generated_tokens
    assert set(requests["outcome"].tolist()) <= {FINISHED, PRUNED}
    for group in log.used:
        assert [answer.made for answer in group.used] == [answer.tokens for answer in group.used]
        assert len(group.used) == 3


OTHERS = ("sglang", "vllm: {async_scheduling: false}")


@pytest.mark.parametrize(
    ("policy", "scheme"),
    [("vllm", scheme) for scheme in SCHEMES] + [(p, s) for p in OTHERS for s in ("partial", "areal", "nemo")],
)
def test_both_drivers_and_steps_one_by_one_leave_equal_records(tmp_path: Path, scheme: str, policy: str) -> None:
    """The trainer's own times come between steps alike in simulated time, in leaps and by a clock."""
    policies = policy if ":" in policy else f"{policy}: {{}}"
    changes = [f"policies={{{policies}}}", "workload.arrivals.updates=5"]
    setup = setup_of(tmp_path, *changes, scheme=scheme)
    spec = setup.scenario.specs[0]
    cores = []
    for leap in (True, False, None):
        workload = setup.workload(1.0, 0)
        core = setup.engine(spec, workload)
        if leap is None:
            live(core, workload, VirtualClock())
        else:
            simulate(core, workload, leap=leap)
        core.check_returned()
        cores.append(rows_of(core))
    assert cores[0] == cores[1] == cores[2]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fleet_of_one_is_an_engine(tmp_path: Path, scheme: str) -> None:
    """Behind a router the trainer's calls, aborts and pauses come at the same times."""
    alone, _ = played(setup_of(tmp_path, "workload.arrivals.updates=5", scheme=scheme))
    fleet, log = played(setup_of(tmp_path, "workload.arrivals.updates=5", "replicas={count: 1}", scheme=scheme))
    assert alone.records.requests.tolist() == fleet.records.requests.tolist()
    assert alone.records.steps["start_ns"].tolist() == fleet.records.steps["start_ns"].tolist()
    assert len(log.updates) == 5


@pytest.mark.parametrize("pause", ["drain", "interrupt", "in_flight"])
@pytest.mark.parametrize("age", [0, 1, 3])
def test_no_group_of_areal_is_older_than_its_rule_allows(tmp_path: Path, age: int, pause: str) -> None:
    """However many may run at once: a group is let in only if it can be used in time, and groups are used in order."""
    scheme = f"{{kind: areal, max_head_offpolicyness: {age}, max_concurrent_rollouts: 40, pause: {pause}}}"
    _, log = played(
        setup_of(tmp_path, "workload.arrivals.updates=12", "replicas={count: 2, router: round_robin}", scheme=scheme)
    )
    ages = [log.updates[group.update].version - group.version for group in log.used]
    assert max(ages) == age == log.limit
    assert log.staleness().max() <= age
    assert [group.prompt for group in log.used] == list(range(48))


def test_the_oldest_of_the_complete_is_no_bound(tmp_path: Path) -> None:
    """As AReaL takes groups: one with a long answer is passed over, and older than allowed once it comes."""
    scheme = "{kind: areal, max_head_offpolicyness: 1, max_concurrent_rollouts: 40, in_order: false}"
    _, log = played(
        setup_of(tmp_path, "workload.arrivals.updates=40", "workload.arrivals.trainer.time=300ms", scheme=scheme)
    )
    assert log.staleness().max() > 1 == log.limit


def test_staleness_is_what_the_schemes_say(tmp_path: Path) -> None:
    """0 where all wait, 1 one step off, one more with a batch in the queue; dropped beyond the limit of those that
    drop."""
    ages = {}
    for scheme in ("synchronous", "oversampled", "tail_batching", "one_step_off", "queue_of_one", "trl", "nemo"):
        _, log = played(setup_of(tmp_path, "workload.arrivals.updates=20", scheme=scheme))
        ages[scheme] = log.staleness()
        assert log.limit is not None and ages[scheme].max() <= log.limit
    assert not any(ages[name].any() for name in ("synchronous", "oversampled", "tail_batching"))
    assert set(ages["one_step_off"][12:].tolist()) == {1} and ages["queue_of_one"].max() == 2
    assert ages["trl"].max() == 2 == ages["nemo"].max()


def test_verl_sends_no_more_than_its_counter_allows(tmp_path: Path) -> None:
    """Between two loadings: at most int(4 · 1.5 · 2) = 12 groups, less those that ran or waited at the first."""
    _, log = played(setup_of(tmp_path, "workload.arrivals.updates=40", scheme="verl"))
    loads = [0, *(each.loaded_ns for each in log.updates if each.loaded_ns >= 0)]
    assert len(loads) == 20  # after every second training but the last
    reached = 0
    for begin, end in pairwise(loads):
        before = [group for group in log.groups if group.sent_ns < begin]
        waiting = [g for g in before if g.update < 0 or log.updates[g.update].start_ns > begin]
        taken_now = [g for g in before if g.update >= 0 and log.updates[g.update].start_ns == begin]
        sent = sum(begin <= group.sent_ns < end for group in log.groups)
        assert sent <= 12 - len(waiting) - len(taken_now)
        reached += sent == 12 - len(waiting) - len(taken_now)
    assert reached > 10


def test_an_interrupted_answer_goes_on_from_what_it_has(tmp_path: Path) -> None:
    """Prompt and tokens so far are computed again as one prompt; the parts of an answer make the whole."""
    run, log = played(setup_of(tmp_path, scheme="areal"))
    requests = {int(row["request_id"]): row for row in run.records.requests}
    again = 0
    for group in log.used:
        for answer in group.used:
            made = 0
            for request_id, tokens in answer.parts:
                assert requests[request_id]["prompt_tokens"] == group.prompt_tokens + made
                again += made and group.prompt_tokens + made
                made += tokens
            assert made == answer.tokens
            assert (len(answer.parts) > 1) == (answer.first_version < answer.last_version)
    assert 0 < again <= log.prefilled_again_tokens
    assert log.is_mixed().any()


@pytest.mark.parametrize("policy", ["vllm", "sglang", "vllm: {async_scheduling: false}"])
def test_no_step_begins_while_weights_are_loaded_in_flight(tmp_path: Path, policy: str) -> None:
    """Answers stand still meanwhile, keep their KV, and no prompt is computed twice."""
    policies = policy if ":" in policy else f"{policy}: {{}}"
    run, log = played(setup_of(tmp_path, f"policies={{{policies}}}", scheme="nemo"))
    starts = run.records.steps["start_ns"]
    for update in log.updates[:-1]:
        launched_before = starts[(starts > update.end_ns) & (starts < update.loaded_ns)]
        assert len(launched_before) <= 1  # of an engine ahead of results
    assert log.is_mixed().any() and not log.prefilled_again_tokens
    assert run.records.requests["recomputed_tokens"].sum() == 0


def test_draining_leaves_no_answer_of_two_versions(tmp_path: Path) -> None:
    """Weights are loaded once nothing runs, which takes longer than the loading itself."""
    run, log = played(setup_of(tmp_path, scheme="verl_drain"))
    assert not log.is_mixed().any() and (run.records.requests["outcome"] == FINISHED).sum() >= 144
    loading = [each.loaded_ns - each.end_ns for each in log.updates if each.loaded_ns >= 0]
    assert min(loading) >= 500 * MS and max(loading) > 510 * MS


def test_aborted_groups_are_lost_or_go_on_first(tmp_path: Path) -> None:
    """With `partial` a prompt that was aborted is in the next step, and no token is in vain but at the end."""
    _, lost = played(setup_of(tmp_path, scheme="oversampled"))
    _, kept = played(setup_of(tmp_path, scheme="partial"))
    assert lost.tokens_of("aborted") > 0 == kept.tokens_of("aborted")
    used = {group.prompt: group for group in kept.used}
    for update in range(1, 12):
        aborted = [
            p
            for p, group in used.items()
            if group.update > update and group.sent_ns < kept.updates[update - 1].start_ns
        ]
        assert all(used[p].update >= update for p in aborted)
        new = [
            group
            for group in kept.groups
            if kept.updates[update - 1].start_ns < group.sent_ns < kept.updates[update].start_ns
        ]
        assert len(new) <= 7 - len([p for p in aborted if used[p].update == update])
    assert kept.prefilled_again_tokens > 0 == lost.prefilled_again_tokens


def test_tail_batching_puts_the_long_answers_together(tmp_path: Path) -> None:
    """A long round holds prompts put off alone; no training of a short one waits for as long as plain rounds do."""
    changes = ["workload.arrivals.updates=30", "workload.arrivals.correlation=0.9"]
    _, log = played(setup_of(tmp_path, *changes, scheme="tail_batching"))
    _, plain = played(setup_of(tmp_path, *changes))
    longest = np.zeros(30)
    for group in log.used:
        longest[group.update] = max(longest[group.update], *(answer.made for answer in group.used))
    late = [u for u in range(30) if len({g.prompt for g in log.used if g.update == u}) == 4 and longest[u] > 500]
    assert 0 < len(late) < 12
    assert np.median(longest) < np.median(
        [max(a.made for g in plain.used if g.update == u for a in g.used) for u in range(30)]
    )
    assert log.updates[-1].start_ns < plain.updates[-1].start_ns


def test_a_prompt_is_dropped_as_often_as_its_answers_agree(tmp_path: Path) -> None:
    """p^n + (1 - p)^n of the groups with a probability alike for all; of a beta law, the mean of that."""
    for success in (Success(0.7), Success(0.5, 0.4)):
        text = f"workload.arrivals.success={{mean: {100 * success.mean:g}%, spread: {success.spread}}}"
        run, log = played(
            setup_of(
                tmp_path,
                text,
                "workload.arrivals.updates=150",
                "workload.arrivals.scheme={kind: synchronous, submit: 1}",
                "workload.lengths.output={kind: fixed, tokens: 3}",
            )
        )
        assert run.workload is not None
        dropped = [group.outcome == "filtered" for group in log.groups if group.outcome != "left"]
        expected = success.mean_dropped(3)
        spread = (expected * (1 - expected) / len(dropped)) ** 0.5
        assert abs(np.mean(dropped) - expected) < 3.3 * spread
        assert len(log.groups) / len(log.used) == pytest.approx(1 / (1 - expected), rel=0.12)
    assert Success(0.7).mean_dropped(3) == pytest.approx(0.7**3 + 0.3**3)
    drawn = np.random.default_rng(1).beta(0.75, 0.75, 400_000)
    assert Success(0.5, 0.4).mean_dropped(3) == pytest.approx((drawn**3 + (1 - drawn) ** 3).mean(), rel=0.01)


def test_answers_to_a_prompt_are_alike_and_each_has_the_law(tmp_path: Path) -> None:
    """The logarithms correlate as stated, and the share at the cap is that of the law."""
    changes = ["workload.arrivals.prompts=3000", "workload.arrivals.updates=1", "workload.lengths.output.max=400"]
    drawn = []
    for alike in (0.0, 0.6):
        workload = setup_of(tmp_path, *changes, f"workload.arrivals.correlation={alike}").workload(1.0, 0)
        assert isinstance(workload, RolloutWorkload)
        rows = [workload.draws.block_of(64 * block)[0].requests for block in range(40)]
        lengths = np.concatenate([np.asarray(each.drawn_output, float) for each in rows]).reshape(-1, 3)
        cut = np.concatenate([each.output_tokens for each in rows])
        assert np.corrcoef(np.log(lengths[:, 0]), np.log(lengths[:, 1]))[0, 1] == pytest.approx(alike, abs=0.05)
        assert (cut == 400).mean() == pytest.approx(0.0513, abs=0.012)  # 1 - Φ((ln 400/150 + s²/2) / s), s² = ln 2
        drawn.append(lengths)
    assert np.log(drawn[0]).std() == pytest.approx(np.log(drawn[1]).std(), rel=0.05)


def test_answers_grow_with_each_training(tmp_path: Path) -> None:
    """The draws of the k-th training's prompts are 1.1^k times those without growth, cut at the law's largest."""
    changes = ["workload.arrivals.prompts=7", "workload.lengths.output.max=600"]
    plain, grown = (
        setup_of(tmp_path, *changes, f"workload.arrivals.growth={growth}").workload(1.0, 0) for growth in ("0%", "10%")
    )
    assert isinstance(plain, RolloutWorkload) and isinstance(grown, RolloutWorkload)
    for prompt in (0, 6, 7, 63, 64, 83):
        (before, row), (after, _) = plain.draws.block_of(prompt), grown.draws.block_of(prompt)
        drawn = np.asarray(before.requests.drawn_output, float)[3 * row : 3 * row + 3]
        expected = np.rint(drawn * 1.1 ** (prompt // 7))
        assert np.asarray(after.requests.drawn_output)[3 * row : 3 * row + 3].tolist() == expected.tolist()
        cut = np.clip(expected, 1, 600).tolist()
        assert np.asarray(after.requests.output_tokens)[3 * row : 3 * row + 3].tolist() == cut


def test_the_longest_of_many_is_far_above_the_mean(tmp_path: Path) -> None:
    """Lognormal lengths of CV 1: the median of the maximum of 16 is 2.97 times the mean, of 8,192 16.2 times."""
    law = ["workload.lengths.output={kind: lognormal, mean: 2000, cv: 1.0}", "workload.arrivals.correlation=0"]
    workload = setup_of(tmp_path, *law, "workload.arrivals.answers=128", "max_model_len=131072").workload(1.0, 0)
    assert isinstance(workload, RolloutWorkload)
    drawn = [np.asarray(workload.draws.block_of(64 * block)[0].requests.drawn_output, float) for block in range(101)]
    lengths = np.concatenate(drawn)
    assert np.median(lengths.reshape(-1, 16).max(axis=1)) / 2000 == pytest.approx(2.97, rel=0.01)
    assert np.median(lengths.reshape(-1, 8192).max(axis=1)) / 2000 == pytest.approx(16.2, rel=0.08)


@pytest.mark.slow
def test_groups_wait_as_long_as_littles_law_says(tmp_path: Path) -> None:
    """With N groups under way, running or waiting, and B to an update, one is used N/B updates after it was sent."""
    changes = ["workload.arrivals.updates=160", "workload.arrivals.trainer={time: 3s}", "seeds=5"]
    setup = setup_of(tmp_path, *changes, scheme="{kind: trl_async, max_staleness: 100, queue: 22}")
    lags = []
    for seed in range(5):
        _, log = played(setup, seed)
        cycle = (log.updates[-1].start_ns - log.updates[20].start_ns) / (len(log.updates) - 21)
        later = [group for group in log.used if group.update > 20]
        lags.append(float(np.mean([(log.updates[g.update].start_ns - g.sent_ns) / cycle for g in later])))
        assert log.staleness().mean() == pytest.approx(22 / 4, abs=0.5)  # whole versions
    assert abs(np.mean(lags) - 22 / 4) < 1.6 * half_width(lags) + 0.01


@pytest.mark.parametrize(
    ("law", "behind"),
    [("{kind: fixed, tokens: 400}", False), ("{kind: lognormal, mean: 400, cv: 2.0, max: 8000}", True)],
)
def test_two_small_engines_against_one_twice_as_fast(tmp_path: Path, law: str, behind: bool) -> None:
    """With as many slots each: equal where all answers are as long, behind where a few are long, since these run on one
    engine alone."""
    changes = [
        f"workload.lengths.output={law}",
        "workload.arrivals.prompts=64",
        "workload.arrivals.answers=4",
        "workload.arrivals.updates=1",
    ]
    changes += [
        "workload.lengths.prompt={kind: fixed, tokens: 1}",
        "policies={continuous: {max_num_seqs: 32, max_num_batched_tokens: 4096}}",
    ]
    small = ["cost={kind: linear, base: 20ms, per_sequence: 100us}", "replicas={count: 2, router: shortest_queue}"]
    _, two = played(setup_of(tmp_path, *changes, *small))
    _, one = played(setup_of(tmp_path, *changes, "cost={kind: linear, base: 10ms, per_sequence: 50us}"))
    ratio = two.updates[0].start_ns / one.updates[0].start_ns
    assert ratio > 1.2 if behind else ratio == pytest.approx(1, abs=0.001)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("arrivals.prompts=0", "prompts"),
        ("arrivals.correlation=150%", "correlation"),
        ("arrivals.growth=150%", "growth"),
        ("arrivals.scheme={kind: fully_async}", "fully_async"),
        ("arrivals.scheme={kind: tail_batching, speculation: 1}", "speculation"),
        ("arrivals.scheme={kind: trl_async, queue: 3}", "scheme.queue 3 holds less than the 4 prompts of a training"),
        ("arrivals.scheme={kind: verl_fully_async, concurrency: 40}", "no more than 17 groups may be under way"),
        ("arrivals.scheme={kind: areal, pause: stop}", "pause"),
        ("arrivals.scheme={kind: one_step_off, pause: drain}", "pause"),
        ("arrivals.success={mean: 100%}", "success.mean 100%: all groups have answers of one kind"),
        ("arrivals.success={mean: 0.01%}", "99.97 % of the groups of 3 have answers of one kind"),
        ("arrivals.success={mean: 50%, spread: 1}", "spread"),
        ("duration=10s", "duration: a rollout ends with its last training"),
        ("requests=100", "requests: a rollout ends with its last training"),
        ("patience={mean: 5s}", "patience: the trainer of a rollout says which requests come"),
        ("shared_prefix={groups: 2, added_tokens: 5}", "shared_prefix: the trainer of a rollout"),
        ("classes={a: {share: 100%}}", "classes: all answers of a rollout are of one class"),
        ("frontend={request: 5ms}", "frontend: the trainer of a rollout is beside its engines"),
        ("prompt_scale=2.0", "prompt_scale: write the lengths of a rollout's prompts"),
        ("lengths=null", "lengths are missing"),
        ("lengths={kind: pairs, prompt: [1], output: [2]}", "groups of a rollout need laws or a list"),
        (
            "lengths={kind: list, prompt: [1, 1], output: [2, 3]}",
            "a list of 2 answers leaves 2 beyond whole groups of 3",
        ),
        ("lengths.output={kind: gamma, mean: 100, cv: 1.0}", "of kind gamma cannot correlate within groups"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, change: str, said: str) -> None:
    """Where, what, with the numbers, and what to do."""
    with pytest.raises(BatchsimError) as error:
        setup_of(tmp_path, f"workload.{change}").workload(1.0, 0)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["workload.lengths={kind: list, prompt: [1, 1, 1, 1, 1, 1, 1, 1, 1], output: [1, 2, 3, 1, 2, 3, 1, 2, 3]}"],
            "lengths list 9 answers, 3 to each prompt, and more are sent",
        ),
        (
            ["workload.lengths.output={kind: fixed, tokens: 9}", "workload.arrivals.growth=1%"],
            "only a law with a mean and a CV can grow",
        ),
        (["workload.lengths.prompt={kind: fixed, tokens: 9000}", "max_model_len=4096"], "1,000 groups in a row failed"),
    ],
)
def test_a_rollout_that_cannot_go_on_says_so(tmp_path: Path, changes: list[str], said: str) -> None:
    """A list that is too short, and engines that reject all there is."""
    changes = [*changes, "workload.arrivals.correlation=0"]
    with pytest.raises(BatchsimError, match=said):
        played(setup_of(tmp_path, *changes))


def test_only_a_simulation_has_a_trainer(tmp_path: Path) -> None:
    """No real engine is asked for rollouts, and there is no rate to search."""
    setup = setup_of(tmp_path)
    with pytest.raises(BatchsimError, match="a rollout can only be simulated"):
        setup.check_can_be_real()
    with pytest.raises(BatchsimError, match=r"load\.mean_rate does not fit arrivals of kind rollout"):
        setup_of(tmp_path, "load={mean_rate: [1/s]}").workload(1.0, 0)
