"""Step times summed from public kernel tables: what the efficiencies of the roofline are fitted to and compared with.

Source: AIConfigurator (github.com/ai-dynamo/aiconfigurator @ 095f58a, Apache-2.0). For H200 and H100 the sums are read
from `llm_step_composite.csv`; for A100 and L40S they are made here in the same way, from the tables in `kernel_tables`:
layers × (qkv + o + gate-up + down, linear in n and k between table entries) + output matmul (n = 65,536 scaled to the
vocabulary) + layers × attention. No norms, rotary embedding, sampling, host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from sim.catalog import MODELS
from sim.errors import CalibrationError
from sim.files import open_file, told
from sim.model import ModelSpec

Floats = NDArray[np.float64]
Times = dict[tuple[int, int], float]
Gemms = dict[int, RegularGridInterpolator]

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


@dataclass(frozen=True)
class KernelSums:
    """Steps of one model: `columns` as `explain` takes them, and their measured parts. NaN attention: no table."""

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
    except FileNotFoundError as error:
        raise CalibrationError(f"{error.filename}: not found. Give the folder of the AIConfigurator tables.") from None
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{folder}: a table cannot be read: {told(error)}. Fetch the tables anew.") from None


def read_parquet(path: Path) -> pd.DataFrame:
    """The table at `path`. OSError if it is no regular file."""
    with open_file(path) as file:
        return pd.read_parquet(file)


def _from_composite(path: Path, system: str) -> list[KernelSums]:
    with open_file(path) as file:
        table = pd.read_csv(file)
    sums: list[KernelSums] = []
    for key, name in CSV_MODELS.items():
        rows = table[(table.sys == system) & (table.model == key)]
        columns = _columns((rows.kind == "decode").to_numpy(), rows.B.to_numpy(), rows.ctx.to_numpy())
        gemm = (rows.gemm_ms + rows.lmhead_ms).to_numpy() * 1e6
        sums.append(KernelSums(MODELS[name], columns, gemm, rows.attn_ms.to_numpy() * 1e6))
    return sums


def _from_tables(folder: Path, system: str, version: str) -> list[KernelSums]:
    gemms = gemm_times(read_parquet(folder / f"{system}_gemm_{version}_gemm_perf.parquet"))
    attention = {}
    for kind in ("context", "generation"):
        path = folder / f"{system}_attention_{version}_{kind}_attention_perf.parquet"
        attention[kind] = read_parquet(path) if path.exists() else None
    sums: list[KernelSums] = []
    for name in CSV_MODELS.values():
        model = MODELS[name]
        times = {kind: attention_times(rows, model, kind) for kind, rows in attention.items() if rows is not None}
        points = _points(times.get("generation"))
        is_decode, batch, context = (np.array(column) for column in zip(*points, strict=True))
        gemm_ms = [layers_ms(gemms, model, b if d else b * c) + head_ms(gemms, model, b) for d, b, c in points]
        attention_ms = [_attention_ms(times, d, b, c) * model.num_hidden_layers for d, b, c in points]
        sums.append(
            KernelSums(
                model,
                _columns(is_decode, batch, context),
                np.array(gemm_ms) * 1e6,
                np.array(attention_ms) * 1e6,
            )
        )
    return sums


def _points(generation: Times | None) -> list[tuple[bool, int, int]]:
    """(is decode, batch, context) as in the composite, where the attention table has it: context c is its step c - 1,
    since the token decoded is among those read."""
    decode = [(True, b, c) for b in _DECODE_BATCHES for c in _CONTEXTS]
    if generation is not None:
        decode = [(d, b, c) for d, b, c in decode if (b, c - 1) in generation]
    return decode + [(False, 1, c) for c in _CONTEXTS]


def attention_times(table: pd.DataFrame, model: ModelSpec, kind: str) -> Times:
    """Median ms of one layer by (batch, tokens), of the rows with `model`'s heads in bf16 and without a window."""
    rows = table.loc[
        (table.num_heads == model.num_attention_heads)
        & (table.num_key_value_heads == model.num_key_value_heads)
        & (table.head_dim == model.head_dim)
        & (table.attn_dtype == "bfloat16")
        & (table.kv_cache_dtype == "bfloat16")
    ]
    if "window_size" in rows:
        rows = rows.loc[rows.window_size == 0]
    return rows.groupby(["batch_size", "isl" if kind == "context" else "step"]).latency.median().to_dict()


def _attention_ms(times: dict[str, Times], is_decode: bool, batch: int, context: int) -> float:
    if not times:
        return float("nan")
    return times["generation"][batch, context - 1] if is_decode else times["context"][batch, context]


def layers_ms(gemms: Gemms, model: ModelSpec, tokens: int) -> float:
    """The four matmuls of all layers at `tokens`, an m of the table."""
    hidden, q, kv, mlp = model.hidden_size, model.q_size, model.kv_size, model.intermediate_size
    shapes = ((q + 2 * kv, hidden), (hidden, q), (2 * mlp, hidden), (hidden, mlp))
    return model.num_hidden_layers * sum(float(gemms[tokens](shape)) for shape in shapes)


def head_ms(gemms: Gemms, model: ModelSpec, rows: int) -> float:
    """The output matmul for `rows`, an m of the table."""
    return float(gemms[rows]((_LARGEST_N, model.hidden_size))) * model.vocab_size / _LARGEST_N


def gemm_times(table: pd.DataFrame) -> Gemms:
    """By m: ms at any (n, k), linear between entries. The one gap, at the largest n and k, is NaN and stays so."""
    times = table[table.gemm_dtype == "bfloat16"].groupby(["m", "n", "k"]).latency.median()
    grids = {m: times.xs(m, level="m").unstack("k") for m in times.index.unique("m")}
    return {m: RegularGridInterpolator((grid.index, grid.columns), grid.to_numpy()) for m, grid in grids.items()}


def _columns(is_decode: NDArray[np.bool_], batch: NDArray[np.int64], context: NDArray[np.int64]) -> dict[str, NDArray]:
    """The steps as a recorder would write them: `batch` decodes at `context`, or whole prompts of that length."""
    zeros = np.zeros(len(batch), dtype=np.int64)
    return {
        "num_decode": np.where(is_decode, batch, 0),
        "num_prefill_tokens": np.where(is_decode, 0, batch * context),
        "num_chunks": np.where(is_decode, 0, batch),
        "context_tokens": np.where(is_decode, batch * context, 0),
        "prefill_pairs": np.where(is_decode, 0, batch * (context * (context + 1) // 2)),
        "pad_prefill_tokens": zeros,
        "pad_prefill_rows": zeros,
        "pad_decode_rows": zeros,
        "pad_context_tokens": zeros,
        "swap_blocks": zeros,
    }
