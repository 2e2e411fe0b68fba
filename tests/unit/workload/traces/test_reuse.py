"""Stack distances, and the hit rates that they foretell for every size of a cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.scenario import load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.reuse import reuse_curve, stack_distances
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.traces.trace_rows import HashIds, TraceRows

BLOCK = 16


def conversations(rng: np.random.Generator, count: int) -> list[dict[str, object]]:
    """Rows of prompts that go on from one of the earlier ones, or cut it, or begin anew; none ends with a block."""
    texts: list[list[int]] = []
    rows, unused = list[dict[str, object]](), 0
    for i in range(count):
        begun = list(texts[rng.integers(len(texts))]) if texts and rng.random() < 0.8 else []
        begun = begun[: rng.integers(len(begun) + 1)] if rng.random() < 0.4 else begun
        more = int(rng.integers(1, 5))
        ids = [*begun, *range(unused, unused + more)]
        unused += more
        texts.append(ids[:-1] if len(ids) > 1 else ids)
        prompt = BLOCK * (len(ids) - 1) + int(rng.integers(1, BLOCK))
        rows.append({"timestamp": 1000 * i, "input_length": prompt, "output_length": 1, "hash_ids": ids})
    return rows


def written(folder: Path, rows: list[dict[str, object]]) -> TraceRows:
    path = folder / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_trace(TraceConfig(path=str(path), hash_id_block_size=BLOCK), Path(), 0)


def test_stack_distances_count_the_different_keys_in_between() -> None:
    """As counted one by one."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        keys = rng.integers(0, 12, rng.integers(1, 60))
        last: dict[int, int] = {}
        expected = []
        for i, key in enumerate(keys.tolist()):
            expected.append(len({*keys[last[key] : i].tolist()}) if key in last else 0)
            last[key] = i
        assert stack_distances(keys).tolist() == expected


@pytest.mark.parametrize("seed", range(4))
def test_the_curve_is_what_each_size_finds_in_a_simulation(tmp_path: Path, seed: int) -> None:
    """vLLM's prefix cache under one request at a time: the hits of every size, block for block."""
    rows = written(tmp_path, conversations(np.random.default_rng(seed), 60))
    curve = reuse_curve(rows)
    (tmp_path / "one.yaml").write_text(
        "model: llama-3.1-8b\ncost: {kind: constant, step: 1ms}\nkv: {tokens: 1600}\n"
        "workload: {arrivals: {kind: trace}, output_cap: exact,\n"
        "  trace: {path: log.jsonl, hash_id_block_size: 16, rate_scale: {factor: 1, by: compress}}}\n"
        "policies: {vllm: {async_scheduling: false}}\nslo: ttft<1s @ 99%\nseeds: 1\nload: {rate_scale: [1]}\n"
    )
    largest = int(rows.prompt_tokens.max()) // BLOCK + 1
    sizes = sorted({largest, largest + 1, largest + 3, *(n for n in (30, 50, 80, 120, 200) if n > largest)})
    found = []
    for size in sizes:
        scenario = load_scenario(str(tmp_path / "one.yaml"), overrides=[f"kv.tokens={BLOCK * size}"])
        run = simulate_point(Setup.of(scenario), next(iter(scenario.points())))
        found.append(int(run.records.requests["cached_tokens"].sum()))
    # One block is always that of a prompt's rest, which no other finds.
    expected = [round(curve.hit_rate(BLOCK * (size - 1)) * curve.num_tokens) for size in sizes]
    assert found == expected
    assert len(set(found)) > 3, "the sizes make a difference"


def test_a_sample_of_units_is_right_within_its_error() -> None:
    """Of a thousand conversations; a unit with which all prompts begin is in the sample or not, and does no harm."""
    rng = np.random.default_rng(5)
    ids, starts, unused = [], [0], 1
    texts: list[list[int]] = [[0]]
    for _ in range(6000):
        text = texts[int(rng.integers(max(0, len(texts) - 800), len(texts)))]
        text = [*text, *range(unused, unused + 3)] if len(text) < 40 else [0, unused, unused + 1, unused + 2]
        unused += 3
        texts.append(text)
        ids += text
        starts.append(len(ids))
    lengths = np.diff(starts) * BLOCK
    hashed = HashIds.of(BLOCK, np.array(ids), np.array(starts))
    rows = TraceRows(np.arange(len(lengths)), lengths, np.ones(len(lengths), np.int64), "made", "made", hash_ids=hashed)
    whole = reuse_curve(rows)
    for share in (0.1, 0.3):
        part = reuse_curve(rows, share=share)
        for size in (0.05, 0.3, 0.7):
            tokens = size * whole.working_tokens
            assert 0 < part.error(tokens) < 0.1
            assert part.hit_rate(tokens) == pytest.approx(whole.hit_rate(tokens), abs=2 * part.error(tokens))
    assert whole.error(1000) == 0


def test_outputs_take_room(tmp_path: Path) -> None:
    """Ten blocks of an answer lie between two equal prompts, and as much more cache is needed to find them."""
    row = {"timestamp": 0, "input_length": 3 * BLOCK + 1, "output_length": 10 * BLOCK, "hash_ids": [1, 2, 3, 4]}
    rows = written(tmp_path, [row, {**row, "timestamp": 5000}])
    assert reuse_curve(rows).working_tokens == 3 * BLOCK
    assert reuse_curve(rows, outputs=True).working_tokens == 3 * BLOCK  # which are touched last
    between = {**row, "timestamp": 2000, "hash_ids": [7, 8, 9, 10]}
    rows = written(tmp_path, [row, between, {**row, "timestamp": 5000}])
    assert reuse_curve(rows).working_tokens == 6 * BLOCK
    assert reuse_curve(rows, outputs=True).working_tokens == 16 * BLOCK


def test_a_trace_without_hash_ids_is_refused(tmp_path: Path) -> None:
    """One line that says what is missing."""
    rows = written(tmp_path, conversations(np.random.default_rng(0), 3))
    with pytest.raises(ScenarioError, match="has no hash_ids"):
        reuse_curve(replace(rows, hash_ids=None))
