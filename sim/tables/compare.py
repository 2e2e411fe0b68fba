"""Profiles against the tables: random steps that a profile was not made of, as the tables sum them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from batchsim.base.errors import CalibrationError
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import Profile
from batchsim.cost.work import Columns, even_columns
from batchsim.kernel.window_sum import keys_in_window
from batchsim.tables.handle import Tables
from batchsim.tables.versions import version

QUERIES = 200
MEDIAN, P95 = 0.015, 0.08
"""The most that the median and the 95th percentile of the absolute relative errors may be."""
_TOKENS = 8_192  # the most of a step: what engines schedule by default


def held_out(profile: Profile, tables: Tables, *, queries: int = QUERIES, seed: int = 0) -> dict[str, Any]:
    """`Profile.held_out` of kernels in `queries` random steps: a third decodes, a third prompts after a prefix, the
    rest both, without what decodes lose beside chunks. The same steps for the same seed; row by row in `steps`."""
    errors = errors_of(profile, tables, queries=queries, seed=seed)
    rows = [_row(kind, of_kind) for kind, of_kind in errors.items()]
    whole = _row("all", [error for of_kind in errors.values() for error in of_kind])
    return (
        {"what": "direct queries of the tables"} | {k: v for k, v in whole.items() if k != "region"} | {"steps": rows}
    )


def errors_of(profile: Profile, tables: Tables, *, queries: int, seed: int = 0) -> dict[str, list[float]]:
    """Predicted / summed − 1 of each of the steps of `held_out`, by their kinds: decodes, prompts, both."""
    cost = Calibrated(replace(profile, costs=replace(profile.costs, beside=1.0)))  # the tables only sum
    errors: dict[str, list[float]] = {"decodes": [], "prompts": [], "both": []}
    for kind, columns, ms in _steps(profile, tables, queries, Random(seed)):
        errors[kind].append(float(cost.kernel_ns(columns)[0]) / (ms * 1e6) - 1)
    return errors


def compared(profile: Profile) -> Profile:
    """The profile with the errors that it has against the installed tables. CalibrationError, in one line, if it is of
    no deployment, or of tables that are not installed."""
    setup = profile.setup
    if setup is None:
        raise CalibrationError(f"{profile.name}: was not made of kernel tables. Give a profile of a deployment.")
    if version() is None:
        raise CalibrationError("compare: the kernel tables are not installed. pip install 'batchsim[gpus]'.")
    tables = Tables(profile.deployment)
    if tables.backend != setup.version:
        raise CalibrationError(
            f"{profile.name}: is of {setup.engine} {setup.version}; the installed tables have {tables.backend}. Install"
            f" {profile.made.get('from')}."
        )
    return replace(profile, held_out=held_out(profile, tables))


def _row(region: str, errors: list[float]) -> dict[str, Any]:
    size = np.abs(errors)
    p50, p95 = (round(float(np.quantile(size, share)), 4) for share in (0.5, 0.95))
    return {"region": region, "n": len(errors), "p50": p50, "p95": p95, "bias": round(float(np.mean(errors)), 4)}


def _steps(profile: Profile, tables: Tables, queries: int, random: Random) -> Iterator[tuple[str, Columns, float]]:
    """(kind, columns, ms) of random steps: sizes are even over their logarithms.

    Decodes alone are of as many rows as a graph has: an engine pads to these, of which the tables know nothing.
    """
    groups, longest = tables.deployment.dp_attention, int(profile.hull.max_context)
    graphs = profile.costs.decode
    assert graphs is not None, "every profile of the tables has them"
    for i in range(queries):
        kind = ("decodes", "prompts", "both")[i % 3]
        rows = groups * _even(random, 1, 512)
        context = _even(random, 65, min(longest, 32_768))
        chunk = _even(random, 16, min(_TOKENS, longest))
        chunks = _even(random, 1, max(1, min(8, _TOKENS // chunk)))
        prefix = random.choice([0, _even(random, 1, 16_384)])
        prefix = min(prefix, longest - chunk)
        if kind == "decodes":
            rows = int(graphs.x[bisect_left(graphs.x, rows)])
            yield kind, _columns(rows, context, 0, 0, 0, tables.window), tables.decode_step(rows, context)
        elif kind == "prompts":
            columns = _columns(0, 0, chunks * groups, chunk, prefix, tables.window)
            yield kind, columns, tables.prefill_step(chunks, chunk, prefix)
        else:
            context = max(context, chunk + prefix)
            ms = tables.mixed_step(chunks, chunk, prefix, rows, context)
            yield kind, _columns(rows, context, chunks * groups, chunk, prefix, tables.window), ms


def _even(random: Random, least: int, most: int) -> int:
    """A whole number from `least` to `most`, even over the logarithm."""
    return min(most, int(least * ((most + 1) / least) ** random.random()))


def _columns(rows: int, context: int, chunks: int, chunk: int, prefix: int, window: int | None = None) -> Columns:
    """The columns of a recorded step of such decodes and chunks, in layers with that window too."""
    columns = even_columns(rows, context, chunks, chunk, prefix)
    if window is None:
        return columns
    read = {
        "window_tokens": rows * min(context, window),
        "window_pairs": chunks * keys_in_window(chunk, prefix, window),
    }
    return columns | {name: np.array([value], np.int64) for name, value in read.items()}


HEAD = f"{'profile':<64}{'steps':>7}{'median':>9}{'p95':>9}{'bias':>9}"
"""The head of a table of `line`s."""


def line(profile: Profile) -> str:
    """How far the profile is from the tables, in a line; `beyond` where that is more than it may be."""
    errors = profile.held_out or {}
    numbers = (
        f"{errors['n']:>7,}{100 * errors['p50']:>7.2f} %{100 * errors['p95']:>7.2f} %{100 * errors['bias']:>+7.2f} %"
    )
    return f"{profile.name:<64}{numbers}{'' if within(profile) else '  beyond'}"


def within(profile: Profile) -> bool:
    """Whether the errors that the profile states are no more than `MEDIAN` and `P95`."""
    errors = profile.held_out
    return errors is not None and errors["p50"] <= MEDIAN and errors["p95"] <= P95
