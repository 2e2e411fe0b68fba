"""Measured runs replayed in simulation: known truths come back, whatever the client did; what cannot be replayed."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import FIGURES, MISSING, Client, MeasuredRequests, MeasuredRun
from batchsim.check.validation.against import compare
from batchsim.check.validation.comparison import Comparison
from batchsim.check.validation.impossible import floors
from batchsim.check.validation.replay import Replay, replay, simulated_requests
from batchsim.cost.fitted import Fitted, StepTerms
from batchsim.report.text.validation_text import markdown, report
from batchsim.report.validation_report import Validation, to_json
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.traces.trace_rows import HashIds

SCENARIO = """\
model: llama-3.1-8b
cost: {kind: linear, base: 10ms, per_token: 20us, per_sequence: 500us, per_context_token: 0us}
kv: {tokens: 16000}
max_model_len: 2000
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths: {prompt: {kind: fixed, tokens: 1}, output: {kind: fixed, tokens: 1}}
  output_cap: exact
  requests: 1
policies:
  vllm: {max_num_seqs: 8, max_num_batched_tokens: 512, enable_prefix_caching: true, async_scheduling: false}
load: {mean_rate: [1/s]}
slo: ttft<1s @ 99%
seeds: 1
"""


@cache
def engine(*changes: tuple[str, str]) -> Setup:
    """The engine of SCENARIO with texts of it replaced."""
    text = SCENARIO
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return Setup.of(parse_scenario(text, "mine.yaml", Path()))


def asked(count: int = 60, gap_s: float = 0.05, client: Client | None = None, output: int = 9) -> MeasuredRun:
    """Requests that were asked for, their measured times not known yet."""
    rng = np.random.default_rng(3)
    sent = np.rint(np.cumsum(rng.exponential(gap_s, count)) * 1e9).astype(np.int64)
    nothing = np.full(count, MISSING)
    requests = MeasuredRequests(
        sent_ns=sent - sent[0],
        intended_ns=None,
        ttft_ns=nothing,
        e2e_ns=nothing,
        prompt_tokens=rng.integers(20, 200, count),
        output_tokens=rng.integers(2, output, count),
        ok=np.full(count, True),
        chunks=nothing,
    )
    return MeasuredRun("asked", "tidy table", "", client or Client("open"), {}, requests)


def measured(setup: Setup, run: MeasuredRun) -> MeasuredRun:
    """`run` as `setup`'s engine serves it: the truth that a comparison has to find."""
    (spec,) = setup.scenario.specs
    found = simulated_requests(replay(setup, run).simulate(spec))
    assert run.requests is not None
    requests = replace(found, hash_ids=run.requests.hash_ids)
    return replace(run, requests=requests, figures=requests.figures())


def compared(setup: Setup, *runs: MeasuredRun, shift: bool = False) -> Comparison:
    return compare(setup, setup.scenario.specs[0], runs, shift=shift)


CLIENTS = {
    "open": Client("open"),
    "open_limited": Client("open", max_concurrency=3),
    "closed": Client("closed", max_concurrency=5),
    "closed_hardly_full": Client("closed", max_concurrency=40),
    "at_once": Client("at_once"),
}


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_the_same_engine_shows_no_error(client: Client) -> None:
    """Every figure of every kind of client to the last digit, and no request that parts."""
    found = compared(engine(), measured(engine(), asked(client=client)))
    assert {error.name: error.error for error in found.errors} == dict.fromkeys(FIGURES, 0.0)
    assert found.parting is None


def test_a_closed_loop_that_begins_slowly_is_replayed_as_it_began() -> None:
    """Five users begin within 2 s, when the first have long been answered: each of their sendings is kept."""
    ramp = (
        (
            "arrivals: {kind: poisson, mean_rate: 1/s}",
            "arrivals: {kind: closed_loop, users: 5, think_time: 0s, shared_list: true, ramp: 2s}",
        ),
        ("tokens: 1}, output: {kind: fixed, tokens: 1}", "tokens: 90}, output: {kind: fixed, tokens: 12}"),
        ("requests: 1\n", "requests: 120\n"),
        ("load: {mean_rate: [1/s]}", "load: {users: [5]}"),
    )
    setup = engine(*ramp)
    truth = simulated_requests(simulate_point(setup, setup.scenario.points()[0]))
    assert truth.sent_ns is not None
    truth = truth.picked(np.argsort(truth.sent_ns, kind="stable"))
    run = MeasuredRun("file", "tidy table", "", Client("closed", max_concurrency=5), truth.figures(), truth)
    assert {error.name: error.error for error in compared(engine(), run).errors} == dict.fromkeys(FIGURES, 0.0)


