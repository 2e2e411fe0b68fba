"""The two KV managers keep the books alike; the one with tables never gives a block twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV, TableKV, never_fits
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.types import DecodeGroup, Request, Sequence
from batchsim.kv.choice import MAX_IDS, new_kv
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.kv.radix_cache import RadixKV
from batchsim.kv.reuse_tree import ReuseTreeKV
from tests.support.random_cases import random_cases


def sequence(id: int = 0, prompt: int = 10, cap: int = 5) -> Sequence:
    return Sequence(Request(id, 0, prompt, cap))


@pytest.fixture(params=[CountingKV, TableKV])
def kv(request: pytest.FixtureRequest) -> CountingKV | TableKV:
    return request.param(num_blocks=4, block_size=4, num_swap_blocks=2)


@pytest.mark.parametrize("manager", [CountingKV, TableKV, BlockHashKV, RadixKV, ReuseTreeKV])
def test_there_is_no_swap_unless_asked_for(manager: type) -> None:
    """A pool of 3 blocks has 3 free ones and none in swap."""
    pool = manager(3, 4)
    assert (pool.num_free, pool.num_blocks, pool.num_swap_free, pool.num_swap_blocks) == (3, 3, 0, 0)


def test_allocation_is_all_or_nothing(kv: CountingKV | TableKV) -> None:
    """A sequence grows to whole blocks; where they do not suffice nothing changes."""
    a, b = sequence(0), sequence(1)
    assert kv.allocate(a, 5)
    assert (kv.held(a), kv.num_free) == (2, 2)
    assert kv.allocate(a, 8)
    assert (kv.held(a), kv.num_free) == (2, 2)
    assert not kv.allocate(b, 9)
    assert (kv.held(b), kv.num_free) == (0, 2)
    assert kv.allocate(b, 8)
    assert kv.num_free == 0
    kv.free(a)
    assert (kv.held(a), kv.num_free) == (0, 2)


def test_who_holds_nothing_has_empty_tables() -> None:
    """Of blocks and of swap slots."""
    pool = TableKV(3, 4)
    assert (pool.table(sequence()), pool.swap_table(sequence()), pool.held(sequence())) == ([], [], 0)


@pytest.mark.parametrize("manager", [CountingKV, TableKV, BlockHashKV, RadixKV, ReuseTreeKV])
def test_who_holds_nothing_gives_nothing_back(manager: type) -> None:
    """As one that is given up while it waits."""
    pool, seq = manager(3, 4), sequence()
    pool.free(seq)
    assert (pool.num_free, pool.num_swap_free, pool.held(seq)) == (3, 0, 0)


def test_allocating_less_gives_nothing_back(kv: CountingKV | TableKV) -> None:
    """What a sequence reserved it keeps until it is freed."""
    seq = sequence()
    kv.allocate(seq, 16)
    assert kv.allocate(seq, 1)
    assert (kv.held(seq), kv.num_free) == (4, 0)


def test_swapping_moves_the_blocks(kv: CountingKV | TableKV) -> None:
    """Out and in return the number of blocks moved; None, and nothing changed, where the other side is full."""
    seq, other = sequence(0), sequence(1)
    kv.allocate(seq, 8)
    assert seq.num_blocks == 2
    assert kv.swap_out(seq) == 2
    assert (kv.held(seq), seq.num_blocks, kv.num_free, kv.num_swap_free) == (0, 0, 4, 0)
    kv.allocate(other, 12)
    assert kv.swap_in(seq) is None
    assert kv.swap_out(other) is None
    assert (kv.num_free, kv.num_swap_free) == (1, 0)
    kv.free(other)
    assert other.num_blocks == 0
    kv.allocate(other, 8)
    assert kv.swap_in(seq) == 2
    assert (kv.held(seq), seq.num_blocks, kv.num_free, kv.num_swap_free) == (2, 2, 0, 2)


def test_freeing_a_swapped_sequence_empties_its_swap(kv: CountingKV | TableKV) -> None:
    """A cancelled request leaves nothing in host memory."""
    seq = sequence()
    kv.allocate(seq, 8)
    kv.swap_out(seq)
    kv.free(seq)
    assert (kv.num_free, kv.num_swap_free) == (4, 2)


@pytest.mark.parametrize(("blocks", "size", "swap"), [(0, 4, 0), (4, 0, 0), (4, 4, -1)])
@pytest.mark.parametrize("manager", [CountingKV, TableKV])
def test_an_impossible_pool_is_refused(manager: type, blocks: int, size: int, swap: int) -> None:
    """No blocks, no tokens a block, or negative swap draw one line with the numbers."""
    with pytest.raises(ValueError, match=f"{blocks} KV blocks of {size} tokens with {swap} swap blocks"):
        manager(blocks, size, swap)


def test_never_fits_counts_all_but_the_last_token() -> None:
    """A request fits alone if prompt + output - 1 tokens, cut at the model's length, have room in the pool."""
    kv = CountingKV(4, 4)
    assert never_fits(kv, sequence(prompt=10, cap=7), 100) is None
    refusal = never_fits(kv, sequence(prompt=10, cap=8), 100)
    assert refusal is not None
    assert (refusal.kind, refusal.reason) == ("rejected", "never_fits")
    assert refusal.detail == "5 KV blocks needed for 17 tokens, 4 in the pool"
    assert never_fits(kv, sequence(prompt=10, cap=8), 17) is None
    assert never_fits(kv, sequence(prompt=10, cap=4), 100, drafts=2) is None
    refusal = never_fits(kv, sequence(prompt=10, cap=4), 100, drafts=3)
    assert refusal is not None and refusal.detail == "5 KV blocks needed for 17 tokens with drafts, 4 in the pool"


