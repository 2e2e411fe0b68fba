"""The host's memory with a disk below it, against lists that are walked: what is found, fetched, evicted and written.

The rules are those of vllm/v1/kv_offload/tiering of vLLM 0.32.0.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from batchsim.kv.disk_tier import DiskTier
from batchsim.kv.offload_chains import Part
from batchsim.kv.offload_tier import Found
from tests.plain.vllm_tiering import PlainDisk
from tests.support.tier_prompts import Prompt, keys_of


def _begun(tier: DiskTier, request: str, prompt: Prompt) -> str:
    tier.begin(request, keys_of(prompt))
    return request


def _on_disk(tier: DiskTier, *prompts: Prompt) -> None:
    """Has chunks of `prompts` stored one after the other and written, in calls of their own."""
    for number, prompt in enumerate(prompts):
        tier.new_call([])
        tier.call_over()
        taken = tier.offer(_begun(tier, f"w{number}", prompt), 0, sum(count for _, count in prompt))
        assert taken is not None
        tier.stored(taken.stored)
        tier.end(f"w{number}")
        tier.new_call([(parts, False) for parts in tier.to_write])
        tier.to_write = []
        tier.call_over()
        tier.new_call([])
        tier.call_over()


def _call(tier: DiskTier, request: str, stop: int, over: list[tuple[list[Part], bool]] | None = None) -> Found:
    """The lookup of a call of its own."""
    tier.new_call(over or [])
    found = tier.find(request, 0, stop)
    tier.call_over()
    return found


def test_a_chunk_is_asked_for_fetched_and_found() -> None:
    """Rules 2 and 3: one call to ask, one to make room, later until it is there."""
    tier = DiskTier(2)
    _on_disk(tier, [(1, 2)], [(2, 2)])
    request = _begun(tier, "r", [(1, 2)])
    assert _call(tier, request, 2) == Found(2, True, False) and tier.awaits_disk and not tier.to_read
    assert _call(tier, request, 2) == Found(2, True, False)
    (parts,) = tier.to_read.values()
    assert [stop - start for _, start, stop in parts] == [2] and tier.num_storing == 2
    tier.to_read = {}
    assert _call(tier, request, 2) == Found(2, True, False) and tier.awaits_disk
    assert _call(tier, request, 2, [(parts, True)]) == Found(2, False, False)
    assert not tier.to_write  # what came from the disk is not written to it


def test_an_answer_stays_as_it_was_while_any_request_that_asked_lives() -> None:
    """Rule 2: no at first; the disk gets it meanwhile, and the host loses it; a third request hears no, a fourth, once
    all of them have ended, asks anew."""
    tier = DiskTier(2)
    request = _begun(tier, "r", [(1, 2)])
    assert _call(tier, request, 2).is_storing
    assert _call(tier, request, 2) == Found(0, False, False)
    _on_disk(tier, [(1, 2)], [(2, 2)])
    assert _call(tier, _begun(tier, "s", [(1, 2)]), 2) == Found(0, False, False)
    for ended in "rs":
        tier.end(ended)
        tier.forget(ended)
    assert _call(tier, _begun(tier, "t", [(1, 2)]), 2) == Found(2, True, False)
    assert _call(tier, "t", 2) == Found(2, True, False) and tier.to_read


def test_what_is_being_written_is_pinned_but_not_being_loaded() -> None:
    """Rule 1: no room for others, though the chunks are found and may be loaded."""
    tier = DiskTier(2)
    tier.new_call([])
    taken = tier.offer(_begun(tier, "w", [(1, 2)]), 0, 2)
    assert taken is not None
    tier.stored(taken.stored)
    assert tier.find("w", 0, 2) == Found(2, False, False) and tier.num_evictable == 0
    assert tier.offer(_begun(tier, "x", [(2, 1)]), 0, 1) is None
    tier.new_call([(tier.to_write[0], False)])  # after an offer: noticed before the next one
    assert tier.num_evictable == 0
    again = tier.offer("x", 0, 1)
    assert again is not None and len(again.evicted) == 1
    assert tier.on_disk == set(keys_of([(1, 2)]).up_to(2))


def test_copies_are_noticed_in_the_call_behind_where_none_is_offered() -> None:
    """Rule 4: after an offer a call without one notices nothing, the one behind it does; so it does after calls that
    are passed."""
    for passes in (False, True):
        tier = DiskTier(2)
        tier.new_call([])
        taken = tier.offer(_begun(tier, "w", [(1, 2)]), 0, 2)
        assert taken is not None
        tier.stored(taken.stored)
        if passes:
            tier.passed()
        tier.new_call([(tier.to_write[0], False)])
        assert tier.num_evictable == (2 if passes else 0) and tier.has_unnoticed is not passes
        tier.new_call([])
        assert tier.num_evictable == 2


def _drawn(rng: random.Random) -> Prompt:
    prompt = [(rng.randrange(2), rng.choice([1, 2, 4]))]
    return [*prompt, *((rng.randrange(2, 4), rng.choice([1, 2, 5])) for _ in range(rng.randrange(3)))]


class _Both:
    """A tier and its plain loops, in which the same is done; `counts` says how often what happened."""

    def __init__(self, seed: int, policy: Any) -> None:
        self.rng = random.Random(seed)
        places = self.rng.randint(2, 9)
        self.tier, self.plain = DiskTier(places, policy), PlainDisk(places, policy)
        self.keys: dict[str, list[int]] = {}
        self.storing: list[tuple[str, list[Part], list[int]]] = []
        self.loading: list[tuple[list[Part], list[int]]] = []
        self.moving: list[tuple[list[Part], list[int], bool]] = []
        self.leaving: list[str] = []
        self.counts = dict.fromkeys(("fetched", "evicted", "no room", "later", "loaded"), 0)
        self.made = 0

    def request(self) -> str:
        if self.keys and (len(self.keys) > 4 or self.rng.random() < 0.7):
            return self.rng.choice(list(self.keys))
        self.made += 1
        name, prompt = f"r{self.made}", _drawn(self.rng)
        self.tier.begin(name, keys_of(prompt, self.made))
        self.keys[name] = keys_of(prompt, self.made).up_to(sum(count for _, count in prompt))
        return name

    def call(self) -> None:
        """One call of the scheduler: copies over, lookups and loads, offers, ends, and what workers report."""
        rng, tier, plain = self.rng, self.tier, self.plain
        over = [each for each in self.moving if rng.random() < 0.5]
        self.moving = [each for each in self.moving if each not in over]
        tier.new_call([(parts, is_read) for parts, _, is_read in over])
        plain.new_call([(keys, is_read) for _, keys, is_read in over])
        for _ in range(rng.randrange(3)):
            self.look()
        tier.call_over()
        plain.call_over()
        assert [tier.keys_of(parts) for parts in tier.to_read.values() if parts] == list(plain.reads.values())
        for parts, keys in zip([p for p in tier.to_read.values() if p], plain.reads.values(), strict=True):
            self.moving.append((parts, keys, True))
            self.counts["fetched"] += len(keys)
        tier.to_read, plain.reads = {}, {}
        for _ in range(rng.randrange(3)):
            self.offer()
        if self.keys and rng.random() < 0.3:
            name = rng.choice(list(self.keys))
            tier.end(name)
            plain.end(name)
            del self.keys[name]
            self.leaving.append(name)
        self.report()

    def look(self) -> None:
        name = self.request()
        keys = self.keys[name]
        first = self.rng.randrange(len(keys))
        found, (count, is_loading) = self.tier.find(name, first, len(keys)), self.plain.find(name, keys[first:], first)
        self.counts["later"] += count is None
        assert found.is_storing == (count is None)
        if count is None:
            assert found.stop == len(keys)
            return
        assert (found.stop, found.is_loading) == (first + count, is_loading)
        if count and self.rng.random() < 0.5:
            there = keys[first : first + count]
            self.loading.append((self.tier.load(name, first, first + count), there))
            self.plain.load(name, there, first)
            self.plain.gpu_loads += there
            self.counts["loaded"] += count

    def offer(self) -> None:
        name = self.request()
        keys = self.keys[name]
        first = self.rng.randrange(len(keys))
        taken, other = self.tier.offer(name, first, len(keys)), self.plain.offer(name, keys[first:], first)
        self.counts["no room"] += taken is None
        assert (taken is None) == (other is None)
        if taken is None or other is None:
            return
        gone = [key for part in taken.evicted for key in reversed(self.tier.keys_of([part]))]
        assert (self.tier.keys_of(taken.stored), gone) == other
        self.counts["evicted"] += len(gone)
        if taken.stored:
            self.storing.append((name, taken.stored, other[0]))

    def report(self) -> None:
        """Stores and loads of the GPU that are over; requests that have ended and have no store left are forgotten."""
        rng, tier, plain = self.rng, self.tier, self.plain
        for each in [each for each in self.storing if rng.random() < 0.5]:
            self.storing.remove(each)
            tier.stored(each[1])
            plain.loads |= dict.fromkeys(each[2], 1)
            assert tier.to_write.pop() == each[1] and not tier.to_write
            self.moving.append((each[1], each[2], False))
        for each in [each for each in self.loading if rng.random() < 0.5]:
            self.loading.remove(each)
            tier.loaded(each[0])
            for key in each[1]:
                plain.loads[key] -= 1
                plain.gpu_loads.remove(key)
        for name in [name for name in self.leaving if all(name != each[0] for each in self.storing)]:
            self.leaving.remove(name)
            tier.forget(name)
            plain.forget(name)
        tier.check()
        assert tier.on_disk == set(plain.disk)
        assert tier.num_evictable == sum(loads == 0 for loads in plain.loads.values())


def _are_equal(seeds: range, policy: str) -> None:
    totals: dict[str, int] = {}
    for seed in seeds:
        both = _Both(seed, policy)
        for _ in range(60):
            both.call()
        totals = {name: totals.get(name, 0) + count for name, count in both.counts.items()}
    assert all(count > len(seeds) for count in totals.values()), totals


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_random_calls_equal_the_plain_ones(policy: str) -> None:
    """Lookups, fetches, evictions, offers and answers are the same, chunk by chunk."""
    _are_equal(range(40), policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_many_more_random_calls_equal_the_plain_ones(policy: str) -> None:
    """As above, 1,000 times."""
    _are_equal(range(1000, 2000), policy)
