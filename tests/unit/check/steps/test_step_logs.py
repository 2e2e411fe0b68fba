"""What is read of the steps that vLLM, SGLang and Dynamo record of themselves; hostile logs.

Lines are written here in the forms at their sources (the docstrings of `batchsim.check.steps`), but for the files of
tests/data/steps, which the real engines wrote.
"""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import MeasuredError
from batchsim.check.steps.read import read_steps
from batchsim.check.steps.recorded import Engine, StepLog, pairs_between
from tests.support.engine_truth import LINEAR_ENGINE, scenario_text, setup_of
from tests.support.paths import ROOT
from tests.support.step_logs import fpm, fpm_log, sglang_log, simulated, vllm_log

ENGINE = Engine(kv_tokens=400_000, block_size=16, shares=False, max_model_len=8192)


def line(
    index: int, chunks: int, prompt: int, decodes: int, ms: object, usage: float | None = 1.0, more: str = ""
) -> str:
    """One of vLLM's iterations."""
    tail = "" if usage is None else f", GPU KV cache usage: {usage}%"
    return (
        f"INFO 10-05 12:00:00 [loggers.py:182] Engine 000: Iteration({index}): {chunks} context requests, {prompt}"
        f" context tokens, {decodes} generation requests, {decodes} generation tokens, iteration elapsed time: {ms} ms"
        f"{tail}{more}"
    )


def read(tmp_path: Path, *lines: str, engine: Engine = ENGINE) -> StepLog:
    (tmp_path / "engine.log").write_text("\n".join(lines) + "\n")
    return read_steps(tmp_path / "engine.log", engine)


# ---- vLLM


def test_a_vllm_line_tells_what_its_step_held_and_the_line_before_it_the_contexts(tmp_path: Path) -> None:
    """KV in use after the step before, to 0.05 % of the pool and a block less a token for each sequence."""
    log = read(tmp_path, line(0, 2, 600, 0, "20.00", 0.2), line(1, 0, 0, 2, "8.50", 0.2))
    assert log.form == "vLLM's iterations" and not log.left_out
    steps = log.steps
    assert steps.ns.tolist() == [20e6, 8.5e6]
    assert (steps.chunks.tolist(), steps.prompt_tokens.tolist()) == ([2, 0], [600, 0])
    assert (steps.decodes.tolist(), steps.decode_tokens.tolist()) == ([0, 2], [0, 2])
    assert steps.most_context.tolist() == [0, 0.002 * 400_000 + 0.0005 * 400_000]
    assert steps.least_context.tolist() == [0, 0.002 * 400_000 - 0.0005 * 400_000 - 2 * 15]
    assert (steps.least_pairs[0], steps.most_pairs[0]) == pairs_between(600, 2, 0, 0)


def test_a_vllm_line_beside_chunks_leaves_open_what_prompts_in_progress_hold(tmp_path: Path) -> None:
    """The chunks since the last step of decodes alone, this one, a block each; so are the places where they begin."""
    log = read(tmp_path, line(0, 0, 0, 4, "8", 1.0), line(1, 1, 512, 4, "20", 1.2), line(2, 1, 256, 4, "20", 1.2))
    steps = log.steps
    assert steps.most_context[1] - steps.least_context[1] == 2 * 200 + 4 * 15 + 512 + 16
    assert steps.most_context[2] - steps.least_context[2] == 2 * 200 + 4 * 15 + 512 + 256 + 16
    assert steps.most_pairs[1] == steps.least_pairs[1] == 512 * 513 / 2
    assert steps.most_pairs[2] - steps.least_pairs[2] == 256 * 512


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([line(0, 0, 0, 4, "8", None), line(1, 0, 0, 4, "8", None)], "lines without KV usage, of an older vLLM"),
        ([line(0, 0, 0, 4, "8"), "Prefix cache hit rate: 12.5%", line(1, 0, 0, 4, "8")], "prompts share KV"),
        (
            [*(f"GPU KV cache size: {n}00,000 tokens" for n in (3, 4)), *(line(n, 0, 0, 4, "8") for n in (0, 1))],
            "the size of the pool is unknown",
        ),
    ],
)  # fmt: skip
def test_contexts_that_no_line_tells_are_open_up_to_the_longest_sequence(
    tmp_path: Path, lines: list[str], why: str
) -> None:
    """An older vLLM prints no KV usage, shared KV is counted once, and a pool must have one size; a note says so."""
    log = read(tmp_path, *lines)
    assert log.steps.most_context[1] == 4 * 8192
    assert why in " ".join(log.notes)


