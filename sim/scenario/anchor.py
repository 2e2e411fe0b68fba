"""One factor on step times from one measured point: the mean time per output token of so many requests at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.cost import Scaled
from batchsim.drive.simulate import simulate
from batchsim.kernel.record import FINISHED
from batchsim.workload.workload_config import ClosedLoop, TraceLengths, WorkloadConfig

if TYPE_CHECKING:
    from batchsim.scenario.config import PolicySpec
    from batchsim.scenario.point import Setup

LEAST, MOST = 0.2, 5.0
"""Factors beyond which the point is of another deployment than the one that is costed, not of the same one measured."""
REQUESTS = 5
"""Requests of each user: the mean of several generations, of which the first begins at once."""
_CLOSE = 1e-3  # of the measured time: far below the spread of repeats
_TRIES = 12


def anchored_factor(setup: Setup, spec: PolicySpec, concurrency: int, tpot_ns: float) -> float:
    """The factor on the step times of `setup` with which `concurrency` users who ask again when answered have a mean
    TPOT of `tpot_ns` under `spec`; lengths are the scenario's. By the secant, from 1.

    ScenarioError if it is not between LEAST and MOST, or no answer has two tokens.
    """
    looped = _looped(setup, concurrency)
    where = f"anchor: tpot {format_duration(round(tpot_ns))} at concurrency {concurrency}"

    def ratio(factor: float) -> float:
        """Simulated over measured."""
        found = _tpot_ns(replace(looped, cost=Scaled(setup.cost, factor)), spec)
        if found is None:
            raise ScenarioError(f"{where}: no request finished with two tokens or more. Give longer outputs.")
        return found / tpot_ns

    (x, y), factor = (0.0, 0.0), 1.0  # TPOT grows from about 0 with the factor
    first = ratio(factor)
    found = first
    for _ in range(_TRIES):
        if abs(found - 1) < _CLOSE:
            return factor
        slope = (found - y) / (factor - x) if factor != x and found != y else found / factor
        aimed = factor + (1 - found) / slope
        if (aimed > MOST and factor == MOST) or (aimed < LEAST and factor == LEAST):
            raise ScenarioError(
                f"{where} is {1 / first:.3g} times what is simulated, and step times are stretched by {LEAST:g} to"
                f" {MOST:g} at most. Correct the point or the deployment."
            )
        (x, y), factor = (factor, found), min(max(aimed, LEAST), MOST)
        found = ratio(factor)
    raise ScenarioError(f"{where}: no factor on step times meets it; near {factor:.3g} TPOT jumps. Anchor elsewhere.")


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
