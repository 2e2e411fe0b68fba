"""The steps of an epoch in time: what each rank computes, how long it waits, and when all have met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.training.config import TrainingConfig
from batchsim.training.cost import TrainingCost
from batchsim.training.steps import Epoch, MicroBatch, Step
from batchsim.training.waiting import ddp, fsdp, one_forward_one_backward


@dataclass(frozen=True)
class StepTimes:
    """One step: what it held, and its times in seconds.

    `rank_s` is the time of each data-parallel rank until it is done, bubbles included, `busy_s` that of its GPUs'
    work alone; `attention` is max over mean of the ranks if all micro-batches had equally many tokens. `time_s` ends
    when all ranks have met, the reduction included.
    """

    rows: int
    sequences: int
    real: int
    computed: int
    squares: int
    own_squares: int
    time_s: float
    meet_s: float
    rank_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    attention: tuple[float, float]

    @property
    def mean_s(self) -> float:
        """The mean of the ranks' times."""
        return sum(self.rank_s) / len(self.rank_s)

    @property
    def imbalance(self) -> float:
        """The time until all ranks have met over the mean of the ranks' own."""
        return self.meet_s / self.mean_s if self.mean_s else 1.0

    @property
    def bubble(self) -> float:
        """Part of the ranks' time in which a pipeline's stage had nothing to do."""
        total = sum(self.rank_s)
        return 1 - sum(self.busy_s) / total if total else 0.0


def step_times(config: TrainingConfig, cost: TrainingCost, epoch: Epoch, label: str) -> list[StepTimes]:
    """The times of every step. ScenarioError where ranks under FSDP have unequally many micro-batches."""
    return [_timed(config, cost, step, number, label) for number, step in enumerate(epoch.steps)]


def _timed(config: TrainingConfig, cost: TrainingCost, step: Step, number: int, label: str) -> StepTimes:
    batches = step.micro_batches()
    fixed = config.ranks.pipeline > 1 and not config.variable_lengths
    widest = max((each.computed for each in batches), default=0)
    mean_tokens = sum(each.computed for each in batches) / len(batches) if batches else 0.0
    ranks = len(step.rounds[0])
    rank_s, busy_s, meet_s, even = [0.0] * ranks, [0.0] * ranks, 0.0, [0.0, 0.0]
    for round_ in step.rounds:
        times = [[_stage_s(config, cost, each, widest if fixed else 0) for each in rank] for rank in round_]
        alike = [[_stage_s(config, cost, each, 0, mean_tokens) for each in rank] for rank in round_]
        met, own = _met(config, times, number, label)
        meet_s += met
        even_met, even_own = _met(config, alike, number, label)
        even[0] += even_met
        even[1] += sum(even_own) / ranks
        for rank in range(ranks):
            rank_s[rank] += own[rank]
            busy_s[rank] += sum(times[rank])
    return StepTimes(
        rows=sum(len(each.rows) for each in batches),
        sequences=len({piece[0] for each in batches for row in each.rows for piece in row}),
        real=sum(each.real for each in batches),
        computed=widest * len(batches) if fixed else sum(each.computed for each in batches),
        squares=round(sum(each.squares_of(widest) if fixed else each.squares for each in batches)),
        own_squares=sum(each.own_squares for each in batches),
        time_s=meet_s + config.reduce / NS_PER_S,
        meet_s=meet_s,
        rank_s=tuple(rank_s),
        busy_s=tuple(busy_s),
        attention=(even[0], even[1]),
    )


def _stage_s(
    config: TrainingConfig, cost: TrainingCost, batch: MicroBatch, padded: int, tokens: float | None = None
) -> float:
    """Seconds of each pipeline stage with a micro-batch, `padded` to those tokens if not 0, or with other `tokens`
    beside its own squares."""
    together = max(config.ranks.context, batch.ranks)
    squares = batch.squares_of(padded) if padded else batch.squares
    computed = (padded or batch.computed) if tokens is None else tokens
    return cost.stage_s(computed / together, squares / together, config.ranks.pipeline)


def _met(
    config: TrainingConfig, times: Sequence[Sequence[float]], number: int, label: str
) -> tuple[float, list[float]]:
    """The time until ranks with micro-batches of these `times` have met, and the own time of each."""
    stages = config.ranks.pipeline
    if stages > 1:
        own = [one_forward_one_backward(rank, stages, config.send / NS_PER_S) if rank else 0.0 for rank in times]
        return max(own), own
    own = [sum(rank) for rank in times]
    if config.sharding != "fsdp":
        return ddp(times), own  # of asynchronous ranks only their own times count
    counts = {len(rank) for rank in times}
    if len(counts) > 1:
        raise ScenarioError(
            f"training.packers.{label}: step {number} has {min(counts)} to {max(counts)} micro-batches a rank, and"
            " ranks under fsdp meet at each. Write sharding: ddp, or a packer that gives ranks equally many."
        )
    return fsdp(times), own
