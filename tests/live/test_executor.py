"""The executor gives the tokens that transformers gives, whatever the scheduler does to the sequences on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import CalibrationError, PolicyError
from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.calibrate.engine.sampling import Sampling
from batchsim.drive.live import VirtualClock, live
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.record import Recorder
from batchsim.kernel.types import Arrival, Request, Resume, Sequence
from batchsim.policies.registry import POLICIES
from batchsim.testing.by_hand import same
from batchsim.testing.on_model import of_prompts, on_model
from batchsim.testing.random_configs import MAX_MODEL_LEN as CASE_MODEL_LEN
from batchsim.testing.random_engines import Case, Listed, TokenCost, built, cases
from tests.conformance.ahead import LaneTokenCost, asynchronous, engine_ahead
from tests.live.checkpoints import FAMILIES, SHAPE, checkpoint, expected
from tests.live.engines import MAX_MODEL_LEN, Timed, generate, likeliest, prompt_of
from tests.support.engine import arrival, vllm

VOCAB = SHAPE["vocab_size"]
LENGTHS = [(17, 20), (5, 9), (30, 25), (11, 30), (3, 1), (22, 14)]  # prompt, output
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 16}  # prompts in chunks, decodes beside them
COPIES = {"num_batch_threads": 1, "max_batch_size": 4, "allowed_batch_sizes": (4,), "pad_variable_length_inputs": True}
RUNS: dict[str, tuple[str, dict[str, Any], int]] = {  # policy, knobs, KV blocks of 4 tokens
    "chunked": ("continuous", SMALL, 60),
    "recompute": ("preemptive", SMALL | {"by": "recompute"}, 24),
    "swap": ("preemptive", SMALL | {"by": "swap"}, 24),
    "vllm": ("vllm", SMALL | {"enable_prefix_caching": False, "async_scheduling": False}, 24),
    "vllm_async": ("vllm", SMALL | {"enable_prefix_caching": False, "async_scheduling": True}, 24),
    "padded": ("static", {"batch_size": 3}, 60),
    "padded_rows": ("tf_serving", COPIES, 60),
    "padded_prompts_only": ("static", {"batch_size": 3, "finished_rows": "drop"}, 60),
}


def loaded(folder: Path, **changes: Any) -> ModelRunner:
    sizes: dict[str, Any] = {
        "num_blocks": 60,
        "block_size": 4,
        "num_swap_blocks": 40,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 400,
        "max_model_len": MAX_MODEL_LEN,
    }
    return build_runner(str(folder), device="cpu", **(sizes | changes))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    """A runner of a checkpoint and the model of transformers that wrote it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = checkpoint(request.param, folder)
    return loaded(folder), model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, checkpoint("llama", folder)


@pytest.mark.parametrize("run", RUNS)
def test_tokens_are_those_of_transformers(family: tuple[ModelRunner, Any], run: str) -> None:
    """Greedy tokens equal `generate`, in chunks, beside others, after preemptions, in scattered blocks, padded."""
    runner, model = family
    kind, knobs, num_blocks = RUNS[run]
    arrivals = [arrival(i, 7 * i, prompt, output) for i, (prompt, output) in enumerate(LENGTHS)]
    executor, core = generate(runner, kind, knobs, arrivals, num_blocks=num_blocks)
    for one in arrivals:
        answer = expected(model, prompt_of(one, VOCAB), one.output_tokens or 0)
        assert executor.answers[one.request.id] == answer, f"request {one.request.id}"
    steps = core.recorder.records().steps
    assert (steps["swap_blocks"].sum() > 0) == (run == "swap")
    assert (steps["num_preempted"].sum() > 0) == (run in ("recompute", "swap", "vllm", "vllm_async"))
    assert (steps["pad_prefill_tokens"].sum() > 0) == run.startswith("padded")
    assert (steps["pad_prefill_rows"].sum() > 0) == (run == "padded_rows")


