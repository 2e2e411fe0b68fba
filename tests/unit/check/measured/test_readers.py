"""Files of measured runs: each tool's metrics in our definitions, how its client was set, what was wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.client_faults import with_faults
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import MISSING, Client, MeasuredRequests, MeasuredRun
from batchsim.check.measured.select import runs_of_model
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data" / "measured"


def one(name: str) -> MeasuredRun:
    (run,) = read_measured(DATA / name)
    return run


def test_vllm_s_requests_are_read_and_the_failed_one_counts_for_nothing() -> None:
    """TTFT as told, E2E with the gaps added, TPOT over the tokens and not over the chunks; the open client's rate."""
    run = one("vllm_detailed.json")
    assert run.requests is not None
    assert run.requests.sent_ns is not None and run.requests.sent_ns.tolist() == [
        0,
        100_000_000,
        300_000_000,
        4 * 10**8,
    ]
    assert run.requests.latency_s("ttft")[:3].tolist() == [0.05, 0.08, 0.1]
    assert run.requests.latency_s("e2e")[:3] == pytest.approx([0.12, 0.08, 0.3])
    assert run.requests.latency_s("tpot")[[0, 2]] == pytest.approx([0.07 / 3, 0.2 / 6])
    assert np.isnan(run.requests.latency_s("tpot")[[1, 3]]).all()
    assert run.client == Client("open", 10.0, poisson=True)
    assert run.figures["throughput_rps"] == pytest.approx(3 / 0.6)
    assert "12 tokens came in 9 chunks" in "\n".join(run.notes) and "1 of 4 requests failed" in run.notes[0]


@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("vllm_bench_rate.json", Client("open", 3.0, poisson=True)),
        ("vllm_bench_concurrency.json", Client("closed", max_concurrency=3)),
    ],
)
def test_vllm_s_own_tool_and_its_reader_agree(name: str, client: Client) -> None:
    """Files that `vllm bench serve` of vLLM 0.32 wrote of its own server on a CPU: its means are those read."""
    told, run = json.loads((DATA / name).read_text()), one(name)
    assert run.requests is not None and run.client == client
    for latency, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        assert run.requests.latency_s(latency).mean() == pytest.approx(told[f"mean_{theirs}_ms"] / 1e3, rel=1e-6)
    assert run.figures["output_tokens_per_s"] / run.figures["throughput_rps"] == pytest.approx(193 / 12)


def test_vllm_s_result_without_details_has_aggregates_alone() -> None:
    """Means and percentiles in seconds, the median as P50, no E2E where the tool was not asked for it."""
    run = one("vllm_aggregates.json")
    assert run.requests is None and "e2e_mean_s" not in run.figures
    assert run.figures["tpot_p50_s"] == pytest.approx(0.028333) and run.figures["ttft_p99_s"] == pytest.approx(0.0996)
    assert run.means == {
        "requests": 3,
        "prompt_tokens": 200,
        "output_tokens": 4,
        "sent_rps": 7.5,
        "ended_well": 0.75,
    }
    assert "1 of 4 requests failed: their latencies are no figures, and they are not played" in run.notes[1]


def test_sglang_s_lines_are_runs_and_tell_no_sendings() -> None:
    """A closed loop of two from a rate of infinity with a limit; the second line has aggregates."""
    loop, rate = read_measured(DATA / "sglang.jsonl")
    assert loop.client == Client("closed", max_concurrency=2) and loop.part == "line 1"
    assert loop.requests is not None and loop.requests.sent_ns is None
    assert loop.figures["tpot_mean_s"] == pytest.approx(0.1) and loop.figures["throughput_rps"] == 3
    assert rate.requests is None and rate.client.rate_rps == 4 and rate.figures["e2e_p90_s"] == 0.5


