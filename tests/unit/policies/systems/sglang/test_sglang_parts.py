"""SGLang's config, queues, budgets and what makes way for a prompt, each by itself; whole runs: test_sglang."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import IDLE, Batch
from batchsim.kernel.kv_blocks import CountingKV, KVBlockManager
from batchsim.kernel.policy_config import Device
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.lora_batch import LoraBatch
from batchsim.policies.systems.sglang.prefill_adder import PrefillAdder
from batchsim.policies.systems.sglang.running_batch import RunningBatch
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.token_budget import (
    CLIP_MAX_NEW_TOKENS,
    Completion,
    PrefillBudget,
    RemainingOutput,
)
from batchsim.policies.systems.sglang.waiting_queue import ByPrefix, ByPriority, Fcfs, Waiting
from tests.support.sglang_runs import sharing, timeline
from tests.support.stepping import run
from tests.support.whole_batches import blocked, requests

Prompt = tuple[tuple[int, int], ...]
PRIORITIES: dict[str, Any] = {"enable_priority_scheduling": True, "chunked_prefill_size": -1}

# ---- the config


@pytest.mark.parametrize(
    ("knobs", "cache", "preempts", "mixes"),
    [
        ({}, "radix", False, False),
        ({"disable_radix_cache": True}, "", False, False),
        ({"enable_priority_scheduling": True}, "radix", True, False),
        ({"enable_priority_scheduling": True, "disable_priority_preemption": True}, "radix", False, False),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": 1}, "radix", False, True),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": 0}, "radix", False, False),
    ],
)
def test_what_a_config_comes_to(knobs: dict[str, Any], cache: str, preempts: bool, mixes: bool) -> None:
    """The cache it needs, whether it preempts for priorities, whether decodes ride along: not without chunks."""
    config = SglangConfig(**knobs)
    assert (config.traits.prefix_cache, config.preempts, config.mixes) == (cache, preempts, mixes)


def test_without_the_radix_cache_nothing_is_found() -> None:
    """Whatever the pool could do: both prompts are computed whole."""
    config = SglangConfig(disable_radix_cache=True, chunked_prefill_size=-1)
    done = run(Sglang, config, sharing("0:8->1 100:8->1", ((0, 8),), ((0, 8),)), kv=RadixKV)
    assert done.items == [[(0, 8)], [(1, 8)]]


# ---- slots


@pytest.mark.parametrize(
    ("tokens", "max_model_len", "slots"),
    [(100_000, 1_000_000, 2048), (16_004, 4_000, 2048), (16_400, 4_000, 2099), (20_000, 100, 4096)],
)
def test_how_many_may_run_unless_told(tokens: int, max_model_len: int, slots: int) -> None:
    """512 times the KV tokens by max_model_len, rounded down; at least 2,048 and at most 4,096."""
    config = SglangConfig(disable_radix_cache=True, chunked_prefill_size=-1)
    scheduler = Sglang(config, PolicyContext(CountingKV(tokens, 1), max_model_len))
    for i in range(slots + 1):
        scheduler.add(Sequence(Request(i, 0, 1, 1)), 0)
    batch = scheduler.schedule(0, drain=True)
    assert isinstance(batch, Batch)
    assert len(batch.chunks) == slots


def test_one_may_run_with_2_kv_tokens() -> None:
    """Half of them; with 1 token nobody could."""
    config = SglangConfig(disable_radix_cache=True)
    assert Sglang(config, PolicyContext(CountingKV(2, 1), 100)).schedule(0, drain=True) is IDLE
    with pytest.raises(ScenarioError, match="max_running_requests is 0 with 1 KV tokens"):
        Sglang(config, PolicyContext(CountingKV(1, 1), 100))


def test_no_more_may_run_than_half_the_kv_tokens() -> None:
    """Of 9 tokens a fifth request would find enough, but 4 are as many as may run."""
    done = timeline("0:1->2 " * 5, page=1, tokens=9, prefill_max_requests=1, schedule_conservativeness=0.0)
    assert done.items[3:5] == [[(3, 1)], [(0, 1), (1, 1), (2, 1), (3, 1)]]
    assert blocked(done.records)[-1] == (33, 4, "no_slot")


# ---- queues


def sequences(text: str, *prompts: Prompt) -> list[Sequence]:
    return [Sequence(a.request) for a in (sharing(text, *prompts) if prompts else requests(text))]


def knowing(blocks: int, page: int, *prompts: Prompt) -> RadixKV:
    """A pool whose tree holds the tokens of `prompts`, the oldest first, which nobody uses."""
    kv = RadixKV(blocks, page)
    for prompt in prompts:
        (known,) = sequences(f"0:{sum(n for _, n in prompt)}->1", prompt)
        assert kv.allocate(known, known.num_tokens)
        known.settled_computed_tokens = known.num_tokens
        kv.insert(known)
        kv.free(known)
    return kv


def arranged(kv: RadixKV, *prompts: Prompt, shortest: bool = False) -> ByPrefix:
    """A queue of requests with these prompts, in order."""
    queue = ByPrefix(kv, shortest=shortest)
    for seq in sequences(" ".join(f"0:{sum(n for _, n in prompt)}->1" for prompt in prompts), *prompts):
        queue.push(seq)
    queue.arrange()
    return queue


def order(queue: ByPrefix) -> list[int]:
    return [seq.request.id for seq in queue.first(9)]


@pytest.mark.parametrize("kind", ["fcfs", "priority", "prefix"])
def test_the_first_of_a_queue(kind: str) -> None:
    """Two of three, in order, and all where more are asked for; they stay in it until they are taken out."""
    kv = RadixKV(100, 4)
    kinds: dict[str, Waiting] = {
        "fcfs": Fcfs(kv),
        "priority": ByPriority(kv, low_first=True),
        "prefix": ByPrefix(kv, shortest=False),
    }
    queue = kinds[kind]
    for seq in sequences("0:4->1p1 0:4->1p1 0:4->1p1"):
        queue.push(seq)
    assert [[seq.request.id for seq in queue.first(num)] for num in (2, 4)] == [[0, 1], [0, 1, 2]]
    assert [queue.pop().request.id for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("cached", "expected"), [(32, [0, 2, 1]), (36, [0, 1, 2])])
def test_with_more_than_32_cached_tokens_nobody_waits_for_another(cached: int, expected: list[int]) -> None:
    """Of two that share 40 tokens the second lets a third one pass if 32 of them are cached, not if 36 are."""
    assert order(arranged(knowing(100, 4, ((0, cached),)), ((0, 40),), ((0, 40),), ((1, 40),))) == expected


def test_those_that_wait_for_others_come_last_however_short() -> None:
    """1 shares 40 tokens with 0, and waits behind the 50 of 2."""
    prompts: list[Prompt] = [((0, 40),), ((0, 40),), ((1, 50),)]
    assert order(arranged(RadixKV(100, 4), *prompts, shortest=True)) == [0, 2, 1]


def test_those_that_wait_for_others_keep_their_order() -> None:
    """Of text 0 16 tokens are cached, so that 2 goes before 0; 1 and 3, which wait for them, are as they came."""
    prompts: list[Prompt] = [((text, 40),) for text in (1, 1, 0, 0)]
    assert order(arranged(knowing(100, 4, ((0, 16),)), *prompts)) == [2, 0, 1, 3]


@pytest.mark.parametrize(("common", "expected"), [(32, [0, 2, 1]), (31, [0, 1, 2])])
def test_a_common_prefix_is_seen_whatever_follows_it(common: int, expected: list[int]) -> None:
    """The second has fewer tokens of the first's text: 32 of them make it wait, 31 do not."""
    kv = RadixKV(100, 4)
    assert order(arranged(kv, ((0, 40), (1, 4)), ((0, common), (2, 44 - common)), ((3, 44),))) == expected


