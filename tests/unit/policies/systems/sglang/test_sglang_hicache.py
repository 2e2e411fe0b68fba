"""HiCache under the SGLang policy: timelines by hand, of the numbered rules of `sglang_hicache`, `kv/hicache.py` (the
cache) and `kv/host_tree.py` (the tree).

Steps take 10 ns, 1 more a prompt token and 2 a decode. Text 0 has 24 tokens; text 1, of 40, puts it off a GPU of 48.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import LOAD_WAITED, STORE_FLUSH, TIER_LOAD, TIER_STORE
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.radix_cache import RadixKV
from batchsim.metrics.tiers import tier_use
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_hicache import SglangWithHiCache
from tests.support.hicache_runs import Host, hicache_timeline
from tests.support.stepping import Run, column, run
from tests.support.tier_lives import moved, parts_of

HOST = Host(100, store_ns=1, load_ns=6)


def asked(number: int, at_ns: int, prompt: int, text: int, output: int = 1) -> Arrival:
    """A request for the beginning of a text."""
    tokens = TokenIds.of([(prompt_stream(text), 0, prompt)])
    return Arrival(Request(number, at_ns, prompt, output, tokens=tokens), output)


def there_again(host: Host, *more: Arrival, **knobs: Any) -> Run:
    """Text 0 at 0, text 1 at 100, text 0 again at 300, and what comes besides."""
    arrivals = [asked(0, 0, 24, 0), asked(1, 100, 40, 1), asked(2, 300, 24, 0), *more]
    return hicache_timeline(arrivals, host, **{"blocks": 12, **knobs})


def rows(done: Run, what: int) -> list[tuple[int, int, int]]:
    """(ns, request, tokens or ns) of each remark."""
    states = done.records.states
    found = states[states["state"] == what]
    return [(int(row["time_ns"]), int(row["request_id"]), int(row["blocker"])) for row in found]


def test_what_a_request_computed_is_stored_once_its_step_is_processed() -> None:
    """Rule 3: write_through: all whole pages as the request ends, those of its output token too, which is not
    computed."""
    done = there_again(HOST)
    assert rows(done, TIER_STORE)[:2] == [(34, 0, 24), (150, 1, 40)]


def test_a_step_waits_for_its_load_layer_by_layer() -> None:
    """Rule 2: 5 pages of 6 ns, as a token is left to compute, in 4 layers, beside 14 ns for 4 tokens: the last layer,
    of 4 ns, begins with the end of the load, at 330. 20 of the 34 ns are the load's."""
    done = there_again(HOST)
    assert rows(done, TIER_LOAD) == [(300, 2, 20)]
    assert column(done, "first_token_ns")[2] == 334
    assert rows(done, LOAD_WAITED) == [(300, 2, 20)]
    assert parts_of(done.records, 2) == {"prefill": 14, "kv_load": 20}


def test_a_fast_load_costs_its_first_layer() -> None:
    """Rule 2: 5 pages of 2 ns: the step begins 3 ns later, with the first quarter of 10 ns, and never waits again."""
    done = there_again(replace(HOST, load_ns=2))
    assert column(done, "first_token_ns")[2] == 317
    assert rows(done, LOAD_WAITED) == [(300, 2, 3)]


def test_a_transfer_has_a_fixed_part() -> None:
    """7 ns once: the load ends at 337, the last layer at 341."""
    done = there_again(replace(HOST, fixed_ns=7))
    assert column(done, "first_token_ns")[2] == 341


def test_all_loads_of_a_batch_are_one_copy() -> None:
    """Rule 2: 5 pages of each of two texts: one fixed part of 7 ns and 60 ns, and both requests wait for all of it. The
    last layer takes a quarter of 18 ns for 8 tokens, rounded up."""
    arrivals = [asked(0, 0, 24, 0), asked(1, 100, 24, 2), asked(2, 200, 56, 1)]
    arrivals += [asked(3, 400, 24, 0), asked(4, 400, 24, 2)]
    done = hicache_timeline(arrivals, replace(HOST, fixed_ns=7), blocks=16)
    assert moved(done.records, TIER_LOAD) == {3: 20, 4: 20}
    assert column(done, "first_token_ns")[3:] == [400 + 7 + 60 + 5] * 2
    assert rows(done, LOAD_WAITED) == [(400, 3, 54)]


@pytest.mark.parametrize(("tokens", "loaded"), [(10, 0), (11, 10)])
def test_fewer_than_ten_tokens_are_computed(tokens: int, loaded: int) -> None:
    """Rule 1: Pages of 1 token: of a prompt of 10 tokens the host has 9 that may be loaded, of one of 11 it has 10."""
    arrivals = [asked(0, 0, tokens, 0), asked(1, 100, 33, 1), asked(2, 300, tokens, 0)]
    done = hicache_timeline(arrivals, replace(HOST, load_ns=0), blocks=40, page=1)
    assert moved(done.records, TIER_LOAD) == ({2: loaded} if loaded else {})
    assert column(done, "first_token_ns")[2] == 300 + 10 + tokens - loaded


