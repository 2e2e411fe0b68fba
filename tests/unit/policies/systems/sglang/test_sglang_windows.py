"""SGLang with a pool of windows by hand: what is let go when, what is found again, which pool keeps a request out."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import KvPools
from batchsim.kernel.engine_loop import OVERLAP, EngineLoop
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, DecodeGroup, Request, Sequence
from batchsim.kv.pooled_radix import PooledRadixKV
from batchsim.kv.windows import PooledKV
from batchsim.policies.systems.sglang.running_batch import RunningBatch
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.window_budget import WindowBudget
from tests.support.stepping import Estimates, HostCost, Logged, Run, run

PLAIN = SglangConfig(disable_radix_cache=True, chunked_prefill_size=8)
CACHED = SglangConfig(chunked_prefill_size=8)


def played(
    config: SglangConfig, arrivals: Any, pools: KvPools, *, blocks: int = 200, loop: EngineLoop | None = None
) -> tuple[Run, list[int]]:
    """A run in pages of one token, and the free pages of windows, those without a lock among them, behind each call
    that makes a step; the engine does not schedule ahead unless `loop` says so."""
    seen: list[int] = []

    class Watched(Logged):
        def schedule(self, now_ns: int, drain: bool) -> Any:
            before = len(self.log)
            work = super().schedule(now_ns, drain)
            seen.extend([self.inner.kv.windows.available] * (len(self.log) - before))
            return work

    kv = PooledRadixKV if config.traits.prefix_cache else PooledKV
    ahead: dict[str, Any] = {} if loop is None else {"loop": loop, "cost": HostCost()}
    done = run(
        lambda config, context: Watched(Sglang(config, context)),
        config,
        arrivals,
        kv=lambda n, size, swap: kv(n, size, pools),
        blocks=blocks,
        block_size=1,
        **ahead,
    )
    return done, seen


def prompts(*texts: list[tuple[int, int]], output: int = 1, every_ns: int = 1000) -> list[Arrival]:
    """Requests one after the other, whose prompts are of parts (stream, tokens), each from the stream's beginning."""
    arrivals: list[Arrival] = []
    for i, parts in enumerate(texts):
        tokens = TokenIds.of([(prompt_stream(stream), 0, n) for stream, n in parts])
        request = Request(i, i * every_ns, sum(n for _, n in parts), output, tokens=tokens)
        arrivals.append(Arrival(request, output))
    return arrivals


def hits(done: Run) -> list[int]:
    """Cached tokens of each request."""
    return [int(n) for n in done.records.requests["cached_tokens"]]


def test_a_decode_lets_go_of_what_left_its_window_every_so_many_tokens() -> None:
    """A window of 4, its own token among them, let go of each 3 tokens: 6 prompt tokens, then one a step. Before a step
    with k known tokens k - 4 are out: at 7 known ones, the first step, nothing yet; then 8 - 4 ≥ 3 let go of 4. The
    next 3 are out at 11 known ones, then at 14."""
    _, seen = played(PLAIN, "0:6->9", KvPools(4, 50, 3))
    #                6 known, 7, 8 (4 go), 9, 10, 11 (3 go), 12, 13, 14 (3 go)
    assert seen == [50 - n for n in (6, 7, 8 - 4, 9 - 4, 10 - 4, 11 - 7, 12 - 7, 13 - 7, 14 - 10)]


def test_ahead_of_results_the_token_in_flight_counts_as_unknown() -> None:
    """The same with one known token less: at 7 of 8 tokens 7 - 4 go, and the next 3 at 10 of 11."""
    _, seen = played(PLAIN, "0:6->9", KvPools(4, 50, 3), loop=OVERLAP)
    assert seen[:7] == [50 - n for n in (6, 7, 8 - 3, 9 - 3, 10 - 3, 11 - 6, 12 - 6)]


def test_without_a_radix_cache_a_prompt_lets_go_before_its_next_chunk() -> None:
    """20 tokens in chunks of 8: before the one from 16 on, 16 - 3 are out of a window of 4; ahead of results 8 of them
    are still being computed, and 8 - 3 go."""
    _, seen = played(PLAIN, "0:20->1", KvPools(4, 50, 3))
    assert seen == [50 - n for n in (8, 16 - 5, 20 - 13)]
    _, seen = played(PLAIN, "0:20->1", KvPools(4, 50, 3), loop=OVERLAP)
    assert seen[:3] == [50 - n for n in (8, 16, 20 - 5)]


