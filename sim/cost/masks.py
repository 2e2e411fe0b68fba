"""How long a host takes to fill the masks of answers that grammars constrain.

Sampling of a step waits for the masks of its constrained sequences. Where the engine waits for each step, the host
fills them while the forward runs; ahead of results, once it has the tokens that they depend on (`kernel/in_flight.py`).
Source: vllm/v1/engine/core.py (`step`, `step_with_batch_queue`), v1/core/sched/scheduler.py (`get_grammar_bitmask`) and
async_scheduler.py; python/sglang/srt/managers/scheduler.py (`event_loop_overlap`, `launch_batch_sample_if_needed`) and
tp_worker.py. Read, not recorded. Simplifies: sampling itself stays in the step's time before the wait; SGLang's results
of the step before go out with the masks filled, not before; compiling a grammar, which requests wait for in the queue,
takes no time.
"""

from __future__ import annotations

from typing import Literal

from batchsim.cost.base import HostPart
from batchsim.cost.structured_cost import StructuredCost
from batchsim.kernel.batch import Batch, Masks


class MaskTimes:
    """The masks of each step of an engine, in the time that `cost` says: `of` the sequences that get a token
    (`sampled`), or of all in the step. `host`: the host's part of a step's time."""

    def __init__(self, cost: StructuredCost, of: Literal["sampled", "all"], host: HostPart) -> None:
        self._cost, self._whole_chunks, self._host = cost, of == "sampled", host

    def of(self, batch: Batch) -> Masks | None:
        """The masks that the step `batch` needs, its counters not moved on yet; None where it needs none."""
        sequences = [
            seq
            for seq, n in batch.chunks
            if seq.request.constrained and (not self._whole_chunks or seq.settled_computed_tokens + n == seq.num_tokens)
        ]
        if batch.decodes is not None:
            sequences += [seq for seq in batch.decodes.members if seq.request.constrained]
        if not sequences:
            return None
        return Masks(sequences, int(self._cost.step + self._cost.per_request * len(sequences)))

    def host_ns(self, batch: Batch) -> int:
        """Of the time of the step `batch` under an engine that waits for each step, ns of the host."""
        return self._host.ns(batch)
