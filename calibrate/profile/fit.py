"""From measured steps to the coefficients of a profile: least squares on relative errors, coefficients at least 0.

A measured step is explained as layers(tokens) + head(rows) + decode attention + chunk attention. The layers' curve
never falls from one knot to the next: it is a sum of ramps with slopes at least 0. The head's time, which the points
cannot separate from the layers', is set by the sizes of their matrices. Numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.profile.point_plan import StepShape, columns, doublings
from batchsim.cost.profile import ChunkCost, Curve, Grid
from batchsim.cost.work import chunk_rows
from batchsim.deployment.model import ModelSpec

Floats = NDArray[np.float64]

_FEWEST = 8  # least points for a fit
_DIGITS = 6  # digits of a coefficient in a profile
LAUNCH_BOUND = 1.03
"""Steps within this factor of the least that launches take show launches, not kernels."""


def nnls(a: Floats, b: Floats, start: Floats | None = None) -> Floats:
    """The x >= 0 that minimises |a·x − b|: the active-set method of Lawson and Hanson (1974, chapter 23).

    A `start` near the solution makes it quicker and changes nothing else.
    """
    scale = np.sqrt((a * a).sum(axis=0))
    scale[scale == 0] = 1.0
    a = a / scale
    gram, target = a.T @ a, a.T @ b
    x = np.zeros(len(target)) if start is None else start * scale
    free = x > 0
    tiny = 1e-10 * max(float(np.abs(target).max(initial=0.0)), 1e-300)
    if free.any():
        x = _toward(gram, target, x, free)
    for _ in range(10 * len(target)):
        slope = target - gram @ x
        slope[free] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= tiny:
            break
        free[best] = True
        x = _toward(gram, target, x, free)
    return x / scale


def _toward(gram: Floats, target: Floats, x: Floats, free: NDArray[np.bool_]) -> Floats:
    """The least-squares solution over the `free` coefficients; coefficients that would fall below 0 on the way stay at
    0."""
    while free.any():
        tried = np.zeros(len(x))
        part = gram[np.ix_(free, free)]
        # A little on the diagonal keeps linearly dependent columns solvable.
        tried[free] = np.linalg.solve(part + 1e-13 * np.eye(len(part)), target[free])
        if tried[free].min() > 0:
            return tried
        bad = np.flatnonzero(free & (tried <= 0))
        shares = x[bad] / np.maximum(x[bad] - tried[bad], 1e-300)
        x = x + shares.min() * (tried - x)
        x[bad[shares == shares.min()]] = 0.0
        free &= x > 0
    return np.zeros(len(x))


def robust_nnls(
    a: Floats, y: Floats, *, scale: Floats | None = None, fixed_rows: Floats | None = None, rounds: int = 12
) -> Floats:
    """The x >= 0 with a·x close to y: errors relative to `scale` (by default y), outliers counting less than squared.

    Soft-L1 by reweighting: residuals beyond about three times the typical one lose weight, so that a few disturbed
    measurements do not bend the fit. `fixed_rows` are equations a·x = 0 that keep their weight.
    """
    extra = np.zeros((0, a.shape[1])) if fixed_rows is None else fixed_rows
    unit = y if scale is None else scale
    relative, goal, weight = a / unit[:, None], y / unit, np.ones(len(y))
    x = None
    for _ in range(rounds):
        root = np.sqrt(weight)
        x = nnls(np.vstack([relative * root[:, None], extra]), np.concatenate([goal * root, np.zeros(len(extra))]), x)
        residual = relative @ x - goal
        spread = max(1.5 * float(np.median(np.abs(residual))), 0.002)
        weight = 1.0 / np.sqrt(1.0 + (residual / (2.0 * spread)) ** 2)
    assert x is not None
    return x


@dataclass(frozen=True)
class Kernels:
    """The kernel part of a profile's costs, in ns."""

    layers: Curve
    head: Curve
    decode: Curve | None
    decode_attention: Grid
    chunk_attention: ChunkCost
    launch_ns: float


