"""Speed targets of the executor on a GPU, held against a profile and the ceilings measured on the same card."""

from __future__ import annotations

from typing import Any

from batchsim.calibrate.profile.point_plan import StepShape, columns
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import Profile
from batchsim.cost.work import useful_flops_bytes

CONTEXT = 1024
DECODE_MS = {1: 5.5, 256: 16.0}
"""Longest whole decode step in ms by number of sequences, at CONTEXT; for Llama-3.1-8B on an H200 only."""

PREFILL_SHARE = 0.60
"""Least share of the matmul ceiling that the kernels of the largest prefill step reach."""
HOST_SHARE = 0.15
"""Largest share of a decode step spent outside its kernels, over the steps of DECODE_MS."""

_MS_OF = ("h200", "llama-3.1-8b")


def targets(profile: Profile, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of `what`, `value`, `unit`, `bound` and `met`, as JSON values; `met` is None where no bound holds.

    A bound holds for one card and model. What lies outside the profile's hull has no row. `ceilings` are those of
    `tools.campaign.probe`.
    """
    hull, cost = profile.hull, Calibrated(profile, extrapolate=True)
    rows, host_shares = [], []
    for sequences, bound_ms in DECODE_MS.items():
        if sequences > hull.max_sequences or hull.max_context < CONTEXT:
            continue
        step = columns([StepShape("A", (CONTEXT,) * sequences)])
        host_ns = float(cost.host_ns(step)[0])
        whole_ns = float(cost.kernel_ns(step)[0]) + host_ns
        host_shares.append(host_ns / whole_ns)
        bound = bound_ms if (profile.gpu, profile.model.name) == _MS_OF else None
        rows.append(_row(f"decode of {sequences} at context {CONTEXT}", whole_ns / 1e6, "ms", bound, at_most=True))
    tokens = min(hull.max_tokens, hull.max_chunk_context)
    step = columns([StepShape("C", (), ((0, tokens),))])
    flops = float(useful_flops_bytes(profile.deployment, step)[0][0]) / float(cost.kernel_ns(step)[0]) * 1e9
    share = flops / ceilings["matmul_flops"]
    rows.append(_row(f"matmul ceiling in a prefill of {tokens}", 100 * share, "%", 100 * PREFILL_SHARE, at_most=False))
    if host_shares:
        rows.append(_row("host in a decode step", 100 * max(host_shares), "%", 100 * HOST_SHARE, at_most=True))
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of `targets` in words."""
    found = f"{row['what']}: {row['value']:.3g} {row['unit']}"
    if row["met"] is None:
        return found
    bound = f"at {'most' if row['at_most'] else 'least'} {row['bound']:g} {row['unit']}"
    return f"{found}, {bound}: {'met' if row['met'] else 'NOT MET'}"


def _row(what: str, value: float, unit: str, bound: float | None, *, at_most: bool) -> dict[str, Any]:
    met = None if bound is None else (value <= bound if at_most else value >= bound)
    return {"what": what, "value": value, "unit": unit, "bound": bound, "at_most": at_most, "met": met}
