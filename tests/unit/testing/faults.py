"""Extensions with one fault each, in a table: what is checked, and the check that must find the fault."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchsim.cost.own_cost import Own, OwnCost
from batchsim.cost.work import Columns, StepWork, Terms
from batchsim.deployment.model import ModelSpec
from batchsim.drive.fleet.routers.router import Stage
from batchsim.drive.fleet.routing import LeastTokens, LeastTokensConfig
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig, FleetLoad
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Request
from batchsim.kernel.types import Sequence as Seq
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.workload.predictors import OwnPredictor
from batchsim.workload.processes import OwnArrivals

COUNT = itertools.count()
"""State of a module: what an extension must not have."""


class _Policy(Continuous):
    def __init__(self, config: ContinuousConfig, context: PolicyContext) -> None:
        super().__init__(config, context)


class LeaksKv(_Policy):
    def release(self, seq: Seq) -> None:
        if seq.request.id:
            super().release(seq)
            return
        if seq.group is not None:
            seq.group.leave(seq)
        self.partial.pop(seq, None)
        del self.running[seq]


class Idles(_Policy):
    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        if self.waiting and not self.running and now_ns % 2 == 0 and not drain:
            return Idle(now_ns + 1)
        return super().schedule(now_ns, drain)

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return False


class TakesNoKv(_Policy):
    """Reserves half of what a prompt needs."""

    def most_tokens(self, seq: Seq) -> int:
        return max(1, seq.request.prompt_tokens // 2)


class Borrows(_Policy):
    """Looks for block ids, which only some KV managers have."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        if hasattr(self.kv, "table") and type(self.kv).__name__ == "TableKV":
            self.waiting.rotate(1)
        return super().schedule(now_ns, drain)


class DrawsByTheProcess(_Policy):
    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        if next(COUNT) % 2 and len(self.waiting) > 1:
            self.waiting.rotate(1)
        return super().schedule(now_ns, drain)

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        return False


class RepeatsTooOften(_Policy):
    """Rests at every third call, and says that nothing changes."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self._looks = getattr(self, "_looks", 0) + 1
        if self.running and self._looks % 3 == 0:
            return Idle(now_ns + 1)
        return super().schedule(now_ns, drain)


class _Router(LeastTokens):
    def __init__(self, config: Any, seed: int) -> None:
        super().__init__(LeastTokensConfig(), seed)
        self.seed = seed


class RoutesToTheDown(_Router):
    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        return 0


class RoutesByTheProcess(_Router):
    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        return up[next(COUNT) % len(up)]


class HeedsTheLastAnswer(_Router):
    last = 0

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        return up[self.last % len(up)]

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self.last = request.id


class LooksAfterAll(_Router):
    looks_at_no_replica = True


class Crashes(_Router):
    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        return up[1 // (request.prompt_tokens % 7)]


def router(kind: type[_Router]) -> type:
    """The config of a faulty router."""

    @dataclass(frozen=True)
    class Faulty(LeastTokensConfig):
        def build(self, seed: int) -> Any:
            return kind(self, seed)

    return Faulty


@dataclass(frozen=True)
class Swearing(LeastTokensConfig):
    """Refuses its knobs on several lines."""

    most: int = 1

    def __post_init__(self) -> None:
        if self.most % 2:
            raise ValueError("no,\nno")


def cost(step_ns: Any, own: type[Own] = Own) -> type[OwnCost]:
    """The config of a faulty cost."""

    @dataclass(frozen=True)
    class Faulty(OwnCost):
        def step_ns(self, step: StepWork) -> int:
            return step_ns(step)

        def build(self, model: ModelSpec, *, block_size: int = 16, max_model_len: int | None = None) -> Own:
            return own(self)

    return Faulty


def tokens(step: StepWork) -> int:
    return 1_000_000 + 1000 * (step.num_decode_tokens + step.num_prefill_tokens)


class HalfExplained(Own):
    def explain(self, columns: Columns) -> Terms:
        return {name: values / 2 for name, values in super().explain(columns).items()}


class BentLine(Own):
    """Says that decodes cost nothing, for leaps alone."""

    def decode_line(self, batch: Batch) -> Any:
        return 1_000_000, 0.0, 1e9


def scaler(wanted: Any) -> type[AutoscalerConfig]:
    """The config of a faulty autoscaler, which asks for what `wanted` says of a fleet's load."""

    class Scaler:
        def __init__(self, config: AutoscalerConfig) -> None:
            self.config = config

        def desired(self, fleet: FleetLoad, now_ns: int) -> int:
            return wanted(fleet, self.config)

    @dataclass(frozen=True, kw_only=True)
    class Faulty(AutoscalerConfig):
        def build(self) -> Any:
            return Scaler(self)

    return Faulty


@dataclass(frozen=True, kw_only=True)
class SwearingScaler(AutoscalerConfig):
    def __post_init__(self) -> None:
        if self.max > 3:
            raise ValueError("no,\nno")


def arrivals(times_s: Any) -> type[OwnArrivals]:
    """The config of faulty arrivals, whose times are those of `times_s(config, random)`."""

    @dataclass(frozen=True)
    class Faulty(OwnArrivals):
        def times_s(self, random: np.random.Generator) -> Iterator[float]:
            return times_s(self, random)

    return Faulty


def poisson(rate: float, draw: Any) -> Iterator[float]:
    now_s = 0.0
    while True:
        now_s += draw() / rate
        yield now_s


