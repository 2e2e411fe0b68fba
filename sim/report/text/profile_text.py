"""A cost profile as plain text: the summary that closes a calibration, and the whole profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from batchsim.base.units import format_duration
from batchsim.cost.profile import Curve, Profile, StepCosts
from batchsim.report.layout import fit

_ALL = "all"
_AGAINST = "against the tables, kernels"


def summary(profile: Profile) -> str:
    """The lines that close a calibration: errors, KV blocks, and the parts of the profile still missing."""
    lines = [f"profile {profile.name}: {profile.model.name} on {profile.machine}"]
    regions = [row for row in profile.residuals if row["region"] != _ALL]
    if regions:
        worst = max(regions, key=lambda row: row["p50"])
        lines.append(f"fit, kernels alone: worst region {worst['region']}, {_error(worst)}")
    held_out = profile.held_out
    if held_out is not None:
        lines.append(f"held out ({held_out['what']}): {_error(held_out)}")
    lines.append(f"KV: {_blocks(profile)}")
    lines += [f"missing: {what}" for what in profile.missing]
    lines += [f"! {doubt}" for doubt in profile.cautions] + [f"note: {note}" for note in profile.notes]
    return "\n".join(map(fit, lines))


def table(profile: Profile) -> str:
    """All of the profile but the raw samples, as text."""
    blocks = [
        [f"profile {profile.name}: {profile.origin}, executor {profile.executor}, {_shape(profile)}"],
        [f"deployment: {profile.setup}, on {profile.deployment.num_gpus} × {profile.gpu}"] if profile.setup else [],
        _pairs("hardware", profile.hardware),
        _pairs("software", profile.software),
        _hull(profile),
        ["coefficients", *_coefficients(profile.costs, profile)],
        ["where the engine schedules ahead", *_coefficients(profile.ahead, profile)] if profile.ahead else [],
        _errors("fit, kernels back to back", profile.residuals),
        *_held_out(profile),
        _pairs("made", {key: value for key, value in profile.made.items() if key not in ("options", "engine_runs")}),
        [f"missing: {what}" for what in profile.missing],
        [f"! {fault}" for fault in profile.checks],
        [f"! {doubt}" for doubt in profile.cautions],
        [f"note: {note}" for note in profile.notes],
    ]
    return "\n\n".join("\n".join(map(fit, block)) for block in blocks if block)


def _shape(profile: Profile) -> str:
    m = profile.model
    heads = f"{m.num_attention_heads} heads, {m.num_key_value_heads} KV heads"
    return f"{m.name} ({m.num_hidden_layers} layers of {m.hidden_size}, {heads}, {m.dtype})"


def _blocks(profile: Profile) -> str:
    if profile.num_blocks is None:
        return f"blocks of {profile.block_size} tokens, how many was not measured"
    tokens = profile.num_blocks * profile.block_size
    return f"{profile.num_blocks:,} blocks of {profile.block_size} measured, {tokens:,} tokens"


def _hull(profile: Profile) -> list[str]:
    hull = profile.hull
    reached = "measured" if profile.setup is None else "asked of the tables"
    return [
        f"{reached} up to {hull.max_sequences:,} decodes and {hull.max_tokens:,} tokens a step,"
        f" {hull.max_context:,.0f} mean context tokens, {hull.max_chunk_context:,} tokens of one prompt",
        f"KV: {_blocks(profile)}",
    ]


def _pairs(head: str, values: dict[str, Any]) -> list[str]:
    """`head` and the names and values in one paragraph; nothing if `values` is empty."""
    known = [f"{name} {_plain(value)}" for name, value in values.items() if value is not None]
    return [f"{head}: {', '.join(known)}"] if known else []


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_plain(item)}" for name, item in value.items()) + ")"
    if isinstance(value, list):
        return "; ".join(_plain(item) for item in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _coefficients(c: StepCosts, profile: Profile) -> Iterable[str]:
    """The lines of `c`, costs of `profile`."""
    yield f"  layers            {_curve(c.layers, 'token', 'tokens')}"
    yield f"  head              {_curve(c.head, 'row', 'rows')}"
    if c.decode is not None:
        yield f"  decodes alone     {_curve(c.decode, 'sequence', 'sequences')}"
    grid = c.decode_attention
    corners = ((0, 0), (0, -1), (-1, 0), (-1, -1))
    shown = dict.fromkeys((grid.sequences[i], grid.context[j], grid.ns[i][j]) for i, j in corners)
    yield "  decode attention  " + ", ".join(f"{b} × {x:.0f} tokens {format_duration(ns)}" for b, x, ns in shown)
    a, chunks = c.chunk_attention, c.chunk_grid
    if chunks is None:
        parts = f"{format_duration(a.per_chunk)} a chunk + {format_duration(a.per_token)} a token"
        yield f"  chunk attention   {parts} + {a.per_pair:.3g} ns a query-key pair"
    else:
        knots = f"{len(chunks.sequences)} × {len(chunks.context)} knots"
        shown = dict.fromkeys((chunks.sequences[i], chunks.context[j], chunks.ns[i][j]) for i, j in corners)
        parts = ", ".join(f"{n:,} tokens × {x:,.0f} keys {format_duration(ns)}" for n, x, ns in shown)
        yield f"  chunk attention   {knots}: {parts}"
    if c.beside != 1:
        yield f"  beside chunks     decode attention × {c.beside:.3f}"
    if c.transfer is not None:
        yield f"  between stages    {_curve(c.transfer, 'token', 'tokens')}"
    if c.launch_ns:
        yield f"  launches          at least {format_duration(c.launch_ns)} a step launched op by op"
    if c.prefill_ns:
        yield f"  chunks alone      {format_duration(c.prefill_ns)} a step"
    yield f"  inside an engine  × {c.in_situ:.4f}"
    h = c.host
    terms = f"{format_duration(h.base)} + {format_duration(h.per_sequence)} a sequence"
    terms += f" + {format_duration(h.per_token)} a prefill token, {h.mode}"
    yield f"  host              {terms}{' (assumed)' if h.assumed else ''}"
    if c.swap is not None:
        rate = profile.block_size * profile.model.kv_bytes_per_token / c.swap.per_block if c.swap.per_block else 0.0
        moved = f" ({rate:.1f} GB/s)" if rate else ""
        assumed = " (assumed)" if c.swap.assumed else ""
        swap = f"{format_duration(c.swap.base)} + {format_duration(c.swap.per_block)} a block"
        yield f"  swap              {swap}{moved}{assumed}"


def _curve(curve: Curve, one: str, many: str) -> str:
    """`curve` in words: its two ends and the number of knots."""
    first = f"{curve.x[0]:.0f} {one if curve.x[0] == 1 else many} {format_duration(curve.ns[0])}"
    return f"{first} to {curve.x[-1]:,.0f} {many} {format_duration(curve.ns[-1])}, {len(curve.x)} knots"


def _error(row: dict[str, Any]) -> str:
    return (
        f"median error {100 * row['p50']:.1f} %, p95 {100 * row['p95']:.1f} %, bias {100 * row['bias']:+.2f} %"
        f" over {row['n']:,} steps"
    )


def _errors(head: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of relative errors by region of steps below `head`; nothing without rows."""
    if not rows:
        return []
    lines = [f"{head:<32}{'steps':>8}{'median':>10}{'p95':>10}{'bias':>10}"]
    for row in rows:
        numbers = f"{100 * row['p50']:>8.1f} %{100 * row['p95']:>8.1f} %{100 * row['bias']:>+8.2f} %"
        lines.append(f"  {row['region']:<30}{row['n']:>8,}{numbers}")
    return lines


def _held_out(profile: Profile) -> list[list[str]]:
    held_out = profile.held_out or {}
    return [
        _errors("held out, kernels of batches", held_out.get("batches", ())),
        _errors("held out, whole engine steps" if profile.setup is None else _AGAINST, held_out.get("steps", ())),
        _errors("held out, scheduled ahead", held_out.get("ahead", ())),
    ]
