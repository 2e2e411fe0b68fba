"""The parts of a fit to measured runs: windows, the rule of loads held out, claims, the file as a scenario's cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchsim.base.errors import MeasuredError, ScenarioError
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import Client, MeasuredRun
from batchsim.check.validation.replay import replay
from batchsim.cost.fitted import TERMS, Fitted, Free, StepTerms
from batchsim.cost.profile import load_profile
from batchsim.fit.engine_fit import EngineFit, fit_engine
from batchsim.fit.identify import Term
from batchsim.fit.measured_loads import (
    FLOORS,
    LoadError,
    claims_of,
    first_of_each,
    load_error,
    short_names,
    split,
    thinned,
)
from batchsim.fit.solve import Case, Equations, simulate_all
from batchsim.fit.windows import NAMES, Rows, rows_of
from batchsim.scenario.fit_file import FORMAT
from batchsim.scenario.load import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.workload.workload_config import Frontend
from tests.support.engine_truth import Load, measured, scenario_text, setup_of, tidy

LINEAR = "cost: {kind: linear, base: 8ms, per_token: 60us, per_sequence: 40us, per_context_token: 60ns}"
TERMS_GIVEN = StepTerms(0, 8e6, 100e3, 60e3, 60, 0, 0)


def run_of(tmp_path: Path, load: Load, requests: int = 30) -> MeasuredRun:
    path = tmp_path / f"{load}.csv"
    path.write_text(tidy(measured(scenario_text(LINEAR, load=load, requests=requests))))
    (run,) = read_measured(path)
    return run


# ---- full runs


def test_the_first_requests_of_each_run_are_as_many_as_bring_all_to_the_most() -> None:
    """Short runs stay whole, and leave their share to the others; nothing is cut of what is no more than that."""
    runs = [MeasuredRun("f", "t", "", Client(), {}, None, {"requests": count}) for count in (10.0, 1000.0, 100.0)]
    assert first_of_each(runs, 300) == 190 and first_of_each(runs, 1110) is None and first_of_each(runs, 1109) == 999
    cut = [thinned(run, 190) for run in runs]
    assert [run.means["requests"] for run in cut] == [10, 190, 100] and not cut[0].notes
    assert cut[1].notes[0].startswith("its first 190 requests of 1,000 are fitted and judged")


def test_the_requests_beside_the_first_ones_of_a_run_are_played_and_not_judged(tmp_path: Path) -> None:
    """Figures are of the first ones; those that were sent before the last of them ended load the engine, others are
    left out; so that the simulation of the truth has no error."""
    run = run_of(tmp_path, Load(6), 60)
    cut = thinned(run, 20)
    assert run.requests is not None and cut.requests is not None and run.requests.sent_ns is not None
    ends_ns = (run.requests.sent_ns + run.requests.e2e_ns)[:20].max()
    assert len(cut.requests) == int((run.requests.sent_ns <= ends_ns).sum()) > 20
    assert cut.figures["e2e_mean_s"] == pytest.approx(run.requests.e2e_ns[:20].mean() / 1e9)
    assert "throughput_rps" not in cut.figures
    setup = setup_of(scenario_text(LINEAR))
    errors = load_error(setup, setup.scenario.specs[0], cut, 1.0).errors
    assert errors == pytest.approx({"ttft_mean_s": 0, "tpot_mean_s": 0, "e2e_mean_s": 0}, abs=1e-6)


def test_more_requests_than_a_fit_simulates_are_thinned_by_it(tmp_path: Path) -> None:
    """And how long its rounds take is said after the first simulation of all, with how many that is."""
    runs = [run_of(tmp_path, load, 40) for load in (Load(0.5), Load(2, 1000, 40), Load(12))]
    setup, said = setup_of(scenario_text("cost: {kind: free}")), list[str]()
    found = fit_engine(setup, setup.scenario.specs[0], runs, [], said.append, most=60)
    assert "requests in 3 runs: at most 10 rounds more, which take" in said[0] and "of CPU" in said[0]
    assert any(
        "its first 20 requests of 40 are fitted and judged, so that those given are 60" in note for note in found.notes
    )


def test_a_fit_leaves_out_runs_of_which_nothing_can_be() -> None:
    """With the reason; one of which a latency is left is fitted by that, and without any run it is refused."""
    setup, means = (
        setup_of(scenario_text("cost: h100")),
        {"requests": 4.0, "prompt_tokens": 1024.0, "output_tokens": 8.0},
    )
    figures = ({"ttft_mean_s": 0.001, "tpot_mean_s": 0.0001}, {"ttft_mean_s": 0.05, "tpot_mean_s": 0.0001})
    client = Client("closed", max_concurrency=1)
    absurd, half = (MeasuredRun(f"f{n}", "t", "", client, its, None, means) for n, its in enumerate(figures))
    with pytest.raises(MeasuredError, match=r"f0: cannot be as measured \(by the sheet of .* no run is left to fit to"):
        fit_engine(setup, setup.scenario.specs[0], [absurd], [])
    found = fit_engine(setup, setup.scenario.specs[0], [absurd, half], [])
    assert [one.name for one in found.given] == ["f1"] and "tpot_mean_s" not in found.given[0].errors
    assert {note[:27] for note in found.notes if "cannot be" in note} == {
        "f0: cannot be as measured (",
        "f1: cannot be as measured (",
    }


# ---- windows


@pytest.mark.parametrize("ahead", [False, True])
def test_the_windows_of_a_request_times_the_terms_are_its_latencies(tmp_path: Path, ahead: bool) -> None:
    """But for idle times, of which an engine that always has a request in hand has none."""
    setup = setup_of(scenario_text("cost: {kind: free}", ahead=ahead))
    case = Case(setup, lambda _: setup.scenario.specs[0], None, (), {})
    values = dict.fromkeys(NAMES, 0.0) | {name: getattr(TERMS_GIVEN, name) for name in TERMS} | {"frontend": 3e6}
    one = replay(setup, run_of(tmp_path, Load(50)))
    played = case.playing(one, values).simulate(setup.scenario.specs[0])
    ttft, tpot = rows_of(one, played, case.cost(values))
    vector = np.array([values[name] for name in NAMES])
    assert (ttft.windows @ vector).mean() == pytest.approx(ttft.simulated_ns, rel=0.02)
    assert (tpot.windows @ vector).mean() == pytest.approx(tpot.simulated_ns, rel=0.02)
    assert ttft.windows[:, -1].tolist() == [1.0] * 30 and not tpot.windows[:, -1].any()


def test_a_latency_is_steeper_in_step_time_the_nearer_saturation(tmp_path: Path) -> None:
    """Alone 1 % of step time is 1 % of TTFT; in a queue that is about to grow it is several."""
    setup = setup_of(scenario_text("cost: {kind: free}", seqs=16))
    case = Case(setup, lambda _: setup.scenario.specs[0], None, (), {})
    values = dict.fromkeys(NAMES, 0.0) | {name: getattr(TERMS_GIVEN, name) for name in TERMS}
    replays = [replay(setup, run_of(tmp_path, load, 100)) for load in (Load(0.1), Load(14))]
    steep = [each.steep for each in simulate_all(case, replays, values) if each.rows.latency == "ttft"]
    assert steep[0] == pytest.approx(1, abs=0.05) and steep[1] > 3


# ---- loads held out, and claims


def rated(rate: float, prompt: float = 100, name: str = "") -> MeasuredRun:
    means = {"requests": 60.0, "prompt_tokens": prompt, "output_tokens": 10.0}
    figures = {"ttft_mean_s": 0.1, "throughput_rps": rate}
    return MeasuredRun(name or f"{rate:g}", "tidy table", "", Client("open", rate), figures, means=means)


def test_the_second_load_and_every_third_after_it_are_held_out_but_never_the_heaviest() -> None:
    """By completed tokens/s, whatever the order of files; repeats of a load go the same way."""
    given, held = split([rated(rate) for rate in (7, 1, 2, 5, 3, 4, 6, 8)])
    assert [run.source for run in given] == ["1", "3", "4", "6", "7", "8"]
    assert [run.source for run in held] == ["2", "5"]
    given, held = split([rated(1), rated(2, name="a"), rated(2.01, name="b"), rated(3), rated(4), rated(5)])
    assert [run.source for run in held] == ["a", "b"] and [run.source for run in given] == ["1", "3", "4", "5"]
    _, held = split([rated(4, 100), rated(2, 100), rated(2, 1000)])
    assert [run.source for run in held] == ["4"]


def test_runs_are_called_by_as_little_as_tells_them_apart() -> None:
    """The part of one file; the file without its folder, unless two are called the same."""
    parts = [replace(rated(1), source="x/a.csv", part=part) for part in ("one", "two")]
    assert [*short_names(parts).values()] == ["one", "two"]
    apart = [rated(1, name="x/a.csv"), rated(2, name="x/b.csv")]
    assert [*short_names(apart).values()] == ["a.csv", "b.csv"]
    alike = [rated(1, name="x/a.csv"), rated(2, name="y/a.csv")]
    assert [*short_names(alike).values()] == ["x/a.csv", "y/a.csv"]


def test_fewer_than_three_loads_are_refused() -> None:
    """Repeats are no further load."""
    with pytest.raises(MeasuredError, match="2 loads in 3 runs; two are fitted and one is held out"):
        split([rated(1), rated(1), rated(2)])


def test_a_fit_claims_twice_its_errors_and_more_where_terms_use_up_the_equations() -> None:
    """And never less than the floors."""
    equations: list[Any] = [None] * 12
    errors = [LoadError("a", {"tpot_mean_s": 0.03, "ttft_mean_s": -0.01}, False)]
    claims = claims_of(errors, equations, 3)
    assert claims["tpot_mean_s"] == pytest.approx(2 * 0.03 * (12 / 9) ** 0.5)
    assert {name: claims[name] for name in claims if name != "tpot_mean_s"} == {
        name: share for name, share in FLOORS.items() if name != "tpot_mean_s"
    }
    assert claims_of(errors, equations, 12)["tpot_mean_s"] == pytest.approx(2 * 0.03 * 12**0.5)


def test_errors_above_what_is_claimed_are_named() -> None:
    """On either side, and where no load within reach is what was measured."""
    one = LoadError("a", {"tpot_mean_s": -0.02, "throughput_rps": 0.01, "load": None}, True)
    assert one.exceeded(FLOORS) == ["tpot_mean_s", "load"]


def test_more_than_half_is_no_claim() -> None:
    """However well the loads held out are within it."""
    parts: list[Any] = [None] * 12
    parts[6], parts[7] = (LoadError("g", {"load": None}, True),), (LoadError("a", {"tpot_mean_s": 0.4}, False),)
    parts[8] = {"tpot_mean_s": 0.51, "load": 0.5}
    claim, given = EngineFit(*parts).violations
    assert claim.startswith("tpot_mean_s: ±51 % would be claimed")
    assert given == "g: load off by more than any load within reach, at a given load"


def test_a_ttft_beyond_the_knee_is_judged_by_load(tmp_path: Path) -> None:
    """2 % of step time too much are tens of percent of TTFT there, and 2 % of the load."""
    run = run_of(tmp_path, Load(14), 200)
    setup = setup_of(scenario_text(LINEAR.replace("8ms", "8.2ms").replace("60us", "61.5us"), seqs=16))
    spec = setup.scenario.specs[0]
    flat, steep = (load_error(setup, spec, run, steep) for steep in (1.0, 10.0))
    assert not flat.knee and abs(flat.errors["ttft_mean_s"] or 0) > 0.05
    assert steep.knee and set(steep.errors) == {"tpot_mean_s", "throughput_rps", "load"}


def test_a_term_is_identified_by_its_interval() -> None:
    """Half of it at most 5 % of the value, which is above 0, and nothing unseen mixed in."""
    assert Term("base", 100.0, 5.0, 0.5).identified and not Term("base", 100.0, 5.1, 0.5).identified
    assert not Term("base", 0.0, 0.0, 0.0).identified
    assert not Term("frontend", 100.0, 1.0, 0.5, alone=False).identified


# ---- the file as a cost

FIT: dict[str, Any] = {
    "format": FORMAT,
    "words": "3 runs of a.csv",
    "kernel": None,
    "kernel_source": "",
    "terms": {"kernel": 0.0, "base": 8e6, "sequence": 1e5},
    "frontend": {"request": 12345678.9},
    "claims": {"tpot_mean_s": 0.02},
}


def scenario_of(tmp_path: Path, fit: dict[str, Any], way: str = "") -> Setup:
    (tmp_path / "mine.json").write_text(json.dumps(fit))
    (tmp_path / "use.yaml").write_text(scenario_text("cost: mine.json", way=way))
    return Setup.of(load_scenario(str(tmp_path / "use.yaml")))


def test_the_file_of_a_fit_beside_a_scenario_is_its_cost_and_its_way_from_the_client(tmp_path: Path) -> None:
    """Its numbers stand in the scenario's values, by which results are known; a way that is stated wins."""
    setup = scenario_of(tmp_path, FIT)
    assert isinstance(setup.cost, Fitted) and setup.cost.terms == StepTerms(0, 8e6, 1e5)
    before = FIT | {"terms": FIT["terms"] | {"further_pass": 0.0}}  # a term there once was
    assert scenario_of(tmp_path, before).cost == setup.cost
    assert setup.cost.tpot_error == 0.02 and setup.scenario.plain["cost"]["terms"]["base"] == 8e6
    assert "3 runs of a.csv (mine.json)" in setup.cost.describe()
    assert setup.traffic.frontend.request == 12_345_679
    assert scenario_of(tmp_path, FIT, way="5ms").traffic.frontend.request == 5_000_000