def test_a_long_queue_is_used_like_another_though_not_sorted() -> None:
    """Text 0 is the older one until the head of 129 is looked at; then text 1 goes."""
    kv = knowing(4, 8, ((0, 8),), ((1, 8),))
    queue = arranged(kv, ((0, 8),), *[((i, 8),) for i in range(2, 130)])
    assert len(queue) == 129
    kv.make_room(3)
    found = sequences("0:8->1 0:8->1", ((0, 8),), ((1, 8),))
    assert [kv.match(seq, 8) for seq in found] == [8, 0]


@pytest.mark.parametrize(("passes", "cached"), [(32, [0, 8]), (33, [8, 0])])
def test_every_32nd_pass_uses_what_waits(passes: int, cached: list[int]) -> None:
    """Text 1, used after the first pass, is the younger one until text 0, which waits, is used by the 33rd."""
    kv = knowing(4, 8, ((0, 8),), ((1, 8),))
    waits, *found = sequences("0:8->1 0:8->1 0:8->1", ((0, 8),), ((0, 8),), ((1, 8),))
    queue = Fcfs(kv)
    queue.push(waits)
    queue.arrange()
    kv.match(found[1], 8)
    for _ in range(passes - 1):
        queue.arrange()
    kv.make_room(3)
    assert [kv.match(seq, 8) for seq in found] == cached