def test_guidellm_s_time_per_output_token_holds_the_first_token_and_is_not_read() -> None:
    """TPOT is the tool's inter_token_latency_ms, E2E ends at the last token; a real report of guidellm 0.8.1."""
    run = one("guidellm_poisson.json")
    (told,) = json.loads((DATA / "guidellm_poisson.json").read_text())["benchmarks"]
    rows = sorted(told["requests"]["successful"], key=lambda row: row["info"]["timings"]["request_start"])
    assert run.requests is not None and run.version == "0.8.1"
    tpot_ms = run.requests.latency_s("tpot") * 1e3
    assert tpot_ms == pytest.approx([row["inter_token_latency_ms"] for row in rows], abs=1e-3)
    assert (tpot_ms < [0.85 * row["time_per_output_token_ms"] for row in rows]).all()
    assert run.client == Client("open", 8.0, poisson=True) and run.requests.intended_ns is not None


def test_guidellm_s_concurrent_strategy_is_a_closed_loop_with_merged_chunks() -> None:
    """Four streams; three tokens came in a chunk, which the reader says."""
    run = one("guidellm_concurrent.json")
    assert run.client == Client("closed", max_concurrency=4)
    assert run.notes == ("60 tokens came in 30 chunks: the gaps between chunks are no steps",)


def test_aiperf_s_lengths_are_the_server_s() -> None:
    """The tool counted three tokens for each of the server's, so its own inter-token latency is too short; a real file
    of aiperf 0.13, its settings beside it."""
    run = one("aiperf_rate/profile_export.jsonl")
    assert run.requests is not None and run.requests.output_tokens.tolist() == [6] * 8
    lines = (DATA / "aiperf_rate" / "profile_export.jsonl").read_text().splitlines()
    tool_ms = np.mean([json.loads(line)["metrics"]["inter_token_latency"]["value"] for line in lines])
    assert run.figures["tpot_mean_s"] * 1e3 == pytest.approx(tool_ms * 17 / 5, rel=1e-3)
    assert run.client == Client("open", 8.0, poisson=True) and run.version == "0.13.0"
    assert run.notes == ("8 answers are longer or shorter by the client: 144 tokens, 48 by the server",)


def test_aiperf_s_concurrency_is_a_closed_loop_and_is_found_out_without_settings(tmp_path: Path) -> None:
    """From the settings beside the records; without these the file says that it is not known."""
    assert one("aiperf_concurrency/profile_export.jsonl").client == Client("closed", max_concurrency=2)
    copy = tmp_path / "profile_export.jsonl"
    copy.write_text((DATA / "aiperf_concurrency" / "profile_export.jsonl").read_text())
    (bare,) = read_measured(copy)
    assert bare.client == Client("open") and "how the client was set is not known" in bare.notes[0]


def test_inference_perf_s_requests_count_by_the_server() -> None:
    """The client counted twice the tokens: its TPOT would be near half of (E2E − TTFT) / (n − 1); both layouts."""
    run = one("inference_perf_requests.json")
    assert run.requests is not None
    assert run.requests.output_tokens.tolist() == [4, 3, 0]
    assert run.requests.latency_s("tpot")[:2] == pytest.approx([0.01, 0.02])


def test_inference_perf_s_stage_has_its_tpot_from_the_means() -> None:
    """(0.68 − 0.05) / 63 s, twice what the tool says; the client's lateness is said."""
    run = one("inference_perf_stage.json")
    assert run.figures["tpot_mean_s"] == pytest.approx(0.01) and "tpot_p99_s" not in run.figures
    assert run.figures["e2e_p50_s"] == 0.68 and run.client == Client("open", 10.0)
    assert run.means["sent_rps"] == 10.02 and (run.means["given_up"], run.means["given_up_s"]) == (1, 1.0)
    assert run.notes[1].endswith("; they lasted 1 s on average, and are played until then")
    assert run.notes[-1] == "the client was late: by 0.02 s on average"