def test_a_step_after_a_gap_in_the_indices_has_no_line_before_it(tmp_path: Path) -> None:
    """Nor has the first of a log that begins in the middle; an engine that starts anew has nothing in progress."""
    log = read(tmp_path, line(7, 0, 0, 4, "8"), line(9, 1, 100, 4, "8"), line(0, 1, 100, 0, "8"))
    steps = log.steps
    assert steps.most_context.tolist() == [4 * 8192, 4 * 8192, 0]
    assert steps.most_pairs[1] == 100 * 8192 and steps.most_pairs[2] == steps.least_pairs[2] == 5050


def test_where_prefixes_are_cached_a_chunk_may_begin_anywhere(tmp_path: Path) -> None:
    """Unless the log says that nothing was found; its own arguments beat the scenario."""
    shares = replace(ENGINE, shares=True)
    hits = "Prefix cache hit rate: {}%"
    for lines, engine, most in [
        ([], shares, 100 * 8192),
        ([hits.format("0.0")], shares, 5050),
        ([hits.format("0.5")], shares, 100 * 8192),
        (["args: {'enable_prefix_caching': False}"], shares, 5050),
        (["enable_prefix_caching=True, x"], ENGINE, 100 * 8192),
    ]:
        assert read(tmp_path, *lines, line(0, 1, 100, 0, "8"), engine=engine).steps.most_pairs.tolist() == [most]


def test_the_pool_of_the_log_beats_that_of_the_scenario(tmp_path: Path) -> None:
    """`GPU KV cache size` in the log is what its percentages are of."""
    log = read(tmp_path, "GPU KV cache size: 40,000 tokens", line(0, 0, 0, 1, "8", 10.0), line(1, 0, 0, 1, "8"))
    assert log.steps.most_context[1] == 0.1 * 40_000 + 0.0005 * 40_000


def test_asynchronous_scheduling_is_said_since_its_times_are_no_step_s(tmp_path: Path) -> None:
    """The rest of a wait is less than the step; without it the host's work is what lacks."""
    for said in ("Asynchronous scheduling is enabled.", "non-default args: {'async_scheduling': True}"):
        log = read(tmp_path, said, line(0, 0, 0, 4, "8"))
        assert "steps took longer than that. Record with --no-async-scheduling" in log.doubt and log.doubt in log.notes
    ahead = replace(ENGINE, ahead=True)
    assert read(tmp_path, line(0, 0, 0, 4, "8"), engine=ahead).doubt
    assert not read(tmp_path, "args: {'async_scheduling': False}", line(0, 0, 0, 4, "8"), engine=ahead).doubt
    assert "scheduling is not in them, nor" in " ".join(read(tmp_path, line(0, 0, 0, 4, "8")).notes)


def test_cores_of_one_log_are_told_apart_by_rank_and_process(tmp_path: Path) -> None:
    """Each has indices of its own; the colours of a terminal and other processes' lines do not matter."""
    bare = line(0, 0, 0, 4, "8").partition("Engine 000: ")[2]
    log = read(
        tmp_path,
        f"\x1b[0;36m(EngineCore_DP0 pid=2)\x1b[0;0m INFO {bare}",
        f"(EngineCore_DP1 pid=3) INFO {bare}",
        "INFO:     127.0.0.1:5 - \"POST /v1/completions HTTP/1.1\" 200 OK",
        f"(EngineCore_DP0 pid=2) INFO {bare.replace('(0)', '(1)')}",
    )  # fmt: skip
    assert log.steps.core.tolist() == [0, 1, 0]
    assert "2 engine cores" in " ".join(log.notes)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (line(1, 0, 0, 4, "nan"), "of a time or a KV usage that cannot be"),
        (line(1, 0, 0, 4, "-3.00"), "of a time or a KV usage that cannot be"),
        (line(1, 0, 0, 4, "inf"), "of a time or a KV usage that cannot be"),
        (line(1, 0, 0, 4, "0.00"), "of a time or a KV usage that cannot be"),
        (line(1, 0, 0, 4, "8", 250.0), "of a time or a KV usage that cannot be"),
        (line(1, 0, 0, 4, "8", more=", encoder inputs: 1, encoder output embeddings: 576"), "with images or sound"),
        (line(1, 0, 0, 0, "8 ms (dummy)").replace("(dummy) ms", "(dummy)"), "of a rank without work (dummy)"),
        (line(1, 0, 0, 0, "8"), "of contents that no step has"),
        (line(1, 3, 2, 4, "8"), "of contents that no step has"),
        (line(1, 0, 0, 4, "8")[:80], "cut or garbled"),
        (line(1, 0, 0, 4, "8").replace("4 generation requests", f"{10**30} generation requests"), "cut or garbled"),
        (line(0, 0, 0, 4, "8"), "printed twice"),
    ],
)
def test_a_hostile_line_is_left_out_and_counted(tmp_path: Path, bad: str, why: str) -> None:
    """Its neighbours are read all the same."""
    log = read(tmp_path, line(0, 0, 0, 4, "8"), bad, line(2, 0, 0, 4, "9"))
    assert log.steps.ns.tolist() == [8e6, 9e6]
    assert log.left_out == {why: 1}
    assert f"1 of 3 records are left out: 1 {why}" in " ".join(log.notes)


