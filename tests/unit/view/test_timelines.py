"""Steps as columns: what an engine held while no step ran is 0, and requests that wait for a batch are counted."""

from __future__ import annotations

from typing import Any

from batchsim.policies.families.static import Static, StaticConfig
from batchsim.view.page_data import PageData
from batchsim.view.timelines import timeline_rows, timeline_series
from tests.support.engine import Constant
from tests.support.stepping import run
from tests.unit.view.test_view import page_data as page_data

BATCHES = run(Static, StaticConfig(batch_size=2), "0:4->3 25:2->2 900:1->1 901:1->1", cost=Constant()).records
"""Steps of 10 ns from 25 to 55, and one at 901."""


def series(window_ns: tuple[int, int], most: int = 100) -> dict[str, Any]:
    found = timeline_series(timeline_rows([BATCHES], 1000, 911), window_ns, most)
    return found | {"start_ns": [round(at * 1e9) for at in found["start_s"]]}


def test_idle_time_is_zero_but_for_requests_that_wait() -> None:
    """From the start of the run to its end: a row for each length of the queue between two batches."""
    found = series((0, 911))
    assert found["start_ns"] == [0, 25, 35, 45, 55, 900, 901]
    assert found["running"] == [0, 2, 2, 1, 0, 0, 2] and found["waiting"] == [1, 0, 0, 0, 0, 1, 0]
    for name in ("kv_share", "step_s", "tokens"):
        assert [value > 0 for value in found[name]] == [running > 0 for running in found["running"]]
    assert (found["of"], found["shown"], found["exact"]) == (4, 4, True) and round(found["until_s"] * 1e9) == 911


def test_a_window_has_what_overlaps_it() -> None:
    """A step's own span that step alone; one in idle time what was waiting, and no step."""
    assert series((35, 45))["start_ns"] == [35] and series((34, 46))["start_ns"] == [25, 35, 45]
    idle = series((100, 200))
    assert (idle["start_ns"], idle["running"], idle["of"], idle["until_s"]) == ([55], [0], 0, 900e-9)


def test_steps_and_idle_time_fill_the_run(page_data: PageData) -> None:
    """Without a gap or an overlap, where the host takes no time: each nanosecond of a point is in one row."""
    for number in range(len(page_data.points())):
        records = page_data.records(number)
        end_ns = int(records.requests["ended_ns"].max())
        rows = timeline_rows([records], 1000, end_ns)
        assert rows["start_ns"][0] == 0 and rows["end_ns"][-1] == end_ns and 0 < rows["idle"].sum() < len(rows["idle"])
        assert rows["end_ns"][:-1].tolist() == rows["start_ns"][1:].tolist()


def test_the_host_s_time_between_steps_is_not_idle() -> None:
    """Requests run on while no step does: the line holds, as no row says otherwise."""
    slower = run(Static, StaticConfig(batch_size=2), "0:4->3 0:2->3", cost=Constant()).records
    slower.steps["start_ns"] += [0, 5, 10]
    slower.requests["ended_ns"] += 15
    rows = timeline_rows([slower], 1000, 50)
    assert rows["start_ns"].tolist() == [0, 15, 30, 45] and rows["idle"].tolist() == [False, False, False, True]
