"""Asynchronous scheduling on a model: tokens are transformers' whatever ends, stops, gives up or fails with a step in
flight, and every request and step is on record.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import CalibrationError, ExecutorError
from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.drive.live import LiveRun, WallClock, live
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import FINISHED, MISSING, Recorder
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import ASYNCHRONOUS, VllmConfig
from tests.live.checkpoints import SHAPE, checkpoint, expected
from tests.live.engines import MAX_MODEL_LEN, generate, prompt_of
from tests.support.engine import Requests, arrival

VOCAB = SHAPE["vocab_size"]
KNOBS = {"async_scheduling": True, "enable_prefix_caching": False, "max_num_seqs": 4, "max_num_batched_tokens": 12}
SIZES: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 100}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    """A runner of a tiny checkpoint, and the model of transformers that wrote it."""
    folder = tmp_path_factory.mktemp("llama")
    model = checkpoint("llama", folder)
    return build_runner(str(folder), device="cpu", max_model_len=MAX_MODEL_LEN, **SIZES), model


def test_an_end_of_text_is_found_a_step_late(llama: tuple[ModelRunner, Any], tmp_path: Path) -> None:
    """The token computed after it is thrown away and in no later prompt; who runs beside keeps its own."""
    first = Arrival(Request(0, 0, 9, 14, tokens=TokenIds.of([(prompt_stream(9), 0, 9)])), None)
    full = expected(llama[1], prompt_of(first, VOCAB), 14)
    checkpoint("llama", tmp_path, eos_token_id=full[5])
    runner = build_runner(str(tmp_path), device="cpu", max_model_len=MAX_MODEL_LEN, **SIZES)
    all_of = [first, *(arrival(i, 0, 7 + i, 11) for i in (1, 2, 3, 4, 5))]
    executor, core = generate(runner, "vllm", KNOBS, all_of, num_blocks=14)
    assert executor.answers[0] == executor._answers[output_stream(0)] == full[: full.index(full[5]) + 1]
    for one in all_of[1:]:
        assert executor.answers[one.request.id] == expected(llama[1], prompt_of(one, VOCAB), 11)
    found = core.recorder.records()
    assert found.lanes["wasted_tokens"].sum() == 1
    assert found.requests["output_tokens"][0] == len(executor.answers[0]) and found.steps["num_preempted"].sum() > 0


def test_cancels_with_a_step_in_flight_harm_nobody(llama: tuple[ModelRunner, Any]) -> None:
    """The blocks of who gives up amid a step go to those who wait, whose tokens are right."""
    runner, model = llama
    given_up = [arrival(i, 0, 10, 20, cancel_ns=35 + 10 * i) for i in (0, 1)]
    kept = [arrival(i, i, 9, 12) for i in (2, 3, 4, 5)]
    executor, core = generate(runner, "vllm", KNOBS, [*given_up, *kept], num_blocks=12)
    rows = core.recorder.records()
    assert sorted(executor.answers) == [2, 3, 4, 5]
    for one in kept:
        assert executor.answers[one.request.id] == expected(model, prompt_of(one, VOCAB), 12)
    assert rows.lanes["wasted_tokens"].sum() > 0 and (rows.lanes["processed_ns"] != MISSING).all()
    core.check_returned()


def test_a_prompt_thrown_out_by_a_call_that_ran_nothing_comes_back(llama: tuple[ModelRunner, Any]) -> None:
    """The second is preempted while the first has its last token in flight and nobody runs; it begins anew."""
    runner, model = llama
    both = [arrival(0, 0, 8, 2), arrival(1, 0, 20, 3)]
    executor, core = generate(runner, "vllm", KNOBS | {"scheduler_reserve_full_isl": False}, both, num_blocks=7)
    assert core.recorder.records().requests["num_preemptions"].tolist() == [0, 1]
    for one in both:
        assert executor.answers[one.request.id] == expected(model, prompt_of(one, VOCAB), one.output_tokens or 0)


@pytest.mark.parametrize(
    "loop",
    [EngineLoop("overlap", 2), ASYNCHRONOUS.over(2), replace(ASYNCHRONOUS, depth=3)],
    ids=["kind", "stages", "deep"],
)
def test_loops_that_a_device_cannot_run_are_refused(llama: tuple[ModelRunner, Any], loop: EngineLoop) -> None:
    """More steps in flight, pipelines and other engines' loops, in one line."""
    with pytest.raises(CalibrationError, match=f"a loop {loop.kind} of {loop.depth} steps over {loop.stages} stages"):
        TorchExecutor(llama[0], TableKV(8, 4), max_model_len=MAX_MODEL_LEN, loop=loop)


