"""Leaps of engines that schedule ahead: how often the scheduler is really asked. Records are those of stepping.

Times in ns with HostCost: a step is 10 on the GPU, 1 a prefill token, 2 a decode; 3 to launch, 2 to process.
"""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from batchsim.kernel.batch import Batch
from batchsim.kernel.protocols import DecodeLine
from batchsim.kernel.types import Sequence
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.stepping import HostCost, Run, run_alike


class DrawnCost(HostCost):
    """A step lasts longer with its context, along a line that turns up at the `last` context, and the host needs longer
    for more decodes; all of it drawn."""

    def __init__(self, rng: random.Random) -> None:
        self.alone_ns, self.per_row_ns = rng.choice([3.0, 10.5, 40.25]), rng.choice([0, 2])
        self.token_ns, self.last = rng.choice([0.0, 0.125, 0.3]), rng.choice([40, 150, inf, inf])
        self.launch_ns, self.process_ns = rng.choice([0, 1, 3, 30]), rng.choice([0, 2, 25])
        self.host_per_row_ns = rng.choice([0, 0, 1, 5])

    def step_ns(self, batch: Batch) -> int:
        alone_ns, token_ns, _ = self.decode_line(batch)
        return int(alone_ns + token_ns * batch.context_tokens) + batch.num_prefill_tokens

    def decode_line(self, batch: Batch) -> DecodeLine:
        alone_ns = self.alone_ns + self.per_row_ns * batch.num_decode
        if batch.context_tokens <= self.last:
            return alone_ns, self.token_ns, self.last
        return alone_ns, 2 * self.token_ns, inf

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        more_ns = 0 if batch is None else self.host_per_row_ns * batch.num_decode
        return self.launch_ns + more_ns, self.process_ns + more_ns


def leapt(
    arrivals: str, *, policy: type[Vllm] = Vllm, blocks: int = 1000, cost: HostCost | None = None, **knobs: Any
) -> Run:
    """The run with leaps; one that steps leaves the same records."""
    config = VllmConfig(async_scheduling=True, enable_prefix_caching=False, **{"max_num_seqs": 8, **knobs})
    setting: dict[str, Any] = {
        "cost": cost or HostCost(),
        "loop": config.traits.loop,
        "max_model_len": 1000,
        "blocks": blocks,
    }
    return run_alike(policy, config, arrivals, "leap", "step", **setting)


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


def test_a_policy_that_replaces_a_rule_of_a_steady_one_is_asked_for_every_step() -> None:
    """Its steps are its own: what the replaced class says of them may not hold."""
    calls: list[int] = []

    class Asking(Vllm):
        def repeat(self, batch: Batch, now_ns: int) -> bool:
            calls.append(now_ns)
            return super().repeat(batch, now_ns)

    done = leapt("0:4->60/84 0:6->70/84", policy=Asking)
    assert len(calls) > len(done.records.steps) / 2


def _drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Arrivals, of whom some give up, and knobs."""
    longest, gap, now_ns, arrivals = rng.choice([6, 60]), rng.choice([0, 9, 400, 2000]), 0, list[str]()
    for _ in range(rng.randint(1, 9)):
        now_ns += rng.randint(0, gap)
        cap = rng.randint(1, longest)
        cancel = f"c{now_ns + rng.randint(1, 900)}" if rng.random() < 0.2 else ""
        arrivals.append(f"{now_ns}:{rng.randint(1, 30)}->{rng.randint(1, cap)}/{cap}{cancel}")
    knobs = {
        "max_num_seqs": rng.choice([2, 3, 8]),
        "max_num_batched_tokens": rng.choice([8, 16, 64]),
        "blocks": rng.choice([24, 30, 1000]),
    }
    return " ".join(arrivals), knobs


def test_random_engines_leave_the_records_of_stepping() -> None:
    """Whether the host waits for the device, the device for the host, or the one and then the other."""
    for seed in range(60):
        rng = random.Random(seed)
        arrivals, knobs = _drawn(rng)
        leapt(arrivals, cost=DrawnCost(rng), **knobs)