def test_a_way_from_the_client_that_is_not_the_fit_s_is_said(tmp_path: Path) -> None:
    """All of the file's way is taken; beside another one the cost says what the fit had, beside the same nothing."""
    fit = FIT | {"frontend": {"request": 4e6, "per_prompt_token": 9000, "per_chunk": 0, "per_stream": 70_000}}
    setup = scenario_of(tmp_path, fit)
    assert setup.traffic.frontend == Frontend(4_000_000, 9000, 0, 70_000)
    said = "with request 4 ms and per_prompt_token 9 us and per_stream 70 us from the client, which workload.frontend"
    assert said not in setup.cost.describe() and said in scenario_of(tmp_path, fit, way="5ms").cost.describe()
    alone = FIT | {"frontend": {"request": 5e6}}
    assert "from the client" not in scenario_of(tmp_path, alone, way="5ms").cost.describe()
    steps = FIT | {"claims": {"step_time": 0.015}}
    assert "from the client" not in scenario_of(tmp_path, steps, way="5ms").cost.describe()


def test_a_fit_over_a_kernel_is_of_that_kernel_alone(tmp_path: Path) -> None:
    """Without its host; refused where the kernel is another one by now."""
    fit = FIT | {"kernel": {"kind": "roofline", "gpu": "h100"}, "terms": {"kernel": 2.0}}
    setup = scenario_of(tmp_path, fit)
    assert isinstance(setup.cost, Fitted) and setup.cost.kernel is not None
    assert setup.cost.kernel.host_part.base == 0 and setup.gpu is not None and setup.gpu.name == "h100"
    source = setup.cost.kernel.sources()[0]
    assert scenario_of(tmp_path, fit | {"kernel_source": source}).cost.describe() == setup.cost.describe()
    with pytest.raises(ScenarioError, match=r"use.yaml:3: cost: was fitted with the kernel 'another'"):
        scenario_of(tmp_path, fit | {"kernel_source": "another"})


