"""TensorRT-LLM's overlap scheduler told again as its main loop has it: states of requests, one iteration after another.

Slow on purpose: to compare with the policy on random workloads, with block reuse or without. Nobody cancels and all fit
the pool. A step takes 10 ns on the GPU, 1 more a prompt token, 2 a decode; the host 3 to launch it, 2 to process it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from batchsim.kernel.types import Arrival
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from tests.plain.systems import Row
from tests.plain.tensorrt_llm import Capacity, micro_batch

CONTEXT, IN_PROGRESS, TO_COMPLETE, COMPLETE = range(4)
Call = tuple[int, list[tuple[int, int]], list[int], int]
"""When the scheduler was asked, (request, tokens) in batch order, the paused, free blocks then."""


@dataclass(eq=False)
class Live(Row):
    """One request: `prompt` grows by what is generated when it is paused, `generated` is what is known since, `kv` the
    tokens in its blocks with every step that was launched. Its first and last token, ns."""

    state: int = CONTEXT
    kv: int = 0
    told: int = 0
    first_ns: int = 0
    last_ns: int = 0


@dataclass(eq=False)
class Launched:
    """A step that was launched: its rows, those of them that get a token, those that end their prompt, when it ends,
    its prompts, what of it was in vain."""

    work: list[tuple[Live, int]]
    sampled: set[Live]
    ends_prompt: list[Live]
    end_ns: int
    prompts: list[Live]
    wasted: int = 0


@dataclass
class Overlapping(Capacity[Live]):
    """The engine."""

    config: TensorrtLlmConfig
    arrivals: list[Arrival]
    blocks: int
    block_size: int
    max_model_len: int
    now_ns: int = 0
    gpu_ns: int = 0
    calls: list[Call] = field(default_factory=list[Call])
    processed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """When each step was processed, and the tokens of it computed in vain."""
    done: list[Live] = field(default_factory=list[Live])

    def __post_init__(self) -> None:
        self.begin(self.arrivals, self.blocks)
        self.to_come = [self._live(a) for a in self.arrivals]
        self.previous: Launched | None = None

    def _live(self, arrival: Arrival) -> Live:
        r = arrival.request
        room = self.max_model_len - r.prompt_tokens
        output, cap = min(arrival.output_tokens or 1, room), min(r.max_output_tokens, room)
        return Live(r.id, r.arrival_ns, r.prompt_tokens, output, cap)

    def is_context(self, row: Live) -> bool:
        return row.state == CONTEXT

    def is_generating(self, row: Live) -> bool:
        return row.state in (IN_PROGRESS, TO_COMPLETE)

    def needs(self, row: Live) -> int:
        return super().needs(row) if row.state == CONTEXT else int(row.kv % self.block_size == 0)

    # ---- the loop

    def run(self) -> Overlapping:
        while self.active or self.queue or self.to_come or self.previous:
            self.arrive([row for row in self.to_come if row.arrival_ns <= self.now_ns])
            self.to_come = [row for row in self.to_come if row.arrival_ns > self.now_ns]
            if self.active or self.previous:
                self.iterate()
            else:
                self.now_ns = self.to_come[0].arrival_ns
        return self

    def iterate(self) -> None:
        paused: list[Live] = []
        work = self.chosen([row for row in self.fitting(paused) if row.state != TO_COMPLETE])
        for row in paused:
            self.give_up(row)
        launched = self.launch(work, paused) if work or paused else None
        if self.previous is not None:
            self.now_ns = max(self.now_ns, self.previous.end_ns)
            self.update_requests(self.previous, paused)
        for row in paused:
            self.pause(row)
        if launched is not None:
            self.update_states(launched)
        if self.previous is not None:
            self.now_ns += 2
            self.process(self.previous)
        if launched is not None:
            for row, _ in launched.work:
                if row.state == IN_PROGRESS and row not in launched.ends_prompt and row.generated + 1 >= row.cap:
                    row.state = TO_COMPLETE
        self.previous = launched

    def chosen(self, fitting: list[Live]) -> list[tuple[Live, int]]:
        """The second stage."""
        for row in fitting:
            row.decodes = row.state != CONTEXT
        return micro_batch(self.config, self.block_size, fitting)

    def launch(self, work: list[tuple[Live, int]], paused: list[Live]) -> Launched | None:
        pool = self.pool
        for i, (row, n) in enumerate(work):
            if row not in pool.tables:
                self.allot(row)
                row.kv = row.prompt
                work[i] = (row, min(n, row.prompt - row.computed))
        for row, _ in work:
            if row.state != CONTEXT:
                if row.kv % self.block_size == 0:
                    pool.tables[row].append(pool.new_block())
                row.kv += 1
        ids = [(row.id, n) for row, n in work]
        self.calls.append((self.now_ns, ids, [row.id for row in paused], len(pool.queue)))
        if not work:
            return None
        self.now_ns += 3
        self.gpu_ns = max(self.gpu_ns, self.now_ns) + 10
        self.gpu_ns += sum(2 if row.state != CONTEXT else n for row, n in work)
        ends = [row for row, n in work if row.state == CONTEXT and row.computed + n == row.prompt]
        sampled = {row for row, _ in work if row.state != CONTEXT} | set(ends)
        return Launched(work, sampled, ends, self.gpu_ns, [row for row, _ in work if row.state == CONTEXT])

    def update_requests(self, step: Launched, paused: list[Live]) -> None:
        """Each row gets its token, unless it has ended."""
        for row, n in step.work:
            if row.state == COMPLETE:
                step.wasted += n
            elif row in step.sampled:
                row.generated += 1
                row.told += 1
                row.last_ns = step.end_ns + 2 if step.end_ns == self.now_ns else self.now_ns + 2
                if row.told == 1:
                    row.first_ns = row.last_ns
                if row.told == row.output or row.generated >= row.cap:
                    row.state = COMPLETE

    def pause(self, row: Live) -> None:
        if row.state == COMPLETE:
            return
        row.cap -= row.generated
        row.prompt, row.generated, row.state, row.computed = row.known, 0, CONTEXT, 0

    def update_states(self, step: Launched) -> None:
        for row, n in step.work:
            if row.state == CONTEXT:
                row.computed += n
                if row.computed == row.prompt:
                    row.state = TO_COMPLETE if row.generated + 1 >= row.cap else IN_PROGRESS

    def process(self, step: Launched) -> None:
        for row in [row for row, _ in step.work if row.state == COMPLETE and row in self.active]:
            self.give_up(row)
            self.active.remove(row)
            self.done.append(row)
        self.store(step)
        self.processed.append((self.now_ns, step.wasted))

    def store(self, step: Launched) -> None:
        """The prompts of `step` as far as they are launched; the last known token is never stored."""
        if self.config.enable_block_reuse:
            for row in step.prompts:
                if row in self.pool.tables:
                    self.pool.store(row, self.known(row)[: min(row.computed, row.known - 1)])
