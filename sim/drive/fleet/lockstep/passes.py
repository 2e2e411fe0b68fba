"""Forward passes that ranks make together: each begins as the last rank launches it, and lasts as long for all.

Source: vllm/v1/engine/core.py, `DPEngineCoreProc`, and vllm/v1/worker/gpu/dp_utils.py of the vLLM 0.33.0 wheel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from batchsim.kernel.batch import Batch
from batchsim.kernel.protocols import LaneCosts


class Launched(NamedTuple):
    """What a rank launches: a batch, or None for a dummy, which has one token; and when its host was through."""

    batch: Batch | None
    launch_ns: int


class Met(NamedTuple):
    """What a rank brings to the all-reduce of unfinished requests: whether it has any, and when."""

    has_unfinished: bool
    now_ns: int


class PassCost(Protocol):
    """How long a pass takes."""

    def pass_ns(self, batches: Sequence[Batch | None]) -> int:
        """ns of a pass of these batches by rank, None being a dummy; their counters still stand as at its start."""
        ...


class Pass(NamedTuple):
    """One pass: its number from 0, when the last rank had launched it, its start and end on the devices, in ns, and the
    tokens of each rank, 0 for a dummy."""

    number: int
    launched_ns: int
    start_ns: int
    end_ns: int
    tokens: tuple[int, ...]


class LockstepCost:
    """The cost model of a rank's executor: a step on the device lasts as the pass that it is part of, `pass_ns`; what
    the host needs is as of `lanes`."""

    def __init__(self, lanes: LaneCosts) -> None:
        self._lanes = lanes
        self.pass_ns = 1

    def lanes(self) -> LockstepCost:
        return self

    def step_ns(self, batch: Batch) -> int:
        return self.pass_ns

    device_ns = step_ns

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        return (self.pass_ns,)

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return self._lanes.host_ns(batch)


def num_tokens(batch: Batch | None) -> int:
    """The tokens that a rank computes for its requests."""
    return 0 if batch is None else batch.num_prefill_tokens + batch.num_decode_tokens
