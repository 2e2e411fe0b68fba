"""When TensorRT-LLM's prompts can be found again, and which wait for another's KV blocks instead of computing them.

Source: beneficialToSkip in cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp, findNewContextBlock in
kvCacheManager.cpp; of the PyTorch runtime update_resources in tensorrt_llm/_torch/pyexecutor/resource_manager.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from batchsim.kernel.batch import Batch
from batchsim.kernel.types import Sequence
from batchsim.kv.reuse_tree import ReuseTreeKV


def store_prompts(cache: ReuseTreeKV, batch: Batch) -> None:
    """The C++ runtime: stores the prompts that end with `batch`, before their next tokens are known."""
    for seq in batch.sampled:
        cache.store(seq, seq.settled_computed_tokens - 1)


def store_chunks(cache: ReuseTreeKV, batch: Batch, running: Container[Sequence], launched: Batch | None) -> None:
    """The PyTorch runtime: stores of the prompts of `batch`, whose results are there, what was launched; of one that
    ends with `launched`, the step in flight, all but the last token, as the next one is not known."""
    for seq, _ in batch.chunks:
        if seq in running:
            unknown = launched is not None and seq in launched.sampled
            cache.store(seq, seq.settled_computed_tokens - unknown)


class Prefixes:
    """Which prompts of one step will add which first block to the reuse tree, and `waits_for`: for each prompt that
    waits for such a block, the id of the request that adds it.

    `computing` are the prompts computed in part. Waiting prompts are asked about in their order, each once or, as
    TensorRT-LLM does after a pause, once more. All blocks are those missing when the step began.
    """

    def __init__(self, cache: ReuseTreeKV | None, computing: Iterable[Sequence]) -> None:
        self._cache = cache
        self._missing: dict[Sequence, int | None] = {}
        self._made: dict[int, int] = {}  # key of a block -> the request that makes it
        self.waits_for: dict[Sequence, int] = {}
        if cache is not None:
            for seq in computing:
                self._makes(seq)

    def note(self, waiting: Iterable[Sequence]) -> None:
        """Looks up now which block each of `waiting` lacks, before the KV of a paused request changes the tree."""
        for seq in waiting:
            self._first_missing(seq)

    def must_wait(self, seq: Sequence) -> bool:
        """Whether `seq` waits in this step for a block that an earlier prompt makes; else `seq` will make it.

        Asked a second time, `seq` waits for its own block, if it lacks a full one.
        """
        key = self._first_missing(seq)
        if key is None:
            return False
        maker = self._made.get(key)
        if maker is None:
            self._made[key] = seq.request.id
            return False
        self.waits_for[seq] = maker
        return True

    def _makes(self, seq: Sequence) -> None:
        key = self._first_missing(seq)
        if key is not None:
            self._made.setdefault(key, seq.request.id)

    def _first_missing(self, seq: Sequence) -> int | None:
        if self._cache is None:
            return None
        if seq not in self._missing:
            self._missing[seq] = self._cache.first_missing(seq)
        return self._missing[seq]
