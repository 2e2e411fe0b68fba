"""Errors of a cost model on the steps that a real engine ran: by region of steps and for all, kernels and host apart.

The measured time of a step is its period (see `periods`); the prediction is for the very work of that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.cost.base import HostPart
from batchsim.cost.periods import REGIONS, periods_ns, regions
from batchsim.cost.work import TIME_TERMS, Columns, Terms, work_columns
from batchsim.metrics.measure import percentile

ALL = "all"
HOST_TERMS = ("host", "swap")

Floats = NDArray[np.float64]


class Explains(Protocol):
    """The part of a cost model that is used here."""

    @property
    def host_part(self) -> HostPart: ...

    def explain(self, columns: Columns) -> Terms: ...


@dataclass(frozen=True)
class RegionError:
    """Errors on the `n` steps of one region: median and 95th percentile of |predicted / measured − 1|.

    `bias` is Σ predicted / Σ measured − 1: signed and weighted by time; `kernel_bias` and `host_bias` are the same of
    each part, None where the parts were not measured. `share` is the region's part of all measured time.
    """

    region: str
    n: int
    share: float
    p50: float
    p95: float
    bias: float
    kernel_bias: float | None
    host_bias: float | None


@dataclass(frozen=True)
class StepPairs:
    """Steps of live runs with their predicted and measured times in ns, as parallel arrays. `region` indexes REGIONS.

    `measured_kernel` is NaN where kernels were not timed apart, or the cost model does not separate host from kernels.
    """

    region: NDArray[np.int64]
    predicted: Floats
    measured: Floats
    predicted_kernel: Floats
    measured_kernel: Floats

    @classmethod
    def of(
        cls,
        steps: NDArray[np.void],
        rested: Sequence[int],
        kernel_ns: NDArray[Any],
        cost: Explains,
        *,
        beside: HostPart | None = None,
    ) -> StepPairs:
        """The steps of one live run. `kernel_ns` has an entry for each step, or is empty where kernels were not timed
        apart; `rested` are the steps before which the engine was idle. `beside` is the host's part where it worked
        beside the steps, of which `cost` then has none: a period is as long as the slower of the two, and kernels are
        not compared apart.
        """
        columns = work_columns(steps)
        terms = cost.explain(columns)
        host = sum((terms[name] for name in HOST_TERMS), np.zeros(len(steps)))
        kernel = sum((terms[name] for name in TIME_TERMS if name not in HOST_TERMS), np.zeros(len(steps)))
        timed = len(kernel_ns) == len(steps) and bool(host.any()) and beside is None
        whole = kernel + host
        if beside is not None:
            whole = np.maximum(whole, beside.of(columns))
        return cls(
            region=regions(steps),
            predicted=whole,
            measured=periods_ns(steps, rested),
            predicted_kernel=kernel,
            measured_kernel=np.asarray(kernel_ns, np.float64) if timed else np.full(len(steps), np.nan),
        )

    def at_par(self, drift: float) -> StepPairs:
        """The same steps, measured times divided by 1 + `drift`: as on a machine not slower by that share."""
        slower = 1 + drift
        return replace(self, measured=self.measured / slower, measured_kernel=self.measured_kernel / slower)

    @classmethod
    def join(cls, several: Sequence[StepPairs]) -> StepPairs:
        """The steps of several runs in one."""
        names = ("region", "predicted", "measured", "predicted_kernel", "measured_kernel")
        return cls(*(np.concatenate([getattr(pairs, name) for pairs in several]) for name in names))

    def errors(self) -> list[RegionError]:
        """A row for each region with steps, and a last one, named ALL, for all steps; [] without steps."""
        chosen = [(name, self.region == code) for code, name in enumerate(REGIONS)]
        chosen.append((ALL, np.ones(len(self.region), bool)))
        return [self._error(name, in_region) for name, in_region in chosen if in_region.any()]

    def _error(self, name: str, in_region: NDArray[np.bool_]) -> RegionError:
        predicted, measured = self.predicted[in_region], self.measured[in_region]
        kernel, kernel_measured = self.predicted_kernel[in_region], self.measured_kernel[in_region]
        off = np.abs(predicted / measured - 1)
        return RegionError(
            region=name,
            n=int(in_region.sum()),
            share=float(measured.sum() / self.measured.sum()),
            p50=percentile(off, 50)[0],
            p95=percentile(off, 95)[0],
            bias=float(predicted.sum() / measured.sum() - 1),
            kernel_bias=_bias(kernel, kernel_measured),
            host_bias=_bias(predicted - kernel, measured - kernel_measured),
        )


def _bias(predicted: Floats, measured: Floats) -> float | None:
    """Σ predicted / Σ measured − 1; None where nothing was measured (NaN)."""
    total = measured.sum()
    return float(predicted.sum() / total - 1) if total > 0 else None
