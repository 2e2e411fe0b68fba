"""The LoRA adapters of vLLM's running requests, of which there are at most `max_loras`.

Rule: a waiting request whose adapter no running one has is passed over while as many adapters as allowed have running
ones; those behind it are tried. Requests of the base model count for nothing. An adapter is in use from the admission
of its first running request until its last one has ended or was preempted.
Source: vllm/v1/core/sched/scheduler.py of the 0.33.0 wheel, `schedule`.
"""

from __future__ import annotations

from batchsim.kernel.types import MISSING, Event, Sequence
from batchsim.policies.families.held_back import HeldBack


class ActiveAdapters:
    """The adapters in use, at most `most`, and the waiting requests that are held back for want of a place."""

    __slots__ = ("_held", "_most", "_running")

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: dict[int, int] = {}  # running requests by adapter
        self._held = HeldBack()

    def holds_back(self, seq: Sequence) -> bool:
        """Whether `seq`, which has an adapter, would bring one more than there may be."""
        return len(self._running) >= self._most and seq.request.adapter not in self._running

    def enter(self, seq: Sequence) -> None:
        """Takes note that `seq`, which has an adapter, runs from now on."""
        adapter = seq.request.adapter
        self._running[adapter] = self._running.get(adapter, 0) + 1
        self._held.forget(seq)

    def leave(self, seq: Sequence) -> None:
        """Takes note that `seq`, which has an adapter, has ended or lost its place."""
        adapter = seq.request.adapter
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]

    def forget(self, seq: Sequence) -> None:
        """Takes note that `seq` waits no longer."""
        self._held.forget(seq)

    def tried(self, passed_over: list[Sequence], stopped_at: Sequence | None) -> list[Event]:
        """The events of a pass that has passed over requests, of which those with adapters may be held back, and has
        stopped at another one, if at any."""
        held = [seq for seq in passed_over if seq.request.adapter != MISSING and self.holds_back(seq)]
        return self._held.tried(dict.fromkeys(held, "adapter"), stopped_at)
