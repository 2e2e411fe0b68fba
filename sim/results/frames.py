"""The records as tables: tidy data frames and Parquet files, whose columns COLUMN_DOCS explains.

Codes become categories and missing values null. The same records give the same bytes with the same library versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchsim.kernel.lane_rows import LANE_DTYPE
from batchsim.kernel.record import (
    MISSING,
    OUTCOME_NAMES,
    REMARK_NAMES,
    REQUEST_DTYPE,
    STATE_DTYPE,
    STATE_NAMES,
    STAY_DTYPE,
    STEP_DTYPE,
    Recorder,
    Records,
    Replicas,
    columns,
)

_NULLABLE = (
    "scheduled_ns",
    "first_token_ns",
    "last_token_ns",
    "first_delivery_ns",
    "delivered_ns",
    "processed_ns",
    "blocker",
)
_PARQUET: dict[str, Any] = {"compression": "zstd", "version": "2.6", "row_group_size": 1 << 20}
"""Written out, the rows of a group too, so that the bytes do not follow a library's defaults."""
_OF_NUMBERS = "DELTA_BINARY_PACKED"  # smaller, and quicker to write, than a dictionary of the values

_REPLICA = {"replica": "the engine's number, from 0; null for a request that never left the router"}
COLUMN_DOCS: dict[str, dict[str, str]] = {
    "requests": _REPLICA
    | {
        "request_id": "unique in the run",
        "request_class": "class of traffic; empty without classes",
        "tenant": "who sent it; empty without tenants",
        "priority": "lower is more important",
        "sent_ns": "ns; when the client sent it; equal to arrival_ns without a front end",
        "arrival_ns": "ns; when it reached the engine",
        "prompt_tokens": "tokens",
        "max_output_tokens": "tokens; what the client asked for at most",
        "output_tokens": "tokens generated",
        "scheduled_ns": "ns; start of the first step it took part in; null if there was none",
        "first_token_ns": "ns; emission of the first token at the engine; null if there was none",
        "last_token_ns": "ns; emission of the last token at the engine; null if that never came",
        "first_delivery_ns": "ns; first piece of the response at the client; null unless finished",
        "delivered_ns": "ns; last piece of the response at the client; null unless finished",
        "ended_ns": "ns; last token, rejection, cancel or end of the run",
        "outcome": "finished, rejected, cancelled or unfinished",
        "reason": "why it was not finished; of finished ones empty, or cap_cut: the engine cut its output cap",
        "num_preemptions": "times it lost its place, swaps included",
        "num_swaps": "times it was moved to host memory",
        "recomputed_tokens": "tokens computed again after preemptions",
        "cached_tokens": "tokens that its first admission found in the prefix cache",
        "cached_tokens_all": "tokens that all its admissions found there, those after preemptions too",
        "lag_ns": "ns; from arrival_ns to when the load source handed it over; 0 in a simulation",
        "router_ns": "ns; waited at the router because no replica was up",
        "failover_ns": "ns; lived on replicas that failed, before the one of this row",
        "num_retries": "how many these were",
    },
    "steps": _REPLICA
    | {
        "start_ns": "ns",
        "duration_ns": "ns",
        "context_tokens": "KV tokens the decodes read",
        "prefill_pairs": "query-key pairs of the chunks: n tokens after c computed ones have n*c + n*(n+1)/2",
        "pad_context_tokens": "KV tokens read for padding or ended rows",
        "num_decode": "sequences that decoded",
        "num_decode_tokens": "rows that these computed: one each, and one for each draft token verified",
        "num_accepted_tokens": "draft tokens accepted",
        "num_prefill_tokens": "tokens of all chunks",
        "num_chunks": "sequences with a prefill or recompute chunk",
        "num_sampled_chunks": "chunks that reached the end of their known tokens and gave a token",
        "pad_prefill_tokens": "tokens of prompt padding",
        "pad_prefill_rows": "whole rows among that padding, beside the chunks",
        "pad_decode_rows": "rows of ended sequences that still computed",
        "swap_blocks": "KV blocks moved to and from host memory",
        "num_preempted": "sequences that lost their place",
        "free_blocks": "KV blocks free while the step ran",
        "num_waiting": "requests in the queue",
        "num_running": "requests admitted",
        "cached_tokens": "tokens that the admissions of the step found in the prefix cache",
        "num_passes": "passes through the model, where the engine splits a step; 0: it was computed in one",
        "num_wide_passes": "of these passes, those of more than one token",
        "window_tokens": "of context_tokens, what layers with a sliding window read; 0: not timed apart",
        "window_pairs": "of prefill_pairs, what layers with a sliding window read; 0: not timed apart",
    },
    "states": _REPLICA
    | {
        "time_ns": "ns; rows are in the order in which things happened",
        "request_id": "as in requests",
        "state": "prefill, recompute, decode, sat_out, preempted, swapped; blocked: it heads the queue and waits;"
        " held_back: others overtake it there; adapter, adapter_load, adapter_ready: of its LoRA adapter;"
        " ranks_waited, ranks_padded: the step that begins then waited for other ranks, or computed padding to the"
        " fullest, for `blocker` ns, and request_id is null; gpu_waited: likewise, for other models' steps",
        "reason": "why, where the policy gave a reason; else empty; of an adapter its name, or whence it comes",
        "blocker": "the request that stands in the way; null where none does",
    },
}
COLUMN_DOCS["lanes"] = _REPLICA | {
    "called_ns": "ns; when the scheduler was asked for the step; rows are those of steps",
    "launched_ns": "ns; when the host was through with it; the GPU took it up at the step's start_ns",
    "processed_ns": "ns; when its results were processed and tokens went out; null where the run was cut before",
    "wasted_tokens": "tokens computed of requests that had ended by then",
}
COLUMN_DOCS["stays"] = _REPLICA | {
    "request_id": "as in requests",
    "start_ns": "ns; when it reached this engine",
    "end_ns": "ns",
    "why": "replica_failed: it began anew elsewhere; handed_over: it went on there",
}
COLUMN_DOCS["stays"] |= {
    name: f"{COLUMN_DOCS['requests'][name]}; as it stood at the end of the stay"
    for name in STAY_DTYPE.names or ()
    if name not in COLUMN_DOCS["stays"]
}

