"""Files of measured runs: each tool's metrics in our definitions, how its client was set, what was wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from batchsim.check.measured.client_faults import with_faults
from batchsim.check.measured.definitions import DEFINITIONS
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import MISSING, Client, MeasuredRequests, MeasuredRun

DATA = Path(__file__).parents[1] / "data" / "measured"


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
    assert run.means == {"requests": 3, "prompt_tokens": 200, "output_tokens": 4, "sent_rps": 10}


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
    """From the settings beside the records; without these the file says that nobody knows."""
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
    assert run.means["sent_rps"] == 10.02 and run.notes[-1] == "the client was late: by 0.02 s on average"


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


def test_every_form_has_its_definitions() -> None:
    """And none is left over."""
    names = {path.name for path in DATA.iterdir() if path.is_file()}
    forms = {run.form for name in names for run in read_measured(DATA / name)}
    forms |= {one("aiperf_rate/profile_export.jsonl").form}
    assert forms == {row.form for row in DEFINITIONS}


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


def test_the_docs_have_the_definitions_of_every_tool() -> None:
    """Its table is made of them, word for word."""
    text = (Path(__file__).parents[2] / "docs/is-it-true.md").read_text(encoding="utf-8")
    for row in DEFINITIONS:
        assert f"| {row.form} | {row.ttft} | {row.tpot} | {row.itl} | {row.read} |\n" in text
