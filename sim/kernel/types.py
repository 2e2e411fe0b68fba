"""The nouns every part shares: requests, and the live sequences of an engine with the group in which they decode.

All times are integers of nanoseconds. Priorities: the lower number is the more important one.

Sequences that decode in lockstep share one step counter, so that a step of the group costs O(1). A member's counters
are derived from the group's: it joined at some step with some tokens, and has gained one token a step since. The
members whose next token starts a new KV block are known without a walk: a member with C computed tokens needs a block
when C is a multiple of the block size, so members are kept by the residue of the step at which that happens. Members
that gain different numbers of tokens are in a group of `batchsim.kernel.draft_group`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from batchsim.kernel.window_sum import WindowSum

if TYPE_CHECKING:
    from batchsim.kernel.tokens import TokenIds

MISSING = -1
"""What stands in the column of a record where there is no value."""


@dataclass(frozen=True, slots=True)
class Item:
    """An image, audio or video in a prompt: `tokens` placeholder tokens from token `start` on, each of which stands for
    one embedding of the encoder. Items of one content have one `identifier`, which is also the stream of their tokens.
    """

    identifier: int
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sent, as far as a scheduler may know it. Times in ns since the start of the run.

    `request_class` is the name of the request's class, `tenant` that of its customer; "": none. `tokens` says which
    tokens the prompt shares with other prompts; None: shares none. `ignore_eos`: the client asked for all of
    `max_output_tokens`, whether or not an end-of-sequence token comes before. `adapter` is the number of the LoRA
    adapter that answers it, MISSING: the base model alone. `items` are the images, audios and videos in the prompt, by
    their places. `constrained`: a grammar says which tokens may follow. With `max_output_tokens` 0 it is one of a
    pooling model (embedding, reranking, classification): it ends with its prompt, without a token.
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
    adapter: int = MISSING
    items: tuple[Item, ...] = ()
    constrained: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_output_tokens < 0 or self.arrival_ns < 0:
            raise ValueError(
                f"request {self.id}: prompt_tokens {self.prompt_tokens} must be at least 1, max_output_tokens"
                f" {self.max_output_tokens} and arrival_ns {self.arrival_ns} at least 0"
            )
        if self.items:
            self._check_items()
        if self.tokens is not None and self.tokens.num_tokens != self.prompt_tokens:
            raise ValueError(
                f"request {self.id}: {self.tokens.num_tokens} token ids, prompt_tokens {self.prompt_tokens}"
            )

    def _check_items(self) -> None:
        """ValueError where items overlap, are out of order, or lie beyond the prompt."""
        end = 0
        for item in self.items:
            if item.start < end or item.tokens < 1:
                raise ValueError(
                    f"request {self.id}: an item of {item.tokens} tokens from token {item.start} on, where the one"
                    f" before ends at {end}. Items have at least 1 token, and do not overlap"
                )
            end = item.start + item.tokens
        if end > self.prompt_tokens:
            raise ValueError(f"request {self.id}: an item ends at token {end}, prompt_tokens {self.prompt_tokens}")


@dataclass(frozen=True, slots=True)
class Resume:
    """What a request has behind it as it reaches an engine that goes on with it. Times in ns, MISSING before they are.

    `computed_tokens` of its known tokens come with their KV, `output_tokens` were generated. `prefilled`: all of its
    prompt does, and its first token, which the engine that goes on delivers. The others count what befell it at the
    engines before, so that the row of its last engine counts its whole life: `computed_once` is the most tokens that
    were ever computed at once, below which computing is recompute; the rest are columns of the row.
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
    prefilled: bool = False

    def sequence(self, request: Request) -> Sequence:
        """A sequence of `request` that stands where this says; ValueError if no such one could have work left."""
        known = request.prompt_tokens + self.output_tokens + self.prefilled
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
    flight that will turn out rejected; policies do not see them. `num_lost_tokens`, in flight as the policy preempted
    the sequence, are given up: EngineCore never delivers them.
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

    def take_first_token(self) -> None:
        """Counts the first token, which came with the KV of the whole prompt. By the policy that delivers it."""
        self.settled_output_tokens = 1

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