class BothManagers(RuleBasedStateMachine):
    """The same calls to both managers, each with its own sequences and decode group."""

    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 4), swap=st.integers(0, 8))
    def start(self, blocks: int, size: int, swap: int) -> None:
        self.managers = (CountingKV(blocks, size, swap), TableKV(blocks, size, swap))
        self.groups = (DecodeGroup(size), DecodeGroup(size))
        self.pairs: list[tuple[Sequence, Sequence]] = []
        self.swapped: list[tuple[Sequence, Sequence]] = []

    def both(self, method: str, pair: tuple[Sequence, Sequence], *rest: int) -> object:
        counting, table = (getattr(kv, method)(seq, *rest) for kv, seq in zip(self.managers, pair, strict=True))
        assert counting == table
        return counting

    def decoding(self) -> list[tuple[Sequence, Sequence]]:
        return [pair for pair in self.pairs if pair[0].group is not None]

    def settled(self) -> list[tuple[Sequence, Sequence]]:
        return [pair for pair in self.pairs if pair[0].group is None]

    @rule(prompt=st.integers(1, 20), reserve=st.integers(0, 8))
    def admit(self, prompt: int, reserve: int) -> None:
        pair = (sequence(len(self.pairs), prompt), sequence(len(self.pairs), prompt))
        if self.both("allocate", pair, prompt + reserve):
            for seq in pair:
                seq.settled_computed_tokens, seq.settled_output_tokens = prompt, 1
            self.pairs.append(pair)

    @precondition(lambda self: self.settled())
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        for seq, group in zip(data.draw(st.sampled_from(self.settled())), self.groups, strict=True):
            group.join(seq)

    @precondition(lambda self: self.decoding() and all(self.covered(seq) for seq, _ in self.decoding()))
    @rule()
    def step(self) -> None:
        grown = [kv.grow_group(group) for kv, group in zip(self.managers, self.groups, strict=True)]
        assert grown[0] == grown[1]
        if grown[0]:
            for group in self.groups:
                group.advance()

    def covered(self, seq: Sequence) -> bool:
        """Whether a member holds just the blocks of its tokens, as the group's growth presumes."""
        kv = self.managers[0]
        return kv.held(seq) == kv.blocks_for(seq.num_computed_tokens)

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), free=st.booleans())
    def leave(self, data: st.DataObject, free: bool) -> None:
        pair = data.draw(st.sampled_from(self.decoding()))
        if free:
            self.both("free", pair)
            self.pairs.remove(pair)
        else:
            self.both("allocate", pair, pair[0].num_computed_tokens)
        for seq, group in zip(pair, self.groups, strict=True):
            group.leave(seq)

    @precondition(lambda self: self.settled())
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.settled()))
        if self.both("swap_out", pair) is not None:
            self.pairs.remove(pair)
            self.swapped.append(pair)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), free=st.booleans())
    def swap_in(self, data: st.DataObject, free: bool) -> None:
        pair = data.draw(st.sampled_from(self.swapped))
        if free:
            self.both("free", pair)
            self.swapped.remove(pair)
        elif self.both("swap_in", pair) is not None:
            self.swapped.remove(pair)
            self.pairs.append(pair)

    @invariant()
    def equal_and_conserved(self) -> None:
        if not hasattr(self, "managers"):
            return
        counting, table = self.managers
        assert (counting.num_free, counting.num_swap_free) == (table.num_free, table.num_swap_free)
        ids = [block for _, seq in self.pairs for block in table.table(seq)]
        slots = [slot for _, seq in self.swapped for slot in table.swap_table(seq)]
        assert len(set(ids)) == len(ids) == table.num_blocks - table.num_free
        assert len(set(slots)) == len(slots) == table.num_swap_blocks - table.num_swap_free
        assert set(ids) <= set(range(table.num_blocks))
        for mine, other in self.pairs:
            assert counting.held(mine) == table.held(other)


