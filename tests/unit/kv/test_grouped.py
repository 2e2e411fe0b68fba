"""Groups of layers that take blocks from one pool: what each kind holds and when it gives back.

Source of the rules: vllm/v1/core/single_type_kv_cache_manager.py, kv_cache_coordinator.py and kv_cache_manager.py of
the 0.33.0 wheel.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.kernel.kv_blocks import never_fits
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import DecodeGroup, Request, Sequence
from batchsim.kv.choice import new_grouped_kv
from batchsim.kv.grouped import GroupedBlocks, GroupedKV
from batchsim.kv.grouped_cache import GroupedHashKV
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.plain.vllm import Naive
from tests.plain.vllm_groups import NaiveGroups
from tests.unit.policies.systems.vllm.test_naive_vllm_groups import layout_of

FULL, WINDOW, STATE = KvGroup("full", 4), KvGroup("window", 4, 8), KvGroup("state", 64, states=1)
LONG = 64  # tokens of a sequence at most


def sequence(prompt: int, cap: int = 50, id_: int = 0) -> Sequence:
    return Sequence(Request(id_, 0, prompt, cap))


def pool(*groups: KvGroup, blocks: int = 100, in_flight: int = LONG) -> GroupedKV:
    return GroupedKV(KvLayout(groups), blocks, LONG, in_flight)


def decode(kv: GroupedBlocks, seq: Sequence, steps: int) -> list[int]:
    """Blocks that `seq`, whose prompt is done, holds after each of `steps` growths."""
    group, held = DecodeGroup(kv.block_size), []
    seq.settled_output_tokens += 1
    group.join(seq)
    for _ in range(steps):
        assert kv.grow_group(group)
        held.append(kv.held(seq))
        group.advance()
        kv.check()
    return held


def test_a_sequence_holds_the_sum_over_its_groups() -> None:
    """10 tokens: 3 blocks of full attention, 3 of each window (none has slid out), and the state."""
    kv, seq = pool(FULL, WINDOW, WINDOW, STATE), sequence(10)
    assert kv.allocate(seq, 10)
    assert (kv.held(seq), kv.num_free, kv.room(seq)) == (10, 90, 10)
    kv.free(seq)
    assert (kv.held(seq), kv.num_free) == (0, 100)


def test_windows_let_go_before_each_growth() -> None:
    """`SlidingWindowManager.get_num_skipped_tokens`: of 11 processed tokens the first 4 are out of a window of 8, and
    so a block goes back with the growth to token 12, not with that to token 11; the next block with token 16."""
    kv, seq = pool(WINDOW), sequence(8)
    assert kv.allocate(seq, 8)
    seq.settled_computed_tokens = 8
    #                            token 9  10 11 12 13 14 15 16 17 18
    assert decode(kv, seq, 10) == [3, 3, 3, 2, 3, 3, 3, 2, 3, 3]


def test_a_long_chunk_keeps_its_window_until_it_is_computed() -> None:
    """A prompt of 40 tokens in one chunk holds 10 blocks; the first growth behind it frees all but the window's."""
    kv, seq = pool(WINDOW), sequence(40)
    assert kv.allocate(seq, 40) and kv.held(seq) == 10
    seq.settled_computed_tokens = 40
    assert decode(kv, seq, 1) == [3]  # tokens 33 to 41; before them the first 33 are out


def test_tokens_in_flight_are_not_processed() -> None:
    """`KVCacheManager.allocate_slots` frees by the tokens that no step in flight computes: with all in flight none."""
    kv, seq = pool(WINDOW), sequence(40)
    kv.in_flight = lambda _: 40
    assert kv.allocate(seq, 40)
    seq.settled_computed_tokens = 40
    assert decode(kv, seq, 1) == [11]


def test_states_are_one_block_each_whatever_the_tokens() -> None:
    """`MambaSpec.max_memory_usage_bytes` without a prefix cache: one state, and one for each draft token."""
    kv = pool(STATE, KvGroup("state", 64, states=4))
    for tokens in (1, 40):
        seq = sequence(tokens)
        assert kv.allocate(seq, tokens)
        assert kv.held(seq) == 1 + 4


def test_short_blocks_change_nothing_but_what_slid_out() -> None:
    """What slid out of a window stays free where the growth fails, as in vLLM; a sequence that held nothing holds
    nothing."""
    kv, seq, other = pool(WINDOW, blocks=10), sequence(40), sequence(1)
    assert kv.allocate(seq, 40) and not kv.allocate(other, 1)
    assert kv.held(other) == 0
    seq.settled_computed_tokens = 40
    assert not kv.allocate(seq, 40 + 4 * 10)
    assert (kv.held(seq), kv.num_free) == (2, 8)
    kv.check()