def test_llmservingsim_s_two_clocks_are_put_together_where_they_are_closest() -> None:
    """The wall clock of arrivals is shifted by the shortest way to the engine's queue."""
    run = one("llm_serving_sim.jsonl")
    assert run.requests is not None
    assert run.requests.latency_s("ttft") == pytest.approx([0.098, 0.198])
    assert run.requests.latency_s("tpot") == pytest.approx([0.1, 0.1])


def test_a_column_of_users_is_a_closed_loop(tmp_path: Path) -> None:
    """However few requests there are; a table without it has a client that nobody described."""
    rows = ["0,0.1,0.5,10,5,2", "0,0.1,0.5,10,5,2", "0.5,0.1,0.5,10,5,2"]
    header = "sent_s,ttft_s,e2e_s,prompt_tokens,output_tokens"
    (tmp_path / "users.csv").write_text("\n".join([f"{header},users", *rows]))
    (tmp_path / "open.csv").write_text("\n".join([header, *(row[:-2] for row in rows)]))
    clients = [read_measured(tmp_path / name)[0].client for name in ("users.csv", "open.csv")]
    assert clients == [Client("closed", max_concurrency=2), Client("open")]


def test_a_table_of_requests_is_read_by_its_columns() -> None:
    """Each with its unit; a failed request needs no times."""
    run = one("requests.csv")
    assert run.requests is not None and run.requests.ok.tolist() == [True, True, False]
    assert run.requests.latency_s("ttft")[:2].tolist() == [0.1, 0.08]
    assert run.requests.intended_ns is not None and run.requests.intended_ns.tolist() == [
        -1_000_000,
        499 * 10**6,
        599 * 10**6,
    ]


def test_dates_and_codes_of_http_are_read(tmp_path: Path) -> None:
    """The names of Azure's traces with a measured latency beside them; 503 is a failure."""
    path = tmp_path / "log.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens,ttft_ms,e2e_ms,status\n2024-05-12 00:00:01+00:00,10,3,5,9,200\n"
        "2024-05-12 00:00:03.500+00:00,10,3,5,9,503\n"
    )
    (run,) = read_measured(path)
    assert run.requests is not None and run.requests.ok.tolist() == [True, False]
    assert run.requests.sent_ns is not None and run.requests.sent_ns.tolist() == [0, 2_500_000_000]


def test_requests_stand_in_the_order_of_sending(tmp_path: Path) -> None:
    """Whatever their order in the file; times count from the first sending, ids of blocks go with their request."""
    path = tmp_path / "log.csv"
    path.write_text(
        "sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s,hash_ids\n"
        '7,32,2,0.1,0.2,"[5,6]"\n4,48,3,0.3,0.4,"[5,7,8]"\n6,16,4,0.5,0.6,[9]\n'
    )
    (run,) = read_measured(path)
    assert run.requests is not None and run.requests.sent_ns is not None and run.requests.hash_ids is not None
    assert run.requests.sent_ns.tolist() == [0, 2 * 10**9, 3 * 10**9]
    assert run.requests.prompt_tokens.tolist() == [48, 16, 32]
    assert run.requests.latency_s("ttft").tolist() == [0.3, 0.5, 0.1]
    assert [len(run.requests.hash_ids.row(row)) for row in range(3)] == [3, 1, 2]


def test_a_slow_last_answer_makes_no_closed_loop(tmp_path: Path) -> None:
    """60 requests at 1/s whose answers take 10 s complete at 0.86/s, of a client that waited for nobody."""
    path = tmp_path / "runs.csv"
    head = "requests,requested_rps,completed_rps,prompt_tokens,output_tokens,ttft_mean_s,e2e_mean_s\n"
    path.write_text(head + "60,1,0.857,100,10,0.1,10\n60,1,0.5,100,10,0.1,10\n")
    calm, held = read_measured(path)
    assert calm.client.arrivals == "open" and held.client == Client("closed", 1.0, max_concurrency=5)


