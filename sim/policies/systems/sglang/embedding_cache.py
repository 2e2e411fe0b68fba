"""SGLang's cache of the embeddings of images, videos and audios: which ones a prefill batch encodes.

Rule: the scheduler has no budget for them. In the forward of a prefill batch each item that overlaps its request's
chunk and is not in the cache is encoded, whole, once for the batch. The cache holds as many bytes as it may, and drops
the least recently used; an item larger than all of it is never kept and is encoded for every chunk again.
Source: python/sglang/srt/managers/mm_schedule.py and mem_cache/multimodal_cache.py of the 0.5.23 wheel.
Simplifies: models that split a request's images from each other; encoders on servers of their own are not simulated.
"""

from __future__ import annotations

from batchsim.kernel.types import Sequence


class EmbeddingCache:
    """A cache of `num_bytes`, in which each embedding takes `embedding_bytes`."""

    def __init__(self, num_bytes: int, embedding_bytes: int) -> None:
        self._room, self._embedding_bytes = num_bytes, embedding_bytes
        self._sizes: dict[int, int] = {}  # bytes by identifier, the least recently used first

    def encode(self, chunks: list[tuple[Sequence, int]]) -> list[tuple[Sequence, tuple[int, ...]]]:
        """The items, by sequence and place, that a step of `chunks` encodes; they are in the cache from then on."""
        encoded: list[tuple[Sequence, tuple[int, ...]]] = []
        there: set[int] = set()  # in this batch
        for seq, n in chunks:
            computed = seq.settled_computed_tokens
            places: list[int] = []
            for place, item in enumerate(seq.request.items):
                if item.start >= computed + n:
                    break
                if item.start + item.tokens <= computed or item.identifier in there:
                    continue
                if not self._use(item.identifier):
                    places.append(place)
                    self._keep(item.identifier, item.tokens * self._embedding_bytes)
                there.add(item.identifier)
            if places:
                encoded.append((seq, tuple(places)))
        return encoded

    def _use(self, identifier: int) -> bool:
        """Makes the item the most recently used; returns whether it is there."""
        size = self._sizes.pop(identifier, None)
        if size is None:
            return False
        self._sizes[identifier] = size
        return True

    def _keep(self, identifier: int, size: int) -> None:
        if size > self._room + sum(self._sizes.values()):
            return
        while size > self._room:
            self._room += self._sizes.pop(next(iter(self._sizes)))
        self._sizes[identifier] = size
        self._room -= size
