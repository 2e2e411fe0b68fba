"""The executor of simulations: step times come from a cost model, finished sequences from the true output lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Protocol, cast

from batchsim.kernel.acceptance import DraftLuck, outcome
from batchsim.kernel.batch import Batch, StepResult
from batchsim.kernel.draft_group import MAX_GAIN, DraftGroup, Verified
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.protocols import Adapters, CostModel, DecodeLine, Encodes, FillsMasks, HasLanes, LaneCosts, Pads
from batchsim.kernel.types import DecodeGroup, Sequence

Line = Callable[[Batch], DecodeLine | None]


class HostNs(Protocol):
    """ns of the host before the launch of a step and after its end."""

    def __call__(self, batch: Batch | None) -> tuple[int, int]: ...


_ENDED = 1 << 62  # added to the target of a sequence whose last token is in flight: more tokens than any reaches


class SimExecutor:
    """Runs batches on a cost model. Knows the true output lengths; a step is O(sequences that end or join).

    Where the `loop` schedules ahead, `cost` must have lanes, and durations are the GPU's alone. `luck` says what
    drafts are worth, where a policy has any; such a step is O(batch), in a few operations on whole columns. `adapters`:
    what LoRA adapters cost, for requests that ask for some; such a step is O(batch), and none is leapt over. `masks`:
    how long those of constrained answers take, likewise.
    """

    def __init__(
        self, cost: CostModel, max_model_len: int, loop: EngineLoop = SYNC, luck: DraftLuck | None = None
    ) -> None:
        self.cost = cost
        self.max_model_len = max_model_len
        self.loop = loop
        self.luck = luck
        self._lanes: LaneCosts | None = cast(HasLanes, cost).lanes() if loop.is_ahead else None
        self.duration_ns = cost.step_ns if self._lanes is None else self._lanes.device_ns
        self.host_ns: HostNs = _no_host if self._lanes is None else self._lanes.host_ns
        self._decode_line: Line | None = getattr(cost if self._lanes is None else self._lanes, "decode_line", None)
        self.pads: Pads | None = cast(Pads, cost) if hasattr(cost, "pad") else None
        """The cost where its steps run in compiled shapes: what pads them, and takes that back."""
        self.adapters: Adapters | None = None
        self.masks: FillsMasks | None = None
        self.encoder: Encodes | None = getattr(cost, "encoder_time", None)
        """How long encoding takes before a step's forward; None: the engine has no encoder."""
        self.wait_ns = 0
        """How long the next step waits for the GPU, which runs those of other engines before."""
        self._launch_ns: dict[int, int] = {}  # by rows of a step of decodes
        self._targets: dict[Sequence, int] = {}
        self._ends: dict[DecodeGroup, list[tuple[int, int, int, Sequence]]] = {}  # (group step, order, epoch, sequence)

    def begin(self, seq: Sequence, output_tokens: int | None) -> None:
        """Notes the output length at which `seq` ends: its true one, the client's cap, the policy's or the model's."""
        request = seq.request
        if output_tokens is None:
            raise ValueError(f"request {request.id} has no output length; a simulation needs one")
        self._targets[seq] = min(output_tokens, seq.max_output_tokens, self.max_model_len - request.prompt_tokens)

    def end(self, seq: Sequence) -> None:
        self._targets.pop(seq, None)
        if self.adapters is not None:
            self.adapters.forget(seq)

    def launch_ns(self, num_decode: int) -> int:
        """Host time in ns before the launch of a step of `num_decode` decodes."""
        host_ns = self._launch_ns.get(num_decode)
        if host_ns is None:
            batch = Batch(None, [], 0)
            batch.num_decode = batch.num_decode_tokens = num_decode
            host_ns = self._launch_ns[num_decode] = self.host_ns(batch)[0]
        return host_ns

    def quiet_steps(self, batch: Batch) -> int:
        group = batch.decodes
        if group is None:
            return 0
        if isinstance(group, DraftGroup):
            return max(group.nearest_end - 1, 0) // (group.even_rows or MAX_GAIN)
        ends = self._ends.get(group)
        while ends:
            step, _, epoch, seq = ends[0]
            if epoch == seq.epoch:
                return step - group.step - 1
            heappop(ends)
        return 0

    def decode_line(self, batch: Batch) -> DecodeLine | None:
        """On which line the steps lie for which the decode-only `batch` occupies the device when it is repeated; None
        where that is not known."""
        if self._decode_line is None or not batch.num_decode or self.adapters is not None or self.masks is not None:
            return None
        if batch.pad_decode_rows or batch.pad_context_tokens or batch.num_passes:
            return None
        return self._decode_line(batch)

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        """ns of the step `batch` in each stage of the pipeline. Only where the loop is ahead."""
        assert self._lanes is not None, self.loop
        return self._lanes.stages_ns(batch)

    def execute(self, batch: Batch) -> StepResult:
        if batch.preempted:
            self._take_back(batch.preempted)
        group = batch.decodes
        finished: list[Sequence] = []
        verified = None
        if isinstance(group, DraftGroup):
            verified = self._verified(batch, group, finished)
        elif group is not None:
            self.join(batch)
            self._pop_ended(group, group.step + 1, finished)
        for seq, n in batch.chunks:
            if (
                seq.settled_computed_tokens + n == seq.num_tokens
                and seq.settled_output_tokens + 1 >= self._targets[seq]
            ):
                finished.append(seq)
        if len(finished) > 1:
            finished = batch.in_order(finished)
        extra_ns = self.wait_ns if self.pads is None else self.wait_ns + self.pads.pad(batch)
        encode_ns = encoded_ns(batch, self.encoder) if batch.encoded else None
        if encode_ns is not None:
            extra_ns += sum(encode_ns)
        if self._lanes is not None:
            for seq in finished:
                self._targets[seq] += _ENDED
        if self.loop.stages == 1 or self._lanes is None:
            duration_ns = self.duration_ns(batch) + extra_ns
            if self.masks is not None:
                return self._masked(batch, self.masks, StepResult(duration_ns, finished, encode_ns=encode_ns))
            if self.adapters is None:
                return StepResult(duration_ns, finished, verified, encode_ns=encode_ns)
            duration_ns, loads = self.adapters.step(batch, duration_ns)
            return StepResult(duration_ns, finished, verified, loads=loads, encode_ns=encode_ns)
        if extra_ns or self.adapters is not None:
            raise ValueError("padding, encoding, LoRA adapters and a shared GPU have no time in a pipeline of stages")
        stages_ns = self.stages_ns(batch)
        return StepResult(sum(stages_ns), finished, verified, stages_ns)

    def _masked(self, batch: Batch, fills: FillsMasks, result: StepResult) -> StepResult:
        """`result` with the masks of the step `batch`. Where the engine waits for each step these are filled while its
        forward runs; ahead of results the time is up to the steps in flight."""
        masks = result.masks = fills.of(batch)
        if masks is not None and self._lanes is None:
            masks.wait_ns = max(masks.ns - (result.duration_ns - fills.host_ns(batch)), 0)
            result.duration_ns += masks.wait_ns
        return result

    def join(self, batch: Batch) -> None:
        """Notes when the sequences end that joined the group of `batch`, which is about to run; it verifies no drafts.
        For steps that are not executed; `execute` does it."""
        group = batch.decodes
        assert group is not None
        ends = self._ends.get(group)
        if ends is None:
            ends = self._ends[group] = []
        for seq in batch.joined:
            if seq.group is group:
                end = group.step + self._targets[seq] - seq.num_output_tokens
                heappush(ends, (end, seq.order, seq.epoch, seq))

    def finish(self, batch: Batch) -> list[Sequence]:
        """Sequences finished by the latest step of the steady `batch`, in batch order, given that its counters moved on
        already: `execute` returns the same before they do."""
        group = batch.decodes
        assert group is not None
        finished: list[Sequence] = []
        self._pop_ended(group, group.step, finished)
        if len(finished) > 1:
            finished = batch.in_order(finished)
        if self._lanes is not None:
            for seq in finished:
                self._targets[seq] += _ENDED
        return finished

    def _pop_ended(self, group: DecodeGroup, step: int, finished: list[Sequence]) -> None:
        """Adds the members of `group` that end with its `step` to `finished`."""
        ends = self._ends[group]
        while ends and ends[0][0] <= step:
            _, _, epoch, seq = heappop(ends)
            if epoch == seq.epoch and seq.group is group:
                finished.append(seq)

    def _take_back(self, preempted: Iterable[Sequence]) -> None:
        """Lets those of `preempted` whose last token was in flight, and is lost, go on to it again."""
        for seq in preempted:
            target = self._targets.get(seq, 0) - _ENDED
            if target > seq.num_output_tokens:
                self._targets[seq] = target

    def _verified(self, batch: Batch, group: DraftGroup, finished: list[Sequence]) -> Verified:
        """Verification result of the drafts of `batch`; adds to `finished` the sequences that get their last token by
        them."""
        luck = self.luck
        if luck is None:
            raise ValueError("a simulation of drafts needs to be told how many are accepted: give the executor luck")
        for seq in batch.joined:
            if seq.group is group:
                target = self._targets[seq]
                group.ends[seq.phase] = 0 if target >= _ENDED else seq.request.prompt_tokens + target - 1
                group.luck[seq.phase] = luck.key(seq)
        verified, ended = outcome(luck, group)
        finished += ended
        if self.loop.is_ahead:
            return verified
        first = [seq for seq, n in batch.chunks if seq.settled_computed_tokens + n == seq.num_tokens]
        proposed = luck.proposed(group, verified.gained, first)
        if proposed is not None:
            verified.drafts, verified.first_drafts = proposed
        return verified


def encoded_ns(batch: Batch, encoder: Encodes | None) -> list[int]:
    """ns that the items of each sequence of `batch.encoded` take to encode. ValueError without an `encoder`."""
    if encoder is None:
        raise ValueError("a simulation of images, audios or videos needs a cost model with an encoder_time")
    return encoder.items_ns([[seq.request.items[i].tokens for i in places] for seq, places in batch.encoded])


def _no_host(batch: Batch | None) -> tuple[int, int]:
    return 0, 0
