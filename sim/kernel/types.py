"""The nouns every part shares: requests, live sequences, batches.

A scheduler is pure: it is told the time and returns what to run (`Batch`) or until when to wait (`Idle`). It has no
clock, no randomness and no I/O, so a simulation and a real engine can crank the very same object. All times are
integers of nanoseconds. Priorities: the lower number is the more important one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchsim.kernel.decode import DecodeGroup
    from batchsim.kernel.draft_group import DraftRows, Verified
    from batchsim.kernel.handover import Resume
    from batchsim.kernel.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sent, as far as a scheduler may know it. Times in ns since the start of the run.

    `request_class` is the name of the request's class, `tenant` that of the customer who sent it; "": of none.
    `tokens` says which tokens the prompt shares with others; None: none, with nobody. `ignore_eos`: the client asked
    for all of `max_output_tokens`, whether or not an end-of-sequence token comes before.
    """

    id: int
    arrival_ns: int
    prompt_tokens: int
    max_output_tokens: int
    priority: int = 0
    request_class: str = ""
    tenant: str = ""
    deadline_ns: int | None = None
    tokens: TokenIds | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_output_tokens < 1 or self.arrival_ns < 0:
            raise ValueError(
                f"request {self.id}: prompt_tokens {self.prompt_tokens} and max_output_tokens {self.max_output_tokens}"
                f" must be at least 1, arrival_ns {self.arrival_ns} at least 0"
            )
        if self.tokens is not None and self.tokens.num_tokens != self.prompt_tokens:
            raise ValueError(
                f"request {self.id}: {self.tokens.num_tokens} token ids, prompt_tokens {self.prompt_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request with what only the world knows: its true output length and when its client gives up.

    `output_tokens` goes to the executor, never to a policy; None leaves the length to the model. `sent_ns` is the
    time the client sent it, where a front end delays the arrival at the engine; None: the arrival itself.
    `submitted_ns` is when a load source in real time handed it over, at or after its intended time; None: at that time.
    `router_ns` is the time it waited at a router because no replica was up, `failover_ns` what it lived on replicas
    that failed, `num_retries` their number: all of it before this arrival, which is at the replica.
    `resume` is what it has behind it at engines that handed it over; None: it begins here.
    """

    request: Request
    output_tokens: int | None
    cancel_ns: int | None = None
    sent_ns: int | None = None
    submitted_ns: int | None = None
    router_ns: int = 0
    failover_ns: int = 0
    num_retries: int = 0
    resume: Resume | None = None


class Sequence:
    """The live state of one request.

    Counters are written by EngineCore only (and reset by the policy that preempts). While the sequence is in a decode
    group they are derived from the group's step. `order` is the admission serial and `num_blocks` the KV manager's
    count outside the group's growth. `epoch` changes on leaving the group and invalidates planned finishes.
    `max_output_tokens` is the request's, unless the policy lowers it in `add`, as some engines do to fit their KV.
    `last_group` is the group it left last, at its `left_step`. Where an engine schedules ahead of results, counters are
    of what is scheduled: what is known lags behind by the steps in flight. `num_wasted_tokens` of them, of a sequence
    that has finished, come after its last one; `num_rejected_tokens` of them, outside a group, are drafts of steps in
    flight that will turn out rejected, of which no policy knows. `num_lost_tokens`, in flight as the policy preempted
    the sequence, are given up: EngineCore delivers them to nobody.
    """

    __slots__ = (
        "epoch",
        "group",
        "joined_step",
        "last_group",
        "left_step",
        "max_output_tokens",
        "num_blocks",
        "num_lost_tokens",
        "num_rejected_tokens",
        "num_wasted_tokens",
        "order",
        "phase",
        "request",
        "settled_computed_tokens",
        "settled_output_tokens",
        "state",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.max_output_tokens = request.max_output_tokens
        self.order = -1
        self.epoch = 0
        self.num_blocks = self.num_lost_tokens = self.num_rejected_tokens = self.num_wasted_tokens = 0
        self.group: DecodeGroup | None = None
        self.last_group: DecodeGroup | None = None
        self.joined_step = self.left_step = 0
        self.phase = 0
        self.settled_computed_tokens = 0
        self.settled_output_tokens = 0
        self.state = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache."""
        group = self.group
        return self.settled_computed_tokens + (group.gained(self) if group is not None else 0)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, kept over preemptions."""
        group = self.group
        return self.settled_output_tokens + (group.gained(self) if group is not None else 0)

    @property
    def num_tokens(self) -> int:
        """All known tokens: prompt and generated ones. A step moves the computed tokens toward this."""
        return self.request.prompt_tokens + self.num_output_tokens

    def start_from_cache(self, num_tokens: int) -> None:
        """Takes `num_tokens` found in a prefix cache for computed. By the policy, on admission, before any chunk."""
        self.settled_computed_tokens = num_tokens

    def reset_computed(self) -> None:
        """Forgets the KV after a preemption by recompute; generated tokens are kept. Not while in the group."""
        self.settled_computed_tokens = 0

    def cut_output(self, num_tokens: int) -> None:
        """Forgets generated tokens, to be generated anew, down to `num_tokens` known ones. After `reset_computed`."""
        self.settled_output_tokens -= max(self.num_tokens - num_tokens, 0)

    def lose_in_flight(self, num_tokens: int) -> None:
        """Gives up the last `num_tokens` generated tokens, whose steps are in flight: they are generated anew. By the
        policy that preempts, after `reset_computed`."""
        self.settled_output_tokens -= num_tokens
        self.num_lost_tokens += num_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence(request {self.request.id}, order {self.order}, computed {self.num_computed_tokens} of"
            f" {self.num_tokens} tokens, {self.num_output_tokens} output, {self.num_blocks} blocks,"
            f" {'decoding' if self.group is not None else 'not decoding'})"
        )


class Batch:
    """One step's work, valid from `schedule()` to `complete()`. Whoever keeps it copies `items()`.

    `decodes` is the group by reference, or None when the decodes sit this step out. `chunks` are prefill (or
    recompute) pieces `(sequence, tokens)`. `num_decode_tokens` are the rows that the `num_decode` sequences compute:
    one each, and one for each draft token, of which `num_accepted_tokens`, filled in as the step is launched, are
    accepted. `context_tokens` is what the decodes read: the sum of their computed tokens. `drafting` says who computes
    which of these rows where the group verifies drafts, else it is None.
    The `pad_` fields are work done for nothing: prompt padding, of which `pad_prefill_rows` are whole rows beside the
    chunks and as long as the padded ones, rows of ended sequences, and the context these read.
    `cached` lists `(sequence, tokens)` that an admission of this step found in the prefix cache, if any.
    `swap_out` and `swap_in` list `(sequence, blocks)`; `preempted` the sequences that lost their place, in order;
    `joined` and `left` the changes of the decode group since the last batch. `sampled`, filled in by EngineCore as the
    step runs, lists the sequences whose chunk reached their last known token: they got a token and may decode.
    `num_passes`: how many passes through the model the step is made of, where the engine splits it, of which
    `num_wide_passes` of more than one token; both 0 where it is computed in one.
    `layout` is the batch order of the real system: `by_order`, `decodes_first` or `chunks_first`, the chunks as listed.
    `apart`: where steps overlap, it is launched only once the results of the one before are processed.
    `num_steps` counts the steps it stands for: 1, and one more for each by which a leap repeated it. `group_step` is
    the group's count of steps with this one, filled in as the step is launched. `host_ns`: what the executor said of
    the host's time for it, for who asks again; None before.
    """

    __slots__ = (
        "apart",
        "cached",
        "chunks",
        "context_tokens",
        "decodes",
        "drafting",
        "group_step",
        "host_ns",
        "joined",
        "layout",
        "left",
        "num_accepted_tokens",
        "num_decode",
        "num_decode_tokens",
        "num_passes",
        "num_prefill_tokens",
        "num_steps",
        "num_wide_passes",
        "pad_context_tokens",
        "pad_decode_rows",
        "pad_prefill_rows",
        "pad_prefill_tokens",
        "preempted",
        "sampled",
        "swap_in",
        "swap_out",
    )

    def __init__(
        self,
        decodes: DecodeGroup | None,
        chunks: list[tuple[Sequence, int]],
        num_prefill_tokens: int,
        *,
        preempted: list[Sequence] | tuple[()] = (),
        cached: list[tuple[Sequence, int]] | tuple[()] = (),
        swap_out: list[tuple[Sequence, int]] | tuple[()] = (),
        swap_in: list[tuple[Sequence, int]] | tuple[()] = (),
        pad_prefill_tokens: int = 0,
        pad_prefill_rows: int = 0,
        pad_decode_rows: int = 0,
        pad_context_tokens: int = 0,
        layout: str = "by_order",
    ) -> None:
        self.decodes = decodes
        self.chunks = chunks
        self.num_prefill_tokens = num_prefill_tokens
        self.preempted = preempted
        self.cached = cached
        self.swap_out = swap_out
        self.swap_in = swap_in
        self.pad_prefill_tokens = pad_prefill_tokens
        self.pad_prefill_rows = pad_prefill_rows
        self.pad_decode_rows = pad_decode_rows
        self.pad_context_tokens = pad_context_tokens
        self.layout = layout
        self.apart = False
        self.num_steps = 1
        self.num_passes = self.num_wide_passes = 0
        self.host_ns: tuple[int, int] | None = None
        self.group_step = self.num_accepted_tokens = 0
        self.drafting: DraftRows | None = None
        self.sampled: list[Sequence] | tuple[()] = ()
        self.joined: list[Sequence] | tuple[()] = ()
        self.left: list[Sequence] | tuple[()] = ()
        if decodes is None:
            self.num_decode = self.num_decode_tokens = self.context_tokens = 0
            return
        self.num_decode = self.num_decode_tokens = len(decodes.members)
        self.context_tokens = decodes.total_context_tokens
        if decodes.joined:
            self.joined, decodes.joined = list(decodes.joined), {}
        if decodes.left:
            self.left, decodes.left = decodes.left, []

    def verify(self, drafting: DraftRows) -> None:
        """Says that the members of the group verify drafts, in the rows `drafting`."""
        self.drafting = drafting
        self.num_decode_tokens = drafting.num_rows
        self.pad_decode_rows = sum(drafting.padding.values())

    def verify_again(self) -> None:
        """Turns this decode-only batch into the one a step later, with as many drafts of the same sequences. O(1); for
        `Scheduler.repeat`."""
        group = self.decodes
        assert group is not None
        self.num_steps += 1
        self.context_tokens = group.total_context_tokens
        self.joined = self.left = ()

    def again(self) -> None:
        """Turns this decode-only batch into the identical one a step later. O(1); for `Scheduler.repeat`."""
        self.num_steps += 1
        self.context_tokens += self.num_decode
        self.pad_context_tokens += self.pad_decode_rows
        self.joined = self.left = ()

    def again_by(self, num_steps: int) -> None:
        """As `again`, so many steps later."""
        self.num_steps += num_steps
        self.context_tokens += num_steps * self.num_decode
        self.pad_context_tokens += num_steps * self.pad_decode_rows
        self.joined = self.left = ()

    def regroup(self) -> None:
        """Turns this decode-only batch into that of a step before, had the members who left the group since not been in
        it. O(1); before `again`."""
        group = self.decodes
        assert group is not None
        self.num_decode = self.num_decode_tokens = len(group.members)
        self.context_tokens = group.total_context_tokens - self.num_decode

    def items(self) -> Iterator[tuple[Sequence, int]]:
        """Every sequence of the step with its scheduled tokens, in batch order. O(batch log batch)."""
        chunks, drafting = self.chunks, self.drafting
        if drafting is not None:
            decodes = list(zip(drafting.sequences, drafting.rows.tolist(), strict=True))
            chunks = [(seq, n + drafting.padding.get(seq, 0)) for seq, n in chunks]
        else:
            decodes = [(seq, 1) for seq in self.decodes.members] if self.decodes is not None else []
        if self.layout == "by_order":
            yield from sorted(decodes + chunks, key=_item_order)
            return
        decodes.sort(key=_item_order)
        if self.layout == "decodes_first":
            yield from decodes
            yield from sorted(self.chunks, key=_item_order)
        else:
            yield from self.chunks
            yield from decodes

    def in_order(self, sequences: list[Sequence]) -> list[Sequence]:
        """`sequences`, all of this batch, in batch order."""
        if len(sequences) < 2:
            return sequences
        if self.layout == "by_order":
            return sorted(sequences, key=by_order)
        first_decodes, listed = self.layout == "decodes_first", {seq: i for i, (seq, _) in enumerate(self.chunks)}
        places = {} if first_decodes else listed
        return sorted(sequences, key=lambda seq: ((seq in listed) is first_decodes, places.get(seq, seq.order)))


def _item_order(item: tuple[Sequence, int]) -> int:
    return item[0].order


def by_order(seq: Sequence) -> int:
    """The key that sorts sequences by their place in the engine's own list."""
    return seq.order


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run. The scheduler is asked again at the next arrival, or at `until_ns`, if not None and sooner."""

    until_ns: int | None = None


IDLE = Idle()


@dataclass(slots=True)  # not frozen, which would take several times as long to make, once a step
class StepResult:
    """What a step took and which sequences produced their last token in it, in batch order.

    `verified`: where the decode group verifies drafts, what became of them. `stages_ns`: the duration of each stage of
    a pipeline, which sum to `duration_ns`; None where there is one stage. `landing`: where the step runs on behind the
    host, waits for its end and says what only then is known; `finished` is empty and `verified` None then.
    """

    duration_ns: int
    finished: list[Sequence]
    verified: Verified | None = None
    stages_ns: tuple[int, ...] | None = None
    landing: Callable[[], Landed] | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """What is known of a step once it is over: which sequences produced their last token in it, in batch order.

    `ran`: when the host was through with its launch, and when the device began and ended it, in ns of this machine's
    monotonic clock; None where `StepResult.duration_ns` has told the duration. It counts in runs by the wall clock
    alone: in others a device's time is none. `verified`: as `StepResult.verified`.
    """

    finished: list[Sequence]
    ran: tuple[int, int, int] | None = None
    verified: Verified | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A reason, for the records: kind `blocked`, `sat_out`, `preempted` or `rejected`.

    `blocked` is emitted for the head of the queue when the head or its reason changes; those behind inherit it.
    `reason` is one of few short names, to be counted by; `detail` has the numbers of a rejection. `blocker` is the id
    of the request that stands in the way, where one does.
    """

    kind: str
    seq: Sequence
    reason: str
    blocker: int | None = None
    detail: str = ""
