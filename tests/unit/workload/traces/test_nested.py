"""Logs of which a record is no row: agents' sessions, spans, logs with dates; what rows of known formats wait for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchsim.base.errors import TraceError
from batchsim.workload.replayed_sessions import links_of
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.traces.trace_rows import TraceRows
from tests.support.paths import ROOT

SAMPLES = ROOT / "tests" / "data" / "traces"
MS = 1_000_000


def read(folder: Path, records: list[object], **fields: object) -> TraceRows:
    (folder / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return read_trace(TraceConfig("log.jsonl", **fields), folder)  # type: ignore[arg-type]


def table(rows: TraceRows) -> list[tuple[int, int, int]]:
    assert rows.arrival_ns is not None
    return list(zip(rows.arrival_ns.tolist(), rows.prompt_tokens.tolist(), rows.output_tokens.tolist(), strict=True))


def test_a_session_of_llm_serving_sim_is_its_calls() -> None:
    """Each call is a row of its session, sent its tool's time after the answer before; flat lines stand beside."""
    rows = read_trace(TraceConfig("llmservingsim_style.jsonl"), SAMPLES)
    assert rows.format == "LLMServingSim"
    assert table(rows) == [(0, 1472, 133), (4_940_260, 1472, 133), (4_940_260, 1582, 125)]
    assert rows.labels["session"].tolist() == [-1, 0, 0]
    assert rows.labels["delay"].tolist() == [-1, -1, 127_348_767]


def test_a_later_turn_of_aiperf_adds_to_the_turns_before(tmp_path: Path) -> None:
    """The prompt of a turn timed by its delay is what came before and its own text; the next comes after its delay."""
    lines = (SAMPLES / "aiperf_multiturn_style.jsonl").read_text().splitlines()
    rows = read(
        tmp_path,
        [
            json.loads(lines[0]),
            json.loads(lines[1]),
            {"session_id": "a", "delay": 0, "input_length": 1, "output_length": 2},
        ],
    )
    assert table(rows) == [(0, 300, 40), (0, 300 + 40 + 150, 20), (0, 511, 2)]
    assert rows.labels["delay"].tolist() == [-1, 2000 * MS, 0]


def test_spans_of_open_telemetry(tmp_path: Path) -> None:
    """A gen_ai span is a request with its duration, by attributes as a list or an object; a tool's span is none."""
    number = {"intValue": "70"}
    spans = [
        {
            "startTimeUnixNano": "1000",
            "endTimeUnixNano": "5000",
            "status": {},
            "attributes": [
                {"key": "gen_ai.usage.input_tokens", "value": number},
                {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "7"}},
                {"key": "gen_ai.conversation.id", "value": {"stringValue": "c"}},
            ],
        },
        {"startTimeUnixNano": "5000", "endTimeUnixNano": "5001", "attributes": [{"key": "tool", "value": number}]},
    ]
    other = {
        "startTimeUnixNano": 9000,
        "endTimeUnixNano": 9500,
        "status": {"code": "STATUS_CODE_ERROR"},
        "attributes": {"gen_ai.usage.input_tokens": 5},
    }
    rows = read(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}, other])
    assert table(rows) == [(0, 70, 7)]
    assert (rows.labels["e2e"].tolist(), rows.texts["session"]) == ([4000], ("c",))
    assert "1 of 2 rows dropped: they failed (1 'error')" in rows.notes


def test_requests_logged_by_litellm(tmp_path: Path) -> None:
    """Dates become the arrival, TTFT and E2E of a request; failures are left out and counted."""
    record = {
        "startTime": "2026-01-01T00:00:00Z",
        "completionStartTime": "2026-01-01T00:00:00.250Z",
        "endTime": "2026-01-01T00:00:02Z",
        "prompt_tokens": 10,
        "completion_tokens": 20,
        "status": "success",
        "session_id": "s",
    }
    later = record | {"startTime": "2026-01-01T00:00:01Z", "completionStartTime": None}
    rows = read(tmp_path, [record, later, record | {"status": "failure"}])
    assert table(rows) == [(0, 10, 20), (1000 * MS, 10, 20)]
    assert rows.labels["ttft"].tolist() == [250 * MS, -1]
    assert rows.labels["e2e"].tolist() == [2000 * MS, 1000 * MS]


def test_conversations_of_weka_are_trees_of_calls() -> None:
    """A call waits for the answer before it and for the sub-agents in between that were not launched to run beside it;
    the ids of one conversation's blocks are no other's."""
    rows = read_trace(TraceConfig("weka_style.jsonl"), SAMPLES)
    assert rows.format == "WEKA"
    assert table(rows) == [
        (0, 200, 30),
        (500 * MS, 128, 3),
        (2500 * MS, 70, 5),
        (2600 * MS, 64, 8),
        (4250 * MS, 330, 12),
        (9000 * MS, 128, 4),
    ]
    links = links_of(rows)
    assert links.parents == ((), (), (0,), (0,), (0, 2), (1,))
    assert links.wait_ns.tolist() == [-1, -1, 500 * MS, 600 * MS, 750 * MS, 1500 * MS]
    assert rows.labels["task"].tolist() == [0, 1, 0, 0, 0, 1]
    assert rows.labels["ttft"].tolist() == [-1, -1, 250 * MS, -1, -1, -1]
    assert rows.hash_ids is not None and rows.hash_ids.block_tokens == 64
    assert rows.hash_ids.reused_share == pytest.approx(5 / 14)


