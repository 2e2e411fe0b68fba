"""TensorRT-LLM with draft tokens again, beside `tensorrt_llm_overlap.py`: KV token by token, as its manager has it.

Whether the draft of a token is right is a function of request and position, given by whoever compares. Overlapping or
not: without, the host takes no time and a step begins when the one before it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.plain.tensorrt_llm import micro_batch
from tests.plain.tensorrt_llm_overlap import COMPLETE, CONTEXT, IN_PROGRESS, TO_COMPLETE, Launched, Live, Overlapping


@dataclass
class Drafting(Overlapping):
    """The engine, with so many `drafts` a decode, of a drafter in the model or not."""

    drafts: int = 1
    in_model: bool = True
    right: Callable[[int, int], bool] = lambda request, position: False
    accepted: dict[Live, int] = field(default_factory=dict[Live, int])
    """Drafts accepted in the last step that was processed."""

    @property
    def waits(self) -> bool:
        return self.config.disable_overlap_scheduler is True

    @property
    def extra(self) -> int:
        return self.drafts - 1 if self.in_model else 0

    # ---- KV

    def add_tokens(self, row: Live, count: int) -> None:
        for _ in range(count):
            if row.kv % self.block_size == 0:
                self.pool.tables[row].append(self.pool.new_block())
            row.kv += 1

    def remove_tokens(self, row: Live, count: int) -> None:
        for _ in range(count):
            row.kv -= 1
            if row.kv % self.block_size == 0:
                block = self.pool.tables[row].pop()
                self.pool.refs[block] = 0
                self.pool.queue.append(block)

    def needs(self, row: Live) -> int:
        if row.state == CONTEXT:
            return 0 if row in self.pool.tables else self.pool.ceil(row.prompt + self.extra)
        more = 1 + self.drafts
        if row.state == TO_COMPLETE:
            more = max(min(more, row.prompt + row.cap - row.kv), 0)
        return self.pool.ceil(row.kv + more) - self.pool.ceil(row.kv)

    def most(self, row: Live) -> int:
        """Blocks that `row` may come to hold: a token is lacking as its last step starts, or two with one in flight."""
        before = row.prompt + row.cap - 1 if self.waits else row.prompt + row.cap - 2 + self.drafts
        return self.pool.ceil(before + self.drafts + self.extra + (0 if self.waits else 1))

    # ---- the loop

    def iterate(self) -> None:
        if not self.waits:
            super().iterate()
            return
        paused: list[Live] = []
        work = self.chosen(self.fitting(paused))
        for row in paused:
            self.give_up(row)
            self.pause(row)
        step = self.launch(work, paused)
        assert step is not None, "who is first always fits"
        self.now_ns = step.end_ns
        self.update_states(step)
        self.update_requests(step, paused)
        self.process(step)

    def chosen(self, fitting: list[Live]) -> list[tuple[Live, int]]:
        for row in fitting:
            row.decodes = row.state != CONTEXT
        return micro_batch(self.config, self.block_size, fitting, 1 + self.drafts)

    def launch(self, work: list[tuple[Live, int]], paused: list[Live]) -> Launched | None:
        pool = self.pool
        for i, (row, n) in enumerate(work):
            if row not in pool.tables:
                self.allot(row)
                row.kv = row.prompt
                self.add_tokens(row, self.extra)
                work[i] = (row, min(n, row.prompt - row.computed))
        decodes = [row for row, _ in work if row.state != CONTEXT]
        for row in decodes:
            self.add_tokens(row, 1 + self.drafts)
        ids = [(row.id, n) for row, n in work]
        self.calls.append((self.now_ns, ids, [row.id for row in paused], len(pool.queue)))
        if not work:
            return None
        self.now_ns += 0 if self.waits else 3
        self.gpu_ns = max(self.gpu_ns, self.now_ns) + 10
        self.gpu_ns += sum(2 if row in decodes else n for row, n in work)
        ends = [row for row, n in work if row.state == CONTEXT and row.computed + n == row.prompt]
        prompts = [row for row, _ in work if row.state == CONTEXT]
        return Launched(work, {*decodes, *ends}, ends, self.gpu_ns, prompts)

    def update_requests(self, step: Launched, paused: list[Live]) -> None:
        told_ns = self.now_ns if self.waits else max(self.now_ns, step.end_ns) + 2
        self.accepted = {}
        for row, n in step.work:
            if row.state == COMPLETE:
                step.wasted += n
            elif row in step.sampled:
                accepted = 0
                if row not in step.ends_prompt:
                    while accepted < self.drafts and self.right(row.id, row.known + accepted):
                        accepted += 1
                    self.accepted[row] = accepted
                for _ in range(1 + accepted):
                    row.generated += 1
                    row.told += 1
                    row.last_ns = told_ns
                    if row.told == 1:
                        row.first_ns = told_ns
                    if row.told == row.output or row.generated >= row.cap:
                        row.state = COMPLETE
                        break

    def update_states(self, step: Launched) -> None:
        super().update_states(step)
        for row, _ in step.work:
            if self.waits and row.state == TO_COMPLETE:
                row.state = IN_PROGRESS

    def process(self, step: Launched) -> None:
        for row in [row for row, _ in step.work if row.state == COMPLETE and row in self.active]:
            self.give_up(row)
            self.active.remove(row)
            self.done.append(row)
        for row, accepted in sorted(self.accepted.items(), key=lambda of: of[0].id):
            if row.state in (IN_PROGRESS, TO_COMPLETE):
                self.remove_tokens(row, self.drafts - accepted)
        self.store(step)
        self.processed.append((self.now_ns, step.wasted))