def test_a_radix_cache_keeps_a_window_at_the_end_of_what_is_put_in() -> None:
    """Chunks of 8 of a prompt of 20, a window of 4: when the tree has 8 tokens it has windows of the last 3 and the one
    before, of which a lock keeps the 3: of 50 pages these and the 8 of the next chunk are not free."""
    _, seen = played(CACHED, "0:20->1", KvPools(4, 50, 3))
    assert seen == [50 - 8, 50 - 3 - 8, 50 - 3 - 4]


def test_a_prefix_is_used_as_far_as_its_window_is_there() -> None:
    """The first prompt, of 20, leaves windows of its last 4 tokens: a second that shares 12 finds them in the layers
    that keep all and nothing to use, so that it leaves its window there, at the junction: a third goes on there; a
    fourth that shares all 20 goes on from 19, its last token being computed anyway, for which windows of 16 to 18 are
    there. In chunks of 8 the first prompt leaves windows at 8 and 16 too, and the second goes on from 8."""
    arrivals = prompts([(2, 20)], [(2, 12), (4, 8)], [(2, 12), (6, 8)], [(2, 20)], output=3)
    done, _ = played(SglangConfig(chunked_prefill_size=24), arrivals, KvPools(4, 60, 3))
    assert hits(done) == [0, 0, 12, 19]
    done, _ = played(CACHED, arrivals, KvPools(4, 60, 3))
    assert hits(done) == [0, 8, 12, 19]


def computed(kv: PooledRadixKV, arrival: Arrival) -> None:
    """Computes the prompt of a request from the prefix that is there on, and ends it."""
    seq = Sequence(arrival.request)
    hit = kv.match(seq, seq.num_tokens - 1)
    kv.take(seq, hit)
    assert kv.allocate(seq, seq.num_tokens)
    seq.settled_computed_tokens = seq.num_tokens
    kv.insert(seq)
    kv.free(seq)
    kv.check()


def test_a_leaf_goes_whole_and_what_is_above_another_loses_its_window_alone() -> None:
    """Prompts of 20 that share 12: the second leaves windows at its junction, of 8 to 12, the third goes on there, and
    both ends have theirs, of 16 to 20, in nodes of 1 and 3 tokens. Asked for a page more than the 38 that are free, the
    least recently used node loses its window, 16 to 17 of the first prompt; then the 3 tokens below it go whole, as
    nothing is below them; then the 4 at the junction, whose tokens stay for the other layers."""
    kv = PooledRadixKV(100, 1, KvPools(4, 50, 3))
    for arrival in prompts([(2, 20)], [(2, 12), (4, 8)], [(2, 12), (4, 8)]):
        computed(kv, arrival)
    found = [(kv.cached_blocks, kv.windows.num_free)]
    for asked in (39, 40, 43):
        kv.make_room(asked)
        found.append((kv.cached_blocks, kv.windows.num_free))
        kv.check()
    assert found == [(28, 38), (28, 39), (25, 42), (25, 46)]


def test_what_is_put_in_makes_a_window_and_a_page_recently_used() -> None:
    """The prompt of 20 leaves nodes of 1 and 3 tokens, and so does one of 10. A second request for the 20 goes on from
    19 before the 10 are computed, and puts in its last token after that: then the nodes of the 10 are the least
    recently used, those of 1 and 3, and go first, the latter whole."""
    kv = PooledRadixKV(100, 1, KvPools(4, 50, 3))
    long, again, other = prompts([(2, 20)], [(2, 20)], [(4, 10)])
    computed(kv, long)
    seq = Sequence(again.request)
    kv.take(seq, kv.match(seq, 19))
    computed(kv, other)
    assert kv.allocate(seq, 20)
    seq.settled_computed_tokens = 20
    kv.insert(seq)
    kv.free(seq)
    assert (kv.cached_blocks, kv.windows.num_free) == (30, 42)
    kv.make_room(44)
    assert (kv.cached_blocks, kv.windows.num_free) == (27, 46)


def test_the_upper_part_of_a_node_that_is_split_is_as_recently_used_as_the_lower_one() -> None:
    """One that shares 18 of 20 tokens finds no whole window before 18, and uses nothing: of the nodes 16 to 17, 17 to
    18 and 18 to 20 the first two go first, and take no token of the other layers along."""
    kv = PooledRadixKV(100, 1, KvPools(4, 50, 3))
    long, other, part = prompts([(2, 20)], [(4, 10)], [(2, 18), (6, 4)])
    computed(kv, long)
    computed(kv, other)
    assert kv.match(Sequence(part.request), 21) == 0
    kv.make_room(kv.windows.num_free + 2)
    assert (kv.cached_blocks, kv.windows.num_free) == (30, 44)


