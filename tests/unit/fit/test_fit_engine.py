"""Step times learned from measured runs: the terms of engines that are known, and what is said of what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import MeasuredRun
from batchsim.fit.engine_fit import EngineFit, fit_engine
from batchsim.scenario.fit_file import FORMAT
from tests.support.engine_truth import LINEAR_ENGINE as LINEAR
from tests.support.engine_truth import Load, measured, scenario_text, setup_of, tidy, write_runs

FREE = "cost: {kind: free}"


def fitted(cost: str, files: list[Path], held: list[Path], **engine: object) -> EngineFit:
    setup = setup_of(scenario_text(cost, **engine))  # type: ignore[arg-type]
    given, apart = ([run for path in paths for run in read_measured(path)] for paths in (files, held))
    return fit_engine(setup, setup.scenario.specs[0], given, apart)


def test_a_linear_engine_is_found_by_the_free_form(tmp_path: Path) -> None:
    """Every term that is declared identified is within 5 % of the truth, and loads held out are predicted."""
    given = write_runs(tmp_path, LINEAR, [Load(0.5), Load(2, 1000, 40), Load(12)], requests=120, way="12ms")
    held = write_runs(tmp_path, LINEAR, [Load(6, 200, 120)], form="json", requests=120, way="12ms")
    found = fitted(FREE, given, held)
    truth = {"base": 8e6, "sequence": 100e3, "prompt_token": 60e3, "context_token": 60, "frontend": 12e6}
    known = {term.name: term.value for term in found.known.terms if term.identified}
    assert {"base", "prompt_token", "frontend"} <= known.keys() <= truth.keys()
    assert known == pytest.approx({name: truth[name] for name in known}, rel=0.05)
    (error,) = found.held_out
    assert not error.knee and not found.violations
    assert error.errors["tpot_mean_s"] == pytest.approx(0, abs=0.015)
    assert error.errors["throughput_rps"] == pytest.approx(0, abs=0.015)
    assert error.errors["ttft_mean_s"] == pytest.approx(0, abs=0.05)
    assert "KV was never full" in " ".join(found.notes)


STAIRS = {"base": 8e6, "sequence": 100e3, "prompt_token": 60e3, "rows_2": 6e6, "rows_4": 9e6}


@pytest.mark.slow
def test_an_engine_of_other_kernels_for_few_rows_has_steps_in_its_free_form(tmp_path: Path) -> None:
    """The plain free form misses it by several percent; a load of other numbers of requests is then foretold."""
    (tmp_path / "truth.json").write_text(json.dumps({"format": FORMAT, "words": "", "kernel": None, "kernel_source": "",
        "terms": STAIRS, "frontend": {"request": 0.0}, "claims": {"tpot_mean_s": 0.0}}))  # fmt: skip
    truth = f"cost: {tmp_path / 'truth.json'}"
    loads = [Load(0.1), Load(0.7), Load(1.2), Load(2, 1000, 40), Load(4)]
    given = write_runs(tmp_path, truth, loads, requests=120)
    held = write_runs(tmp_path, truth, [Load(1.6), Load(3)], form="json", requests=120)
    found = fitted(FREE, given, held)
    assert found.terms.rows_2 == pytest.approx(6e6, rel=0.1) and found.terms.rows_4 == pytest.approx(9e6, rel=0.1)
    for one in found.held_out:
        assert one.errors["tpot_mean_s"] == pytest.approx(0, abs=0.015)


@pytest.mark.slow
def test_each_pass_of_a_step_costs_the_base_and_few_users_of_many_slots_say_nothing(tmp_path: Path) -> None:
    """The base is that of a pass; a closed loop of three users on eight slots, twice as slow here, moves no term."""
    terms = {"base": 8e6, "sequence": 900e3, "prompt_token": 60e3}
    (tmp_path / "truth.json").write_text(json.dumps({"format": FORMAT, "words": "", "kernel": None, "kernel_source": "",
        "terms": terms, "frontend": {"request": 0.0}, "claims": {"tpot_mean_s": 0.0}}))  # fmt: skip
    runs: list[MeasuredRun] = []
    for load in (Load(0.2), Load(1.5), Load(2.5), Load(0.8, 1000, 40)):
        text = _on_slots(scenario_text(f"cost: {tmp_path / 'truth.json'}", load=load, requests=120))
        (tmp_path / f"{load}.csv").write_text(tidy(measured(text)))
        runs += read_measured(tmp_path / f"{load}.csv")
    slow = [f"3,{i},300,100,1,{1 + 99 * 0.08}" for i in range(20)]
    (tmp_path / "users-3.csv").write_text("\n".join(["users,sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s", *slow]))
    runs += read_measured(tmp_path / "users-3.csv")
    setup = setup_of(_on_slots(scenario_text(FREE)))
    found = fit_engine(setup, setup.scenario.specs[0], runs, [])
    assert found.terms.base == pytest.approx(8e6, rel=0.02) and found.terms.sequence == pytest.approx(9e5, rel=0.05)
    assert [note for note in found.notes if "left out of the fit" in note and note.startswith("users-3.csv: ")]
    assert len(found.given) == 4
    with pytest.raises(MeasuredError, match=r"users-3.csv: left out of the fit: .* Give other loads"):
        fit_engine(setup, setup.scenario.specs[0], runs[-1:], [])


def _on_slots(text: str) -> str:
    """The scenario with llama.cpp's eight slots in place of its policy."""
    (line,) = [line for line in text.splitlines() if "  vllm: " in line]
    return text.replace(line, "  llama_cpp: {n_parallel: 8}")


