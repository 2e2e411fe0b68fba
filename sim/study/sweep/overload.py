"""What policies complete per second when all requests of a scenario wait already: overloaded runs, in parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.scenario import Point, PolicySpec
from batchsim.scenario.point import simulate_point
from batchsim.scenario.saturation import overloaded, saturation_rps
from batchsim.scenario.setup import Setup
from batchsim.study.sweep.pool import Killed, run_all


def saturations(runs: Sequence[tuple[Setup, PolicySpec]], jobs: int) -> Iterator[tuple[int, float | str]]:
    """Yields (index of the run, its requests/s, or in words why it has none) as runs end.

    All replicas that there can be serve, and none of them fails.
    """
    for i, rate in run_all(_saturation, runs, jobs):
        yield i, f"its worker process {rate.how}: perhaps memory is short" if isinstance(rate, Killed) else rate


def _saturation(run: tuple[Setup, PolicySpec]) -> float | str:
    setup, spec = run
    many = overloaded(setup.at_full_strength(), setup.num_engines)
    try:
        return saturation_rps(simulate_point(many, Point(spec, many.loads[0], 0)).records)
    except ScenarioError as error:
        return str(error).rstrip(".")
    except BatchsimError as error:
        raise type(error)(f"{setup.scenario.source}: {spec.name} under overload: {error}") from None
