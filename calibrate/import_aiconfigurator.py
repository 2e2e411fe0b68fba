"""Profiles from AIConfigurator's public kernel tables: kernel times, without norms, sampling and host.

The kernels of a step are layers × (qkv + o + gate-up + down, linear in n and k between table entries) + output matmul
(n = 65,536 scaled to the vocabulary) + layers × attention, at every size the tables hold. Needs pandas and scipy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import nnls

from batchsim.base.errors import CalibrationError
from batchsim.base.files import open_file, reason_text
from batchsim.cost.profile import ChunkCost, Curve, Grid, HostTerm, Hull, Profile, StepCosts
from batchsim.deployment.catalog import MODELS
from batchsim.deployment.model import ModelSpec

Floats = NDArray[np.float64]
Times = dict[tuple[int, int], float]
Gemms = dict[int, RegularGridInterpolator]

_SOURCE = "github.com/ai-dynamo/aiconfigurator @ 095f58a"
_LARGEST_N = 65_536
_MAX_SEQUENCES = 512  # above it the tables hold contexts of a few hundred tokens only
_HOST = HostTerm(600_000.0, 2_000.0, 0.0, "serial", assumed=True)  # the host time that a roofline assumes (HostCost)


@dataclass(frozen=True)
class System:
    """One GPU of the tables: the catalog's name of it, and the version of vLLM whose kernels were timed."""

    gpu: str
    vllm: str

    @property
    def release(self) -> str:
        return self.vllm.rpartition(".")[0]


SYSTEMS = {
    "h200_sxm": System("h200", "0.24.0"),
    "h100_sxm": System("h100", "0.24.0"),
    "a100_sxm": System("a100", "0.14.0"),
}


def import_profile(folder: Path, system: str, model: str) -> Profile:
    """The profile of a catalog model on `system`, one of SYSTEMS; the same bytes from the same tables.

    CalibrationError if system, model or tables are not known, or the tables lack the model's numbers of heads.
    """
    if system not in SYSTEMS:
        raise CalibrationError(f"--gpu {system}: there are no tables of it. Write one of {', '.join(SYSTEMS)}.")
    if model not in MODELS:
        raise CalibrationError(f"--model {model}: not in the catalog. Write one of {', '.join(MODELS)}.")
    about, spec = SYSTEMS[system], MODELS[model]
    gemm_table, context_table, generation_table = (_table(folder, system, about.vllm, kind) for kind in _KINDS)
    gemms = gemm_times(gemm_table)
    context, derived = _attention(context_table, spec, "context")
    generation, _ = _attention(generation_table, spec, "generation")
    sizes = sorted(gemms)
    call_ns = min(*context.values(), *generation.values())
    layers = np.array([layers_ms(gemms, spec, m) for m in sizes]) * 1e6
    chunks, residual = _fit_chunks(context, call_ns, sizes, layers)
    grid, ns_per_token, measured_tokens = _grid(generation, call_ns)
    costs = StepCosts(
        layers=Curve(tuple(float(m) for m in sizes), _short(layers + call_ns)),
        head=_head(gemms, spec, sizes),
        decode=None,
        decode_attention=grid,
        chunk_attention=chunks,
        launch_ns=0.0,
        prefill_ns=0.0,
        in_situ=1.0,
        host=_HOST,
        swap=None,
    )
    far = f"{measured_tokens:,} context tokens in a step: beyond, {ns_per_token:.3g} ns each, as the last measured ones"
    return Profile(
        name=f"{about.gpu}-{model}-aiconfigurator",
        origin="imported",
        executor=f"aiconfigurator-vllm-{about.release}",
        model=spec,
        gpu=about.gpu,
        hardware={"gpu": str(generation_table.device.iloc[0])},
        software={"vllm": about.vllm},
        made={"from": f"kernel sums of vLLM {about.release}", "source": _SOURCE, "license": "Apache-2.0"},
        block_size=16,
        num_blocks=None,
        costs=costs,
        hull=Hull(_MAX_SEQUENCES, int(sizes[-1]), grid.context[-1], max(isl for _, isl in context)),
        residuals=(residual,),
        missing=("num_blocks", "host", "swap", "held-out steps", "energy", "chunks after a prefix"),
        notes=(
            f"kernel latencies of vLLM {about.vllm} from the tables of AIConfigurator ({_SOURCE}, Apache-2.0), summed"
            " by batchsim: matmuls and attention of all layers, and the output matmul, scaled from n = 65,536 to the"
            " vocabulary",
            "not an engine's step times: no norms, rotary embedding, sampling, launches and host; the host term stands"
            " for them and is assumed. The same matmul differs by 3-20 % between versions",
            "one call of attention takes at least what it takes at one token; that is counted once a step, with the"
            " layers' matmuls",
            "a chunk after a prefix: computed from its query-key pairs like a chunk without, not measured",
            f"decode attention was measured up to about {far}",
            *derived,
        ),
    )


_KINDS = ("gemm", "context_attention", "generation_attention")


def read_parquet(path: Path) -> pd.DataFrame:
    """The table at `path`. OSError if it is no regular file."""
    with open_file(path) as file:
        return pd.read_parquet(file)


def _table(folder: Path, system: str, version: str, kind: str) -> pd.DataFrame:
    op = "gemm" if kind == "gemm" else "attention"
    path = folder / "kernel_tables" / f"{system}_{op}_vllm_{version}_{kind}_perf.parquet"
    try:
        return read_parquet(path)
    except FileNotFoundError:
        raise CalibrationError(f"{path}: not found. Give the folder of the AIConfigurator tables.") from None
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path}: cannot be read: {reason_text(error)}. Fetch the table anew.") from None