def test_a_slower_engine_shows_by_how_much_and_which_load_would_do() -> None:
    """Steps 10 % longer in truth: TPOT of requests alone is 9.1 % short; more load would make up for it."""
    slow = engine(("base: 10ms", "base: 11ms"), ("per_token: 20us", "per_token: 22us"), ("500us", "550us"))
    alone = compared(engine(), measured(slow, asked(20, gap_s=50.0)))
    assert alone.error("tpot_mean_s").error == pytest.approx(1 / 1.1 - 1, abs=1e-9)
    busy = compared(engine(), measured(slow, asked(200, gap_s=0.012)), shift=True)
    shift = busy.shifts["e2e_mean_s"]
    assert shift is not None and 0.02 < shift < 0.2
    again = replay(engine(), busy.runs[0]).simulate(engine().scenario.specs[0], 1 + shift)
    shifted = simulated_requests(again).figures()
    assert shifted["e2e_mean_s"] == pytest.approx(busy.error("e2e_mean_s").live, rel=0.02)


def test_a_closed_loop_is_shifted_by_its_users() -> None:
    """Measured with 44 users, replayed with 40: a tenth more."""
    truth = measured(engine(), asked(400, gap_s=1e-6, client=Client("closed", max_concurrency=44)))
    told = replace(truth, client=Client("closed", max_concurrency=40))
    assert compared(engine(), told, shift=True).shifts["e2e_mean_s"] == pytest.approx(0.1, abs=0.005)


def test_the_users_of_a_loop_that_was_asked_for_a_rate_begin_at_that_rate() -> None:
    """Of aggregates: five are sent over time, not all at once, and each that follows when another ends."""
    means = {"requests": 40.0, "prompt_tokens": 100.0, "output_tokens": 10.0}
    run = MeasuredRun("file", "tidy table", "", Client("closed", 2.0, max_concurrency=5), {}, means=means)
    found = replay(engine(), run)
    sent_ns = found.setup.rows[0].arrival_ns
    assert sent_ns is not None and (np.diff(sent_ns[:5]) > 0).all() and not sent_ns[5:].any() and sent_ns[4] > 0.5e9
    assert "its users begin at the 2/s that were asked for" in found.notes[1]
    many = replay(engine(), replace(run, means=means | {"requests": 4000.0}))
    assert many.setup.workload(1.0, 0).num_offered == 4000


def test_shared_prompts_are_replayed() -> None:
    """Blocks of 16 that stand in an earlier prompt are found in the cache again: without them prompts take longer."""
    run = asked(20, gap_s=1.0)
    assert run.requests is not None
    prompts = np.full(20, 160)
    ids = HashIds.of(16, np.tile(np.arange(10), 20), np.arange(21) * 10)
    run = replace(run, requests=replace(run.requests, prompt_tokens=prompts, hash_ids=ids))
    truth = measured(engine(), run)
    assert truth.requests is not None
    assert compared(engine(), truth).error("ttft_mean_s").error == 0
    bare = replace(truth, requests=replace(truth.requests, hash_ids=None))
    assert (compared(engine(), bare).error("ttft_mean_s").error or 0) > 0.1


def test_aggregates_are_played_as_so_many_requests_of_the_mean_lengths() -> None:
    """At the rate that was sent, exactly; a closed loop has all waiting from the start."""
    means = {"requests": 50.0, "prompt_tokens": 100.4, "output_tokens": 8.0, "sent_rps": 10.0}
    run = MeasuredRun("file", "tidy table", "", Client("open", 10.0), {"ttft_mean_s": 0.02}, None, means)
    played = replay(engine(), run)
    found = simulated_requests(played.simulate(engine().scenario.specs[0]))
    assert found.sent_ns is not None and set(found.prompt_tokens.tolist()) == {100}
    assert int(found.sent_ns[-1]) == pytest.approx(49 / 10 * 1e9, abs=2)
    assert compared(engine(), run).parting is None
    loop = replay(engine(), replace(run, client=Client("closed", max_concurrency=4)))
    assert loop.limit == 4 and not loop.open