def test_what_is_loaded_counts_as_tokens_to_be_allocated() -> None:
    """Rule 1: 24 tokens, one to come and a page are 29, and 24 are free or evictable beside a decode that has 20 and a
    page. It waits for that, though only 4 would be computed."""
    decode = asked(2, 290, 20, 2, output=9)
    arrivals = [asked(0, 0, 24, 0), asked(1, 100, 40, 1), decode, asked(3, 330, 24, 0)]
    done = hicache_timeline(arrivals, replace(HOST, store_ns=0), blocks=12)
    ended = column(done, "last_token_ns")[2]
    assert column(done, "scheduled_ns")[3] == ended > 400
    assert moved(done.records, TIER_LOAD) == {3: 20}


def test_selective_stores_for_the_second_request_only() -> None:
    """Rule 1 of the cache: the text is stored as the second request has inserted it. What has one request is dropped
    from the GPU."""
    host = replace(HOST, policy="write_through_selective")
    once = there_again(host)
    assert rows(once, TIER_STORE) == rows(once, TIER_LOAD) == []
    assert column(once, "first_token_ns")[2] == 300 + 34
    arrivals = [asked(0, 0, 24, 0), asked(1, 50, 24, 0), asked(2, 100, 40, 1), asked(3, 300, 24, 0)]
    twice = hicache_timeline(arrivals, host, blocks=12)
    assert rows(twice, TIER_STORE)[0] == (64, 1, 20)
    assert moved(twice.records, TIER_LOAD) == {3: 20}


def test_a_request_counts_once_however_often_it_inserts() -> None:
    """Rule 1 of the cache: a prompt in chunks of 8 tokens is inserted with each, and once more as the request ends:
    nothing is stored."""
    host = replace(HOST, policy="write_through_selective")
    done = hicache_timeline([asked(0, 0, 24, 0, output=6)], host, blocks=12, chunked_prefill_size=8)
    assert len(done.log) > 5
    assert rows(done, TIER_STORE) == []


def test_chunks_are_stored_with_the_results_of_the_step_behind() -> None:
    """Rule 3: a part of a prompt is inserted as the next one is scheduled, and copied once that step is over: the first
    at 36, the second at 54, where the last one is, too."""
    done = hicache_timeline([asked(0, 0, 24, 0)], HOST, blocks=12, chunked_prefill_size=8)
    assert rows(done, TIER_STORE) == [(36, 0, 8), (54, 0, 8), (54, 0, 8)]


def test_an_eviction_waits_for_what_it_writes_back() -> None:
    """Rule 4: write_back: nothing is stored before text 1 needs the room. Then 6 pages are, while the device stands
    idle, and the step begins 6 ns later. Text 1 is written back in turn, for the load, which waits for 10 pages."""
    done = there_again(replace(HOST, policy="write_back"))
    assert rows(done, TIER_STORE) == [(100, 0, 24), (300, 1, 40)]
    assert rows(done, STORE_FLUSH) == [(100, 0, 6), (300, 1, 10)]
    assert column(done, "first_token_ns")[1:] == [156, 344]
    assert moved(done.records, TIER_LOAD) == {2: 20}


def test_a_growing_decode_waits_for_what_it_writes_back() -> None:
    """Rule 4: Text 0 has 6 of 12 pages, and text 1 comes to have 8: as it needs the 7th, text 0 is written back, and 6
    ns pass before that step, among steps that are leapt over as elsewhere."""
    arrivals = [asked(0, 0, 24, 0), asked(1, 100, 12, 1, output=20)]
    done = hicache_timeline(arrivals, replace(HOST, policy="write_back"), blocks=12)
    first, last = (column(done, f"{name}_token_ns")[1] for name in ("first", "last"))
    assert first == 122
    assert last - first == 19 * 12 + 6
    assert [(request, ns) for _, request, ns in rows(done, STORE_FLUSH)] == [(0, 6)]


def test_pages_are_locked_until_they_are_stored() -> None:
    """Rule 1 of the cache: 6 pages of 100 ns, from 34 on: text 1, which needs their room, begins at 634."""
    done = there_again(replace(HOST, store_ns=100))
    assert column(done, "scheduled_ns")[1] == 634


def test_a_full_host_gives_up_what_was_used_longest_ago() -> None:
    """Rule 3 of the tree: a host of 12 pages has text 0 and, in its place, text 1. The third request computes all
    again."""
    done = there_again(replace(HOST, pages=12))
    assert moved(done.records, TIER_LOAD) == {}
    assert column(done, "first_token_ns")[2] == 334
    assert moved(done.records, TIER_STORE) == {0: 24, 1: 40, 2: 24}


def test_what_the_gpu_has_is_not_evicted_from_the_host() -> None:
    """Rules 3 and 4 of the tree: a host of 8 pages has text 0, of 6. Text 1 finds no room beside it, though it could
    leave the GPU as well, and is not stored."""
    done = hicache_timeline([asked(0, 0, 24, 0), asked(1, 100, 12, 1)], replace(HOST, pages=8), blocks=12)
    assert moved(done.records, TIER_STORE) == {0: 24}


