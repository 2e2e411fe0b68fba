"""Random traffic fitted to traces: what was drawn from a law is fitted by it, and the scenario written says it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from scipy.linalg import expm
from typer.testing import CliRunner

from batchsim.base.errors import TraceError
from batchsim.base.units import NS_PER_S
from batchsim.cli import app
from batchsim.fit.traffic import engine_check, mmpp_fit
from batchsim.fit.traffic.arrival_fit import fit_arrivals, positive_gaps_s
from batchsim.fit.traffic.engine_check import EngineCheck, holds
from batchsim.fit.traffic.goodness import compare, drawn, recorded
from batchsim.fit.traffic.length_fit import fit_lengths, num_steps, pairs_of
from batchsim.fit.traffic.load_file import cap_above, scenario_text
from batchsim.fit.traffic.mmpp_fit import fit_mmpp, log_likelihood
from batchsim.fit.traffic.traffic_fit import TrafficFit, fit_traffic
from batchsim.report.text.traffic_fit_text import heading, verdict
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from batchsim.workload.arrivals import arrival_times_ns
from batchsim.workload.build import build_workload
from batchsim.workload.lengths import PairLengths, StepLengths
from batchsim.workload.processes import (
    GammaArrivals,
    MmppArrivals,
    MmppState,
    PoissonArrivals,
    RampArrivals,
    StepsArrivals,
    WeibullArrivals,
)
from batchsim.workload.sharing import Sessions
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import TraceConfig
from batchsim.workload.traces.trace_rows import TraceRows
from batchsim.workload.workload_config import TrafficClass, WorkloadConfig
from tests.support.paths import ROOT

ENGINE = {
    "model": "llama-3.1-8b",
    "cost": {"kind": "linear", "base": "20ms", "per_token": "10us", "per_sequence": "500us"},
    "kv": {"tokens": 100000},
    "policies": {"continuous": {"max_num_seqs": 8, "max_num_batched_tokens": 2048}},
    "slo": "ttft<1s @ 99%",
}
TWO = MmppArrivals(10.0, (MmppState(0.1, 20 * NS_PER_S), MmppState(1, 5 * NS_PER_S)))


def rows_of(arrival_ns: NDArray[np.int64], seed: int = 0, **labels: NDArray[np.int64]) -> TraceRows:
    """Rows at these times with lengths that hang together: an output is a tenth of its prompt."""
    prompt = np.random.default_rng(seed).integers(10, 500, len(arrival_ns))
    return TraceRows(arrival_ns - arrival_ns[0], prompt, np.maximum(prompt // 10, 1), "t.csv", "mapping", labels=labels)


@pytest.fixture
def two_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws of three and four states, which take most of the time, are not tried."""
    monkeypatch.setattr(mmpp_fit, "MOST_STATES", 2)


few_laws = pytest.mark.usefixtures("two_states")


def poisson_rows(requests: int = 400, rate: float = 4.0) -> TraceRows:
    return rows_of(arrival_times_ns(PoissonArrivals(rate), 1, None, requests))


def test_the_likelihood_of_states_is_that_of_the_product_of_matrix_exponentials() -> None:
    """Three states, some gaps: pi L exp(D x1) L exp(D x2) L ... 1, L the rates, D the generator less L."""
    rates, stays, weights = np.array([0.5, 2.0, 6.0]), np.array([3.0, 1.0, 0.4]), np.array([1.0, 2.0, 0.7])
    gaps = np.array([0.1, 2.0, 0.01, 0.6, 1.3, 0.05])
    jumps = np.tile(weights, (3, 1)) * (1 - np.eye(3))
    generator = (jumps / jumps.sum(axis=1, keepdims=True) - np.eye(3)) / stays[:, None]
    shares = weights * (weights.sum() - weights) * stays
    shares /= shares.sum()
    assert shares @ generator == pytest.approx(np.zeros(3), abs=1e-12)
    rates = rates / (shares @ rates)
    density = shares * rates
    for gap in gaps:
        density = density @ expm((generator - np.diag(rates)) * gap) * rates
    values = np.log(np.concatenate((rates, stays, weights[1:])))
    assert log_likelihood(values, 3, gaps) == pytest.approx(np.log(density.sum()))


