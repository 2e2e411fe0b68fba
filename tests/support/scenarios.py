"""Scenarios written out in a test: settled, simulated, run into a folder, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.results.read import Results
from batchsim.scenario import load_scenario
from batchsim.scenario.config import Point
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from batchsim.testing.by_hand import same
from tests.support.engine import DRIVERS


def setup_of(text: str, folder: Path = Path(), overrides: tuple[str, ...] = ()) -> Setup:
    """What the scenario in `text` is settled as, read from the file mine.yaml in `folder`."""
    return Setup.of(parse_scenario(text, "mine.yaml", folder, overrides))


def simulated(text: str) -> Run:
    """The first policy at the first load."""
    setup = setup_of(text)
    return simulate_point(setup, Point(setup.scenario.specs[0], setup.scenario.loads[0], 0))


def drivers_agree(text: str) -> None:
    """By a clock, in simulated time with leaps and without, the first policy leaves the same records."""
    records = []
    for driver in DRIVERS.values():
        setup = setup_of(text)
        workload = setup.workload(setup.scenario.loads[0], 0)
        core = setup.engine(setup.scenario.specs[0], workload)
        driver(core, workload)
        core.check_returned()
        records.append(core.recorder.records())
    for other in records[1:]:
        same(records[0], other)


def refusal(text: str) -> str:
    """The line in which the scenario in `text` is refused, which names its file."""
    with pytest.raises(ScenarioError) as caught:
        setup_of(text)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("mine.yaml")
    return line


def run_in(folder: Path, text: str, *overrides: str, **more: Any) -> Results:
    """The run of the scenario in `text`, with its results in `folder`."""
    (folder / "s.yaml").write_text(text)
    return run_scenario(load_scenario(str(folder / "s.yaml"), overrides=overrides), out=folder, **more)