def _of_means(client: Client, count: int = 160, **means: float) -> Replay:
    """The replay of aggregates of `count` requests of 100 and 40 tokens on average."""
    its = {"requests": float(count), "prompt_tokens": 100.0, "output_tokens": 40.0, "sent_rps": 10.0} | means
    return replay(engine(), MeasuredRun("file", "tidy table", "", client, {}, None, its))


def test_users_of_a_closed_loop_of_aggregates_are_not_in_lockstep() -> None:
    """Lengths vary by ± 20 % around the means, and the note says so: with equal ones all five ask at the same time
    again and again, and wait for each other's prompts."""
    loop = _of_means(Client("closed", max_concurrency=5))
    (spec,) = engine().scenario.specs
    varied = simulated_requests(loop.simulate(spec))
    assert varied.prompt_tokens.mean() == pytest.approx(100, abs=0.1) and varied.output_tokens.mean() == pytest.approx(
        40, abs=0.1
    )
    assert (varied.prompt_tokens.min(), varied.prompt_tokens.max()) == (80, 120)
    assert "prompts vary from 80 to 120 tokens, within ± 20% by assumption" in loop.notes[0]
    assert "outputs vary from 32 to 48 tokens, within" in loop.notes[0]
    equal = _of_means(Client("closed", max_concurrency=5), prompt_tokens_std=0.0, output_tokens_std=0.0)
    in_step = simulated_requests(equal.simulate(spec))
    assert {*in_step.prompt_tokens.tolist(), *in_step.output_tokens.tolist()} == {100, 40}
    assert in_step.figures()["ttft_mean_s"] > 1.4 * varied.figures()["ttft_mean_s"]


def test_lengths_of_aggregates_vary_as_the_file_tells() -> None:
    """By its deviation, or between its shortest and longest; never beyond what the engine could serve; one user, and
    open arrivals, have no lockstep to be kept from."""
    rows = _of_means(
        Client("closed", max_concurrency=8), prompt_tokens_std=30.0, output_tokens_min=10.0, output_tokens_max=70.0
    ).setup.rows[0]
    assert rows.prompt_tokens.std() == pytest.approx(30, rel=0.02) and rows.prompt_tokens.mean() == pytest.approx(
        100, abs=0.5
    )
    assert (rows.output_tokens.min(), rows.output_tokens.max()) == (10, 70)
    skewed = _of_means(Client("closed", max_concurrency=8), output_tokens_std=40.0).setup.rows[0]
    assert skewed.output_tokens.mean() == pytest.approx(40, abs=0.5) and np.median(skewed.output_tokens) < 32
    for output in (90.0, 100.0):
        tight = _of_means(Client("closed", max_concurrency=8), prompt_tokens=1900.0, output_tokens=output).setup.rows[0]
        assert (
            len({*tight.prompt_tokens.tolist()}) > 1 and int((tight.prompt_tokens + tight.output_tokens).max()) <= 2000
        )
    for client in (Client("closed", max_concurrency=1), Client("open", 10.0)):
        assert {*_of_means(client).setup.rows[0].prompt_tokens.tolist()} == {100}


def test_failures_of_aggregates_that_lasted_are_played_among_the_others() -> None:
    """Forty beside 160 are given up after 3 s: they load the engine, are no figures, and are no lost requests."""
    alone, beside = _of_means(Client("open", 10.0)), _of_means(Client("open", 10.0), given_up=40.0, given_up_s=3.0)
    (spec,) = engine().scenario.specs
    calm, busy = (simulated_requests(one.simulate(spec)) for one in (alone, beside))
    assert len(busy) == 200 and busy.ok.sum() == 160 and beside.unfinished(busy) == 0
    assert busy.figures()["e2e_mean_s"] > 1.2 * calm.figures()["e2e_mean_s"]


