"""Chunks of KV in the memory of the host, found again by their tokens, as LMCache 0.5.6 keeps them on the CPU.

1. A lookup finds a request's first chunks, as many as are there one after the other. It pins them, and makes them the
   ones used last, the first chunk after the others. A pinned chunk is not given up.
2. Chunks are stored together: each takes a free place, or that of the chunk unused longest; the first for which there
   is none ends that. Then they are entered, in their order; one that is there already gives its place back.

3. Stored layer by layer, chunks that are there already are left out, and all that a step stores have their places
   before any is entered.

So what was just stored is given up from its first chunk on, and what was found again from its last one on.
Source: lmcache/v1/storage_backend/local_cpu_backend.py, cache_policy/lru.py and lmcache/v1/cache_engine.py (`store`,
`store_layer`) of the 0.5.6 wheel.
"""

from __future__ import annotations

from batchsim.kv.block_keys import BlockKeys


class ChunkStore:
    """Room for `num_chunks` chunks. Sequences are named by the keys of their chunks."""

    def __init__(self, num_chunks: int) -> None:
        if num_chunks < 1:
            raise ValueError(f"a tier of {num_chunks} chunks holds nothing: give it at least 1")
        self.num_chunks = num_chunks
        self._num_reserved = 0
        self._pins: dict[int, int] = {}  # of each chunk, by its key, the one unused longest first

    def __len__(self) -> int:
        return len(self._pins)

    def find(self, keys: BlockKeys, most: int) -> int:
        """How many of the first `most` chunks are there, one after the other; these are pinned once more each."""
        pins, hits = self._pins, list[int]()
        for number in range(most):
            key = keys.key(number)
            if key not in pins:
                break
            hits.append(key)
        for key in reversed(hits):
            pins[key] = pins.pop(key) + 1
        return len(hits)

    def unpin(self, keys: BlockKeys, count: int) -> None:
        """Takes back a pin of each of the first `count` chunks."""
        for key in keys.up_to(count):
            self._pins[key] -= 1

    def store(self, keys: BlockKeys, first: int, stop: int) -> int:
        """Stores chunks `first` to `stop` - 1; returns how many found a place."""
        pins, taken = self._pins, 0
        while taken < stop - first and (len(pins) + taken < self.num_chunks or self._give_up()):
            taken += 1
        for number in range(first, first + taken):
            pins.setdefault(keys.key(number), 0)
        return taken

    def reserve(self, keys: BlockKeys, first: int, stop: int) -> list[int]:
        """Takes a place for each of chunks `first` to `stop` - 1 that is not there, up to one for which there is none;
        returns their keys, for `enter`."""
        reserved: list[int] = []
        for number in range(first, stop):
            key = keys.key(number)
            if key in self._pins:
                continue
            if len(self._pins) + self._num_reserved >= self.num_chunks and not self._give_up():
                break
            self._num_reserved += 1
            reserved.append(key)
        return reserved

    def enter(self, reserved: list[int]) -> None:
        """Enters the chunks that `reserve` returned; one that is there by now gives its place back."""
        self._num_reserved -= len(reserved)
        for key in reserved:
            self._pins.setdefault(key, 0)

    def _give_up(self) -> bool:
        """Gives up the unpinned chunk unused longest; returns whether there was one."""
        key = next((key for key, pins in self._pins.items() if not pins), None)
        if key is None:
            return False
        del self._pins[key]
        return True

    def check_unpinned(self) -> None:
        """AssertionError unless no chunk is pinned or yet to be entered, and there are no more than fit. O(chunks)."""
        assert not self._num_reserved, "a place is kept for a chunk"
        assert not any(self._pins.values()), "a chunk is still pinned"
        assert len(self._pins) <= self.num_chunks, "more chunks than places"
