"""How TensorRT-LLM cuts prompts into chunks, and the order in which its requests wait.

Source: MicroBatchScheduler::setCtxRequestsChunkSize in cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp,
sortRequests in utils/inflightBatchingUtils.cpp.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from heapq import merge

from batchsim.base.errors import SchedulerStalled
from batchsim.kernel.types import Sequence, by_order

Chunks = list[tuple[Sequence, int]]


def lacking(seq: Sequence) -> int:
    """Number of known tokens of `seq`, which does not decode, that are not computed yet."""
    return seq.num_tokens - seq.settled_computed_tokens


def whole(contexts: Iterable[Sequence], capacity: int, budget: int) -> Chunks:
    """The prompts of `contexts` that a step of `budget` tokens computes in what is left of it, `capacity`: each whole,
    up to the first that does not fit.

    SchedulerStalled at one that fits no step: a request that the PyTorch runtime paused may be as long, and its
    scheduler then fails (MicroBatchScheduler::operator()).
    """
    chunks: Chunks = []
    for seq in contexts:
        tokens = seq.num_tokens
        if tokens > budget:
            raise SchedulerStalled(
                f"tensorrt_llm: request {seq.request.id} was paused with {tokens} tokens, more than max_num_tokens"
                f" {budget}, and prompts are not cut: TensorRT-LLM's scheduler fails here. Set enable_chunked_prefill:"
                " true or capacity_scheduler_policy: GUARANTEED_NO_EVICT, or raise max_num_tokens."
            )
        if tokens > capacity:
            break
        chunks.append((seq, tokens))
        capacity -= tokens
    return chunks


def first_come(contexts: Iterable[Sequence], capacity: int, unit: int) -> Chunks:
    """Chunks of `capacity` tokens in all: each prompt in turn takes what it lacks; one that is cut is cut to whole
    units, and may get nothing.

    Reads no further than the capacity lasts. What a cut leaves over goes to those behind.
    """
    chunks: Chunks = []
    for seq in contexts:
        whole = lacking(seq)
        n = whole if whole <= capacity else capacity // unit * unit
        if n:
            chunks.append((seq, n))
            capacity -= n
        if not capacity:
            break
    return chunks


def equal_progress(contexts: Iterable[Sequence], capacity: int, unit: int) -> Chunks:
    """Chunks of `capacity` tokens in all: each prompt in turn gets one more unit (its last one may be short), until no
    next unit fits."""
    sizes = dict.fromkeys(contexts, 0)
    if sum(map(lacking, sizes)) <= capacity:
        return [(seq, lacking(seq)) for seq in sizes]
    growing = list(sizes)
    while growing:
        still: list[Sequence] = []
        for seq in growing:
            n = min(unit, lacking(seq) - sizes[seq])
            if 0 < n <= capacity:
                sizes[seq] += n
                capacity -= n
                still.append(seq)
        growing = still
    return [(seq, n) for seq, n in sizes.items() if n]


def unfinished_first(chunks: Chunks) -> Chunks:
    """`chunks` partitioned: chunks that end a prompt last, as std::partition of libstdc++ puts them.

    The first that ends a prompt changes places with the last that does not, the second with the last but one, until
    they meet. Call it before hits in a prefix cache shorten chunks.
    """
    ends = [n == lacking(seq) for seq, n in chunks]
    first = [i for i, last in enumerate(ends) if last]
    behind = [i for i, last in enumerate(ends) if not last]
    for i, j in zip(first, reversed(behind), strict=False):
        if i > j:
            break
        chunks[i], chunks[j] = chunks[j], chunks[i]
    return chunks


class Waiting:
    """Requests that hold no KV, in order of arrival: never started ones, and paused ones, which keep their place."""

    def __init__(self) -> None:
        self._fresh: dict[Sequence, None] = {}
        self._paused: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._paused)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; may be changed meanwhile by nothing but `put_back`, whose entries this walk does not see."""
        if not self._paused:
            return iter(self._fresh)
        return merge(self._paused.copy(), self._fresh, key=by_order)

    def head(self) -> Sequence | None:
        """The first request; None if the queue is empty."""
        return next(iter(self), None)

    def push(self, seq: Sequence) -> None:
        """Takes in a new arrival, whose order is the highest so far."""
        self._fresh[seq] = None

    def put_back(self, seq: Sequence) -> None:
        """Takes in a paused request, at its place by arrival."""
        insort(self._paused, seq, key=by_order)

    def remove(self, seq: Sequence) -> None:
        """Takes out a request that starts or is cancelled."""
        if seq in self._fresh:
            del self._fresh[seq]
        else:
            self._paused.remove(seq)
