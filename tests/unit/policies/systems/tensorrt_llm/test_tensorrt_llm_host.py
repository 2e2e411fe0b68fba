"""TensorRT-LLM's host cache: timelines by hand of the numbered rules of `tensorrt_llm_host` and `kv/reuse_host.py` (the
blocks).

Steps take 10 ns, 1 more a prompt token and 2 a decode; blocks have 4 tokens. Text 0 of 8 tokens fills 2 blocks;
prompts of other texts put these off a GPU of 4 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError, SchedulerStalled
from batchsim.kernel.engine_loop import OVERLAP, SYNC
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import LOAD_WAITED, TIER_LOAD, TIER_STORE
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Sequence
from batchsim.kv.reuse_host import HostReuseKV
from batchsim.kv.reuse_tree import ReuseTreeKV
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm import TensorrtLlm
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_host import TensorrtLlmWithHost
from batchsim.testing.life_sums import check_lives
from tests.plain.systems import Step
from tests.plain.tensorrt_llm import EngineFailsError
from tests.plain.tensorrt_llm_host import HostPool, HostWaiting
from tests.support.random_cases import few_and_many
from tests.support.stepping import HostCost, LinearCost, Run, run
from tests.support.tier_lives import all_end_with_their_tokens, parts_of
from tests.support.whole_batches import BLOCK_SIZE, times
from tests.unit.policies.systems.tensorrt_llm.test_tensorrt_llm_reuse import CAPACITY, CHUNKING, alike, cached, sharing


@dataclass(frozen=True)
class Host:
    """A host of `blocks` blocks, to which a block takes `store_ns`, and back `load_ns`; each way `fixed_ns` a step."""

    blocks: int
    load_ns: int = 0
    store_ns: int = 0
    fixed_ns: int = 0

    def kv(self, blocks: int, block_size: int, swap_blocks: int = 0) -> HostReuseKV:
        assert not swap_blocks
        links = OffloadLink(self.fixed_ns, self.load_ns), OffloadLink(self.fixed_ns, self.store_ns)
        return HostReuseKV(blocks, block_size, self.blocks, *links)


def hosted(arrivals: list[Arrival], host: Host, blocks: int = 4, **knobs: Any) -> Run:
    """A run, after it left the same records live, step by step and with leaps, and all lives summed."""
    config = TensorrtLlmConfig(**{"backend": "tensorrt", **knobs})
    ahead = config.backend == "pytorch" and not config.disable_overlap_scheduler
    setting: dict[str, Any] = {"loop": OVERLAP, "cost": HostCost()} if ahead else {"loop": SYNC, "cost": LinearCost()}
    done = run(TensorrtLlmWithHost, config, arrivals, blocks=blocks, kv=host.kv, **setting)
    for how in ("step", "leap"):
        other = run(TensorrtLlmWithHost, config, arrivals, blocks=blocks, kv=host.kv, how=how, **setting)
        for table in ("requests", "steps", "states"):
            assert np.array_equal(getattr(done.records, table), getattr(other.records, table)), (how, table)
    check_lives(done.records)
    return done


def rows(done: Run, what: int) -> list[tuple[int, int, int]]:
    """(ns, request, tokens or ns) of each remark."""
    states = done.records.states
    remarks = states[states["state"] == what]
    return [(int(row["time_ns"]), int(row["request_id"]), int(row["blocker"])) for row in remarks]


def again(host: Host, **more: Any) -> Run:
    """Text 0 at 0, another of 3 blocks at 100, text 0 and a token at 200."""
    return hosted(alike("0:8->1 100:9->1 200:9->1", 8, 0, 8), host, **more)


def test_what_another_prompt_needs_the_room_of_goes_to_the_host_and_comes_back() -> None:
    """Rules 2 and 3 of the blocks: the second takes the two empty blocks and the last of text 0, which goes to the
    host. The third finds the other one on the GPU and that on the host; without a host it finds one alone."""
    done = again(Host(4))
    assert cached(done) == [0, 0, 8]
    assert done.items[2] == [(2, 1)]
    assert rows(done, TIER_STORE)[0] == (100, 1, 4)
    assert rows(done, TIER_LOAD) == [(200, 2, 4)]
    alone = run(TensorrtLlm, TensorrtLlmConfig(backend="tensorrt"), alike("0:8->1 100:9->1 200:9->1", 8, 0, 8),
                blocks=4, kv=ReuseTreeKV)  # fmt: skip
    assert cached(alone) == [0, 0, 4]


def test_a_step_waits_for_what_comes_and_goes_each_way_at_once() -> None:
    """Rule 3: of 9 tokens 8 are found: 11 ns of work at 200. One block comes back in 5 + 7 ns, and the room for it and
    for the third block is that of the second text, of which 2 blocks go to the host in 5 + 2 × 3: the step waits for
    12."""
    done = again(Host(4, load_ns=7, store_ns=3, fixed_ns=5))
    assert rows(done, TIER_STORE)[1:] == [(200, 2, 8)]
    assert rows(done, LOAD_WAITED) == [(100, 1, 8), (200, 2, 12)]
    assert times(done.records, "last_token_ns") == [(18,), (127,), (223,)]
    assert parts_of(done.records, 2) == {"prefill": 11, "kv_load": 12}


def test_the_slower_way_decides() -> None:
    """Rule 3: as above with stores of 30 ns: two of them take 65, and the load is over long before."""
    done = again(Host(4, load_ns=7, store_ns=30, fixed_ns=5))
    assert rows(done, LOAD_WAITED)[-1] == (200, 2, 65)


def test_blocks_that_hold_nothing_are_not_copied() -> None:
    """Rule 2 of the blocks: a GPU of 9 blocks has room for all three: none moves, and records are those of an engine
    without a host."""
    arrivals = alike("0:8->1 100:9->1 200:9->1", 8, 0, 8)
    done = hosted(arrivals, Host(4, 9, 9, 9), blocks=9)
    alone = run(TensorrtLlm, TensorrtLlmConfig(backend="tensorrt"), arrivals, blocks=9, kv=ReuseTreeKV)
    assert not rows(done, TIER_STORE) and not rows(done, LOAD_WAITED)
    assert done.records.steps.tobytes() == alone.records.steps.tobytes()
    assert done.records.requests.tobytes() == alone.records.requests.tobytes()


def test_decodes_that_grow_send_blocks_to_the_host() -> None:
    """Rule 2: the second prompt, of 4 tokens, and its decode at 114 take the two empty blocks; its decode at 162 takes
    the last of text 0."""
    done = hosted(alike("0:8->1 100:4->9", 8, 0), Host(4, store_ns=5))
    assert rows(done, TIER_STORE) == [(162, 1, 4)]
    assert rows(done, LOAD_WAITED) == [(162, 1, 5)]
    assert parts_of(done.records, 1)["kv_load"] == 5


def test_neither_stage_knows_what_is_on_the_host() -> None:
    """Rule 1: the fourth needs 3 blocks, of which it would find 2; while the third has 2 of 4, it waits."""
    done = hosted(alike("0:8->1 100:9->1 200:5->3 205:9->1", 8, 0, 0, 8), Host(4))
    assert times(done.records, "scheduled_ns")[3] == times(done.records, "last_token_ns")[2]


def test_a_full_host_gives_up_its_oldest_and_what_is_below_it() -> None:
    """Rule 2 of the blocks: a host of one block: text 0's first takes the place of its second, as another text needs
    all 4 blocks."""
    done = hosted(alike("0:8->1 100:13->1 200:9->1", 8, 0, 8), Host(1))
    assert cached(done) == [0, 0, 4]
    assert rows(done, TIER_STORE)[0] == (100, 1, 8)


def test_a_block_is_in_one_place() -> None:
    """Rule 1 of the blocks: text 0's second block comes back to the GPU for the third request, and the host has it no
    longer: as a fourth needs the room it is copied there once more, and comes back for a fifth."""
    host = Host(8)
    done = hosted(alike("0:8->1 100:9->1 200:9->1 300:13->1 400:9->1", 8, 0, 8, 0, 8), host)
    assert cached(done) == [0, 0, 8, 0, 8]
    stored = sum(tokens for _, _, tokens in rows(done, TIER_STORE))
    loaded = sum(tokens for _, _, tokens in rows(done, TIER_LOAD))
    assert (stored, loaded) == (4 + 8 + 16 + 12, 4 + 8)


def test_a_working_set_that_the_gpu_does_not_hold_gains_what_prefill_takes_longer_than_loading() -> None:
    """12 documents of 57 tokens in turn, 1.5 times what the GPU holds: each later reading is sooner by its hit tokens x
    (prefill - transfer), within 10 %; with room on the GPU for all, no reading is."""
    arrivals = alike(" ".join(f"{200 * i}:57->1" for i in range(36)), *[0] * 36)
    for i, one in enumerate(arrivals):
        tokens = TokenIds.of([(prompt_stream(1000 + i % 12), 0, 57)])
        arrivals[i] = replace(one, request=replace(one.request, tokens=tokens))
    for blocks, hit in ((120, 56), (190, 0)):
        tiered = hosted(arrivals, Host(400, load_ns=2), blocks=blocks)
        plain = run(TensorrtLlm, TensorrtLlmConfig(backend="tensorrt"), arrivals, blocks=blocks, kv=ReuseTreeKV)
        gain = (plain.records.requests["first_token_ns"] - tiered.records.requests["first_token_ns"])[12:]
        assert {tokens for _, _, tokens in rows(tiered, TIER_LOAD)} == ({hit} if hit else set())
        assert gain == pytest.approx(np.full(24, hit * (1 - 2 / 4)), rel=0.1)


def manager(host: int, blocks: int = 4) -> tuple[HostReuseKV, list[Sequence]]:
    """An empty pool, two sequences of 9 tokens that begin with text 0, and one of another text, of 15."""
    kv = Host(host).kv(blocks, BLOCK_SIZE)
    return kv, [Sequence(a.request) for a in alike("0:9->1 0:9->1 0:15->1", 8, 8, 0)]


def test_a_prompt_may_lose_its_last_block_to_the_room_for_its_first() -> None:
    """Rule 4: both blocks of text 0 are on the host, which has no third. The room for the first is that of another
    text's block, which takes the place of the second, the oldest there."""
    kv, (one, two, other) = manager(2)
    assert kv.admit(one, 9, 0)
    kv.end(one)
    assert kv.admit(other, 15, 0)
    assert (kv.num_stored, kv.lookup(two)) == (2, 8)
    kv.end(other)
    assert kv.admit(two, 9, 8)
    kv.check()
    assert (kv.found_tokens, kv.num_loaded, kv.loaded_tokens) == (4, 1, 4)
    assert kv.held(two) == 3


