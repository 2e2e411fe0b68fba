"""The choices of the preemptive family: its knobs, the order of its queues, its victims, recompute against swap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.units import Duration, PartialShare
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.policy_config import Traits
from batchsim.kernel.protocols import LengthPredictor, PolicyContext, StepEstimator
from batchsim.kernel.types import Sequence
from batchsim.policies.families.budget import BudgetConfig

Key = tuple[int, int, int]


@dataclass(frozen=True)
class PreemptiveConfig(BudgetConfig):
    """Knobs.

    Beside `preempt_after`, `victim: lowest_priority` is apt: `newest` would take blocks from the important ones just
    let in.
    """

    watermark: PartialShare = 0.01
    """Part of the KV blocks that admission leaves free while others run; 1 % as in vLLM's first engine."""
    victim: Literal["newest", "lowest_priority", "most_remaining"] = "newest"
    """Which sequence is preempted."""
    by: Literal["recompute", "swap", "auto"] = "recompute"
    """recompute: its KV is dropped; swap: moved to host memory; auto: swapped where moving the blocks out and in again
    is cheaper than computing the tokens anew."""
    waiting_order: Literal["fcfs", "priority", "sjf", "srpt"] = "fcfs"
    """The queue's order: first come, priority, or by length as predicted."""
    preempt_after: Duration | None = None
    """Wait after which a more important request preempts, with `waiting_order: priority`; equals never do; null: only
    want of blocks preempts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preempt_after is not None and self.waiting_order != "priority":
            raise ValueError(
                f"preempt_after acts for the head of the queue, so it needs waiting_order: priority, not"
                f" {self.waiting_order}"
            )

    @property
    def traits(self) -> Traits:
        predicts = self.waiting_order in ("sjf", "srpt") or self.victim == "most_remaining"
        return replace(super().traits, needs_predictor=predicts, needs_swap_space=self.by != "recompute")


def check_context(config: PreemptiveConfig, context: PolicyContext) -> None:
    """Raises ScenarioError where a knob needs something the scenario does not give."""
    if config.traits.needs_predictor and context.predictor is None:
        knobs = f"waiting_order: {config.waiting_order}, victim: {config.victim}"
        raise ScenarioError(f"preemptive: {knobs} needs predicted output lengths. Add predictor: {{kind: oracle}}.")
    if config.by == "auto" and context.estimator is None:
        raise ScenarioError("preemptive: by: auto needs estimates of recompute and swap times. Say recompute or swap.")
    if config.traits.needs_swap_space and not context.kv.num_swap_blocks:
        raise ScenarioError(f"preemptive: by: {config.by} needs swap space, and there is none. Add kv: swap_space.")


class WaitingQueue:
    """A queue by `fcfs`, `priority`, `sjf` or `srpt`; equals by arrival, then id. Preempted ones regain their place.

    `sjf` orders by the predicted output tokens, `srpt` by those still to come when the sequence was queued.
    """

    def __init__(self, order: str, predictor: LengthPredictor | None) -> None:
        self._order = order
        self._predictor = predictor
        self._heap: list[tuple[Key, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def head(self) -> Sequence:
        return self._heap[0][1]

    def push(self, seq: Sequence) -> None:
        heappush(self._heap, (self._key(seq), seq))

    def pop(self) -> Sequence:
        return heappop(self._heap)[1]

    def remove(self, seq: Sequence) -> bool:
        """Takes `seq` out; returns whether it was in the queue. O(queue)."""
        kept = [entry for entry in self._heap if entry[1] is not seq]
        is_there = len(kept) < len(self._heap)
        if is_there:
            heapify(kept)
            self._heap = kept
        return is_there

    def _key(self, seq: Sequence) -> Key:
        request = seq.request
        first = 0
        if self._order == "priority":
            first = request.priority
        elif self._predictor is not None and self._order == "sjf":
            first = self._predictor.predict(request)
        elif self._predictor is not None and self._order == "srpt":
            first = remaining_tokens(seq, self._predictor)
        return first, request.arrival_ns, request.id


def remaining_tokens(seq: Sequence, predictor: LengthPredictor) -> int:
    """Predicted output tokens still to come; 0 for a sequence that has outgrown its prediction."""
    return max(predictor.predict(seq.request) - seq.num_output_tokens, 0)


def next_victim(
    rule: str,
    running: dict[Sequence, None],
    classes: dict[int, dict[Sequence, None]],
    predictor: LengthPredictor | None,
) -> Sequence:
    """The running sequence that gives up its blocks by `rule`: `newest`, `lowest_priority` or `most_remaining`; of
    equals the newest.

    `running` and each of `classes` (the running by priority) are in order of admission. O(running) for
    `most_remaining` alone.
    """
    if rule == "lowest_priority":
        return next(reversed(classes[max(classes)]))
    if rule == "most_remaining" and predictor is not None:
        return max(running, key=lambda seq: (remaining_tokens(seq, predictor), seq.order))
    return next(reversed(running))


def pays_to_swap(seq: Sequence, kv: KVBlockManager, estimator: StepEstimator) -> bool:
    """Whether moving the blocks of `seq` out and in again takes less time than computing its tokens anew."""
    return 2 * estimator.swap_ns(kv.held(seq)) < estimator.recompute_ns(seq.num_computed_tokens)
