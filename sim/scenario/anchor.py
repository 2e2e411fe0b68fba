"""Step times by one measured point: the mean time per output token of so many requests at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.cost import Calibrated, Cost, Scaled
from batchsim.cost.in_engine import in_engine
from batchsim.drive.simulate import simulate
from batchsim.kernel.record import FINISHED
from batchsim.scenario.deployment_config import Anchor, DeploymentConfig
from batchsim.workload.workload_config import ClosedLoop, TraceLengths, WorkloadConfig

if TYPE_CHECKING:
    from batchsim.scenario.config import PolicySpec
    from batchsim.scenario.point import Setup

LEAST, MOST = 0.2, 5.0
"""Factors beyond which the point is of another deployment than the one that is costed, not of the same one measured."""
REQUESTS = 5
"""Requests of each user: the mean of several generations, of which the first begins at once."""
_CLOSE = 1e-3  # of the measured time: far below the spread of repeats
_NARROW = 1e-5  # of x: between two so close TPOT jumps


@dataclass(frozen=True)
class Form:
    """A way in which steps may differ from what they are said to take: `at(x)` is the cost, at 1 the one that there is.
    `text`: what x stands for."""

    at: Callable[[float], Cost]
    text: Callable[[float], str]


def anchored(setup: Setup, spec: PolicySpec, anchor: Anchor) -> Cost:
    """The cost of `setup` with which the users of `anchor`, who ask again when answered, have its mean TPOT under
    `spec`; lengths are the scenario's.

    Steps of decodes alone change where kernel tables are said to lack something of the engine: a time per output token
    says nothing of prompts. They are shifted where the tables are known to be off by a constant, else stretched. Of
    other costs every step is stretched. ScenarioError if it is not within reach, or no answer has two tokens.
    """
    form = form_of(setup, spec, anchor)
    x = solved(setup, spec, anchor.concurrency, anchor.tpot, form.at)
    cost = form.at(x)
    if not isinstance(cost, Calibrated):
        return Scaled(setup.cost, x, str(anchor))
    text = f"anchored to {anchor}: {form.text(x)}"
    profile = cost.profile
    return cost.of(replace(profile, made=profile.made | {"anchor": text}, notes=(*profile.notes, text)))


def form_of(setup: Setup, spec: PolicySpec, anchor: Anchor) -> Form:
    """How the steps of the deployment differ from its tables, by what is known of its engine."""
    cost, stated = setup.cost, setup.scenario.cost
    preset = stated.preset(spec.config) if isinstance(stated, DeploymentConfig) else None
    if preset is not None and isinstance(cost, Calibrated):
        if preset.form == "shift":
            return Form(
                lambda x: _adjusted(cost, shift_ns=(x - 1) * anchor.tpot),
                lambda x: f"steps of decodes {(x - 1) * anchor.tpot / 1e6:+.3g} ms".replace("-", "−"),
            )
        return Form(lambda x: _adjusted(cost, decode=x), lambda x: f"steps of decodes × {x:.4g}")
    return Form(lambda x: Scaled(cost, x), lambda x: f"every step's time × {x:.4g}")


def _adjusted(cost: Calibrated, **how: float) -> Calibrated:
    return cost.of(replace(cost.profile, costs=in_engine(cost.profile.costs, **how)), cost.host)


def solved(
    setup: Setup,
    spec: PolicySpec,
    concurrency: int,
    tpot_ns: float,
    at: Callable[[float], Cost],
) -> float:
    """The x with which `concurrency` users have a mean TPOT of `tpot_ns` under the cost `at(x)`, by Brent's method.

    ScenarioError if x is not between LEAST and MOST, or no answer has two tokens.
    """
    from scipy.optimize import root_scalar

    looped = _looped(setup, concurrency)
    where = f"anchor: tpot {format_duration(round(tpot_ns))} at concurrency {concurrency}"

    @cache
    def off(x: float) -> float:
        """Simulated over measured, less 1; 0 where that is close enough."""
        simulated_ns = _tpot_ns(replace(looped, cost=at(x)), spec)
        if simulated_ns is None:
            raise ScenarioError(f"{where}: no request finished with two tokens or more. Give longer outputs.")
        return 0.0 if abs(simulated_ns / tpot_ns - 1) < _CLOSE else simulated_ns / tpot_ns - 1

    if not off(1.0):
        return 1.0
    end = MOST if off(1.0) < 0 else LEAST
    if off(1.0) * off(end) > 0:
        raise ScenarioError(
            f"{where} is {1 / (1 + off(1.0)):.3g} times what is simulated, and step times are stretched by {LEAST:g} to"
            f" {MOST:g} at most. Correct the point or the deployment."
        )
    x = root_scalar(off, bracket=(1.0, end), method="brentq", xtol=_NARROW, rtol=_NARROW).root
    if off(x):
        raise ScenarioError(f"{where}: no factor on step times meets it; near {x:.3g} TPOT jumps. Anchor elsewhere.")
    return x


def _looped(setup: Setup, concurrency: int) -> Setup:
    """`setup` with its requests asked by so many users, from one list."""
    workload = setup.resolved.workload
    return replace(
        setup,
        resolved=replace(
            setup.resolved,
            workload=_closed(workload, concurrency),
            load_name="",
            loads=(1.0,),
            max_waiting=None,
        ),
    )


def _closed(workload: WorkloadConfig, users: int) -> WorkloadConfig:
    workload = workload.of_any_number
    classes = {name: replace(each, deadline=None, patience=None) for name, each in workload.classes.items()}
    if workload.tasks is not None:
        raise ScenarioError("anchor: requests of tasks cannot be sent by users one by one. Drop anchor, or tasks.")
    lengths = TraceLengths() if workload.lengths is None and workload.trace is not None else workload.lengths
    trace = None if workload.trace is None else replace(workload.trace, rate_scale=None)
    sessions = None if workload.sessions is None else replace(workload.sessions, think_time=None, think_kind=None)
    return replace(
        workload,
        arrivals=ClosedLoop(users, 0, shared_list=sessions is None, ramp=0),
        sessions=sessions,
        lengths=lengths,
        trace=trace,
        classes=classes,
        requests=REQUESTS * users,
        duration=None,
        warmup=0,
        drain=None,
        deadline=None,
        patience=None,
        max_concurrency=None,
    )


def _tpot_ns(setup: Setup, spec: PolicySpec) -> float | None:
    """The mean over requests of the time per output token after the first; None where no request has two."""
    workload = setup.workload(1.0, 0)
    core = setup.engine(spec, workload)
    simulate(core, workload)
    requests = core.recorder.records().requests
    done = requests[(requests["outcome"] == FINISHED) & (requests["output_tokens"] > 1)]
    if not len(done):
        return None
    return float(((done["delivered_ns"] - done["first_delivery_ns"]) / (done["output_tokens"] - 1)).mean())