def test_a_group_that_might_be_short_of_blocks_is_left_alone() -> None:
    """Growth of a group counts on no block that it gives back itself: the engine then goes one by one."""
    kv, seq = pool(WINDOW, blocks=3), sequence(12)
    assert kv.allocate(seq, 12)
    seq.settled_computed_tokens, seq.settled_output_tokens = 12, 1
    group = DecodeGroup(kv.block_size)
    group.join(seq)
    assert not kv.grow_group(group) and kv.held(seq) == 3
    assert kv.allocate(seq, 13) and kv.held(seq) == 3
    kv.check()


def test_admission_asks_for_what_a_sequence_needs_at_a_time() -> None:
    """`SlidingWindowSpec.max_admission_blocks_per_request`: of 60 tokens a window of 8 needs, with 16 in flight,
    ceil((8 - 1 + 16) / 4) + 1 = 7 blocks; of 10 tokens no more than 3."""
    kv = pool(FULL, WINDOW, STATE, in_flight=16)
    assert kv.blocks_for(60) == 15 + 7 + 1
    assert kv.blocks_for(10) == 3 + 3 + 1
    assert kv.blocks_for(0) == 0


def test_what_never_fits_is_told_by_the_most_that_it_needs() -> None:
    kv = pool(FULL, WINDOW, STATE, blocks=22, in_flight=16)
    refusal = never_fits(kv, sequence(40, 21), LONG)
    assert refusal is not None and refusal.detail == "23 KV blocks needed for 60 tokens, 22 in the pool"
    assert never_fits(pool(FULL, WINDOW, STATE, blocks=23, in_flight=16), sequence(40, 21), LONG) is None


def test_blocks_kept_for_another_engine_stay_taken_until_it_has_them() -> None:
    kv, seq = pool(FULL, WINDOW), sequence(8)
    assert kv.allocate(seq, 8)
    kv.pin(seq)
    kv.free(seq)
    assert kv.num_free == 96
    kv.unpin(seq)
    assert kv.num_free == 100


def test_there_is_no_swap() -> None:
    kv, seq = pool(FULL), sequence(4)
    assert kv.allocate(seq, 4)
    assert kv.swap_out(seq) is None and kv.swap_in(seq) is None


# ---- which manager goes with a policy


