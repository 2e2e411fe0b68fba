"""What is kept of a run of many requests in the place of its rows, as tables: series by minute and histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.drive.fleet.fleet_records import EngineLife
from batchsim.kernel.record import MISSING
from batchsim.metrics.by_minute import histograms, request_minutes, step_minutes
from batchsim.metrics.latencies import LATENCIES
from batchsim.metrics.point_inputs import PointInputs
from batchsim.results.frames import COLUMN_DOCS, pack_columns

MINUTES, ENGINE_MINUTES, HISTOGRAMS = "minutes", "engine_minutes", "histograms"
"""The tables that are kept in the place of rows of requests, steps and states."""
_REPLICA = {"replica": COLUMN_DOCS["requests"]["replica"]}
_DOCS: dict[str, dict[str, str]] = {
    MINUTES: _REPLICA
    | {
        "start_ns": "ns; the minute's beginning",
        "request_class": "class of traffic; empty without classes",
        "sent": "requests sent in the minute, which ended with this replica",
        "judged": "of these, those of the cohort that an objective judges one by one",
        "within": "of these, those that met it",
        "finished": "requests whose answers were delivered in the minute",
        "output_tokens": "tokens of these answers",
    },
    ENGINE_MINUTES: _REPLICA
    | {
        "start_ns": "ns; the minute's beginning",
        "num_steps": "steps that began in the minute",
        "busy_ns": "ns; how long these took",
        "num_waiting": "requests that waited, a mean over that time",
        "num_running": "requests admitted, a mean over that time",
        "kv_utilisation": "share of the KV blocks in use, a mean over that time",
    },
    HISTOGRAMS: {
        "request_class": "class of traffic; empty without classes",
        "latency": "as in summary.csv",
        "mean_ns": "ns; the mean of those counted, which lie within 0.25 % of each other",
        "count": "finished requests of the cohort",
    },
}


def pack_minutes(inputs: PointInputs, lives: Sequence[EngineLife]) -> dict[str, bytes]:
    """The bytes of minutes.parquet, engine_minutes.parquet and histograms.parquet, by file name. `lives` are
    those of the run's engines."""
    blocks = [inputs.num_blocks] if inputs.fleet is None else inputs.fleet.num_blocks.tolist()
    texts = {"request_class": inputs.records.texts, "latency": tuple(LATENCIES)}
    tables = {
        MINUTES: request_minutes(inputs),
        ENGINE_MINUTES: step_minutes(lives, blocks),
        HISTOGRAMS: histograms(inputs),
    }
    return pack_columns({name: _decoded(columns, texts) for name, columns in tables.items()}, _DOCS)


def _decoded(columns: dict[str, NDArray[Any]], texts: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """`columns` with the codes of `texts` decoded to categories in use; the router's replica null."""
    frame: dict[str, Any] = {}
    for name, values in columns.items():
        if name in texts:
            used, index = np.unique(values.astype(np.int64), return_inverse=True)
            names = pd.Index([texts[name][code] for code in used], dtype="str")
            frame[name] = pd.Categorical.from_codes(index, names)
        elif name == "replica":
            frame[name] = pd.arrays.IntegerArray(values.astype(np.int32), values == MISSING)
        else:
            frame[name] = values
    return frame