@pytest.mark.parametrize(
    ("remaining", "budget", "reserved"), [(20, 16, 8), (20, 12, 8), (20, 11, 4), (4, 16, 0), (5, 16, 8)]
)
def test_what_a_chunk_leaves_to_shorter_ones(remaining: int, budget: int, reserved: int) -> None:
    """Two of 4 tokens and one of 12 wait: each gets its pages while it is shorter and a page is left to the chunk."""
    queue = arranged(RadixKV(100, 4), ((0, 4),), ((1, 4),), ((2, 12),), shortest=True)
    assert queue.reserved_for_shorter(remaining, budget, 4) == reserved


def test_of_what_is_cached_one_token_is_computed_all_the_same() -> None:
    """A prompt of 4 cached tokens takes 1 of a chunk."""
    queue = arranged(knowing(100, 1, ((0, 4),)), ((0, 4),), shortest=True)
    assert queue.reserved_for_shorter(20, 16, 1) == 1


# ---- budgets


def test_a_charge_takes_pages_of_every_budget_and_a_page_more_of_the_memory() -> None:
    """5 tokens are 8 in pages of 4; of 40, less 2 of decodes that ride along and 3 of growth, 7 are kept for output."""
    budget = PrefillBudget(CountingKV(10, 4), 100, 50, 3.0, 2)
    assert (budget.left_total, budget.left_now, budget.left_input, budget.left_chunk) == (35, 38, 98, 48)
    budget.charge(5, 7)
    assert (budget.left_total, budget.left_now, budget.left_input, budget.left_chunk) == (16, 26, 90, 40)


@pytest.mark.parametrize(("growth", "riding", "used_up"), [(0.0, 0, False), (1.0, 0, True), (0.0, 1, True)])
def test_memory_is_used_up_at_0(growth: float, riding: int, used_up: bool) -> None:
    """One token is free: it may be expected to be needed, or a decode that rides along needs it."""
    assert PrefillBudget(CountingKV(1, 1), 9, None, growth, riding).no_kv is used_up


@pytest.mark.parametrize(("tokens", "chunk", "used_up"), [(1, 1, False), (0, 1, True), (1, 0, True)])
def test_a_budget_of_tokens_is_used_up_at_0(tokens: int, chunk: int, used_up: bool) -> None:
    """The input's or the chunk's."""
    assert PrefillBudget(CountingKV(9, 1), tokens, chunk, 0.0, 0).no_tokens is used_up


def test_one_that_leaves_takes_what_is_beyond_the_clip_along() -> None:
    """Of 4,096 and 3 more tokens to come nothing is left behind for the others."""
    growth = RemainingOutput()
    for seq in (long := Sequence(Request(0, 0, 1, CLIP_MAX_NEW_TOKENS + 3)), Sequence(Request(1, 0, 1, 10))):
        growth.join(seq, 0)
    growth.leave(long)
    assert growth.tokens(0) == 10


def test_one_that_ignores_the_end_of_its_text_leaves_nothing_reserved() -> None:
    """Of 10 tokens to come half are expected, after one has left that had 20."""
    growth = RemainingOutput()
    for seq in (fixed := Sequence(Request(0, 0, 1, 20, ignore_eos=True)), Sequence(Request(1, 0, 1, 10))):
        growth.join(seq, 0)
    assert growth.reserved(0, 0.5) == 25.0
    growth.leave(fixed)
    assert growth.reserved(0, 0.5) == 5.0


