"""A real engine on this machine: its answers are of the lengths asked for, and calibrated it is predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="no xllamacpp here: pip install '.[engines]', as `make test-all` does")

from batchsim.base.errors import CalibrationError
from batchsim.check.measured.read import read_measured
from batchsim.fit.server.loads import Load
from tools.real_engines.engines import ENGINES, engine_of, serving
from tools.real_engines.experiment import Asker
from tools.real_engines.judge import judge

pytestmark = pytest.mark.slow


def test_llama_cpp_answers_with_the_lengths_asked_for(tmp_path: Path) -> None:
    """Every prompt is computed whole and every answer has its tokens, one a chunk, with more users than slots."""
    engine = engine_of("llama_cpp")
    load = Load("users", (1, 300), (2, 20), 5.0, users=2 * engine.slots, most=3 * engine.slots)
    with serving(engine, tmp_path) as server:
        (run,) = read_measured(Asker(engine, server, tmp_path / "measured").measure(load))
    assert run.requests is not None
    assert len(run.requests) >= load.users
    assert list(run.requests.chunks) == list(run.requests.output_tokens)


@pytest.mark.judged
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_predicted_at_loads_that_its_calibration_was_not_shown(name: str, tmp_path: Path) -> None:
    """Mean TPOT, mean E2E and throughput are within their bounds, unless the machine was not the same throughout.

    A calibration of one minute has a dozen requests of many a load, which are too few.
    """
    engine = engine_of(name)
    try:
        engine.version()
    except CalibrationError as error:
        pytest.skip(str(error))
    found = judge(engine, tmp_path, minutes=5.0, seconds=40.0, repeats=2, say=print)
    if found.unfit:
        pytest.skip(f"not judged: {found.unfit}")
    assert found.word == "met", "\n".join(found.lines())
