"""The forward pass against transformers, logits by logits, and that padding is work done and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.architecture import load_architecture
from batchsim.calibrate.engine.backend import SPARE_BLOCKS, SdpaBackend
from batchsim.calibrate.engine.executor import TorchExecutor
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.runner import ModelRunner, StepLimits, build_runner
from batchsim.calibrate.engine.transformer import Transformer
from batchsim.calibrate.engine.weights import load_weights
from batchsim.cost.work import attention_rows, chunk_rows, columns_of, padded_work
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import TableKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.policies.families.static import Static, StaticConfig
from batchsim.policies.systems.tf_serving import TfServing, TfServingConfig
from tests.live.checkpoints import FAMILIES, SHAPE, checkpoint
from tests.support.engine import arrival

VOCAB, BLOCK = SHAPE["vocab_size"], 16
LIMITS = StepLimits(max_num_seqs=16, max_num_batched_tokens=400, max_model_len=200)
Part = tuple[int, int, int]  # of text i, the tokens from .. to


def step_of(texts: list[list[int]], tables: list[list[int]], parts: list[Part]) -> StepInputs:
    """One step of the `parts`, those of one token first, as decodes."""
    parts = sorted(parts, key=lambda part: part[2] - part[1] > 1)
    positions = np.concatenate([np.arange(start, end) for _, start, end in parts])
    rows = np.repeat([i for i, _, _ in parts], [end - start for _, start, end in parts])
    blocks = np.zeros((len(texts), max(map(len, tables))), dtype=np.int32)
    for i, table in enumerate(tables):
        blocks[i, : len(table)] = table
    chunks = [end - start for _, start, end in parts if end - start > 1]
    return StepInputs(
        ids=np.concatenate([texts[i][start:end] for i, start, end in parts]).astype(np.int64),
        positions=positions,
        slots=blocks[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        num_decode=len(parts) - len(chunks),
        chunk_lens=np.array(chunks, dtype=np.int32),
        seq_lens=np.array([end for _, _, end in parts], dtype=np.int32),
        block_tables=blocks[[i for i, _, _ in parts]],
    )


STEPS: list[list[Part]] = [
    [(0, 0, 37), (2, 0, 50)],
    [(0, 37, 38), (1, 0, 5), (2, 50, 90)],
    [(0, 38, 39), (1, 5, 6), (2, 90, 91)],
    [(2, 91, 93), (1, 6, 8), (0, 39, 40)],
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """Prompts in pieces beside decodes, in scattered blocks, give the logits of whole texts."""
    model = checkpoint(family, tmp_path, dtype=dtype)
    sizes = vars(LIMITS) | {"num_blocks": 64, "block_size": BLOCK}
    runner = build_runner(str(tmp_path), device="cpu", **sizes)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, VOCAB, n).tolist() for n in (40, 8, 93)]
    order = (rng.permutation(64) + 1).tolist()
    tables = [order[0:3], order[3:4], order[4:10]]
    with torch.inference_mode():
        whole = [model(torch.tensor([text])).logits[0].float() for text in texts]
    for parts in STEPS:
        step = step_of(texts, tables, parts)
        found = runner.logits(step)
        for row, (i, _, end) in enumerate(sorted(parts, key=lambda part: part[2] - part[1] > 1)):
            reference = whole[i][end - 1]
            assert (found[row] - reference).norm() <= tolerance * reference.norm(), (i, end)


class Counting(SdpaBackend):
    """Counts the work it does, of the layer that is first in the step."""

    def __init__(self) -> None:
        self.tokens = self.context = self.pairs = self.reads = self.rows = self.chunks = 0

    def rope_store(self, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        self.tokens += len(q)
        return super().rope_store(q, k, v, *rest)

    def decode(self, q: Any, k_cache: Any, v_cache: Any, block_tables: Any, seq_lens: Any, scale: float) -> Any:
        self.reads += int(seq_lens.sum())
        self.rows += len(q)
        assert len(q) == len(seq_lens) == len(block_tables)
        assert seq_lens.max() <= block_tables.shape[1] * k_cache.shape[1]
        return super().decode(q, k_cache, v_cache, block_tables, seq_lens, scale)

    def prefill(self, q: Any, k_cache: Any, v_cache: Any, tables: Any, bounds: Any, seq_lens: Any, *rest: Any) -> Any:
        lens = bounds.diff()
        self.chunks += len(lens)
        self.pairs += int((lens * (seq_lens - lens) + lens * (lens + 1) // 2).sum())
        return super().prefill(q, k_cache, v_cache, tables, bounds, seq_lens, *rest)


PADDING: dict[str, Any] = {
    "hold": StaticConfig(batch_size=4, finished_rows="hold"),
    "drop": StaticConfig(batch_size=4, finished_rows="drop"),
    "copies": TfServingConfig(1, max_batch_size=7, allowed_batch_sizes=(7,), pad_variable_length_inputs=True),
}


@pytest.mark.parametrize("name", PADDING)
def test_padding_is_the_work_that_the_cost_model_counts(name: str, tmp_path: Path) -> None:
    """In every step of a padded batch, tokens, context read, pairs and chunks' rows equal `padded_work`'s, rows of
    decodes `attention_rows`."""
    checkpoint("mistral", tmp_path, num_hidden_layers=1)
    architecture = load_architecture(str(tmp_path))
    weights = load_weights(architecture, tmp_path, torch.device("cpu"))
    kv = torch.zeros(1, 2, 100 + SPARE_BLOCKS, 4, 2, 12)
    backend = Counting()
    runner = ModelRunner(Transformer(architecture, weights, backend, kv, 200), LIMITS)
    manager = TableKV(100, 4)
    config, context = PADDING[name], PolicyContext(manager, 60)
    executor = TorchExecutor(runner, manager, max_model_len=120)
    scheduler = TfServing(config, context) if isinstance(config, TfServingConfig) else Static(config, context)
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=60)
    for i, (prompt, output) in enumerate([(40, 2), (3, 19), (11, 6), (1, 1)]):
        core.submit(arrival(i, 0, prompt, output))
    ghosts = alone = 0
    for now in range(100):
        batch = core.schedule(now, drain=True)
        if isinstance(batch, Idle):
            break
        assert isinstance(batch, Batch)
        work = padded_work(columns_of(batch))
        backend.__init__()
        core.execute(batch, now)
        core.complete(now)
        assert (backend.tokens, backend.pairs) == (work.tokens[0], work.pairs[0])
        assert backend.chunks == chunk_rows(columns_of(batch))[0]
        assert backend.rows == attention_rows(columns_of(batch), 119)[0]
        # A decode row reads its own token too; rows that only read padding have none.
        own = batch.num_decode + batch.pad_decode_rows
        assert backend.reads == work.context[0] + own
        ghosts += backend.reads > batch.context_tokens + own
        alone += backend.rows > own
    assert now == 19
    assert ghosts >= 18
    assert (alone == 0) == (name != "drop"), "rows of padding read the padding, where there are some"
    assert not kv[:, :, 0].any(), "the block that padding reads was written"


def test_the_padding_of_chunks_and_decodes_changes_no_logits(tmp_path: Path) -> None:
    """Logits are those of the last stored token of each sequence, whatever stands behind it or beside it."""
    checkpoint("qwen2", tmp_path)
    runner = build_runner(str(tmp_path), device="cpu", num_blocks=64, block_size=BLOCK, **vars(LIMITS))
    sizes = {"block_size": BLOCK, "num_blocks": 64, "vocab_size": VOCAB, "seed": 3}
    step = StepInputs.synthetic([20, 33], [(0, 9), (0, 5)], **sizes)
    plain = runner.logits(step)
    longer = replace(
        step,
        ids=np.append(step.ids, [1, 2, 3, 4]),
        positions=np.append(step.positions, [5, 6, 7, 8]),
        slots=np.append(step.slots, [-1, -1, -1, -1]),
        chunk_lens=np.array([9, 9], dtype=np.int32),
        seq_lens=np.array([21, 34, 9, 9], dtype=np.int32),
        block_tables=np.pad(step.block_tables, ((0, 0), (0, 40))),
        pad_reads=np.array([17, 40], dtype=np.int32),
    )
    assert longer.logit_rows.tolist() == [0, 1, 10, 15]
    assert torch.allclose(runner.logits(longer), plain, rtol=1e-5, atol=1e-5)


def test_synthetic_steps_are_disjoint_and_repeat() -> None:
    """No two tokens of a made-up step share a slot, no two sequences a block, block 0 is nobody's; seeds decide."""
    sizes = {"block_size": 4, "num_blocks": 30, "vocab_size": 50}
    step = StepInputs.synthetic([5, 8, 0], [(6, 3), (0, 10)], seed=1, **sizes)
    blocks = step.block_tables[step.block_tables > 0]
    assert len(set(blocks)) == len(blocks) == 2 + 3 + 1 + 3 + 3
    assert len(set(step.slots)) == len(step.slots) == 3 + 3 + 10
    assert step.slots.min() >= 4
    assert step.positions.tolist() == [5, 8, 0, 6, 7, 8, *range(10)]
    assert step.seq_lens.tolist() == [6, 9, 1, 9, 10]
    again, other = (StepInputs.synthetic([5, 8, 0], [(6, 3), (0, 10)], seed=s, **sizes) for s in (1, 2))
    assert np.array_equal(step.slots, again.slots)
    assert not np.array_equal(step.ids, other.ids)
    with pytest.raises(CalibrationError, match="needs 31 KV blocks, 30 in the pool"):
        StepInputs.synthetic([120], [], seed=1, **sizes)
