"""What a comparison says where the load lies within the cost's error of saturation: an interval, no number.

There a few per cent of step time decide whether a queue forms, so that the latencies that hold the time in it are
whatever these per cent make of them. The point is simulated with the shortest and the longest steps that the error
allows. Closed loops are not treated: their users wait for answers, so that the queue is never longer than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchsim.cost.cost_error import CostError, Unknown
from batchsim.metrics.latencies import LATENCIES
from batchsim.metrics.stability import is_within_error

Values = Mapping[str, Any]


def cost_ends(
    error: CostError | Unknown, simulate: Callable[[float], tuple[Values, bool]]
) -> dict[str, tuple[float, float]]:
    """By metric that holds time in the queue, its values with the shortest and the longest steps; {} where the load
    does not lie within the `error` of saturation, or that is unknown.

    `simulate` gives, at a factor on all steps, the metrics and whether the queue grows.
    """
    if isinstance(error, Unknown):
        return {}
    (fast, grows), (slow, grows_too) = (simulate(factor) for factor in error.factors)
    if not is_within_error(error, fast, slow, fast_grows=grows, slow_grows=grows_too):
        return {}
    queues = [name for name in fast if (of := LATENCIES.get(name.split("_")[0])) is not None and of.queues]
    known = [name for name in queues if fast[name] is not None and slow.get(name) is not None]
    return {name: (float(fast[name]), float(slow[name])) for name in known}
