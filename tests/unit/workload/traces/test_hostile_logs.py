"""Hostile logs of every form: each ends in one line that names the file, the row where there is one, and what to do."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import BatchsimError
from batchsim.workload.replayed_sessions import links_of
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import Columns, TraceConfig

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,1\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.1,10,1\n"
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
TREE = "ts,in,out,me,after,took\n0,10,1,a,,5\n"
LABEL = "ts,in,out,kind,prio,who,chat,turn,gone,first,status\n0,10,1,x,0,y,c,1,5,1,ok\n"
MAPPED: dict[str, Any] = {"columns": Columns("in", "out", "ts"), "time_unit": "ms"}
LINKED: dict[str, Any] = {
    "columns": Columns("in", "out", "ts", id="me", parent="after", e2e="took"),
    "time_unit": "ms",
}
TOLD: dict[str, Any] = {
    "columns": Columns(
        "in",
        "out",
        "ts",
        request_class="kind",
        priority="prio",
        tenant="who",
        session="chat",
        turn="turn",
        deadline="gone",
        ttft="first",
        status="status",
    ),
    "time_unit": "ms",
}
HASHED: dict[str, Any] = {
    "columns": Columns("in", "out", "ts", hash_ids="ids", acceptance="acc"),
    "hash_id_block_size": 16,
    "time_unit": "s",
}
MOON = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
QWEN = {
    "chat_id": 1,
    "parent_chat_id": -1,
    "timestamp": 0.5,
    "input_length": 20,
    "output_length": 5,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2],
}
AIPERF = {"session_id": "s", "timestamp": 0, "input_length": 20, "output_length": 5}
CALL = {"t": 0, "type": "n", "in": 20, "out": 5, "hash_ids": [1, 2]}
WEKA: dict[str, Any] = {"id": "a", "block_size": 16, "hash_id_scope": "local", "requests": [CALL]}
JOB = {"request_id": 0, "type": "text", "input_length": 5, "output_length": 5, "duration": 5}
SERVING = {"session_id": "s", "arrival_time_ns": 5, "sub_requests": [{"input_toks": 9, "output_toks": 2}]}
LITE = {
    "startTime": "2025-01-01T00:00:00Z",
    "endTime": "2025-01-01T00:00:02Z",
    "prompt_tokens": 5,
    "completion_tokens": 2,
}
SPAN = {
    "startTimeUnixNano": 5,
    "endTimeUnixNano": 9,
    "attributes": {"gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 2},
}
TOO_WIDE = "1" * 25


def lines(*records: Any) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def deep_agents() -> list[dict[str, Any]]:
    """Sub-agents that start sub-agents, 30 levels."""
    calls: list[dict[str, Any]] = [CALL]
    for _ in range(30):
        calls = [{"t": 0, "type": "subagent", "status": "completed", "requests": calls}]
    return calls


def second(first: dict[str, Any], **changes: Any) -> bytes:
    """A file of `first` and of it again with `changes`; a value of ... takes its key away."""
    other = {key: value for key, value in (first | changes).items() if value is not ...}
    return lines(first, other)


def parquet(columns: dict[str, list[Any]]) -> bytes:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def vidur(row: str) -> bytes:
    return (VIDUR + row + "\n").encode()


def told(**changes: str) -> bytes:
    header = LABEL.partition("\n")[0].split(",")
    row = dict(zip(header, ["1", *LABEL.splitlines()[1].split(",")[1:]], strict=True)) | changes
    return (LABEL + ",".join(row.values()) + "\n").encode()


def tree(*rows: str) -> bytes:
    return (TREE + "\n".join(rows) + "\n").encode()


def hashed(ids: Any, acc: Any = 0.5) -> bytes:
    return lines(*({"ts": t, "in": 32, "out": 2, "ids": i, "acc": a} for t, i, a in ((0, [1, 2], 0.5), (1, ids, acc))))


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    # ---- files that are not what their name says
    "empty": (b"", {}, "empty"),
    "only a BOM": (b"\xef\xbb\xbf", {}, "empty"),
    "only blank lines": (b"\n\n \r\n", {}, "empty"),
    "gz that is not gz": (b"\x1f\x8b\x08\x00garbage that is no deflate", {}, "damaged gzip"),
    "gz cut short": (gzip.compress(VIDUR.encode() + b"1,5,1\n" * 4000, mtime=0)[:-12], {}, "damaged gzip"),
    "gz with a bad checksum": (gzip.compress(VIDUR.encode(), mtime=0)[:-8] + b"\0" * 8, {}, "damaged gzip"),
    "gz followed by rubbish": (gzip.compress(VIDUR.encode(), mtime=0) + b"rubbish", {}, "damaged gzip"),
    "gz of nothing": (gzip.compress(b"", mtime=0), {}, "empty"),
    "gz of parquet's magic": (gzip.compress(b"PAR1 not parquet", mtime=0), {}, "damaged Parquet"),
    "zip": (b"PK\x03\x04\x14\0\0\0", {}, "holds zero bytes"),
    "parquet that is not parquet": (b"PAR1 nothing of the kind PAR1", {}, "damaged Parquet"),
    "parquet cut short": (lambda: parquet({"ts": [0], "in": [1], "out": [1]})[:-9], MAPPED, "damaged Parquet"),
    "UTF-16": (VIDUR.encode("utf-16"), {}, "holds zero bytes"),
    "UTF-16 without BOM": (VIDUR.encode("utf-16-le"), {}, "holds zero bytes"),
    "an HTML page": (b"<!DOCTYPE html><html><body>404</body></html>\n", {}, "an HTML page"),
    "a git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", {}, "Git LFS"),
    "YAML": (b"requests:\n  - prompt: 5\n", {}, "no known format"),
    "a number": (b"5\n", {}, "Write a header above it"),
    "null": (b"null\n", {}, "no known format"),
    "a sha256 of another file": (VIDUR.encode(), {"sha256": "0" * 64}, "SHA-256 is"),
    # ---- headers and columns
    "no header": (b"0,10,1\n1,10,1\n", {}, "Write a header above it"),
    "a header alone": (VIDUR.splitlines()[0].encode(), {}, "a header and no rows"),
    "other columns": (b"a,b,c\n1,2,3\n", {}, "no known format"),
    "semicolons": (VIDUR.replace(",", ";").encode(), {}, "stand apart by semicolons"),
    "tabs": (VIDUR.replace(",", "\t").encode(), {}, "stand apart by tabs"),
    "a mapped column that is not there": (VIDUR.encode(), MAPPED, "no column 't"),
    "a column twice": (b"ts,in,out,in\n0,1,1,1\n", MAPPED, "column 'in' stands there twice"),
    "a format that it is not": (VIDUR.encode(), {"format": "azure"}, "which format azure needs"),
    "a unit that contradicts the format": (AZURE.encode(), {"time_unit": "s"}, "times of format azure are iso"),
    "ms or s": (lines({k: v for k, v in MOON.items() if k != "hash_ids"}, MOON), {}, "the unit of timestamp"),
    "times between whole ms": (second(MOON, timestamp=0.5), {}, "not all are integers"),
    "texts for lengths": (lines({"conversations": [{"from": "human", "value": "hello"}]}), {}, "ShareGPT"),
    # ---- rows of CSV
    "a field too few": (vidur("1,5"), {}, ":3: 2 fields where the header has 3"),
    "a field too many": (vidur("1,5,1,"), {}, ":3: 4 fields where the header has 3"),
    "an open quote": (vidur('1,"5,1'), {}, ":3: not CSV"),
    "a lone CR": (vidur("1,5\r5,1"), {}, ":3: 2 fields where the header has 3"),
    "a zero byte in a row": (VIDUR.encode() + b"0," + b"1" * 5000 + b"\0,1\n", {}, ":3: num_prefill_tokens"),
    "bad UTF-8 in a number": (VIDUR.encode() + b"1,\xff\xfe,1\n", {}, ":3: num_prefill_tokens"),
    "bad UTF-8 in a class": (told(kind="?").replace(b"?", b"\xff"), TOLD, ":3: kind"),
    "NaN tokens": (vidur("1,NaN,1"), {}, ":3: num_prefill_tokens 'NaN' is not a number of tokens"),
    "infinite time": (vidur("inf,5,1"), {}, ":3: arrived_at 'inf' is not a number"),
    "negative tokens": (vidur("1,5,-1"), {}, ":3: num_decode_tokens '-1' is negative"),
    "negative time": (vidur("-0.5,5,1"), {}, ":3: arrived_at '-0.5' is negative"),
    "half a token": (vidur("1,5,1.5"), {}, ":3: num_decode_tokens '1.5' is not a whole number"),
    "tokens beyond 32 bits": (vidur("1,2147483648,1"), {}, ":3: num_prefill_tokens '2147483648' is above"),
    "an exponent beyond all": (vidur("1,1e999999999999999999,1"), {}, ":3: num_prefill_tokens"),
    "a time beyond 64 bits": (vidur(f"{TOO_WIDE},5,1"), {}, "is over 292 years if in s"),
    "a time a year from the others": (vidur("1,5,1\n2,5,1\n99999999,5,1"), {}, ":5: its time lies 3.17 years after"),
    "hexadecimal": (vidur("1,0x10,1"), {}, ":3: num_prefill_tokens '0x10' is not a number"),
    "thousands with commas": (vidur('1,"1,000",1'), {}, ":3: num_prefill_tokens '1,000' is not a number"),
    "a unit in the number": (vidur("1s,5,1"), {}, ":3: arrived_at '1s' is not a number"),
    "a date among seconds": (vidur("2023-11-16 18:00:00,5,1"), {}, "write time_unit: iso"),
    "seconds among dates": ((AZURE + "12.5,5,1\n").encode(), {}, ":3: TIMESTAMP '12.5' is not an ISO date"),
    "a day that is none": ((AZURE + "2023-11-31 18:00:00,5,1\n").encode(), {}, ":3: TIMESTAMP '2023-11-31' is no day"),
    "zones mixed": ((AZURE + "2023-11-16 18:00:01Z,5,1\n").encode(), {}, ":3: TIMESTAMP"),
    "American dates": ((AZURE + "11/16/2023 18:00,5,1\n").encode(), {}, ":3: TIMESTAMP"),
    "all rows without tokens": (
        vidur("1,0,0").replace(b"0,10,1", b"0,0,9"),
        {},
        "no usable row of 2: 1 with 0 prompt and 0 output tokens, 1 with 0 prompt tokens",
    ),
    "zero tokens refused": (vidur("1,0,5"), {"zero_lengths": "error"}, ":3: 0 prompt and 5 output tokens"),
    "all rows failed": (told(status="500").replace(b"1,ok", b"1,no"), TOLD, "0 with 0 tokens, 2 failed"),
    "BurstGPT of failures": (
        BURST.encode() + b"1,s,1,m,5,0,5,Failure\n",
        {},
        "no usable row of 1: 1 with 0 output tokens",
    ),
    # ---- JSON
    "JSONL with a broken line": (lines(MOON) + b'{"timestamp": 1,\n', {}, ":2: not JSON"),
    "JSONL with a list in it": (lines(MOON, [1]), {}, ":2: not a JSON object"),
    "JSONL with a number too long": (lines(MOON) + b'{"timestamp": ' + b"1" * 5000 + b"}\n", {}, ":2: "),
    "a key twice": (lines(MOON) + lines(MOON).replace(b"{", b'{"timestamp": 1, ', 1), {}, "'timestamp' is given twice"),
    "a key missing": (second(MOON, output_length=...), {}, ":2: 'output_length' is missing"),
    "a length that is an object": (second(MOON, input_length={"n": 5}), {}, ":2: input_length"),
    "a length that is true": (second(MOON, output_length=True), {}, ":2: output_length True is not a number"),
    "an array that never closes": (b"[" + lines(MOON), MAPPED, "not JSON"),
    "an array of numbers": (b"[1, 2, 3]", {}, "first record is not a JSON object"),
    "an array nested too deep": (b"[" * 200_000, {}, "not JSON"),
    # ---- hash ids and acceptance
    "hash ids for another prompt": (second(MOON, hash_ids=[1, 2, 3]), {}, ":2: hash_ids has 3 ids for 600"),
    "hash ids that are texts": (hashed(["a", "b"]), HASHED, ":2: ids"),
    "negative hash ids": (hashed([1, -2]), HASHED, ":2: ids"),
    "hash ids beyond 64 bits": (hashed([1, 2**63]), HASHED, ":2: ids"),
    "an acceptance above 1": (hashed([1, 2], 1.5), HASHED, ":2: acc 1.5 is no number from 0 to 1"),
    # ---- labels
    "no class": (told(kind=""), TOLD, ":3: kind is missing"),
    "a priority in words": (told(prio="high"), TOLD, ":3: prio 'high' is not a whole number"),
    "a priority beyond 32 bits": (told(prio="9999999999"), TOLD, ":3: prio 9999999999 is beyond"),
    "a turn and a half": (told(turn="1.5"), TOLD, ":3: turn '1.5' is not a whole number"),
    "a negative deadline": (told(gone="-1"), TOLD, ":3: gone '-1' is negative"),
    "a TTFT that is none": (told(first="soon"), TOLD, ":3: first 'soon' is not a number"),
    "a tenant of 300 letters": (told(who="z" * 300), TOLD, ":3: who"),
    "a session with a bell": (told(chat="c\x07"), TOLD, ":3: chat"),
    # ---- what waits for what
    "an id twice": (tree("1,5,1,a,,5"), LINKED, "number 1 and 2 of those used, have the id 'a'"),
    "parents that are no list": (tree('1,5,1,b,"[a",5'), LINKED, ":3: after '[a' is no list of ids"),
    "a parent that is an object": (
        lines({"ts": 0, "in": 5, "out": 1, "me": 1, "after": {"id": 2}, "took": 1}),
        LINKED,
        ":1: after",
    ),
    "a parent that is half": (
        lines({"ts": 0, "in": 5, "out": 1, "me": 1, "after": [0.5], "took": 1}),
        LINKED,
        ":1: after",
    ),
    "an answer of negative time": (tree("1,5,1,b,a,-5"), LINKED, ":3: took '-5' is negative"),
    "a chat of Qwen without its parent": (second(QWEN, parent_chat_id=...), {}, ":2: 'parent_chat_id' is missing"),
    # ---- nested forms
    "calls that are no list": (second(SERVING, sub_requests=5), {}, ":2: sub_requests 5 is no list of calls"),
    "a call without tokens": (second(SERVING, sub_requests=[{"input_toks": 5}]), {}, ":2: output_toks is missing"),
    "a turn without a time": (second(AIPERF, session_id="t", timestamp=...), {}, ":2: timestamp is missing"),
    "a turn of negative delay": (second(AIPERF, timestamp=..., delay=-5), {}, ":2: delay -5 is negative"),
    "a span that ends before it starts": (second(SPAN, endTimeUnixNano=1), {}, ":2: endTimeUnixNano 1 is before"),
    "attributes that are a number": (second(SPAN, attributes=5), {}, ":2: attributes 5 are no attributes"),
    "spans without scopes": (lines({"resourceSpans": [{"scopeSpans": 5}]}), {}, ":1: scopeSpans 5 is no list"),
    "an end before the start": (second(LITE, endTime="2024-01-01T00:00:02Z"), {}, ":2: endTime is before startTime"),
    "completion tokens of null": (second(LITE, completion_tokens=None), {}, ":2: output_tokens is missing"),
    "a conversation told twice": (lines(WEKA, WEKA), {}, ":2: id 'a' is that of an earlier conversation"),
    "a conversation without a name": (second(WEKA, id=5), {}, ":2: id 5 is no name"),
    "a scope of neither kind": (lines(WEKA | {"hash_id_scope": "all"}), {}, ":1: hash_id_scope 'all' is neither"),
    "blocks of no size": (lines(WEKA | {"block_size": 0}), {}, ": block_size 0 is no number of tokens"),
    "blocks of two sizes": (second(WEKA, id="b", block_size=64), {}, ":2: block_size 64 is not the first's, 16"),
    "a conversation that is a number": (second(WEKA, id="b", requests=5), {}, ":2: requests 5 is no list of calls"),
    "a call of no kind": (second(WEKA, id="b", requests=[CALL | {"type": "x"}]), {}, ":2: type 'x' is none of n, s"),
    "a call before its conversation": (second(WEKA, id="b", requests=[CALL | {"t": -1}]), {}, ":2: t -1 is negative"),
    "a call of half a block": (
        second(WEKA, id="b", requests=[CALL | {"hash_ids": [1, "x"]}]),
        {},
        ":2: hash_ids [1, 'x']",
    ),
    "a call without an answer": (second(WEKA, id="b", requests=[{"t": 0, "in": 5}]), {}, ":2: out is missing"),
    "an answer of NaN": (second(WEKA, id="b", requests=[CALL | {"api_time": float("nan")}]), {}, ":2: "),
    "sub-agents without end": (second(WEKA, id="b", requests=deep_agents()), {}, ":2: sub-agents stand in each other"),
    "a conversation in ms": (lines(WEKA), {"time_unit": "ms"}, ": looks like WEKA in another unit"),
    "hashes without answers": (
        lines({"request_id": 0, "type": "text", "input_length": 20, "hash_ids": [1, 2]}),
        {},
        ": looks like a content-hash trace of ServeGen",
    ),
    "a batch job without an answer": (
        lines(JOB, {"request_id": 1, "input_length": 5, "duration": 5}),
        {},
        ":2: 'output_length' is missing",
    ),
    "a session's call as recorded": (
        lines(SERVING | {"sub_requests": [{"input_toks": 9, "output_toks": 2}] * 2}),
        {"replay": "as_recorded"},
        ":1: its time is told by the answer before it alone",
    ),
    # ---- Parquet
    "a null in Parquet": (lambda: parquet({"ts": [0, 1], "in": [5, None], "out": [1, 1]}), MAPPED, " row 2: in is"),
    "texts in Parquet": (lambda: parquet({"ts": [0], "in": ["five"], "out": [1]}), MAPPED, " row 1: in 'five' is not"),
    "NaN in Parquet": (
        lambda: parquet({"ts": [0.0, float("nan")], "in": [5, 5], "out": [1, 1]}),
        MAPPED,
        " row 2: ts nan",
    ),
    "lists in Parquet": (lambda: parquet({"ts": [0], "in": [[5]], "out": [1]}), MAPPED, " row 1: in [5] is not"),
    "no rows in Parquet": (lambda: parquet({"ts": [], "in": [], "out": []}), MAPPED, "a header and no rows"),
    "no column in Parquet": (lambda: parquet({"ts": [0], "in": [5]}), MAPPED, "no column 'out'"),
}


@pytest.mark.parametrize("name", CASES)
def test_hostile_log_draws_one_line(name: str, tmp_path: Path) -> None:
    """Whatever the file holds, reading it ends in one line of at most 400 letters: where, what, what to do."""
    data, fields, expected = CASES[name]
    path = tmp_path / "log.trace"
    path.write_bytes(data() if callable(data) else data)
    with pytest.raises(BatchsimError) as caught:
        rows = read_trace(TraceConfig(str(path), **fields), tmp_path)
        if rows.linked:
            links_of(rows)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable() and len(message) < 400 + len(str(path))
    said = message.removeprefix(str(path))
    assert expected in said
    assert said.endswith(".") and len(said.rstrip(".").split(". ")) >= 2, "what to do stands after what is wrong"
