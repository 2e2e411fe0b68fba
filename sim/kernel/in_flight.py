"""Ahead of results: the steps of an engine that are launched and not processed yet, oldest first.

With one step in flight nothing can happen between its launch and its end. The rules where there may be more:

1. **Loop.** The engine's loop (`kernel/engine_loop.py`) says whether a step may be scheduled before the one before is
   known: vLLM's queue of batches, the overlap of SGLang and TensorRT-LLM, and every pipeline may. A step is launched,
   and lands when its results are processed.
2. **Scheduled is not known.** A sequence's counters are of what is scheduled; its tokens are delivered as steps land.
   The two differ by the steps in flight.
3. **Too late.** An end by a stop token, a cancel or a preemption that a landing brings does not stop later steps in
   flight: their tokens of the sequence are computed in vain (`waste`, `lose`), or still delivered where the engine does
   that. A row in vain writes into KV blocks that may be another sequence's by then, before that one does.
4. **Two lanes of time.** A cost is split (`Lanes` of `cost/base.py`) into the host's part and the device's, by stage.
   The table `lanes` has the host's times of each step (`kernel/lane_rows.py`); it is empty for other engines.
5. **Pipelines.** A step goes through the stages behind the step before it. Decodes fall into cohorts, one per stage
   (`policies/systems/vllm/cohorts.py`), or into Vidur's micro-batches (`vidur/micro_batches.py`), whose loop calls the
   scheduler at every arrival and end of a step.
6. **Drafts.** A simulation draws at the launch which drafts are right. A model knows when the step lands
   (`Landed.verified`): until then all count as accepted, and rows written since are corrected (`_learn`). Steps that
   verify drafts have a group with counters in columns (`kernel/draft_group.py`), as members gain different numbers.
7. **Masks.** Where a grammar constrains answers, sampling of a step waits for masks that the host fills. Where these
   need tokens of the step before, that one is processed first, and its results go out once the masks are filled;
   otherwise they are filled as the step is launched, and the loop goes on at `busy_until_ns`. vLLM asks whether a
   sequence with a mask has a token in flight; SGLang waits for the step before in any case.

Leaps over steps alike are behind `kernel/leaping.py`: `leaps.py`, `leaps_ahead.py` and `pipeline_leaps.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterator
from collections.abc import Set as AbstractSet

from batchsim.kernel.batch import Batch, Landed, Masks, StepResult
from batchsim.kernel.draft_group import DraftGroup, Verified
from batchsim.kernel.engine_loop import EngineLoop
from batchsim.kernel.events import Tokens
from batchsim.kernel.journal import Journal
from batchsim.kernel.types import DecodeGroup, Sequence

_NO_SEQUENCES: frozenset[Sequence] = frozenset()


class LaunchedStep:
    """One step in flight: its batch, the sequences it finishes, its end, and its tokens that are computed in vain.

    `process_ns`: the ns that the host will need for the step's results. `decodes`: the sequences that decode in it, for
    drivers that receive token events. `landing`: waits for the device and returns the finished sequences and the device
    times; None once they are known. `lost`: the sequences that have not ended and whose tokens of this step are given
    up.
    """

    __slots__ = (
        "batch",
        "decodes",
        "end_ns",
        "finished",
        "landing",
        "lost",
        "process_ns",
        "wasted_tokens",
    )

    def __init__(self, batch: Batch, finished: list[Sequence], end_ns: int, process_ns: int = 0) -> None:
        self.batch = batch
        self.end_ns = end_ns
        self.finished = finished
        self.process_ns = process_ns
        self.landing: Callable[[], Landed] | None = None
        self.lost: AbstractSet[Sequence] = _NO_SEQUENCES
        self.wasted_tokens = 0
        self.decodes: Collection[Sequence] = ()

    def tokens(self, lives: Container[Sequence]) -> Iterator[Tokens]:
        """A Tokens event for each sequence that got tokens: a decode one in every step that was leapt over. Of drafts
        only those of `lives` have."""
        drafting = self.batch.drafting
        if drafting is not None and drafting.verified is not None:
            for seq, gained in zip(drafting.sequences, drafting.verified.gained.tolist(), strict=True):
                if gained and seq in lives:
                    yield Tokens(seq.request, gained)
        else:
            for seq in self.decodes:
                yield Tokens(seq.request, self.batch.num_steps)
        for seq in self.batch.sampled:
            yield Tokens(seq.request, 1)


class StepsInFlight:
    """The steps in flight of one engine, oldest first, and when each stage of its device is free again.

    `busy_until_ns`: until when the host fills masks of the latest step, if it does so as that is launched.
    `called_ns`: when its scheduler was last asked. `calls`: of a batch queue, the calls of the scheduler that were not
    processed yet, oldest first: whether each had something to run. `zero_ns`: what the monotonic clock of this machine
    says at time 0 of a run by the wall clock, whose steps may run behind the host and report when; None in other runs.
    """

    __slots__ = ("_finishing", "_free_ns", "_loop", "busy_until_ns", "called_ns", "calls", "steps", "zero_ns")

    def __init__(self, loop: EngineLoop) -> None:
        self.steps: deque[LaunchedStep] = deque()
        self.calls: deque[bool] = deque()
        self.called_ns = self.busy_until_ns = 0
        self._loop = loop
        self.zero_ns: int | None = None
        self._free_ns = [0] * loop.stages
        self._finishing: dict[Sequence, int] = {}  # output tokens with the last one, which is in flight

    def __bool__(self) -> bool:
        """Whether any step is in flight, or a call that had nothing to run."""
        return bool(self.steps or self.calls)

    @property
    def computed_ns(self) -> int:
        """When the device is through with all steps in flight, in ns; 0 without any."""
        return self.steps[-1].end_ns if self.steps else 0

    def landing_ns(self, now_ns: int) -> int:
        """When the host has processed the results of the oldest step in flight, in ns, if it is free at `now_ns`."""
        oldest = self.steps[0]
        return (now_ns if now_ns > oldest.end_ns else oldest.end_ns) + oldest.process_ns

    def launch(self, batch: Batch, result: StepResult, now_ns: int, process_ns: int) -> tuple[int, int]:
        """Takes in the step `batch`, launched at `now_ns`, its counters moved on; returns its start and end in ns.

        Its results will take the host `process_ns`. It goes through the stages behind the step before it.
        """
        if result.stages_ns is None:
            free_ns = self._free_ns
            start_ns = now_ns if now_ns > free_ns[0] else free_ns[0]
            end_ns = start_ns + result.duration_ns
            if batch.load is not None:
                end_ns = batch.load.beside(start_ns, end_ns)
            if result.masks is not None:
                end_ns = self._sampled_ns(result.masks, now_ns, end_ns)
            free_ns[0] = end_ns
        else:
            start_ns, end_ns = self.through_stages(now_ns, result.stages_ns)
        step = LaunchedStep(batch, result.finished, end_ns, process_ns)
        self.steps.append(step)
        if result.finished:
            self.note_last(result.finished)
        step.landing = result.landing
        return start_ns, end_ns

    def _sampled_ns(self, masks: Masks, now_ns: int, forward_ns: int) -> int:
        """When a step launched at `now_ns`, whose forward ends at `forward_ns`, is over, in ns: once it has its
        `masks`. For at most one step in flight beside it."""
        if self.steps and (self._loop.kind == "overlap" or any(map(self._has_token_in_flight, masks.sequences))):
            self.steps[0].process_ns += masks.ns
            ready_ns = self.landing_ns(now_ns)
        else:
            ready_ns = self.busy_until_ns = now_ns + masks.ns
        if ready_ns > forward_ns:
            masks.wait_ns = ready_ns - forward_ns
            return ready_ns
        return forward_ns

    def _has_token_in_flight(self, seq: Sequence) -> bool:
        return any(outputs > 0 for _, _, outputs in self._rows(seq))

    @property
    def free_ns(self) -> int:
        """When the device, or its first stage, is free of the steps launched so far, if the loop is ahead; else 0."""
        return self._free_ns[0]

    def occupy(self, until_ns: int) -> None:
        """Keeps the device from the next step before `until_ns`: it waits for other ranks' devices."""
        self._free_ns[0] = max(self._free_ns[0], until_ns)

    def through_stages(self, now_ns: int, stages_ns: tuple[int, ...]) -> tuple[int, int]:
        """Sends a step launched at `now_ns` through the pipeline's stages, which take `stages_ns`; returns its start
        and end in ns."""
        free_ns = self._free_ns
        start_ns = end_ns = max(now_ns, free_ns[0])
        for stage, duration_ns in enumerate(stages_ns):
            if free_ns[stage] > end_ns:
                end_ns = free_ns[stage]
            end_ns += duration_ns
            free_ns[stage] = end_ns
        return start_ns, end_ns

    def note_last(self, finished: list[Sequence]) -> None:
        """Notes that the step that was just launched, its counters moved on, has the last tokens of `finished`."""
        for seq in finished:
            self._finishing[seq] = seq.num_output_tokens - _num_rejected(seq)

    def stand_in(self, landed: LaunchedStep, group: DecodeGroup) -> None:
        """Puts `landed`, just taken out, back as the oldest, for a leap with `group` to say which step it is."""
        landed.finished, landed.lost = [], _NO_SEQUENCES
        if landed.batch.chunks:
            landed.batch = Batch(group, [], 0)
        self.steps.appendleft(landed)

    def leapt(self, group_step: int) -> None:
        """Notes that the two steps in flight are now the last two of the group's, whose count is `group_step`."""
        oldest, latest = self.steps
        oldest.batch.group_step, latest.batch.group_step = group_step - 1, group_step
        self._free_ns[0] = latest.end_ns

    def leapt_alone(self, group_step: int, end_ns: int, process_ns: int) -> None:
        """Notes that the only step in flight is now the last of the group's, whose count is `group_step`; it ends at
        `end_ns`, and its results will take the host `process_ns`."""
        (step,) = self.steps
        step.batch.group_step, step.end_ns, step.process_ns = group_step, end_ns, process_ns
        self._free_ns[0] = end_ns

    def wait_for(self, number: int, journal: Journal) -> int:
        """Waits, where it runs behind the host, for the end of step `number`, from the oldest; returns that in ns, what
        `journal` supposed of it corrected. ExecutorError if the device failed it."""
        flight = self.steps[number]
        if flight.landing is not None:
            landed, flight.landing = flight.landing(), None
            flight.finished = landed.finished
            if landed.verified is not None:
                self._learn(number, landed.verified, journal)
            for seq in landed.finished:
                later = sum(outputs for step, _, outputs in self._rows(seq) if step is not flight)
                self._finishing[seq] = seq.num_output_tokens - later - _num_rejected(seq)
            if landed.ran is not None and self.zero_ns is not None:
                launched_ns, start_ns, flight.end_ns = (ns - self.zero_ns for ns in landed.ran)
                journal.recorder.landed(len(self.steps) - number, launched_ns, start_ns, flight.end_ns - start_ns)
        return flight.end_ns

    def _learn(self, number: int, verified: Verified, journal: Journal) -> None:
        """Notes what became of the drafts of step `number`; all that was written since supposed them accepted."""
        recorder = journal.recorder
        batch = self.steps[number].batch
        group, drafting = batch.decodes, batch.drafting
        assert isinstance(group, DraftGroup) and drafting is not None
        group.learn(drafting, verified)
        batch.num_accepted_tokens = verified.num_accepted
        recorder.amend(len(self.steps) - number, "num_accepted_tokens", verified.num_accepted)
        rejected = dict(zip(drafting.sequences, (drafting.rows - verified.gained).tolist(), strict=True))
        for seq, count in rejected.items():
            journal.rejected(seq, count)
        for back, flight in enumerate(reversed(list(self.steps)[number + 1 :]), 1):
            later = flight.batch
            assert later.drafting is not None
            later.context_tokens -= sum(rejected.get(seq, 0) for seq in later.drafting.sequences)
            recorder.amend(back, "context_tokens", later.context_tokens)

    def wait_for_all(self, journal: Journal) -> None:
        """Waits until no step runs, for a run that is cut: their tokens are lost, and a step that failed has no row."""
        for number in range(len(self.steps)):
            try:
                self.wait_for(number, journal)
            except Exception:  # what cuts the run, or comes second to that
                journal.recorder.drop_last_steps(len(self.steps) - number)
                return

    def land(self, alive: Container[Sequence]) -> LaunchedStep:
        """Takes out the oldest step, whose results are there, and returns it without the sequences that are not `alive`
        any more, or were preempted since and lost these results.

        Sets `num_wasted_tokens` of the finished: the tokens that later steps, in flight, compute of them in vain.
        """
        flight = self.steps.popleft()
        batch, group = flight.batch, flight.batch.decodes
        if batch.drafting is not None and isinstance(group, DraftGroup):
            group.land(batch.drafting, batch.sampled, flight.lost)
        else:
            for seq in batch.sampled:
                if isinstance(seq.group, DraftGroup):
                    seq.group.land_first(seq)
        if batch.sampled:
            batch.sampled = [seq for seq in batch.sampled if seq in alive and seq not in flight.lost]
        if flight.decodes:
            flight.decodes = [seq for seq in flight.decodes if seq in alive and seq not in flight.lost]
        if not flight.finished:
            return flight
        ended: list[Sequence] = []
        for seq in flight.finished:
            if seq in flight.lost:
                continue
            outputs = self._finishing.pop(seq)
            if seq not in alive:
                continue
            ended.append(seq)
            seq.num_wasted_tokens = seq.num_output_tokens - outputs
            if seq.num_wasted_tokens:
                self.waste(seq)
        flight.finished = ended
        return flight

    def waste(self, seq: Sequence) -> int:
        """Notes that what is in flight of `seq` is computed in vain; returns how many of its output tokens are."""
        undelivered = 0
        for flight, tokens, outputs in self._rows(seq):
            flight.wasted_tokens += tokens
            undelivered += outputs
        return undelivered

    def lose(self, seq: Sequence) -> None:
        """Discards the tokens in flight of `seq`, which lives on: all of them are computed in vain."""
        for flight, tokens, _ in self._rows(seq):
            flight.wasted_tokens += tokens
            flight.lost |= {seq}
        self._finishing.pop(seq, None)

    def _rows(self, seq: Sequence) -> list[tuple[LaunchedStep, int, int]]:
        """The steps in flight that compute tokens of `seq`, with these tokens and its output tokens in them."""
        rows_of_steps: list[tuple[LaunchedStep, int, int]] = []
        group, last_step = seq.group, seq.left_step
        if group is None:
            group = seq.last_group
        else:
            last_step = group.step
        for flight in self.steps:
            if seq in flight.lost:
                continue
            batch = flight.batch
            tokens = sum([n for chunked, n in batch.chunks if chunked is seq]) if batch.chunks else 0
            drafting = batch.drafting
            if drafting is not None:
                more = drafting.padding.get(seq, 0)
                if tokens:
                    outputs = int(seq in batch.sampled) + (more if group is not None else 0)
                    rows_of_steps.append((flight, tokens + more, outputs))
                elif seq in drafting.sequences:
                    rows = int(drafting.rows[drafting.sequences.index(seq)])
                    rows_of_steps.append((flight, rows, rows))
            elif tokens:
                rows_of_steps.append((flight, tokens, int(seq in batch.sampled)))
            elif group is not None and batch.decodes is group and seq.joined_step < batch.group_step <= last_step:
                rows_of_steps.append((flight, 1, 1))
        return rows_of_steps


def _num_rejected(seq: Sequence) -> int:
    """Draft tokens of `seq` that are counted as accepted, and will be taken off when they turn out rejected."""
    group = seq.group
    return int(group.rejected[seq.phase]) if isinstance(group, DraftGroup) else seq.num_rejected_tokens