def test_decodes_behind_have_a_token_more_to_come_than_the_others() -> None:
    """At step 3: 18 of 20 that are reserved whole, half of 8 of 10, and half of the 4,096 of one that has more."""
    growth = RemainingOutput()
    behind = [
        Sequence(Request(0, 0, 1, 20, ignore_eos=True)),
        Sequence(Request(1, 0, 1, 10)),
        Sequence(Request(2, 0, 1, CLIP_MAX_NEW_TOKENS + 3)),
    ]
    for seq in behind:
        growth.join(seq, 0)
    assert growth.reserved(3, 0.5) == 17 + 3.5 + 2048
    assert growth.reserved(3, 0.5, behind) == 18 + 4 + 2048
    assert growth.reserved(4, 0.5, behind[2:]) == 16 + 3 + 2048


@pytest.mark.parametrize(("left_tokens", "fits"), [(22, True), (21, False)])
def test_every_end_gives_back_what_it_held(left_tokens: int, fits: bool) -> None:
    """5, 10 and 40 tokens to come: before the last one's 40 twice 10 tokens are given back, and 1 must be kept."""
    first, *others = sequences("0:10->5 0:10->10 0:10->40")
    assert Completion(1.0, lambda seq: 0).fits(first, others, [], left_tokens) is fits


@pytest.mark.parametrize(("left_tokens", "fits"), [(27, True), (26, False)])
def test_one_that_enters_is_played_before_the_first_with_as_many_to_come(left_tokens: int, fits: bool) -> None:
    """8 to come are played between 5 and 10, when the first has given 1 back: 8 for three, and a token each is kept."""
    completion = Completion(1.0, lambda seq: 0)
    first, second, third, late = sequences("0:1->5 0:1->10 0:1->20 0:100->8")
    assert completion.fits(first, [second, third], [], 300)
    assert completion.fits(late, [], [], left_tokens) is fits


@pytest.mark.parametrize(("left_tokens", "fits"), [(33, True), (32, False)])
def test_one_with_the_most_to_come_is_played_before_the_last(left_tokens: int, fits: bool) -> None:
    """40 to come go between 10 and 20, where 1 + 100 tokens are given back: it is 10 for three that decides."""
    completion = Completion(1.0, lambda seq: 0)
    first, second, third, late = sequences("0:1->5 0:100->10 0:1->20 0:1->40")
    assert completion.fits(first, [second, third], [], 300)
    assert completion.fits(late, [], [], left_tokens) is fits


@pytest.mark.parametrize(("left_tokens", "fits"), [(34, True), (33, False)])
def test_of_those_that_end_together_the_order_is_kept(left_tokens: int, fits: bool) -> None:
    """Twice 10 to come: 40 are played before the second, when the first has given 100 back; 10 for three decides."""
    completion = Completion(1.0, lambda seq: 0)
    first, second, late = sequences("0:100->10 0:1->10 0:1->40")
    assert completion.fits(first, [second], [], 300)
    assert completion.fits(late, [], [], left_tokens) is fits


@pytest.mark.parametrize(("left_tokens", "fits"), [(11, True), (10, False)])
def test_one_that_enters_with_one_token_to_come_is_played(left_tokens: int, fits: bool) -> None:
    """Its prompt of 1 is given back before the other one's 10 tokens, and one is kept."""
    completion = Completion(1.0, lambda seq: 0)
    first, late = sequences("0:1->10 0:1->1")
    assert completion.fits(first, [], [], 300)
    assert completion.fits(late, [], [], left_tokens) is fits


def test_who_has_nothing_to_come_is_not_played() -> None:
    """Beside 0.1 of a token to come 2 tokens last; with a row that ends at once they would have to be more."""
    completion = Completion(0.1, lambda seq: 0)
    first, done, last = (Sequence(Request(i, 0, 1, 1)) for i in range(3))
    done.max_output_tokens = last.max_output_tokens = 0
    assert completion.fits(first, [done], [], 2)
    assert completion.fits(last, [], [], 2)


# ---- the prompt that is cut


@pytest.mark.parametrize(("to_come", "chunk"), [(13, 2), (14, 1), (15, 4), (16, 4)])
def test_where_all_is_spoken_for_a_chunk_takes_what_is_free(to_come: int, chunk: int) -> None:
    """15 tokens are free; of those that the decode leaves a chunk takes up to 4, of none at all as many."""
    kv = CountingKV(20, 1)
    batch, waiting = RunningBatch(kv, None), Fcfs(None)
    config = SglangConfig(disable_radix_cache=True, chunked_prefill_size=4)
    adder = PrefillAdder(config, kv, None, waiting, batch, slots=9, loras=LoraBatch(config, 0))
    decode, cut = sequences(f"0:1->{to_come + 1} 0:12->1")
    for seq, ratio in ((decode, 0.0), (cut, 0.0), (cut, 1.0)):
        if seq is not adder.chunked:
            waiting.push(seq)
        ((_, n),) = adder.make(ratio, 0).chunks
        seq.settled_computed_tokens += n
        if seq is decode:
            seq.settled_output_tokens = 1
            batch.join(seq)
    assert n == chunk