def test_a_decode_evicts_before_it_lets_go() -> None:
    """A prompt of 6, of which the tree has all, decodes: at 13 known tokens 6 to 9 have left its window. No page is
    free then: for the one that it needs the oldest page of another prompt goes first, and 3 of 4 are left."""
    kv = PooledRadixKV(100, 1, KvPools(4, 50, 3))
    other, *decoded = prompts([(2, 10)], [(4, 6)], [(6, 40)], output=20)
    prompt, filler = (Sequence(each.request) for each in decoded)
    computed(kv, other)
    kv.take(prompt, kv.match(prompt, 5))
    assert kv.allocate(prompt, 6)
    prompt.settled_computed_tokens, prompt.settled_output_tokens = 6, 1
    kv.insert(prompt, 6)
    batch = RunningBatch(kv, kv)
    batch.join(prompt)
    for _ in range(6):
        assert batch.grow()
        batch.group.advance()
    assert kv.allocate(filler, kv.windows.num_free)
    before = kv.windows.num_evictable
    assert batch.grow()
    assert (kv.windows.num_free, before - kv.windows.num_evictable) == (1 + 3 - 1, 1)


def test_the_pool_that_is_short_keeps_a_request_out() -> None:
    """Windows of 9 in 29 pages, whole prompts of 12 in chunks of 8: the first takes 12, and a second one needs
    max(8 - 8, 0) + min(12 + 4, 8) + 1 = 9 of them beside; of a third there are too few, though the other layers have
    all they need."""
    pools = KvPools(9, 36, 1)
    done, seen = played(PLAIN, "0:12->4 0:12->4 0:12->4", pools, blocks=500)
    plain = run(Sglang, PLAIN, "0:12->4 0:12->4 0:12->4", kv=CountingKV, blocks=500, block_size=1)
    assert max(len(items) for items in plain.items) == 3
    assert min(seen) >= 0
    assert done.items[: len(plain.items)] != plain.items


def test_decodes_are_retracted_where_windows_are_short() -> None:
    """Six decodes of a window of 9 that let go of nothing for 12 tokens outgrow 60 pages, with 500 of the others."""
    done, _ = played(
        SglangConfig(disable_radix_cache=True, chunked_prefill_size=4), "0:2->30 " * 6, KvPools(9, 60, 12), blocks=500
    )
    assert {reason for _, _, reason, _ in done.preemptions()} == {"kv_blocks"}
    whole = run(Sglang, PLAIN, "0:2->30 " * 6, blocks=500, block_size=1)
    assert whole.preemptions() == []


def budget(windows: int, *, chunk: int | None = 8, held: int = 0, page: int = 1) -> WindowBudget:
    """A budget of a pass on 1,000 pages, and on `windows` tokens of a window of 5, of which a sequence holds `held`."""
    kv = PooledKV(1000, page, KvPools(5, windows))
    if held:
        kv.allocate(Sequence(Request(0, 0, held, 1)), held)
    return WindowBudget(kv, 100, chunk, 0.0, 0, windows=kv.windows)


def test_what_a_request_needs_of_windows() -> None:
    """Of 20 tokens a chunk of 8 is 4 beyond the 4 that a window reaches back, then these and a page: 9, which must be
    below what is left. A prompt of 2 with 1 output token needs 3 and a page."""
    assert budget(10).chunk_limit(20, 3) == 8
    assert budget(20, held=11).chunk_limit(20, 3) is None
    assert budget(20, held=15).chunk_limit(2, 1) == 8
    assert budget(20, held=16).chunk_limit(2, 1) is None
    assert (budget(9).has_room(20, 3), budget(8).has_room(20, 3)) == (True, False)


def test_a_request_that_the_whole_pool_is_too_small_for_gets_shorter_chunks() -> None:
    """9 are not below 9 in all: what is left less the 3 output tokens and a page is 5; without chunks there is none."""
    assert budget(9).chunk_limit(20, 3) == 5
    assert budget(9, held=5).chunk_limit(20, 3) is None
    assert budget(9, chunk=None).chunk_limit(20, 3) is None