def test_two_states_are_found_again() -> None:
    """Their rates, stays and mean rate, from some 9,000 arrivals."""
    times = arrival_times_ns(TWO, 2, 900 * NS_PER_S, None)
    process, _, numbers = next(fit_mmpp(np.diff(times) / NS_PER_S, str))
    low, high = process.states
    assert numbers == 3 and process.mean_rate == pytest.approx(NS_PER_S / np.diff(times).mean())
    assert low.rate / high.rate == pytest.approx(0.1, rel=0.2)
    assert low.stay == pytest.approx(TWO.states[0].stay, rel=0.35)
    assert high.stay == pytest.approx(TWO.states[1].stay, rel=0.35)


@pytest.mark.slow
@pytest.mark.parametrize(
    "process",
    [
        PoissonArrivals(8.0),
        GammaArrivals(8.0, 2.0),
        WeibullArrivals(8.0, 0.5),
        TWO,
        RampArrivals(8.0, growth=6.0, over=400 * NS_PER_S),
        StepsArrivals(8.0, rates=(2, 8, 5, 1), every=100 * NS_PER_S),
    ],
    ids=lambda process: process.kind,
)
def test_what_was_drawn_from_a_law_is_fitted_by_it(process) -> None:
    """The lowest BIC is that of the kind that was drawn."""
    fits, _ = fit_arrivals(arrival_times_ns(process, 4, 400 * NS_PER_S, None))
    assert fits[0].process.kind == process.kind
    if isinstance(process, GammaArrivals | WeibullArrivals):
        assert getattr(fits[0].process, "cv") == pytest.approx(process.cv, rel=0.1)  # noqa: B009
    if isinstance(process, RampArrivals):
        assert getattr(fits[0].process, "growth") == pytest.approx(6.0, rel=0.25)  # noqa: B009


def test_states_within_a_rate_that_does_not_change_are_an_mmpp() -> None:
    """Arrival for arrival."""
    within = RampArrivals(10.0, growth=1.0, over=NS_PER_S, states=TWO.states)
    ours, theirs = (arrival_times_ns(each, 1, 600 * NS_PER_S, None) for each in (within, TWO))
    assert np.abs(ours - theirs).max() <= 1
    with pytest.raises(ValueError, match="cv 2 and states both say how bursty"):
        replace(within, cv=2.0)


def test_times_that_only_a_clock_explains_are_refused_with_its_tick() -> None:
    """And too few arrivals; some gaps of 0 are counted as half the smallest other one, with a note."""
    ticks = np.sort(np.random.default_rng(0).integers(0, 100, 1000)) * 3 * NS_PER_S
    with pytest.raises(TraceError, match=r"of the gaps are 0: the clock ticks every 3 s.*Write --jitter 3s"):
        positive_gaps_s(ticks)
    with pytest.raises(TraceError, match="100 arrivals are too few to fit a law to"):
        positive_gaps_s(np.arange(100) * NS_PER_S)
    gaps, notes = positive_gaps_s(np.concatenate(([0], np.arange(150) * NS_PER_S)))
    assert gaps.min() == 0.5 and notes == ["1 gaps of 0 counted as 0.5 s"]


def test_pairs_keep_means_and_what_lengths_have_to_do_with_each_other() -> None:
    """No more pairs than asked for; with as few rows as pairs they are the rows, each as often as it stands there."""
    rng = np.random.default_rng(0)
    prompt = rng.lognormal(6, 1, 5000).astype(np.int64) + 1
    output = np.maximum((prompt * rng.uniform(0.1, 0.5, 5000)).astype(np.int64), 1)
    law = pairs_of(prompt, output, 600)
    assert law.weights is not None and len(law.prompt) <= 600 and sum(law.weights) == 5000
    assert np.average(law.prompt, weights=law.weights) == pytest.approx(prompt.mean(), abs=0.5)
    assert law.mean_output_tokens == pytest.approx(output.mean(), abs=0.5)
    spread = np.cov(law.prompt, law.output, fweights=np.array(law.weights, int))
    assert spread[0, 1] == pytest.approx(np.cov(prompt, output)[0, 1], rel=0.03)
    assert pairs_of(np.array([5, 5, 7]), np.array([1, 1, 2]), 9) == PairLengths((5, 7), (1, 2), (2, 1))


