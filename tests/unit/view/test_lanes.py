"""Lanes of requests: the spans are those of their lives, in any window, and what is left out is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.fleet_records import by_engine
from batchsim.explain.story import Stories
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from batchsim.view import lanes as lanes_module
from batchsim.view.lanes import KINDS
from batchsim.view.page_data import PageData
from tests.unit.view.test_view import SCENARIO, ask
from tests.unit.view.test_view import page_data as page_data
from tests.unit.view.test_view import port as port

HELD = """\
  static: {batch_size: 4, max_wait: 200ms, respond: batch_end}
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> PageData:
    """At a load at which requests are preempted, wait, and have answers held back."""
    folder = tmp_path_factory.mktemp("lanes")
    path = folder / "lanes.yaml"
    path.write_text(SCENARIO.replace("policies:\n", "policies:\n" + HELD).replace("9/s", "30/s").replace("1600", "800"))
    return PageData(run_scenario(load_scenario(str(path)), out=folder / "results"), [folder])


def merged(spans: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Spans in time, those of one kind that touch as one."""
    found: list[tuple[str, int, int]] = []
    for what, start, end in sorted(spans, key=lambda span: span[1]):
        if found and found[-1][0] == what and found[-1][2] == start:
            found[-1] = (what, found[-1][1], end)
        else:
            found.append((what, start, end))
    return found


def test_lanes_are_the_chapters_of_lives(wide: PageData) -> None:
    """Of every request under every policy, to the nanosecond; preempted and held ones are among them."""
    kinds = set()
    for number in range(len(wide.points())):
        records = wide.records(number)
        stories, found = Stories(records), wide.lanes(number, 0, None, -1)
        assert found["of"] == len(found["id"]) == 40 and found["shortest_s"] == 0
        mine: dict[int, list[tuple[str, int, int]]] = {id_: [] for id_ in found["id"]}
        columns = zip(found["lane"], found["kind"], found["start_s"], found["end_s"], strict=True)
        for lane, kind, start, end in columns:
            mine[found["id"][lane]].append((KINDS[kind], round(start * 1e9), round(end * 1e9)))
        waits = {"waiting_step": "queued", "host_gap": "queued"}
        for id_, spans in mine.items():
            chapters = stories.tell(id_).chapters
            told = [(waits.get(one.what, one.what), one.start_ns, one.end_ns) for one in chapters]
            assert merged(spans) == merged(told)
            kinds |= {what for what, _, _ in spans}
        assert found["id"] == sorted(found["id"])  # ids are given in the order of arrival
    assert kinds >= {"queued", "prefill", "decode", "preempted", "response_held"}


def test_an_answer_sent_whole_has_no_time_between_tokens(wide: PageData) -> None:
    """Neither in the list of requests nor beside a policy that streams."""
    points = wide.points()
    static, other = (
        next(k for k, point in enumerate(points) if point.policy == policy) for policy in ("static", "continuous")
    )
    assert wide.requests(static, "tpot", None)["of"] == 0 and wide.requests(static, "ttft", None)["of"] == 40
    found = wide.compare(static, other, "tpot")
    assert (found["both"], found["slower"], found["faster"], found["undefined"]) == (0, 0, 0, 40)


def test_a_window_shows_who_was_there(page_data: PageData, port: int) -> None:
    """One step's: those whose spans overlap it, with their whole spans."""
    step = page_data.results.steps(*page_data.points()[1])
    step = step.iloc[int(step["num_waiting"].argmax())]
    start, end = step["start_ns"] / 1e9, (step["start_ns"] + step["duration_ns"]) / 1e9
    status, found, _ = ask(port, f"/lanes?point=1&from={start}&to={end}")
    assert status == 200 and (found["from_s"], found["to_s"]) == pytest.approx((start, end))
    rows = page_data.records(1).requests
    there = rows[(rows["arrival_ns"] < end * 1e9 - 1) & (rows["ended_ns"] > start * 1e9 + 1)]
    assert sorted(found["id"]) == there["request_id"].tolist() and found["of"] == len(there) > 1
    assert min(found["start_s"]) < start and max(found["end_s"]) > end


def test_of_too_many_those_that_change_come_first(page_data: PageData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then others, evenly; the picked one in any case, and of too many spans the longest."""
    whole = page_data.lanes(0, 0, None, -1)
    monkeypatch.setattr(lanes_module, "MOST_LANES", 5)
    few = page_data.lanes(0, 0, None, 17)
    assert few["of"] == 40 and len(few["id"]) == 6 and {0, 17, 39} <= set(few["id"])
    ended = int(page_data.records(0).requests["ended_ns"][20])
    monkeypatch.setattr(lanes_module, "MOST_LANES", 1)
    (mine,) = page_data.lanes(0, 0, ((ended - 1) / 1e9, (ended + 1) / 1e9), -1)["id"]
    assert mine == 20
    monkeypatch.setattr(lanes_module, "MOST_LANES", 150)
    monkeypatch.setattr(lanes_module, "MOST_SPANS", 30)
    cut = page_data.lanes(0, 0, None, -1)
    lengths = sorted(e - s for s, e in zip(whole["start_s"], whole["end_s"], strict=True))
    assert len(cut["lane"]) == 30 and cut["shortest_s"] == pytest.approx(lengths[-30], abs=1e-9)


def test_lanes_of_a_replica(tmp_path: Path) -> None:
    """Each request of a fleet has its lane at the engine that it was at, and nowhere else."""
    path = tmp_path / "fleet.yaml"
    path.write_text(SCENARIO + "replicas: {count: 2, router: least_tokens}\n")
    page_data = PageData(run_scenario(load_scenario(str(path)), out=tmp_path / "results"))
    each = [set(page_data.lanes(0, replica, None, -1)["id"]) for replica in (0, 1)]
    rows = {one.replica: set(one.records.requests["request_id"].tolist()) for one in by_engine(page_data.records(0))}
    assert each == [rows[0], rows[1]] and not each[0] & each[1] and len(each[0] | each[1]) == 40
    with pytest.raises(ScenarioError, match="replica 2: no step ran there"):
        page_data.lanes(0, 2, None, -1)
