"""The public traces themselves, where BATCHSIM_TRACES names their folder: counts, times, published statistics."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from batchsim.workload.traces.inspect import inspect_trace
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.scale import rescale
from batchsim.workload.traces.trace_config import RateScale, TraceConfig
from batchsim.workload.traces.trace_rows import TraceRows
from tests.traces import tiled

CODE = "azure2023/AzureLLMInferenceTrace_code.csv"
CONV = "azure2023/AzureLLMInferenceTrace_conv.csv"
CONV_SHA256 = "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8"
MOONCAKE_SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"


@pytest.fixture
def folder() -> Path:
    named = os.environ.get("BATCHSIM_TRACES")
    if not named:
        pytest.skip("BATCHSIM_TRACES does not name the folder of the public traces")
    return Path(named)


def read(folder: Path, name: str) -> TraceRows:
    path = folder / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return read_trace(TraceConfig(name), folder)


def same(left: TraceRows, right: TraceRows) -> bool:
    pairs = ((left.arrival_ns, right.arrival_ns), (left.prompt_tokens, right.prompt_tokens))
    lengths = np.array_equal(left.output_tokens, right.output_tokens)
    return lengths and all(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "count", "last_ns", "first_row"),
    [
        (CODE, 8819, 3_435_948_056_000, (4808, 10)),
        (CONV, 19_366, 3_501_721_937_000, (374, 44)),
        pytest.param(
            *("mooncake/conversation_trace.jsonl.gz", 12_031, 3_536_999_000_000, (6758, 500)), marks=pytest.mark.slow
        ),
        ("mooncake/synthetic_trace.jsonl.gz", 3993, 1_022_025_000_000, None),
    ],
)
def test_counts_and_ends(folder: Path, name: str, count: int, last_ns: int, first_row: tuple[int, int] | None) -> None:
    """Every row is read, from 0 to the last arrival, exact to the ns, and none is dropped."""
    rows = read(folder, name)
    assert rows.arrival_ns is not None
    assert (len(rows), int(rows.arrival_ns[0]), int(rows.arrival_ns[-1])) == (count, 0, last_ns)
    assert first_row is None or (int(rows.prompt_tokens[0]), int(rows.output_tokens[0])) == first_row
    assert not any("dropped" in note for note in rows.notes)


@pytest.mark.parametrize(("azure", "vidur"), [(CODE, "code"), pytest.param(CONV, "conv", marks=pytest.mark.slow)])
def test_vidur_copies_equal_azure(folder: Path, azure: str, vidur: str) -> None:
    """The same requests in two formats give the same rows to the ns."""
    assert same(read(folder, azure), read(folder, f"vidur/splitwise_{vidur}.csv.gz"))


def test_head_is_a_slice_of_the_whole(folder: Path) -> None:
    """The first 200 rows of a file of its own equal the slice of the whole file."""
    head = read(folder, "fixtures/mooncake_conversation_head200.jsonl")
    sliced = read_trace(TraceConfig("mooncake/conversation_trace.jsonl.gz", rows=(0, 200)), folder)
    assert same(head, sliced)


@pytest.mark.parametrize(
    ("name", "rate", "cv", "idc_1s", "idc_60s", "prompt", "output"),
    [
        (CODE, 2.5664, 13.151, 13.19, 163.96, (2048, 1469, 5188, 7436, 7437), (27.88, 13, 55, 251.5, 1899)),
        (CONV, 5.5301, 1.094, 1.39, 16.13, (1155, 1020, 2734, 4142, 14_050), (211.1, 129, 424, 601, 1000)),
        (
            "mooncake/conversation_trace.jsonl.gz",
            *(3.4012, 3.034, 7.90, 2.89),
            *((12_035, 6909, 27_367, 85_400, 126_195), (342.6, 350, 597, 1119, 2000)),
        ),
    ],
)
def test_statistics(
    folder: Path,
    name: str,
    rate: float,
    cv: float,
    idc_1s: float,
    idc_60s: float,
    prompt: tuple[float, ...],
    output: tuple[float, ...],
) -> None:
    """Rate, CV, dispersion and length quantiles are those computed elsewhere from the same bytes."""
    if not (folder / name).exists():
        pytest.skip(f"{folder / name} is not there")
    summary = inspect_trace(TraceConfig(name), folder)
    arrivals = summary["arrivals"]
    assert arrivals["rate_rps"] == pytest.approx(rate, rel=1e-4)
    assert arrivals["cv"] == pytest.approx(cv, rel=1e-3)
    assert (arrivals["idc_1s"], arrivals["idc_60s"]) == pytest.approx((idc_1s, idc_60s), rel=5e-3)
    for side, expected in (("prompt_tokens", prompt), ("output_tokens", output)):
        figures = [summary[side][key] for key in ("mean", "p50", "p90", "p99", "max")]
        assert figures == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_hashes_match(folder: Path) -> None:
    """The published hashes hold, of the plain and of the gzipped file."""
    for name, digest in ((CONV, CONV_SHA256), ("mooncake/conversation_trace.jsonl.gz", MOONCAKE_SHA256)):
        read(folder, name)
        assert len(read_trace(TraceConfig(name, sha256=digest), folder)) > 10_000


@pytest.mark.slow
def test_jitter_undoes_the_grid(folder: Path) -> None:
    """Spread over its 3 s tick, the conversation trace loses the CV of 3 that its clock makes."""
    read(folder, "mooncake/conversation_trace.jsonl.gz")
    config = TraceConfig("mooncake/conversation_trace.jsonl.gz", jitter=3_000_000_000)
    assert inspect_trace(config, folder)["arrivals"]["cv"] == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_scaled_and_tiled(folder: Path) -> None:
    """A million rows at three times the rate are made of the conversation trace."""
    rows = rescale(tiled(read(folder, CONV), 1_000_000), RateScale(3, "compress"), seed=0)
    assert rows.arrival_ns is not None
    assert len(rows) == 1_000_000
    assert (len(rows) - 1) * 1e9 / rows.arrival_ns[-1] == pytest.approx(3 * 5.5301, rel=1e-3)