# ---- forward-pass metrics

STEP = {
    "num_chunks": 1,
    "num_prefill_tokens": 100,
    "prefill_pairs": 100 * 40 + 5050,
    "num_decode": 3,
    "context_tokens": 900,
}


def test_forward_pass_metrics_tell_a_step_exactly_whatever_they_are_wrapped_in(tmp_path: Path) -> None:
    """Flat, in Dynamo's trace, in an envelope, and over several lines as its receiver prints; heartbeats are none."""
    forms = [fpm(STEP, 12.5, number) for number in range(1, 5)]
    pretty = json.dumps(forms[3], indent=2)
    idle = json.dumps(fpm(dict.fromkeys(STEP, 0), 0, 9))
    log = read(
        tmp_path,
        json.dumps(forms[0]),
        json.dumps({"schema": "dynamo.fpm.trace.v1", "fpm": forms[1]}),
        json.dumps({"event": {"fpm": forms[2]}}),
        idle,
        f"[worker=a dp=0 counter=4] {pretty}",
    )
    steps = log.steps
    assert log.form == "forward-pass metrics" and not log.left_out and len(steps) == 4
    assert {*steps.ns} == {12.5e6} and {*steps.least_context} == {*steps.most_context} == {900}
    assert {*steps.least_pairs} == {*steps.most_pairs} == {100 * 40 + 5050}
    assert {*steps.decodes} == {3} and {*steps.prompt_tokens} == {100}
    ranks = [json.dumps(fpm(STEP, 9, 1, worker=worker, rank=rank)) for worker, rank in [("a", 0), ("a", 1), ("b", 0)]]
    assert read(tmp_path, *ranks).steps.core.tolist() == [0, 1, 2]


def test_objects_of_others_over_several_lines_swallow_no_record(tmp_path: Path) -> None:
    """Nor do they grow without end; one of ours that is cut off is counted."""
    ours = [json.dumps(fpm(STEP, 10, number)) for number in (1, 2)]
    pretty = json.dumps(fpm(STEP, 10, 3), indent=2).splitlines()
    log = read(tmp_path, "{", '"level": "info",', ours[0], *["{"] * 1000, *pretty[:-3], *["noise {"] * 300, ours[1])
    assert log.steps.ns.tolist() == [10e6, 10e6] and log.left_out == {"cut or garbled": 1}


def test_lists_of_requests_tell_the_pairs_of_several_prompts_and_drafts(tmp_path: Path) -> None:
    """Without them the pairs of two chunks are open between what their sums allow for."""
    two = {**STEP, "num_chunks": 2}
    listed = fpm(two, 10, 1)
    listed["scheduled_requests"] |= {"extend_lengths": [60, 40, 1, 1, 4], "past_kv_lengths": [0, 30, 300, 300, 300]}
    steps = read(tmp_path, json.dumps(listed), json.dumps(fpm(two, 10, 2))).steps
    exact = 60 * 61 / 2 + 40 * 30 + 40 * 41 / 2
    assert steps.least_pairs[0] == steps.most_pairs[0] == exact and steps.decode_tokens.tolist() == [6, 3]
    assert steps.least_pairs[1] < exact and steps.most_pairs[1] > steps.least_pairs[1]