def test_terms_that_always_come_together_are_not_identified(tmp_path: Path) -> None:
    """Of one request at a time nobody can tell a step's constant from that of its one sequence."""
    (tmp_path / "a").mkdir()
    loads = [Load(0.01, 100, 40), Load(0.01, 900, 40), Load(0.011, 300, 90)]
    given = write_runs(tmp_path / "a", LINEAR, loads, requests=12)
    held = write_runs(tmp_path, LINEAR, [Load(0.01, 500, 60)], requests=12)
    found = fitted(FREE, given, held).known
    assert not {"base", "sequence"} & {term.name for term in found.terms if term.identified}
    assert ("base", "sequence") in {(pair.one, pair.other) for pair in found.confused}


HOST = "host: {base: 1.5ms, per_sequence: 20us, per_token: 5us}"
LOADS = [Load(0.5), Load(4, 1500, 60), Load(15, 300, 150), Load(80)]
APART = [Load(8, 600), Load(40), Load(70), Load(120)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "start", "ahead"),
    [
        (LINEAR.replace("8ms", "4ms"), FREE, False),
        (f"cost: {{kind: roofline, gpu: h100, {HOST}}}", "cost: h200", False),
        (f"cost: {{kind: roofline, gpu: h100, {HOST}}}", "cost: h200", True),
    ],
    ids=["linear", "roofline and host", "ahead of results"],
)
def test_loads_held_out_of_a_known_engine_are_predicted(tmp_path: Path, truth: str, start: str, ahead: bool) -> None:
    """From a wrong kernel, whatever the load: TPOT and throughput within 1.5 %, TTFT within 5 % below the knee, the
    load within 1.5 % beyond it; what is declared identified of the linear one is within 5 % of the truth."""
    engine = {"ahead": ahead, "requests": 300}
    given = write_runs(tmp_path, truth, LOADS, **engine, way="12ms")
    held = write_runs(tmp_path, truth, APART, form="json", **engine, way="12ms")
    found = fitted(start, given, held, **engine)
    bounds = {"tpot_mean_s": 0.015, "throughput_rps": 0.015, "ttft_mean_s": 0.05, "e2e_mean_s": 0.02, "load": 0.015}
    for one in found.held_out:
        for name, error in one.errors.items():
            assert error is not None and abs(error) <= bounds[name], (one.name, name, error)
    apart = {(pair.one, pair.other) for pair in found.known.confused}
    assert (("frontend", "lag") in apart) == ahead
    if start != FREE:
        known = {term.name for term in found.known.terms if term.identified}
        assert {("kernel", "base"), ("kernel", "prompt_token")} <= apart and known <= {"frontend"}
        assert ahead or found.frontend_ns == pytest.approx(12e6, rel=0.05)
    else:
        right = {"base": 4e6, "sequence": 100e3, "prompt_token": 60e3, "context_token": 60, "frontend": 12e6}
        known = {term.name: term.value for term in found.known.terms if term.identified}
        assert known == pytest.approx({name: right[name] for name in known}, rel=0.05)
