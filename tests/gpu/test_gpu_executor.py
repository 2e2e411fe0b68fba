"""The executor on CUDA: the triton backend against sdpa, graphs against eager steps, blocks over the host link, steps
behind the host and steps that verify drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")
pytest.importorskip("triton", reason="the kernels are written in Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.prompts import RandomPrompts
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.deployment.model import ModelSpec
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.families.preemption import PreemptiveConfig
from batchsim.policies.families.preemptive import Preemptive
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from tests.live.engines import MAX_MODEL_LEN, generate
from tests.support.engine import arrival

pytestmark = pytest.mark.gpu

SPEC = ModelSpec("small", "qwen3", 1024, 3, 16, 4, 128, 2816, 8192, 4096)
SIZES: dict[str, Any] = {
    "num_blocks": 600,
    "num_swap_blocks": 40,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,
}
STEPS = {
    "one decode": ([700], []),
    "decodes": ([5, 16, 900, 33, 0, 1200, 64], []),
    "a full bucket": ([100] * 16, []),
    "chunks": ([], [(0, 300), (64, 17), (1000, 1)]),
    "mixed": ([31, 800, 15], [(0, 128), (511, 33)]),
}


def synthetic(name: str, seed: int = 0) -> StepInputs:
    decodes, chunks = STEPS[name]
    return StepInputs.synthetic(decodes, chunks, block_size=16, num_blocks=600, vocab_size=SPEC.vocab_size, seed=seed)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    """Triton with graphs; its cache starts as random numbers but for block 0."""
    return build_runner(SPEC, device="cuda", **SIZES)


def same_cache(runner: ModelRunner, **options: Any) -> ModelRunner:
    """Another runner of the same model and the same numbers in its cache."""
    made = build_runner(SPEC, device="cuda", graphs=False, **options, **SIZES)
    with torch.inference_mode():
        made._transformer.kv.copy_(runner._transformer.kv)
    return made


@pytest.mark.parametrize("name", STEPS)
def test_triton_gives_the_logits_of_sdpa(name: str, runner: ModelRunner) -> None:
    """In bf16 the logits of every row are within 3 % of the reference's, by norm, on the same cache."""
    reference = same_cache(runner, backend="sdpa")
    step = synthetic(name)
    found, theirs = runner.logits(step), reference.logits(step)
    error = (found - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.max() <= 0.03


@pytest.mark.parametrize("name", STEPS)
def test_a_graph_gives_what_an_eager_step_gives(name: str, runner: ModelRunner) -> None:
    """Replayed logits equal launched ones but for a matmul's rounding at another number of rows; so do new inputs."""
    eager = same_cache(runner)
    for seed in range(3):
        step = synthetic(name, seed)
        found, theirs = runner.logits(step), eager.logits(step)
        assert ((found - theirs).norm(dim=-1) <= 0.02 * theirs.norm(dim=-1)).all()
    assert runner.graph_buckets[:3] == (1, 2, 4)
    assert not eager.graph_buckets


def test_the_block_that_padding_reads_stays_zero(runner: ModelRunner) -> None:
    """After captures, warm-up, bucket padding and steps of all kinds."""
    for name in STEPS:
        runner.step(synthetic(name))
    assert not runner._transformer.kv[:, :, 0].any()


def test_replays_are_timed_and_change_nothing(runner: ModelRunner) -> None:
    """Kernels take time, no more than the step around them; the tokens afterwards are those of before."""
    step = synthetic("decodes")
    tokens, times = runner.step(step)
    runner.load(step)
    assert all(ns > 0 for ns in runner.replay(5))
    assert times.kernel_ns > 0
    assert runner.step(step)[0] == tokens


def test_blocks_survive_the_host_link(runner: ModelRunner) -> None:
    """Blocks out and back elsewhere are bit for bit what they were, also when slots and blocks are traded at once."""
    kv = runner._transformer.kv
    with torch.inference_mode():
        before = kv.clone()
    first, second = list(range(1, 31)), list(range(31, 61))
    runner.swap([(block, slot) for slot, block in enumerate(first)], [])
    with torch.inference_mode():
        kv[:, :, first] = 0
    # The second go to the slots of the first, in the same call that brings the first to the blocks of the second.
    trades = list(enumerate(second))
    runner.swap([(block, slot) for slot, block in trades], trades)
    assert torch.equal(kv[:, :, second], before[:, :, first])
    runner.swap([], list(enumerate(first)))
    assert torch.equal(kv[:, :, first], before[:, :, second])


def answers(runner: ModelRunner, by: Any, num_blocks: int) -> dict[int, list[int]]:
    """The tokens of 24 requests under the preemptive policy with few blocks."""
    kv = TableKV(num_blocks, 16, 40)
    executor = TorchExecutor(runner, kv, max_model_len=2048)
    config = PreemptiveConfig(max_num_seqs=12, max_num_batched_tokens=256, by=by)
    core = EngineCore(Preemptive(config, PolicyContext(kv, 2048)), executor, Recorder(), max_model_len=2048)
    for i in range(24):
        core.submit(Arrival(Request(i, 0, 20 + 13 * i, 40), 40))
    found: dict[int, list[int]] = {}
    now = preempted = 0
    while core.has_work:
        batch = core.schedule(now, drain=True)
        assert isinstance(batch, Batch)
        preempted += len(batch.preempted)
        core.execute(batch, now)
        now += 1
        found |= {seq.request.id: executor.tokens(seq) for seq in executor._lives}
        core.complete(now)
    assert (preempted > 0) == (num_blocks < 100)
    return found


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.live.checkpoints import checkpoint

    folder = tmp_path_factory.mktemp("llama")
    checkpoint("llama", folder, hidden_size=256, max_position_embeddings=2048)  # heads of 32
    return folder


def test_tokens_are_those_of_the_reference(checkpoint_folder: Path) -> None:
    """fp32 answers under preemption by recompute and by swap, through graphs, are those of sdpa with all the blocks."""
    sizes = SIZES | {"num_blocks": 400}
    reference = build_runner(str(checkpoint_folder), device="cuda", backend="sdpa", graphs=False, **sizes)
    runner = build_runner(str(checkpoint_folder), device="cuda", **sizes)
    expected = answers(reference, "recompute", 400)
    for by in ("recompute", "swap"):
        found = answers(runner, by, 90)
        same = [token == best for i in expected for token, best in zip(found[i], expected[i], strict=True)]
        # After a near tie an answer goes its own way to its end: few may, and only from some token on.
        assert np.mean([found[i] == expected[i] for i in expected]) >= 0.8
        assert np.mean(same) >= 0.9


SPECULATION = SpeculativeConfig("ngram", 3, 0.5, prompt_lookup_min=1, prompt_lookup_max=3)


def of_vllm(runner: ModelRunner, num_blocks: int, **knobs: Any) -> tuple[dict[int, list[int]], Any]:
    """The tokens of 16 requests under `vllm`, whose prompts are of so few tokens that n-grams come again; the steps."""
    arrivals = [arrival(i, 3 * i, 9 + 5 * i % 40, 30 + 7 * i % 30) for i in range(16)]
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
    executor, core = generate(runner, "vllm", limits | knobs, arrivals, num_blocks=num_blocks, prompts=RandomPrompts(6))
    return executor.answers, core.recorder.records().steps


@pytest.mark.parametrize("drafts", [None, SPECULATION], ids=["plain", "drafts"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_tokens_ahead_of_results_and_of_drafts_are_those_of_lockstep(
    checkpoint_folder: Path, ahead: bool, drafts: SpeculativeConfig | None
) -> None:
    """fp32 answers through graphs, under preemption, are those of sdpa in lockstep without drafts."""
    sizes = SIZES | {"max_model_len": MAX_MODEL_LEN}
    reference = build_runner(str(checkpoint_folder), device="cuda", backend="sdpa", graphs=False, **sizes)
    expected, _ = of_vllm(reference, 400, async_scheduling=False)
    runner = build_runner(str(checkpoint_folder), device="cuda", **sizes)
    found, steps = of_vllm(runner, 14, async_scheduling=ahead, speculative_config=drafts)
    assert steps["num_preempted"].sum() > 0
    assert (steps["num_accepted_tokens"].sum() > 0) == (drafts is not None)
    same = [token == best for i in expected for token, best in zip(found[i], expected[i], strict=True)]
    assert np.mean([found[i] == expected[i] for i in expected]) >= 0.8
    assert np.mean(same) >= 0.9