def test_lengths_are_in_steps_only_where_they_change_in_time() -> None:
    """Independent rows have one law; where prompts double half-way through, two."""
    rows = rows_of(np.arange(4000) * NS_PER_S)
    assert isinstance(fit_lengths(rows.prompt_tokens, rows.output_tokens, np.arange(4000) * NS_PER_S), PairLengths)
    doubled = np.where(np.arange(4000) < 2000, rows.prompt_tokens, 2 * rows.prompt_tokens)
    assert num_steps(doubled, rows.output_tokens, np.arange(4000) * NS_PER_S) == 2
    law = fit_lengths(doubled, rows.output_tokens, np.arange(4000) * NS_PER_S)
    assert isinstance(law, StepLengths) and law.every == pytest.approx(2000 * NS_PER_S, rel=1e-3)
    assert np.average(law.parts[1].prompt, weights=law.parts[1].weights) == pytest.approx(
        doubled[2000:].mean(), abs=0.5
    )


def test_lengths_in_steps_are_those_of_the_time_of_sending() -> None:
    """Before the step the first part, after it the second; where no times are known, all parts by their weights."""
    parts = (PairLengths((1,), (10,), (3,)), PairLengths((2,), (20,), (1,)))
    workload = WorkloadConfig(PoissonArrivals(20.0), 64, StepLengths(parts, 30 * NS_PER_S), duration=60 * NS_PER_S)
    traffic = drawn(workload, 0)
    first = traffic.sent_ns < 30 * NS_PER_S - NS_PER_S  # counted from the first request
    later = traffic.sent_ns > 30 * NS_PER_S
    assert {*traffic.prompt_tokens[first]} == {1} and {*traffic.prompt_tokens[later]} == {2}
    assert StepLengths(parts, 1).mean_output_tokens == 12.5


def workloads() -> dict[str, WorkloadConfig]:
    """One of every kind of what a fit may write."""
    pairs = PairLengths((5, 7), (1, 2), (2, 1))
    plain = WorkloadConfig(TWO, 64, pairs, duration=90 * NS_PER_S)
    steps = StepsArrivals(4.0, rates=(1.5, 2), every=7_123_456_789, states=TWO.states)
    classes = {"a": TrafficClass(0.25, lengths=pairs), "b:c": TrafficClass(0.75, 4, StepLengths((pairs, pairs), 5))}
    sessions = Sessions(pairs.index(), 1_234_567, "exponential")
    return {
        "mmpp": plain,
        "steps": replace(plain, arrivals=steps),
        "classes": replace(plain, lengths=None, classes=classes),
        "sessions": replace(plain, arrivals=RampArrivals(2.5, growth=3.0, over=9, cv=1.25), sessions=sessions),
    }


@pytest.mark.parametrize("name", workloads())
def test_the_scenario_written_reads_as_the_workload_fitted(name: str, tmp_path: Path) -> None:
    """Every number with its unit, to the last digit."""
    workload = workloads()[name]
    text = scenario_text(ENGINE, workload, ("why",))
    assert parse_scenario(text, "load.yaml", tmp_path).file.workload == workload
    assert text.startswith("# why\nmodel: llama-3.1-8b\n")


@few_laws
def test_sessions_are_turns_that_grow_with_the_think_time_of_the_log() -> None:
    """By hand: two turns, each prompt holding the one before and its answer, sent 2 s after answers that took 1 s."""
    starts = np.arange(150) * 10 * NS_PER_S
    times = np.sort(np.concatenate((starts, starts + 3 * NS_PER_S)))
    session = np.repeat(np.arange(150), 2)
    labels = {"session": session, "recorded": times, "e2e": np.full(300, NS_PER_S)}
    rows = replace(
        rows_of(times, **labels), prompt_tokens=np.tile([100, 150], 150), output_tokens=np.tile([20, 5], 150)
    )
    fit = fit_traffic(rows)
    sessions = fit.workload.sessions
    assert sessions is not None and sessions.think_time == 2 * NS_PER_S and sessions.think_kind == "constant"
    assert sessions.turns.mean_tokens == 2 and len(fit.first) == 150
    assert isinstance(fit.workload.lengths, PairLengths)
    assert {*zip(fit.workload.lengths.prompt, fit.workload.lengths.output, strict=True)} == {(100, 20), (30, 5)}


