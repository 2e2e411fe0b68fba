"""Fits the roofline's efficiencies to public kernel sums and prints how far off it is on models it was not fitted on.

    python -m calibrate.fit_roofline FOLDER

FOLDER holds `llm_step_composite.csv` and `kernel_tables/` (see `calibrate.kernel_sums`). Seven numbers a GPU are fitted
on two models, matmul and attention times each relative to their step (soft L1), so that neither makes up for the other.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.kernel_sums import KernelSums, load
from sim.catalog import GPUS
from sim.cost.roofline import Roofline
from sim.errors import BatchsimError
from sim.model import Efficiencies, GpuSpec

FITTED_ON = ("llama-3.1-8b", "qwen3-14b")
GEMM_FIELDS = ("matmul", "weights", "gemm_ns")
ATTENTION_FIELDS = ("attention", "kv", "attention_ns", "sequence_ns")
_START = {
    "matmul": 0.75,
    "weights": 0.8,
    "gemm_ns": 10_000.0,
    "attention": 0.5,
    "kv": 0.8,
    "attention_ns": 13_000.0,
    "sequence_ns": 150.0,
}
_SOFT = 0.05  # relative error from which a point counts linearly, not squared


def fit(gpu: GpuSpec, sums: list[KernelSums]) -> Efficiencies:
    """`gpu`'s efficiencies with the fitted numbers; attention's stay as they are where no sums of it are known."""
    train = [s for s in sums if s.model.name in FITTED_ON]
    fields = GEMM_FIELDS if np.isnan(train[0].attention_ns).any() else GEMM_FIELDS + ATTENTION_FIELDS
    start = np.array([_START[field] for field in fields])

    def with_numbers(x: NDArray[np.float64]) -> Efficiencies:
        return replace(gpu.efficiencies, **dict(zip(fields, (x * start).tolist(), strict=True)))

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        trial = replace(gpu, efficiencies=with_numbers(x))
        return np.concatenate([part for s in train for part in _off(trial, s)])

    upper = [1 / _START[field] if _START[field] <= 1 else np.inf for field in fields]  # a share is at most 1
    found = least_squares(residuals, np.ones(len(fields)), loss="soft_l1", f_scale=_SOFT, bounds=(1e-3, upper))
    return with_numbers(found.x)


def errors(gpu: GpuSpec, sums: KernelSums) -> NDArray[np.float64]:
    """Relative error of the kernel part of each step; of its matmuls where attention was not measured."""
    return sum(_off(gpu, sums), np.zeros(len(sums.gemm_ns)))


def _off(gpu: GpuSpec, sums: KernelSums) -> list[NDArray[np.float64]]:
    """What matmuls and attention are off by, each as a share of the whole step."""
    gemm, attention = Roofline(sums.model, gpu).kernel_parts(sums.columns)
    if np.isnan(sums.attention_ns).any():
        return [(gemm - sums.gemm_ns) / sums.gemm_ns]
    whole = sums.gemm_ns + sums.attention_ns
    return [(gemm - sums.gemm_ns) / whole, (attention - sums.attention_ns) / whole]


def held_out_errors(gpu: GpuSpec, sums: list[KernelSums]) -> tuple[float, float]:
    """Median and 95th percentile of the absolute relative error over the steps of the models not fitted on."""
    off = np.abs(np.concatenate([errors(gpu, s) for s in sums if s.model.name not in FITTED_ON]))
    return float(np.median(off)), float(np.quantile(off, 0.95))


def main() -> int:
    """Prints fitted numbers and the error table of every GPU in the catalog; 2 if the files are missing."""
    if len(sys.argv) != 2:
        print("usage: python -m calibrate.fit_roofline FOLDER", file=sys.stderr)
        return 2
    try:
        data = {name: load(Path(sys.argv[1]), name) for name in GPUS}
    except BatchsimError as error:
        print(error, file=sys.stderr)
        return 2
    for name, sums in data.items():
        fitted = fit(GPUS[name], sums)
        numbers = "  ".join(f"{field} {getattr(fitted, field):.4g}" for field in GEMM_FIELDS + ATTENTION_FIELDS)
        print(f"{name}: {numbers}\n{'':6}{'model':<14}{'steps':>6}{'median':>9}{'p95':>9}{'largest':>9}{'bias':>9}")
        for s in sums:
            off = errors(replace(GPUS[name], efficiencies=fitted), s)
            row = [np.median(np.abs(off)), np.quantile(np.abs(off), 0.95), np.abs(off).max(), off.mean()]
            cells = "".join(f"{100 * value:>7.1f} %" for value in row)
            print(f"{'':6}{s.model.name:<14}{len(off):>6}{cells}{'' if s.model.name in FITTED_ON else '  held out'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
