"""What the hash_ids of a trace say prompts share: read, told apart, cut, scaled and carried as JSON."""

from __future__ import annotations

import json
import os
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError, TraceError
from batchsim.scenario import Point, load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.build import build_workload
from batchsim.workload.laws import FixedTokens
from batchsim.workload.lengths import Lengths, TraceLengths
from batchsim.workload.open_loop import OpenWorkload
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.sharing import SharedPrefix
from batchsim.workload.traces.inspect import inspect_trace
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.scale import rescale
from batchsim.workload.traces.trace_config import Columns, RateScale, TraceConfig
from batchsim.workload.traces.trace_rows import UNUSED_HASH_IDS, TraceRows
from batchsim.workload.workload_config import ClosedLoop, TraceArrivals, TrafficClass, WorkloadConfig
from tests.support.paths import ROOT
from tests.traces import tiled

SAMPLES = ROOT / "tests" / "data" / "traces"
MOONCAKE = TraceConfig("mooncake_style.jsonl")
Segments = tuple[tuple[int, int, int], ...]


def ids(rows: TraceRows) -> list[list[int]]:
    assert rows.hash_ids is not None
    return [rows.hash_ids.row(i) for i in range(len(rows))]


def write(folder: Path, *records: dict[str, Any]) -> TraceConfig:
    lines = [{"timestamp": 1000 * i, "output_length": 5, **record} for i, record in enumerate(records)]
    (folder / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return TraceConfig(str(folder / "t.jsonl"))


def built(trace: TraceConfig, *, rows: TraceRows | None = None, **fields: Any) -> OpenWorkload:
    arrivals = fields.pop("arrivals", TraceArrivals())
    config = WorkloadConfig(arrivals, 64, trace=trace, **fields)
    workload = build_workload(config, load={}, seed=0, max_model_len=100_000, base=SAMPLES, rows=rows)
    assert isinstance(workload, OpenWorkload)
    return workload


def segments(workload: OpenWorkload) -> list[Segments | None]:
    sent = sorted(workload.arrivals(), key=lambda arrival: arrival.request.id)
    return [None if a.request.tokens is None else a.request.tokens.segments for a in sent]


def test_equal_ids_are_equal_text_and_the_last_block_is_cut() -> None:
    """Prompts of 700, 1024 and 1100 tokens in blocks 0 1, 0 2 and 0 2 3 of 512: all begin alike, two go on alike."""
    (first, second, third) = segments(built(MOONCAKE))
    assert first is not None and second is not None and third is not None
    assert [length for _, _, length in first] == [512, 188]
    assert [length for _, _, length in third] == [512, 512, 76]
    assert first[0] == second[0] == third[0] and second[1] == third[1] != first[1]
    streams = {stream for text in (first, second, third) for stream, _, _ in text}
    assert len(streams) == 4 and all(stream % 2 == 0 for stream in streams)


@pytest.mark.parametrize(("name", "size"), [("mooncake_style.jsonl", 512), ("qwen_bailian_style.jsonl", 16)])
def test_formats_know_the_tokens_of_an_id(name: str, size: int) -> None:
    """Mooncake hashes 512 tokens, Qwen-Bailian 16; the notes say so, and how much is seen again."""
    rows = read_trace(TraceConfig(name), SAMPLES)
    assert rows.hash_ids is not None and rows.hash_ids.block_tokens == size
    (note,) = [note for note in rows.notes if "by hash_ids" in note]
    assert f"in units of {size} tokens: {100 * rows.hash_ids.reused_share:.1f} %" in note


def test_inspect_shows_what_is_reused() -> None:
    """Of the 7 blocks of the three prompts 3 stand in an earlier one; a trace without ids has no such figure."""
    assert inspect_trace(MOONCAKE, SAMPLES)["hash_ids"] == {"block_tokens": 512, "reused_share": pytest.approx(3 / 7)}
    assert inspect_trace(TraceConfig("azure2024_style.csv"), SAMPLES)["hash_ids"] is None


def test_other_tools_name_the_column_and_the_size(tmp_path: Path) -> None:
    """By mapping, ids come from any column; WEKA's, of full blocks of 64 only, leave the rest of a prompt its own."""
    config = write(tmp_path, {"in": 200, "h": [7, 8, 9]}, {"in": 330, "h": [7, 8, 9, 11, 12]}, {"in": 60, "h": []})
    columns = Columns(prompt="in", output="output_length", arrival="timestamp", hash_ids="h")
    config = TraceConfig(config.path, columns=columns, time_unit="ms", hash_id_block_size=64)
    one, two, none = segments(built(config))
    assert one is not None and two is not None and none is None
    assert [length for _, _, length in one] == [64, 64, 64, 8] and [s[2] for s in two] == [64] * 5 + [10]
    assert one[:3] == two[:3] and one[3][0] != two[5][0]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"input_length": 700, "hash_ids": [0]}, None),  # only full blocks have ids
        ({"input_length": 700, "hash_ids": [0, 1, 2]}, "3 ids for 700 prompt tokens, which are 2 blocks of 512"),
        ({"input_length": 1024, "hash_ids": [0]}, "1 ids for 1024 prompt tokens, which are 2 blocks"),
        ({"input_length": 700, "hash_ids": [0, -1]}, "is not a list of whole numbers"),
        ({"input_length": 700, "hash_ids": [0, 1.5]}, "is not a list of whole numbers"),
        ({"input_length": 700, "hash_ids": [0, True]}, "is not a list of whole numbers"),
        ({"input_length": 700, "hash_ids": [0, 2**63]}, "is not a list of whole numbers"),
        ({"input_length": 700, "hash_ids": None}, "hash_ids None is not a list"),
        ({"input_length": 700, "hash_ids": "[0, 4]"}, None),
        ({"input_length": 700, "hash_ids": "0 4"}, "hash_ids '0 4' is not a list"),
        ({"input_length": 700}, "'hash_ids' is missing"),
    ],
)
def test_ids_must_fit_the_prompt(tmp_path: Path, record: dict[str, Any], complaint: str | None) -> None:
    """As many ids as blocks, the cut one with or without; another number, or no numbers, is a broken row."""
    config = write(tmp_path, {"input_length": 5, "hash_ids": [0]}, record)
    if complaint is None:
        assert len(read_trace(config, tmp_path)) == 2
        return
    with pytest.raises(TraceError, match=r"t\.jsonl:2: ") as error:
        read_trace(config, tmp_path)
    assert complaint in str(error.value) and "\n" not in str(error.value)
    dropped = read_trace(TraceConfig(config.path, on_broken="drop"), tmp_path)
    assert ids(dropped) == [[0]]


