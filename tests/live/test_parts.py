"""The parts of the executor that have rules of their own: swap, block guard, graph buckets, replays, prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import PolicyError, ScenarioError
from batchsim.calibrate.engine.graphs import bucket_of, buckets_for, filled
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.mirror import BlockMirror
from batchsim.calibrate.engine.padding import spread
from batchsim.calibrate.engine.prompts import RandomPrompts, TextPrompts
from batchsim.calibrate.engine.runner import build_runner
from batchsim.calibrate.engine.staging import Staging
from batchsim.calibrate.engine.swap import SwapPool
from batchsim.deployment.model import ModelSpec
from batchsim.kernel.types import Request

CPU = torch.device("cpu")


# ---- swap


def marked(num_blocks: int) -> torch.Tensor:
    """A cache of 2 layers in which every element of block b is b."""
    shape = (2, 2, num_blocks, 4, 1, 2)
    return torch.arange(num_blocks).view(1, 1, -1, 1, 1, 1).expand(shape).float().clone()


def test_blocks_go_out_and_come_back_elsewhere() -> None:
    """What was in the blocks is in others after a round trip, and the rest is untouched."""
    kv = marked(8)
    pool = SwapPool(kv, 4)
    assert pool.move([(3, 0), (5, 2)], []) > 0
    kv[:, :, [3, 5]] = -1.0
    assert pool.move([], [(2, 6), (0, 3)]) > 0
    assert kv[0, 0, :, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, -1, 5, 7]
    assert (kv == kv[:1, :1, :, :1, :1, :1]).all(), "a block was moved in part"


def test_all_is_read_before_anything_is_overwritten() -> None:
    """Two sequences that trade places, block for block and slot for slot, both keep their tokens."""
    kv = marked(6)
    pool = SwapPool(kv, 3)
    pool.move([(1, 0), (2, 1)], [])
    kv[:, :, [1, 2]] = torch.tensor([40.0, 50.0]).view(1, 1, 2, 1, 1, 1)
    pool.move([(1, 1), (2, 0)], [(0, 2), (1, 1)])
    assert kv[0, 0, :, 0, 0, 0].tolist() == [0, 2, 1, 3, 4, 5]
    pool.move([], [(0, 4), (1, 5)])
    assert kv[1, 1, :, 3, 0, 1].tolist() == [0, 2, 1, 3, 50, 40]


# ---- the guard of the blocks


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_block_belongs_to_whom_its_first_token_is() -> None:
    """Writes go on in a block that was begun, and are refused in another's, in the null block and beyond the table."""
    mirror = BlockMirror(num_blocks=8, block_size=4, max_blocks=5)
    first, second = mirror.new_row(), mirror.new_row()
    mirror.extend(first, [2, 7], 2, "request 0")
    assert mirror.slots(numbers(first, first), numbers(0, 1)).tolist() == [12, 13]
    mirror.extend(second, [4, 2], 1, "request 1")
    assert mirror.slots(numbers(first, second), numbers(2, 0)).tolist() == [14, 20]
    with pytest.raises(PolicyError, match="writes into KV block 2, which holds tokens of executor row 0"):
        mirror.slots(numbers(second), numbers(4))
    with pytest.raises(PolicyError, match="writes into KV block 7, which was never given to it"):
        mirror.slots(numbers(first), numbers(5))
    with pytest.raises(PolicyError, match="KV block -1"):
        mirror.slots(numbers(first), numbers(8))
    with pytest.raises(PolicyError, match="request 0 writes into KV block 3 of its table, which has 2"):
        mirror.extend(first, [2, 7], 3, "request 0")


def test_a_block_that_others_read_is_not_written() -> None:
    """Nobody's tokens lie in it any more, but a prefix cache lets another row read them; then it is free again."""
    mirror = BlockMirror(num_blocks=8, block_size=4, max_blocks=5, shares=True)
    first, second, third = mirror.new_row(), mirror.new_row(), mirror.new_row()
    mirror.extend(first, [3], 1, "request 0")
    mirror.note(mirror.slots(numbers(*[first] * 4), numbers(0, 1, 2, 3)), numbers(5, 6, 7, 8))
    mirror.extend(second, [3, 4], 2, "request 1", shared=1)
    mirror.check_shared(second, numbers(5, 6, 7, 8), "request 1")
    with pytest.raises(
        PolicyError, match="request 1 takes KV block 3 from the prefix cache, but its token 1 is another"
    ):
        mirror.check_shared(second, numbers(5, 1, 7, 8), "request 1")
    mirror.drop_row(first)
    with pytest.raises(PolicyError, match="request 2 is given KV block 3, which others have"):
        mirror.extend(third, [3], 1, "request 2")
    mirror.drop_row(second)
    mirror.drop_row(third)
    third = mirror.new_row()
    mirror.extend(third, [3], 1, "request 2")
    assert mirror.slots(numbers(third), numbers(0)).tolist() == [16]
    with pytest.raises(PolicyError, match="its token 1 was never computed there"):
        mirror.note(numbers(16), numbers(5))
        mirror.check_shared(third, numbers(5, 6, 7, 8), "request 2")


