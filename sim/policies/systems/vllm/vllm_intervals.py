"""vLLM 0.33 with `prefill_schedule_interval` N above 1: parts of prompts are computed in one step of N alone.

Rule: as `vllm`, and a call of the scheduler defers prompts where it is throttled, some running sequence is past its
prompt, and the latest call that let in what it could has left none waiting (capacity was not short). A deferring call
passes over running sequences in their prompts, and takes from the head of the queue those alone that lack one token.
One engine is throttled for fewer than N steps from the latest step that computed a part of a prompt, itself counted.
Ranks that step together are throttled in all passes but each N-th, by the pass counter of their engine loop.
Source: vllm/v1/core/sched/scheduler.py of the 0.33.0 wheel, `schedule` and `_update_after_schedule`; equal to its
recordings.
Simplifies: not simulated with drafts, images or groups of KV blocks, or in a pipeline.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig


class VllmAtIntervals(Vllm):
    """The scheduler."""

    def __init__(self, config: VllmConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        if self._pipelined:
            raise ScenarioError(
                "vllm: prefill_schedule_interval above 1 in a pipeline is not simulated. Leave one of them out."
            )
        if self._groups is not None:
            raise ScenarioError(
                "vllm: prefill_schedule_interval above 1 on a model with groups of KV blocks is not simulated. Set it"
                " to 1."
            )
        self._passes = -1  # of the present wave before this one; -1: the engine is alone
        self._interval = config.prefill_schedule_interval
        self._alone = config.has_rule("interval_alone")
        self._executed = 0  # steps that had something to run
        self._last_prefill = -self._interval  # the latest of them with a part of a prompt, counted from 1
        self._prefills = False  # whether this call has scheduled one
        self._is_bound = False  # whether requests waited though a call let in what it could

    def begin_pass(self, passes: int) -> None:
        self._passes = passes

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        batch = work if type(work) is Batch else None
        if self._prefills:
            self._last_prefill = self._executed + 1
        if batch is not None and (batch.chunks or batch.num_decode):
            self._executed += 1
        if not (self._defers or (batch is not None and batch.preempted)):
            self._is_bound = bool(self.waiting)
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        if self.waiting or self.partial or not super().repeat(batch, now_ns):
            return False
        self._executed += 1
        self._is_bound = False
        return True

    def _go_on(self) -> None:
        super()._go_on()
        self._prefills = False
        decodes = len(self.running) > len(self.partial)
        self._defers = decodes and not self._is_bound and self._is_throttled()
        if self._defers:
            self.events += [Event("sat_out", seq, "prefill_interval") for seq in self.partial]

    def _is_throttled(self) -> bool:
        if self._passes < 0:
            return self._alone and self._executed + 1 - self._last_prefill < self._interval
        return self._passes % self._interval != 0

    def _extend_running(self, cap: int) -> tuple[list[tuple[Sequence, int]], int] | None:
        plan = super()._extend_running(cap)
        if plan is not None and plan[0]:
            self._prefills = True
        return plan

    def _allocate(self, seq: Sequence, num_tokens: int) -> bool:
        has_room = super()._allocate(seq, num_tokens)
        # A part of a prompt counts, even if its sequence is preempted later in this call.
        self._prefills = self._prefills or (has_room and seq in self.partial)
        return has_room

    def _start(self, seq: Sequence, computed: int) -> None:
        super()._start(seq, computed)
        self._prefills = self._prefills or computed < seq.num_tokens - 1
