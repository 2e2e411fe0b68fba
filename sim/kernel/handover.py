"""A request as it leaves one engine for another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from batchsim.kernel.types import Arrival, Resume, Sequence


@dataclass(frozen=True, slots=True)
class Handover:
    """A request as it left an engine at `left_ns`, when it held `num_blocks` KV blocks there.

    `arrival` is how it had come to that engine, `resume` what it takes along; `seq` is its sequence there, by which the
    engine knows the KV that it keeps.
    """

    arrival: Arrival
    resume: Resume
    num_blocks: int
    left_ns: int
    seq: Sequence = field(repr=False, compare=False)

    def arrives(self, arrival_ns: int) -> Arrival:
        """The arrival of the request at its next engine; what the client sees goes on."""
        first = self.arrival
        return replace(
            first,
            request=replace(first.request, arrival_ns=arrival_ns),
            sent_ns=first.request.arrival_ns if first.sent_ns is None else first.sent_ns,
            submitted_ns=None,
            resume=self.resume,
        )