def test_repeats_are_one_comparison_with_their_spread() -> None:
    """Half of the range of two files, over their mean; errors are of the means."""
    one = measured(engine(), asked(40))
    other = replace(one, figures={name: 1.1 * value for name, value in one.figures.items()})
    error = compared(engine(), one, other).error("e2e_mean_s")
    assert error.spread == pytest.approx(0.05 / 1.05) and error.error == pytest.approx(1 / 1.05 - 1)


def test_failed_requests_that_the_engine_never_held_are_not_replayed_and_no_figures() -> None:
    """Without tokens and without a time they are left out, and the note says how many."""
    truth = measured(engine(), asked(30, gap_s=2.0))
    assert truth.requests is not None
    ok, output, e2e_ns = truth.requests.ok.copy(), truth.requests.output_tokens.copy(), truth.requests.e2e_ns.copy()
    ok[[3, 7]], output[[3, 7]], e2e_ns[[3, 7]] = False, 0, MISSING
    requests = replace(truth.requests, ok=ok, output_tokens=output, e2e_ns=e2e_ns)
    found = compared(engine(), replace(truth, requests=requests, figures=requests.figures()))
    assert found.error("e2e_mean_s").error == pytest.approx(0, abs=1e-12)
    assert found.notes == ("failed requests that are not replayed, as the file tells of no time in the engine: 2",)


def test_failed_requests_of_prompts_beyond_max_model_len_are_counted_and_not_replayed() -> None:
    """One whose prompt fills max_model_len 2,000, without a token: the engine refused it, whatever time is told."""
    truth = measured(engine(), asked(30, gap_s=2.0))
    assert truth.requests is not None
    prompt, output, ok = (getattr(truth.requests, name).copy() for name in ("prompt_tokens", "output_tokens", "ok"))
    prompt[[3, 7]], output[[3, 7]], ok[[3, 7]] = (2000, 1999), 0, False
    requests = replace(truth.requests, ok=ok, output_tokens=output, prompt_tokens=prompt)
    found = replay(engine(), replace(truth, requests=requests, figures=requests.figures()))
    assert 3 not in found.index and 7 in found.index
    note = "failed requests that are not replayed, of prompts that leave no token below max_model_len 2,000: 1"
    assert note in found.notes and not any("no time in the engine" in one for one in found.notes)


@pytest.mark.parametrize("client", [Client("open"), Client("closed", max_concurrency=5)], ids=["open", "closed"])
def test_requests_that_timed_out_load_the_engine_until_they_are_given_up(client: Client) -> None:
    """Every third of 90 waits for 2 s for an answer of 500 tokens: of these the file tells the time alone, and the
    others' latencies come out as they were (in a closed loop nearly: a cancel waits for a step's end), and not without
    that time."""
    run = asked(90, client=client)
    assert run.requests is not None
    late = np.arange(90) % 3 == 1
    output, given_up_ns = np.where(late, 500, run.requests.output_tokens), np.where(late, 2 * 10**9, MISSING)
    sent = replace(run.requests, ok=~late, output_tokens=output, e2e_ns=given_up_ns)
    truth = measured(engine(), replace(run, requests=sent))
    assert truth.requests is not None and (~truth.requests.ok == late).all()
    e2e_ns = np.where(late, given_up_ns, truth.requests.e2e_ns)
    told = replace(truth.requests, output_tokens=np.where(late, 0, output), e2e_ns=e2e_ns)
    found = compared(engine(), replace(truth, requests=told))
    within = 1e-9 if client.arrivals == "open" else 0.03
    assert all(abs(found.error(f"{name}_mean_s").error or 0) < within for name in ("ttft", "tpot", "e2e"))
    assert any("that held the engine, and are replayed until they were given up: 30" in note for note in found.notes)
    assert not any("did not finish" in note for note in found.notes)
    dropped = replace(told, e2e_ns=np.where(late, MISSING, e2e_ns))
    assert abs(compared(engine(), replace(truth, requests=dropped)).error("e2e_mean_s").error or 0) > 0.05


