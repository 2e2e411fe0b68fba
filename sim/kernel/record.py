"""What a run leaves behind, in columns: a row a step, a state change, a request; nothing per token.

The three tables and their columns are the schema of `results/`. Times are ns since the start of the run. Missing
values are `MISSING` in the arrays and null in the tables made from them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.kernel.lane_rows import LANE_DTYPE, LaneRows
from batchsim.kernel.packed_rows import Chunk, LazyColumns, PackedRows, columns, packed, row_format
from batchsim.kernel.types import MISSING

if TYPE_CHECKING:
    from batchsim.kernel.types import Arrival

# Request states, as the rows of the `states` table name them.
PREFILL, RECOMPUTE, DECODE, SAT_OUT, PREEMPTED, SWAPPED, BLOCKED, HELD_BACK, ADAPTER, LOADING, LOADED = range(1, 12)
ENCODED, WAITING, MASKED, RANKS_WAITED, RANKS_PADDED, TIER_LOAD, TIER_STORE, STORE_FLUSH, LOAD_WAITED = range(12, 21)
GPU_WAITED = 21
STATE_NAMES = {
    PREFILL: "prefill",
    RECOMPUTE: "recompute",
    DECODE: "decode",
    SAT_OUT: "sat_out",
    PREEMPTED: "preempted",
    SWAPPED: "swapped",
    BLOCKED: "blocked",
    WAITING: "queued",  # for something of the request's own, whatever holds the queue
}
REMARK_NAMES = {
    HELD_BACK: "held_back",
    ADAPTER: "adapter",
    LOADING: "adapter_load",
    LOADED: "adapter_ready",
    ENCODED: "encoded",
    MASKED: "masked",
    RANKS_WAITED: "ranks_waited",
    RANKS_PADDED: "ranks_padded",
    GPU_WAITED: "gpu_waited",
    TIER_LOAD: "kv_load",
    TIER_STORE: "kv_store",
    STORE_FLUSH: "kv_store_flush",
    LOAD_WAITED: "kv_load_waited",
}
"""Rows of the `states` table that change no request's state."""

STEP_COLUMNS = (
    ("start_ns", "q"),
    ("duration_ns", "q"),
    ("context_tokens", "q"),  # KV tokens the decodes read
    ("prefill_pairs", "q"),  # sum over chunks of n*c + n*(n+1)/2: query-key pairs of n tokens after c computed ones
    ("pad_context_tokens", "q"),
    ("num_decode", "i"),
    ("num_decode_tokens", "i"),  # rows that these sequences computed: one each, and one for each draft token verified
    ("num_accepted_tokens", "i"),  # of these draft tokens, those accepted
    ("num_prefill_tokens", "i"),
    ("num_chunks", "i"),
    ("num_sampled_chunks", "i"),  # chunks that reached the end of their known tokens and sampled one
    ("pad_prefill_tokens", "i"),
    ("pad_prefill_rows", "i"),  # whole rows among that padding, beside the chunks
    ("pad_decode_rows", "i"),
    ("swap_blocks", "i"),
    ("num_preempted", "i"),
    ("free_blocks", "i"),  # while the step runs
    ("num_waiting", "i"),
    ("num_running", "i"),
    ("cached_tokens", "q"),  # found in the prefix cache by those admitted in this step
    ("num_passes", "i"),  # through the model, where the engine splits a step; 0: it was computed in one
    ("num_wide_passes", "i"),  # of these passes, those of more than one token
    ("window_tokens", "q"),  # of context_tokens, what layers with a sliding window read; 0: not timed apart
    ("window_pairs", "q"),  # of prefill_pairs, likewise
)
STATE_COLUMNS = (("time_ns", "q"), ("request_id", "q"), ("state", "i"), ("reason", "i"), ("blocker", "q"))
REQUEST_COLUMNS = (
    ("request_id", "q"),
    ("request_class", "i"),
    ("tenant", "i"),
    ("priority", "q"),
    ("sent_ns", "q"),  # when the client sent it; equal to arrival_ns without a front end
    ("arrival_ns", "q"),  # at the engine
    ("prompt_tokens", "q"),
    ("max_output_tokens", "q"),
    ("output_tokens", "q"),  # generated
    ("scheduled_ns", "q"),  # start of the first step it took part in
    ("first_token_ns", "q"),  # emission at the engine
    ("last_token_ns", "q"),
    ("first_delivery_ns", "q"),  # at the client
    ("delivered_ns", "q"),
    ("ended_ns", "q"),  # last token, rejection, cancel or end of the run
    ("outcome", "i"),
    ("reason", "i"),
    ("num_preemptions", "i"),
    ("num_swaps", "i"),
    ("recomputed_tokens", "q"),
    ("cached_tokens", "q"),  # found in the prefix cache at the first admission
    ("cached_tokens_all", "q"),  # at all admissions, those after preemptions too
    ("lag_ns", "q"),  # from arrival_ns to when the load source handed it over; 0 in a simulation
    ("router_ns", "q"),  # waited at the router because no replica was up
    ("failover_ns", "q"),  # lived on replicas that failed
    ("num_retries", "i"),  # those replicas
)
STAY_COLUMNS = (  # those named as in REQUEST_COLUMNS say the same, as it stood when the stay ended
    ("request_id", "q"),
    ("replica", "i"),
    ("start_ns", "q"),  # arrival at the engine
    ("end_ns", "q"),
    ("why", "i"),  # REPLICA_FAILED, or "handed_over"
    ("output_tokens", "q"),
    ("scheduled_ns", "q"),
    ("first_token_ns", "q"),
    ("last_token_ns", "q"),
    ("num_preemptions", "i"),
    ("num_swaps", "i"),
    ("recomputed_tokens", "q"),
    ("cached_tokens", "q"),
    ("cached_tokens_all", "q"),
)