@pytest.mark.parametrize(
    ("groups", "caches", "said"),
    [
        ((FULL, STATE), True, r"^prefix caching of states that are kept nowhere .* enable_prefix_caching: false\.$"),
        (
            (FULL, KvGroup("state", 8, states=2, aligned=True)),
            True,
            r"^prefix caching of states beside blocks of other sizes \(4, 8\) .* enable_prefix_caching: false\.$",
        ),
        ((KvGroup("state", 8, states=2),), False, r"^a group of 2 states is of 1 draft tokens, .* Write states: 1\.$"),
    ],
)
def test_what_is_not_simulated_is_refused_in_one_line(groups: tuple[KvGroup, ...], caches: bool, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        new_grouped_kv(VllmConfig(enable_prefix_caching=caches), KvLayout(groups), 100, LONG)


def test_tokens_in_flight_are_those_of_all_batches() -> None:
    """`max_in_flight_tokens`: the tokens of a step, once for each batch that is scheduled before results are there."""
    for ahead, stages, batches in ((False, 1, 1), (True, 1, 2), (False, 4, 4), (True, 4, 5)):
        config = VllmConfig(async_scheduling=ahead, enable_prefix_caching=False, max_num_batched_tokens=2048)
        kv = new_grouped_kv(config, KvLayout((FULL,)), 100, 10_000, stages)
        assert kv.in_flight_tokens == 2048 * batches


# ---- against a naive manager


class Beside:
    """Random operations on a manager and on the naive one, whose answers must be equal, in turn."""

    def __init__(self, seed: int) -> None:
        self.pick = pick = random.Random(seed)
        caches = pick.random() < 0.6
        config = VllmConfig(
            enable_prefix_caching=caches,
            async_scheduling=False,
            max_num_seqs=8,
            max_num_batched_tokens=pick.choice([8, LONG]),
            scheduler_reserve_full_isl=caches and pick.random() < 0.5,
        )
        layout, blocks = layout_of(pick, caches=caches), pick.choice([10, 30, 100])
        self.naive = NaiveGroups(config, blocks, layout, LONG)
        self.kv: Any = new_grouped_kv(config, layout, blocks, LONG)
        self.cache = self.kv if isinstance(self.kv, GroupedHashKV) else None
        self.group, self.pairs, self.serial = DecodeGroup(self.kv.block_size), dict[Sequence, Naive](), 0
        self.waiting: list[tuple[Sequence, Naive]] = []

    def step(self) -> None:
        self.naive.cached_now = set()
        if self.cache is not None:
            self.cache.begin_step()
        self.pick.choice([self.admit, self.admit, self.go_on, self.decode, self.decode, self.give_up])()
        assert self.kv.num_free == len(self.naive.queue)
        for seq, naive in self.pairs.items():
            assert self.kv.held(seq) == self.naive.held_of(naive)
        self.kv.check()

    def admit(self) -> None:
        """The head that was given up comes again, or a new sequence comes, which may begin as others do."""
        if not self.waiting:
            prompt, id_ = self.pick.choice([3, 9, 16, 33, 50]), self.serial
            shared = min(self.pick.choice([0, 4, 16, 32, 50]), prompt)
            stream = self.pick.choice([prompt_stream(0), output_stream(max(id_ - 1, 0))])
            parts = [(stream, 0, shared), (prompt_stream(9 + id_), 0, prompt - shared)]
            request = Request(id_, 0, prompt, 12, tokens=TokenIds.of([part for part in parts if part[2]]))
            self.serial += 1
            self.waiting.append((Sequence(request), Naive(request, 12)))
        seq, naive = self.waiting[0]
        hits = self.naive.lookup(naive) if self.cache is not None else []
        start = self.cache.lookup(seq) if self.cache is not None else 0
        assert start == self.naive.start_of(hits)
        n = self.pick.randint(1, min(seq.num_tokens - start, self.kv.in_flight_tokens))
        if self.cache is not None:
            assert self.cache.junction(seq) == self.naive.junctions.get(naive, 0)
            whole = seq.num_tokens if self.naive.config.scheduler_reserve_full_isl else 0
            has_room = self.cache.admit(seq, start + n, start, 0, whole)
        else:
            has_room = self.kv.allocate(seq, n)
        assert has_room == self.naive.allocate(naive, start, n, hits, admission=True)
        if has_room:
            self.waiting.pop(0)
            seq.start_from_cache(start)
            seq.order, self.pairs[seq] = self.serial, naive
            self.computed(seq, naive, n)

    def computed(self, seq: Sequence, naive: Naive, n: int) -> None:
        seq.settled_computed_tokens += n
        naive.computed = seq.settled_computed_tokens
        if naive.computed == len(naive.tokens):
            seq.settled_output_tokens += 1
            self.made(naive)
            self.group.join(seq)

    @staticmethod
    def made(naive: Naive) -> None:
        naive.tokens.append((output_stream(naive.request.id), naive.outputs))
        naive.outputs += 1

    def go_on(self) -> None:
        """A prompt that is not done goes on."""
        partial = [seq for seq in self.pairs if seq.group is None]
        if partial:
            seq = self.pick.choice(partial)
            naive, at = self.pairs[seq], seq.settled_computed_tokens
            n = self.pick.randint(1, min(seq.num_tokens - at, self.kv.in_flight_tokens))
            has_room = self.kv.allocate(seq, at + n)
            assert has_room == self.naive.allocate(naive, at, n, [], admission=False)
            if has_room:
                self.computed(seq, naive, n)

    def decode(self) -> None:
        """A step of all that decode, or of those for which there are blocks, one by one."""
        members = sorted(self.group.members, key=lambda seq: seq.order)
        grown = self.kv.grow_group(self.group)
        for seq in members:
            naive, at = self.pairs[seq], seq.num_computed_tokens
            has_room = grown or self.kv.allocate(seq, at + 1)
            assert has_room == self.naive.allocate(naive, at, 1, [], admission=False)
            if has_room:
                naive.computed += 1
                self.made(naive)
            else:
                self.give_up(seq)
        self.group.advance()
        for seq in [seq for seq in members if seq.num_tokens >= LONG - 1]:
            self.end(seq)

    def give_up(self, seq: Sequence | None = None) -> None:
        """A sequence ends, or is preempted and comes again."""
        if self.pairs:
            seq = seq or self.pick.choice(list(self.pairs))
            naive = self.end(seq)
            if self.pick.random() < 0.6:
                seq.reset_computed()
                naive.computed = 0
                self.waiting.append((seq, naive))

    def end(self, seq: Sequence) -> Naive:
        naive = self.pairs.pop(seq)
        self.kv.free(seq)
        self.naive.free(naive)
        if seq.group is not None:
            self.group.leave(seq)
        return naive


def compare(seed: int, steps: int) -> None:
    beside = Beside(seed)
    for number in range(steps):
        try:
            beside.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {number}, {beside.kv.layout}") from error
    while beside.pairs:
        beside.end(next(iter(beside.pairs)))
    assert beside.kv.num_free == beside.kv.num_blocks


def test_random_operations_equal_a_naive_manager() -> None:
    """Blocks held and free, what is found, the junction and every yes and no are equal; no block is lost."""
    for seed in range(60):
        compare(seed, 40)


@pytest.mark.slow
def test_many_more_random_operations_equal_a_naive_manager() -> None:
    """Fifty times as many."""
    for seed in range(1000, 4000):
        compare(seed, 40)