@few_laws
def test_each_class_keeps_its_lengths_and_share() -> None:
    """A class of long prompts stays one."""
    rows = poisson_rows()
    code = (rows.prompt_tokens > 300).astype(np.int64)
    rows = replace(rows, labels={"request_class": code}, texts={"request_class": ("short", "long")})
    classes = fit_traffic(rows).workload.classes
    assert classes["long"].share == code.mean() and isinstance(classes["long"].lengths, PairLengths)
    assert min(classes["long"].lengths.prompt) > 300 >= max(classes["short"].lengths.prompt)  # type: ignore[union-attr]


def check_of(rows: TraceRows) -> tuple[TrafficFit, EngineCheck]:
    fit = fit_traffic(rows)
    setup = Setup.of(parse_scenario(scenario_text(ENGINE, fit.workload, ()), "load.yaml", Path()))
    return fit, EngineCheck(setup, fit, TraceConfig("t.csv"))


@few_laws
def test_a_rate_that_grows_92_fold_is_fitted_as_a_trend_and_the_heading_says_so() -> None:
    """Not as one rate: in what is printed, in what is written, and in the heading of its run."""
    grows = RampArrivals(0.31, growth=92.0, over=1200 * NS_PER_S)
    times = arrival_times_ns(grows, 3, 1200 * NS_PER_S, None)
    fit = fit_traffic(rows_of(times - times[0]))
    found = fit.workload.arrivals
    assert isinstance(found, RampArrivals) and 10 < found.growth < 100 and found.cv == 1
    assert re.search(r"trend, Poisson gaps, rate from 0\.0\d+/s to 0\.\d+/s · lengths", heading(fit)), heading(fit)
    run = build_workload(fit.workload, load={}, seed=0, max_model_len=9999, base=Path())
    assert re.match(r"ramp arrivals, rate from 0\.0\d+/s to 0\.\d+/s, CV", str(run.describe["text"]))


def test_rows_of_one_time_have_no_law() -> None:
    """However many they are; and what to do with them."""
    with pytest.raises(TraceError, match=r"all 300 rows arrive at once: no law to fit\. Replay them"):
        fit_arrivals(np.zeros(300, np.int64))


