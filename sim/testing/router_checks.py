"""What every router and every autoscaler must keep: `check_router`, `check_autoscaler`, and `fleet_checks` of a policy
that stands behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from batchsim.base.ranges import Config
from batchsim.drive.fleet.fleet_plan import FleetPlan
from batchsim.drive.fleet.routers.router import (
    ForgetsReplicas,
    ReadsLoads,
    SeesFirstTokens,
    Stage,
    keeps_apart,
    routed,
)
from batchsim.drive.fleet.routing import ROUTERS
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig, EngineLoad
from batchsim.kernel.types import Request
from batchsim.testing import fleets
from batchsim.testing.check import CASES, Cases, Check, named, refused_in_one_line
from batchsim.testing.fleets import ROUTER_SEED, Fleet
from batchsim.testing.random_configs import knobs as random_knobs
from batchsim.testing.random_engines import Case, built, cases, token_ids

POLICIES = ("continuous", "preemptive", "vllm", "static")
"""The policies of the engines behind a router that is checked: with and without preemption, ahead of results, batches
as a whole."""


def check_router(config: type[Config], *, knobs: Mapping[str, Any] | None = None, cases: int = CASES) -> list[Check]:
    """The checks of a router by its config, a dataclass with `build(seed)`, as `check_policy` has them of a policy.

    The random cases are fleets of up to four replicas of engines of shipped policies, some of which fail or are scaled,
    and lists of dispatches without engines.
    """
    fixed = knobs or {}
    router = fleets.routers(config, fixed).filter(lambda one: one is not None)
    drawn = Cases(_fleets(engines(), router, _plans()), cases, config.__name__)
    dispatched = Cases(_dispatches(router), cases, config.__name__)
    stated = Cases(random_knobs(config, fixed), cases, config.__name__)
    return named(
        config,
        {
            "conservation": drawn.all(fleets.conservation),
            "one_replica_equals_engine": drawn.all(fleets.one_replica_equals_engine),
            "equal_seeds": drawn.all(fleets.equal_seeds),
            "leap_equals_stepping": drawn.all(fleets.leap_equals_stepping),
            "apart_equals_together": drawn.all(fleets.apart_equals_together),
            "routes_to_the_up": dispatched.all(routes_to_the_up),
            "pure": dispatched.all(pure),
            "order_of_answers": dispatched.all(order_of_answers),
            "looks_at_no_replica": dispatched.all(looks_at_no_replica),
            "one_line_errors": stated.all(lambda drawn: refused_in_one_line(config, drawn)),
        },
        cases,
    )


def check_autoscaler(
    config: type[AutoscalerConfig], *, knobs: Mapping[str, Any] | None = None, cases: int = CASES
) -> list[Check]:
    """The checks of an autoscaler by its config, as `check_router` has them of a router."""
    router = fleets.routers(ROUTERS["least_tokens"], {})
    drawn = Cases(_fleets(engines(), router, fleets.scaling(config, knobs or {})), cases, config.__name__)
    bounds = st.fixed_dictionaries({"min": st.integers(-1, 4), "max": st.integers(-1, 4)})
    odd = st.tuples(fleets.scaler_knobs(config, knobs or {}), bounds).map(lambda both: both[0] | both[1])
    stated = Cases(odd, cases, config.__name__)
    return named(
        config,
        {
            "conservation": drawn.all(fleets.conservation),
            "equal_seeds": drawn.all(fleets.equal_seeds),
            "leap_equals_stepping": drawn.all(fleets.leap_equals_stepping),
            "min_to_max": drawn.all(min_to_max),
            "looks_only": drawn.all(looks_only),
            "one_line_errors": stated.all(lambda drawn: refused_in_one_line(config, drawn)),
        },
        cases,
    )


def fleet_checks(behind: st.SearchStrategy[Case], count: int, whose: str) -> dict[str, Callable[[], None]]:
    """Checks, by name, of fleets of these engines behind any shipped router."""
    router = st.sampled_from(sorted(ROUTERS)).flatmap(lambda kind: fleets.routers(ROUTERS[kind], {}))
    plans = st.one_of(fleets.scaling(), fleets.failing())
    drawn = Cases(_fleets(behind, router.filter(lambda one: one is not None), plans), count, whose)
    return {
        "fleet_conservation": drawn.all(fleets.conservation),
        "fleet_of_one": drawn.all(fleets.one_replica_equals_engine),
        "fleet_equal_seeds": drawn.all(fleets.equal_seeds),
        "fleet_leap": drawn.all(fleets.leap_equals_stepping),
        "fleet_apart": drawn.all(fleets.apart_equals_together),
    }


def engines() -> st.SearchStrategy[Case]:
    """Random cases of the POLICIES."""
    return st.sampled_from(POLICIES).flatmap(cases).filter(built)  # type: ignore[arg-type, return-value]


def _plans() -> st.SearchStrategy[FleetPlan]:
    return st.one_of(st.integers(1, 4).map(FleetPlan), fleets.failing(), fleets.scaling())


@st.composite
def _fleets(
    draw: st.DrawFn, behind: st.SearchStrategy[Case], routers: st.SearchStrategy[Any], plans: st.SearchStrategy[Any]
) -> Fleet:
    return Fleet(draw(behind), draw(routers), draw(plans), draw(st.integers(1, 5)))


@dataclass(frozen=True)
class Dispatch:
    """A request, for a stage, while these replicas are up; before it the answers that have come, each the number of an
    earlier dispatch."""

    request: Request
    stage: Stage
    up: tuple[int, ...]
    answers: tuple[int, ...]


Dispatches = tuple[Any, list[Dispatch]]
"""The config of a router, and what it is to dispatch."""


@st.composite
def _dispatches(draw: st.DrawFn, routers: st.SearchStrategy[Any]) -> Dispatches:
    dispatches, open_ = list[Dispatch](), list[int]()
    for number in range(draw(st.integers(1, 25))):
        prompt = draw(st.integers(1, 160))
        request = Request(
            number, number * 1000, prompt, draw(st.integers(1, 60)), tokens=draw(token_ids(number, prompt))
        )
        up = draw(st.lists(st.integers(0, 5), min_size=1, unique=True).map(sorted))
        answers = draw(st.lists(st.sampled_from(open_), max_size=3, unique=True)) if open_ else []
        open_ = [one for one in open_ if one not in answers] + [number]
        stage: Stage = draw(st.sampled_from(("both", "both", "prefill", "decode")))
        dispatches.append(Dispatch(request, stage, tuple(up), tuple(answers)))
    return draw(routers), dispatches


def _choices(case: Dispatches, *, backwards: bool = False, silent: bool = False) -> list[int]:
    """The replica of each dispatch; with the answers of one instant `backwards`, or none at all (`silent`)."""
    config, dispatches = case
    router: Any = config.build(ROUTER_SEED)
    forgets, reads, sees = (isinstance(router, kind) for kind in (ForgetsReplicas, ReadsLoads, SeesFirstTokens))
    chosen, up = list[int](), set[int]()
    for dispatch in dispatches:
        for gone in sorted(up - set(dispatch.up)) if forgets else ():
            router.removed(gone)
        up = set(dispatch.up)
        answers = [one for one in dispatch.answers if not forgets or chosen[one] in up]
        for one in () if silent else reversed(answers) if backwards else answers:
            router.answered(dispatches[one].request, dispatches[one].stage, chosen[one])
        if reads:
            router.observe({one: EngineLoad(one, 1, 0.1 * one) for one in dispatch.up})
        chosen.append(routed(router, dispatch.request, dispatch.stage, dispatch.up))
        if sees:
            router.prefilled(dispatch.request.id, chosen[-1])
    return chosen


def routes_to_the_up(case: Dispatches) -> None:
    """Whichever replicas are up and whatever was answered, the choice is one of these, by its number."""
    chosen = _choices(case)
    assert all(type(one) is int for one in chosen), f"replicas are numbers: {chosen}"


def pure(case: Dispatches) -> None:
    """Two routers of one seed choose alike: they share no state, and have no chance but that of the seed."""
    assert _choices(case) == _choices(case), "two routers of one seed choose differently"


def order_of_answers(case: Dispatches) -> None:
    """The order of answers between two dispatches does not matter."""
    assert _choices(case) == _choices(case, backwards=True), "the order of answers of one instant matters"


def looks_at_no_replica(case: Dispatches) -> None:
    """A router that declares to look at no replica chooses alike without any answer."""
    if keeps_apart(case[0].build(ROUTER_SEED)):
        assert _choices(case) == _choices(case, silent=True), "it declares looks_at_no_replica, and heeds answers"


def min_to_max(fleet: Fleet) -> None:
    """Every look asks for a whole number of replicas, from `min` to `max`."""
    for at_ns, wanted in _looks(fleet):
        scaler = fleet.plan.scaler
        assert scaler is not None
        inside = scaler.min <= wanted <= scaler.max
        assert inside, f"{wanted} replicas at {at_ns:,} ns, of min {scaler.min} and max {scaler.max}"


def looks_only(fleet: Fleet) -> None:
    """Built twice, two autoscalers of one config that see the same fleet ask for the same: they share no state."""
    assert _looks(fleet) == _looks(fleet), "two autoscalers of one config differ on the same fleet"


def _looks(fleet: Fleet) -> list[tuple[int, int]]:
    """(Time in ns, desired replicas) of every look of the fleet's autoscaler."""
    looks = list[tuple[int, int]]()
    scaler = fleet.plan.scaler
    assert scaler is not None
    replace(fleet, plan=replace(fleet.plan, scaler=_Noting(scaler, looks))).run()  # type: ignore[arg-type]
    return looks


@dataclass(frozen=True)
class _Noting:
    """A config whose autoscaler notes every look."""

    config: AutoscalerConfig
    looks: list[tuple[int, int]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def build(self) -> Any:
        scaler, looks = self.config.build(), self.looks

        class Noted:
            def desired(self, fleet: Any, now_ns: int) -> int:
                wanted = scaler.desired(fleet, now_ns)
                looks.append((now_ns, wanted))
                return wanted

        return Noted()
