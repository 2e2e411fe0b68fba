"""Recordings of vLLM with LoRA adapters: what they hold, and what is wrong with them."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import conform
from batchsim.check.conform.compare_steps import StepComparison
from tests.support.recorded_by_hand import ASYNC


def recording() -> dict[str, Any]:
    """The asynchronous recording made by hand, of whose two requests the first asks for adapter 7: it has ended with
    the third step, whose results are there when the fifth is scheduled."""
    data = deepcopy(ASYNC)
    data["meta"] |= {"max_loras": 1}
    data["meta"]["totals"] |= {"max_active": 1}
    data["requests"][0]["lora"] = 7
    for step in data["steps"][:4]:
        step["loras"] = [7]
    return data


def compared(data: dict[str, Any], folder: Path) -> StepComparison:
    path = folder / "r.json"
    path.write_text(json.dumps(data))
    verdict = conform(path)
    assert isinstance(verdict, StepComparison)
    return verdict


def test_adapters_of_the_running_requests_are_compared(tmp_path: Path) -> None:
    """In every step, and the most of them over all; what differs is named with its step."""
    assert compared(recording(), tmp_path).difference == ""
    wrong = recording()
    wrong["steps"][4]["loras"] = [7]
    verdict = compared(wrong, tmp_path)
    assert verdict.difference.startswith("step 5 ") and [each.name for each in verdict.differences] == ["loras"]
    wrong = recording()
    wrong["meta"]["totals"]["max_active"] = 2
    assert "max_active" in compared(wrong, tmp_path).difference


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        (("requests", 0, "lora"), -1, "requests[0].lora is -1, not a whole number from 0"),
        (("requests", 0, "lora"), "x", "requests[0].lora is 'x', not a whole number from 0"),
        (("steps", 0, "loras"), 7, "steps[0].loras is 7, not a list"),
        (("steps", 0, "loras"), ["x"], "steps[0].loras[0] is 'x', not a whole number"),
        (("meta", "max_loras"), 0, "meta.max_loras is 0"),
        (("meta", "max_loras"), None, "requests[0] has lora 7, and meta no max_loras. Write down what it ran with."),
        (("meta", "max_cpu_loras"), 0, "meta.max_cpu_loras is 0"),
        (("meta", "enable_lora"), True, "meta.enable_lora True is not a knob of vllm"),
    ],
)
def test_what_a_recording_cannot_say_is_refused(
    where: tuple[Any, ...], value: object, complaint: str, tmp_path: Path
) -> None:
    """In one line, with its place."""
    data = recording()
    at: Any = data
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    with pytest.raises(ScenarioError) as caught:
        compared(data, tmp_path)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
