"""Leaps of engines that schedule ahead: how often the scheduler is really asked. Records are those of stepping.

Times in ns with HostCost: a step is 10 on the GPU, 1 a prefill token, 2 a decode; 3 to launch, 2 to process.
"""

from __future__ import annotations

from typing import Any

import pytest
from stepping import HostCost, Run, run

from batchsim.kernel.types import Batch, Sequence
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig


def leapt(arrivals: str, *, policy: type[Vllm] = Vllm, blocks: int = 1000, **knobs: Any) -> Run:
    """The run with leaps; one that steps leaves the same records."""
    config = VllmConfig(async_scheduling=True, enable_prefix_caching=False, **{"max_num_seqs": 8, **knobs})
    setting: dict[str, Any] = {"cost": HostCost(), "loop": config.traits.loop, "max_model_len": 1000, "blocks": blocks}
    leaping, stepping = (run(policy, config, arrivals, how=how, **setting) for how in ("leap", "step"))
    for table in ("requests", "steps", "states", "lanes"):
        assert getattr(leaping.records, table).tobytes() == getattr(stepping.records, table).tobytes(), table
    return leaping


@pytest.mark.parametrize(
    ("arrivals", "knobs", "calls"),
    [
        pytest.param("0:4->300/600", {}, 2, id="alone"),
        pytest.param("0:4->100/600 0:4->300/600", {}, 2, id="one ends before the other"),
        pytest.param("0:4->100 0:4->300/600", {}, 3, id="one ends by length"),
        pytest.param("0:4->300/600 900:4->300/600", {}, 4, id="one comes later"),
        pytest.param("0:4->100/600 0:4->300/600 0:4->300/600", {"max_num_seqs": 2}, 5, id="one waits"),
    ],
)
def test_the_scheduler_is_asked_for_each_prompt_and_the_step_after_it(
    arrivals: str, knobs: dict[str, Any], calls: int
) -> None:
    """Not after an end by a stop token, unless somebody waits; but for the first step without who ended by length,
    which is known before."""
    assert len(leapt(arrivals, **knobs).log) == calls


@pytest.mark.parametrize("blocks", [30, 37, 44, 47, 48, 49, 100])
def test_steps_alike_are_repeated_at_once_as_far_as_there_are_blocks(blocks: int) -> None:
    """And who finds none is preempted in the same step as without leaps."""
    noted: list[int] = []

    class Noting(Vllm):
        def repeat_by(self, batch: Batch, num_steps: int, due: list[Sequence]) -> None:
            noted.append(num_steps)
            super().repeat_by(batch, num_steps, due)

    short = leapt("0:4->60/84 0:6->70/84 0:4->80/84", policy=Noting, blocks=blocks)
    assert sum(noted) > len(short.records.steps) / 2
    assert any(short.records.steps["num_preempted"]) == (blocks < 49)


@pytest.mark.parametrize(
    ("arrivals", "knobs", "asked"),
    [
        pytest.param("0:4->100/600 5:4->200/600", {}, [True], id="while another decodes"),
        pytest.param("0:4->100/600 5:4->200/600 5:4->150/600", {}, [True], id="two at once"),
        pytest.param("0:4->100/600 5:20->200/600", {"max_num_batched_tokens": 8}, [False] * 2 + [True], id="in chunks"),
        pytest.param(
            "0:4->99/600 5:4->50/600 5:20->50/600", {"max_num_batched_tokens": 8}, [False] * 3 + [True], id="one of two"
        ),
        pytest.param("0:4->100/600 5:4->200/600 5:4->9/600", {"max_num_seqs": 2}, [False, True], id="one waits"),
        pytest.param("0:4->100/600 5:4->1/600 600:4->9/600", {}, [True] * 2, id="ends with its first token"),
        pytest.param("0:4->100/600 5:4->1", {}, [True], id="ends by length with its first token"),
        pytest.param("0:4->60/84 300:16->70/84", {"blocks": 25}, [True] * 2, id="one is preempted later"),
    ],
)
def test_the_decodes_behind_the_last_prompt_are_asked_for_within_the_leap(
    arrivals: str, knobs: dict[str, Any], asked: list[bool]
) -> None:
    """Not while a prompt goes on or somebody waits, who might come in with them."""
    answers: list[bool] = []

    class Noting(Vllm):
        def is_followed_by_decodes(self, batch: Batch) -> bool:
            answers.append(super().is_followed_by_decodes(batch))
            return answers[-1]

    leapt(arrivals, policy=Noting, **knobs)
    assert answers == asked