def test_with_its_only_block_claimed_a_host_takes_none() -> None:
    """Rule 2: what gives room for a load from a host of one block leaves the tree."""
    kv, (one, two, other) = manager(1)
    assert kv.admit(one, 9, 0)
    kv.end(one)
    first = Sequence(alike("0:5->1", 4)[0].request)
    assert kv.admit(other, 15, 0)
    assert (kv.num_stored, kv.lookup(two)) == (2, 4)
    kv.end(other)
    assert kv.admit(first, 5, 4)
    kv.check()
    assert (kv.num_stored, kv.num_loaded, kv.cached_blocks) == (3, 1, 4)


def test_growth_in_place_is_growth_into_blocks_that_hold_nothing() -> None:
    """Of 4 blocks one was never used, the next holds a token of text 0 that is not in the tree, the third KV."""
    kv, (one, *_) = manager(4)
    assert kv.admit(one, 9, 0)
    kv.end(one)
    assert [kv.grows_in_place(count) for count in range(5)] == [True, True, True, False, False]


def test_a_host_of_no_blocks_is_none() -> None:
    with pytest.raises(ValueError, match="a tier of 0 blocks holds nothing: give it at least 1"):
        Host(0).kv(4, 4)


def test_a_host_cache_needs_its_manager() -> None:
    with pytest.raises(ScenarioError, match="a host cache needs a HostReuseKV"):
        TensorrtLlmWithHost(TensorrtLlmConfig(), PolicyContext(ReuseTreeKV(4, 4), 64))


