"""The tier of KV in the host's memory against plain lists of chunks: what it takes in, evicts and finds.

The rules are those of vllm/v1/kv_offload/cpu/manager.py, policies/lru.py and policies/arc.py of vLLM 0.33.0.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import Literal

import pytest

from batchsim.kv.offload_chains import Part
from batchsim.kv.offload_order import Numbers
from batchsim.kv.offload_tier import OffloadTier
from tests.plain.vllm_tiering import PlainTier
from tests.support.tier_prompts import Prompt, keys_of


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
        tier, plain = OffloadTier(places, policy, threshold, chunk_blocks=size), PlainTier(places, policy, threshold)
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
