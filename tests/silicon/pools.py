"""Measured points of engines that prefill and decode apart, and the scenario of each.

What the points do not say is assumed, and nothing of it fitted: SGLang's own defaults but for the radix cache, which is
off; a link of 400 Gb/s between each prefill and each decode engine; the clients of the points of one engine.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass

from tests.silicon.rows import CHECKPOINTS, MAX_CONCURRENCY, MAX_TTFT_MS, Row, is_given, law, measured_rows, row_of

_SIMULATED = "are simulated"
TRANSFER = "{bandwidth: 50GB/s, latency: 20us, links: per_pair}"


@dataclass(frozen=True)
class Side:
    """`count` engines of `tp` GPUs, their experts over `ep` of them or split over `moe_tp`, with `batch` requests each;
    of `ranks` that schedule for themselves."""

    count: int
    tp: int
    ranks: int
    ep: int
    moe_tp: int
    batch: int


@dataclass(frozen=True)
class PooledRow(Row):
    """A measured point of engines of two kinds. `stated`: what halves are made of, as the file has it."""

    prefill: Side = Side(1, 1, 1, 1, 1, 1)
    decode: Side = Side(1, 1, 1, 1, 1, 1)
    stated: str = ""

    @property
    def deployment(self) -> str:
        """What halves are made of."""
        return self.stated


def given_pools() -> list[PooledRow]:
    """The points that are simulated, each once. FileNotFoundError without the package."""
    rows: dict[tuple[object, ...], PooledRow] = {}
    for row in pooled_points():
        if of_pools(row) == _SIMULATED:
            rows.setdefault((row.deployment, row.isl, row.osl, row.concurrency, row.ttft_ms, row.tpot_ms), row)
    return list(rows.values())


def of_pools(row: PooledRow) -> str:
    """What is done with a point: engines without attention ranks, and clients as of the points of one engine."""
    if not is_given(row.deployment):
        return "are of the other half"
    if row.engine not in ("vllm", "sglang"):
        return f"are of {row.engine}, whose pools are not simulated"
    if row.prefill.ranks > 1 or row.decode.ranks > 1:
        return f"are of {row.engine} with attention data parallelism on a side, not simulated apart"
    if row.concurrency > MAX_CONCURRENCY or row.ttft_ms > MAX_TTFT_MS:
        return f"have more than {MAX_CONCURRENCY} clients or a TTFT above {MAX_TTFT_MS / 1000:g} s"
    return _SIMULATED


def pooled_points() -> Iterator[PooledRow]:
    """The points of engines apart that state both numbers of engines. FileNotFoundError without the package."""
    for plain in csv.DictReader(measured_rows().splitlines()):
        if plain["mode"] != "disagg" or not (plain["prefill_num_workers"] and plain["decode_num_workers"]):
            continue
        sides = {side: _side(plain, side) for side in ("prefill", "decode")}
        row = row_of({**plain, "tp_size": plain["decode_tp_size"], "moe_ep_size": plain["decode_moe_ep_size"]})
        short = {side: f"{each.count}x{each.tp}d{each.ranks}" for side, each in sides.items()}
        known = {name: getattr(row, name) for name in Row.__dataclass_fields__}
        if not plain["batch_size"] and "silicon_concurrency" not in plain["silicon_data_source"]:
            known["concurrency"] = sides["decode"].count * sides["decode"].batch
        of = f"{row.model}|{row.gpu}|{row.backend}|{row.precision}|P{short['prefill']}|D{short['decode']}"
        yield PooledRow(**known, prefill=sides["prefill"], decode=sides["decode"], stated=of)


def _side(plain: dict[str, str], side: str) -> Side:
    names = ("num_workers", "tp_size", "attention_dp_size", "moe_ep_size", "moe_tp_size", "batch_size")
    count, tp, ranks, ep, moe_tp, batch = (int(float(plain[f"{side}_{name}"] or 1)) for name in names)
    return Side(count, tp, ranks, ep, moe_tp, batch)


def pooled_text(row: PooledRow, *, kv: str | None = None) -> str:
    """The scenario of a point: ten requests a client, all clients at once, lengths uniform in 0.8 to 1 of the greatest.
    `kv` is another type of the KV cache."""
    weights, moe = row.types
    types = {"weights": weights, "moe": moe, "kv": row.kv if kv is None else kv}
    stated = "".join(f", {name}: {dtype}" for name, dtype in types.items() if dtype)
    sides = {"prefill": row.prefill, "decode": row.decode}
    of = f"engine: {row.engine}, gpu: {row.gpu}{stated}"
    written = "".join(
        f"\n  {name}: {{{of}, tp: {side.tp}, ep: {side.ep}, count: {side.count}}}" for name, side in sides.items()
    )
    policy = {"vllm": "enable_prefix_caching: false", "sglang": "disable_radix_cache: true"}[row.engine]
    return f"""
model: {CHECKPOINTS[row.model]}
deployment:{written}
  transfer: {TRANSFER}
workload:
  arrivals: {{kind: closed_loop, users: {row.concurrency}, think_time: 0s, shared_list: true, ramp: 0s}}
  lengths: {{prompt: {law(row.isl, row.gap)}, output: {law(row.osl, row.gap)}}}
  output_cap: exact
  requests: {10 * row.concurrency}
  frontend: {row.engine}
policies: {{{row.engine}: {{{policy}}}}}
max_model_len: {row.isl + row.osl + 256}
slo: ttft<1s @ 99%
seeds: 1
"""
