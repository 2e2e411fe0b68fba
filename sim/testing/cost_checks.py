"""What every cost of steps must keep: `check_cost`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from hypothesis import strategies as st

from batchsim.base.ranges import Config
from batchsim.cost.base import Cost
from batchsim.cost.own_cost import OwnCost
from batchsim.cost.work import TIME_TERMS, StepWork, columns_of, work_of_step
from batchsim.deployment.models import MODELS
from batchsim.testing import policy_checks
from batchsim.testing.by_hand import steps
from batchsim.testing.check import CASES, Cases, Check, named, refused_in_one_line
from batchsim.testing.random_configs import configs, needed
from batchsim.testing.random_configs import knobs as random_knobs
from batchsim.testing.random_engines import Case
from batchsim.testing.router_checks import engines

_STEPS = 25  # of a case, each of which is compared with every other
_ROUNDING_NS = 2
_PARTS = ("num_gpus", "draft", "encoder", "shapes")


def check_cost(
    config: type[Config], *, knobs: Mapping[str, Any] | None = None, cases: int = CASES, model: str = "llama-3.1-8b"
) -> list[Check]:
    """The checks of a cost by its config, as `check_policy` has them of a policy; `model` is the name of one in the
    catalog. The random cases are engines of shipped policies whose steps it times.

    Of a shipped kind the knobs that have defaults stay at them.
    """
    asked = {name for name in needed(config) | set(getattr(config, "__annotations__", {})) if name not in _PARTS}
    asked = asked if issubclass(config, OwnCost) else needed(config)
    drawn = Cases(_timed(config, asked, knobs or {}, model), cases, config.__name__)
    stated = Cases(random_knobs(config, knobs or {}, asked), cases, config.__name__)
    return named(
        config,
        {
            "whole_ns": drawn.all(whole_ns),
            "same_work_same_time": drawn.all(same_work_same_time),
            "more_work_no_less_time": drawn.all(more_work_no_less_time),
            "parts_sum": drawn.all(parts_sum),
            "equal_seeds": drawn.all(lambda timed: policy_checks.equal_seeds(timed.case)),
            "leap_equals_stepping": drawn.all(lambda timed: policy_checks.leap_equals_stepping(timed.case)),
            "live_equals_simulated": drawn.all(lambda timed: policy_checks.live_equals_simulated(timed.case)),
            "one_line_errors": stated.all(lambda drawn: refused_in_one_line(config, drawn)),
        },
        cases,
    )


@dataclass(frozen=True)
class Timed:
    """A case whose steps a cost times; `again` is built like it."""

    case: Case
    again: Cost


@st.composite
def _timed(draw: st.DrawFn, config: type[Config], asked: set[str], fixed: Mapping[str, Any], model: str) -> Timed:
    made: Any = draw(configs(config, fixed, asked).filter(lambda one: one is not None))
    case = draw(engines())
    first, again = (made.build(MODELS[model], block_size=case.block_size, max_model_len=1024) for _ in range(2))
    return Timed(replace(case, cost=first, stages=1), again)


def whole_ns(timed: Timed) -> None:
    """Every step, recompute and swap takes a whole number of ns, a step at least one."""
    cost = timed.case.cost
    for batch in steps(timed.case, timed.case.engine()):
        ns = cost.step_ns(batch)
        assert type(ns) is int and ns >= 1, f"step_ns gives {ns!r}"
    for count in (1, 7, 300):
        for name in ("recompute_ns", "swap_ns"):
            ns = getattr(cost, name)(count)
            assert type(ns) is int and ns >= 0, f"{name}({count}) gives {ns!r}"


def same_work_same_time(timed: Timed) -> None:
    """Steps of the same work take the same time, asked again, later, or of another cost of the same config."""
    cost, known = timed.case.cost, dict[StepWork, int]()
    for batch in steps(timed.case, timed.case.engine()):
        work = work_of_step(batch)
        times = {cost.step_ns(batch), cost.step_ns(batch), timed.again.step_ns(batch)}
        times |= {known.setdefault(work, min(times))}
        assert len(times) == 1, f"a step of {work} takes {sorted(times)} ns"


def more_work_no_less_time(timed: Timed) -> None:
    """Of two steps, the one with at least as much of every kind of work takes at least as long."""
    cost = timed.case.cost
    rows = [
        (work_of_step(batch), cost.step_ns(batch)) for batch in islice(steps(timed.case, timed.case.engine()), _STEPS)
    ]
    for more, longer_ns in rows:
        for less, ns in rows:
            is_more = all(a >= b for a, b in zip(more, less, strict=True))
            assert not is_more or longer_ns >= ns, f"{more} takes {longer_ns} ns, {less} {ns}"


def parts_sum(timed: Timed) -> None:
    """The parts of `explain` sum to `step_ns`, but for rounding."""
    cost = timed.case.cost
    for batch in islice(steps(timed.case, timed.case.engine()), _STEPS):
        terms = cost.explain(columns_of(batch))
        total, ns = sum(float(terms[term][0]) for term in TIME_TERMS), cost.step_ns(batch)
        assert abs(total - ns) <= _ROUNDING_NS, f"parts of {total:,.1f} ns explain a step of {ns:,} ns"
