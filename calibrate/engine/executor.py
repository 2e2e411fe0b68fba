"""The executor that runs the scheduler's batches on a model, as `kernel.sim_executor` does on costs.

No policy is in here: it computes the tokens that a batch says, in the KV blocks that the scheduler's tables say, and
returns which sequences are done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, MutableSequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import CalibrationError, PolicyError
from batchsim.calibrate.engine.drafts import DraftedRows, Drafter
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.mirror import BlockMirror
from batchsim.calibrate.engine.model_step import DeviceThread, LaunchedModelStep, ModelStep
from batchsim.calibrate.engine.padding import padded_chunks, padded_decodes
from batchsim.calibrate.engine.prompts import Prompts, RandomPrompts
from batchsim.calibrate.engine.runner import ModelRunner, StepTimes
from batchsim.calibrate.engine.sampling import GREEDY, Sampling
from batchsim.calibrate.engine.sequences import NO_ROWS, NONE, ChunkRows, DecodeRows, LiveSequence, Text
from batchsim.calibrate.engine.swap import Moves
from batchsim.kernel.acceptance import DraftCounts
from batchsim.kernel.batch import Batch, Landed, StepResult
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.engine_loop import SYNC, EngineLoop
from batchsim.kernel.kv_blocks import BlockTables
from batchsim.kernel.policy_config import PromptLookup
from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import DecodeGroup, Sequence

Int64s = NDArray[np.int64]
Feed = tuple[Int64s, Int64s]


class TorchExecutor:
    """Runs batches on `runner`; `kv` is the scheduler's manager of its KV blocks. `times` has an entry for every step.

    A decode step costs the host O(members) in arrays, and O(members) in Python where someone joined or left, or where
    drafts are verified. These are found by `lookup`, which a scheduler with drafts needs.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv: BlockTables,
        *,
        max_model_len: int,
        sampling: Sampling = GREEDY,
        prompts: Prompts | None = None,
        loop: EngineLoop = SYNC,
        lookup: PromptLookup | None = None,
    ) -> None:
        _check_fit(runner, kv, max_model_len)
        self.runner = runner
        self.kv = kv
        self.max_model_len = max_model_len
        self.sampling = sampling
        self.prompts = RandomPrompts(runner.spec.vocab_size) if prompts is None else prompts
        self.times: MutableSequence[StepTimes] = []
        self._eos = np.array(runner.eos_token_ids, dtype=np.int64)
        self._drafter = None if lookup is None else Drafter(lookup, max_model_len, self._eos)
        self._lives: dict[Sequence, LiveSequence] = {}
        self._shares = hasattr(kv, "lookup")
        self._answers: dict[int, list[int]] = {}  # outputs of ended requests, where a later prompt may hold them
        width = -(-max_model_len // runner.block_size)
        self._mirror = BlockMirror(runner.num_blocks, runner.block_size, width, shares=self._shares)
        self._thread = DeviceThread(runner, loop) if loop.is_ahead else None
        self._in_flight: LaunchedModelStep | None = None
        self._num_steps = 0
        self._zeros = self._mirror.new_row()  # never holds a block: the table of padding
        self._decodes = NO_ROWS
        self._last_tokens = NONE  # the input tokens of the members of _decodes in the next step

    # ---- the protocol

    def begin(self, seq: Sequence, output_tokens: int | None) -> None:
        """Makes the prompt. The output ends at `output_tokens`, the client's or the policy's cap, or the model's limit.

        Without `output_tokens` it also ends at an end-of-sequence token, where the model's files name one.
        """
        request = seq.request
        if seq.num_computed_tokens or seq.num_output_tokens:
            raise ValueError(
                f"request {request.id} comes from another engine, whose KV and tokens are not here: {seq!r}"
            )
        target = min(seq.max_output_tokens, self.max_model_len - request.prompt_tokens)
        if output_tokens is not None:
            target = min(target, output_tokens)
        listens = output_tokens is None and len(self._eos) > 0
        self._lives[seq] = live = LiveSequence(self.prompts.ids(request, self._answers), target, listens)
        if self._drafter is not None:
            live.text = Text.of(live.prompt, target, listens)

    def end(self, seq: Sequence) -> None:
        """Forgets a sequence that finished, was cancelled or was rejected."""
        live = self._lives.pop(seq, None)
        if live is None:
            return
        live.ended = True
        if live.row is not None:
            self._mirror.drop_row(live.row)
        if seq.request.tokens is not None:
            self._answers[output_stream(seq.request.id)] = live.generated

    def tokens(self, seq: Sequence) -> list[int]:
        """The token ids that `seq`, which has not ended, has generated so far."""
        return list(self._lives[seq].generated)

    @property
    def draft_counts(self) -> DraftCounts | None:
        """What became of drafts so far; None where none are verified."""
        return None if self._drafter is None else self._drafter.counts

    def quiet_steps(self, batch: Batch) -> int:
        """0: a step of a model is never skipped."""
        return 0

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        """Zeros: the host's time passes while it works."""
        return 0, 0

    def execute(self, batch: Batch) -> StepResult:
        """Runs one step. ExecutorError if the device fails, PolicyError for a batch that would spoil another's KV."""
        called_ns = time.perf_counter_ns()
        step = self._prepared(batch)
        if self._thread is not None:
            through_ns = time.monotonic_ns()
            self._in_flight = launched = self._thread.launch(step, self._in_flight)
            return StepResult(0, [], landing=partial(self._land, launched, through_ns))
        step.run(self.runner, None)
        finished = self._emit(step)
        verified = None if step.drafted is None else step.drafted.verified(ahead=False)
        duration_ns = max(time.perf_counter_ns() - called_ns, 1)
        self.times.append(StepTimes(step.kernel_ns, duration_ns - step.kernel_ns))
        return StepResult(duration_ns, finished, verified)

    def _land(self, launched: LaunchedModelStep, through_ns: int) -> Landed:
        """Waits for the end of a step; returns its result."""
        start_ns, end_ns = launched.times.result()
        if self._in_flight is launched:
            self._in_flight = None
        step = launched.step
        finished = self._emit(step)
        duration_ns = max(end_ns - start_ns, 1)
        self.times.append(StepTimes(step.kernel_ns, duration_ns - step.kernel_ns))
        verified = None if step.drafted is None else step.drafted.verified(ahead=True)
        return Landed(finished, (through_ns, start_ns, start_ns + duration_ns), verified)

    # ---- KV that moves

    def _moves(self, batch: Batch) -> tuple[Moves, Moves]:
        """Drops the KV of preempted sequences; the blocks of swapped ones that go over the host link, out and in."""
        out: list[tuple[int, int]] = []
        for seq, _ in batch.swap_out:
            live = self._lives[seq]
            live.slots = self.kv.swap_table(seq)[:]
            if live.row is not None:
                out += zip(self._mirror.blocks(live.row), live.slots, strict=False)
                self._drop_row(live)
        for seq in batch.preempted:
            live = self._lives.get(seq)
            if live is None:
                continue
            del live.generated[seq.num_output_tokens :]  # the policy may have dropped some output, to be generated anew
            if live.row is not None:
                self._drop_row(live)
        into: list[tuple[int, int]] = []
        for seq, _ in batch.swap_in:
            live = self._lives[seq]
            if live.slots is None:
                raise PolicyError(f"request {seq.request.id} is swapped in without having been swapped out.")
            live.row = self._mirror.new_row()
            self._mirror.extend(live.row, self.kv.table(seq), len(live.slots), f"request {seq.request.id}")
            # In the group it has gained nothing since it came back, so the settled counter is the computed one.
            self._mirror.take(live.row, self.kv.blocks_for(seq.settled_computed_tokens))
            into += zip(live.slots, self._mirror.blocks(live.row), strict=False)
            live.slots = None
        return out, into

    def _drop_row(self, live: LiveSequence) -> None:
        assert live.row is not None
        self._mirror.drop_row(live.row)
        live.row = None

    # ---- what a step computes

    def _prepared(self, batch: Batch) -> ModelStep:
        """The step with all that the host knows of it, and placeholders for tokens of the step in flight."""
        out, into = self._moves(batch)
        sampling = replace(self.sampling, seed=self.sampling.seed + self._num_steps)
        self._num_steps += 1
        if not (batch.num_decode or batch.chunks or batch.pad_decode_rows):
            return ModelStep(batch, None, sampling, out, into, NO_ROWS, NO_ROWS.listens, [])
        drafted = self._drafted_rows(batch)
        inputs, fed = self._inputs(batch)
        if drafted is not None:
            rows = _int64s([live.row for live in drafted.lives])
            width = self.kv.blocks_for(int(drafted.upto.max(initial=0)))
            inputs = drafted.beside(inputs, self._mirror.tables[rows, :width])
        decodes, full = NO_ROWS, NO_ROWS.listens
        if batch.decodes is not None and drafted is None:
            decodes = self._decodes
            full = decodes.made + batch.decodes.step + 1 >= decodes.targets
        first = inputs.num_decode + inputs.num_drafted_tokens
        samples = [
            (seq, self._lives[seq], first + i)
            for i, (seq, n) in enumerate(batch.chunks)
            if seq.settled_computed_tokens + n == seq.num_tokens
        ]
        if drafted is not None:
            drafted.sampled = samples
        return ModelStep(batch, inputs, sampling, out, into, decodes, full, samples, fed, drafted=drafted)

    def _inputs(self, batch: Batch) -> tuple[StepInputs, Feed]:
        """The inputs of the step, and the rows of its ids, now -1, that the step in flight gives their tokens."""
        rows = positions = ids = NONE
        fed: Feed = (NONE, NONE)
        if batch.decodes is not None and batch.drafting is None:
            rows, positions, ids, fed = self._decode_rows(batch, batch.decodes)
        chunks = self._chunks(batch)
        pad_lens, pad_reads = padded_decodes(batch, self.max_model_len)
        zeros = np.zeros(len(pad_lens), dtype=np.int64)
        token_rows = np.concatenate([rows, np.repeat(chunks.rows, chunks.lens)])
        slots = self._mirror.slots(token_rows, np.concatenate([positions, chunks.positions]))
        if self._shares:
            self._mirror.note(slots, np.concatenate([ids, chunks.ids]))
            if self._in_flight is not None:
                self._in_flight.step.stored = (slots[fed[0]], fed[1])
            for seq, num_tokens in batch.cached:
                live = self._lives[seq]
                assert live.row is not None, "it has a chunk"
                self._mirror.check_shared(live.row, live.known(0, num_tokens), f"request {seq.request.id}")
        seq_lens = np.concatenate([positions + 1, pad_lens, chunks.computed + chunks.lens])
        longest = max(int(seq_lens.max(initial=0)), int(pad_reads.max(initial=0)))
        width = -(-longest // self.runner.block_size)
        step = StepInputs(
            ids=np.concatenate([ids, zeros, chunks.ids]),
            positions=np.concatenate([positions, zeros, chunks.positions]),
            slots=np.concatenate([slots[: len(rows)], zeros - 1, slots[len(rows) :]]),
            num_decode=len(rows) + len(zeros),
            chunk_lens=chunks.lens.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self._mirror.tables[np.concatenate([rows, zeros + self._zeros, chunks.rows]), :width],
            pad_reads=pad_reads,
        )
        return padded_chunks(step, batch, self.runner.block_size), fed

    def _decode_rows(self, batch: Batch, group: DecodeGroup) -> tuple[Int64s, Int64s, Int64s, Feed]:
        """Mirror row, position and input token of every member, and where the token is still to come; takes over the KV
        blocks that positions newly reach."""
        now = self._decodes
        # All may have left in a call that had nothing to run, which is no step.
        if batch.joined or batch.left or group is not now.group or len(group) != len(now.members):
            self._regroup(group)
        decodes, mirror = self._decodes, self._mirror
        ids, fed = self._last_tokens, self._feed(decodes)
        if len(fed[0]):
            ids = ids.copy()
            ids[fed[0]] = -1
        positions = decodes.base + group.step
        last_blocks = positions // self.runner.block_size
        for i in np.flatnonzero(mirror.held[decodes.rows] <= last_blocks).tolist():
            seq = decodes.members[i]
            need = int(last_blocks[i]) + 1
            mirror.extend(int(decodes.rows[i]), self.kv.table(seq), need, f"request {seq.request.id}")
        return decodes.rows, positions, ids, fed

    def _drafted_rows(self, batch: Batch) -> DraftedRows | None:
        """The decodes with their drafts, which have all KV blocks that they may need; None in a batch without."""
        drafting, group, mirror = batch.drafting, batch.decodes, self._mirror
        if drafting is None or not isinstance(group, DraftGroup):
            return None
        if self._drafter is None:
            raise CalibrationError("the scheduler verifies draft tokens, and nobody drafts them here. Pass a lookup.")
        lives = [self._lives[seq] for seq in drafting.sequences]
        upto = group.computed + drafting.rows
        for seq, live, tokens in zip(drafting.sequences, lives, upto.tolist(), strict=True):
            need = self.kv.blocks_for(tokens)
            if live.row is None:
                raise PolicyError(f"request {seq.request.id} decodes without computed tokens: {seq!r}.")
            if self._shares:
                mirror.follow(live.row, self.kv.table(seq))
            if mirror.held[live.row] < need:
                mirror.extend(live.row, self.kv.table(seq), need, f"request {seq.request.id}")
            mirror.claim(live.row, need)
            self._note_said(live, 1)
        return DraftedRows(self._drafter, drafting.sequences, lives, drafting.rows, upto)

    def _note_said(self, live: LiveSequence, count: int) -> None:
        """Records the last `count` known tokens of a sequence, those drafts that were right among them, as far as there
        are KV blocks: the last one is stored by the next step."""
        if not self._shares or live.row is None:
            return
        size, block_size = len(live.prompt) + len(live.generated), self.kv.block_size
        end = min(size, int(self._mirror.held[live.row]) * block_size)
        said = np.arange(size - count, end)
        blocks = self._mirror.tables[live.row, said // block_size].astype(np.int64)
        self._mirror.note(blocks * block_size + said % block_size, live.known(size - count, max(end, size - count)))

    def _feed(self, decodes: DecodeRows) -> Feed:
        """The rows of `decodes` whose input tokens the step in flight samples, and their rows there."""
        before = None if self._in_flight is None else self._in_flight.step
        if before is None:
            return NONE, NONE
        if before.decodes is decodes:
            rows = np.arange(len(decodes.members))
            return rows, rows
        row_of = before.row_of()
        fed = [(i, row_of[seq]) for i, seq in enumerate(decodes.members) if seq in row_of]
        return _int64s([i for i, _ in fed]), _int64s([row for _, row in fed])

    def _regroup(self, group: DecodeGroup) -> None:
        members = list(group.members)
        lives = [self._lives[seq] for seq in members]
        for seq, live in zip(members, lives, strict=True):
            if live.row is None:
                raise PolicyError(f"request {seq.request.id} decodes without computed tokens: {seq!r}.")
            if self._shares:
                self._mirror.follow(live.row, self.kv.table(seq))
        self._decodes = DecodeRows(
            group=group,
            members=members,
            lives=lives,
            rows=_int64s([live.row for live in lives]),
            base=_int64s([seq.num_computed_tokens - group.step for seq in members]),
            made=_int64s([seq.num_output_tokens - group.step for seq in members]),
            targets=_int64s([live.target for live in lives]),
            listens=np.array([live.listens for live in lives], dtype=np.bool_),
        )
        # A member has one known token that is not computed: the last.
        self._last_tokens = _int64s([live.generated[-1] if live.generated else live.prompt[-1] for live in lives])

    def _chunks(self, batch: Batch) -> ChunkRows:
        ids, rows, computed = [NONE], [], []
        for seq, n in batch.chunks:
            live, start = self._lives[seq], seq.settled_computed_tokens
            known = live.known(start, start + n)
            if n < 1 or len(known) != n:
                raise PolicyError(f"{n} tokens of {seq!r} are scheduled. Correct the policy.")
            shared = begun = 0
            if live.row is None:
                live.row, (shared, begun) = self._mirror.new_row(), divmod(start, self.kv.block_size)
            elif self._shares:
                self._mirror.follow(live.row, self.kv.table(seq))
            need = self.kv.blocks_for(start + n)
            if self._mirror.held[live.row] < need:
                self._mirror.extend(live.row, self.kv.table(seq), need, f"request {seq.request.id}", shared=shared)
            if begun:
                self._mirror.adopt(live.row, shared)
            ids.append(known)
            rows.append(live.row)
            computed.append(start)
        lens = [n for _, n in batch.chunks]
        return ChunkRows(_int64s(rows), _int64s(computed), _int64s(lens), np.concatenate(ids))

    # ---- what came of it

    def _emit(self, step: ModelStep) -> list[Sequence]:
        """Gives the sampled tokens to their sequences; returns the sequences that are done, in batch order."""
        finished = step.emit(self._eos)
        if step.decodes is self._decodes:
            self._last_tokens = step.tokens[: len(step.decodes.members)]
        slots, rows = step.stored
        self._mirror.note(slots, step.tokens[rows])
        if step.drafted is not None:
            for live, gained in zip(step.drafted.lives, step.drafted.gained, strict=True):
                self._note_said(live, gained)
            for _, live, _ in step.samples:
                self._note_said(live, 1)
        return finished


def _int64s(values: Iterable[object]) -> Int64s:
    return np.array(values, dtype=np.int64)


def _check_fit(runner: ModelRunner, kv: BlockTables, max_model_len: int) -> None:
    """CalibrationError if the KV manager or `max_model_len` asks for more than the runner has."""
    if kv.block_size != runner.block_size:
        raise CalibrationError(
            f"KV blocks of {kv.block_size} tokens; the model was loaded with blocks of {runner.block_size}."
            " Load it with the same."
        )
    for what, asked, there in (
        ("num_blocks", kv.num_blocks, runner.num_blocks),
        ("num_swap_blocks", kv.num_swap_blocks, runner.num_swap_blocks),
        ("max_model_len", max_model_len, runner.max_model_len),
    ):
        if asked > there:
            raise CalibrationError(f"{what} {asked}; the model was loaded with {there}. Load it with more.")