FINISHED, REJECTED, CANCELLED, UNFINISHED, HANDED_OVER, PRUNED = range(6)
OUTCOME_NAMES = {
    FINISHED: "finished",
    REJECTED: "rejected",
    CANCELLED: "cancelled",
    UNFINISHED: "unfinished",
    HANDED_OVER: "handed_over",  # by this engine to another: no request's last outcome
    PRUNED: "pruned",  # given up since another request of its task had succeeded
}
CAP_CUT = "cap_cut"
"""The reason of requests that finished because the engine had cut their output cap."""
REPLICA_FAILED = "replica_failed"
"""The reason of requests that ended with their replica."""


_STEP, STEP_DTYPE = row_format(STEP_COLUMNS)
_STATE, STATE_DTYPE = row_format(STATE_COLUMNS)
_REQUEST, REQUEST_DTYPE = row_format(REQUEST_COLUMNS)
_, STAY_DTYPE = row_format(STAY_COLUMNS)
_TABLES = {"requests": REQUEST_DTYPE, "steps": STEP_DTYPE, "states": STATE_DTYPE, "lanes": LANE_DTYPE}
pack_step = _STEP.pack
_STEP_PLACES = {
    name: (f"<{kind}", struct.calcsize("<" + "".join(before for _, before in STEP_COLUMNS[:i])))
    for i, (name, kind) in enumerate(STEP_COLUMNS)
}
# A step of decodes, without padding: what is not 0; the columns of decodes, and those of queues, by `pack_two`.
pack_decodes = struct.Struct("<3q16x8s36xi8s32x").pack
pack_two = struct.Struct("<2i").pack
unpack_starts = struct.Struct(f"<q{_STEP.size - 8}xq").unpack_from  # of two packed steps, one after the other
PACK_BYTES = 1 << 23
"""Bytes of rows of steps beyond which the first half of them is packed, before the next step."""


@dataclass(frozen=True)
class Replicas:
    """The replica of every row of the tables; MISSING for requests that never left the router.

    `stays` has a row for each engine that a request lived on before its last one, which is the row in `requests`: until
    that replica failed, and the request began anew, or until it was handed over, and went on. By replica, then id.
    """

    requests: NDArray[np.int32]
    steps: NDArray[np.int32]
    states: NDArray[np.int32]
    stays: NDArray[np.void]