def test_a_server_s_log_with_hash_ids_says_what_prompts_share() -> None:
    """Three ids for 40 tokens are blocks of 16."""
    run = one("server_log.jsonl")
    assert run.requests is not None and run.requests.hash_ids is not None
    assert run.requests.hash_ids.block_tokens == 16
    assert run.requests.hash_ids.row(0)[:2] == run.requests.hash_ids.row(1)[:2]


def test_a_table_of_runs_has_one_for_each_row_and_finds_closed_loops() -> None:
    """Half of the rate asked for was completed: 50/s at 4 s each are 200 in flight."""
    calm, loop = read_measured(DATA / "stages.csv")
    assert (calm.part, calm.client) == ("a, stage 0", Client("open", 10.0, poisson=True))
    assert calm.figures["ttft_mean_s"] == pytest.approx(0.04) and calm.means["sent_rps"] == 10.1
    assert loop.client == Client("closed", 100.0, max_concurrency=200) and "a closed loop in fact" in loop.notes[0]


def test_the_docs_have_the_definitions_of_every_form() -> None:
    """A row of the table of tools for each, and none is left over."""
    names = {path.name for path in DATA.iterdir() if path.is_file()}
    forms = {run.form for name in names for run in read_measured(DATA / name)}
    forms |= {one("aiperf_rate/profile_export.jsonl").form}
    text = (ROOT / "docs/is-it-true.md").read_text(encoding="utf-8")
    table = text[text.index("| tool | its TTFT | its TPOT |") :].partition("\n\n")[0]
    assert forms == {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]}


# ---- lengths counted anew


def _changed(name: str, folder: Path, **values: object) -> MeasuredRun:
    """The run of sample `name` with some of its keys changed."""
    path = folder / name
    path.write_text(json.dumps(json.loads((DATA / name).read_text()) | values))
    (run,) = read_measured(path)
    return run


def test_an_answer_of_more_pieces_than_tokens_was_counted_anew_and_has_as_many_tokens_as_pieces(tmp_path: Path) -> None:
    """TPOT, tokens/s and what is replayed are by these; two pieces more, of a role and an end, are none."""
    gaps = {"itls": [[0.02] * 40, [0.02] * 30, [0.02] * 50, []]}
    run = _changed("vllm_detailed.json", tmp_path, output_lens=[20, 18, 25, 0], **gaps)
    assert run.requests is not None and run.requests.output_tokens.tolist() == [41, 31, 51, 0]
    assert run.figures["tpot_mean_s"] == pytest.approx(0.02)
    assert "the client counted 63 output tokens anew, of answers that came in 123 pieces" in run.notes[1]
    role = _changed("vllm_detailed.json", tmp_path, output_lens=[39, 29, 49, 0], **gaps)
    assert role.requests is not None and role.requests.output_tokens.tolist() == [39, 29, 49, 0]
    assert len(role.notes) == 1


def test_an_engine_s_own_count_is_taken_before_the_client_s(tmp_path: Path) -> None:
    """Where a table has both, however many pieces came; and said in tokens."""
    path = tmp_path / "both.csv"
    head = "sent_s,prompt_tokens,output_tokens,completion_tokens,chunks,ttft_s,e2e_s\n"
    path.write_text(head + "0,10,19,25,30,0.1,2.5\n1,10,20,25,30,0.1,2.5\n")
    (run,) = read_measured(path)
    assert run.requests is not None and run.requests.output_tokens.tolist() == [25, 25]
    assert run.figures["tpot_mean_s"] == pytest.approx(0.1)
    assert run.notes == ("2 answers are longer or shorter by the client: 39 tokens, 50 by the server",)