def test_a_pass_spends_windows_and_a_prompt_that_is_cut_leaves_a_page() -> None:
    """The chunk of 8 spends 4 + 4 + 1; a prompt goes on with what is left less a page, or not at all."""
    spent = budget(30)
    spent.charge(8, 0)
    assert (spent.left_window, spent.chunk_room()) == (21, 0)
    assert budget(30, held=25).chunk_room() == 4
    assert (budget(30, held=29).chunk_room(), budget(30, held=30).no_kv) == (0, True)


def test_a_pass_spends_whole_pages() -> None:
    """In pages of 4, 6 tokens of a prompt that goes on are 8: 4 beyond the 4 that a window reaches back, and a page."""
    spent = budget(40, page=4)
    spent.charge(6, 0)
    assert spent.left_window == 40 - 4 - 4 - 4


@pytest.mark.parametrize(("config", "least"), [(PLAIN, 8 + 3 + 4 + 6), (CACHED, 8 + 8 + 4 + 6)])
def test_a_pool_in_which_a_prompt_could_wait_for_ever_is_refused(config: SglangConfig, least: int) -> None:
    """A chunk, a window and 6 pages, and with a radix cache as much as a prefix may lock; else what is let go late."""
    kv = PooledRadixKV if config.traits.prefix_cache else PooledKV
    context = PolicyContext(kv(100, 1, KvPools(5, least, 3)), 64, None, Estimates(), config.traits.loop)
    assert Sglang(config, context)
    context = PolicyContext(kv(100, 1, KvPools(5, least - 1, 3)), 64, None, Estimates(), config.traits.loop)
    with pytest.raises(ScenarioError, match=rf"^sglang: {least - 1} tokens of windows are fewer than {least}, .*\.$"):
        Sglang(config, context)


@pytest.mark.parametrize("manager", [PooledKV, PooledRadixKV])
def test_a_request_for_more_pages_than_either_pool_has_changes_nothing(manager: type[PooledKV | PooledRadixKV]) -> None:
    """Of 8 pages of windows 6 are taken: 2 are left for a prompt and a step, 3 are too many; so of the other pool."""
    for pages, windows in ((100, 8), (8, 100)):
        kv = manager(pages, 1, KvPools(4, windows, 3))
        seqs = [Sequence(arrival.request) for arrival in prompts([(1, 6)], [(2, 3)], [(3, 2)])]
        if isinstance(kv, PooledRadixKV):
            for seq in seqs:
                kv.take(seq, kv.match(seq, seq.num_tokens - 1))
        first, second, third = seqs
        free = kv.num_free, kv.windows.num_free
        assert kv.allocate(first, 6) and not kv.allocate(second, 3)
        assert (kv.num_free, kv.windows.num_free) == (free[0] - 6, free[1] - 6)
        assert kv.allocate(third, 2)
        kv.check()
        kv.pin(first)
        kv.free(first)
        assert (kv.num_free, kv.windows.num_free) == (free[0] - 8, free[1] - 8)
        group = DecodeGroup(1)
        third.settled_computed_tokens, third.settled_output_tokens = 2, 1
        group.join(third)
        assert not kv.grow_group(group)
        kv.unpin(first)
        assert (kv.num_free, kv.windows.num_free) == (free[0] - 2, free[1] - 2)
        assert kv.grow_group(group)
        assert (kv.num_free, kv.windows.num_free) == (free[0] - 3, free[1] - 3)


def test_what_is_looked_up_is_what_is_matched() -> None:
    """Of prompts with common beginnings, the pool of windows being short: as long a prefix, which changes nothing; it
    may be shorter than that which layers that keep all tokens have."""
    rng, hits_seen, shorter = random.Random(3), 0, 0
    kv = PooledRadixKV(200, 1, KvPools(4, 24, 3))
    for number in range(60):
        texts = [(rng.randint(1, 2), rng.choice([3, 7, 12])), (rng.randint(3, 5), rng.randint(1, 6))]
        seq = Sequence(replace(prompts(texts)[0].request, id=number))
        looked = kv.lookup(seq)
        assert looked == kv.lookup(seq) == kv.match(seq, seq.num_tokens - 1)
        hits_seen += looked > 0
        kv.take(seq, looked)
        shorter += kv.windows.spans[seq].junction is not None
        kv.make_room(seq.num_tokens - looked)
        assert kv.allocate(seq, seq.num_tokens)
        seq.settled_computed_tokens = seq.num_tokens
        kv.insert_ended(seq, seq.num_tokens)
        kv.free(seq)
        kv.check()
    assert hits_seen > 10 and shorter > 5