def _attention(table: pd.DataFrame, model: ModelSpec, kind: str) -> tuple[Times, tuple[str, ...]]:
    """ns of all layers by (batch, tokens); a note where `model`'s number of heads lies between two of the table."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    rows = table[(table.num_key_value_heads == kv_heads) & (table.head_dim == model.head_dim)]
    known = sorted(rows.num_heads.unique().tolist())
    low = max((h for h in known if h <= heads), default=None)
    high = min((h for h in known if h >= heads), default=None)
    if low is None or high is None:
        raise CalibrationError(
            f"{model.name}: the tables hold no attention of {heads} heads with {kv_heads} KV heads of {model.head_dim}."
            " Calibrate on the GPU."
        )
    share = (heads - low) / (high - low) if high > low else 0.0
    first, second = (attention_times(table, replace(model, num_attention_heads=h), kind) for h in (low, high))
    times = {
        point: model.num_hidden_layers * 1e6 * (first[point] * (1 - share) + second[point] * share)
        for point in first
        if point in second
    }
    note = (
        f"attention of {heads} query heads: between the measured {low} and {high} ones with {kv_heads} KV heads, linear"
    )
    return times, (note,) if high > low else ()


def _fit_chunks(times: Times, call_ns: float, sizes: list[int], layers: Floats) -> tuple[ChunkCost, dict[str, Any]]:
    """The cost of chunks, fitted to whole prompts, several at a time; and the errors of the step that remain.

    Errors count relative to layers and attention together, which is what a step is made of.
    """
    points = [point for point in times if point[0] * point[1] <= sizes[-1]]
    batch, length = np.array(points).T
    measured = np.array([times[point] for point in points])
    rest = np.interp(batch * length, sizes, layers)
    features = np.stack([batch, batch * length, batch * (length * (length + 1) // 2)], axis=1)
    step = measured + rest
    parts, _ = nnls(features / step[:, None], (measured - call_ns) / step)
    predicted = features @ parts + call_ns + rest
    off = np.abs(predicted / step - 1)
    residual = {
        "region": "prefill",
        "n": len(points),
        "p50": _short([np.median(off)])[0],
        "p95": _short([np.quantile(off, 0.95)])[0],
        "bias": _short([predicted.sum() / step.sum() - 1])[0],
    }
    return ChunkCost(*_short(parts)), residual


def _grid(times: Times, call_ns: float) -> tuple[Grid, float, int]:
    """Decode attention beyond a call's least time; ns of a context token, by which rows of the grid go on where the
    table ends; and the context tokens of a step from which on that is so.

    A table's `step` is the number of tokens computed before. Many sequences with long contexts are not in the tables.
    """
    sequences = [b for b in sorted({b for b, _ in times}) if b <= _MAX_SEQUENCES]
    contexts = sorted({c for b, c in times if b in sequences})
    tails: list[float] = []
    for b in sequences:
        before, last = sorted(c for n, c in times if n == b)[-2:]
        tails.append((times[b, last] - times[b, before]) / (b * (last - before)))
    per_token = float(np.median(tails))
    rows: list[tuple[float, ...]] = []
    reach: list[int] = []
    for b in sequences:
        known = sorted(c for n, c in times if n == b)
        inside = np.interp(contexts, known, [times[b, c] for c in known])
        beyond = np.maximum(np.array(contexts) - known[-1], 0) * b * per_token
        rows.append(_short(inside + beyond - call_ns))
        reach += [b * known[-1]] if known[-1] < contexts[-1] else []
    return Grid(tuple(sequences), tuple(map(float, contexts)), tuple(rows)), per_token, min(reach)


def _head(gemms: Gemms, model: ModelSpec, sizes: list[int]) -> Curve:
    rows = [m for m in sizes if m <= 2 * _MAX_SEQUENCES]
    return Curve(tuple(float(m) for m in rows), _short([1e6 * head_ms(gemms, model, m) for m in rows]))


def _short(values: Any) -> tuple[float, ...]:
    """`values` rounded to six significant digits, which is what the tables hold."""
    return tuple(float(f"{value:.6g}") for value in values)


def attention_times(table: pd.DataFrame, model: ModelSpec, kind: str) -> Times:
    """Median ms of one layer by (batch, tokens), from rows with `model`'s heads in bf16 and without a window."""
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


def layers_ms(gemms: Gemms, model: ModelSpec, tokens: int) -> float:
    """ms of the four matmuls of all layers at `tokens`, a row count m of the table."""
    hidden, q, kv, mlp = model.hidden_size, model.q_size, model.kv_size, model.intermediate_size
    shapes = ((q + 2 * kv, hidden), (hidden, q), (2 * mlp, hidden), (hidden, mlp))
    return model.num_hidden_layers * sum(float(gemms[tokens](shape)) for shape in shapes)


def head_ms(gemms: Gemms, model: ModelSpec, rows: int) -> float:
    """ms of the output matmul for `rows`, a row count m of the table."""
    return float(gemms[rows]((_LARGEST_N, model.hidden_size))) * model.vocab_size / _LARGEST_N


def gemm_times(table: pd.DataFrame) -> Gemms:
    """By row count m a function of (n, k) to ms, linear between entries.

    The table's one gap, at the largest n and k, is NaN and stays so.
    """
    times = table[table.gemm_dtype == "bfloat16"].groupby(["m", "n", "k"]).latency.median()
    grids = {m: times.xs(m, level="m").unstack("k") for m in times.index.unique("m")}
    return {m: RegularGridInterpolator((grid.index, grid.columns), grid.to_numpy()) for m, grid in grids.items()}