def test_a_mean_time_between_pieces_gives_away_a_mean_length_counted_anew(tmp_path: Path) -> None:
    """E2E − TTFT over the mean ITL are 49 gaps of answers told as of 40 tokens: 50, by which TPOT and tokens/s are."""
    totals = {"completed": 3, "failed": 0, "num_prompts": 3, "total_output_tokens": 120, "output_throughput": 40.0}
    times = {"mean_ttft_ms": 100.0, "mean_e2el_ms": 590.0, "mean_itl_ms": 10.0, "mean_tpot_ms": 490 / 39}
    run = _changed("vllm_aggregates.json", tmp_path, **totals, **times)
    assert run.means["output_tokens"] == pytest.approx(50)
    assert run.figures["tpot_mean_s"] == pytest.approx(0.010) and run.figures["output_tokens_per_s"] == 50
    assert "the client counted 40 output tokens anew, of answers of 50 pieces" in run.notes[1]
    plain = _changed("vllm_aggregates.json", tmp_path, **totals, **times | {"mean_itl_ms": 490 / 39})
    assert plain.means["output_tokens"] == 40 and len(plain.notes) == 1


@pytest.mark.parametrize(
    ("tpot_ms", "tokens", "note"),
    [(10, 247, "mean TTFT, TPOT and E2E are of 247, which are taken"), (12.7, 194, ""), (20, 194, "does not tell")],
)
def test_means_that_are_of_other_tokens_than_told_give_them_away(
    tmp_path: Path, tpot_ms: float, tokens: float, note: str
) -> None:
    """194 are told: 2.46 s of 10 ms each are 247 tokens; of 20 ms each fewer, which merged pieces would be, too."""
    path = tmp_path / "runs.csv"
    head = "requests,users,prompt_tokens_mean,output_tokens_mean,ttft_mean_s,e2e_mean_s,tpot_mean_ms\n"
    path.write_text(head + f"60,4,100,194,0.1,2.56,{tpot_ms}\n")
    (run,) = read_measured(path)
    assert run.means["output_tokens"] == pytest.approx(tokens)
    assert note in "".join(run.notes) and bool(note) == bool(run.notes)


@pytest.mark.parametrize(("tpot_ms", "rate"), [(2460 / 193, 388.0), (10, 494.0)], ids=["by client", "by engine"])
def test_mean_tpot_and_rate_are_by_the_engine_s_count_whoever_divided(
    tmp_path: Path, tpot_ms: float, rate: float
) -> None:
    """A table with both counts, 194 by the client and 247 by the engine: 10 ms and 494/s in any case."""
    head = "requests,users,prompt_tokens_mean,output_tokens_mean,completion_tokens_mean,ttft_mean_s,e2e_mean_s"
    path = tmp_path / "runs.csv"
    path.write_text(
        f"{head},tpot_mean_ms,completed_rps,output_tokens_per_s\n60,4,100,194,247,0.1,2.56,{tpot_ms},2,{rate}\n"
    )
    (run,) = read_measured(path)
    assert run.means["output_tokens"] == 247 and "194 output tokens on average, the engine 247" in run.notes[0]
    assert run.figures["tpot_mean_s"] == pytest.approx(0.01) and run.figures["output_tokens_per_s"] == pytest.approx(
        494
    )


def test_rates_that_are_of_other_tokens_than_told_are_said(tmp_path: Path) -> None:
    """Without latencies that tell which is right."""
    path = tmp_path / "runs.csv"
    head = "requests,users,prompt_tokens_mean,output_tokens_mean,ttft_mean_s,completed_rps,output_tokens_per_s\n"
    path.write_text(head + "60,4,100,194,0.1,2,494\n60,4,100,194,0.1,2,390\n")
    told, fits = read_measured(path)
    assert "194 output tokens are told, and tokens/s over requests/s are 247" in told.notes[0] and not fits.notes


# ---- aggregates


def _rows(folder: Path, *lines: str) -> list[MeasuredRun]:
    """The runs of a table of these lines."""
    path = folder / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_measured(path)


