"""SGLang's cache of embeddings: what a prefill batch encodes, what is kept and what is driven out."""

from __future__ import annotations

from batchsim.kernel.batch import Batch
from batchsim.kernel.protocols import ItemsContext, PolicyContext
from batchsim.kernel.types import Item, Request, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.embedding_cache import EmbeddingCache
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_items import SglangWithItems


def sequence(*items: Item, computed: int = 0) -> Sequence:
    seq = Sequence(Request(0, 0, 1000, 1, items=items))
    seq.settled_computed_tokens = computed
    return seq


def test_items_of_a_chunk_are_encoded_whole_and_once() -> None:
    """Those that overlap it, of one content once in the batch, and not again in the next chunk."""
    cache = EmbeddingCache(1000, 2)
    first, second = sequence(Item(2, 0, 10), Item(4, 20, 10), Item(6, 40, 10)), sequence(Item(4, 5, 10), Item(8, 15, 3))
    assert cache.encode([(first, 25), (second, 16)]) == [(first, (0, 1)), (second, (1,))]
    first.settled_computed_tokens = 25
    assert cache.encode([(first, 20)]) == [(first, (2,))]
    first.settled_computed_tokens = 45
    assert cache.encode([(first, 100)]) == []


def test_the_least_recently_used_is_driven_out() -> None:
    """A third item of 10 tokens takes the room of the one that was not used since."""
    cache = EmbeddingCache(40, 2)
    a, b, c = (Item(2 * k, 0, 10) for k in (1, 2, 3))
    for item in (a, b, a, c):
        cache.encode([(sequence(item), 50)])
    assert cache.encode([(again := sequence(a), 50)]) == []
    assert cache.encode([(again := sequence(b), 50)]) == [(again, (0,))]


def test_an_item_larger_than_the_cache_is_never_kept_and_drives_out_none() -> None:
    """It is encoded for each of its chunks; what was there stays."""
    cache = EmbeddingCache(40, 2)
    small, large = Item(2, 0, 10), Item(4, 0, 30)
    cache.encode([(sequence(small), 50)])
    for computed in (0, 10, 20):
        seq = sequence(large, computed=computed)
        assert cache.encode([(seq, 10)]) == [(seq, (0,))]
    assert cache.encode([(sequence(small), 50)]) == []


def test_a_step_encodes_the_items_of_its_prompts() -> None:
    """In the first chunk of 8 tokens the first item, in the next the second; the decode behind them none."""
    config = SglangConfig(chunked_prefill_size=8, vlm_cache_size_mb=1, disable_overlap_schedule=True)
    scheduler = SglangWithItems(config, PolicyContext(RadixKV(100, 1), 1000, items=ItemsContext(6, embedding_bytes=2)))
    seq = Sequence(Request(0, 0, 15, 4, items=(Item(2, 1, 6), Item(4, 9, 6))))
    scheduler.add(seq, 0)
    steps: list[list[tuple[Sequence, tuple[int, ...]]]] = []
    for now_ns in range(2):
        work = scheduler.schedule(now_ns, drain=False)
        assert isinstance(work, Batch) and work.chunks
        steps.append([*work.encoded])
        seq.settled_computed_tokens += work.chunks[0][1]
        scheduler.complete(work, [], now_ns)
    assert steps == [[(seq, (0,))], [(seq, (1,))]]