def _spoilt(**scheduled: object) -> str:
    bad = fpm(STEP, 10, 2)
    bad["scheduled_requests"] |= scheduled
    return json.dumps(bad)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (_spoilt(num_decode_requests=-1), "of contents or a time that cannot be"),
        (_spoilt(sum_decode_kv_tokens=1.5), "of contents or a time that cannot be"),
        (_spoilt(sum_prefill_tokens="many"), "of contents or a time that cannot be"),
        (_spoilt(num_prefill_requests=200), "of contents or a time that cannot be"),
        (_spoilt(extend_lengths=[1], past_kv_lengths=[1, 2]), "of contents or a time that cannot be"),
        (json.dumps({**fpm(STEP, 10, 2), "wall_time": math.nan}), "of contents or a time that cannot be"),
        (json.dumps({**fpm(STEP, 10, 2), "wall_time": -1}), "of contents or a time that cannot be"),
        (json.dumps({**fpm(STEP, 10, 2), "version": 2}), "of another version than 1"),
        (json.dumps(fpm(STEP, 10, 1)), "recorded twice"),
        (json.dumps(fpm(STEP, 10, 2))[:-9], "cut or garbled"),
        ('{"scheduled_requests": ' + "[" * 100_000, "cut or garbled"),
        ('{"scheduled_requests": ' + "9" * 5000 + "}", "cut or garbled"),
    ],
)  # fmt: skip
def test_a_hostile_record_is_left_out_and_counted(tmp_path: Path, bad: str, why: str) -> None:
    """Its neighbours are read all the same."""
    log = read(tmp_path, json.dumps(fpm(STEP, 10, 1)), bad, json.dumps(fpm(STEP, 11, 3)))
    assert log.steps.ns.tolist() == [10e6, 11e6] and log.left_out == {why: 1}


# ---- SGLang


def decode(rows: int, held: int, rate: object, more: str = "") -> str:
    return (
        f"[2026-01-05 10:00:00 DP0 TP0] Decode batch, #running-req: {rows}, #token: {held}, token usage: 0.02,{more}"
        f" cuda graph: True, gen throughput (token/s): {rate}, #queue-req: 0"
    )


def prefill(tokens: int, rate: object | None, *, queue: int = 3, running: int = 0, number: int | None = None) -> str:
    told = "" if rate is None else f", cuda graph: False, input throughput (token/s): {rate}"
    counted = "" if number is None else f" [{number}]"
    return (
        f"[2026-01-05 10:00:00 DP0 TP0] Prefill batch{counted}, #new-seq: 2, #new-token: {tokens}, #cached-token: 0,"
        f" token usage: 0.02, #running-req: {running}, #queue-req: {queue}, #pending-token: 0{told}"
    )


COUNTS = (("#token: 1160", "#token: "), ("#running-req: 4", "#running-req: "))


def test_two_decode_lines_of_the_same_requests_tell_the_mean_step_between_them(tmp_path: Path) -> None:
    """Rows over tokens/s, at the mean of the tokens held in both."""
    log = read(tmp_path, decode(4, 1000, "0.00"), decode(4, 1160, "400.00"), decode(4, 1320, "500.00"))
    assert log.form == "SGLang's batches"
    assert log.steps.ns.tolist() == [10e6, 8e6]
    assert log.steps.most_context.tolist() == log.steps.least_context.tolist() == [1080, 1240]
    assert log.left_out == {"over whose time other requests ran": 1}


@pytest.mark.parametrize(
    ("between", "after"),
    [
        ([prefill(100, None)], decode(4, 1320, "500.00")),
        ([], decode(5, 1320, "500.00")),
        ([], decode(4, 2500, "500.00")),
        ([], decode(4, 1100, "500.00")),
        ([], decode(4, 1320, "500.00", " accept len: 2.50,")),
        ([], decode(4, 1320, "nan")),
        ([], decode(4, 1320, "-5.00")),
    ],
    ids=["a prefill", "more rows", "a join", "an end", "drafts", "nan", "negative"],
)
def test_a_decode_line_over_whose_time_others_ran_tells_no_step(tmp_path: Path, between: list[str], after: str) -> None:
    """The rate is over all that ran since the last line."""
    log = read(tmp_path, decode(4, 840, "1.00"), decode(4, 1000, "400"), decode(4, 1160, "400.00"), *between, after)
    assert log.steps.ns.tolist() == [10e6, 10e6]
    assert log.left_out.total() == 2 + len(between)