def test_requests_that_were_cut_off_load_the_engine_and_are_no_figures() -> None:
    """With tokens on both sides they are replayed; the simulation's are over the others alone."""
    truth = measured(engine(), asked(30))
    assert truth.requests is not None
    ok = np.arange(30) % 2 == 0
    requests = replace(truth.requests, ok=ok)
    found = compared(engine(), replace(truth, requests=requests, figures=requests.figures()))
    assert len(found.simulated[0]) == 30
    assert {error.name: error.error for error in found.errors} == dict.fromkeys(FIGURES, 0.0)


# ---- where they part


def test_the_first_request_that_parts_is_named_with_its_cause() -> None:
    """Its own prompt where nothing was in flight; its decoding where only that is slower."""
    run = asked(10, gap_s=50.0)
    prompt = compared(engine(), measured(engine(("per_token: 20us", "per_token: 200us")), run)).parting
    assert prompt is not None and (prompt.latency, prompt.cause) == ("ttft", "prompt")
    assert "1 in flight when it was sent on both sides" in prompt.text
    decode = compared(engine(), measured(engine(("per_context_token: 0us", "per_context_token: 40us")), run)).parting
    assert decode is not None and (decode.latency, decode.cause) == ("tpot", "decode")
    assert decode.measured_s > 1.1 * decode.simulated_s


def test_a_request_may_part_by_what_others_did() -> None:
    """More in flight on one side, waiting for a slot of the batch, or lost its KV blocks: each has its word."""
    truth = measured(engine(("base: 10ms", "base: 10.9ms")), asked(200, gap_s=0.025))
    load = compared(engine(), truth).parting
    assert load is not None and load.cause == "load" and "small differences before have added up" in load.text
    two = asked(2, gap_s=0.001)
    queue = compared(engine(("max_num_seqs: 8", "max_num_seqs: 1")), measured(engine(), two)).parting
    assert queue is not None and queue.cause == "queue" and "it waited" in queue.text
    grows = asked(2, gap_s=0.001, output=400)
    tight = compared(engine(("tokens: 16000", "tokens: 480")), measured(engine(), grows)).parting
    assert tight is not None and tight.cause == "preempted"


# ---- what cannot be replayed


def test_a_run_that_the_engine_could_not_have_served_is_refused() -> None:
    """Longer than max_model_len; a prompt shorter than the shared prefix of the scenario; a run without a rate."""
    run = measured(engine(), asked())
    with pytest.raises(MeasuredError, match="is beyond max_model_len 100 of the scenario"):
        replay(engine(("max_model_len: 2000", "max_model_len: 100")), run)
    prefix = ("  requests: 1\n", "  requests: 1\n  shared_prefix: {groups: 2, added_tokens: 150}\n")
    with pytest.raises(MeasuredError, match=r"tokens cannot hold shared_prefix\.added_tokens 150"):
        replay(engine(prefix), run)
    assert run.requests is not None
    bare = replace(run, client=Client(), requests=replace(run.requests, sent_ns=None))
    with pytest.raises(MeasuredError, match="tells neither when requests were sent nor at which rate"):
        replay(engine(), bare)
    with pytest.raises(MeasuredError, match="does not say its output_tokens"):
        replay(engine(), replace(run, requests=None, means={"requests": 3, "prompt_tokens": 5}))


def test_a_simulation_written_as_a_file_comes_back_through_its_reader(tmp_path: Path) -> None:
    """As a result of vllm bench serve and as a table: no error but that of whole nanoseconds."""
    truth = measured(engine(), asked(30, gap_s=1e-6, client=Client("closed", max_concurrency=4))).requests
    assert truth is not None and truth.sent_ns is not None
    lists = {
        "input_lens": truth.prompt_tokens.tolist(),
        "output_lens": truth.output_tokens.tolist(),
        "ttfts": (truth.ttft_ns / 1e9).tolist(),
        "itls": [[(end - first) / 1e9] for first, end in zip(truth.ttft_ns, truth.e2e_ns, strict=True)],
        "start_times": (truth.sent_ns / 1e9).tolist(),
        "errors": [""] * len(truth),
    }
    head = {"backend": "vllm", "model_id": "x", "request_throughput": 1.0, "completed": 30, "total_input_tokens": 1}
    head |= {"total_output_tokens": 1, "request_rate": "inf", "max_concurrency": 4}
    (tmp_path / "result.json").write_text(json.dumps(head | lists))
    with (tmp_path / "table.csv").open("w") as file:
        rows = zip(truth.sent_ns, truth.prompt_tokens, truth.output_tokens, truth.ttft_ns, truth.e2e_ns, strict=True)
        csv.writer(file).writerows([("sent_ns", "prompt_tokens", "output_tokens", "ttft_ns", "e2e_ns"), *rows])
    for name in ("result.json", "table.csv"):
        (run,) = read_measured(tmp_path / name)
        assert run.client == Client("closed", max_concurrency=4)
        found = compared(engine(), run)
        assert max(abs(error.error or 0) for error in found.errors) < 1e-6