INTENDED = "intended_ns"
"""A column of requests more, where their client limits what is in flight."""
_INTENDED_DOC = "ns; when it was to be sent; sent_ns is later where it waited at its client for others to end"


_Columns = dict[str, Any]
"""The columns of a table, as pandas has them: arrays of numbers, categories or numbers with nulls."""


STAYS = "stays"
"""The table that several replicas leave beside requests, steps and states."""
LANES = "lanes"
"""The table that engines leave beside these where one schedules ahead of results."""


def _tables(records: Records, *, requests_only: bool = False) -> dict[str, _Columns]:
    """The columns of each table that the records have; with `requests_only` without steps, states and lanes."""
    texts, replicas = records.texts, records.replicas
    codes = {"request_class": texts, "tenant": texts, "reason": texts, "outcome": OUTCOME_NAMES}
    of = (0, 0, 0) if replicas is None else (replicas.requests, replicas.steps, replicas.states)
    tables = {"requests": _decoded(columns(records.requests), of[0], codes)}
    if not requests_only:
        tables["steps"] = _decoded(records.step_columns, of[1], {})
        codes = {"state": STATE_NAMES | REMARK_NAMES, "reason": texts}
        tables["states"] = _decoded(columns(records.states), of[2], codes)
    if replicas is not None:
        stays = columns(replicas.stays)
        tables[STAYS] = _decoded(stays, stays.pop("replica"), {"why": texts})
    if not requests_only and len(records.lanes):
        tables[LANES] = _decoded(columns(records.lanes), of[1], {})
    return tables


def frames(records: Records) -> dict[str, pd.DataFrame]:
    """`requests`, a row a request by id; `steps` by start; `states`, a row a change of a request's state, as things
    happened; of several replicas STAYS, a row for each engine that a request lived on before its last one; where an
    engine schedules ahead LANES, a row a step. Columns as in COLUMN_DOCS."""
    return {name: pd.DataFrame(table, copy=False) for name, table in _tables(records).items()}


def pack_tables(
    records: Records, *, intended_ns: NDArray[np.int64] | None = None, requests_only: bool = False
) -> dict[str, bytes]:
    """The bytes of a Parquet file of each table of `frames`, by file name.

    `intended_ns`, by request id, makes a column of requests.parquet. `requests_only`: without steps, states and lanes.
    """
    tables = _tables(records, requests_only=requests_only)
    if intended_ns is not None:
        tables["requests"][INTENDED] = intended_ns[records.requests["request_id"]]
    return pack_columns(tables, COLUMN_DOCS)


def pack_columns(tables: dict[str, _Columns], column_docs: dict[str, dict[str, str]]) -> dict[str, bytes]:
    """The bytes of a Parquet file of each table, by file name. `column_docs` says what the columns of each are."""
    packed: dict[str, bytes] = {}
    for name, table in tables.items():
        arrays = [pa.array(values) for values in table.values()]
        schema = _schema(table, arrays, column_docs[name] | {INTENDED: _INTENDED_DOC})
        numbers = [field.name for field in schema if pa.types.is_integer(field.type)]
        encodings: dict[str, Any] = {
            "use_dictionary": [field.name for field in schema if field.name not in numbers],
            "column_encoding": dict.fromkeys(numbers, _OF_NUMBERS),
        }
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, **_PARQUET, **encodings)
        packed[f"{name}.parquet"] = sink.getvalue().to_pybytes()
    return packed


