"""vLLM with LMCache layer by layer (`use_layerwise`): rule 5 of `vllm_lmcache` by hand, and against plain loops.

Steps take 40 ns, 4 more a prompt token and 8 a decode; blocks have 4 tokens and chunks 8, and a step 4 layers. Text 0
has 17 tokens, two chunks and one more; text 1, of 28, puts it off a GPU of 7 blocks.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from batchsim.kernel.batch import Batch
from batchsim.kernel.engine_loop import SYNC
from batchsim.kernel.record import LOAD_WAITED, TIER_LOAD, TIER_STORE
from batchsim.kernel.types import Arrival
from batchsim.kv.block_keys import BlockKeys
from batchsim.kv.chunk_store import ChunkStore
from batchsim.kv.prefix_cache import BlockHashKV
from tests.plain.vllm_lmcache import NaiveLayered, layered_ns, steps_of
from tests.support.random_cases import few_and_many
from tests.support.stepping import LinearCost, Run, column, run
from tests.support.tier_lives import parts_of
from tests.support.whole_batches import BLOCK_SIZE, MAX_MODEL_LEN
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_host import rows
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_reuse import alike, sharing
from tests.unit.policies.systems.vllm.test_vllm_lmcache import Kept, config, conserved, keys_of, lmcache


class FourTimes(LinearCost):
    """Times that four layers share without a rest."""

    def step_ns(self, batch: Batch) -> int:
        return 4 * super().step_ns(batch)


def layered(arrivals: list[Arrival], blocks: int = 7, **knobs: Any) -> Run:
    """A run, of which all pins are let go."""
    of = config(**{"num_layers": 4, **knobs})
    done = run(Kept, of, arrivals, blocks=blocks, kv=BlockHashKV, loop=SYNC, cost=FourTimes())
    Kept.latest.check_forgotten()
    return done


def there_again(**knobs: Any) -> Run:
    """Text 0 at 0, text 1 at 300, text 0 again at 700."""
    return layered(alike("0:17->1 300:28->1 700:17->1", 17, 0, 17), **knobs)


def test_a_fast_store_costs_its_last_layer() -> None:
    """Two chunks of 8 ns beside 108 ns of work: the last layer's 4 ns come behind it."""
    done = there_again(store_ns=8)
    assert column(done, "first_token_ns")[0] == 108 + 4
    assert rows(done, LOAD_WAITED)[0] == (0, 0, 4)
    assert rows(done, TIER_STORE) == [(0, 0, 16), (300, 1, 24)]


def test_a_slow_store_begins_behind_the_first_layer() -> None:
    """Two chunks of 100 ns begin with the end of the first layer, at 27, and the step ends with them."""
    assert column(there_again(store_ns=100), "first_token_ns")[0] == 27 + 200


def test_a_fast_load_costs_its_first_layer() -> None:
    """Two chunks of 8 ns beside 44 ns of work for the token that is left: the first layer waits for 4 ns."""
    done = there_again(load_ns=8)
    assert rows(done, TIER_LOAD) == [(700, 2, 16)]
    assert rows(done, LOAD_WAITED)[-1] == (700, 2, 4)
    assert parts_of(done.records, 2) == {"prefill": 44, "kv_load": 4}


def test_a_slow_load_leaves_the_last_layer_behind_it() -> None:
    """Two chunks of 100 ns, then a layer of 11; a fixed part of 5 comes once."""
    assert column(there_again(load_ns=100), "first_token_ns")[2] == 700 + 200 + 11
    assert column(there_again(load_ns=100, copy_ns=5), "first_token_ns")[2] == 700 + 205 + 11


def test_a_step_may_load_and_store() -> None:
    """Of 29 tokens 4 are on the GPU, 12 are loaded in two chunks, and one more is stored, in 12 ns: 92 ns of work, 4 ns
    for the first layer's load, and 3 for the last one's store. With a store of 200 ns: behind the first layer, which
    ends at 4 + 23."""
    arrivals = alike("0:17->1 500:28->1 2000:29->1", 17, 0, 16)
    for store_ns, took_ns in ((12, 4 + 92 + 3), (200, 4 + 23 + 200)):
        done = layered(arrivals, blocks=8, load_ns=8, store_ns=store_ns)
        assert rows(done, TIER_LOAD) == [(2000, 2, 12)]
        assert rows(done, TIER_STORE)[-1] == (2000, 2, 8)
        assert column(done, "first_token_ns")[2] == 2000 + took_ns