# ---- in real time


class Eventful:
    """A runner that does something before its n-th step."""

    def __init__(self, runner: ModelRunner, step: int, event: Callable[[], None]) -> None:
        self._runner, self._left, self._event = runner, step, event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, *args: Any) -> Any:
        self._left -= 1
        if not self._left:
            self._event()
        return self._runner.step(*args)


def played(runner: Any, arrivals: list[Arrival]) -> tuple[EngineCore, TorchExecutor, LiveRun]:
    """A run by the wall clock: its engine, its executor and how it ended."""
    kv, config = TableKV(40, 4), VllmConfig(**KNOBS)
    scheduler = Vllm(config, PolicyContext(kv, MAX_MODEL_LEN, loop=ASYNCHRONOUS))
    executor = TorchExecutor(runner, kv, max_model_len=MAX_MODEL_LEN, loop=ASYNCHRONOUS)
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN, loop=ASYNCHRONOUS)
    return core, executor, live(core, Requests(*arrivals), WallClock())


SIX = [arrival(i, 0, 6 + i, 9) for i in range(6)]


def test_steps_have_their_real_times(llama: tuple[ModelRunner, Any]) -> None:
    """One runs after another, once it was launched, and is processed after, when the next one was mostly launched."""
    core, executor, run = played(llama[0], SIX)
    found = core.recorder.records()
    steps, lanes = found.steps, found.lanes
    ends = steps["start_ns"] + steps["duration_ns"]
    assert run.reason == "" and (found.requests["outcome"] == FINISHED).all()
    assert (steps["start_ns"][1:] >= ends[:-1]).all() and (lanes["called_ns"] <= lanes["launched_ns"]).all()
    assert (lanes["launched_ns"] <= steps["start_ns"]).all() and (ends <= lanes["processed_ns"]).all()
    assert (lanes["launched_ns"][1:] < lanes["processed_ns"][:-1]).mean() > 0.5
    kernels = np.array([times.kernel_ns for times in executor.times])
    assert len(kernels) == len(steps) and (kernels > 0).all() and (kernels <= steps["duration_ns"]).all()


def test_a_device_that_fails_with_a_step_in_flight_loses_no_request(llama: tuple[ModelRunner, Any]) -> None:
    """Step 5 fails, step 6 was launched behind it: neither is on record, and every request is, with the reason."""

    def fail() -> None:
        raise ExecutorError("the device is gone.", "step_failed")

    core, executor, run = played(Eventful(llama[0], 5, fail), [*SIX, arrival(6, 10**15)])
    found = core.recorder.records()
    assert (run.reason, str(run.error)) == ("step_failed", "the device is gone.")
    assert len(found.steps) == len(found.lanes) == len(executor.times) == 4
    assert (
        len(found.requests) == 7
        and (found.requests["ended_ns"][found.requests["outcome"] != FINISHED] == run.end_ns).all()
    )
    assert found.lanes["processed_ns"].min() > 0


def test_ctrl_c_waits_for_all_that_is_in_flight(llama: tuple[ModelRunner, Any]) -> None:
    """A signal amid a step: it and the one launched behind it end, and their tokens count."""
    core, executor, run = played(Eventful(llama[0], 5, lambda: signal.raise_signal(signal.SIGINT)), SIX)
    found = core.recorder.records()
    assert run.reason == "interrupted" and len(found.requests) == 6
    assert 5 <= len(found.steps) == len(executor.times) <= 7
    assert (found.lanes["processed_ns"] != MISSING).all() and found.lanes["wasted_tokens"].sum() == 0
    tokens = found.steps["num_decode"].sum() + found.steps["num_sampled_chunks"].sum()
    assert found.requests["output_tokens"].sum() == tokens