@dataclass(frozen=True)
class Records:
    """A finished run's tables as structured arrays, and the texts their code columns stand for.

    `requests` is sorted by request id, `steps` by start; `states` is in the order in which things happened.
    `details` maps a rejection's reason to the numbers of its first case, and the reason of a cut run to what failed.
    `replicas` says whose rows these are where several engines wrote them; see `batchsim.drive.fleet.fleet_records`.
    `lanes` has a row a step where the engine, or one of several, schedules ahead of results: the host's part; else it
    is empty. `step_rows` are those of `steps`, packed where they are many.
    """

    requests: NDArray[np.void]
    step_rows: NDArray[np.void] | PackedRows
    states: NDArray[np.void]
    texts: tuple[str, ...]
    details: dict[str, str]
    replicas: Replicas | None = None
    lanes: NDArray[np.void] = field(default_factory=lambda: np.empty(0, LANE_DTYPE))

    @cached_property
    def steps(self) -> NDArray[np.void]:
        """A row a step, by start. Millions of them take memory: where columns do, read `step_columns`."""
        return self.step_rows.rows() if isinstance(self.step_rows, PackedRows) else self.step_rows

    @property
    def num_steps(self) -> int:
        """Number of rows of `steps`."""
        return len(self.step_rows)

    @cached_property
    def step_columns(self) -> Mapping[str, NDArray[Any]]:
        """The columns of `steps` by name, each in one piece: faster to read than strided fields of the packed rows."""
        return LazyColumns(self.step_rows) if isinstance(self.step_rows, PackedRows) else columns(self.steps)

    def pieces(self, num_steps: int, behind: int) -> Iterator[tuple[int, Records]]:
        """These records of one engine with their steps a piece at a time, of about `num_steps`, so that none but those
        are unpacked at once; each piece begins with up to `behind` steps of the one before, and says how many."""
        if not isinstance(self.step_rows, PackedRows):
            yield 0, self
            return
        before = np.empty(0, STEP_DTYPE)
        for first, piece in self.step_rows.pieces(num_steps):
            rows, lanes = np.concatenate((before, piece.rows())), self.lanes
            if len(lanes):
                lanes = lanes[first - len(before) : first + len(piece)]
            yield len(before), replace(self, step_rows=rows, lanes=lanes)
            before = rows[len(rows) - behind :] if behind else rows[:0]

    def lanes_of(self, chosen: NDArray[Any]) -> NDArray[np.void]:
        """The rows of `lanes` of the chosen steps, by number or as flags; none where there are none."""
        return self.lanes[chosen] if len(self.lanes) else self.lanes

    def stays(self, why: str) -> NDArray[np.void]:
        """The stays that ended for `why`, as `Replicas.stays`; none where one engine wrote the records."""
        if self.replicas is None or why not in self.texts:
            return np.empty(0, STAY_DTYPE)
        return self.replicas.stays[self.replicas.stays["why"] == self.texts.index(why)]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Tables, texts and details as arrays by name, which `np.savez` keeps without pickling."""
        words = json.dumps({"texts": self.texts, "details": self.details}, ensure_ascii=False)
        return {name: getattr(self, name) for name in _TABLES} | {"words": np.array(words)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Records:
        """The reverse of `arrays`. ValueError or KeyError where a table is missing or has other columns. Of older files
        `lanes` may be missing, which synchronous engines have none of, and `LATER_COLUMNS`, which are 0 then."""
        read = {name: _with_later(arrays[name], _TABLES[name]) for name in _TABLES if name != "lanes"}
        read["lanes"] = arrays["lanes"] if "lanes" in arrays else np.empty(0, LANE_DTYPE)
        for name, table in read.items():
            if table.dtype != _TABLES[name]:
                raise ValueError(f"the columns of {name} are those of another version")
        words = json.loads(str(arrays["words"]))
        texts, details = tuple(words["texts"]), words["details"]
        return cls(read["requests"], read["steps"], read["states"], texts, details, lanes=read["lanes"])


LATER_COLUMNS = frozenset({"window_tokens", "window_pairs"})
"""Columns of steps that files written before there were any do not have."""


def _with_later(table: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`table` with zeros in those of LATER_COLUMNS that `dtype` has and it lacks, if nothing else is missing."""
    there, wanted = table.dtype.names or (), dtype.names or ()
    if tuple(name for name in wanted if name in there or name not in LATER_COLUMNS) != there or there == wanted:
        return table
    whole = np.zeros(len(table), dtype)
    for name in there:
        whole[name] = table[name]
    return whole


class Spool(Protocol):
    """Where a recorder puts rows for which it has no memory to spare, as bytes by the name of their table."""

    def put(self, table: str, rows: bytes | bytearray) -> None:
        """Adds rows behind those of `table` that are there."""
        ...

    def rows(self, table: str, first_byte: int = 0) -> bytearray:
        """The rows of `table` that are there, from `first_byte` on."""
        ...


