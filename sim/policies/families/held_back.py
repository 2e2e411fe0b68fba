"""Waiting requests that others overtake, for a reason of their own: events for the records, only where that changes."""

from __future__ import annotations

from batchsim.kernel.types import Event, Sequence


class HeldBack:
    """The waiting requests that were passed over when last tried, each for its reason."""

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[Sequence, str] = {}

    def tried(self, passed_over: dict[Sequence, str], stopped_at: Sequence | None) -> list[Event]:
        """The events of a pass over the queue that has passed over some, each for its reason, and has stopped at
        another one for no reason of its own, if at any."""
        events: list[Event] = []
        if not (passed_over or self._reasons):
            return events
        for seq, reason in passed_over.items():
            if self._reasons.get(seq) != reason:
                self._reasons[seq] = reason
                events.append(Event("held_back", seq, reason))
        if stopped_at is not None and self._reasons.pop(stopped_at, ""):
            events.append(Event("held_back", stopped_at, ""))
        return events

    def forget(self, seq: Sequence) -> None:
        """Takes note that `seq` waits no longer."""
        self._reasons.pop(seq, None)
