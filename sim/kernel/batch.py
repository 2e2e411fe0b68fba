"""A scheduler's answer (one step's work, or until when to wait) and the result of the step.

A scheduler is pure: it maps the current time to what to run (`Batch`) or until when to wait (`Idle`). It has no clock,
no randomness and no I/O, so a simulation and a real engine can crank the very same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from batchsim.base.errors import ScenarioError
from batchsim.base.units import MAX_TIME_NS, format_duration
from batchsim.kernel.types import DecodeGroup, Sequence, by_order

if TYPE_CHECKING:
    from batchsim.kernel.draft_group import DraftRows, Verified
    from batchsim.kernel.host_link import LayerCopies, LayerLoad, StepCopies


class Batch:
    """One step's work, valid from `schedule()` to `complete()`. To keep it longer, copy `items()`.

    `decodes` is the group by reference, or None when the decodes sit this step out. `chunks` are prefill (or recompute)
    pieces `(sequence, tokens)`. `num_decode_tokens` are the rows that the `num_decode` sequences compute: one each, and
    one for each draft token, of which `num_accepted_tokens`, filled in as the step is launched, are accepted.
    `context_tokens` is what the decodes read: the sum of their computed tokens. `drafting` assigns these rows to
    members where the group verifies drafts, else it is None.
    The `pad_` fields count padding work: prompt padding, of which `pad_prefill_rows` are whole rows beside the chunks
    and as long as the padded ones, rows of ended sequences, and the context these read.
    `cached` lists `(sequence, tokens)` that an admission of this step found in the prefix cache, if any.
    `swap_out` and `swap_in` list `(sequence, blocks)`; `preempted` the sequences that lost their place, in order;
    `joined` and `left` the changes of the decode group since the last batch. `sampled`, filled in by EngineCore as the
    step runs, lists the sequences whose chunk reached their last known token: they got a token and may decode.
    `num_passes`: how many passes through the model the step is made of, where the engine splits it, of which
    `num_wide_passes` of more than one token; both 0 where it is computed in one.
    `window_tokens` and `window_pairs`: of `context_tokens` and of the chunks' query-key pairs what layers with a
    sliding window read, filled in by a cost that times such layers apart; else 0.
    `layout` is the batch order of the real system: `by_order`, `decodes_first` or `chunks_first`, the chunks as listed.
    `apart`: where steps overlap, it is launched only once the results of the one before are processed.
    `num_steps` counts the steps it stands for: 1, and one more for each by which a leap repeated it. `group_step` is
    the group's count of steps with this one, filled in as the step is launched. `host_ns`: the executor's host times
    for it, cached; None before they are computed. `encoded` lists the sequences of which the encoder computes images,
    audios or videos before the step's forward, each with the places of these in `Request.items`. `load`: KV that is
    copied between GPU and host for the step, which waits for it; None where none is.
    """

    __slots__ = (
        "apart",
        "cached",
        "chunks",
        "context_tokens",
        "decodes",
        "drafting",
        "encoded",
        "group_step",
        "host_ns",
        "joined",
        "layout",
        "left",
        "load",
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
        "window_pairs",
        "window_tokens",
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
        self.num_passes = self.num_wide_passes = self.window_tokens = self.window_pairs = 0
        self.host_ns: tuple[int, int] | None = None
        self.group_step = self.num_accepted_tokens = 0
        self.drafting: DraftRows | None = None
        self.encoded: list[tuple[Sequence, tuple[int, ...]]] | tuple[()] = ()
        self.load: LayerLoad | StepCopies | LayerCopies | None = None
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
        """As `again`, `num_steps` steps later."""
        self.num_steps += num_steps
        self.context_tokens += num_steps * self.num_decode
        self.pad_context_tokens += num_steps * self.pad_decode_rows
        self.joined = self.left = ()

    def regroup(self) -> None:
        """Turns this decode-only batch into that of a step before, without the members that left the group since. O(1);
        before `again`."""
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


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run. The scheduler is asked again at the next arrival, or at `until_ns`, if not None and sooner."""

    until_ns: int | None = None


IDLE = Idle()


class AdapterLoad(NamedTuple):
    """What the LoRA adapter of `seq` took to be ready for a step: `ns` to come from `disk`, or to be copied from `host`
    memory; source "": it was on the GPU."""

    seq: Sequence
    source: Literal["disk", "host", ""]
    ns: int


@dataclass(slots=True)
class Masks:
    """The masks of allowed tokens that sampling a step needs: of these `sequences`, whose answers a grammar constrains.
    The host fills them in `ns`; by `wait_ns` the step is longer than its forward, since sampling waits for them."""

    sequences: list[Sequence]
    ns: int
    wait_ns: int = 0


@dataclass(slots=True)  # not frozen, which would take several times as long to make, once a step
class StepResult:
    """What a step took and which sequences produced their last token in it, in batch order.

    `verified`: where the decode group verifies drafts, what became of them. `stages_ns`: the duration of each stage of
    a pipeline, which sum to `duration_ns`; None where there is one stage. `landing`: where the step runs on behind the
    host, waits for its end and says what only then is known; `finished` is empty and `verified` None then. `loads`:
    what LoRA adapters took to be ready, one after another as the step began. `encode_ns`: of the duration, the time of
    each sequence's part of `Batch.encoded`, which comes first; None where nothing is. `masks`: sampling waits
    for them; None where no answer of the step is constrained.
    """

    duration_ns: int
    finished: list[Sequence]
    verified: Verified | None = None
    stages_ns: tuple[int, ...] | None = None
    landing: Callable[[], Landed] | None = None
    loads: list[AdapterLoad] | tuple[()] = ()
    encode_ns: list[int] | None = None
    masks: Masks | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """Result of a finished step. `finished`: the sequences that produced their last token in it, in batch order.

    `ran`: when the host was through with its launch, and when the device began and ended it, in ns of this machine's
    monotonic clock; None where `StepResult.duration_ns` has the duration. It is used only in wall-clock runs.
    `verified`: as `StepResult.verified`.
    """

    finished: list[Sequence]
    ran: tuple[int, int, int] | None = None
    verified: Verified | None = None


def check_end(end_ns: int, duration_ns: int) -> None:
    """Raises ScenarioError for a step of `duration_ns` that would end at `end_ns` if times cannot hold that."""
    if end_ns > MAX_TIME_NS:
        raise ScenarioError(
            f"cost: a step of {format_duration(duration_ns)} would end {format_duration(end_ns)} after the"
            f" start, beyond the {format_duration(MAX_TIME_NS)} that times can hold. Shorten the steps, or ask for"
            " fewer requests."
        )
