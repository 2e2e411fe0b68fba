"""vLLM with LMCache: timelines by hand of the numbered rules of `vllm_lmcache` and `kv/chunk_store.py` (the store).

Steps take 10 ns, 1 more a prompt token and 2 a decode; blocks have 4 tokens and chunks 8. Text 0 has 17 tokens, two
chunks and one more; text 1, of 28, puts it off a GPU of 7 blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from batchsim.kernel.engine_loop import SYNC
from batchsim.kernel.record import LOAD_WAITED, TIER_LOAD, TIER_STORE
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.chunk_store import ChunkStore
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.systems.vllm.lmcache_config import VllmLmcacheConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_lmcache import VllmLmcache
from batchsim.testing.life_sums import check_lives
from tests.plain.vllm_lmcache import NaiveLmcache, steps_of
from tests.support.random_cases import few_and_many
from tests.support.stepping import HostCost, LinearCost, Run, column, run
from tests.support.tier_lives import all_end_with_their_tokens, parts_of
from tests.support.whole_batches import BLOCK_SIZE, MAX_MODEL_LEN
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_host import rows
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_reuse import alike, sharing


class Kept(VllmLmcache):
    """Keeps the latest engine, to be looked at when it is through."""

    latest: Kept

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        Kept.latest = self

    def check_forgotten(self) -> None:
        """AssertionError if a chunk is pinned, or anything is left of a request."""
        self.store.check_unpinned()
        assert not (self._tracked or self._looked_up or self._works), "a request is not forgotten"


def config(**knobs: Any) -> VllmLmcacheConfig:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "async_scheduling": False}
    return VllmLmcacheConfig(**{**sizes, "cpu_chunks": 100, "chunk_size": 8, **knobs})


def lmcache(arrivals: list[Arrival], blocks: int = 7, **knobs: Any) -> Run:
    """A run, after it left the same records live, step by step and with leaps, all pins let go and all lives summed."""
    of = config(**knobs)
    setting: dict[str, Any] = {
        "blocks": blocks, "loop": of.traits.loop, "cost": HostCost() if of.async_scheduling else LinearCost()
    }  # fmt: skip
    done = run(Kept, of, arrivals, kv=BlockHashKV, **setting)
    Kept.latest.check_forgotten()
    for how in ("step", "leap"):
        other = run(Kept, of, arrivals, kv=BlockHashKV, how=how, **setting)
        Kept.latest.check_forgotten()
        for table in ("requests", "steps", "states", "lanes"):
            assert np.array_equal(getattr(done.records, table), getattr(other.records, table)), (how, table)
    check_lives(done.records)
    return done


def there_again(**knobs: Any) -> Run:
    """Text 0 at 0, text 1 at 100, text 0 again at 200."""
    return lmcache(alike("0:17->1 100:28->1 200:17->1", 17, 0, 17), **knobs)


def test_whole_chunks_of_a_prompt_are_stored_and_found_again() -> None:
    """Rules 1 and 2: of 17 tokens 16 are stored; the third has none on the GPU, loads both chunks, and computes a
    token."""
    done = there_again()
    assert rows(done, TIER_STORE) == [(0, 0, 16), (100, 1, 24)]
    assert rows(done, TIER_LOAD) == [(200, 2, 16)]
    assert done.items[2] == [(2, 1)]
    assert column(done, "cached_tokens") == [0, 0, 0]


def test_a_step_waits_for_its_loads_and_then_for_its_stores() -> None:
    """Rules 2 and 3: two chunks are stored in 1 + 2 × 5 ns behind 27 of work; they are loaded in 1 + 2 × 3 before
    11."""
    done = there_again(copy_ns=1, load_ns=3, store_ns=5)
    assert column(done, "first_token_ns") == [38, 154, 218]
    assert rows(done, LOAD_WAITED) == [(0, 0, 11), (100, 1, 16), (200, 2, 7)]
    assert parts_of(done.records, 2) == {"prefill": 11, "kv_load": 7}


def test_what_the_gpu_has_is_not_loaded() -> None:
    """Rule 1: On a GPU of 20 blocks all is in the prefix cache: nothing is loaded, nor stored anew."""
    done = lmcache(alike("0:17->1 100:17->1", 17, 17), blocks=20)
    assert rows(done, TIER_LOAD) == []
    assert rows(done, TIER_STORE) == [(0, 0, 16)]
    assert column(done, "cached_tokens") == [0, 16]


def test_what_the_host_has_beyond_the_gpu_is_loaded_in_whole_chunks() -> None:
    """Rule 2: a text of 24 tokens leaves the first block of text 0 on the GPU: 12 tokens more are found, and both
    chunks, of which the first is there in part, are copied in 2 × 3 ns."""
    done = lmcache(alike("0:17->1 100:24->1 200:17->1", 17, 0, 17), load_ns=3)
    assert rows(done, TIER_LOAD) == [(200, 2, 12)]
    assert rows(done, LOAD_WAITED)[-1] == (200, 2, 6)
    assert column(done, "cached_tokens") == [0, 0, 4]


def test_the_last_token_is_always_computed() -> None:
    """Rule 1: of 16 tokens, two chunks found, 15 count as computed, and both chunks are loaded."""
    done = lmcache(alike("0:17->1 100:28->1 200:16->1", 17, 0, 16))
    assert rows(done, TIER_LOAD) == [(200, 2, 15)]
    assert done.items[2] == [(2, 1)]


def test_chunks_are_stored_step_by_step() -> None:
    """Rule 3: with 12 tokens a step: a chunk with the first, the second with the next."""
    done = lmcache(alike("0:17->1", 17), max_num_batched_tokens=12)
    assert rows(done, TIER_STORE) == [(0, 0, 8), (22, 0, 8)]


def test_nothing_is_stored_once_a_step_had_a_single_token() -> None:
    """Rule 3: 15 tokens, and one of the prompt alone in the second step, with which the second chunk would be whole."""
    done = lmcache(alike("0:16->1", 16), max_num_batched_tokens=15)
    assert done.items == [[(0, 15)], [(0, 1)]]
    assert rows(done, TIER_STORE) == [(0, 0, 8)]


def test_answers_are_not_stored() -> None:
    """Rule 3: 5 + 8 tokens: no chunk is whole with the prompt, and none is stored as it fills."""
    assert rows(lmcache(alike("0:5->8", 5)), TIER_STORE) == []


def test_a_request_looked_up_keeps_its_chunks_until_it_is_admitted() -> None:
    """Rule 1: a host of 2 chunks holds text 0, of which the GPU loses all to the second. The third is looked up at 100
    and has no blocks before the second ends, at 147. Both places are pinned, so that the second's chunks find none;
    without the pins there would be nothing left for the third to load."""
    done = lmcache(alike("0:17->1 100:25->2 100:17->1", 17, 0, 17), cpu_chunks=2)
    assert rows(done, TIER_LOAD) == [(147, 2, 16)]
    late = lmcache(alike("0:17->1 100:25->2 101:17->1", 17, 0, 17), cpu_chunks=2)
    assert rows(late, TIER_LOAD) == []


def test_new_requests_store_before_running_ones() -> None:
    """Rule 4: with 12 tokens a step the first request, of 17, stores its second chunk with the step in which the second
    comes in and stores its only one. A host of one chunk keeps what is entered last, that of the running one."""
    arrivals = alike("0:17->1 1:8->1", 0, 0)
    done = lmcache(arrivals, cpu_chunks=1, max_num_batched_tokens=13)
    assert done.items[1] == [(0, 4), (1, 8)]
    assert rows(done, TIER_STORE) == [(0, 0, 8), (23, 1, 8), (23, 0, 8)]
    first, other = (BlockKeys(arrival.request, 8) for arrival in arrivals)
    store = Kept.latest.store
    assert (len(store), store.find(other, 1)) == (1, 0)
    assert store.store(first, 1, 2) == 1
    assert len(store) == 1


def test_pins_of_loads_go_before_all_stores_of_a_step() -> None:
    """Rule 4: a host of 2 chunks holds text 0, of which a request loads both; another one, which comes first among the
    new, stores a chunk of its own in the same step, in the place of one of these."""
    arrivals = alike("0:17->1 100:28->1 400:9->1 400:17->1", 17, 0, 0, 17)
    arrivals[1] = alike("0:17->1 100:5->19", 17, 0)[1]  # puts text 0 off the GPU, and stores nothing
    done = lmcache(arrivals, blocks=8, cpu_chunks=2)
    assert rows(done, TIER_LOAD)[-1][1] == 3
    assert Kept.latest.store.find(BlockKeys(arrivals[2].request, 8), 1) == 1


def test_a_working_set_that_the_gpu_does_not_hold_gains_what_prefill_takes_longer_than_loading() -> None:
    """12 documents of 57 tokens in turn, 1.5 times what the GPU holds: each later reading is sooner by its hit tokens x
    (prefill - transfer), within 10 %; with room on the GPU for all, no reading is."""
    arrivals = [replace(one, request=replace(one.request, tokens=document(i % 12))) for i, one in enumerate(readings())]
    plain_of = VllmConfig(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=False)
    for blocks, tokens in ((120, 56), (190, 0)):
        hosted = lmcache(arrivals, blocks=blocks, load_ns=2)
        plain = run(Vllm, plain_of, arrivals, blocks=blocks, kv=BlockHashKV)
        gain = (plain.records.requests["first_token_ns"] - hosted.records.requests["first_token_ns"])[12:]
        assert {request for _, request, _ in rows(hosted, TIER_LOAD)} == (set(range(12, 36)) if tokens else set())
        assert gain == pytest.approx(np.full(24, tokens * (1 - 2 / 8)), rel=0.1)


def readings() -> list[Arrival]:
    return alike(" ".join(f"{200 * i}:57->1" for i in range(36)), *[0] * 36)


def document(number: int) -> TokenIds:
    return TokenIds.of([(prompt_stream(1000 + number), 0, 57)])


def test_one_that_was_preempted_while_it_decoded_stores_no_more() -> None:
    """Rule 3: both decode until blocks are short; the second comes back and computes 13 tokens, of which a chunk more
    would be whole: it is not stored."""
    done = lmcache(alike("0:7->12 0:7->12", 7, 0), blocks=7)
    assert done.preemptions() != []
    assert rows(done, TIER_STORE) == []


def test_a_host_that_holds_no_chunk_is_none() -> None:
    with pytest.raises(ValueError, match="a tier of 0 chunks holds nothing: give it at least 1"):
        ChunkStore(0)


def test_what_is_found_again_goes_last_chunk_first_and_what_is_stored_first_chunk_first() -> None:
    """Rules 1 and 2 of the store: of 3 chunks just stored the first is given up; of 2 found again the second."""
    one, other = (keys_of(number) for number in range(2))
    store = ChunkStore(3)
    assert store.store(one, 0, 3) == 3
    assert store.store(other, 0, 1) == 1
    assert store.find(one, 3) == 0
    store = ChunkStore(3)
    assert store.store(one, 0, 2) == 2
    assert store.find(one, 2) == 2
    store.unpin(one, 2)
    assert store.store(other, 0, 2) == 2
    assert store.find(one, 2) == 1
    store.unpin(one, 1)
    store.check_unpinned()


def test_pinned_chunks_are_not_given_up_and_the_rest_finds_no_room() -> None:
    """Rules 1 and 2 of the store."""
    one, other = (keys_of(number) for number in range(2))
    store = ChunkStore(2)
    assert store.store(one, 0, 1) == 1
    assert store.find(one, 1) == 1
    assert store.store(other, 0, 2) == 1
    assert (store.find(other, 2), len(store)) == (1, 2)
    with pytest.raises(AssertionError, match="still pinned"):
        store.check_unpinned()


def test_a_chunk_that_is_there_needs_a_place_until_it_is_entered() -> None:
    """Rule 2 of the store: Stored again beside a full host, it costs the oldest chunk."""
    one, other = (keys_of(number) for number in range(2))
    store = ChunkStore(2)
    store.store(other, 0, 1)
    store.store(one, 0, 1)
    assert store.store(one, 0, 1) == 1
    assert (len(store), store.find(other, 1), store.find(one, 1)) == (1, 0, 1)


def keys_of(number: int) -> BlockKeys:
    return BlockKeys(Sequence(Request(number, 0, 64, 1)).request, 8)


def test_without_a_chunk_in_common_records_are_those_of_an_engine_without() -> None:
    """Copies that take no time: prompts of one chunk or less change nothing."""
    arrivals = alike("0:7->5 3:6->9 20:5->2", 7, 6, 5)
    done = lmcache(arrivals, blocks=20)
    alone = run(
        Vllm, VllmConfig(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=False), arrivals, blocks=20,
        kv=BlockHashKV,
    )  # fmt: skip
    assert done.records.steps.tobytes() == alone.records.steps.tobytes()
    assert done.records.requests.tobytes() == alone.records.requests.tobytes()


KNOBS = {
    "cpu_chunks": st.integers(1, 6),
    "chunk_size": st.sampled_from([4, 8]),
    "max_num_batched_tokens": st.sampled_from([5, 9, 30]),
    "max_num_seqs": st.sampled_from([2, 4]),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "copy_ns": st.sampled_from([0, 4]),
    "load_ns": st.sampled_from([0, 7]),
    "store_ns": st.sampled_from([0, 3]),
}


CASES = (sharing(), st.integers(9, 18), st.fixed_dictionaries(KNOBS))


def compared(arrivals: list[Arrival], blocks: int, knobs: dict[str, Any]) -> None:
    """Step by step the same starts, tokens, pauses, free blocks and times of copies."""
    of = config(**knobs)
    done = run(Kept, of, arrivals, blocks=blocks, kv=BlockHashKV, loop=SYNC)
    engine = NaiveLmcache(of, blocks, BLOCK_SIZE, MAX_MODEL_LEN)

    def step_ns(work: int) -> int:
        copies = [(engine.loaded, of.load_ns), (engine.stored, of.store_ns)]
        return 10 + work + sum(of.copy_ns + number * ns for number, ns in copies if number)

    log = [(row.start_ns, sorted(row.items), row.preempted, row.free) for row in done.log]
    assert log == steps_of(engine, arrivals, step_ns)


test_the_steps_are_those_of_the_plain_loops, test_they_are_so_in_many_more_cases = few_and_many(
    compared, *CASES, few=100, many=2000
)


def conserved(arrivals: list[Arrival], blocks: int, knobs: dict[str, Any], async_scheduling: bool) -> None:
    """Live, step by step and with leaps the same records; every request ends with its tokens, no chunk stays pinned,
    and the parts of each life sum to it."""
    done = lmcache(arrivals, blocks, **knobs, async_scheduling=async_scheduling)
    all_end_with_their_tokens(done.records.requests, arrivals)


MORE_CASES = (*CASES, st.booleans())
test_every_way_of_driving_leaves_the_same_records, test_they_do_in_many_more_cases = few_and_many(
    conserved, *MORE_CASES, few=40, many=1000
)


def test_one_that_is_cancelled_lets_go_of_its_chunks() -> None:
    """Looked up while it waits for blocks, and given up at 150: a fourth stores what it likes."""
    arrivals = alike("0:17->1 100:24->9 120:17->1c150 300:17->1", 17, 0, 17, 0)
    done = lmcache(arrivals, cpu_chunks=2)
    assert rows(done, TIER_LOAD) == []