HOSTS = st.builds(Host, st.integers(1, 12), st.sampled_from([0, 7]), st.sampled_from([0, 3]), st.sampled_from([0, 5]))


CASES = (
    sharing(),
    CAPACITY,
    st.sampled_from([2, 4, 100]),
    st.sampled_from([5, 9, 21, 36]),
    CHUNKING,
    st.sampled_from(["tensorrt", "pytorch"]),
    st.integers(9, 18),
    HOSTS,
)


def compared(
    arrivals: list[Arrival],
    capacity: Any,
    size: int,
    tokens: int,
    chunking: Any,
    backend: Any,
    blocks: int,
    host: Host,
) -> None:
    """Step by step the same starts, cached tokens, waits, pauses and free blocks as the rules told as loops."""
    config = TensorrtLlmConfig(
        capacity, size, tokens if chunking else max(tokens, 16), chunking is not None, chunking, backend=backend
    )
    pool = HostPool(blocks, BLOCK_SIZE, host.blocks)
    try:
        steps = HostWaiting(config, arrivals, pool, host.fixed_ns, host.load_ns, host.store_ns).run()
    except EngineFailsError:
        with pytest.raises(SchedulerStalled, match="was paused with"):
            run(TensorrtLlmWithHost, config, arrivals, blocks=blocks, kv=host.kv)
        return
    log = run(TensorrtLlmWithHost, config, arrivals, blocks=blocks, kv=host.kv).log
    found: list[Step] = [(row.start_ns, row.items, row.preempted, row.free) for row in log]
    assert found == steps


test_with_a_host_cache_the_steps_are_those_of_the_plain_loops, test_they_are_so_in_many_more_cases = few_and_many(
    compared, *CASES, few=100, many=2000
)


def conserved(arrivals: list[Arrival], capacity: Any, blocks: int, host: Host, ahead: bool) -> None:
    """Live, step by step and with leaps the same records; every request ends with its tokens, the pool comes back
    whole, and the parts of each life sum to it."""
    knobs = {"backend": "pytorch", "disable_overlap_scheduler": not ahead, "enable_chunked_prefill": True}
    done = hosted(arrivals, host, blocks, capacity_scheduler_policy=capacity, max_num_tokens=36, **knobs)
    all_end_with_their_tokens(done.records.requests, arrivals)


MORE_CASES = (sharing(), CAPACITY, st.integers(9, 18), HOSTS, st.booleans())
test_with_a_host_cache_every_way_of_driving_leaves_the_same_records, test_they_do_in_many_more_cases = few_and_many(
    conserved, *MORE_CASES, few=40, many=1000
)
