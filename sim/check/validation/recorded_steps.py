"""Predicted times of steps that a real engine recorded, beside what it recorded, by kind of step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import MeasuredError
from batchsim.check.steps.recorded import RecordedSteps, least_and_most
from batchsim.check.validation.step_error import RegionError, StepPairs
from batchsim.cost.base import Cost, HostPart
from batchsim.cost.periods import regions
from batchsim.cost.work import TIME_TERMS, Columns

Floats = NDArray[np.float64]

OPEN = 0.02
"""Share of a step's predicted time that contents which a log leaves open may move, for the step to be compared."""


@dataclass(frozen=True)
class StepsCompared:
    """A row for each kind of step of a policy's `name`, the last for all; how many of the `recorded` steps were
    `compared`, the time of the others depends on contents that the log does not have; the bias of all without the
    host's part, None where there is none."""

    name: str
    rows: list[RegionError]
    compared: int
    recorded: int
    device_bias: float | None


def pairs_of(steps: RecordedSteps, predicted: Floats) -> StepPairs:
    """Recorded steps beside their predicted times in ns."""
    unknown = np.full(len(steps), np.nan)
    return StepPairs(regions(steps.columns(0.5)), predicted, steps.ns, unknown, unknown)


def compare_steps(name: str, cost: Cost, steps: RecordedSteps, *, ahead: bool) -> StepsCompared:
    """The predictions of `cost` for the contents of `steps` beside their recorded times; `ahead`: the host works beside
    the device.

    MeasuredError where no step's time depends on its contents alone.
    """

    def ask(columns: Columns) -> Floats:
        """Predicted ns of each step, and of its device."""
        host, bare = cost.host_part.of(columns), (cost.without_host() if ahead else cost).explain(columns)
        whole = sum((bare[term] for term in TIME_TERMS), np.zeros(len(host)))
        both = (np.maximum(whole, host), whole) if ahead else (whole, whole - host)
        return np.stack(both, axis=1)

    least, most, rows = least_and_most(steps, ask)
    settled = most[:, 0] - least[:, 0] <= OPEN * most[:, 0]
    if not settled.any():
        raise MeasuredError(
            f"{name}: the logs leave open what decodes read and where prompts begin, by more than"
            f" {100 * OPEN:g} % of every step's predicted time. Give logs that tell contexts: forward-pass metrics, or"
            " those of a vLLM that prints KV cache usage; or a cost that does not ask for them."
        )
    judged = steps.picked(rows).picked(settled)
    whole, device = ((least + most) / 2)[settled].T
    bias = None if cost.host_part == HostPart() else float(device.sum() / judged.ns.sum() - 1)
    return StepsCompared(name, pairs_of(judged, whole).errors(), len(judged), len(steps), bias)
