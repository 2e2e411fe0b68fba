"""vLLM Neuron, for Trainium: the scheduler that its plugin puts before vLLM's own. A step is of a prompt or of decodes.

Rule: all waiting requests are held back. The head is let through where fewer than `max_num_seqs` run, none of these is
in its prompt, and none else was let through in this step: one prompt a step, alone, cut at `max_num_batched_tokens`,
its chunks in consecutive steps. While it is computed the decodes are hidden and stand still; next the head after it is
let through, so that queued prompts stall decodes one after another until all slots run. Otherwise all running decode.
The older plugin on NxD Inference (vllm-neuron a5ef7c8, for vLLM 0.11) does the same with whole prompts: budget 131072.
Source: aws-neuron-sdk @ a3247f5b, vllm-neuron/docs/design/vllm/neuron-scheduler.md; vllm-neuron a5ef7c8,
core/scheduler.py. Preemption is vLLM's; a pool of ceil(max_model_len / block_size) blocks a slot never needs it.
Simplifies: a head that finds no blocks for its whole prompt lets the decodes go on; no prefix cache, drafts, or ranks
in lockstep; scheduling waits for results.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import PositiveInt
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.policy_config import PolicyConfig, Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import SYNCHRONOUS, VllmConfig


@dataclass(frozen=True)
class VllmNeuronConfig(PolicyConfig):
    """Knobs by vLLM's names; the defaults are the plugin's slots and the budget of its documents."""

    max_num_seqs: PositiveInt = 32
    """The most sequences that run at once, and rows of the largest decode program (`--max-num-seqs`)."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens of a prompt in one step (`--max-num-batched-tokens`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least max_num_seqs"
                f" {self.max_num_seqs}"
            )

    @property
    def base(self) -> VllmConfig:
        """The knobs of vLLM's own scheduler beneath."""
        return VllmConfig(
            enable_prefix_caching=False,
            async_scheduling=False,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            knobs=("max_num_seqs", "max_num_batched_tokens"),
            loop=SYNCHRONOUS,
        )


class VllmNeuron(Vllm):
    """The scheduler. A step of decodes with blocks to spare is O(1) in the number of sequences."""

    evidence = "hand-derived"

    def __init__(self, config: VllmNeuronConfig, context: PolicyContext) -> None:
        super().__init__(config.base, context)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._go_on()
        chunk = self._prompt()
        if chunk is not None:
            self._last = Batch(None, [chunk], chunk[1])
            return self._last
        preempted: list[Sequence] = []
        plan = self._extend_running(self._step_tokens)
        if plan is None:
            self._walk_running(self._step_tokens, preempted)
        if not (self.group.members or preempted):
            return IDLE
        return Batch(self.group, [], 0, preempted=preempted)

    def _prompt(self) -> tuple[Sequence, int] | None:
        """The chunk of the prompt that this step computes: of the one begun, else of the head if it is let through."""
        seq = next(iter(self.partial), None)
        if seq is None and self.waiting:
            seq = self._let_through()
        elif seq is not None and self.waiting:
            self._note_blocked("one_prompt")
        if seq is None:
            return None
        computed = seq.settled_computed_tokens
        n = min(seq.num_tokens - computed, self._step_tokens)
        has_room = self.kv.allocate(seq, computed + n)
        assert has_room, "all of a prompt fitted as it was let through, and nothing else grows meanwhile"
        return seq, n

    def _let_through(self) -> Sequence | None:
        """The head of the queue, which runs from now on; None if it is held back."""
        head = self.queue.head()
        if len(self.running) >= self._slots:
            self._note_blocked("no_slot")
            return None
        start = head.settled_computed_tokens
        if not self._room(head, min(head.num_tokens, start + self._step_tokens), 0):
            self._note_blocked("kv_blocks")
            return None
        seq = self.queue.pop()
        self._start(seq, start)
        if self.waiting:
            self._note_blocked("one_prompt")
        return seq