@pytest.mark.parametrize("name", ["users", "num_users", "concurrency", "max_concurrency", "conc"])
def test_the_most_in_flight_is_one_thing_by_any_name(tmp_path: Path, name: str) -> None:
    """A closed loop without a rate or at an infinite one, a limit of open arrivals with one; without it all at once."""
    head = f"requests,{name},request_rate,prompt_tokens_mean,output_tokens_mean,ttft_mean_ms"
    runs = _rows(
        tmp_path,
        head,
        *(f"40,{most},{rate},100,10,50" for most, rate in ((4, ""), (4, "inf"), (4, 2), ("", "Infinity"))),
    )
    assert [run.client for run in runs] == [
        Client("closed", max_concurrency=4),
        Client("closed", max_concurrency=4),
        Client("open", 2.0, poisson=True, max_concurrency=4),
        Client("at_once"),
    ]
    assert [run.part for run in runs] == ["row 1", "row 2", "row 3", "row 4"]


def test_rows_of_one_name_and_load_are_repeats(tmp_path: Path) -> None:
    """And share that name."""
    head = "config,requests,users,prompt_tokens_mean,output_tokens_mean,ttft_mean_ms"
    runs = _rows(tmp_path, head, "a,40,4,100,10,50", "a,40,4,100.5,10,52", "b,40,4,100,10,50", "b,40,8,100,10,50")
    assert [run.part for run in runs] == ["a", "a", "b, row 3", "b, row 4"]


def test_how_lengths_vary_is_read(tmp_path: Path) -> None:
    """Deviations, shortest and longest; the range of `random` data sets, of either kind, by the mean that it has."""
    head = "requests,users,prompt_tokens_mean,output_tokens_mean,ttft_mean_ms,"
    (told,) = _rows(tmp_path, head + "prompt_tokens_std,output_tokens_min,output_tokens_max", "9,4,100,10,50,7,8,12")
    assert {name: told.means[name] for name in ("prompt_tokens_std", "output_tokens_min", "output_tokens_max")} == {
        "prompt_tokens_std": 7,
        "output_tokens_min": 8,
        "output_tokens_max": 12,
    }
    spans = {(922, 0.8): (819.2, 1024.0), (1024, 0.8): (204.8, 1843.2)}
    for (mean, ratio), span in spans.items():
        (run,) = _rows(tmp_path, head + "isl,random_range_ratio", f"9,4,{mean},10,50,1024,{ratio}")
        assert (run.means["prompt_tokens_min"], run.means["prompt_tokens_max"]) == pytest.approx(span)
    for dataset, drawn in (("random-ids", True), ("random", True), ("sharegpt", False)):
        row = f"9,4,922,10,50,1024,0.8,{dataset}"
        (run,) = _rows(tmp_path, head + "isl,random_range_ratio,dataset_name", row)
        assert ("prompt_tokens_min" in run.means) == drawn
    (run,) = _rows(tmp_path, head + "random_range_ratio", "9,4,0,10,50,0.8")
    assert "prompt_tokens_min" not in run.means