def test_a_table_that_changed_is_followed() -> None:
    """A prefix cache may put an equal block in the place of a row's own, which is free then."""
    mirror = BlockMirror(num_blocks=8, block_size=4, max_blocks=5, shares=True)
    first, second = mirror.new_row(), mirror.new_row()
    mirror.extend(first, [3, 5], 2, "request 0")
    mirror.slots(numbers(*[first] * 4), numbers(0, 1, 2, 3))
    mirror.follow(first, [6, 5])
    assert mirror.blocks(first) == [7, 6]
    mirror.extend(second, [3], 1, "request 1")
    assert mirror.slots(numbers(second), numbers(0)).tolist() == [16]


def test_what_is_given_back_can_be_taken() -> None:
    """After a row is dropped its blocks are anybody's; a block begun twice by one row is refused."""
    mirror = BlockMirror(num_blocks=8, block_size=4, max_blocks=5)
    row = mirror.new_row()
    mirror.extend(row, [3], 1, "request 0")
    mirror.slots(numbers(row), numbers(0))
    with pytest.raises(PolicyError, match="KV block 3"):
        mirror.slots(numbers(row), numbers(0))
    mirror.drop_row(row)
    rows = [mirror.new_row() for _ in range(40)]
    mirror.extend(rows[-1], [3], 1, "request 1")
    assert mirror.slots(numbers(rows[-1]), numbers(0)).tolist() == [16]
    assert len(set(rows)) == 40


# ---- CUDA graphs, as far as they are arithmetic


def test_buckets_are_dense_where_steps_are_small() -> None:
    """Up to the first that holds the sequences, and one beyond it for padding; none beyond 512."""
    assert buckets_for(1) == (1, 2)
    assert buckets_for(20) == (1, 2, 4, 8, 16, 24, 32)
    assert buckets_for(256)[-3:] == (248, 256, 288)
    assert buckets_for(600)[-2:] == (480, 512)


def step_with(contexts: list[int], pad_reads: list[int]) -> StepInputs:
    sizes = {"block_size": 16, "num_blocks": 64, "vocab_size": 9, "seed": 0}
    plain = StepInputs.synthetic(contexts, [], **sizes)
    width = max([*contexts, *pad_reads]) // 16 + 1
    tables = np.pad(plain.block_tables, ((0, 0), (0, max(width - plain.block_tables.shape[1], 0))))
    return replace(plain, pad_reads=np.array(pad_reads, dtype=np.int32), block_tables=tables)


BUCKETS: dict[str, tuple[list[int], list[int], int | None]] = {
    "exact": ([1, 2], [], 2),
    "next": ([1, 2, 3], [], 4),
    "none": ([1] * 9, [], None),
    "with reads": ([1, 2, 3], [30], 4),
    "one more for a read": ([1, 2, 3, 4], [30], 8),
    "too few spare rows": ([1] * 7, [30, 30], None),
}


@pytest.mark.parametrize(("contexts", "reads", "bucket"), BUCKETS.values(), ids=BUCKETS)
def test_a_decode_step_finds_its_graph(contexts: list[int], reads: list[int], bucket: int | None) -> None:
    """The smallest that holds its rows and padding reads, which then are rows; none where the largest does not."""
    step = step_with(contexts, reads)
    assert bucket_of(step, (1, 2, 4, 8)) == bucket
    if bucket is None:
        return
    full = filled(step, bucket)
    rows = len(contexts)
    assert full.num_decode == len(full.seq_lens) == len(full.ids) == bucket
    assert full.seq_lens[:rows].tolist() == step.seq_lens.tolist()
    assert (full.slots[rows:] == -1).all()
    assert not full.block_tables[rows:].any()
    assert full.seq_lens[rows:].tolist() == reads + [1] * (bucket - rows - len(reads))
    assert full.block_tables.shape[1] * 16 >= full.seq_lens.max()


def test_steps_with_chunks_have_no_graph() -> None:
    """Neither has a step of none at all, nor any step without buckets."""
    sizes = {"block_size": 16, "num_blocks": 64, "vocab_size": 9, "seed": 0}
    assert bucket_of(StepInputs.synthetic([1], [(0, 5)], **sizes), (1, 2, 4)) is None
    assert bucket_of(StepInputs.synthetic([], [], **sizes), (1, 2, 4)) is None
    assert bucket_of(StepInputs.synthetic([1], [], **sizes), ()) is None


