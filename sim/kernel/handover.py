"""What of a request leaves one engine for another: its counters as they stood, and how it goes on there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from batchsim.kernel.record import MISSING
from batchsim.kernel.types import Arrival, Request, Sequence


@dataclass(frozen=True, slots=True)
class Resume:
    """What a request has behind it as it reaches an engine that goes on with it. Times in ns, MISSING before they are.

    `computed_tokens` of its known tokens come with their KV, `output_tokens` were generated. The others count what
    befell it at the engines before, so that the row of its last engine counts its whole life: `computed_once` is the
    most tokens that were ever computed at once, below which computing is recompute; the rest are columns of the row.
    """

    computed_tokens: int
    output_tokens: int
    computed_once: int = 0
    scheduled_ns: int = MISSING
    first_token_ns: int = MISSING
    num_preemptions: int = 0
    num_swaps: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_all: int = 0

    def sequence(self, request: Request) -> Sequence:
        """A sequence of `request` that stands where this says; ValueError if no such one could have work left."""
        known = request.prompt_tokens + self.output_tokens
        if not (0 <= self.computed_tokens < known and 0 <= self.output_tokens < request.max_output_tokens):
            raise ValueError(
                f"request {request.id} cannot resume with {self.computed_tokens} tokens computed and"
                f" {self.output_tokens} generated: it has {request.prompt_tokens} tokens of prompt and at most"
                f" {request.max_output_tokens} of output"
            )
        seq = Sequence(request)
        seq.settled_computed_tokens = self.computed_tokens
        seq.settled_output_tokens = self.output_tokens
        return seq


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