# ---- what cannot be


GPU = "cost: {kind: roofline, gpu: h100}"


def _told(folder: Path, columns: str, *rows: str) -> list[MeasuredRun]:
    path = folder / "told.csv"
    path.write_text("\n".join([columns, *rows]) + "\n")
    return read_measured(path)


def on_h100(**changes: str) -> Setup:
    """The engine of SCENARIO on the sheet of an H100, with keys of its first lines replaced."""
    linear = next(line for line in SCENARIO.splitlines() if line.startswith("cost:"))
    swaps = [(linear, changes.get("cost", GPU)), ("kv: {tokens: 16000}\n", "")]
    swaps += [("model: llama-3.1-8b", f"model: {changes['model']}")] if "model" in changes else []
    return engine(*swaps, ("max_model_len: 2000", f"max_model_len: {changes.get('max_model_len', '2000')}"))


def test_means_that_no_gpu_of_the_sheet_reaches_are_named_and_are_no_errors(tmp_path: Path) -> None:
    """A TTFT below the prompt's FLOPs, a TPOT below the weights' bytes, an E2E below both and tokens/s above what so
    many users can be given: each with its numbers and a reason; what can be is compared."""
    head = (
        "requests,users,prompt_tokens_mean,output_tokens_mean,ttft_mean_ms,tpot_mean_ms,e2e_mean_ms,output_tokens_per_s"
    )
    (absurd,) = _told(tmp_path, head, "8,2,1024,64,1,1,64,2000")
    found = compared(on_h100(), absurd)
    assert all(error.error is None for error in found.errors)
    (note,) = (note for note in found.notes if note.startswith("cannot be as measured"))
    assert "a mean TTFT of prompts of 1,024 tokens of 1 ms where at least 14.7 ms are needed (were prompts" in note
    assert "a mean TPOT of 1 ms where at least 4.44 ms are needed (did drafts" in note
    assert "2,000 output tokens/s with 2 in flight where at most 450 can be" in note
    assert found.runs[0].impossible["tpot_mean_s"] == 0.001
    (can_be,) = _told(tmp_path, head, "8,2,1024,64,16,4.6,306,400")
    found = compared(on_h100(), can_be)
    assert found.error("ttft_mean_s").error is not None and not found.runs[0].impossible


def test_requests_that_no_gpu_of_the_sheet_reaches_are_counted(tmp_path: Path) -> None:
    """One of forty is named and the others are compared; of a tenth the latency is left out, not those beside it."""
    head = "sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s"
    for count, out in ((1, False), (4, True)):
        rows = [f"{number},1024,33,{0.001 if number < count else 0.05},0.4" for number in range(40)]
        (run,) = _told(tmp_path, head, *rows)
        found = compared(on_h100(), run)
        (note,) = (note for note in found.notes if "cannot be" in note)
        assert f"the TTFT of {count} of 40 requests, the first one of a prompt of 1,024 tokens of 1 ms" in note
        assert (found.error("ttft_mean_s").error is None) == out == bool(found.runs[0].impossible)
        assert found.error("tpot_mean_s").error is not None