# ---- who makes way


class Adder:
    """A `PrefillAdder` under priority scheduling with preemption, whose prompts are computed at once."""

    def __init__(self, kv: KVBlockManager, slots: int) -> None:
        cache = kv if isinstance(kv, RadixKV) else None
        self.batch = RunningBatch(kv, cache)
        self.waiting = ByPriority(cache, low_first=False)
        config = SglangConfig(**PRIORITIES)
        self.adder = PrefillAdder(config, kv, cache, self.waiting, self.batch, slots=slots, loras=LoraBatch(config, 0))

    def ride(self) -> None:
        """A mixed step of the decodes."""
        assert self.batch.grow()
        self.adder.decodes_ride()
        self.batch.group.advance()

    def make(self, seq: Sequence) -> list[Sequence]:
        """The victims of the next prefill batch, which `seq` has been queued for; its prompts decode afterwards."""
        self.waiting.push(seq)
        made = self.adder.make(1.0, 0)
        self.batch.place(made.chunks, ahead=False)
        for other, n in made.chunks:
            other.settled_computed_tokens += n
            other.settled_output_tokens += 1
            self.batch.join(other)
        return made.victims


@pytest.mark.parametrize(("tokens", "makes_way"), [(13, True), (12, False)])
def test_one_that_was_retracted_is_known_by_its_tokens_none_of_them_cached(tokens: int, makes_way: bool) -> None:
    """4 tokens and a cap of 5 need 9 beside the 4 that the less important one holds."""
    adder = Adder(CountingKV(tokens, 1), slots=1)
    first, other = sequences("0:4->5p50 0:4->2p0")
    adder.make(first)
    adder.adder.retracted(first)
    adder.batch.retract(first)
    adder.make(other)
    assert len(adder.batch) == 1
    assert adder.make(first) == ([other] if makes_way else [])


@pytest.mark.parametrize(("tokens", "makes_way"), [(14, True), (13, False)])
def test_one_that_rode_along_is_known_as_it_was_then(tokens: int, makes_way: bool) -> None:
    """It had 4 + 1 tokens when it rode along and got another: with a cap of 5 it needs 10 beside 4 of the other one."""
    adder = Adder(CountingKV(tokens, 1), slots=1)
    first, other = sequences("0:4->5p50 0:4->2p0")
    adder.make(first)
    adder.ride()
    adder.adder.retracted(first)
    adder.batch.retract(first)
    adder.make(other)
    assert adder.make(first) == ([other] if makes_way else [])


@pytest.mark.parametrize(("tokens", "makes_way"), [(11, True), (10, False)])
def test_one_that_was_looked_at_is_known_by_its_uncached_tokens(tokens: int, makes_way: bool) -> None:
    """Of 4 tokens 3 are cached: 1 and a cap of 5 need 6 beside 1 + 1 held tokens and 3 to come of one that stays."""
    adder = Adder(knowing(tokens, 1, ((0, 3),)), slots=2)
    stays, goes, comes = sequences("0:1->4p50 0:1->2p0 0:4->5p50", ((1, 1),), ((2, 1),), ((0, 3), (3, 1)))
    adder.make(stays)
    adder.make(comes)  # finds too little memory
    adder.waiting.remove(comes)
    adder.make(goes)
    assert adder.batch.rows() == [stays, goes]
    assert adder.make(comes) == ([goes] if makes_way else [])


@pytest.mark.parametrize(
    ("gib", "tokens"), [(16, 2048), (20, 4096), (24, 4096), (60, 8192), (80, 8192), (160, 16384), (180, 16384)]
)
def test_a_chunk_of_a_prompt_is_as_large_as_the_gpu(gib: int, tokens: int) -> None:
    """Unless it is stated."""
    device = Device("some", gib * 2**30, 8192)
    assert SglangConfig.device_defaults(device, {}) == {"chunked_prefill_size": tokens}
    assert SglangConfig.device_defaults(device, {"chunked_prefill_size": 512}) == {}