def test_a_host_that_is_never_asked_changes_nothing() -> None:
    """Prompts that share nothing, with copies that take no time: every row is that of the engine without one."""
    arrivals = [asked(i, 31 * i, 6 + 7 * i % 20, i, output=1 + i % 5) for i in range(30)]
    done = hicache_timeline(arrivals, Host(100), blocks=40)
    config = SglangConfig(chunked_prefill_size=-1, disable_overlap_schedule=True)
    plain = run(Sglang, config, arrivals, kv=RadixKV, blocks=40, block_size=4, how="leap")
    for table in ("requests", "steps"):
        assert getattr(done.records, table).tobytes() == getattr(plain.records, table).tobytes()


def test_the_wait_of_a_load_is_its_requests() -> None:
    """Of three requests one waited, for 20 ns of its step, and had 20 of its tokens from the host."""
    done = there_again(HOST)
    use = tier_use(done.records.requests, [done.records], 8)
    assert use.wait_ns.tolist() == [0, 0, 20]
    assert use.host.loaded_first.tolist() == [0, 0, 20]
    assert (use.host.loads, use.host.loaded_tokens, use.host.stored_tokens) == (1, 20, 24 + 40)


def test_with_overlap_a_load_begins_with_its_step_and_a_store_behind_the_steps_in_flight() -> None:
    """Rules 2 and 3: the host takes 3 ns to launch and 2 to process. The first token of text 0 is known at 39, while a
    decode runs until 49: its 6 pages are stored from then on, and locked until 55. The load of the second visit begins
    with its step, at 303."""
    arrivals = [asked(0, 0, 24, 0, output=2), asked(1, 100, 36, 1), asked(2, 300, 24, 0)]
    done = hicache_timeline(arrivals, HOST, blocks=12, overlaps=True)
    assert rows(done, TIER_STORE)[:2] == [(39, 0, 24), (151, 1, 36)]
    assert rows(done, TIER_LOAD) == [(300, 2, 20)]
    assert rows(done, LOAD_WAITED) == [(303, 2, 20)]
    assert column(done, "first_token_ns")[2] == 303 + 34 + 2


def test_longest_prefix_counts_what_the_host_has() -> None:
    """Rule 5: lpm: two that wait, one with 20 tokens on the host, the other with 8 on the GPU. The first goes first."""
    arrivals = [asked(0, 0, 24, 0), asked(1, 100, 40, 1), asked(2, 300, 12, 1), asked(3, 300, 24, 0)]
    done = hicache_timeline(arrivals, HOST, blocks=12, schedule_policy="lpm", prefill_max_requests=1)
    first = column(done, "first_token_ns")
    assert first[3] < first[2]


def test_round_r_of_equal_turns_hits_r_of_r_plus_1() -> None:
    """20 clients, four rounds; the GPU holds a sixth of what there is at the end, the host all of it. A host of half of
    that is full after two rounds: in the third each new turn evicts the last one of a client that comes next, so that
    the first has two turns, the second one, and from then on none has any."""
    clients, turn = 20, 16
    arrivals = [
        asked(round_ * clients + client, 20_000 * round_ + 700 * client, turn * (round_ + 1), client)
        for round_ in range(4)
        for client in range(clients)
    ]

    def hits(pages: int) -> list[int]:
        done = hicache_timeline(arrivals, Host(pages), blocks=54)
        loaded, cached = moved(done.records, TIER_LOAD), column(done, "cached_tokens")
        return [(loaded.get(i, 0) + cached[i]) // turn for i in range(len(arrivals))]

    assert hits(clients * 4 * 4) == [round_ for round_ in range(4) for _ in range(clients)]
    assert hits(clients * 4 * 2) == [0] * clients + [1] * clients + [2, 1] + [0] * (2 * clients - 2)


def test_a_working_set_that_the_gpu_does_not_hold_gains_what_prefill_takes_longer_than_loading() -> None:
    """12 documents of 400 tokens in turn, 1.5 times what the GPU holds: each later reading is sooner by its hit tokens
    x (prefill - transfer), within 10 %; with room on the GPU for all, no reading is."""
    arrivals = [asked(i, 2000 * i, 400, i % 12) for i in range(36)]
    host = Host(2000, load_ns=2, store_ns=1, layers=32)
    config = SglangConfig(chunked_prefill_size=-1, disable_overlap_schedule=True)
    for blocks, tokens in ((800, 396), (1300, 0)):
        tiered = hicache_timeline(arrivals, host, blocks=blocks, max_model_len=1000)
        plain = run(Sglang, config, arrivals, kv=RadixKV, blocks=blocks, block_size=4, max_model_len=1000)
        gain = (plain.records.requests["first_token_ns"] - tiered.records.requests["first_token_ns"])[12:]
        assert set(moved(tiered.records, TIER_LOAD).values()) == ({tokens} if tokens else set())
        assert gain == pytest.approx(np.full(24, tokens * (1 - 2 / 4)), rel=0.1)


def test_it_needs_pages_on_the_host() -> None:
    with pytest.raises(ScenarioError, match="HiCache needs a HiCacheKV and HostCopies"):
        SglangWithHiCache(SglangConfig(), PolicyContext(RadixKV(12, 4), 100))
