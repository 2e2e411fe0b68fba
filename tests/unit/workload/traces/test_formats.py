"""Trace formats: told by content, read into the same three columns, everything left out is said."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest

from batchsim.base.errors import TraceError
from batchsim.workload.traces.inspect import inspect_trace
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import Columns, FormatName, TraceConfig
from batchsim.workload.traces.trace_rows import TraceRows
from tests.support.paths import ROOT
from tests.traces import recognised

SAMPLES = ROOT / "tests" / "data" / "traces"
MS = 1_000_000
S = 1_000_000_000


def read(name: str, **fields: Any) -> TraceRows:
    return read_trace(TraceConfig(name, **fields), SAMPLES)


def table(rows: TraceRows) -> list[tuple[int | None, int, int]]:
    times = [None] * len(rows) if rows.arrival_ns is None else rows.arrival_ns.tolist()
    return list(zip(times, rows.prompt_tokens.tolist(), rows.output_tokens.tolist(), strict=True))


def write(folder: Path, text: str | bytes, name: str = "trace.csv") -> TraceConfig:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(data)
    return TraceConfig(str(folder / name))


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("azure2024_style.csv", {}, [(0, 1452, 3), (40_520_000, 584, 3), (998_837_000, 862, 38)]),
        ("azure_lmm2025_style.csv", {}, [(0, 770, 491), (5550 * MS, 949, 126), (6244 * MS, 964, 79)]),
        ("burstgpt_v1_style.csv", {}, [(0, 100, 20), (9500 * MS, 200, 30)]),
        ("burstgpt_v3_style.csv", {}, [(0, 100, 50), (10 * S, 260, 40)]),
        ("mooncake_style.jsonl", {}, [(0, 700, 20), (0, 1024, 1), (3 * S, 1100, 5)]),
        ("guidellm_trace_style.jsonl", {"format": "guidellm"}, [(0, 256, 128), (500 * MS, 512, 64)]),
        ("guidellm_trace_style.jsonl", {"time_unit": "s"}, [(0, 256, 128), (500 * MS, 512, 64)]),
        ("qwen_bailian_style.jsonl", {}, [(0, 40, 12), (61_114 * MS, 70, 13)]),
        ("vidur_replay_style.csv", {}, [(0, 374, 44), (4_314_579_000, 396, 109)]),
        ("vidur_lengths_style.csv", {}, [(None, 3772, 54), (None, 11, 306)]),
        ("vidur_lengths_style.csv", {"format": "vidur"}, [(None, 3772, 54), (None, 11, 306)]),
    ],
)
def test_formats_are_read(name: str, fields: dict[str, Any], expected: list[tuple[int | None, int, int]]) -> None:
    """Each format gives its arrivals from the first row on, in ns, its lengths, and a name that scenarios take."""
    rows = read(name, **fields)
    assert table(rows) == expected
    assert rows.format in get_args(FormatName)


@pytest.mark.parametrize("name", sorted({*get_args(FormatName)} - {"auto", "mapping"}))
def test_a_format_by_its_name_asks_for_its_columns(name: Any) -> None:
    """Every name that a scenario may give stands for columns, and a file of other ones is refused by them."""
    with pytest.raises(TraceError, match=rf"no column '.+', which format {name} needs"):
        read("splitwise_sim_style.csv", format=name)


@pytest.mark.parametrize(
    ("name", "arrival", "prompt", "output", "unit", "expected"),
    [
        ("blis_tracev2_style.csv", "arrival_time_us", "input_tokens", "output_tokens", "us", [0, 150 * MS]),
        ("splitwise_sim_style.csv", "arrival_timestamp", "prompt_size", "token_size", "s", [0, 2250 * MS]),
        ("qwen_bailian_style.jsonl", "timestamp", "input_length", "output_length", "s", [0, 61_114 * MS]),
        ("azure2024_style.csv", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "iso", [0, 40_520_000, 998_837_000]),
    ],
)
def test_mapping_reads_other_tools(
    name: str, arrival: str, prompt: str, output: str, unit: Any, expected: list[int]
) -> None:
    """Files of other tools are read by naming three columns and the unit."""
    rows = read(name, columns=Columns(arrival=arrival, prompt=prompt, output=output), time_unit=unit)
    assert rows.arrival_ns is not None
    assert rows.arrival_ns.tolist() == expected
    assert rows.format == "mapping"


@pytest.mark.parametrize(
    ("name", "message", "advice"),
    [
        ("blis_tracev2_style.csv", "BLIS TraceV2", "arrival: arrival_time_us"),
        ("servegen_chunk_style.csv", "ServeGen", "rates, not requests"),
        ("sharegpt_style.json", "ShareGPT", "count their tokens"),
        ("splitwise_sim_style.csv", "splitwise-sim", "prompt: prompt_size"),
        ("vllm_custom_style.jsonl", "vLLM custom", "count their tokens"),
    ],
)
def test_known_formats_without_reader_are_named(name: str, message: str, advice: str) -> None:
    """A known format that is not read is refused by its name, with what to do instead."""
    with pytest.raises(TraceError) as error:
        read(name)
    assert message in str(error.value)
    assert advice in str(error.value)


def test_a_file_is_told_by_its_columns() -> None:
    """The format comes with the columns it was told by; an ambiguous file says so."""
    assert recognised(SAMPLES / "azure2024_style.csv").startswith("azure: CSV with the columns TIMESTAMP")
    assert recognised(SAMPLES / "mooncake_style.jsonl") == "mooncake: integer timestamp beside hash_ids"
    assert recognised(SAMPLES / "guidellm_trace_style.jsonl") == "ambiguous: timestamp, input_length"


def test_unit_that_cannot_be_told_shows_both_rates() -> None:
    """Without hash_ids the unit of timestamp is asked for, with the load that each would mean."""
    with pytest.raises(TraceError, match=r"ms would mean 2000 requests/s, s 2\. Write time_unit"):
        read("guidellm_trace_style.jsonl")


def test_mooncake_with_a_fraction_is_not_taken_as_ms(tmp_path: Path) -> None:
    """A file that looks like ms from its first row but has fractions later is refused, not read 1000 times too fast."""
    line = '{"timestamp": %s, "input_length": 5, "output_length": 5, "hash_ids": [0]}\n'
    config = write(tmp_path, line % 0 + line % 0.5)
    with pytest.raises(TraceError, match="not all are integers"):
        read_trace(config, tmp_path)


def test_stated_unit_wins_over_the_mooncake_guess() -> None:
    """A stated time_unit is used for timestamp files, whatever they look like."""
    rows = read("mooncake_style.jsonl", time_unit="s")
    assert rows.arrival_ns is not None
    assert rows.arrival_ns[-1] == 3000 * S


def test_unit_against_the_format_is_refused() -> None:
    """A stated unit that contradicts a format with one unit is an error, not ignored."""
    with pytest.raises(TraceError, match="times of format azure are iso, not ms"):
        read("azure2024_style.csv", time_unit="ms")
    with pytest.raises(TraceError, match="the file has no times"):
        read("vidur_lengths_style.csv", time_unit="s")


def test_sessions_are_refused_or_counted() -> None:
    """Later turns and text prompts have a line and a reason; dropped on request, they are counted."""
    with pytest.raises(TraceError, match=r"style\.jsonl:2: a later turn of a session"):
        read("aiperf_multiturn_style.jsonl", format="mooncake")
    rows = read("aiperf_multiturn_style.jsonl", format="mooncake", on_broken="drop")
    assert table(rows) == [(0, 300, 40), (500 * MS, 1000, 10)]
    assert any(note.startswith("2 of 4 rows dropped as broken") for note in rows.notes)
    assert any(note.startswith("session_id not used") for note in rows.notes)


def test_text_prompts_have_their_own_reason(tmp_path: Path) -> None:
    """A prompt given as text is named as such where a length is wanted."""
    config = write(tmp_path, '{"timestamp": 0, "text_input": "Hi", "output_length": 2}\n', "t.jsonl")
    with pytest.raises(TraceError, match="prompts as text"):
        read_trace(config, tmp_path)
    with pytest.raises(TraceError, match=r"t\.jsonl:1: gives its prompt as text"):
        read_trace(TraceConfig(config.path, format="mooncake"), tmp_path)


def test_unused_columns_are_noted() -> None:
    """Columns with a meaning that is not simulated are named in the notes."""
    assert any("hash_ids not used" in note for note in read("mooncake_style.jsonl", prefix="ignore").notes)
    assert any("NumImages not used" in note for note in read("azure_lmm2025_style.csv").notes)


def test_zero_lengths() -> None:
    """Rows of 0 tokens are dropped and counted, kept as prefill-only where they have a prompt, or refused."""
    told = "2 of 4 rows dropped: 1 with 0 output tokens (failed), 1 with 0 prompt and 0 output tokens (failed)"
    assert told in read("burstgpt_v1_style.csv").notes
    kept = read("burstgpt_v1_style.csv", zero_lengths="prefill_only")
    assert table(kept)[1] == (7 * S, 300, 1)
    assert [note for note in kept.notes if "prefill only" in note or "dropped" in note] == [
        "1 of 4 rows dropped: 1 with 0 prompt and 0 output tokens (failed)",
        "1 of 4 rows with 0 output tokens given 1 (prefill only)",
    ]
    with pytest.raises(TraceError, match=r"style\.csv:3: 300 prompt and 0 output tokens"):
        read("burstgpt_v1_style.csv", zero_lengths="error")


def test_zero_lengths_are_told_by_kind(tmp_path: Path) -> None:
    """Without a prompt, an output or both, and of failed requests where the log says so; also where none is left."""
    columns = Columns("in", "out", "t", status="end")
    config = TraceConfig("t.csv", columns=columns, time_unit="s", failed="keep")
    lines = ["t,in,out,end", "0,0,5,ok", "1,5,0,ok", "2,5,0,cancelled", "3,0,0,ok", "4,0,0,ok", "5,5,5,error"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    kinds = (
        "1 with 0 output tokens, 1 with 0 output tokens ('cancelled'), 2 with 0 prompt and 0 output tokens, 1 with 0"
    )
    assert f"5 of 6 rows dropped: {kinds} prompt tokens" in read_trace(config, tmp_path).notes
    (tmp_path / "t.csv").write_text("\n".join(lines[:-1]))
    with pytest.raises(TraceError, match=rf"no usable row of 5: {re.escape(kinds)} prompt tokens, 0 broken"):
        read_trace(config, tmp_path)


CSV = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,1\n1.5,20,2\n"


@pytest.mark.parametrize(
    "data",
    [
        CSV.encode(),
        CSV.rstrip("\n").encode(),
        CSV.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + CSV.encode(),
        gzip.compress(CSV.encode(), mtime=0),
        CSV.replace("arrived_at,", " arrived_at ,").encode(),
        CSV.replace("\n0", "\n\n0").encode() + b"\n\n",
        CSV.replace("10,1", '"10","1"').encode(),
        CSV.replace("10,1", "10.0,1e0").encode(),
    ],
    ids=["plain", "no final newline", "CRLF", "BOM", "gzip", "spaces", "blank lines", "quotes", "floats"],
)
def test_spellings_of_one_file(tmp_path: Path, data: bytes) -> None:
    """Line ends, BOM, compression, blank lines and spellings of numbers do not change what is read."""
    rows = read_trace(write(tmp_path, data), tmp_path)
    assert table(rows) == [(0, 10, 1), (1500 * MS, 20, 2)]


def test_json_array_and_text_that_is_not_utf8(tmp_path: Path) -> None:
    """A JSON array reads like JSON lines; bytes that are not UTF-8 harm only the columns that are read."""
    items = [{"t": "0.1", "in": 3, "out": 1}, {"t": 0.3, "in": 4, "out": 2}]
    columns = Columns(arrival="t", prompt="in", output="out")
    config = write(tmp_path, json.dumps(items, indent=1), "a.json")
    rows = read_trace(TraceConfig(config.path, columns=columns, time_unit="s"), tmp_path)
    assert table(rows) == [(0, 3, 1), (200 * MS, 4, 2)]
    config = write(tmp_path, b"who,t,in,out\nJos\xe9,1,3,1\n")
    rows = read_trace(TraceConfig(config.path, columns=columns, time_unit="s"), tmp_path)
    assert table(rows) == [(0, 3, 1)]


def test_parquet(tmp_path: Path) -> None:
    """Parquet is read by mapping: numbers with a unit, timestamp columns as iso, exact to the ns."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    stamps = [1_700_000_000_123_456_789, 1_700_000_000_123_456_999]
    path = tmp_path / "t.parquet"
    stamp = pa.array(stamps, pa.timestamp("ns", "Europe/Berlin"))
    pq.write_table(pa.table({"at": stamp, "s": [0.1, 0.3], "in": [5, 6], "out": [1, 2]}), path)
    by_stamp = TraceConfig(str(path), columns=Columns(arrival="at", prompt="in", output="out"), time_unit="iso")
    assert table(read_trace(by_stamp, tmp_path)) == [(0, 5, 1), (210, 6, 2)]
    by_number = TraceConfig(str(path), columns=Columns(arrival="s", prompt="in", output="out"), time_unit="s")
    assert table(read_trace(by_number, tmp_path)) == [(0, 5, 1), (200 * MS, 6, 2)]
    with pytest.raises(TraceError, match="write time_unit: iso"):
        read_trace(TraceConfig(str(path), columns=by_stamp.columns, time_unit="ms"), tmp_path)
    with pytest.raises(TraceError, match=r"no column 'ts'; it has 'at', 's', 'in', 'out'"):
        columns = Columns(arrival="ts", prompt="in", output="out")
        read_trace(TraceConfig(str(path), columns=columns, time_unit="ms"), tmp_path)


