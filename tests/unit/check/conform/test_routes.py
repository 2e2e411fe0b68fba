"""Decisions of real gateways' routers, which ours make again, and what is said where they part."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import RouteComparison, conform
from batchsim.drive.fleet.routers.sglang_cache_aware import SglangCacheAwareConfig, VllmCacheAwareConfig
from tests.support.paths import ROOT

RECORDINGS = sorted((ROOT / "tests" / "data" / "routes").glob("*.json"))
SMALL: dict[str, Any] = {
    "router": "sglang_cache_aware",
    "options": {"block_tokens": 1},
    "replicas": 2,
    "prompts": [[[0, 0, 10]], [[1, 0, 10]], [[0, 0, 10], [2, 0, 10]]],
    "events": [
        {"send": 0, "replica": 0},
        {"send": 1, "replica": 1},
        {"end": 1},
        {"send": 2, "replica": 0},
    ],
}


def compared(folder: Path, data: Any) -> RouteComparison:
    path = folder / "routes.json"
    path.write_text(json.dumps(data))
    verdict = conform(path)
    assert isinstance(verdict, RouteComparison)
    return verdict


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_decisions_of_a_real_gateway_are_made_again(path: Path) -> None:
    """Each is equal, and the gateway is the one that the router says it follows."""
    verdict, data = conform(path), json.loads(path.read_text())
    assert isinstance(verdict, RouteComparison) and not verdict.difference, str(verdict)
    assert verdict.num_routes == len(data["prompts"]) >= 100
    config = {"sglang_cache_aware": SglangCacheAwareConfig, "vllm_cache_aware": VllmCacheAwareConfig}[data["router"]]
    assert config.follows == f"{data['gateway']} {data['version']}"


def test_each_router_has_as_many_recordings_as_it_says() -> None:
    """And each replica has part of the requests in every one; some were unbalanced."""
    found = [json.loads(path.read_text()) for path in RECORDINGS]
    assert Counter(data["router"] for data in found) == {
        config().kind: config.recorded for config in (SglangCacheAwareConfig, VllmCacheAwareConfig)
    }
    for data in found:
        shares = Counter(event["replica"] for event in data["events"] if "send" in event)
        assert len(shares) == data["replicas"] == 3 and min(shares.values()) > 10
    assert {data["options"]["balance_abs_threshold"] for data in found} == {64, 2, 5}


@pytest.mark.parametrize("other", ["sglang_cache_aware", "vllm_cache_aware"])
def test_the_two_gateways_decide_differently(other: str) -> None:
    """One's recording held to the other's rule parts where both replicas have the text, and that is said."""
    theirs = {"sglang_cache_aware": "vllm-router", "vllm_cache_aware": "sglang-router"}[other]
    path = ROOT / "tests" / "data" / "routes" / f"{theirs}-unbalanced.json"
    data = json.loads(path.read_text()) | {"router": other}
    here, recorded = ("replica 0", "replica 2") if theirs == "vllm-router" else ("replica 2", "replica 0")
    verdict = _compare(path, data)
    assert verdict.difference == "decision 36 (events[69], request 35) differs"
    assert (verdict.here, verdict.recorded, verdict.outstanding) == (here, recorded, (1, 0, 0))


def _compare(path: Path, data: Any) -> RouteComparison:
    from batchsim.check.conform.routes import compare_routes

    return compare_routes(path, data)


def test_a_decision_that_differs_is_found_with_what_was_outstanding(tmp_path: Path) -> None:
    """The first difference, both sides and the requests at each replica; the whole is equal without it."""
    assert str(compared(tmp_path, SMALL)) == "routes.json: equal, 3 decisions (sglang_cache_aware)"
    events = [*SMALL["events"][:3], {"send": 2, "replica": 1}]
    assert str(compared(tmp_path, SMALL | {"events": events})) == (
        "routes.json: decision 3 (events[3], request 2) differs\n    here      replica 0\n    recorded  replica 1\n"
        "    outstanding before  [1, 0]"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"router": "sglang"}, "router sglang is not known"),
        ({"router": 5}, "router is 5, not a text"),
        ({"options": {"block": 1}}, "block"),
        ({"options": {"block_tokens": 0}}, "block_tokens"),
        ({"options": []}, "options is [], not an object"),
        ({"replicas": 0}, "replicas is 0, not a whole number from 1"),
        ({"replicas": 1}, "events[1].replica is 1, not a whole number from 0 to 0"),
        ({"prompts": [[[0, 0]], [], []]}, "prompts[0][0] has 2 numbers: stream, first token, length. Write three."),
        ({"prompts": [[[0, 0, 0]], [], []]}, "needs stream and start from 0, length from 1"),
        ({"prompts": 7}, "prompts is 7, not a list"),
        ({"events": []}, "has no events"),
        ({"events": [{"send": 9, "replica": 0}]}, "events[0].send is 9, not a whole number from 0 to 2"),
        ({"events": [{"send": 0}]}, "events[0] has no replica"),
        ({"events": [{"end": 0}]}, "events[0] ends request 0, which is not outstanding"),
        ({"events": [{"send": 0, "replica": 0}] * 2}, "events[1] sends request 0, which is outstanding"),
        ({"events": [{"send": 0, "replica": 0, "t": -1}]}, "events[0].t is -1"),
        ({"event": 1}, "event"),
    ],
)
def test_what_is_no_recording_of_routes_is_one_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """Each fault is named with where it stands."""
    with pytest.raises(ScenarioError) as error:
        compared(tmp_path, SMALL | change)
    assert says in str(error.value) and "\n" not in str(error.value)