TestBothManagers = BothManagers.TestCase
TestBothManagers.settings = random_cases(60, stateful_step_count=25)


@dataclass(frozen=True)
class Caching(PolicyConfig):
    """A policy's config, as far as the choice of memory goes."""

    prefix_cache: Any

    @property
    def traits(self) -> Traits:
        return Traits(prefix_cache=self.prefix_cache)


@pytest.mark.parametrize(
    ("config", "ids", "manager"),
    [
        (PolicyConfig(), False, CountingKV),
        (Caching(""), False, CountingKV),
        (Caching(""), True, TableKV),
        (Caching("blocks"), False, BlockHashKV),
        (Caching("blocks"), True, BlockHashKV),
        (Caching("radix"), False, RadixKV),
        (Caching("reuse"), False, ReuseTreeKV),
    ],
)
def test_the_config_says_which_memory_it_needs(config: PolicyConfig, ids: bool, manager: type) -> None:
    """Plain counts or tables without caching, and one class of its own for each kind of caching."""
    kv = new_kv(config, 7, 4, 2, ids=ids)
    assert type(kv) is manager
    assert (kv.num_free, kv.block_size, kv.num_swap_free) == (7, 4, 2)


def test_a_pool_of_as_many_blocks_as_ids_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has no swap unless asked for; with one block more even an executor without a cache is refused."""
    monkeypatch.setattr("batchsim.kv.choice.MAX_IDS", 8)
    for config in (Caching("blocks"), Caching("")):
        kv = new_kv(config, 8, 4, ids=True)
        assert (kv.num_free, kv.num_swap_free) == (8, 0)
        with pytest.raises(ScenarioError, match="kv: 9 blocks of 4 tokens"):
            new_kv(config, 9, 4, ids=True)


def test_an_unknown_kind_of_caching_is_refused() -> None:
    """A misspelt kind is not taken for none."""
    with pytest.raises(ScenarioError, match="Caching: prefix_cache 'hash' is none"):
        new_kv(Caching("hash"), 7, 4, ids=False)


@pytest.mark.parametrize("kind", ["radix", "reuse"])
def test_a_pool_of_more_blocks_than_ids_can_be_kept_of_is_refused(kind: str) -> None:
    """Blocks of trees have ids; counted ones may be as many as one likes."""
    with pytest.raises(ScenarioError, match=r"kv: 16,777,217 blocks of 1 tokens, .* at most 16,777,216 are possible"):
        new_kv(Caching(kind), MAX_IDS + 1, 1, ids=False)
    for counted in ("", "blocks"):
        assert new_kv(Caching(counted), MAX_IDS + 1, 1, ids=False).num_free == MAX_IDS + 1


@pytest.mark.parametrize("manager", [CountingKV, TableKV, BlockHashKV])
def test_a_group_that_grows_by_many_steps_holds_the_blocks_of_one_after_the_other(manager: type) -> None:
    """10 steps of members at 4, 6 and 7 tokens in blocks of 4: 8 more blocks, the same ones where they have ids."""
    held: list[list[Any]] = []
    for at_once in (False, True):
        pool, group, members = (
            manager(20, 4),
            DecodeGroup(4),
            [sequence(i, prompt) for i, prompt in enumerate((4, 6, 7))],
        )
        for seq in members:
            assert pool.allocate(seq, seq.num_tokens)
            seq.settled_computed_tokens, seq.settled_output_tokens = seq.num_tokens, 1
            group.join(seq)
        if at_once:
            assert group.blocks_due_in_turn(1) == [len(group.members_due(1 + step)) for step in range(4)]
            due = group.members_due_over(10)
            pool.grow_by(due)
            group.advance_by(10)
            assert group.members_due_over(10, -10) == due
        else:
            for _ in range(10):
                assert pool.grow_group(group)
                group.advance()
        tables = [] if isinstance(pool, CountingKV) else [pool.table(seq) for seq in members]
        held.append([pool.num_free, [seq.num_computed_tokens for seq in members], group.total_context_tokens, tables])
    assert held[0] == held[1]
    assert held[0][:3] == [7, [14, 16, 17], 47]


@pytest.mark.parametrize("manager", [CountingKV, TableKV, BlockHashKV, RadixKV, ReuseTreeKV])
@pytest.mark.parametrize("decodes", [False, True])
def test_pinned_blocks_stay_taken_through_free_until_unpinned(manager: type, decodes: bool) -> None:
    """Out of a group that grew too: 9 tokens in 3 blocks of 4; in whichever order the two are asked for."""
    for freed_first in (True, False):
        pool, seq = manager(4, 4), sequence(prompt=8)
        if isinstance(pool, BlockHashKV | ReuseTreeKV):
            pool.lookup(seq)
        assert pool.allocate(seq, 8)
        seq.settled_computed_tokens, seq.settled_output_tokens = 8, 1
        group = DecodeGroup(4)
        group.join(seq)
        assert pool.grow_group(group)
        group.advance()
        if not decodes:
            assert pool.allocate(seq, 9)
            group.leave(seq)
        pool.pin(seq)
        if not freed_first:
            pool.unpin(seq)
            assert pool.num_free == 1
        pool.free(seq)
        if decodes:
            group.leave(seq)
        assert (pool.num_free, pool.held(seq)) == ((1, 3) if freed_first else (4, 0))
        if freed_first:
            pool.unpin(seq)
            assert (pool.num_free, pool.held(seq)) == (4, 0)
        if not isinstance(pool, CountingKV | TableKV):
            pool.check()


def test_blocks_are_given_back_from_the_end(kv: CountingKV | TableKV) -> None:
    """Of three blocks two: the next sequence gets them in their order."""
    first, second = sequence(0), sequence(1)
    assert kv.allocate(first, 12)
    before = [*kv.table(first)] if isinstance(kv, TableKV) else []
    kv.give_back(first, 2)
    assert (kv.held(first), first.num_blocks, kv.num_free) == (1, 1, 3)
    assert kv.allocate(second, 8)
    if isinstance(kv, TableKV):
        assert [*kv.table(first), *kv.table(second)] == before
    assert kv.num_free == 1