class DecodeGroup:
    """The sequences of one engine that decode together.

    `step` counts the decode steps the group has made. `total_context_tokens` is the sum of `num_computed_tokens`
    over the members, the KV tokens the next decode step reads. Join and leave are O(1); only EngineCore advances. When
    a member joined is the group's own affair: others ask what it has `gained`.
    `windowed` holds what the members read in layers with a sliding window, once `in_window` was asked; None before.
    `joined` and `left` hold what changed since the last batch took them; a sequence that left again at once is in both.
    """

    __slots__ = (
        "_by_phase", "_due", "block_size", "joined", "left", "members", "step", "total_context_tokens", "windowed",
    )  # fmt: skip

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.step = 0
        self.total_context_tokens = 0
        self.members: dict[Sequence, None] = {}
        self.joined: dict[Sequence, None] = {}
        self.left: list[Sequence] = []
        self._by_phase: list[dict[Sequence, None]] = [{} for _ in range(block_size)]
        self._due = [0] * block_size  # members by phase
        self.windowed: WindowSum | None = None

    def __len__(self) -> int:
        return len(self.members)

    def join(self, seq: Sequence) -> None:
        """Lets `seq` take part from the next decode step on. It must have exactly one known token uncomputed."""
        if seq.group is not None or seq.num_tokens - seq.num_computed_tokens != 1:
            raise ValueError(f"request {seq.request.id} cannot join the decode group: {seq!r}")
        computed = seq.settled_computed_tokens
        seq.group = self
        seq.joined_step = self.step
        seq.phase = phase = (self.step - computed) % self.block_size
        self.members[seq] = None
        self._by_phase[phase][seq] = None
        self._due[phase] += 1
        self.total_context_tokens += computed
        if self.windowed is not None:
            self.windowed.add(computed, self.step)
        self.joined[seq] = None

    def leave(self, seq: Sequence) -> None:
        """Settles the counters of `seq` and takes it out; also how a decode sits out a step."""
        gained = self.gained(seq)
        seq.settled_computed_tokens += gained
        seq.settled_output_tokens += gained
        seq.group = None
        seq.last_group, seq.left_step = self, self.step
        seq.epoch += 1
        del self.members[seq]
        del self._by_phase[seq.phase][seq]
        self._due[seq.phase] -= 1
        self.total_context_tokens -= seq.settled_computed_tokens
        if self.windowed is not None:
            self.windowed.remove(seq.settled_computed_tokens, self.step)
        self.left.append(seq)

    def blocks_due(self) -> int:
        """How many members need one more KV block for the next decode step. O(1)."""
        return self._due[self.step % self.block_size]

    def members_due(self, ahead: int = 0) -> list[Sequence]:
        """The members that need one more KV block `ahead` steps after the next one, in the order they joined."""
        return list(self._by_phase[(self.step + ahead) % self.block_size])

    def blocks_due_in_turn(self, ahead: int = 0) -> list[int]:
        """How many members need one more KV block `ahead` steps after the next one, for that behind it and on, until it
        is their turn again."""
        first = (self.step + ahead) % self.block_size
        return self._due[first:] + self._due[:first]

    def members_due_over(self, num_steps: int, ahead: int = 0) -> list[Sequence]:
        """`members_due` of `num_steps` steps, concatenated, from `ahead` steps after the next one on; with `ahead`
        below 0, of steps that the group has made, with the same members."""
        first = (self.step + ahead) % self.block_size
        turns = self._by_phase[first : first + num_steps]
        while (more := num_steps - len(turns)) > 0:
            turns += self._by_phase[:more]
        return list(chain.from_iterable(turns))

    def gained(self, seq: Sequence) -> int:
        """Output tokens that the member `seq` has got since it joined, as many as were computed of it since."""
        return self.step - seq.joined_step

    def blocks_held(self, seq: Sequence) -> int:
        """KV blocks that the member `seq` holds where no manager keeps their ids."""
        return max(seq.num_blocks, -(-seq.num_computed_tokens // self.block_size))

    def in_window(self, window: int) -> int:
        """KV tokens that the next decode step reads in a layer with that sliding window: the sum over the members of
        their computed tokens, each at most `window`. O(members) the first time, then O(what changed)."""
        windowed = self.windowed
        if windowed is None or windowed.window != window:
            windowed = self.windowed = WindowSum(window, self.step)
            for seq in self.members:
                windowed.add(seq.num_computed_tokens, self.step)
        windowed.move_to(self.step)
        return windowed.tokens

    def advance(self) -> None:
        """One decode step done: every member has one more computed and one more output token. O(1). EngineCore only."""
        self.step += 1
        self.total_context_tokens += len(self.members)

    def advance_by(self, num_steps: int) -> None:
        """As many steps done, as by `advance`."""
        self.step += num_steps
        self.total_context_tokens += num_steps * len(self.members)


def by_order(seq: Sequence) -> int:
    """The key that sorts sequences by their place in the engine's own list."""
    return seq.order


@dataclass(frozen=True, slots=True)
class Event:
    """A reason, for the records: kind `blocked`, `held_back`, `waits`, `sat_out`, `preempted` or `rejected`; or
    `first_token`: that of a request which came with its KV is delivered, `last` if it is its last, too.

    `held_back`: a request in the queue is passed over for a reason of its own, "" once it no longer is. `waits`: it
    waits for something of its own from now on, whatever holds the queue.
    `blocked` is emitted for the head of the queue when the head or its reason changes; those behind inherit it.
    `reason` is one of few short names, to be counted by; `detail` has the numbers of a rejection. `blocker` is the id
    of the request that stands in the way, where one does.
    """

    kind: str
    seq: Sequence
    reason: str
    blocker: int | None = None
    detail: str = ""