@pytest.mark.slow
def test_draws_end_where_they_have_told_and_long_traces_have_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts are those of all draws; who is outside few draws hears how often that is chance."""
    fit, check = check_of(poisson_rows())
    told: list[str] = []
    found = check.all_loads(None, told.append)
    every = check.all_loads(19, told.append)
    assert [each.holds for each in found] == [each.holds for each in every] == [True, True]
    for one, all_ in zip(found, every, strict=True):
        assert (
            len(one.fit) < 19 == len(all_.fit)
            and [each.p99_s for each in one.fit] == [each.p99_s for each in all_.fit][: len(one.fit)]
        )
    monkeypatch.setattr(engine_check, "MOST_REQUESTS", 8 * len(fit.rows))
    late = replace(check, fit=replace(fit, workload=replace(fit.workload, lengths=PairLengths((1,), (1,)))))
    short = late.all_loads(None, told.append)
    assert [len(each.fit) for each in short] == [3, 3] and not short[0].holds and not short[0].why
    assert "outside 3 draws lie 50 in 100 of a law's own traces; --draws 19" in verdict(short[0])


@pytest.mark.slow
def test_an_engine_does_not_tell_a_fit_from_a_trace_of_its_own_law() -> None:
    """Poisson arrivals with independent lengths: figures and the P99 of TTFT are those of the draws."""
    fit, check = check_of(poisson_rows())
    found = check.at(0.6, 19)
    assert (
        found.holds
        and not found.why
        and found.share * found.capacity_rps / found.cost_factor
        == pytest.approx(
            (len(fit.rows) - 1) / (fit.rows.arrival_ns[-1] / NS_PER_S)  # type: ignore[index]
        )
    )
    figures = compare(recorded(fit), [drawn(fit.workload, seed) for seed in range(39)])
    assert sum(not each.agrees for each in figures) <= 1


@pytest.mark.slow
def test_an_engine_tells_which_part_of_a_fit_is_to_blame() -> None:
    """Long prompts come within two seconds of every ten, which no law of single lengths has: no part mends it alone."""
    rows = poisson_rows()
    assert rows.arrival_ns is not None
    long = rows.arrival_ns % (10 * NS_PER_S) < 2 * NS_PER_S
    _, check = check_of(replace(rows, prompt_tokens=np.where(long, 3000, 10), output_tokens=np.full(400, 2)))
    found = check.at(0.6, 9)
    assert (
        not found.holds and len(found.why) == 2 and not any(holds(found.trace, draws) for draws in found.why.values())
    )
    assert "no part alone mends it" in verdict(found)


def csv_of(folder: Path, rows: TraceRows) -> Path:
    assert rows.arrival_ns is not None
    lines = [f"{t},{p},{o}" for t, p, o in zip(rows.arrival_ns, rows.prompt_tokens, rows.output_tokens, strict=True)]
    path = folder / "my.csv"
    path.write_text("\n".join(["ts,in,out", *lines, ""]), encoding="utf-8")
    return path


@few_laws
def test_trace_fit_writes_a_scenario_that_runs_without_the_trace(tmp_path: Path) -> None:
    """With its picture; the figures as JSON; what is there is not written over."""
    trace, out = csv_of(tmp_path, poisson_rows(150)), tmp_path / "load.yaml"
    asked = ["trace", "fit", str(trace), "--columns", "arrival=ts,prompt=in,output=out", "--time-unit", "ns"]
    ran = CliRunner().invoke(app, [*asked, "-o", str(out), "--draws", "0", "--json"])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["rows"] == 150 and (tmp_path / "load.png").stat().st_size > 10_000
    trace.unlink()
    scenario = parse_scenario(out.read_text(encoding="utf-8"), "load.yaml", tmp_path)
    assert scenario.file.workload.trace is None and Setup.of(scenario).workload(scenario.loads[1], 0).num_offered
    again = CliRunner().invoke(app, [*asked, "-o", str(out)])
    assert again.exit_code == 2 and re.search("is there already", str(again.output) + str(again.exception))


def test_no_name_of_a_file_is_a_key_of_the_scenario() -> None:
    """A comment stays one, whatever the letters of the trace's name."""
    workload = WorkloadConfig(PoissonArrivals(1.0), 64, PairLengths((9,), (5,)), requests=2)
    text = scenario_text({"policies": {}, "slo": ""}, workload, ("a\nseeds: 99 #.csv",))
    assert text.startswith("# a\\nseeds: 99 #.csv\n") and yaml.safe_load(text)["seeds"] == 3


@pytest.mark.parametrize(("longest", "cap"), [(1, 64), (65, 128), (2**30, 2**30), (2**30 + 1, 2**31 - 1)])
def test_a_cap_cuts_no_output_that_an_engine_can_count(longest: int, cap: int) -> None:
    """The next power of two, up to the largest count."""
    assert cap_above(longest) == cap


def test_a_trace_without_times_has_nothing_to_fit() -> None:
    """With what its lengths can be used for."""
    with pytest.raises(TraceError, match="has no arrival times to fit"):
        fit_traffic(replace(poisson_rows(), arrival_ns=None))


@few_laws
def test_what_reading_left_out_is_said() -> None:
    """Of BurstGPT's first 400 rows, as published, 17 have no lengths: the fit says that they are left out."""
    path = ROOT / "results/reference/traffic/BurstGPT_1-head400.csv"
    fit = fit_traffic(read_trace(TraceConfig(str(path)), Path()))
    assert len(fit.rows) == 383
    assert "17 of 400 rows dropped: 17 with 0 prompt and 0 output tokens (failed)" in fit.notes
