"""Fits the roofline's efficiencies to public kernel sums and prints how far off it is on models it was not fitted on.

    python -m tools.fit_roofline FOLDER

FOLDER holds `llm_step_composite.csv` and `kernel_tables/` of AIConfigurator (github.com/ai-dynamo/aiconfigurator
@ 095f58a, Apache-2.0). For H200 and H100 the sums are read from the former; for A100 and L40S they are made here in the
same way, of the latter: layers × (qkv + o + gate-up + down, linear in n and k between table entries) + output matmul
(n = 65,536 scaled to the vocabulary) + layers × attention. Seven numbers a GPU are fitted on two models, matmul and
attention times each relative to their step (soft L1), so that neither makes up for the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import typer
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import least_squares

from batchsim.base.errors import CalibrationError
from batchsim.base.files import open_file, reason_text
from batchsim.cli.common import one_line_errors
from batchsim.cost.roofline import Roofline
from batchsim.cost.work import even_columns
from batchsim.deployment import catalog
from batchsim.deployment.catalog import MODELS
from batchsim.deployment.model import Efficiencies, GpuSpec, ModelSpec

Floats = NDArray[np.float64]
Times = dict[tuple[int, int], float]
Gemms = dict[int, RegularGridInterpolator]

GPUS = {gpu.name: gpu for gpu in catalog.GPUS.values() if gpu.efficiencies.compared}
"""The GPUs of the catalog that are in the tables."""
FITTED_ON = ("llama-3.1-8b", "qwen3-14b")
GEMM_FIELDS = ("matmul", "weights", "gemm_ns")
ATTENTION_FIELDS = ("attention", "kv", "attention_ns", "sequence_ns")
_START = dict(zip((*GEMM_FIELDS, *ATTENTION_FIELDS), (0.75, 0.8, 10_000.0, 0.5, 0.8, 13_000.0, 150.0), strict=True))
_SOFT = 0.05  # relative error from which a point counts linearly, not squared

COMPOSITE = "llm_step_composite.csv"
COMPOSITE_SYSTEMS = {"h200": "h200_sxm", "h100": "h100_sxm"}
TABLES = {"a100": ("a100_sxm", "vllm_0.14.0"), "l40s": ("l40s", "vllm_0.14.0")}
CSV_MODELS = {
    "llama31_8b": "llama-3.1-8b",
    "qwen3_8b": "qwen3-8b",
    "qwen3_14b": "qwen3-14b",
    "mistral_7b": "mistral-7b",
}
_DECODE_BATCHES = (1, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (512, 1024, 2048, 4096, 8192)
_LARGEST_N = 65_536


def fit(gpu: GpuSpec, sums: list[KernelSums]) -> Efficiencies:
    """`gpu`'s efficiencies with the fitted numbers; those of attention stay as they are without attention times."""
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
    """Relative error of the kernel time of each step; of its matmuls alone where attention was not measured."""
    return sum(_off(gpu, sums), np.zeros(len(sums.gemm_ns)))


def _off(gpu: GpuSpec, sums: KernelSums) -> list[NDArray[np.float64]]:
    """Errors of matmuls and of attention, each as a share of the whole step."""
    gemm, attention = Roofline(sums.model, gpu).kernel_parts(sums.columns)
    if np.isnan(sums.attention_ns).any():
        return [(gemm - sums.gemm_ns) / sums.gemm_ns]
    whole = sums.gemm_ns + sums.attention_ns
    return [(gemm - sums.gemm_ns) / whole, (attention - sums.attention_ns) / whole]


def held_out_errors(gpu: GpuSpec, sums: list[KernelSums]) -> tuple[float, float]:
    """Median and 95th percentile of the absolute relative error over the steps of the models not fitted on."""
    off = np.abs(np.concatenate([errors(gpu, s) for s in sums if s.model.name not in FITTED_ON]))
    return float(np.median(off)), float(np.quantile(off, 0.95))


@dataclass(frozen=True)
class KernelSums:
    """Steps of one model: `columns` of work as `explain` takes them, and measured parts. NaN attention: no table."""

    model: ModelSpec
    columns: dict[str, NDArray[np.int64]]
    gemm_ns: Floats
    attention_ns: Floats


def load(folder: Path, gpu: str) -> list[KernelSums]:
    """The sums of every model known for `gpu`. CalibrationError if the files are not in `folder`."""
    try:
        if gpu in COMPOSITE_SYSTEMS:
            return _from_composite(folder / COMPOSITE, COMPOSITE_SYSTEMS[gpu])
        return _from_tables(folder / "kernel_tables", *TABLES[gpu])
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{folder}: {reason_text(error)}. Give that of the AIConfigurator tables.") from None


def _from_composite(path: Path, system: str) -> list[KernelSums]:
    table = _read(path)
    sums: list[KernelSums] = []
    for key, name in CSV_MODELS.items():
        rows = table[(table.sys == system) & (table.model == key)]
        columns = _columns((rows.kind == "decode").to_numpy(), rows.B.to_numpy(), rows.ctx.to_numpy())
        gemm = (rows.gemm_ms + rows.lmhead_ms).to_numpy() * 1e6
        sums.append(KernelSums(MODELS[name], columns, gemm, rows.attn_ms.to_numpy() * 1e6))
    return sums


