"""The tier of KV in the host's memory against plain lists of chunks: what it takes in, evicts and finds.

The rules are those of vllm/v1/kv_offload/cpu/manager.py, policies/lru.py and policies/arc.py of vLLM 0.33.0.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Any, Literal

import pytest

from batchsim.kv.offload_chains import Part
from batchsim.kv.offload_order import Numbers
from batchsim.kv.offload_tier import OffloadTier
from tests.support.tier_prompts import Prompt, keys_of


class _Plain:
    """The same by lists that are walked: chunks with their loads, and for LRU a rank each."""

    def __init__(self, places: int, policy: str, threshold: int) -> None:
        self.places, self.policy, self.threshold = places, policy, threshold
        self.loads: dict[int, int] = {}
        self.ranks: dict[int, tuple[int, int]] = {}
        self.once: list[int] = []
        self.often: list[int] = []
        self.ghosts: tuple[list[int], list[int]] = ([], [])
        self.target: float = 0
        self.clock = 0
        self.offered: dict[int, int] = {}
        self.own: dict[str, dict[str, Any]] = {}

    def of(self, request: str) -> dict[str, Any]:
        new: dict[str, Any] = {"rank": 0, "seen": {}, "inserted": set(), "reused": set(), "missed": set()}
        return self.own.setdefault(request, new)

    def use(self, own: dict[str, Any], places: dict[int, int]) -> None:
        for key, place in places.items():
            if key in own["seen"]:
                continue
            if not own["rank"]:
                self.clock += 1
                own["rank"] = self.clock
            own["seen"][key] = place
            if key in self.ranks:
                self.ranks[key] = max(self.ranks[key], (own["rank"], -place))

    def offer(self, request: str, keys: list[int], first: int) -> tuple[list[int], list[int]] | None:
        own, place = self.of(request), {key: first + i for i, key in enumerate(keys)}
        for key in keys:
            self.offered[key] = self.offered.get(key, 0) + 1
        ready = [key for key in keys if self.loads.get(key, -1) >= 0]
        new = [key for key in keys if key not in self.loads]
        if self.threshold >= 2:
            new = [key for key in new if self.offered[key] >= self.threshold]
        for key in reversed(new):
            if key not in own["missed"]:
                own["missed"].add(key)
                self.learn(key)
        self.use(own, {key: place[key] for key in keys if key in ready or key in new})
        own["reused"] |= set(ready) - own["inserted"]
        lacking = max(len(new) + len(self.loads) - self.places, 0)
        evicted = self.evict(lacking, set(keys))
        if evicted is None:
            return None
        for key in new:
            self.loads[key] = -1
            self.ranks[key] = (own["rank"], -place[key])
            self.once.append(key)
            for ghosts in self.ghosts:
                if key in ghosts:
                    ghosts.remove(key)
        own["inserted"] |= set(new)
        return new, evicted

    def learn(self, key: int) -> None:
        for mine, other, sign in ((*self.ghosts, 1), (*self.ghosts[::-1], -1)):
            if key in mine:
                step = max(1, len(other) / len(mine))
                self.target = min(max(self.target + sign * step, 0), self.places)
                mine.remove(key)
                mine.append(key)
                return

    def evict(self, count: int, kept: set[int]) -> list[int] | None:
        free = [key for key, loads in self.loads.items() if loads == 0 and key not in kept]
        if len(free) < count:
            return None
        gone: list[int] = []
        for _ in range(count):
            if self.policy == "lru":
                key = min(free, key=lambda key: self.ranks[key])
            else:
                once = [key for key in self.once if key in free]
                often = [key for key in self.often if key in free]
                left = len([key for key in self.once if key not in gone])
                key = (once + often if left >= int(self.target) else often + once)[0]
            free.remove(key)
            gone.append(key)
        for key in gone:
            del self.loads[key], self.ranks[key]
            at = 0 if key in self.once else 1
            (self.once, self.often)[at].remove(key)
            self.ghosts[at].append(key)
        for ghosts in self.ghosts:
            del ghosts[: max(len(ghosts) - self.places, 0)]
        return gone

    def load(self, request: str, keys: list[int], first: int) -> None:
        own = self.of(request)
        for key in keys:
            self.loads[key] += 1
        self.use(own, {key: first + i for i, key in enumerate(keys)})
        own["reused"] |= set(keys) - own["inserted"]

    def end(self, request: str) -> None:
        own = self.own.pop(request, None)
        seen = {} if own is None else own["seen"]
        for key in sorted(seen, key=lambda key: -seen[key]):
            assert own is not None
            if key not in self.loads:
                continue
            self.clock += 1
            self.ranks[key] = (self.clock, 0)
            if key in own["reused"]:
                (self.once if key in self.once else self.often).remove(key)
                self.often.append(key)
            elif key in own["inserted"]:
                line = self.once if key in self.once else self.often
                line.remove(key)
                line.append(key)


def _drawn(rng: random.Random) -> Prompt:
    """A prompt that may share its beginning with others, and end within what these go on with."""
    prompt = [(rng.randrange(2), rng.choice([1, 2, 4]))]
    return [*prompt, *((rng.randrange(2, 5), rng.choice([1, 2, 5])) for _ in range(rng.randrange(3)))]


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize("size", [1, 2])
def test_random_lives_equal_the_plain_ones(policy: Literal["lru", "arc"], threshold: int, size: int) -> None:
    """Requests of shared prefixes offer, find, load and end at random; what is taken in and evicted is the same, chunk
    by chunk, as of lists that are walked."""
    evictions = refusals = loads = ends = 0
    for seed in range(30):
        rng = random.Random(seed)
        places = rng.randint(3, 12)
        tier, plain = OffloadTier(places, policy, threshold, chunk_blocks=size), _Plain(places, policy, threshold)
        keys_by: dict[str, list[int]] = {}
        storing: list[tuple[list[Part], list[int]]] = []
        loading: list[tuple[list[Part], list[int]]] = []
        for step in range(150):
            request = f"r{rng.randrange(6)}"
            if request not in keys_by:
                prompt = _drawn(rng)
                keys = keys_of(prompt, step)
                blocks = sum(count for _, count in prompt) + rng.choice([0, 0, 3])
                keys_by[request] = keys.up_to(blocks)[size - 1 :: size]
                tier.begin(request, keys)
            mine = keys_by[request]
            start = rng.randrange(max(len(mine) - 1, 1))
            stop = min(start + rng.randint(1, 4), len(mine))
            keys_there = mine[start:stop]
            found = tier.find(request, start, stop)
            there = next((i for i, key in enumerate(keys_there) if key not in plain.loads), len(keys_there))
            assert found.stop == start + there
            assert found.is_storing == any(plain.loads[key] < 0 for key in keys_there[:there])
            assert found.is_loading == any(plain.loads[key] > 0 for key in keys_there[:there])
            match rng.randrange(8):
                case 0 | 1 | 2 if keys_there:
                    taken, other = tier.offer(request, start, stop), plain.offer(request, keys_there, start)
                    refusals += taken is None
                    assert (taken is None) == (other is None)
                    if taken is not None and other is not None:
                        new = [key for part in taken.stored for key in keys_at(part, size)]
                        gone = [key for part in taken.evicted for key in reversed(keys_at(part, size))]
                        assert (new, gone) == other
                        evictions += len(gone)
                        storing.append((taken.stored, new))
                case 3 | 6 if storing:
                    parts, done = storing.pop(rng.randrange(len(storing)))
                    tier.stored(parts)
                    plain.loads |= dict.fromkeys(done, 0)
                case 4 if keys_there and found.stop == stop and not found.is_storing:
                    loading.append((tier.load(request, start, stop), keys_there))
                    plain.load(request, keys_there, start)
                    loads += 1
                case 5 if loading:
                    parts, done = loading.pop()
                    tier.loaded(parts)
                    for key in done:
                        plain.loads[key] -= 1
                case 7:
                    tier.end(request)
                    plain.end(request)
                    del keys_by[request]
                    ends += 1
                case _:
                    pass
            tier.check()
            assert tier.num_used == len(plain.loads)
    assert evictions > 100 and refusals > 100 and loads > 10 and ends > 100


def test_numbers_are_those_of_a_set() -> None:
    """Whatever is added in whatever order: what is new, and rows that neither overlap nor touch."""
    for seed in range(200):
        rng, mine, plain = random.Random(seed), Numbers(), set[int]()
        for _ in range(8):
            start = rng.randrange(24)
            stop = start + rng.randint(1, 6)
            fresh = set(range(start, stop)) - plain
            plain |= fresh
            assert mine.add(start, stop) == _rows(fresh)
            assert mine.rows == _rows(plain)


def _rows(numbers: set[int]) -> list[tuple[int, int]]:
    """(first, end) of all numbers that follow each other."""
    firsts = sorted(n for n in numbers if n - 1 not in numbers)
    ends = sorted(n + 1 for n in numbers if n + 1 not in numbers)
    return list(zip(firsts, ends, strict=True))


def keys_at(part: Part, size: int) -> list[int]:
    """The keys of the chunks of `part`, of `size` blocks each, one by one."""
    chain, low, high = part
    rows = [bisect_right(chain.firsts, number) - 1 for number in range(low, high)]
    return [chain.keys[row] + size * (n - chain.firsts[row]) for n, row in zip(range(low, high), rows, strict=True)]