def fit_kernels(
    model: ModelSpec, points: Sequence[StepShape], ns: Sequence[float], *, buckets: Sequence[int], measured_grid: bool
) -> Kernels:
    """Kernel costs fitted to `points` and their median times `ns`.

    `buckets` are the sizes of the graphs that decode-only steps replay, () without graphs: each size gets a time of its
    own, one not measured from its neighbours, one beyond the last as layers and head grow. `measured_grid` keeps the
    measured decode attention at every point of block A, for a device whose attention is no plane in sequences and
    context, and every measured number of tokens as a knot. Without it each number of decodes gets a time of its own, if
    all were measured: matmuls of few rows are uneven on a CPU. CalibrationError if there are too few points.
    """
    if len(points) < _FEWEST or not any(p.decode for p in points) or not any(p.chunks for p in points):
        raise CalibrationError(f"{len(points)} measured points are too few for a fit. Give it more --minutes.")
    times = np.asarray(ns, dtype=np.float64)
    tokens, rows = _padded(points, buckets)
    knots = _knots(tokens, points) if measured_grid else doublings(int(tokens.max()))
    sizes = [] if measured_grid else _every_size(points)
    launched = np.array([bool(p.chunks) for p in points]) if buckets else np.zeros(len(points), dtype=bool)
    launch_ns = _launch_ns(times, launched, points)
    kept = ~launched | (times > LAUNCH_BOUND * launch_ns)
    design = _design(points, tokens, rows, knots, sizes)
    hints = np.vstack([_head_hint(model, knots, design.shape[1]), _own_hints(knots, sizes)]) / np.median(times)
    x = robust_nnls(design[kept], times[kept], fixed_rows=hints)
    steps, (head_row,), attention, chunk, own = np.split(x, np.cumsum([len(knots), 1, 3, 3]))
    most_rows = int(max(rows.max(), 2))
    kernels = Kernels(
        layers=_curve(knots, np.cumsum(steps)),
        head=_curve([1, most_rows], np.array([head_row, head_row * most_rows])),
        decode=_curve(sizes, own) if sizes else None,
        decode_attention=_plane(attention, points),
        chunk_attention=ChunkCost(*(short(float(value)) for value in chunk)),
        launch_ns=short(launch_ns),
    )
    return _with_measured(kernels, attention, points, times, buckets) if measured_grid else kernels


def _design(
    points: Sequence[StepShape], tokens: Floats, rows: Floats, knots: Sequence[int], sizes: Sequence[int]
) -> Floats:
    """The design matrix, a row for each point. Columns: the layers' constant and ramps, the head's rows, decode
    attention (constant, sequence, context token), chunk attention (chunk, token, pair), and an indicator for each of
    `sizes`: the step is that many decodes and nothing else, and has neither layers nor head.
    """
    table = columns(points)
    decodes, chunks = table["num_decode"], table["num_chunks"]
    own = (chunks == 0)[:, None] & (decodes[:, None] == np.array(sizes, dtype=np.int64)[None, :])
    launched = ~own.any(axis=1, keepdims=True)
    parts = (
        _ramps(tokens, knots) * launched,
        rows[:, None] * launched,
        np.stack([decodes > 0, decodes, table["context_tokens"]], axis=1),
        np.stack([chunks, table["num_prefill_tokens"], table["prefill_pairs"]], axis=1),
        own,
    )
    return np.hstack([part.astype(np.float64) for part in parts])


def _every_size(points: Sequence[StepShape]) -> list[int]:
    """1, 2, 3 ... decodes, if each number up to the most is among the decode-only points; else []."""
    sizes = {len(p.decode) for p in points if not p.chunks}
    return sorted(sizes) if sizes == set(range(1, max(sizes) + 1)) else []


def _padded(points: Sequence[StepShape], buckets: Sequence[int]) -> tuple[Floats, Floats]:
    """(tokens, rows of logits) of each point; those of a decode-only step padded to the size of its graph."""
    tokens = np.array([float(p.tokens) for p in points])
    rows = np.array([float(len(p.decode) + len(p.chunks)) for p in points])
    for i, p in enumerate(points):
        if not p.chunks:
            tokens[i] = rows[i] = _ran(len(p.decode), buckets) or len(p.decode)
    return tokens, rows


def _ran(rows: int, buckets: Sequence[int]) -> int | None:
    """The size of the graph that a step of `rows` decodes replays; None if no graph is that large."""
    return next((b for b in buckets if b >= rows), None)


def _knots(tokens: Floats, points: Sequence[StepShape]) -> list[int]:
    """Knots of the layers' curve, in tokens: the steps of blocks A and C that were measured."""
    knots = {int(t) for t, p in zip(tokens, points, strict=True) if p.block in "AC"}
    return sorted(knots | {int(tokens.max())})


