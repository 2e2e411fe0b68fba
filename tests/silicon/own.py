"""What aiconfigurator says of a measured point by itself: its `cli_estimate` of an aggregated deployment, or of engines
that prefill and decode apart."""

from __future__ import annotations

import logging
from typing import Any

from tests.silicon.pools import PooledRow
from tests.silicon.rows import Row

_MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""Its names of models, where they differ from those of the points."""


def own_estimate(row: Row) -> tuple[float, float] | None:
    """(TTFT, TPOT) in ms, of the same types, GPUs and version of tables as are simulated; None where it has none.

    Needs the packages `aiconfigurator` and `aiconfigurator-core`.
    """
    from aiconfigurator.cli.api import cli_estimate  # not a dependency of anything but this comparison

    logging.disable(logging.CRITICAL)
    weights, moe = row.types
    for kv in dict.fromkeys((row.kv, "")):  # in 16 bits where it has no kernels for a cache in 8, as when simulated
        types = {"gemm_quant_mode": weights, "moe_quant_mode": moe, "kvcache_quant_mode": kv}
        try:
            found: Any = cli_estimate(
                _MODELS.get(row.model, row.model),
                row.gpu,
                backend_name=row.backend,
                isl=row.isl,
                osl=row.osl,
                **_sizes(row),
                **{name: dtype for name, dtype in types.items() if dtype},
            )
        except Exception:
            continue
        return float(found.ttft), float(found.tpot)
    return None


def _sizes(row: Row) -> dict[str, Any]:
    """Its mode, and how it names numbers of GPUs, ranks and requests."""
    if isinstance(row, PooledRow):
        sizes: dict[str, Any] = {"mode": "disagg"}
        for name, side in (("prefill", row.prefill), ("decode", row.decode)):
            sizes |= {f"{name}_num_workers": side.count, f"{name}_tp_size": side.tp, f"{name}_batch_size": side.batch}
            sizes |= {f"{name}_moe_tp_size": side.moe_tp, f"{name}_moe_ep_size": side.ep}
        return sizes
    alone = row.ranks == 1
    return {
        "mode": "agg",
        "batch_size": -(-row.concurrency // row.ranks),
        "tp_size": row.tp if alone else 1,
        "attention_dp_size": row.ranks,
        "moe_tp_size": row.moe_tp if alone else 1,
        "moe_ep_size": row.ep if alone else row.ranks,
    }
