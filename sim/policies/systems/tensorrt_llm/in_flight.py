"""What TensorRT-LLM's scheduler does not know yet, or knows beforehand, of the step in flight while it is asked.

Source: _executor_loop_overlap in tensorrt_llm/_torch/pyexecutor/py_executor.py (00043967), willCompleteNextIteration in
cpp/include/tensorrt_llm/batch_manager/llmRequest.h.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from batchsim.kernel.batch import Batch
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.types import DecodeGroup, Sequence


class InFlight:
    """The decoding sequences and the step in flight: `batch`, launched by the call before.

    `batch` is None where nothing is in flight, as always in an engine that is not `ahead`. `ending` are the running
    whose token in flight is the last by their caps: they run no more, and hold place and blocks until it is there.
    """

    def __init__(self, group: DecodeGroup, kv: KVBlockManager, max_model_len: int, *, ahead: bool) -> None:
        self.batch: Batch | None = None
        self.ending: dict[Sequence, None] = {}
        self._group = group
        self._kv = kv
        self._max_model_len = max_model_len
        self._ahead = ahead
        self._caps: list[tuple[int, int, int, Sequence]] = []  # heap: step of the group at the cap, order, epoch, who

    def go_on(self, partial: dict[Sequence, None]) -> None:
        """Begins a call: sequences of `partial` whose prompts end with the step in flight decode, and sequences that
        reach their caps with it are ending. Ends by a stop token are not known yet."""
        if self.batch is not None:
            self.let_decode(self.batch.sampled, partial)
        caps, group = self._caps, self._group
        while caps and caps[0][0] <= group.step:
            _, _, epoch, seq = heappop(caps)
            if seq.epoch == epoch:
                self.step_aside(seq)
                self.ending[seq] = None

    def step_aside(self, seq: Sequence) -> None:
        """Takes `seq` out of the group, with its blocks."""
        self._kv.allocate(seq, seq.num_computed_tokens)  # settles its count: it holds these blocks already
        self._group.leave(seq)

    def let_decode(self, sampled: Iterable[Sequence], partial: dict[Sequence, None]) -> None:
        """Moves those of `sampled` that are in `partial`, their prompts done, from there into the group."""
        for seq in sampled:
            if seq in partial:
                del partial[seq]
                self.decode_on(seq)

    def decode_on(self, seq: Sequence) -> None:
        """Lets `seq` join the group; ahead of results, until it reaches its cap."""
        if self._ahead:
            left = min(seq.max_output_tokens, self._max_model_len - seq.request.prompt_tokens) - seq.num_output_tokens
            heappush(self._caps, (self._group.step + left, seq.order, seq.epoch, seq))
        self._group.join(seq)

    def tokens_of(self, seq: Sequence) -> int:
        """How many of the tokens of the running `seq` are in flight: 1 or 0."""
        if self.batch is None:
            return 0
        return int(seq.group is not None or seq in self.ending or seq in self.batch.sampled)
