"""Hostile files of measured runs: each draws one line that says where, what and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.read import read_measured
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data" / "measured"


def _changed(name: str, change: Callable[[Any], Any]) -> str:
    """Sample `name` as JSON after `change`, which returns another value or None for the one that it changed."""
    data = json.loads((DATA / name).read_text())
    other = change(data)
    return json.dumps(data if other is None else other)


def _vllm(**values: Any) -> str:
    return _changed("vllm_detailed.json", lambda data: data.update(values))


def _sglang(**values: Any) -> str:
    data = json.loads((DATA / "sglang.jsonl").read_text().splitlines()[0])
    return json.dumps(data | values)


def _guide(change: Callable[[Any], Any]) -> str:
    return _changed("guidellm_poisson.json", lambda data: change(data["benchmarks"][0]) and None)


def _timing(name: str, value: Any) -> str:
    return _guide(lambda b: b["requests"]["successful"][2]["info"]["timings"].update({name: value}))


def _aiperf(change: Callable[[Any], Any]) -> str:
    lines = (DATA / "aiperf_rate" / "profile_export.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    change(row)
    return "\n".join([lines[0], json.dumps(row), *lines[2:]])


def _stage(change: Callable[[Any], Any]) -> str:
    return _changed("inference_perf_stage.json", lambda data: change(data) and None)


def _lifecycle(**values: Any) -> str:
    return _changed("inference_perf_requests.json", lambda data: data[0].update(values))


def _bench_log(**values: Any) -> str:
    lines = (DATA / "llm_serving_sim.jsonl").read_text().splitlines()
    return json.dumps(json.loads(lines[0]) | values) + "\n" + lines[1]


HEAD = "sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s"
STAGES = "requests,sent_rps,prompt_tokens_mean,output_tokens_mean,ttft_mean_s,ttft_p50_s,ttft_p99_s"
BARE: dict[str, None] = dict.fromkeys(("input_lens", "output_lens", "ttfts", "itls", "errors"))
MISSING_INFO = {"metadata": {}, "benchmarks": [{"config": {"strategy": {"type_": "poisson"}}}]}

HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "is empty"),
    "blank": (" \n\n", "is empty"),
    "binary": (b"\x00\x01\x02", "holds zero bytes"),
    "not_utf8": (b"sent_s,\xff\xfe", "byte 8 is not UTF-8"),
    "gzip": (b"\x1f\x8b\x08rest", "is packed by gzip. Unpack it."),
    "prose": ("the run went well, thanks\n", "are of no form that is known"),
    "cut_json": ('{"backend": "vllm", "req', "not JSON"),
    "empty_object": ("{}", "are of no form that is known"),
    "empty_list": ("[]", "is an empty list"),
    "list_of_numbers": ("[1, 2, 3]", "1 is no object"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "twice": ('{"backend": "vllm", "backend": "sglang"}', "'backend' is given twice"),
    "other_json": ('{"name": "x", "value": 3}', "keys name, value are of no form"),
    "last_line_cut": ((DATA / "aiperf_rate" / "profile_export.jsonl").read_text()[:-20], "was the tool cut off?"),
    "broken_line": ('{"metadata": {}, "metrics": {}}\nnot json\n{"a": 1}\n', ":2: not JSON"),
    "many_digits": ('{"prompt_tokens": ' + "9" * 5000 + ', "output_tokens": 1}', "not JSON"),
    "vllm_lists_differ": (_vllm(ttfts=[0.1]), "4 output_lens and 1 ttfts"),
    "vllm_no_details": (_vllm(itls=None), "itls is missing. Write the file with --save-result --save-detailed"),
    "vllm_starts_differ": (_vllm(start_times=[1.0]), "4 errors and 1 start_times"),
    "vllm_negative_ttft": (_vllm(ttfts=[-0.1, 0.08, 0.1, 0.0]), "-0.1 is negative"),
    "vllm_nan": (_vllm(ttfts=[float("nan"), 0.08, 0.1, 0.0]), "nan is not finite"),
    "vllm_text": (_vllm(ttfts=["fast", 0.08, 0.1, 0.0]), "'fast' is no number"),
    "vllm_bool": (_vllm(input_lens=[True, 1, 1, 1]), "True is no number"),
    "vllm_half_token": (_vllm(output_lens=[4.5, 1, 7, 0]), "4.5 is no whole number of tokens"),
    "vllm_no_tokens": (_vllm(output_lens=[0, 1, 7, 0]), "0 output tokens of a request that did not fail"),
    "vllm_no_prompt": (_vllm(input_lens=[0, 1, 1, 1]), "0 prompt tokens"),
    "vllm_huge": (_vllm(input_lens=[3e9, 1, 1, 1]), "3000000000.0 is above 2.14748e+09"),
    "vllm_gaps_flat": (_vllm(itls=[0.1, 0.2, 0.3, 0.4]), "0.1 is no list"),
    "vllm_errors_numbers": (_vllm(errors=[0, 0, 0, 500]), "0 is no text"),
    "vllm_all_failed": (_vllm(errors=["x"] * 4), "none of its 4 requests ended well"),
    "vllm_nobody": (_vllm(input_lens=[], output_lens=[], ttfts=[], itls=[], errors=[], start_times=[]), "no requests"),
    "vllm_none_completed": (_changed("vllm_aggregates.json", lambda d: d.update(completed=0)), "completed is 0"),
    "vllm_no_mean": (_changed("vllm_aggregates.json", lambda d: d.pop("mean_ttft_ms") and None), "nor mean_ttft_ms"),
    "vllm_rate_zero": (_vllm(request_rate=0), "request_rate is 0"),
    "vllm_rate_word": (_vllm(request_rate="fast"), "request_rate: 'fast' is no number"),
    "vllm_no_concurrency": (_vllm(max_concurrency=0), "max_concurrency: 0 is below 1"),
    "vllm_years": (_vllm(start_times=[1.0, 2.0, 3.0, 3e9]), "years apart"),
    "sglang_lists_differ": (_sglang(errors=[""]), "3 itls and 1 errors"),
    "sglang_no_details": (_sglang(ttfts=None), "ttfts is missing. Write the file with --output-details"),
    "guide_none": ('{"metadata": {}, "benchmarks": []}', "holds no benchmarks"),
    "guide_old": (json.dumps(MISSING_INFO), "Only reports of guidellm from 0.4 on are read"),
    "guide_sampled": (_guide(lambda b: b["requests"]["successful"].pop()), "keeps 9 of 10 successful requests"),
    "guide_no_start": (_timing("request_start", None), "timings: request_start is missing"),
    "guide_backwards": (_timing("first_token_iteration", 1.0), "before its sending"),
    "guide_no_prompt": (_guide(lambda b: b["requests"]["successful"][0].update(prompt_tokens=None)), "is missing"),
    "guide_streams": (_guide(lambda b: b["config"].update(strategy={"type_": "concurrent"})), "streams is missing"),
    "aiperf_unit": (_aiperf(lambda r: r["metrics"]["request_latency"].update(unit="h")), "unit 'h' is none of ns"),
    "aiperf_no_latency": (_aiperf(lambda r: r["metrics"].pop("request_latency")), "request_latency is missing"),
    "aiperf_number": (_aiperf(lambda r: r["metrics"].update(request_latency=5)), "5 is no object"),
    "aiperf_late_first": (
        _aiperf(lambda r: r["metrics"]["time_to_first_token"].update(value=1e6)),
        "its last token is",
    ),
    "aiperf_warmup_only": (
        '{"metadata": {"benchmark_phase": "warmup"}, "metrics": {}}',
        "holds no requests",
    ),
    "aiperf_aggregates": ((DATA / "aiperf_rate" / "profile_export_aiperf.json").read_text(), "profile_export.jsonl"),
    "lifecycle_backwards": (_lifecycle(end_time=99.0), "its last token is"),
    "lifecycle_no_info": (_lifecycle(info=None), "info is missing"),
    "stage_nobody": (_stage(lambda d: d["successes"].update(count=0)), "successes.count is 0"),
    "stage_short": (
        _stage(lambda d: d["successes"]["latency"]["request_latency"].update(mean=0.01)),
        "mean request_latency 0.01 s is below mean TTFT 0.05 s",
    ),
    "bench_log_text": (_bench_log(queued_ts="soon"), "queued_ts: 'soon' is no number"),
    "bench_log_backwards": (_bench_log(last_token_ts=50.05), "0.05 s before its first token"),
    "csv_header_only": (HEAD + "\n", "a header and no rows"),
    "csv_fields": (HEAD + "\n0,64,5\n", ":2: 3 fields where the header has 5"),
    "csv_quote": (HEAD + '\n0,"64,5,1,2\n', "not CSV"),
    "csv_two_columns": ("sent_s,sent_s,prompt_tokens,output_tokens,ttft_s\n", "has two columns 'sent_s'"),
    "csv_no_output": (
        "sent_s,prompt_tokens,out_tokens,ttft_s\n0,1,1,1\n",
        "Did you mean out_tokens? Name it output_tokens.",
    ),
    "csv_users": (HEAD + ",users\n0,64,5,0.1,0.5,2\n0,64,5,0.1,0.5,3\n", ":3: users is 3 after 2 before it"),
    "stages_users": (
        "requests,users,concurrency,prompt_tokens,output_tokens,ttft_mean_s\n9,4,8,10,5,1\n",
        "users 4 and concurrency 8 are one thing. Keep one of them.",
    ),
    "stages_all_failed": (
        "requests,failed,users,prompt_tokens,output_tokens,ttft_mean_s\n9,9,4,10,5,1\n",
        "9 of its 9 requests failed. Look at their errors.",
    ),
    "csv_no_times": ("sent_s,prompt_tokens,output_tokens\n0,64,5\n", "no column of a measured time"),
    "csv_no_sending": ("prompt_tokens,output_tokens,first_token_s\n64,5,1\n", "no time of sending"),
    "csv_word": (HEAD + "\n0,many,5,0.1,0.5\n", ":2: prompt_tokens: 'many' is no number"),
    "csv_missing": (HEAD + "\n0,64,,0.1,0.5\n", "output_tokens is missing"),
    "csv_no_measure": (HEAD + "\n0,64,5,,\n", "no measured time of a request that did not fail"),
    "csv_status": (HEAD + ",status\n0,64,5,0.1,0.5,perhaps\n", "status is 'perhaps'. Write ok or error."),
    "csv_shorter_e2e": (HEAD + "\n0,64,5,0.5,0.1\n", "its last token is 0.4 s before its first token"),
    "csv_some_sent": (HEAD + "\n0,64,5,0.1,0.5\n,64,5,0.1,0.5\n", "1 of its 2 requests have no time of sending"),
    "csv_no_unit": ("sent_s,prompt_tokens,output_tokens,ttft\n0,64,5,100\n", "100 has no unit. Name the column ttft_s"),
    "csv_date": ("sent,prompt_tokens,output_tokens,ttft_s\nyesterday,64,5,1\n", "is not an ISO date and time"),
    "stages_no_unit": ("requests,prompt_tokens,output_tokens,ttft_mean\n9,1,1,5\n", "ttft_mean has no unit"),
    "csv_epoch_ms": (HEAD + "\n1.7e12,64,5,0.1,0.5\n", "is above 4e+09"),
    "ids_no_list": (HEAD + ",hash_ids\n0,64,5,0.1,0.5,7\n", "7 is no list"),
    "ids_negative": (HEAD + ',hash_ids\n0,32,5,0.1,0.5,"[-1,2]"\n', "[-1, 2] are no whole numbers from 0 to 2^63 - 1"),
    "ids_any_block": (HEAD + ',hash_ids\n0,8,5,0.1,0.5,"[1]"\n', "could be of 16 or 32 or 64"),
    "ids_too_few": (HEAD + ',hash_ids\n0,6400,5,0.1,0.5,"[1,2]"\n', "no known number of tokens"),
    "stages_fall": (STAGES + "\n10,1,200,64,0.1,0.2,0.1\n", "percentiles of ttft fall: 0.2, 0.1 s"),
    "stages_no_lengths": ("requests,sent_rps,ttft_mean_s\n10,1,0.1\n", "has no column of prompt_tokens"),
    "jsonl_no_object": (
        '{"prompt_tokens": 10, "output_tokens": 5, "ttft_s": 0.1, "e2e_s": 0.5}\n[1]\n',
        ":2: [1] is no object",
    ),
    "jsonl_no_object_spelt_twice": (
        '{"prompt_tokens": 10, "output_tokens": 5, "ttft_s": 0.1, "ttft_ms": 100, "e2e_s": 0.5}\n[1]\n',
        ":2: [1] is no object",
    ),
    "sglang_no_object": (_sglang() + "\n[1]\n", ":2: [1] is no object"),
    "aiperf_metadata_no_object": (_aiperf(lambda row: row.update(metadata=5)), "metadata: 5 is no object"),
    "stages_engine_0": (STAGES + ",completion_tokens_mean\n10,1,200,64,0.1,0.1,0.2,0\n", "output tokens is 0"),
    "stages_client_0": (STAGES + ",completion_tokens_mean\n10,1,200,0,0.1,0.1,0.2,64\n", "output tokens is 0"),
    "sglang_output_0": (_sglang(**BARE, total_output_tokens=0), "output tokens is 0"),
    "stages_length_0": (
        STAGES + ",random_range_ratio,random_input_len\n10,1,200,64,0.1,0.1,0.2,0.5,0\n",
        "random_input_len: 0 is below 1",
    ),
    "stages_min_above_max": (
        STAGES + ",output_tokens_min,output_tokens_max\n10,1,200,64,0.1,0.1,0.2,100,3\n",
        "output_tokens from 100 to 3 have no mean of 64",
    ),
    "stages_min_above_mean": (
        STAGES + ",prompt_tokens_min\n10,1,200,64,0.1,0.1,0.2,201\n",
        "prompt_tokens from 201 to inf have no mean of 200",
    ),
    "stages_std": (STAGES + ",output_tokens_std\n10,1,200,64,0.1,0.1,0.2,1e300\n", "output_tokens_std is 1e+300"),
    "stages_negative": (STAGES + "\n10,1,200,64,-0.1,0.2,0.3\n", "-0.1 is negative"),
}


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_draws_one_line(content: str | bytes, words: str, tmp_path: Path) -> None:
    """MeasuredError that begins with the file, says what is wrong and ends with what to do; never a traceback."""
    path = tmp_path / "run"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MeasuredError) as caught:
        read_measured(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and words in text and "\n" not in text and len(text) < 400
    assert text.endswith(".")


def test_there_are_sixty_hostile_files() -> None:
    """And a folder, a missing file and a FIFO besides."""
    assert len(HOSTILE) >= 60


def test_what_is_no_file_draws_one_line(tmp_path: Path) -> None:
    """None of them is waited for."""
    import os

    os.mkfifo(tmp_path / "pipe")
    for name, words in (("", "is a folder"), ("gone", "No such file"), ("pipe", "is a FIFO")):
        with pytest.raises(MeasuredError, match=words):
            read_measured(tmp_path / name)


STAGE = "requests,users,prompt_tokens,output_tokens,ttft_mean_ms,tpot_mean_ms\n"
IMPOSSIBLE: dict[str, tuple[str, str]] = {
    "no_time": (f"{HEAD}\n0,64,5,0,0\n", "ttft_mean_s is 0 s, and an engine takes longer"),
    "a_nanosecond": (f"{HEAD}\n0,64,5,1e-9,0.5\n", "ttft_mean_s is 1e-09 s, and an engine takes longer"),
    "at_once": (f"{HEAD}\n0,64,5,0.5,0.5\n", "E2E alone is compared and fitted."),
    "years": (f"{HEAD}\n0,64,5,0.1,1e9\n", "2.89e+03 days. Look at its unit."),
    "row_no_time": (STAGE + "9,4,10,5,0,5\n", "ttft_mean_s is 0 s"),
    "row_at_once": (STAGE + "9,4,10,5,5,0\n", "tpot_mean_s is 0 s, and the tokens of an answer came all at once"),
    "row_endless": (STAGE + "10000000,4,10,5,5,5\n", "requests is 10000000. Write 20,000:"),
    "row_beyond_floats": (STAGE + "1e300,4,10,5,5,5\n", "requests is 1e+300. Write 20,000:"),
    "row_of_nothing": (STAGE + "9,4,10,5,,\n", "tells no latency and no rate."),
    "row_part_of_one": (STAGE + "0.4,4,10,5,5,5\n", "requests is 0.4. It must be from 1 to 20000."),
    "row_users": (STAGE + "9,10000000,10,5,5,5\n", "10,000,000 in flight at most. It must be from 1 to 1,000,000."),
    "row_long": (STAGE + "9,4,1e300,5,5,5\n", "prompt_tokens is 1e+300"),
    "two_sendings": (
        HEAD + ",sent_ms\n0,64,5,0.1,0.5,0\n1,64,5,0.1,0.5,5000\n",
        ":3: sent_s and sent_ms say 1 s and 5 s",
    ),
    "two_names": (HEAD + ",start_time_s\n1,64,5,0.1,0.5,5\n", "sent_s and start_time_s say 1 s and 5 s"),
    "two_units": (HEAD + ",ttft_ms\n0,64,5,0.1,0.5,700\n", "ttft_s and ttft_ms say 0.1 s and 0.7 s"),
    "two_ways": (
        HEAD + ",first_token_s\n1,64,5,0.1,0.5,1.4\n",
        "first_token_s − sent_s and ttft_s say 0.4 s and 0.1 s",
    ),
    "two_ends": (HEAD + ",end_time_ms\n1,64,5,0.1,0.5,1900\n", "end_time_ms − sent_s and e2e_s say 0.9 s and 0.5 s"),
    "two_gaps": (
        STAGE[:-1] + ",itl_mean_ms,itl_mean_s\n9,4,10,5,5,5,5,5\n",
        "itl_mean_ms and itl_mean_s say 0.005 s and 5 s",
    ),
    "two_figures": (STAGE[:-1] + ",tpot_mean_s\n9,4,10,5,5,5,5\n", "tpot_mean_ms and tpot_mean_s say 0.005 s and 5 s"),
}


@pytest.mark.parametrize(("text", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_have_been_measured_draws_one_line(tmp_path: Path, text: str, words: str) -> None:
    """Before anything is counted, simulated or divided by; two columns of one time are the same or refused."""
    (tmp_path / "run.csv").write_text(text)
    with pytest.raises(MeasuredError) as raised:
        read_measured(tmp_path / "run.csv")
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_columns_that_agree_are_read(tmp_path: Path) -> None:
    """To 10 ms on a clock, to 5 % of a latency, which a client takes by another look at its clock."""
    (tmp_path / "run.csv").write_text(
        f"{HEAD},sent_ms,first_token_s,end_time_s\n0,64,5,0.1,0.5,1,0.1001,0.51\n2,64,5,0.1,0.5,2000,2.1,2.52\n"
    )
    (run,) = read_measured(tmp_path / "run.csv")
    assert run.figures["ttft_mean_s"] == pytest.approx(0.1, rel=1e-3)
