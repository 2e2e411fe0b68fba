"""What is judged of a prediction, and when nothing is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from batchsim.base.errors import MeasuredError
from batchsim.check.validation.comparison import Comparison, MetricError
from batchsim.cost.cost_error import Unknown
from batchsim.fit.server.client import Answer, Loaded
from batchsim.fit.server.experiment import tidy
from batchsim.fit.server.loads import Ask, Load
from batchsim.scenario.load import load_scenario
from tools.real_engines.engines import ENGINES, engine_of
from tools.real_engines.judge import Judgement, judge, predict, verdicts
from tools.real_engines.models import write_hugging_face


def comparison(spread: float | None = 0.0, **errors: float | None) -> Comparison:
    """A load whose figures are off by `errors`, by default by nothing."""
    known = {"tpot_mean_s": 0.0, "e2e_mean_s": 0.0, "throughput_rps": 0.0, "ttft_mean_s": 0.0} | errors
    figures = [
        MetricError(name, None if error is None else 1 + error, 1.0, error, spread, False)
        for name, error in known.items()
    ]
    return Comparison("vllm", "", (), (), tuple(figures), {}, Unknown("not asked"))


@pytest.mark.parametrize(
    ("errors", "spread", "missed"),
    [
        ({"tpot_mean_s": 0.1, "e2e_mean_s": -0.1, "throughput_rps": -0.05}, 0.0, []),
        ({"tpot_mean_s": 0.101}, 0.0, ["light, mean TPOT"]),
        ({"e2e_mean_s": -0.101}, 0.05, ["light, mean E2E"]),
        ({"tpot_mean_s": -0.14, "e2e_mean_s": 0.14}, 0.07, []),
        ({"throughput_rps": 0.051}, 0.07, ["light, requests/s"]),
        ({"ttft_mean_s": 9.0}, 0.0, []),
        ({"tpot_mean_s": None}, None, ["light, mean TPOT"]),
        ({"e2e_mean_s": 0.1}, None, []),
    ],
)
def test_latencies_have_ten_percent_or_twice_the_spread_and_throughput_five(
    errors: dict[str, float | None], spread: float | None, missed: list[str]
) -> None:
    """TTFT is said and never missed; what is not known on both sides is missed."""
    found = verdicts("light", comparison(spread, **errors))
    assert [one.what for one in found if one.met is False] == missed
    assert [one.what for one in found if one.met is None] == ["light, mean TTFT"]


def test_nothing_is_judged_of_a_machine_that_moved() -> None:
    """A sentinel whose mean beside the loads is more than 5 % off that beside the calibration takes every verdict back,
    good ones and bad ones, and says why; readings that differ beside one of them do not."""
    bad = {"light": comparison(tpot_mean_s=0.5)}
    steady = Judgement("vllm-cpu 1", bad, (*(0.0095, 0.0105) * 3, 0.0104, 0.0106))
    assert steady.word == "NOT MET"
    assert Judgement("vllm-cpu 1", {"light": comparison()}, (*(0.0100,) * 6, 0.0104)).word == "met"
    for readings in ((*(0.0100,) * 6, 0.0104, 0.0108), (*(0.0108, 0.0104) * 3, 0.0100)):
        moved = dataclasses.replace(steady, sentinel_s=readings)
        assert moved.word == "not judged: the machine moved by 6.0%, more than 5%, by its idle decode step"
        assert {one.met for one in moved.verdicts} == {None}
        assert moved.lines()[0] == f"vllm-cpu 1: {moved.word}"
    late = dataclasses.replace(steady, late=("light-1.csv", "heavy-2.csv"))
    assert late.word == "not judged: this machine sent light-1.csv, heavy-2.csv late"
    meanwhile = dataclasses.replace(steady, meanwhile=-0.06)
    assert meanwhile.word == "not judged: the machine moved by -6.0%, more than 5%, while it was calibrated"
    assert dataclasses.replace(steady, meanwhile=-0.05).word == steady.word == "NOT MET"


def test_a_prediction_is_of_the_requests_measured(tmp_path: Path) -> None:
    """Repeats are one load; a cost that is the truth errs by nothing, and one of twice the step time by 100 %."""
    engine = engine_of("vllm")
    write_hugging_face(engine.shape, tmp_path / "tiny")
    (tmp_path / "engine.yaml").write_text(engine.scenario())
    loaded = Loaded(Load("light", (5, 5), (9, 9), 3.0, rate_rps=1.0))
    for number, at in enumerate((0.0, 1.0, 2.0)):
        loaded.answers.append(Answer(number, Ask(at, 5, 9), at, at, at + 0.01, at + 0.01 * 9, 5, 9, 9))
    files = [tmp_path / "light-1.csv", tmp_path / "light-2.csv"]
    for file in files:
        file.write_text(tidy(loaded, 8))
    for step_ms, error in ((10, 0.0), (20, 1.0)):
        found = predict(tmp_path / "engine.yaml", f"{{kind: constant, step: {step_ms}ms}}", {"light": files})
        for name in ("tpot_mean_s", "e2e_mean_s", "ttft_mean_s"):
            assert found["light"].error(name).error == pytest.approx(error, abs=1e-3)
        assert found["light"].error("tpot_mean_s").spread == 0.0


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_a_scenario_of_its_own_model(name: str, tmp_path: Path) -> None:
    """The scenario loads beside the model's config; its numbers are those that the server is started with."""
    engine = engine_of(name)
    write_hugging_face(engine.shape, tmp_path / "tiny")
    (tmp_path / "engine.yaml").write_text(engine.scenario())
    (spec,) = load_scenario(str(tmp_path / "engine.yaml")).specs
    command = engine.command(tmp_path / "tiny", 1)
    numbers = [str(value) for value in spec.knobs.values() if not isinstance(value, bool)]
    assert len(numbers) >= 2
    assert set(numbers) <= set(command)


def test_nothing_is_measured_into_a_folder_that_holds_files(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(MeasuredError, match="holds files already"):
        judge(engine_of("llama_cpp"), tmp_path, minutes=1.0, seconds=1.0, repeats=1, say=print)
