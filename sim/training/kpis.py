"""The figures of an epoch with one packer, each defined once: its name, unit, which is better, and what it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import NS_PER_S
from batchsim.training import flops
from batchsim.training.config import TrainingConfig
from batchsim.training.cost import TrainingCost
from batchsim.training.packers.bins import Piece
from batchsim.training.simulate import StepTimes
from batchsim.training.steps import Epoch
from batchsim.training.stream import StreamTimes, stream_times
from batchsim.training.waiting import Asynchronous, asynchronous


@dataclass(frozen=True)
class Run:
    """An epoch of one packer, simulated."""

    label: str
    kind: str
    config: TrainingConfig
    cost: TrainingCost
    epoch: Epoch
    steps: Sequence[StepTimes]

    def total(self, name: str) -> float:
        """The sum over steps of what `name` is of a step."""
        return float(sum(getattr(step, name) for step in self.steps))

    @property
    def time_s(self) -> float:
        """Seconds of the epoch."""
        return self.updates.end if self.updates else self.total("time_s")

    @property
    def meet_s(self) -> float:
        """Seconds until ranks have met, of all steps; until the last is done where they never meet."""
        return self.updates.end if self.updates else self.total("meet_s")

    @cached_property
    def updates(self) -> Asynchronous | None:
        """The updates of ranks that do not wait for each other; None where they do."""
        if self.config.sharding != "async":
            return None
        reduce_s = self.config.reduce / NS_PER_S
        ranks = zip(*(step.rank_s for step in self.steps), strict=True)
        return asynchronous([[time + reduce_s for time in rank] for rank in ranks], self.config.staleness_bound)

    @cached_property
    def stream(self) -> StreamTimes | None:
        """Steps on the clock of the stream; None where all examples are there from the start."""
        if not self.epoch.arrivals_s:
            return None
        times = [step.time_s for step in self.steps]
        return stream_times(self.epoch.arrivals_s, self.epoch.ready_s, times, _examples_by_step(self))

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """Every figure of KPIS by name."""
        return {kpi.name: kpi.value(self) for kpi in KPIS}


@dataclass(frozen=True)
class Kpi:
    """A figure of an epoch; None where it does not apply."""

    name: str
    unit: Literal["", "%", "tokens/s", "s", "GB", "examples"]
    better: Literal["high", "low", ""]
    words: str
    value: Callable[[Run], float | None]


def _per(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def rows_of(run: Run) -> Sequence[Sequence[Piece]]:
    """The rows that a packer made, or the micro-batches of one that makes none, as pieces."""
    batches = [each for step in run.epoch.steps for each in step.micro_batches()]
    return run.epoch.rows or [[piece for row in each.rows for piece in row] for each in batches]


def squares_of(run: Run) -> list[int]:
    """The sum of the squares of documents of each of `rows_of`."""
    return [sum(piece[2] ** 2 for piece in row) for row in rows_of(run)]


def _pieces(run: Run) -> list[Piece]:
    return [piece for row in rows_of(run) for piece in row]


def _fill(run: Run) -> float | None:
    rows = run.epoch.rows
    if not rows or run.epoch.capacity is None:
        return None
    return _per(sum(piece[2] for row in rows for piece in row), len(rows) * run.epoch.capacity)


def _row_balance(run: Run) -> float | None:
    squares = squares_of(run)
    return _per(max(squares) * len(squares), sum(squares)) if squares else None


def _mfu(run: Run) -> float | None:
    if run.cost.shape is None or run.cost.peak is None:
        return None
    count = flops.palm if run.config.mfu == "palm" else flops.counted
    work = count(run.cost.shape, run.total("real"), run.total("own_squares"))
    return _per(work, run.time_s * run.config.ranks.gpus * run.cost.peak)


def _discarded(run: Run) -> float | None:
    """Tokens of touched examples that are in no row, and the tokens that `longer` cut."""
    lengths, seen = run.epoch.lengths, Counter[int]()
    for example, _, count in _pieces(run):
        seen[example] += count
    missing = sum(max(0, lengths[i] - count) for i, count in seen.items())
    return _per(missing + run.epoch.cut_tokens, sum(lengths) + run.epoch.cut_tokens)


def _truncated_examples(run: Run) -> float | None:
    lengths, seen = run.epoch.lengths, Counter[int]()
    for example, _, count in _pieces(run):
        seen[example] += count
    return _per(sum(count < lengths[i] for i, count in seen.items()) + run.epoch.cut_examples, len(lengths))


def _split(run: Run) -> float | None:
    pieces = Counter(example for example, *_ in _pieces(run))
    return _per(sum(count > 1 for count in pieces.values()), len(run.epoch.lengths)) if run.epoch.rows else 0.0


def _dropped(run: Run) -> float | None:
    used = {example for example, *_ in _pieces(run)} | set(run.epoch.lost)
    return _per(len(run.epoch.lengths) - len(used), len(run.epoch.lengths))


def _ranks_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]


def _examples_by_step(run: Run) -> list[list[int]]:
    return [
        sorted({piece[0] for each in step.micro_batches() for row in each.rows for piece in row})
        for step in run.epoch.steps
    ]


def _order_bias(run: Run) -> float | None:
    by_step = _examples_by_step(run)
    lengths = _ranks_of(np.array([run.epoch.lengths[i] for step in by_step for i in step], dtype=float))
    steps = _ranks_of(np.array([number for number, step in enumerate(by_step) for _ in step], dtype=float))
    if len(lengths) < 2 or not lengths.std() or not steps.std():
        return None
    return float(np.corrcoef(lengths, steps)[0, 1])


def _length_spread(run: Run) -> float | None:
    """Variance between steps of the mean length, over what random batches of as many would have."""
    by_step = [[run.epoch.lengths[i] for i in step] for step in _examples_by_step(run) if step]
    lengths = np.array([length for step in by_step for length in step], dtype=float)
    expected = lengths.var() * np.mean([1 / len(step) for step in by_step]) if by_step else 0.0
    return _per(float(np.var([np.mean(step) for step in by_step])), float(expected)) if len(by_step) > 1 else None


def _memory(run: Run) -> list[float]:
    sharded = run.config.sharding == "fsdp"
    batches = [each for step in run.epoch.steps for each in step.micro_batches()]
    needs = [run.cost.memory_bytes(each, run.config.ranks, sharded=sharded) for each in batches]
    return [need for need in needs if need is not None]


def _peak_memory(run: Run) -> float | None:
    return max(_memory(run), default=0.0) / 1e9 or None


def _too_large(run: Run) -> float | None:
    limit, needs = run.cost.limit_bytes, _memory(run)
    return None if limit is None or not needs else sum(need > limit for need in needs) / len(needs)


def _tokens_per_gpu(run: Run) -> float | None:
    return _per(run.total("real"), run.time_s * run.config.ranks.gpus)


def _sequences(run: Run) -> NDArray[np.float64]:
    return np.array([step.sequences for step in run.steps], dtype=float)


def _time_spread(run: Run) -> float | None:
    return _per(max(step.time_s for step in run.steps) * len(run.steps), run.time_s)


def _age_p99(run: Run) -> float | None:
    """The age that 99 % of the examples do not exceed, one of those there are."""
    if run.stream is None:
        return None
    ages = sorted(run.stream.ages_s)
    return ages[math.ceil(0.99 * len(ages)) - 1]


KPIS: tuple[Kpi, ...] = (
    Kpi("steps", "", "", "optimizer steps of the epoch", lambda run: float(len(run.steps))),
    Kpi("rows", "", "low", "rows, or samples where none are packed, of all steps", lambda run: run.total("rows")),
    Kpi("padding", "%", "low", "computed tokens that are no example's",
        lambda run: 1 - run.total("real") / max(run.total("computed"), 1)),
    Kpi("fill", "%", "high", "tokens of all packed rows over rows times capacity", _fill),
    Kpi("row_imbalance", "", "low", "sum of squares of documents of a row: max over mean", _row_balance),
    Kpi("imbalance", "", "low", "time until ranks have met over the mean of their own times, of all steps",
        lambda run: _per(run.meet_s, run.total("mean_s"))),
    Kpi("attention_imbalance", "", "low", "the same if all micro-batches of a step had equally many tokens",
        lambda run: None if run.updates else _per(
            sum(s.attention[0] for s in run.steps), sum(s.attention[1] for s in run.steps))),
    Kpi("waiting", "%", "low", "part of the ranks' time that is waiting for others: 1 − mean over max",
        lambda run: 1 - run.total("mean_s") / run.meet_s if run.meet_s else None),
    Kpi("bubble", "%", "low", "part of a pipeline's time in which a stage has nothing to do",
        lambda run: _per(sum(sum(s.rank_s) - sum(s.busy_s) for s in run.steps), sum(sum(s.rank_s) for s in run.steps))
        if run.config.ranks.pipeline > 1 else None),
    Kpi("epoch_s", "s", "low", "the time of all steps", lambda run: run.time_s),
    Kpi("tokens_per_gpu_s", "tokens/s", "high", "tokens of examples a second and GPU", _tokens_per_gpu),
    Kpi("mfu", "%", "high", "FLOPs that tokens and squares of documents need, over the GPUs' peak", _mfu),
    Kpi("step_mean_s", "s", "low", "mean time of a step", lambda run: _per(run.time_s, len(run.steps))),
    Kpi("step_spread", "", "low", "time of a step: max over mean", _time_spread),
    Kpi("sequences_mean", "", "", "examples of a step, mean", lambda run: float(_sequences(run).mean())),
    Kpi("sequences_sd", "", "low", "examples of a step, standard deviation", lambda run: float(_sequences(run).std())),
    Kpi("truncated_tokens", "%", "low", "tokens discarded of examples that are used", _discarded),
    Kpi("truncated", "%", "low", "examples that lose tokens", _truncated_examples),
    Kpi("split", "%", "low", "examples cut into two rows or more", _split),
    Kpi("dropped", "%", "low", "examples that the packer, or longer, leaves out", _dropped),
    Kpi("lost", "%", "low", "examples of a last step that is not whole",
        lambda run: len(set(run.epoch.lost)) / len(run.epoch.lengths)),
    Kpi("order_bias", "", "", "rank correlation of an example's length with its step: 0 in random order", _order_bias),
    Kpi("length_spread", "", "", "variance of the mean length between steps, over that of random steps",
        _length_spread),
    Kpi("shapes", "", "low", "different shapes of micro-batches, each a program to compile where shapes are fixed",
        lambda run: float(len({b.shape for step in run.epoch.steps for b in step.micro_batches()}))),
    Kpi("staleness_mean", "", "low", "of asynchronous ranks: updates between the reading of weights and one's own",
        lambda run: run.updates and float(np.mean(run.updates.staleness))),
    Kpi("staleness_max", "", "low", "the most of any update", lambda run: run.updates and max(run.updates.staleness)),
    Kpi("age_mean_s", "s", "low", "of a stream: time from an example's arrival to the start of its step, mean",
        lambda run: run.stream and float(np.mean(run.stream.ages_s))),
    Kpi("age_p99_s", "s", "low", "the same, of 99 % of the examples at most", _age_p99),
    Kpi("behind", "examples", "low", "of a stream: examples that come between a step's newest one and its end, mean",
        lambda run: run.stream and float(np.mean(run.stream.behind))),
    Kpi("idle", "%", "", "of a stream: part of the time in which the trainer waits for examples",
        lambda run: run.stream and _per(run.stream.idle_s, run.stream.ends_s[-1])),
    Kpi("left", "%", "low", "of a stream: examples not yet in a step when the last one arrives",
        lambda run: run.stream and _per(run.stream.left, len(run.stream.ages_s))),
    Kpi("memory_gb", "GB", "low", "most that a GPU needs: weights, gradients, optimizer, activations, logits",
        _peak_memory),
    Kpi("too_large", "%", "low", "micro-batches that do not fit a GPU's memory", _too_large),
)  # fmt: skip
"""All figures, in the order of packers.csv."""
