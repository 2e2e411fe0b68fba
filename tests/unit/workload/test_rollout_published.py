"""Published rollouts under verl: the steps of Qwen2.5-Math-7B, and how long each worker of one generation took.

Of the steps (volcengine/verl docs/advance/fully_async.md of 2025-10-18) the lengths of answers are not published, so
that only shapes and ratios are compared, under these assumptions: answers of a
lognormal law (mean 2,500 tokens, CV 1.2, correlation 0.5 in a group) with the published cap of 28K; a linear cost,
whose engines stand for the GPUs; a sixteenth of the published batch of 512 prompts, on 1 to 4 engines; trainings that
take the published time of old_log_prob and update.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.metrics.measure import measure
from batchsim.results.keep import point_inputs
from batchsim.workload.rollout_log import RolloutLog
from tests.unit.workload.test_rollout import played, setup_of

COMMON = [
    "workload.lengths={prompt: {kind: fixed, tokens: 200}, output: {kind: lognormal, mean: 2500, cv: 1.2, max: 28672}}",
    "cost={kind: linear, base: 8ms, per_sequence: 100us, per_token: 10us}",
    "kv={tokens: 4000000}",
    "max_model_len=32768",
    "workload.arrivals.answers=16",
    "workload.arrivals.sync=3s",
]
SYNC_STEP_S = {1: 790.1, 2: 365.28, 4: 356.3}
"""Seconds of a colocated step, by the number of engines that stands for 32, 64 and 128 GPUs here."""
SYNC_TRAINING_S = {1: 107.71 + 313.81, 2: 70.26 + 133.41, 4: 53.92 + 113.81}
ASYNC_STEP_S = {2: 294.77, 4: 189.26, 8: 150.63}
"""Seconds of an asynchronous step, half of the GPUs being the trainer's, by the number of all."""
WORKERS = ((73.067, 28013, 3768, -2.7), (118.574, 42765, 6233, -0.9), (166.683, 41247, 8412, -5.4))
"""Of three vLLM workers of one generation of a base model under verl: seconds, tokens of all answers and of the longest
(github.com/verl-project/verl issue 658, 2025-03-25), and the error here in per cent."""


def run(folder: Path, engines: int, training_s: float, scheme: str, prompts: int, updates: int) -> RolloutLog:
    fleet = [f"replicas={{count: {engines}, router: round_robin}}"] if engines > 1 else []
    changes = [f"workload.arrivals.trainer={{time: {training_s:.2f}s}}", f"workload.arrivals.prompts={prompts}"]
    return played(setup_of(folder, *COMMON, *fleet, *changes, f"workload.arrivals.updates={updates}", scheme=scheme))[1]


@pytest.mark.slow
def test_more_engines_do_not_shorten_the_tail(tmp_path: Path) -> None:
    """Twice the GPUs: published generations of 357, 151 and 178 s fall by half at most once, then not at all."""
    waits = {}
    for engines in SYNC_STEP_S:
        log = run(tmp_path, engines, SYNC_TRAINING_S[engines], "synchronous", 32, 2)
        waits[engines] = sum(each.wait_ns for each in log.updates) / len(log.updates) / 1e9
    assert waits[1] > waits[2] > waits[4]
    assert waits[2] / waits[4] < 1.35 < 2 and waits[1] / waits[2] < 1.9


@pytest.mark.slow
def test_the_trainer_waits_less_the_staler_groups_may_be(tmp_path: Path) -> None:
    """Published at 128 GPUs: 128 s of waiting at a threshold of 0, then 58, 39 and 33 s at 0.1, 0.3 and 0.5."""
    waits = []
    for threshold in (0.0, 0.5):
        scheme = f"{{kind: verl_fully_async, staleness_threshold: {threshold}, trigger_parameter_sync_step: 4}}"
        log = run(tmp_path, 2, 113.16 / 4, scheme, 8, 20)
        later = log.updates[4:]
        waits.append(sum(each.wait_ns for each in later) / len(later))
    assert waits[1] < 0.6 * waits[0]


@pytest.mark.slow
def test_an_asynchronous_step_takes_about_half(tmp_path: Path) -> None:
    """Published with as many GPUs in all: 295 s for 790 s, 189 for 365, 151 for 356: 0.37 to 0.52 of it."""
    published = ASYNC_STEP_S[8] / SYNC_STEP_S[4]
    sync = run(tmp_path, 4, SYNC_TRAINING_S[4], "synchronous", 32, 2)
    scheme = "{kind: verl_fully_async, staleness_threshold: 0.5, trigger_parameter_sync_step: 4}"
    half = run(tmp_path, 2, 113.16 / 4, scheme, 8, 20)
    cycle = (half.updates[-1].start_ns - half.updates[3].start_ns) / 16 * 4  # of as many groups as a synchronous step
    ratio = cycle / (sync.updates[1].start_ns - sync.updates[0].start_ns)
    assert 0.3 < published < 0.55 and 0.3 < ratio < 0.75


@pytest.mark.parametrize("answers", [8, 24])
def test_the_slow_worker_is_that_with_the_longest_answer(answers: int, tmp_path: Path) -> None:
    """Of 18.5 ms a step and 50 us a sequence each worker takes 18.5 ms for each token of its longest answer and 50 us
    for each of all, however many answers these are: within 6 % of the published times, to which both costs were set.
    The worker with the longest answer is the last, though another has most tokens."""
    lengths = [[longest, *shared(total - longest, answers - 1)] for _, total, longest, _ in WORKERS]
    assert [(sum(each), max(each)) for each in lengths] == [each[1:3] for each in WORKERS]
    count, outputs = 3 * answers, [length for row in zip(*lengths, strict=True) for length in row]
    changes = [
        f"workload.lengths={{kind: list, prompt: {[1] * count}, output: {outputs}}}",
        f"workload.arrivals={{kind: rollout, prompts: {count}, answers: 1, updates: 1, scheme: {{kind: synchronous}}}}",
        "cost={kind: linear, base: 18500us, per_sequence: 50us}",
        "max_model_len=16384",
        "replicas={count: 3, router: round_robin}",
    ]
    setup = setup_of(tmp_path, *changes)
    run, log = played(setup)
    requests, replicas = run.records.requests, run.records.replicas
    assert replicas is not None
    for replica, (published_s, total, longest, expected) in enumerate(WORKERS):
        done_s = requests["delivered_ns"][replicas.requests == replica].max() / 1e9
        assert done_s == pytest.approx(0.0185 * longest + 50e-6 * total, rel=1e-6)
        assert round(100 * (done_s / published_s - 1), 1) == expected
    assert log.updates[0].start_ns == requests["delivered_ns"].max()
    values = measure(point_inputs(setup, run)).values
    assert values["slowest_has_longest_share"] == 1 and values["slowest_has_most_share"] == 0


def shared(total: int, count: int) -> list[int]:
    """`total` in `count` parts, as equal as whole numbers are."""
    return [(total + i) // count for i in range(count)]