def test_conversations_of_weka_may_share_their_blocks(tmp_path: Path) -> None:
    """Equal ids of scope global are one block in all conversations."""
    lines = [json.loads(line) for line in (SAMPLES / "weka_style.jsonl").read_text().splitlines()]
    rows = read(tmp_path, [each | {"hash_id_scope": "global"} for each in lines])
    assert rows.hash_ids is not None and rows.hash_ids.reused_share == pytest.approx(7 / 14)


def test_nested_forms_as_recorded() -> None:
    """Calls with times of their own are sent at these and wait for nothing; a call that has none is refused."""
    rows = read_trace(TraceConfig("weka_style.jsonl", replay="as_recorded"), SAMPLES)
    assert rows.arrival_ns is not None and rows.arrival_ns[-1] == 9000 * MS and not rows.linked
    for name, line in (("llmservingsim_style.jsonl", 2), ("aiperf_multiturn_style.jsonl", 2)):
        with pytest.raises(TraceError, match=rf":{line}: its time is told by the answer before it alone"):
            read_trace(TraceConfig(name, replay="as_recorded"), SAMPLES)


def test_a_batch_job_of_servegen_is_lengths_only() -> None:
    """Its rows have no arrivals, and its traces of hashes no outputs."""
    rows = read_trace(TraceConfig("servegen_offline_style.jsonl"), SAMPLES)
    assert (rows.format, rows.arrival_ns) == ("ServeGen offline", None)
    assert (rows.prompt_tokens.tolist(), rows.output_tokens.tolist()) == ([61, 54], [2370, 2031])


@pytest.mark.parametrize(
    ("record", "blamed"),
    [
        ({"arrival_time_ns": 0, "sub_requests": 5}, "sub_requests 5 is no list of calls"),
        ({"arrival_time_ns": 0, "sub_requests": [1]}, "is no list of calls"),
        ({"arrival_time_ns": 0, "sub_requests": [{"input_toks": 1, "output_toks": 1}]}, "session_id is missing"),
        ({"arrival_time_ns": -1, "sub_requests": []}, "arrival_time_ns -1 is negative"),
        ({"session_id": "a", "timestamp": None, "input_length": 1, "output_length": 1}, "timestamp is missing"),
        ({"session_id": "a", "delay": 5, "input_length": 1, "output_length": 1}, "timestamp is missing"),
        (
            {"session_id": "a", "timestamp": 0, "input_length": "x", "output_length": 1},
            "input_length 'x' is not a number",
        ),
        ({"session_id": "a", "timestamp": 0, "input_length": 1}, "output_length is missing"),
        ({"resourceSpans": {}}, "resourceSpans {} is no list of objects"),
        ({"resourceSpans": [{"scopeSpans": [{}]}]}, "spans is missing"),
        ({"startTimeUnixNano": 1, "attributes": {"gen_ai.usage.input_tokens": 1}}, "endTimeUnixNano is missing"),
        (
            {"startTimeUnixNano": 9, "endTimeUnixNano": 1, "attributes": {"gen_ai.usage.input_tokens": 1}},
            "endTimeUnixNano 1 is before startTimeUnixNano 9",
        ),
        ({"startTimeUnixNano": 9, "attributes": "x"}, "attributes 'x' are no attributes"),
        (
            {"startTime": "2026-01-01T00:00:00Z", "endTime": "x", "prompt_tokens": 1, "completion_tokens": 1},
            "endTime 'x' is not an ISO date",
        ),
    ],
)
def test_record_that_cannot_be_read(tmp_path: Path, record: object, blamed: str) -> None:
    """A record that is broken is one line with its place, whatever lies inside it."""
    with pytest.raises(TraceError) as caught:
        read(tmp_path, [record])
    assert blamed in str(caught.value) and "log.jsonl:1: " in str(caught.value) and "\n" not in str(caught.value)


def test_chats_name_the_one_they_go_on_with() -> None:
    """Qwen-Bailian's rows wait for their parent, -1 being none; as recorded they wait for none and it is said."""
    rows = read_trace(TraceConfig("qwen_bailian_style.jsonl"), SAMPLES)
    assert rows.texts["id"] == ("55", "159")
    assert (rows.labels["parent"].tolist(), rows.texts["parent"]) == ([-1, 0], ('["55"]',))
    recorded = read_trace(TraceConfig("qwen_bailian_style.jsonl", replay="as_recorded"), SAMPLES)
    assert not recorded.linked
    assert "chat_id not used: turns of a chat are taken as independent requests" in recorded.notes


def test_conversations_of_burstgpt_wait_for_their_answers() -> None:
    """Rows of one session follow each other, with the elapsed time of each answer; rows of the API have no session."""
    rows = read_trace(TraceConfig("burstgpt_v3_style.csv", zero_lengths="prefill_only"), SAMPLES)
    assert rows.labels["session"].tolist() == [0, -1, 0]
    assert rows.labels["e2e"].tolist() == [1500 * MS, 2000 * MS, 3250 * MS]