def back_in_time(config: OwnArrivals, chance: np.random.Generator) -> Iterator[float]:
    for n, at_s in enumerate(poisson(config.mean_rate, chance.standard_exponential)):
        yield at_s if n != 50 else at_s - 1e3


def predictor(predicted: Any) -> type[OwnPredictor]:
    """The config of a faulty predictor, whose answers are those of `predicted(request, true tokens, random)`."""

    @dataclass(frozen=True)
    class Faulty(OwnPredictor):
        def predicted_tokens(self, request: Request, true_tokens: int, random: np.random.Generator) -> int:
            return predicted(request, true_tokens, random)

    return Faulty


@dataclass(frozen=True)
class Nameless(OwnPredictor):
    @property
    def kind(self) -> str:
        return "\n"

    def predicted_tokens(self, request: Request, true_tokens: int, random: np.random.Generator) -> int:
        return 1


@dataclass(frozen=True)
class SwearingPredictor(OwnPredictor):
    most: int = 1

    def __post_init__(self) -> None:
        if self.most % 2:
            raise ValueError("no,\nno")


class _Reader:
    def records(self, path: Path) -> Iterator[Mapping[Any, Any]]:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            yield {"at": line}


class NoRows(_Reader):
    def records(self, path: Path) -> Iterator[Mapping[Any, Any]]:
        return iter(())


class NumbersItsReads(_Reader):
    def records(self, path: Path) -> Iterator[Mapping[Any, Any]]:
        read = next(COUNT)
        for row in super().records(path):
            yield {**row, "read": read}


class OneRowForAll(_Reader):
    def records(self, path: Path) -> Iterator[Mapping[Any, Any]]:
        row: dict[str, object] = {}
        for each in super().records(path):
            row.update(each)
            yield row


class Truncates(_Reader):
    def records(self, path: Path) -> Iterator[Mapping[Any, Any]]:
        read = list(super().records(path))
        path.write_text("gone\n", encoding="utf-8")
        return iter(read)


class SwearsAtDamage(_Reader):
    def records(self, path: Path) -> Iterator[Mapping[Any, Any]]:
        if not path.exists() or not path.read_bytes():
            raise ValueError("no,\nno")
        yield from super().records(path)


FAULTS: list[tuple[str, Any, str]] = [
    ("policy", LeaksKv, "conservation"),
    ("policy", Idles, "no_idling"),
    ("policy", TakesNoKv, "kv_within_pool"),
    ("policy", DrawsByTheProcess, "equal_seeds"),
    ("policy", Borrows, "live_equals_simulated"),
    ("policy", RepeatsTooOften, "leap_equals_stepping"),
    ("router", router(RoutesToTheDown), "routes_to_the_up"),
    ("router", router(RoutesByTheProcess), "pure"),
    ("router", router(HeedsTheLastAnswer), "order_of_answers"),
    ("router", router(LooksAfterAll), "looks_at_no_replica"),
    ("router", router(Crashes), "conservation"),
    ("router", Swearing, "one_line_errors"),
    ("cost", cost(lambda step: tokens(step) / 1.0), "whole_ns"),
    ("cost", cost(lambda step: tokens(step) + next(COUNT)), "same_work_same_time"),
    ("cost", cost(lambda step: 10**9 - tokens(step)), "more_work_no_less_time"),
    ("cost", cost(tokens, HalfExplained), "parts_sum"),
    ("cost", cost(tokens, BentLine), "leap_equals_stepping"),
    ("autoscaler", scaler(lambda fleet, config: config.max + 1), "min_to_max"),
    ("autoscaler", scaler(lambda fleet, config: next(COUNT) % config.max + 1), "looks_only"),
    ("autoscaler", scaler(lambda fleet, config: random.randint(config.min, config.max)), "equal_seeds"),
    ("autoscaler", scaler(lambda fleet, config: fleet.num_waiting / 2), "conservation"),
    ("autoscaler", SwearingScaler, "one_line_errors"),
    ("arrivals", arrivals(back_in_time), "in_order"),
    ("arrivals", arrivals(lambda config, chance: iter([1.0, 2.0])), "goes_on"),
    (
        "arrivals",
        arrivals(lambda config, chance: poisson(config.mean_rate, lambda: random.expovariate(1))),
        "equal_seeds",
    ),
    ("arrivals", arrivals(lambda config, chance: poisson(config.mean_rate, lambda: 1.0)), "seeds_differ"),
    (
        "arrivals",
        arrivals(lambda config, chance: poisson(2 * config.mean_rate, chance.standard_exponential)),
        "mean_rate",
    ),
    ("predictor", predictor(lambda request, true, chance: true / 2), "whole_tokens"),
    ("predictor", predictor(lambda request, true, chance: random.randint(1, 10**6)), "equal_seeds"),
    ("predictor", predictor(lambda request, true, chance: 1 + next(COUNT)), "order_of_requests"),
    ("predictor", Nameless, "has_a_name"),
    ("predictor", SwearingPredictor, "one_line_errors"),
    ("reader", NoRows, "rows"),
    ("reader", NumbersItsReads, "reads_alike"),
    ("reader", OneRowForAll, "rows_apart"),
    ("reader", Truncates, "file_untouched"),
    ("reader", SwearsAtDamage, "one_line_errors"),
]
"""(Kind, extension, the check that its fault must fail)."""
