"""Step times learned from measured runs: the terms of engines that are known, and what is said of what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_truth import Load, scenario_text, setup_of, write_runs

from batchsim.check.measured.read import read_measured
from batchsim.fit.engine_fit import EngineFit, fit_engine

LINEAR = "cost: {kind: linear, base: 8ms, per_token: 60us, per_sequence: 40us, per_context_token: 60ns}"
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
    assert not error.knee and not found.exceeded
    assert error.errors["tpot_mean_s"] == pytest.approx(0, abs=0.015)
    assert error.errors["throughput_rps"] == pytest.approx(0, abs=0.015)
    assert error.errors["ttft_mean_s"] == pytest.approx(0, abs=0.05)
