"""How an engine's host and its GPU wait for each other, as the engine's own main loop has it.

The host schedules, prepares inputs and processes outputs; the GPU, or each stage of a pipeline of GPUs, runs steps in
the order in which they were launched. `batchsim.drive.instant` has the loops themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineLoop:
    """One engine's main loop.

    `kind`: `sync`, a step is scheduled once the one before is over; `batch_queue`, vLLM's queue of at most `depth`
    calls of the scheduler that are not processed yet; `overlap`, SGLang's and TensorRT-LLM's: a step is launched, then
    the one before it is processed; `events`, Vidur's: whenever a request arrives or a step ends, steps are scheduled
    until `depth` are in flight. `nap_ns`: for how long a batch queue sleeps after a call that scheduled nothing while
    requests remain. `stages`: the stages of the pipeline through which each step goes, 1 without one. `piped`: what a
    `sync` loop is over several.
    """

    kind: Literal["sync", "batch_queue", "overlap", "events"] = "sync"
    depth: int = 1
    nap_ns: int = 0
    stages: int = 1
    piped: Literal["batch_queue", "events"] = "batch_queue"

    @property
    def is_ahead(self) -> bool:
        """Whether a step may be scheduled before the results of the one before are known."""
        return self.kind != "sync"

    def over(self, stages: int) -> EngineLoop:
        """This loop over a pipeline of `stages` stages: each beyond the first lets one more step be in flight."""
        if stages == 1:
            return self
        kind = self.piped if self.kind == "sync" else self.kind
        return replace(self, kind=kind, depth=self.depth + stages - 1, stages=stages)


SYNC = EngineLoop()
EVENTS = EngineLoop(piped="events")
"""A step, then the next; over several stages as many steps in flight, as Vidur has it."""
OVERLAP = EngineLoop("overlap", depth=2)
"""A step in flight while the next one is scheduled, as SGLang and TensorRT-LLM have it."""