def test_aggregates_of_aiperf_are_read(tmp_path: Path) -> None:
    """Lengths by the server where it told them, with their deviation; TPOT and tokens/s by these; failures by kind."""
    path = tmp_path / "profile_export_aiperf.json"
    told = json.loads((DATA / "aiperf_concurrency" / "profile_export_aiperf.json").read_text())
    counts = {
        "request_count": {"unit": "requests", "avg": 6.0},
        "request_throughput": {"unit": "requests/sec", "avg": 12.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 216.0},
        "input_sequence_length": {"unit": "tokens", "avg": 16.0, "std": 2.0, "min": 12.0, "max": 20.0},
        "output_sequence_length": {"unit": "tokens", "avg": 18.0},
    }
    error = {"error_details": {"code": 429, "type": "Too Many Requests"}, "count": 4}
    path.write_text(json.dumps(told | counts | {"error_summary": [error]}))
    (run,) = read_measured(path)
    assert run.client == Client("closed", max_concurrency=2) and run.figures["ttft_mean_s"] == pytest.approx(
        0.0553, abs=1e-4
    )
    assert run.means["prompt_tokens_std"] == 2 and run.means["requests"] == 6
    assert any("the client's, who counts the text anew" in note for note in run.notes)
    assert any(note.startswith("4 of 10 requests failed (4 HTTP 429)") for note in run.notes)
    by_server = {"usage_completion_tokens": {"unit": "tokens", "avg": 6.0}}
    path.write_text(json.dumps(told | counts | by_server))
    (run,) = read_measured(path)
    assert run.means["output_tokens"] == 6 and run.figures["output_tokens_per_s"] == pytest.approx(72)
    assert run.figures["tpot_mean_s"] == pytest.approx(told["inter_token_latency"]["avg"] / 1e3 * 17 / 5)


# ---- several models, failures


def test_of_several_models_the_scenario_s_is_taken_and_the_others_are_counted(tmp_path: Path) -> None:
    """By its name with more words, in any case and folder; none or two that fit are refused with their names."""
    head = "model,requests,users,prompt_tokens_mean,output_tokens_mean,ttft_mean_ms"
    names = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B")
    runs = _rows(tmp_path, head, *(f"{name},40,{users},100,10,50" for users, name in enumerate(names, 1)))
    (mine,) = runs_of_model(runs, "llama-3.1-8b")
    assert mine.part == "meta-llama/Llama-3.1-8B-Instruct"
    assert mine.notes[-1].startswith("2 of other models left out: the rows are of meta-llama")
    assert [run.client.max_concurrency for run in runs_of_model(runs, "qwen3-8b")] == [2, 3]
    with pytest.raises(
        MeasuredError, match=r"rows of 2 models, .* \(1\), Qwen/Qwen3-8B \(2\): none is the scenario's gpt"
    ):
        runs_of_model(runs, "gpt-oss-20b")
    (alone, _) = runs_of_model(runs[1:], "gpt-oss-20b")
    assert alone.notes[-1] == "measured of Qwen/Qwen3-8B, and the scenario's model is gpt-oss-20b"
    assert runs_of_model(runs[1:], "qwen3-8b") == runs[1:]


def test_requests_of_several_models_are_runs_of_their_own(tmp_path: Path) -> None:
    """Each in the order of sending, with its own failures; of one nothing may have ended well."""
    head = "sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s,model,error"
    rows = ["0,10,5,1,2,a,", "1,10,5,1,2,b,", "2,10,0,,30,b,Request timed out.", "3,20,5,1,2,a,", "4,10,,,,c,HTTP 500"]
    runs = _rows(tmp_path, head, *rows)
    assert runs[0].notes[0] == "all 1 requests of c failed: left out"
    assert [(run.part, len(run.requests or [])) for run in runs] == [("a", 2), ("b", 2)]
    assert "1 of 2 requests failed (1 timeout): their latencies are no figures" in runs[1].notes


def test_a_column_without_a_name_is_no_model(tmp_path: Path) -> None:
    """As of numbered rows that a data frame wrote: all requests are of one run."""
    (run,) = _rows(tmp_path, ",sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s", "0,0,10,5,1,2", "1,1,10,5,1,2")
    assert run.model == "" and run.requests is not None and len(run.requests) == 2


def test_failures_are_counted_by_kind_and_those_that_lasted_have_their_time(tmp_path: Path) -> None:
    """What was refused held no engine, however it is told; what timed out, or broke off after some tokens, did."""
    head = "sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s,status,error"
    bad = ["1,10,,,0.01,error,429 Too Many Requests", "2,10,,,60,error,Timeout on reading data", "3,10,7,1,9,503,"]
    (run,) = _rows(tmp_path, head, "0,10,5,1,2,ok,", *bad, "4,10,,,0.1,failed,Connection refused", "5,10,,,0.1,429,")
    assert run.requests is not None and run.requests.e2e_ns.tolist() == [2 * 10**9, -1, 60 * 10**9, 9 * 10**9, -1, -1]
    assert run.notes[0].startswith("5 of 6 requests failed (2 HTTP 429, 1 timeout, 1 HTTP 503, 1 not sent): their")