@pytest.mark.parametrize("count", ["inf", "1e999", "nan", "-1", "1e308", "0.5"])
def test_a_decode_line_of_a_count_that_cannot_be_is_garbled(tmp_path: Path, count: str) -> None:
    """In the tokens held or in the requests: it is left out and counted, and the others tell their steps."""
    whole = [decode(4, 1000, "1"), decode(4, 1160, "400.00")]
    held, rows = (decode(4, 1160, "400").replace(old, new + count) for old, new in COUNTS)
    log = read(tmp_path, held, rows, *whole)
    assert log.steps.ns.tolist() == [10e6] and log.left_out["cut or garbled"] == 2


def test_shared_tokens_leave_contexts_open(tmp_path: Path) -> None:
    """`#token` counts what several requests share once; up to one percent of prompts found again does not matter."""
    decodes = [decode(4, 1000, "1"), decode(4, 1160, "400.00")]
    for cached, most in (("20", 4 * 8192), ("8", 1080)):
        found_again = prefill(1000, None).replace("#cached-token: 0", f"#cached-token: {cached}")
        assert read(tmp_path, found_again, *decodes).steps.most_context.tolist() == [most]


def test_prompts_back_to_back_tell_their_time_where_versions_agree(tmp_path: Path) -> None:
    """As many tokens as the line before, and either nobody decoded and more waited, or the passes follow each other."""
    alike = read(tmp_path, prefill(8192, "9.00"), prefill(8192, "81920.00"))
    assert alike.steps.ns.tolist() == [pytest.approx(100e6)] and alike.steps.chunks.tolist() == [2]
    counted = read(tmp_path, prefill(8192, "9", running=5, number=7), prefill(8192, "81920.00", running=7, number=8))
    assert len(counted.steps) == 1
    for last, now in [
        (prefill(8192, "9.00", queue=0), prefill(8192, "81920.00")),
        (prefill(8192, "9.00", running=2), prefill(8192, "81920.00", running=4)),
        (prefill(4096, "9.00"), prefill(8192, "81920.00")),
        (prefill(8192, "9", running=5, number=7), prefill(8192, "81920.00", running=7, number=9)),
        (prefill(8192, None), prefill(8192, None)),
    ]:
        with pytest.raises(MeasuredError, match="tells the time of no step"):
            read(tmp_path, last, now)


def test_older_sglang_lines_are_read_too(tmp_path: Path) -> None:
    """A full stop after the kind, no rank, another name of the pool's tokens."""
    old = (
        "[2025-07-18 15:32:54 TP0] Decode batch. #running-req: 1, #full token: {}, full token usage: 0.00, cuda graph:"
        " True, gen throughput (token/s): 80.00, #queue-req: 0, "
    )
    log = read(tmp_path, old.format(2266), old.format(2306))
    assert log.steps.ns.tolist() == [12.5e6] and log.steps.least_context.tolist() == [2286]


# ---- all

STEPS = ROOT / "tests" / "data" / "steps"
"""Logs of vLLM 0.32.0 on a CPU, with the scheduler of ai-dynamo 1.6.1 where there are forward-pass metrics."""


def test_two_records_of_one_real_run_tell_the_same() -> None:
    """vLLM's log and Dynamo's metrics of the same 716 steps: contents are equal, and the contexts and pairs that Dynamo
    tells lie between the least and the most that vLLM's KV usage and indices allow for."""
    own = Engine(kv_tokens=32_768, block_size=32, shares=False, max_model_len=2048)
    vllm, fpm = (read_steps(STEPS / name, own) for name in ("vllm-one-process.log.gz", "dynamo.jsonl.gz"))
    assert (vllm.form, fpm.form) == ("vLLM's iterations", "forward-pass metrics")
    assert not vllm.left_out and not fpm.left_out and len(vllm.steps) == 716
    for name in ("decodes", "decode_tokens", "chunks", "prompt_tokens"):
        assert (getattr(vllm.steps, name) == getattr(fpm.steps, name)).all()
    exact = fpm.steps.least_context
    assert (vllm.steps.least_context <= exact).all() and (exact <= vllm.steps.most_context).all()
    assert (vllm.steps.least_pairs <= fpm.steps.most_pairs).all() and (
        fpm.steps.least_pairs <= vllm.steps.most_pairs
    ).all()
    crowded = exact > 3000
    assert crowded.sum() > 50
    assert (vllm.steps.most_context[crowded] / vllm.steps.least_context[crowded]).min() < 1.25
    assert (vllm.steps.ns < fpm.steps.ns).mean() > 0.99  # the model runs before the wait that is timed begins