def test_ids_may_be_any_64_bit_hash(tmp_path: Path) -> None:
    """Large numbers are told apart as well as small ones, and renumbered in their order."""
    config = write(tmp_path, *({"input_length": 600, "hash_ids": [5, big]} for big in (2**63 - 1, 2**63 - 2)))
    assert ids(read_trace(config, tmp_path)) == [[0, 2], [0, 1]]


def test_ignore_and_demand() -> None:
    """`ignore` shares nothing and says so; `hash_ids` refuses a trace without."""
    rows = read_trace(TraceConfig(MOONCAKE.path, prefix="ignore"), SAMPLES)
    assert rows.hash_ids is None and any("prompts are taken as sharing nothing" in note for note in rows.notes)
    assert segments(built(TraceConfig(MOONCAKE.path, prefix="ignore"))) == [None, None, None]
    with pytest.raises(TraceError, match=r"has no hash_ids that format azure knows; it has 'TIMESTAMP'"):
        read_trace(TraceConfig("azure2024_style.csv", prefix="hash_ids"), SAMPLES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hash_id_block_size": 16, "prefix": "ignore"}, "no hash_ids are read"),
        ({"columns": Columns("p", "o", hash_ids="h")}, "does not say how many tokens an id stands for"),
        ({"columns": Columns("p", "o"), "prefix": "hash_ids"}, "needs columns.hash_ids"),
        ({"columns": Columns("p", "o"), "hash_id_block_size": 16}, "no hash_ids are read"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    """A size without ids, or ids without a size, is an error and not a guess."""
    with pytest.raises(ValueError, match=message):
        TraceConfig("t", **fields)


def test_slices_and_order_keep_each_rows_ids(tmp_path: Path) -> None:
    """Rows that are sorted, sliced and left out take their ids along."""
    blocks = [{"timestamp": at, "input_length": 5, "hash_ids": [100 + at]} for at in (3, 1, 2, 0)]
    config = write(tmp_path, *blocks)
    whole = read_trace(config, tmp_path)
    assert ids(whole) == [[0], [1], [2], [3]]
    late = read_trace(TraceConfig(config.path, time=(2_000_000, 9_000_000)), tmp_path)
    assert ids(late) == [[0], [1]] and late.hash_ids is not None and late.hash_ids.span == 2
    workload = built(config, rows=whole, requests=2)
    assert workload.notes[-1].startswith("2 of 4 rows left out: beyond requests; of the others' units 0.0 %")


def test_copies_of_a_trace_share_nothing_with_each_other() -> None:
    """Overlaid or repeated, a copy has the same pattern of sharing inside and no text in common with another."""
    rows = read_trace(MOONCAKE, SAMPLES)
    for many in (rescale(rows, RateScale(3, "overlay"), 0), tiled(tiled(rows, 6), 12)):
        assert all(row in ids(many) for row in ids(rows))
        texts = [text for row in ids(many) for text in row]
        assert len(set(texts)) == len(many) // 3 * 4 and len(texts) == len(many) // 3 * 7
    assert "prompts shared inside a copy only" in rescale(rows, RateScale(3, "overlay"), 0).notes[-1]
    thinned = rescale(rows, RateScale(0.5, "thin"), 2)
    assert all(row in ids(rows) for row in ids(thinned))


def test_prompts_that_are_not_the_traces_own_have_no_ids() -> None:
    """Drawn lengths, and rows drawn with replacement, share nothing and say so; those of classes likewise."""
    seven = Lengths(FixedTokens(7), FixedTokens(3))
    for workload in (
        built(MOONCAKE, lengths=seven),
        built(MOONCAKE, classes={"a": TrafficClass(0.5, lengths=seven), "b": TrafficClass(0.5, lengths=seven)}),
        built(MOONCAKE, arrivals=PoissonArrivals(5.0), lengths=TraceLengths(), requests=4),
    ):
        assert set(segments(workload)) == {None} and UNUSED_HASH_IDS in workload.notes
    loop = WorkloadConfig(ClosedLoop(2, 0), 64, TraceLengths(), trace=MOONCAKE, requests=4)
    assert UNUSED_HASH_IDS in build_workload(loop, load={}, seed=0, max_model_len=9999, base=SAMPLES).notes
    alone = {"rows": TrafficClass(1.0), "nobody": TrafficClass(0.0, lengths=seven)}
    assert segments(built(MOONCAKE, classes=alone)) == segments(built(MOONCAKE))


def test_two_words_on_what_is_shared_are_refused() -> None:
    """A trace with ids and a shared prefix contradict each other, unless the ids are ignored."""
    prefix = SharedPrefix(2, 100)
    with pytest.raises(ScenarioError, match="hash_ids say what prompts share, and so does shared_prefix"):
        built(MOONCAKE, shared_prefix=prefix)
    texts = segments(built(TraceConfig(MOONCAKE.path, prefix="ignore"), shared_prefix=prefix))
    assert [sum(s[2] for s in text or ()) for text in texts] == [800, 1124, 1200]


SCENARIO = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000, block_size: 16}
workload:
  arrivals: {kind: trace}
  trace: {path: mooncake_style.jsonl, rate_scale: {factor: 2, by: overlay}}
  output_cap: exact
policies:
  caching: {kind: vllm, async_scheduling: false}
  plain: {kind: vllm, enable_prefix_caching: false, async_scheduling: false}
slo: e2e<10s @ 90%
seeds: 1
"""


def scenario(folder: Path, text: str = SCENARIO) -> Any:
    (folder / "s.yaml").write_text(text)
    return load_scenario(str(folder / "s.yaml"), trace_folders=[SAMPLES])


def test_a_block_size_that_does_not_divide_the_ids_is_refused(tmp_path: Path) -> None:
    """Only for policies that cache, and only where the ids are used."""
    odd = SCENARIO.replace("block_size: 16", "block_size: 24")
    with pytest.raises(ScenarioError, match=r"s: kv\.block_size 24 does not divide the 512 tokens .* by which caching"):
        Setup.of(scenario(tmp_path, odd)).workload(1.0, 0)
    for fits in (
        odd.replace("  caching: {kind: vllm, async_scheduling: false}\n", ""),
        odd.replace("overlay}", "overlay}, prefix: ignore"),
    ):
        assert Setup.of(scenario(tmp_path, fits)).workload(1.0, 0).num_offered == 6


def test_what_prompts_share_is_not_computed_again(tmp_path: Path) -> None:
    """The third prompt of 1100 tokens finds the two blocks of 512 of the second; without caching nobody finds any."""
    setup = Setup.of(scenario(tmp_path, SCENARIO.replace(", rate_scale: {factor: 2, by: overlay}", "")))
    found = {}
    for spec in setup.scenario.specs:
        requests = simulate_point(setup, Point(spec, 1.0, 0)).records.requests
        found[spec.name] = requests["cached_tokens"].tolist()
    assert found == {"caching": [0, 512, 1024], "plain": [0, 0, 0]}


def test_hits_are_the_longest_common_beginnings(tmp_path: Path) -> None:
    """With room for all and one request at a time, a prompt finds the whole blocks it shares with any earlier one."""
    rng = np.random.default_rng(5)
    blocks, texts = 32, []
    for number in range(80):
        texts.append(
            [*(texts[rng.integers(number)][: rng.integers(4)] if number else []), *range(9 * number, 9 * number + 3)]
        )
    records = [
        {"timestamp": 9000 * i, "input_length": blocks * len(t) - int(rng.integers(blocks)), "hash_ids": t}
        for i, t in enumerate(texts)
    ]
    write(tmp_path, *records)
    text = SCENARIO.replace(
        "mooncake_style.jsonl, rate_scale: {factor: 2, by: overlay}", "t.jsonl, hash_id_block_size: 32"
    )
    setup = Setup.of(scenario(tmp_path, text.replace("16000", "160000")))
    requests = simulate_point(setup, Point(setup.scenario.specs[0], 1.0, 0)).records.requests
    expected = []
    for i, record in enumerate(records):
        most = 0
        for other in records[:i]:
            pairs = zip(record["hash_ids"], other["hash_ids"], strict=False)
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            most = max(most, min(blocks * equal, other["input_length"], record["input_length"] - 1))
        expected.append(most // 16 * 16)
    assert requests["cached_tokens"].tolist() == expected and sum(x > 0 for x in expected) > 40


@pytest.mark.parametrize(
    ("name", "share"), [("synthetic", 0.6396), pytest.param("conversation", 0.3664, marks=pytest.mark.slow)]
)
def test_a_public_trace_reuses_what_was_published(name: str, share: float) -> None:
    """Block hit ratios without limit, computed elsewhere from the same files; 36 % of the prompts' tokens."""
    named = os.environ.get("BATCHSIM_TRACES")
    if not named or not (Path(named) / "mooncake").is_dir():
        pytest.skip("BATCHSIM_TRACES does not name the folder of the public traces")
    rows = read_trace(TraceConfig(f"mooncake/{name}_trace.jsonl.gz"), Path(named))
    assert rows.hash_ids is not None and rows.hash_ids.reused_share == pytest.approx(share, abs=5e-5)
    lengths = np.array([len(row) for row in ids(rows)])
    assert np.array_equal(lengths, -(-rows.prompt_tokens // 512))