def put_windows(rows: bytearray, begin: int, first: int, step: int) -> None:
    """Fills in `window_tokens` of the packed steps from byte `begin` on: `first` of the first one, `step` more in each
    that follows."""
    steps = np.frombuffer(rows, STEP_DTYPE, offset=begin)
    steps["window_tokens"] = first + step * np.arange(len(steps))


class Recorder:
    """Collects rows as packed bytes. `text(s)` gives the code that stands for a string in a code column."""

    def __init__(self) -> None:
        self.step_rows = bytearray()  # of STEP_COLUMNS, packed by `pack_step`; the last ones, beyond those in `_packed`
        self._packed: list[tuple[int, Chunk]] = []  # chunks of rows: how many, and their columns
        self._states = bytearray()
        self._requests = bytearray()
        self.lanes = LaneRows()  # of an engine that schedules ahead; of others it has none
        self._codes: dict[str, int] = {"": 0}
        self.details: dict[str, str] = {}
        self._spool: Spool | None = None
        self._spilled = {"requests": 0, "steps": 0}  # rows there

    def text(self, text: str) -> int:
        return self._codes.setdefault(text, len(self._codes))

    def state(self, time_ns: int, request_id: int, state: int, reason: str = "", blocker: int | None = None) -> None:
        code = self._codes.get(reason)
        self._states += _STATE.pack(
            time_ns,
            request_id,
            state,
            self.text(reason) if code is None else code,
            MISSING if blocker is None else blocker,
        )

    def request(self, *row: int) -> None:
        """Writes the row of a request, in the order of REQUEST_COLUMNS."""
        self._requests += _REQUEST.pack(*row)

    def pack_steps(self) -> None:
        """Packs the first half of the rows of steps in `step_rows`: the last ones may change yet."""
        size = len(self.step_rows) // _STEP.size // 2 * _STEP.size
        rows = np.frombuffer(self.step_rows[:size], STEP_DTYPE)
        self._packed.append(packed(rows))
        del self.step_rows[:size]

    def landed(self, back: int, launched_ns: int, start_ns: int, duration_ns: int) -> None:
        """Writes the times of the step `back` rows from the end, which is over now, if its row is still here."""
        if (at := len(self.step_rows) - back * _STEP.size) >= 0:
            struct.pack_into("<qq", self.step_rows, at, start_ns, duration_ns)
        self.lanes.landed(back, launched_ns)

    def amend(self, back: int, column: str, value: int) -> None:
        """Writes what was not known of the step `back` rows from the end when its row was, if that is still here."""
        if (at := len(self.step_rows) - back * _STEP.size) >= 0:
            place = _STEP_PLACES[column]
            struct.pack_into(place[0], self.step_rows, at + place[1], value)

    def cut_last_steps(self, count: int, now_ns: int) -> None:
        """Lets the last `count` steps end at `now_ns` at the latest, before their time; one not begun has no time."""
        for at in range(len(self.step_rows) - count * _STEP.size, len(self.step_rows), _STEP.size):
            start_ns, duration_ns = struct.unpack_from("<qq", self.step_rows, at)
            start_ns = min(start_ns, now_ns)
            struct.pack_into("<qq", self.step_rows, at, start_ns, min(start_ns + duration_ns, now_ns) - start_ns)
        self.lanes.cut()

    def drop_last_steps(self, count: int) -> None:
        """Forgets the last `count` steps, launched by a loop that is ahead, which the device failed."""
        del self.step_rows[len(self.step_rows) - count * _STEP.size :]
        self.lanes.drop_last(count)

    def unserved(self, arrival: Arrival, now_ns: int, outcome: int, reason: str) -> None:
        """Writes the row of a request that ended at `now_ns` without having reached an engine."""
        request, never = arrival.request, (MISSING,) * 5
        self.request(
            request.id,
            self.text(request.request_class),
            self.text(request.tenant),
            request.priority,
            now_ns if arrival.sent_ns is None else arrival.sent_ns,
            now_ns,
            request.prompt_tokens,
            request.max_output_tokens,
            0,
            *never,
            now_ns,
            outcome,
            self.text(reason),
            *(0,) * 6,
            arrival.router_ns,
            arrival.failover_ns,
            arrival.num_retries,
        )

    def requests_from(self, first: int) -> NDArray[np.void]:
        """A copy of the rows of requests from the `first`-th on, in the order in which they ended since `records` was
        last called; those of before are in order of their ids."""
        at = max(first - self._spilled["requests"], 0) * _REQUEST.size
        return self._with_spilled("requests", first, np.frombuffer(bytes(self._requests[at:]), REQUEST_DTYPE))

    def __len__(self) -> int:
        """Number of rows of requests."""
        return self._spilled["requests"] + len(self._requests) // _REQUEST.size

    @property
    def num_steps(self) -> int:
        return self._spilled["steps"] + sum(count for count, _ in self._packed) + len(self.step_rows) // _STEP.size

    def steps_from(self, first: int) -> NDArray[np.void]:
        """A copy of the rows of steps from number `first` on."""
        own = max(first - self._spilled["steps"], 0)
        num_packed = sum(count for count, _ in self._packed)
        last = np.frombuffer(bytes(self.step_rows[max(own - num_packed, 0) * _STEP.size :]), STEP_DTYPE)
        rows = last if own >= num_packed else PackedRows(self._packed, last).rows()[own:]
        return self._with_spilled("steps", first, rows)

    def _with_spilled(self, table: str, first: int, own: NDArray[np.void]) -> NDArray[np.void]:
        """The rows of `table` in the spool from number `first` on, then `own`."""
        if self._spool is None or first >= self._spilled[table]:
            return own
        spilled = self._spool.rows(table, first * own.dtype.itemsize)
        return np.concatenate((np.frombuffer(spilled, own.dtype), own))

    @property
    def num_bytes(self) -> int:
        """Memory of the rows, those of packed steps aside."""
        return sum(map(len, (self.step_rows, self._states, self._requests))) + self.lanes.num_bytes

    def spill(self, spool: Spool, num_in_flight: int) -> None:
        """Moves the rows to `spool`, but for those of the last `num_in_flight` steps, which may change yet: an engine
        that runs on for days need not grow. `records` reads them again."""
        size = len(self.step_rows) - num_in_flight * _STEP.size
        steps = PackedRows(self._packed, np.frombuffer(self.step_rows[:size], STEP_DTYPE)).rows()
        spool.put("requests", self._requests)
        spool.put("steps", steps.tobytes())
        spool.put("states", self._states)
        spool.put("lanes", self.lanes.written(self._starts_ns))
        self._spool = spool
        self._spilled["requests"] += len(self._requests) // _REQUEST.size
        self._spilled["steps"] += len(steps)
        self._requests, self._states, self._packed = bytearray(), bytearray(), []
        self.lanes.rows = bytearray()
        del self.step_rows[:size]

    def records(self) -> Records:
        """The tables. They may share this recorder's memory, in which requests are put in order of their ids: nothing
        can be recorded while they are there."""
        requests = np.frombuffer(self._all("requests", self._requests), REQUEST_DTYPE)
        order = np.argsort(requests["request_id"], kind="stable")
        for name in REQUEST_DTYPE.names or ():  # in place, a column at a time: a million rows are 170 MB
            requests[name] = requests[name][order]
        steps, chunks = np.frombuffer(self.step_rows, STEP_DTYPE), self._packed
        if self._spool is not None and self._spilled["steps"]:
            chunks = [packed(np.frombuffer(self._spool.rows("steps"), STEP_DTYPE)), *chunks]
        return Records(
            requests=requests,
            step_rows=PackedRows(chunks, steps) if chunks else steps,
            states=np.frombuffer(self._all("states", self._states), STATE_DTYPE),
            texts=tuple(self._codes),
            details=dict(self.details),
            lanes=np.frombuffer(
                self._all("lanes", self.lanes.written(self._starts_ns)) + self.lanes.open_rows(), LANE_DTYPE
            ),
        )

    def _starts_ns(self) -> NDArray[np.int64]:
        """When the steps began that are not in the spool, in ns."""
        return PackedRows(self._packed, np.frombuffer(self.step_rows, STEP_DTYPE)).column("start_ns")

    def _all(self, table: str, own: bytearray) -> bytearray:
        """All rows of a table: those in the spool, then its `own`."""
        return own if self._spool is None else self._spool.rows(table) + own
