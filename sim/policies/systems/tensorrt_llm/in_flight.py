"""What TensorRT-LLM's scheduler does not know yet, or knows beforehand, of the step in flight while it is asked.

Source: _executor_loop_overlap in tensorrt_llm/_torch/pyexecutor/py_executor.py (00043967), willCompleteNextIteration in
cpp/include/tensorrt_llm/batch_manager/llmRequest.h.
"""

from __future__ import annotations

from heapq import heappop, heappush

from batchsim.kernel.decode import DecodeGroup
from batchsim.kernel.types import Batch, Sequence


class InFlight:
    """The step launched by the call before, `batch`; None: nothing is in flight, as always in an engine that waits.

    `ending` are the running whose token in flight is the last by their caps: they run no more, and hold place and
    blocks until it is there.
    """

    def __init__(self, group: DecodeGroup) -> None:
        self.batch: Batch | None = None
        self.ending: dict[Sequence, None] = {}
        self._group = group
        self._caps: list[tuple[int, int, int, Sequence]] = []  # heap: step of the group at the cap, order, epoch, who

    def expect(self, seq: Sequence, tokens: int) -> None:
        """Takes note that `seq`, which joins the group now, reaches its cap of output with so many more tokens."""
        heappush(self._caps, (self._group.step + tokens, seq.order, seq.epoch, seq))

    def at_their_caps(self) -> list[Sequence]:
        """The members of the group whose token in flight is the last that they may have; each is told once."""
        caps, step, found = self._caps, self._group.step, list[Sequence]()
        while caps and caps[0][0] <= step:
            _, _, epoch, seq = heappop(caps)
            if seq.epoch == epoch:
                found.append(seq)
        return found

    def tokens_of(self, seq: Sequence) -> int:
        """How many of the tokens of the running `seq` are in flight: 1 or 0."""
        if self.batch is None:
            return 0
        return int(seq.group is not None or seq in self.ending or seq in self.batch.sampled)