_SCHEMAS: dict[tuple[Any, ...], pa.Schema] = {}


def _schema(table: _Columns, arrays: list[pa.Array], docs: dict[str, str]) -> pa.Schema:
    """The schema of the columns, with what makes pandas read them as they were. Made once for tables alike, since of a
    short run it takes longer than all else."""
    kinds = [(a.type, len(a.dictionary)) if pa.types.is_dictionary(a.type) else a.type for a in arrays]
    key = (*table, *kinds, *map(docs.get, table))
    if key not in _SCHEMAS:
        plain = pa.Schema.from_pandas(pd.DataFrame(table, copy=False), preserve_index=False)
        fields = [field.with_metadata({"description": docs[field.name]}) for field in plain]
        _SCHEMAS[key] = pa.schema(fields, plain.metadata)
    return _SCHEMAS[key]


def to_frame(packed: bytes) -> pd.DataFrame:
    """The table in the bytes of a file of `pack_tables`, equal to the frame it was made from."""
    return pq.ParquetFile(pa.BufferReader(packed)).read().to_pandas()


def to_records(
    requests: pd.DataFrame,
    steps: pd.DataFrame,
    states: pd.DataFrame,
    stays: pd.DataFrame | None = None,
    lanes: pd.DataFrame | None = None,
) -> Records:
    """The records that the frames were made from, rejection details aside; texts may be numbered differently.

    `stays` is there for those of several replicas, `lanes` where an engine schedules ahead of results.
    """
    texts: dict[str, int] = {"": 0}
    for frame in (requests, states) if stays is None else (requests, states, stays):
        for name in _CODES:
            if name in frame:
                for text in frame[name].cat.categories:
                    texts.setdefault(str(text), len(texts))
    return Records(
        requests=_rows(requests, REQUEST_DTYPE, texts),
        step_rows=_rows(steps, STEP_DTYPE, texts),
        states=_rows(states, STATE_DTYPE, texts),
        texts=tuple(texts),
        details={},
        replicas=None
        if stays is None
        else Replicas(
            *(_numbers(frame) for frame in (requests, steps, states)),
            stays=_rows(stays, STAY_DTYPE, texts),
        ),
        lanes=np.empty(0, LANE_DTYPE) if lanes is None else _rows(lanes, LANE_DTYPE, texts),
    )


def no_steps() -> dict[str, pd.DataFrame]:
    """The tables `steps` and `states` without rows, for `to_records`."""
    tables = frames(Recorder().records())
    return {name: tables[name] for name in ("steps", "states")}


def _numbers(frame: pd.DataFrame) -> NDArray[np.int32]:
    return frame["replica"].fillna(MISSING).to_numpy(dtype=np.int32)


_CODES = ("request_class", "tenant", "reason", "why")


def _rows(frame: pd.DataFrame, dtype: np.dtype, texts: dict[str, int]) -> NDArray[np.void]:
    """The records that `_decoded` made `frame` of; `texts` gives each text its code."""
    named = {"outcome": OUTCOME_NAMES, "state": STATE_NAMES | REMARK_NAMES}
    rows = np.empty(len(frame), dtype)
    for name in dtype.names or ():
        column = frame[name]
        if name in _CODES or name in named:
            codes = texts if name in _CODES else {text: code for code, text in named[name].items()}
            known = np.array([codes[str(text)] for text in column.cat.categories], dtype=dtype[name])
            rows[name] = known[column.cat.codes] if len(frame) else 0
        elif name in _NULLABLE:
            rows[name] = column.fillna(MISSING).to_numpy(dtype=np.int64)
        else:
            rows[name] = column.to_numpy()
    return rows


def written(text: str) -> str:
    """`text` as a file of UTF-8 holds it: half a letter, which none can hold, as its escape, so that one text which
    cannot be written does not lose all other rows."""
    return text.encode(errors="backslashreplace").decode()


def _decoded(
    recorded: Mapping[str, NDArray[Any]],
    replica: int | NDArray[np.int32],
    codes: dict[str, tuple[str, ...] | dict[int, str]],
) -> _Columns:
    """`recorded` with a replica column before, `codes` decoded to categories in use, missing values null."""
    numbers = np.full(len(next(iter(recorded.values()))), replica, dtype=np.int32)
    unknown = numbers == MISSING
    frame: _Columns = {"replica": pd.arrays.IntegerArray(numbers, unknown) if unknown.any() else numbers}
    for name, values in recorded.items():
        if name in codes:
            used, index = np.unique(values, return_inverse=True)
            texts = [written(codes[name][code]) for code in used]
            places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
            index = np.array([places[text] for text in texts], np.int64)[index]
            frame[name] = pd.Categorical.from_codes(index, pd.Index(list(places), dtype="str"))
        elif name in _NULLABLE:
            frame[name] = pd.arrays.IntegerArray(values, values == MISSING)
        else:
            frame[name] = values
    return frame
