"""Reads recordings of prefill and decode engines of vLLM, end to end: several engines behind one proxy, in one file.

One JSON object; times are seconds from the start of the run.

    meta      `hop`, the time from proxy to engine and from engine to engine; `transfer`: `fixed` and `per_block` of one
              pull; `fail_hold`, if pulls fail, for how long their KV is kept after them; `engines`, by name (`P0`, `P1`
              ... prefill, `D0`, `D1` ... decode) what an engine's own recording has in `meta`, with `role` (`kv_role`)
              and `kv_load_failure_policy`; `step_time`; notes. `totals`: requests, steps by engine, preemptions,
              blocks_pulled, makespan.
    requests  as of one engine's recording; `arrival` is at the proxy; `load_fails`, if the pull of it fails.
    handed    [t, id, prefill engine, decode engine, KV blocks kept] in the order in which the proxy hands requests on.
    engines   in the order of `meta.engines`, each `engine`, its name, `steps` and `per_request`, which has the requests
              that came there, with `taken`, when the engine took one in, and `error`, if a failed pull has ended it.
    steps     as of one engine with a connector, but for lists that are empty and what a step without tokens has in
              `t_gpu_start` and `t_end`, which are left out; `loads_started` [[id, blocks]...]; `loads_failed` [id...],
              `errors` [id...] ended by that.

The proxy: a request goes to the next prefill engine, with one token to generate. When that is processed the proxy has
the answer after a hop, takes the next decode engine, and the request is there a hop later, with its token to be
generated again. Its pull begins with a step's launch; the prefill engine hears of its end a hop later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from batchsim.base.errors import cut, shown
from batchsim.check.conform import recording as form
from batchsim.check.conform import vllm_v1
from batchsim.check.conform.fields import (
    ANY,
    COUNT,
    FLAG,
    LIST,
    OBJECT,
    SECONDS,
    TEXT,
    BadRecording,
    ListOf,
    check_row,
    columns,
)
from batchsim.check.conform.kv_transfers import several
from batchsim.check.conform.recording import Recording
from batchsim.kernel.types import Arrival

PARTS = {"meta": OBJECT, "requests": LIST, "handed": LIST, "engines": LIST}
META = {"hop": SECONDS, "transfer": OBJECT, "engines": OBJECT, "step_time": TEXT}
META_MAYBE = {"vllm_version": TEXT, "connector": TEXT, "totals": OBJECT, "fail_hold": SECONDS}
META_MAYBE |= dict.fromkeys(vllm_v1.NOTES, ANY)
TRANSFER = {"fixed": SECONDS, "per_block": SECONDS}
TOTALS = {"requests": COUNT, "steps": OBJECT, "preemptions": COUNT, "blocks_pulled": COUNT, "makespan": SECONDS}
ENGINE = {"engine": TEXT, "steps": LIST, "per_request": OBJECT}
HANDED = ListOf(columns("[t, id, prefill engine, decode engine, blocks]", SECONDS, COUNT, TEXT, TEXT, COUNT))
NAME = re.compile(r"[PD][0-9]{1,3}")
LIKE_ASYNC = "as vllm-async: "
EMPTY = ("scheduled", "preempted", "finished")


@dataclass(frozen=True)
class Handed:
    """A request as the proxy hands it on at `at_ns`, from one engine to another; the first one keeps KV blocks."""

    at_ns: int
    request: int
    prefill: str
    decode: str
    blocks: int


@dataclass(frozen=True)
class EnginesRecording:
    """A recording of several engines, by name in `engines`, in the order in which the proxy takes turns. Times in ns.

    `arrivals` are those at the proxy; `at` has them by engine and id as each engine would see them, but for the time;
    `fails` the requests whose pull fails.
    """

    engines: dict[str, Recording]
    arrivals: list[Arrival]
    at: dict[str, dict[int, Arrival]]
    fails: frozenset[int]
    handed: list[Handed]
    hop_ns: int
    fixed_ns: int
    per_block_ns: int
    fail_hold_ns: int
    totals: dict[str, Any]


def is_prefill_decode(data: Any) -> bool:
    """Whether the JSON value `data` is meant to be of this form."""
    return isinstance(data, dict) and {"meta", "engines"} <= data.keys()


def engines_recording(data: dict[str, Any], policy: str | None) -> EnginesRecording:
    """`data` as a recording of several engines under `policy`, or that of their schedulers. Raises BadRecording."""
    check_row(data, "the recording", PARTS)
    meta = check_row(data["meta"], "meta", META, META_MAYBE)
    transfer = check_row(meta["transfer"], "meta.transfer", TRANSFER)
    totals = check_row(meta.get("totals", {}), "meta.totals", {}, TOTALS)
    handed = _handed(data["handed"])
    rows, fails = list[dict[str, Any]](), set[int]()
    for i, row in enumerate(data["requests"]):
        OBJECT.check(row, f"requests[{i}]")
        rows.append({name: value for name, value in row.items() if name != "load_fails"})
        FLAG.check(row.get("load_fails", False), f"requests[{i}].load_fails")
        if row.get("load_fails"):
            COUNT.check(row.get("id"), f"requests[{i}].id")
            fails.add(row["id"])
    if fails and "fail_hold" not in meta:
        raise BadRecording("meta has no fail_hold, and requests have load_fails. Write it down.")
    # Blocks are counted where each engine's own recording is read.
    arrivals = form.in_order(vllm_v1.arrivals(rows, with_tokens=False), 10**6)
    names = list(meta["engines"])
    for name in names:
        if not NAME.fullmatch(name):
            raise BadRecording(f"meta.engines has {cut(name)}, not a name like P0 or D0. Record it again.")
    for i, row in enumerate(data["engines"]):
        check_row(row, f"engines[{i}]", ENGINE)
    there = [row["engine"] for row in data["engines"]]
    if there != names or {name[0] for name in names} != {"P", "D"}:
        raise BadRecording(
            f"engines are {shown(there)}, meta.engines {shown(names)}: not the same, with prefill and decode engines."
            " Record it again."
        )
    engines = {
        name: _engine(meta, rows, row, f"engines[{i}]", policy)
        for i, (name, row) in enumerate(zip(names, data["engines"], strict=True))
    }
    at = {name: _arrivals(rows, name, recording) for name, recording in engines.items()}
    return EnginesRecording(
        engines,
        arrivals,
        at,
        frozenset(fails),
        handed,
        form.to_ns(meta["hop"]),
        form.to_ns(transfer["fixed"]),
        form.to_ns(transfer["per_block"]),
        form.to_ns(meta.get("fail_hold", 0)),
        totals,
    )


def _engine(
    meta: dict[str, Any], requests: list[dict[str, Any]], row: dict[str, Any], where: str, policy: str | None
) -> Recording:
    """The recording of one of the engines, of the requests that came there."""
    name = row["engine"]
    own = OBJECT.check(meta["engines"][name], f"meta.engines.{name}") or dict(meta["engines"][name])
    for key in ("kv_role", "step_time", "order"):
        if key in own:
            what = f"meta.engines.{name} has {key}, which is not an engine's own here"
            raise BadRecording(f"{what}. Leave it out.")
    own["kv_role"] = own.pop("role", None)
    if own["kv_role"] != {"P": "kv_producer", "D": "kv_consumer"}[name[0]]:
        raise BadRecording(f"meta.engines.{name}.role is {shown(own['kv_role'])}, not that of its name. Correct it.")
    own["step_time"] = meta["step_time"].removeprefix(LIKE_ASYNC)
    own |= {key: meta[key] for key in ("vllm_version",) if key in meta}
    came = _seen_by(name, [request for request in requests if str(request["id"]) in row["per_request"]])
    steps = [_step(step, f"{where}.steps[{i}]") for i, step in enumerate(row["steps"])]
    data = {"meta": own, "requests": came, "steps": steps, "per_request": row["per_request"]}
    try:
        recording = vllm_v1.recording(data, policy, several)
    except BadRecording as error:
        raise BadRecording(f"{name}: {error}") from None
    return replace(recording, steps_name=f"{where}.steps")


def _seen_by(name: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`requests` as the engine has them: prefill engines are asked for one token."""
    if name[0] == "D":
        return requests
    one = {"output_len": 1, "max_tokens": 1}
    return [{key: request[key] for key in request if key != "max_new_tokens"} | one for request in requests]


def _arrivals(rows: list[dict[str, Any]], name: str, recording: Recording) -> dict[int, Arrival]:
    with_tokens = bool(recording.config.traits.prefix_cache)
    return {each.request.id: each for each in vllm_v1.arrivals(_seen_by(name, rows), with_tokens=with_tokens)}


def _step(row: Any, where: str) -> dict[str, Any]:
    """The recorded step with all that may be left out of it."""
    OBJECT.check(row, where)
    step = {name: list[Any]() for name in EMPTY} | row
    if not step["scheduled"] and "t_scheduled" in step:
        step = {"t_gpu_start": step["t_scheduled"], "t_end": step["t_scheduled"]} | step
    return step


def _handed(rows: list[Any]) -> list[Handed]:
    HANDED.check(rows, "handed")
    return [Handed(form.to_ns(at), i, prefill, decode, blocks) for at, i, prefill, decode, blocks in rows]