def test_what_is_there_is_not_stored_again_and_needs_no_place() -> None:
    """Rule 3 of the store: beside a full host a chunk that is there costs none of the others, nor does one that two
    requests store."""
    one, other = (keys_of(number) for number in range(2))
    store = ChunkStore(2)
    store.store(other, 0, 1)
    store.store(one, 0, 1)
    assert store.reserve(one, 0, 1) == []
    assert (store.find(other, 1), store.find(one, 1)) == (1, 1)
    store.unpin(other, 1)
    store.unpin(one, 1)
    first, second = store.reserve(one, 0, 2), store.reserve(one, 1, 2)
    assert first == second == [one.key(1)]
    store.enter(first)
    store.enter(second)
    assert (len(store), store.find(one, 2)) == (1, 0)  # the first chunk has given up its place to the second one's
    store.check_unpinned()


def test_places_are_taken_while_the_step_has_its_chunks_pinned() -> None:
    """A host of 2 chunks holds text 0. A request loads both, and a third chunk of its own finds no place, and is not
    copied; stored whole, it takes the place of one of them."""
    arrivals = alike("0:17->1 300:28->1 700:29->1", 17, 0, 16)
    arrivals[1] = alike("0:17->1 300:5->19", 17, 0)[1]  # puts text 0 off the GPU, and stores nothing
    done = layered(arrivals, blocks=8, cpu_chunks=2, store_ns=8)
    assert rows(done, TIER_LOAD)[-1][1] == 2
    assert rows(done, TIER_STORE) == [(0, 0, 16)]
    whole = lmcache(arrivals, blocks=8, cpu_chunks=2)
    assert rows(whole, TIER_STORE)[-1][1:] == (2, 8)


def test_a_chunk_is_given_up_with_all_its_layers() -> None:
    """Rule 2 of the store: of 3 chunks just stored the first one goes, as a whole: the two others stay, and are not
    found without it."""
    one, other = BlockKeys(alike("0:64->1", 0)[0].request, 8), keys_of(7)
    store = ChunkStore(3)
    store.enter(store.reserve(one, 0, 3))
    store.enter(store.reserve(other, 0, 1))
    assert len(store) == 3
    assert (store.find(one, 3), store.find(other, 1)) == (0, 1)


KNOBS = {
    "cpu_chunks": st.integers(1, 6),
    "chunk_size": st.sampled_from([4, 8]),
    "max_num_batched_tokens": st.sampled_from([5, 9, 30]),
    "max_num_seqs": st.sampled_from([2, 4]),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "num_layers": st.sampled_from([1, 2, 4]),
    "load_ns": st.sampled_from([0, 4, 40, 200]),
    "store_ns": st.sampled_from([0, 4, 40, 200]),
}
CASES = (sharing(), st.integers(9, 18), st.fixed_dictionaries(KNOBS))


def compared(arrivals: list[Arrival], blocks: int, knobs: dict[str, Any]) -> None:
    """Step by step the same starts, tokens, pauses, free blocks and times of copies."""
    of = config(**knobs)
    done = layered(arrivals, blocks, **knobs)
    engine = NaiveLayered(of, blocks, BLOCK_SIZE, MAX_MODEL_LEN)

    def step_ns(work: int) -> int:
        copies = engine.loaded * of.load_ns, engine.stored * of.store_ns
        return layered_ns(4 * (10 + work), *copies, of.num_layers)

    log = [(row.start_ns, sorted(row.items), row.preempted, row.free) for row in done.log]
    assert log == steps_of(engine, arrivals, step_ns)


test_the_steps_are_those_of_the_plain_loops, test_they_are_so_in_many_more_cases = few_and_many(
    compared, *CASES, few=100, many=2000
)


MORE_CASES = (*CASES, st.booleans())
test_every_way_of_driving_leaves_the_same_records, test_they_do_in_many_more_cases = few_and_many(
    conserved, *MORE_CASES, few=40, many=1000
)