def test_staged_tensors_hold_the_step_and_lie_at_fixed_places() -> None:
    """Every array arrives as it was, at addresses that 16 divides, the same for the same number of rows."""
    staging = Staging(64, 8, 20, CPU)
    sizes = {"block_size": 16, "num_blocks": 64, "vocab_size": 9}
    mixed = StepInputs.synthetic([40, 3, 17], [(0, 5), (18, 4)], seed=0, **sizes)
    put = staging.put(mixed)
    assert put.decodes is not None and put.chunks is not None and put.cu_seqlens is not None
    assert put.ids.tolist() == mixed.ids.tolist()
    assert put.decodes.seq_lens.tolist() == [41, 4, 18]
    assert put.chunks.seq_lens.tolist() == [5, 22]
    assert put.cu_seqlens.tolist() == [0, 5, 9]
    width = mixed.block_tables.shape[1]
    assert put.decodes.tables[:, :width].tolist() == mixed.block_tables[:3].tolist()
    assert put.chunks.tables[:, :width].tolist() == mixed.block_tables[3:].tolist()
    tensors = (put.ids, put.slots, put.decodes.tables, put.chunks.seq_lens, put.chunks.tables, put.cu_seqlens)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    places = [
        [t.data_ptr() for t in (p.ids, p.positions, p.slots, p.decodes.seq_lens, p.decodes.tables)]
        for p in (staging.put(StepInputs.synthetic(contexts, [], seed=1, **sizes)) for contexts in ([5] * 5, [150] * 5))
        if p.decodes is not None
    ]
    assert places[0] == places[1]


@pytest.mark.parametrize(("total", "parts"), [(0, 3), (7, 3), (6, 3), (0, 0), (10**7, 300)])
def test_spread_is_even_and_whole(total: int, parts: int) -> None:
    """The parts add up and differ by at most 1."""
    found = spread(total, parts)
    assert len(found) == parts
    assert found.sum() == total
    assert parts == 0 or found.max() - found.min() <= 1


# ---- replays and prompts

TINY = ModelSpec("tiny", "llama", 32, 1, 2, 1, 16, 48, 61, 64, dtype="float32")


def test_a_loaded_step_is_replayed_without_a_trace() -> None:
    """Each replay has its time, and the step's tokens afterwards are those of before."""
    runner = build_runner(
        TINY, device="cpu", num_blocks=20, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64
    )
    step = StepInputs.synthetic([5], [(3, 9)], block_size=16, num_blocks=20, vocab_size=61, seed=0)
    tokens, times = runner.step(step)
    assert len(tokens) == 2
    assert times.kernel_ns > 0
    runner.load(step)
    durations = runner.replay(3)
    assert len(durations) == 3
    assert min(durations) > 0
    assert runner.step(step)[0] == tokens


def test_random_prompts_are_the_requests_own() -> None:
    """Ids depend on seed and request alone, and stay within the vocabulary."""
    request, other = Request(7, 0, 500, 1), Request(8, 3, 500, 1)
    ids = RandomPrompts(50, seed=1).ids(request, {})
    assert len(ids) == 500
    assert set(ids) == set(range(50))
    assert np.array_equal(ids, RandomPrompts(50, seed=1).ids(request, {}))
    assert not np.array_equal(ids, RandomPrompts(50, seed=1).ids(other, {}))
    assert not np.array_equal(ids, RandomPrompts(50, seed=2).ids(request, {}))


def test_text_prompts_are_lines_in_turn(tmp_path: Path) -> None:
    """Lines are tokenised, repeated or cut to the request's length, and taken by request id."""
    tokenizers = pytest.importorskip("tokenizers", reason="text prompts need the model's tokenizer")
    words = tokenizers.models.WordLevel({"one": 0, "two": 1, "three": 2, "?": 3}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    texts = tmp_path / "texts.txt"
    texts.write_text("one two three\n\nthree one\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"tokenizer.json: no such file"):
        TextPrompts(texts, tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = TextPrompts(texts, tmp_path)
    assert prompts.ids(Request(0, 0, 5, 1), {}).tolist() == [0, 1, 2, 0, 1]
    assert prompts.ids(Request(3, 0, 1, 1), {}).tolist() == [2]
    prompts.check(3)
    with pytest.raises(ScenarioError, match="makes token 2, the model has 2"):
        prompts.check(2)
    texts.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ScenarioError, match="holds no text"):
        TextPrompts(texts, tmp_path)
    with pytest.raises(ScenarioError, match="cannot be read as text"):
        TextPrompts(tmp_path / "nowhere.txt", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"bad"', encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"tokenizer.json: is no tokenizer"):
        TextPrompts(texts, tmp_path)