def test_a_real_log_of_workers_apart_times_steps_and_one_ahead_is_doubted() -> None:
    """With a process for the model the wait is the step, 15 to 60 ms here; asynchronous scheduling is told by the
    arguments that the server prints."""
    own = Engine(kv_tokens=None, block_size=32, shares=False, max_model_len=2048)
    apart = read_steps(STEPS / "vllm-workers.log.gz", own)
    alone = (apart.steps.decodes == 1) & (apart.steps.chunks == 0)
    assert alone.sum() > 30 and 10e6 < np.median(apart.steps.ns[alone]) < 30e6 and not apart.doubt
    assert read_steps(STEPS / "vllm-ahead.log.gz", own).doubt


@pytest.mark.parametrize("form", ["vllm", "fpm", "sglang"])
def test_a_simulated_engine_s_log_allows_for_what_its_steps_held(tmp_path: Path, form: str) -> None:
    """Contexts and pairs lie between the least and the most that is read of each step; exact ones are exact."""
    text = scenario_text(LINEAR_ENGINE, requests=30)
    steps, ms = simulated(text)
    blocks = setup_of(text).kv.num_blocks
    whole = {"vllm": lambda: vllm_log(steps, ms, blocks), "fpm": lambda: fpm_log(steps, ms)}
    whole["sglang"] = lambda: sglang_log(steps, ms)
    log = read(tmp_path, whole[form]())
    read_of = log.steps
    if form == "sglang":
        told_ms = 8 + 0.1 * read_of.decodes + 60e-6 * read_of.least_context
        assert len(read_of) > 10 and (read_of.ns / 1e6) == pytest.approx(told_ms, rel=0.005)
        return
    assert read_of.decodes.tolist() == steps["num_decode"].tolist()
    assert read_of.prompt_tokens.tolist() == steps["num_prefill_tokens"].tolist()
    first = 1 if form == "vllm" else 0
    assert (read_of.least_context <= steps["context_tokens"])[first:].all()
    assert (read_of.most_context >= steps["context_tokens"])[first:].all()
    assert (read_of.least_pairs <= steps["prefill_pairs"]).all() and (
        read_of.most_pairs >= steps["prefill_pairs"]
    ).all()


def test_packed_logs_are_read_and_one_cut_off_up_to_there(tmp_path: Path) -> None:
    """Dynamo writes .jsonl.gz; an engine that was killed leaves half a file."""
    text = "".join(json.dumps(fpm(STEP, 10 + number / 7, number)) + "\n" for number in range(1, 3000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text[: len(text) // 2]) + gzip.compress(text[len(text) // 2 :]))
    assert len(read_steps(tmp_path / "a.jsonl.gz", ENGINE).steps) == 2999
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text)[:-2000])
    cut = read_steps(tmp_path / "b.jsonl.gz", ENGINE)
    assert 100 < len(cut.steps) < 2999 and "cut off" in cut.notes[0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has no line of a step"),
        (b"\0\1\2" * 1000, "has no line of a step"),
        (b"INFO: started\n", "has no line of a step"),
        (
            (line(0, 0, 0, 4, "8") + "\n" + decode(4, 1000, "1")).encode(),
            "which would count twice. Keep the lines of one",
        ),
        (line(0, 0, 0, 4, "nan").encode(), "tells the time of no step"),
        (b"\x1f\x8b not gzip", "cannot be read|has no line"),
    ],
)
def test_a_log_that_tells_no_step_is_refused_in_one_line(tmp_path: Path, data: bytes, why: str) -> None:
    """It names the file and what to do."""
    (tmp_path / "engine.log").write_bytes(data)
    with pytest.raises(MeasuredError, match=why) as found:
        read_steps(tmp_path / "engine.log", ENGINE)
    assert str(found.value).startswith(str(tmp_path)) and "\n" not in str(found.value)


@pytest.mark.parametrize("chunks", [[7], [3, 9], [1, 1, 50], [20, 20, 20, 1]])
def test_pairs_of_chunks_lie_between_what_their_sums_allow_for(chunks: list[int]) -> None:
    """Wherever they begin; of one chunk they are known."""
    before = [11 * (i + 1) for i in range(len(chunks))]
    exact = sum(n * c + n * (n + 1) / 2 for n, c in zip(chunks, before, strict=True))
    least, most = pairs_between(sum(chunks), len(chunks), sum(before), sum(before))
    assert least <= exact <= most and (len(chunks) > 1 or least == most)