RUNNERS: dict[int, ModelRunner] = {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_policy_runs_on_the_model_as_in_simulation(
    kind: str, llama: tuple[Path, Any], data: st.DataObject
) -> None:
    """Random engines of every registered policy: the records of the simulation, and likely tokens only."""
    case: Case | None = data.draw(cases(kind))
    assume(built(case))
    assert case is not None
    case = on_model(case)
    assume(case is not None)
    assert case is not None
    core = case.engine(ids=True)
    executor = Timed(runner_of(case, llama[0]), core.scheduler.kv, TokenCost(), CASE_MODEL_LEN)
    core.executor = executor
    live(core, case.workload, VirtualClock())
    same_records_and_likely_tokens(case, executor, core, case.live(ids=True), llama[1])


def runner_of(case: Case, folder: Path) -> ModelRunner:
    """The runner of the checkpoint with the case's blocks."""
    if case.block_size not in RUNNERS:
        sizes = {"block_size": case.block_size, "num_swap_blocks": 60, "max_num_seqs": 64}
        lengths = {"max_num_batched_tokens": 20_000, "max_model_len": CASE_MODEL_LEN}
        RUNNERS[case.block_size] = loaded(folder, **sizes, **lengths)
    return RUNNERS[case.block_size]


def same_records_and_likely_tokens(
    case: Case, executor: Timed, played: EngineCore, simulated: EngineCore, model: Any
) -> None:
    """Asserts that both engines left the same records, and `executor` the tokens that `model` finds likeliest."""
    found, expected_ones = played.recorder.records(), simulated.recorder.records()
    same(found, expected_ones)
    requests = [one.request for one in (*case.workload.known, *(one for _, one in case.workload.following))]
    for request in requests:
        answer = executor.answers.get(request.id)
        if answer:
            prompt = prompt_of(Arrival(request, 1), VOCAB, executor.answers)
            assert answer == likeliest(model, prompt, answer), f"request {request.id}"


class TimedLanes(Timed):
    """With the host's predicted times too."""

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return LaneTokenCost().host_ns(batch)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_asynchronous_scheduling_runs_on_the_model_as_in_simulation(
    llama: tuple[Path, Any], data: st.DataObject
) -> None:
    """Random vLLM engines with a step in flight: the records of the simulation, and likely tokens only."""
    case: Case | None = data.draw(cases("vllm"))
    assume(built(case))
    assert case is not None
    assume(case.stages == 1 and case.config.traits.speculation is None)
    case = asynchronous(case)
    assume(case.config.policy == "fcfs")  # under priority vLLM shares blocks that were never computed
    following = tuple((think_ns, of_prompts(one)) for think_ns, one in case.workload.following)
    case = replace(case, workload=Listed(tuple(map(of_prompts, case.workload.known)), following))
    core, simulated = engine_ahead(case, ids=True), engine_ahead(case, ids=True)
    runner, kv = runner_of(case, llama[0]), core.scheduler.kv
    core.executor = executor = TimedLanes(runner, kv, TokenCost(), CASE_MODEL_LEN, core.loop)
    live(core, case.workload, VirtualClock())
    live(simulated, case.workload, VirtualClock())
    same_records_and_likely_tokens(case, executor, core, simulated, llama[1])


# ---- the ends of answers


def test_without_a_length_the_answer_ends_at_the_cap_or_at_an_end_of_text(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    """The same prompt stops at its cap, and at the first end-of-text token once the files name one."""
    folder, model = llama
    one = Arrival(Request(0, 0, 9, 12), None)
    executor, _ = generate(loaded(folder), "continuous", SMALL, [one], num_blocks=60)
    full = executor.answers[0]
    assert full == expected(model, prompt_of(one, VOCAB), 12)
    ends = full[4]
    checkpoint("llama", tmp_path, eos_token_id=ends)
    executor, _ = generate(loaded(tmp_path), "continuous", SMALL, [one], num_blocks=60)
    assert executor.answers[0] == full[: full.index(ends) + 1]
    known, _ = generate(loaded(tmp_path), "continuous", SMALL, [arrival(0, 0, 9, 12)], num_blocks=60)
    assert known.answers[0] == full, "a length that the workload knows is kept whatever the tokens"


def test_bfloat16_runs_and_mostly_agrees(tmp_path: Path) -> None:
    """In bf16 at least nine tokens of ten are those transformers finds likeliest; rounding may decide near ties."""
    model = checkpoint("llama", tmp_path, dtype="bfloat16")
    arrivals = [arrival(i, 0, prompt, output) for i, (prompt, output) in enumerate(LENGTHS)]
    executor, _ = generate(loaded(tmp_path), "preemptive", SMALL, arrivals, num_blocks=30)
    agreed = [
        token == best
        for one in arrivals
        for token, best in zip(
            executor.answers[one.request.id],
            likeliest(model, prompt_of(one, VOCAB), executor.answers[one.request.id]),
            strict=True,
        )
    ]
    assert np.mean(agreed) >= 0.9


def test_drawn_tokens_repeat_with_the_seed_alone(llama: tuple[Path, Any]) -> None:
    """Two runs of one seed draw the same answers, another seed others."""
    runner = loaded(llama[0])
    answers = []
    for seed in (1, 1, 2):
        kv = TableKV(60, 4)
        executor = TorchExecutor(runner, kv, max_model_len=100, sampling=Sampling(temperature=2.0, seed=seed))
        scheduler = vllm(kv)
        core = EngineCore(scheduler, executor, Recorder(), max_model_len=100)
        core.submit(arrival(0, 0, 5, 30))
        for step in range(20):
            batch = core.schedule(step, drain=True)
            assert isinstance(batch, Batch)
            core.execute(batch, step)
            core.complete(step)
        (seq,) = scheduler.running
        answers.append(executor.tokens(seq))
    assert answers[0] == answers[1] != answers[2]
    assert len(executor.times) == 20
    assert all(times.kernel_ns > 0 and times.host_ns > 0 for times in executor.times)


# ---- bugs of policies and managers, and what does not fit


class TwiceDealt(TableKV):
    """Deals out the same first block to everyone."""

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        fine = super().allocate(seq, num_tokens)
        self._tables[seq][0] = 0
        return fine


class Stingy(TableKV):
    """Forgets a block of each table."""

    def table(self, seq: Sequence) -> list[int]:
        return super().table(seq)[:-1]


@pytest.mark.parametrize(
    ("manager", "complaint"), [(TwiceDealt, "KV block 0 is given to several tokens"), (Stingy, "which has 1")]
)
def test_a_manager_that_would_spoil_the_cache_is_refused(
    llama: tuple[Path, Any], manager: type[TableKV], complaint: str
) -> None:
    """A block dealt to two sequences, and a table too short for a chunk, are errors, not wrong tokens."""
    kv = manager(60, 4)
    executor = TorchExecutor(loaded(llama[0]), kv, max_model_len=100)
    core = EngineCore(vllm(kv), executor, Recorder(), max_model_len=100)
    core.submit(arrival(0, 0, 6, 3))
    core.submit(arrival(1, 0, 6, 3))
    batch = core.schedule(0, drain=True)
    assert isinstance(batch, Batch)
    with pytest.raises(PolicyError, match=complaint):
        core.execute(batch, 0)


@pytest.mark.parametrize(
    ("kv", "complaint"),
    [
        (TableKV(61, 4), "num_blocks 61; the model was loaded with 60"),
        (TableKV(60, 8), "KV blocks of 8 tokens; the model was loaded with blocks of 4"),
        (TableKV(60, 4, 50), "num_swap_blocks 50"),
    ],
)
def test_a_pool_the_runner_has_not_is_refused(llama: tuple[Path, Any], kv: TableKV, complaint: str) -> None:
    """A manager that deals out more than was loaded is refused before the first step."""
    with pytest.raises(CalibrationError, match=complaint):
        TorchExecutor(loaded(llama[0]), kv, max_model_len=MAX_MODEL_LEN)


def test_a_request_of_another_engine_is_refused(llama: tuple[Path, Any]) -> None:
    """Its KV and its tokens are not on this device, and nothing brings them."""
    executor = TorchExecutor(loaded(llama[0]), TableKV(60, 4), max_model_len=MAX_MODEL_LEN)
    for resume in (Resume(4, 0), Resume(0, 1)):
        with pytest.raises(ValueError, match="request 5 comes from another engine"):
            executor.begin(resume.sequence(arrival(5, 0, prompt=8).request), 3)