def test_bounds_are_what_the_sheet_allows_at_best() -> None:
    """All GPUs share FLOPs and weights; narrow types count; of experts those of one token; a model that a cache holds
    has no bound; nothing is known of stated step times."""
    one, four = floors(on_h100()), floors(on_h100(cost="cost: {kind: roofline, gpu: h100, tp: 4}"))
    assert one is not None and four is not None and floors(engine()) is None
    assert one.tpot_s == pytest.approx((15.01e9 - 128e6) / 3.35e12, rel=0.01)
    assert one.token_s == pytest.approx(4 * four.token_s) and one.tpot_s == pytest.approx(4 * four.tpot_s, rel=0.03)


def fitted(base_ms: float = 10.0, tpot_error: float | None = 0.1) -> Setup:
    """The engine with steps of so long, as a fit says that claims this error: 8 slots, 50 ms a request at 10 ms."""
    return replace(engine(), cost=Fitted(None, StepTerms(base=base_ms * 1e6), "some runs", tpot_error))


def validation(found: Comparison) -> Validation:
    return Validation("x", "mine", "x", {}, (found,))


def told(found: Comparison) -> str:
    return " ".join(report(validation(found)).split())


def test_a_load_within_the_error_of_saturation_has_an_interval() -> None:
    """150 requests/s of 160, with steps known to 10 %: TTFT and E2E have both ends and no error; TPOT has a number."""
    found = compared(fitted(), measured(fitted(), asked(1500, gap_s=1 / 150)))
    ttft, tpot = found.error("ttft_mean_s"), found.error("tpot_mean_s")
    assert found.is_within_error and ttft.error is None and tpot.ends is None and tpot.error == 0.0
    assert ttft.ends is not None and ttft.live is not None and ttft.error_ends is not None
    assert ttft.ends[0] < ttft.live < ttft.ends[1] and ttft.ends[1] > 3 * ttft.ends[0]
    slow = compared(fitted(11.0, None), measured(fitted(), asked(1500, gap_s=1 / 150)))
    assert ttft.ends[1] == pytest.approx(slow.error("ttft_mean_s").simulated)
    assert ttft.error_ends[1] == pytest.approx(slow.error("ttft_mean_s").error)
    text = told(found)
    assert "within the cost's error of saturation (step times ±10 %: claimed by the fit to" in text
    assert "cannot be told without calibration" in text and "errs by more" not in text
    page = json.loads(to_json(validation(found)))["points"][0]
    assert page["within_cost_error_of_saturation"] and page["cost_error"]["high"] == 0.1
    (row,) = (one for one in page["errors"] if one["name"] == "ttft_p99_s")
    assert row["error"] is None and row["ends"][0] < row["ends"][1] and row["error_ends"][0] < row["error_ends"][1]
    assert "- **vllm: the load lies within" in markdown(validation(found), ["x.png"])


@pytest.mark.parametrize(
    ("gap_s", "client"), [(1 / 50, None), (1e-6, Client("closed", max_concurrency=40))], ids=["light", "closed_loop"]
)
def test_elsewhere_a_latency_is_a_number(gap_s: float, client: Client | None) -> None:
    """Far from saturation, and in a closed loop, whose queue is never longer than its users."""
    found = compared(fitted(), measured(fitted(), asked(300, gap_s=gap_s, client=client)))
    assert not found.is_within_error and found.error("ttft_mean_s").error == 0.0
    assert "cannot be told" not in told(found)


def test_what_was_measured_beyond_the_interval_says_so() -> None:
    """Steps of 7 ms in truth, said to be 10 ms to 10 %: the cost errs by more than it claims."""
    found = compared(fitted(), measured(fitted(7.0), asked(1500, gap_s=1 / 150)))
    assert "the measured TTFT and E2E is beyond them: the cost errs by more here" in told(found)


def test_of_an_unknown_error_no_interval_is_made() -> None:
    """Where the simulated queue grows it is said that latencies may be anything; else nothing."""
    over = compared(fitted(10.0, None), measured(fitted(7.0), asked(1500, gap_s=1 / 200)))
    assert over.grows and not over.is_within_error and over.error("ttft_mean_s").error is not None
    assert "the error of step times is unknown: the fit claims none: TTFT and E2E may be anything" in told(over)
    calm = compared(fitted(10.0, None), measured(fitted(), asked(300, gap_s=1 / 50)))
    assert not calm.grows and "anything" not in told(calm)