def _from_tables(folder: Path, system: str, version: str) -> list[KernelSums]:
    gemms = _gemm_times(_read(folder / f"{system}_gemm_{version}_gemm_perf.parquet"))
    attention = {}
    for kind in ("context", "generation"):
        path = folder / f"{system}_attention_{version}_{kind}_attention_perf.parquet"
        attention[kind] = _read(path) if path.exists() else None
    sums: list[KernelSums] = []
    for name in CSV_MODELS.values():
        model = MODELS[name]
        times = {kind: _attention_times(rows, model, kind) for kind, rows in attention.items() if rows is not None}
        points = _points(times.get("generation"))
        is_decode, batch, context = (np.array(column) for column in zip(*points, strict=True))
        gemm_ms = [_gemm_ms(gemms, model, b if d else b * c, b) for d, b, c in points]
        attention_ms = [_attention_ms(times, d, b, c) * model.num_hidden_layers for d, b, c in points]
        columns = _columns(is_decode, batch, context)
        sums.append(KernelSums(model, columns, np.array(gemm_ms) * 1e6, np.array(attention_ms) * 1e6))
    return sums


def _read(path: Path) -> pd.DataFrame:
    """The table at `path`. OSError if it is no regular file."""
    with open_file(path) as file:
        return pd.read_csv(file) if path.suffix == ".csv" else pd.read_parquet(file)


def _gemm_times(table: pd.DataFrame) -> Gemms:
    """By row count m a function of (n, k) to ms, linear between entries.

    The table's one gap, at the largest n and k, is NaN and stays so.
    """
    times = table[table.gemm_dtype == "bfloat16"].groupby(["m", "n", "k"]).latency.median()
    grids = {m: times.xs(m, level="m").unstack("k") for m in times.index.unique("m")}
    return {m: RegularGridInterpolator((grid.index, grid.columns), grid.to_numpy()) for m, grid in grids.items()}


def _gemm_ms(gemms: Gemms, model: ModelSpec, tokens: int, rows: int) -> float:
    """ms of the matmuls of all layers at `tokens` and of the output matmul for `rows`, row counts m of the table."""
    hidden, q, kv, mlp = model.hidden_size, model.q_size, model.kv_size, model.intermediate_size
    shapes = ((q + 2 * kv, hidden), (hidden, q), (2 * mlp, hidden), (hidden, mlp))
    head = float(gemms[rows]((_LARGEST_N, hidden))) * model.vocab_size / _LARGEST_N
    return model.num_hidden_layers * sum(float(gemms[tokens](shape)) for shape in shapes) + head


def _attention_times(table: pd.DataFrame, model: ModelSpec, kind: str) -> Times:
    """Median ms of one layer by (batch, tokens), from rows with `model`'s heads in bf16 and without a window."""
    heads = {"num_heads": model.num_attention_heads, "num_key_value_heads": model.num_key_value_heads}
    asked = heads | {"head_dim": model.head_dim, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    asked |= {"window_size": 0} if "window_size" in table else {}
    rows = table.loc[(table[[*asked]] == pd.Series(asked)).all(axis=1)]
    return rows.groupby(["batch_size", "isl" if kind == "context" else "step"]).latency.median().to_dict()


def _points(generation: Times | None) -> list[tuple[bool, int, int]]:
    """(is decode, batch, context) as in the composite table, where the attention table has them.

    Context c is the table's step c - 1, since the token decoded is among those read.
    """
    decode = [(True, b, c) for b in _DECODE_BATCHES for c in _CONTEXTS]
    if generation is not None:
        decode = [(d, b, c) for d, b, c in decode if (b, c - 1) in generation]
    return decode + [(False, 1, c) for c in _CONTEXTS]


def _attention_ms(times: dict[str, Times], is_decode: bool, batch: int, context: int) -> float:
    if not times:
        return float("nan")
    return times["generation"][batch, context - 1] if is_decode else times["context"][batch, context]


def _columns(is_decode: NDArray[np.bool_], batch: NDArray[np.int64], context: NDArray[np.int64]) -> dict[str, NDArray]:
    """The steps as work columns: `batch` decodes at `context`, or as many whole prompts of that length."""
    return even_columns(np.where(is_decode, batch, 0), context, np.where(is_decode, 0, batch), context)


@one_line_errors
def main(folder: Path) -> None:
    """Prints fitted numbers and the error table of every GPU in the tables."""
    data = {name: load(folder, name) for name in GPUS}
    for name, sums in data.items():
        fitted = fit(GPUS[name], sums)
        numbers = "  ".join(f"{field} {getattr(fitted, field):.4g}" for field in GEMM_FIELDS + ATTENTION_FIELDS)
        print(f"{name}: {numbers}\n{'':6}{'model':<14}{'steps':>6}{'median':>9}{'p95':>9}{'largest':>9}{'bias':>9}")
        for s in sums:
            off = errors(replace(GPUS[name], efficiencies=fitted), s)
            row = [np.median(np.abs(off)), np.quantile(np.abs(off), 0.95), np.abs(off).max(), off.mean()]
            cells = "".join(f"{100 * value:>7.1f} %" for value in row)
            print(f"{'':6}{s.model.name:<14}{len(off):>6}{cells}{'' if s.model.name in FITTED_ON else '  held out'}")


if __name__ == "__main__":
    typer.run(main)