def _ramps(tokens: Floats, knots: Sequence[int]) -> Floats:
    """Columns of the layers' curve: a constant, then for each stretch between knots the share of it below `tokens`."""
    ramps = [np.clip((tokens - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)]
    return np.stack([np.ones(len(tokens)), *ramps], axis=1)


def _head_hint(model: ModelSpec, knots: Sequence[int], width: int) -> Floats:
    """The equation, in ns: a row of the head costs what a token of the layers does, by the sizes of their matrices."""
    share = model.head_parameters / (model.num_hidden_layers * model.layer_matmul_parameters)
    row = np.zeros((1, width))
    row[0, 1 : len(knots)] = share
    row[0, len(knots)] = -max(knots[-1] - knots[0], 1)
    return row


def _own_hints(knots: Sequence[int], sizes: Sequence[int]) -> Floats:
    """An equation in ns for each of `sizes`: that many decodes alone take what layers and head take for as many tokens.

    Each counts as much as a measured point of median time, so that a few disturbed measurements are held in check.
    """
    rows = np.array(sizes, dtype=np.float64)
    return np.hstack([_ramps(rows, knots), rows[:, None], np.zeros((len(rows), 6)), -np.eye(len(rows))])


def _launch_ns(times: Floats, launched: NDArray[np.bool_], points: Sequence[StepShape]) -> float:
    """Least ns of a step whose kernels are launched one by one, if steps of few tokens are bound by their launches;
    else 0.

    Known with graphs only: there the same kernels without their launches show whether launches bind.
    """
    few = np.array([p.tokens <= 32 for p in points])
    if not (launched & few).any() or not (~launched & few).any():
        return 0.0
    floor = float(np.median(times[launched & few]))
    return floor if floor > 1.1 * float(np.min(times[~launched & few])) else 0.0


def _plane(attention: Floats, points: Sequence[StepShape]) -> Grid:
    """Decode attention in ns: a constant, a part for each decode, one for each context token; exact in four corners."""
    constant, per_decode, per_token = attention
    sequences = (1, max(2, *(len(p.decode) for p in points)))
    context = (0.0, float(max(1, *(max(p.decode, default=0) for p in points))))
    ns = tuple(tuple(short(constant + b * (per_decode + per_token * c)) for c in context) for b in sequences)
    return Grid(sequences, context, ns)


def _with_measured(
    kernels: Kernels, attention: Floats, points: Sequence[StepShape], times: Floats, buckets: Sequence[int]
) -> Kernels:
    """`kernels` with the decode attention of block A as measured, and with the time of every size of graph.

    At the shortest context the fitted plane says what part is attention; a cell that the pool could not hold continues
    its row by the plane's slope.
    """
    constant, per_decode, per_token = (float(v) for v in attention)
    measured = {(len(p.decode), p.decode[0]): float(t) for p, t in zip(points, times, strict=True) if p.block == "A"}
    shortest = min(c for _, c in measured)
    contexts = sorted({c for _, c in measured})
    sequences = sorted({b for b, c in measured if c != shortest} & {b for b, c in measured if c == shortest})
    if not sequences or len(contexts) < 2:
        return kernels
    least = {b: constant + b * (per_decode + per_token * shortest) for b, c in measured if c == shortest}
    base = {b: measured[b, shortest] - reading for b, reading in least.items()}
    grid = []
    for b in sequences:
        row = [least[b]]
        for before, c in pairwise(contexts):
            beyond = measured.get((b, c))
            follow = row[-1] + per_token * b * (c - before)
            row.append(follow if beyond is None else max(row[-1], beyond - base[b]))
        grid.append(tuple(short(v) for v in row))
    return replace(
        kernels,
        decode=_by_graph(kernels, base, buckets),
        decode_attention=Grid(tuple(sequences), tuple(float(c) for c in contexts), tuple(grid)),
    )


def _by_graph(kernels: Kernels, base: Mapping[int, float], buckets: Sequence[int]) -> Curve | None:
    """ns of layers and head by size of graph, from `base`, which has them by number of decodes; None without graphs."""
    ran = {size: ns for b, ns in sorted(base.items()) if (size := _ran(b, buckets))}
    if not ran:
        return None
    sizes = np.array(buckets)
    beyond = np.maximum(sizes, max(ran))  # the curves are less sure of few rows: launches hide them
    fitted = kernels.layers.at(beyond) + kernels.head.at(beyond)
    ns = np.interp(sizes, list(ran), list(ran.values())) + fitted - fitted[0]
    return _curve(buckets, np.maximum.accumulate(np.maximum(ns, 0.0)))


def fit_host(steps: Mapping[str, NDArray[np.int64]], kernel_ns: Floats, period_ns: Floats) -> Floats:
    """(base, part of a sequence, part of a prefill token) in ns of the host's time: `period_ns` less `kernel_ns`."""
    rows = steps["num_decode"] + steps["pad_decode_rows"] + chunk_rows(steps)
    a = np.stack([np.ones(len(rows)), rows, steps["num_prefill_tokens"]], axis=1).astype(np.float64)
    return robust_nnls(a, period_ns - kernel_ns, scale=period_ns)


def errors(predicted: Floats, measured: Floats, region: str) -> dict[str, str | int | float]:
    """A row of a table: median and 95th percentile of |predicted / measured − 1|, and the bias of the sums."""
    error = np.abs(predicted / measured - 1.0)
    return {
        "region": region,
        "n": len(measured),
        "p50": short(float(np.median(error))),
        "p95": short(float(np.quantile(error, 0.95))),
        "bias": short(float(predicted.sum() / measured.sum() - 1.0)),
    }


def _curve(x: Sequence[int], ns: Floats) -> Curve:
    return Curve(tuple(float(v) for v in x), tuple(short(float(v)) for v in ns))


def short(value: float) -> float:
    """`value` rounded to the digits that a profile keeps."""
    return float(f"{value:.{_DIGITS}g}")