def test_a_fit_over_a_measured_profile_keeps_its_measured_kv(tmp_path: Path) -> None:
    """The profile's file stands beside the fit's."""
    profile = replace(load_profile("llama-3.1-8b-h100-vllm-0.24.0"), num_blocks=1234, block_size=16)
    (tmp_path / "p.json").write_text(profile.to_json())
    (tmp_path / "mine.json").write_text(json.dumps(FIT | {"kernel": {"kind": "profile", "profile": "p.json"}}))
    (tmp_path / "use.yaml").write_text(scenario_text("cost: mine.json").replace("kv: {tokens: 400000}\n", ""))
    setup = Setup.of(load_scenario(str(tmp_path / "use.yaml")))
    assert isinstance(setup.cost, Fitted) and setup.kv.num_blocks == 1234


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "batchsim fit 9"}, "its format is 'batchsim fit 9'"),
        ({"terms": {"base": -1.0}}, "cost.terms: base is -1"),
        ({"terms": {"bass": 1.0}}, "cost.terms.bass is not a field of cost.terms. Did you mean base?"),
        ({"terms": {"base": "8ms"}}, 'cost.terms.base is "8ms"'),
        ({"terms": {"base": 8e6, "further_pass": 1.0}}, "terms.further_pass: a pass beyond a step's first costs"),
        ({"terms": ["base"]}, "is no whole fit"),
        ({"claims": None}, "is no whole fit"),
        ({"kernel": {"kind": "free"}}, "cost.kernel.kind is free"),
        ({"kernel": "h100"}, "cost.kernel is"),
    ],
)
def test_a_fit_s_file_that_was_changed_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """From the place of the scenario's cost on."""
    with pytest.raises(ScenarioError) as error:
        scenario_of(tmp_path, FIT | change)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_free_form_has_no_times_before_it_is_fitted() -> None:
    """A simulation says what to do."""
    setup = setup_of(scenario_text("cost: {kind: free}"))
    assert isinstance(setup.cost, Free)
    with pytest.raises(ScenarioError, match=r"cost of kind free has no numbers yet\. Fit them: batchsim calibrate"):
        setup.cost.recompute_ns(1)


def test_the_equations_of_a_run_count_alike_whatever_their_number() -> None:
    """A row's weight falls with the root of their number, and with the mean that it is a share of."""
    few, many = (Rows("tpot", np.ones((n, 8)), np.ones(n), 100.0, 95.0) for n in (1, 400))
    assert Equations(few, 1.0, 0, 0).weight == 20 * Equations(many, 1.0, 0, 0).weight == 0.01
    assert Equations(few, 2.0, 0, 0).relative_error == pytest.approx(-0.025)


def test_a_run_that_is_far_off_counts_by_its_error() -> None:
    """Measured a thousandth of what is simulated, as of a client that got all tokens at once: a bounded share."""
    lost = Equations(Rows("tpot", np.ones((1, 8)), np.ones(1), 0.1, 100.0), 1.0, 0, 0)
    assert lost.relative_error == pytest.approx(0.999) and lost.weight == pytest.approx(0.01 * (0.1 / 0.999) ** 0.5)