def test_order_and_equal_times(tmp_path: Path) -> None:
    """An unsorted file is sorted stably and counted from its earliest row, both said in the notes."""
    config = write(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n5,1,1\n3,2,1\n5,3,1\n3,4,1\n5,3,1\n")
    rows = read_trace(config, tmp_path)
    assert table(rows) == [(0, 2, 1), (0, 4, 1), (2 * S, 1, 1), (2 * S, 3, 1), (2 * S, 3, 1)]
    assert any("2 steps back" in note for note in rows.notes)
    assert any("3 of 5 rows arrive at the same time as the row before" in note for note in rows.notes)


def test_slices() -> None:
    """`rows` counts data rows of the file, `time` from the first arrival; both begin anew at 0."""
    assert table(read("azure2024_style.csv", rows=(1, 3))) == [(0, 584, 3), (958_317_000, 862, 38)]
    assert table(read("azure2024_style.csv", time=(40 * MS, 998 * MS))) == [(0, 584, 3)]
    beyond = read("azure2024_style.csv", rows=(2, 9))
    assert len(beyond) == 1
    assert "rows [2, 9] asked, the file ends after 1 of them" in beyond.notes
    assert any("the trace lasts 999 ms only" in n for n in read("azure2024_style.csv", time=(0, 2 * S)).notes)


def test_jitter_spreads_ticks_and_keeps_order() -> None:
    """Jitter moves rows within the interval, keeps file order, and depends on the seed alone."""
    config = TraceConfig("mooncake_style.jsonl", jitter=3 * S)
    one, again, other = (read_trace(config, SAMPLES, seed) for seed in (1, 1, 2))
    assert one.arrival_ns is not None
    assert table(one) == table(again) != table(other)
    assert one.prompt_tokens.tolist() == [700, 1024, 1100]
    assert 0 == one.arrival_ns[0] < one.arrival_ns[1] < one.arrival_ns[2] < 6 * S


def test_sha256_is_of_the_uncompressed_content(tmp_path: Path) -> None:
    """The hash is that of the content, gzipped or not; another hash is refused with both shown."""
    data = (SAMPLES / "azure2024_style.csv").read_bytes()
    digest, wrong = hashlib.sha256(data).hexdigest(), "ab" * 32
    with pytest.raises(TraceError, match=f"SHA-256 is {digest}, expected {wrong}"):
        read("azure2024_style.csv", sha256=wrong)
    assert len(read("azure2024_style.csv", sha256=digest.upper())) == 3
    config = write(tmp_path, gzip.compress(data))
    assert len(read_trace(TraceConfig(config.path, sha256=digest), tmp_path)) == 3


def test_missing_file_says_what_to_fetch() -> None:
    """A missing file's error names the place to fetch it from and its hash."""
    digest = "ab" * 32
    message = rf"none\.csv: no such file\. Fetch there \(SHA-256 {digest}\) and put it at none\.csv"
    with pytest.raises(TraceError, match=message):
        read("none.csv", fetch="there", sha256=digest)
    with pytest.raises(TraceError, match=r"none\.csv: no such file\. Correct trace\.path\.$"):
        read("none.csv")


def test_settings_as_a_scenario_writes_them() -> None:
    """Quantities carry units, unknown keys and a scale without `by` are refused."""
    adapter = pydantic.TypeAdapter(TraceConfig)
    config = adapter.validate_json('{"path": "x", "time": ["1min", "2min"], "jitter": "3s", "rows": null}')
    assert (config.time, config.jitter) == ((60 * S, 120 * S), 3 * S)
    for bad in (
        '{"path": "x", "factor": 3}',
        '{"path": "x", "rate_scale": {"factor": 3}}',
        '{"path": "x", "jitter": 3}',
    ):
        with pytest.raises(pydantic.ValidationError):
            adapter.validate_json(bad)


def test_inspect_counts_and_applies_the_scale() -> None:
    """The summary holds rows, rate, lengths and notes, after rate_scale, as plain JSON."""
    summary = inspect_trace(TraceConfig("mooncake_style.jsonl"), SAMPLES)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["rows"] == 3
    assert summary["arrivals"]["rate_rps"] == pytest.approx(2 / 3)
    assert summary["prompt_tokens"]["p50"] == 1024
    assert inspect_trace(TraceConfig("vidur_lengths_style.csv"), SAMPLES)["arrivals"] is None
