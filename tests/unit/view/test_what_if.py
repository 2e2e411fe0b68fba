"""Knobs of a point changed on the page: which there are, several at once, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.explain.counterfactual import counterfactual
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from batchsim.view.page_data import PageData
from batchsim.view.what_if import scaled
from tests.support.scenarios import run_in
from tests.unit.view.test_view import SCENARIO, post
from tests.unit.view.test_view import page_data as page_data
from tests.unit.view.test_view import port as port


def knob(key: str, value: float, *, whole: bool = True, unit: str = "") -> dict[str, object]:
    name = key.removeprefix("policies.continuous.").removeprefix("policies.preemptive.")
    return {"key": key, "name": name, "value": value, "unit": unit, "whole": whole}


def test_the_knobs_are_what_the_point_had(page_data: PageData) -> None:
    """The load, the policy's numbers with their units, the KV memory and the factor on steps."""
    found = page_data.knobs(1)
    assert found == {
        "why": "",
        "knobs": [
            knob("load", page_data.points()[1].load, whole=False),
            knob("policies.continuous.max_num_seqs", 4),
            knob("policies.continuous.max_num_batched_tokens", 256),
            knob("kv.tokens", 1600),
            knob("cost_factor", 1.0, whole=False),
        ],
    }
    assert knob("policies.preemptive.watermark", 5.0, whole=False, unit="%") in page_data.knobs(3)["knobs"]


def test_defaults_of_the_gpu_are_knobs(tmp_path: Path) -> None:
    """vLLM's sequences and tokens, which the scenario does not state."""
    path = tmp_path / "gpu.yaml"
    text = SCENARIO.replace("cost: {kind: linear, base: 8ms, per_token: 80us}\nkv: {tokens: 1600}", "cost: h100")
    path.write_text(
        text[: text.index("policies:")] + "policies: {vllm: {}}\nload: {mean_rate: [6/s]}\nslo: ttft<1s @ 99%\n"
    )
    page_data = PageData(run_scenario(load_scenario(str(path), overrides=["seeds=1"]), out=tmp_path))
    found = {knob["name"]: knob["value"] for knob in page_data.knobs(0)["knobs"]}
    assert found["max_num_seqs"] == 1024 and found["max_num_batched_tokens"] == 8192 and found["kv.tokens"] > 100_000


def test_several_knobs_are_changed_at_once(page_data: PageData, port: int) -> None:
    """To what `explain --counterfactual` with the same changes finds."""
    factors = {"policies.continuous.max_num_seqs": 2.0, "kv.tokens": 0.5, "cost_factor": 1.5}
    status, found = post(port, {"point": 0, "factors": factors})
    assert status == 200 and [list(each.values()) for each in found["knobs"]] == [
        ["max_num_seqs", "4", "8"],
        ["kv.tokens", "1,600", "800"],
        ["cost_factor", "1", "1.5"],
    ]
    changes = ["policies.continuous.max_num_seqs=8", "kv.tokens=800", "cost_factor=1.5"]
    same = counterfactual(page_data.results, *page_data.points()[0], changes)
    assert found["misses"] == [len(side.misses) for side in (same.base, same.changed)] and found["shared"] == 40
    steps = same.changed.records.steps
    assert max(found["queues"][1]["waiting"]) == steps["num_waiting"].max()


def test_another_load_beside_a_knob(page_data: PageData, port: int) -> None:
    """Other requests are sent, so none is compared; the queue is that of both changes."""
    status, found = post(port, {"point": 0, "factors": {"load": 4.0, "cost_factor": 0.5}})
    assert status == 200 and found["vanish"] is None
    before, after = (float(found["knobs"][0][side]) for side in ("before", "after"))
    assert after == pytest.approx(4 * before, rel=1e-3)
    slow = post(port, {"point": 0, "factors": {"load": 4.0}})[1]
    assert max(slow["queues"][1]["waiting"]) > max(found["queues"][1]["waiting"])
    assert max(slow["queues"][0]["waiting"]) == page_data.results.steps(*page_data.points()[0])["num_waiting"].max()


def test_what_the_scenario_refuses_is_one_line(page_data: PageData, port: int) -> None:
    """More tokens of a prompt than the policy has for a step, say."""
    factors = {"policies.continuous.max_num_batched_tokens": 0.1, "policies.continuous.max_num_seqs": 10.0}
    status, found = post(port, {"point": 0, "factors": factors})
    assert status == 400 and "max_num_batched_tokens" in found["error"] and "\n" not in found["error"]


def test_where_nobody_is_let_in_there_are_no_steps(page_data: PageData, port: int, tmp_path: Path) -> None:
    """Neither in a change nor in a point: the queue is empty, and the panels of steps say so."""
    status, found = post(port, {"point": 0, "factors": {"kv.tokens": 0.1}})
    assert status == 200 and found["queues"][1] == {"start_s": [], "waiting": []} and found["misses"][1] == 40
    none = PageData(run_in(tmp_path, SCENARIO.replace("1600", "32")))
    assert set(none.point(0)["lacks"]) == {"timeline", "lanes"} and none.point(0)["steps"] == 0
    assert none.requests(0, "ttft", None)["others"] == 40


def test_a_point_that_cannot_be_simulated_here_says_why(tmp_path: Path) -> None:
    """A model's file that is gone: no slider, and the line of all commands."""
    page_data = PageData(run_in(tmp_path, SCENARIO))
    page_data.results.scenario["model"] = "gone.json"
    found = page_data.knobs(0)
    assert found["knobs"] == [] and "gone.json" in found["why"] and "\n" not in found["why"]
    with pytest.raises(ScenarioError, match=r"gone\.json"):
        page_data.changed(0, {"cost_factor": 2.0})


@pytest.mark.parametrize(
    ("value", "whole", "factor", "after"),
    [
        (4, True, 0.1, 1),
        (5, True, 1.5, 8),
        (256, True, 1.0718, 274),
        (8.0, False, 1.23456, 9.876),
        (5.0, False, 2.0, 10.0),
    ],
)
def test_whole_numbers_stay_whole(value: float, whole: bool, factor: float, after: float) -> None:
    """And at least one; others have four digits."""
    assert scaled({"value": value, "whole": whole}, factor) == after