def test_failed_requests_in_the_aggregates_of_a_table_are_told_and_not_played(tmp_path: Path) -> None:
    """4,068 of 4,800: the 732 others are sent at their part of the rate, and make no closed loop by being fewer."""
    head = "requests,failed,requested_rps,completed_rps,prompt_tokens_mean,output_tokens_mean,ttft_mean_s,e2e_mean_s"
    (run,) = _rows(tmp_path, head, "4800,4068,80,12.1,100,10,0.1,0.5")
    assert run.means["requests"] == 732 and run.means["sent_rps"] == pytest.approx(12.2)
    assert run.client == Client("open", 80.0, poisson=True)
    assert run.notes[0].startswith("4,068 of 4,800 requests failed: their latencies are no figures, and they are not")


# ---- the client


def _run(client: Client, sent_s: list[float], e2e_s: float = 0.5, late_s: float = 0.0) -> MeasuredRun:
    """Requests of 10 and 5 tokens, sent at these times, each `late_s` after it was meant to be."""
    sent = (np.array(sent_s) * 1e9).astype(np.int64)
    count = len(sent)
    requests = MeasuredRequests(
        sent,
        sent - round(late_s * 1e9),
        np.full(count, 10**8),
        np.full(count, round(e2e_s * 1e9)),
        np.full(count, 10),
        np.full(count, 5),
        np.full(count, True),
        np.full(count, MISSING),
    )
    return with_faults(MeasuredRun("file", "tidy table", "", client, {}, requests))


POISSON = np.cumsum(np.random.default_rng(1).exponential(0.1, 400)).tolist()


def test_a_client_in_time_and_poisson_as_asked_draws_no_note() -> None:
    """Also one that is late by less than 10 ms and a tenth of a gap."""
    assert _run(Client("open", 10.0, poisson=True), POISSON, late_s=0.015).notes == ()


def test_a_late_client_is_told() -> None:
    """By how much, and how many of its requests."""
    (note,) = _run(Client("open", 10.0, poisson=True), POISSON, late_s=0.05).notes
    assert note.startswith("the client was late: 400 of 400 requests by more than 19.") and "up to 50 ms" in note


def test_a_client_in_lockstep_is_told() -> None:
    """Five at a time though 10/s were to be sent one by one."""
    sent = np.repeat(np.arange(80) * 0.5, 5).tolist()
    notes = _run(Client("open", 10.0), sent).notes
    assert notes == ("the client was in lockstep: 80% of its requests were sent within 1 ms of the one before",)


def test_gaps_that_are_not_poisson_are_told() -> None:
    """Equal gaps where exponential ones were asked for; another rate than asked for."""
    notes = _run(Client("open", 20.0, poisson=True), (np.arange(400) * 0.1).tolist()).notes
    assert notes == (
        "Poisson was asked for, gaps with a coefficient of variation of 0.00 were sent",
        "20/s were asked for and 10/s sent",
    )


def test_a_client_that_nobody_described_is_a_closed_loop_where_as_many_are_always_in_flight() -> None:
    """Three requests of half a second each, over and over; Poisson arrivals are none."""
    loop = _run(Client(), [round(0.5 * turn + 0.1 * user, 3) for turn in range(20) for user in range(3)], e2e_s=0.4999)
    assert loop.client == Client("closed", max_concurrency=3)
    assert loop.notes == ("a closed loop in fact: 3 in flight after every sending",)
    assert _run(Client(), POISSON).client == Client("open")
