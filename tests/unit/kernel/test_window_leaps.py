"""Leaps where the cost is no line over the whole context: layers with a window, which contexts fill one by one.

The records are those of stepping, `window_tokens` among them, and `explain` of each row gives its duration.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from batchsim.cost.base import Lanes
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.interpolation import Grid
from batchsim.cost.profile import EngineSetup, WindowedAttention
from batchsim.cost.work import TIME_TERMS, work_columns
from batchsim.drive.simulate import simulate
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from tests.support.whole_batches import BLOCK_SIZE, Listed, requests
from tests.unit.cost.test_profile import COSTS, PROFILE

WINDOW = 40
KNOTS = (3.0, 17.0, 40.0)
WINDOWED = WindowedAttention(
    WINDOW,
    Grid((1, 8, 64), KNOTS, ((100_000.3, 110_000.1, 190_000.7), (2e5, 4.1e5, 1.3e6), (1e6, 3e6, 9e6))),
    Grid((1, 16, 512), KNOTS, ((1e4, 2e4, 9e4), (2e4, 5e4, 1e6), (9e4, 4e5, 8e6))),
)
WITH_WINDOW = replace(PROFILE, costs=replace(COSTS, windowed=WINDOWED))


def records(arrivals: str, cost: Calibrated, *, leap: bool, stages: int = 1, **knobs: Any) -> Records:
    config = VllmConfig(**{"max_num_seqs": 8, "enable_prefix_caching": False, **knobs})
    loop = config.traits.loop.over(stages) if stages > 1 else config.traits.loop
    kv = CountingKV(400, BLOCK_SIZE) if stages == 1 else new_kv(config, 400, BLOCK_SIZE, ids=False)
    scheduler = Vllm(config, PolicyContext(kv, 1000, loop=loop))
    core = EngineCore(scheduler, SimExecutor(cost, 1000, loop), Recorder(), max_model_len=1000, loop=loop)
    simulate(core, Listed(requests(arrivals)), leap=leap)
    return core.recorder.records()


def drawn(seed: int) -> str:
    """Some requests whose contexts fill the window at different steps, or begin beyond it."""
    rng = random.Random(seed)
    lines = [
        f"{rng.randint(0, 60) * 10_000_000}:{rng.choice([3, 20, 39, 40, 41, 70, 200])}->{rng.randint(1, 120)}"
        for _ in range(rng.randint(1, 12))
    ]
    return " ".join(sorted(lines, key=lambda line: int(line.partition(":")[0])))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_leaps_leave_the_records_of_stepping(ahead: bool, stages: int) -> None:
    setup = EngineSetup("vllm", "", pp=stages) if stages > 1 else None
    cost = Calibrated(replace(WITH_WINDOW, setup=setup), extrapolate=True)
    for seed in range(12):
        knobs: dict[str, Any] = {"async_scheduling": ahead, "stages": stages}
        leaping, stepping = (records(drawn(seed), cost, leap=leap, **knobs) for leap in (True, False))
        for table in ("requests", "steps", "states", "lanes"):
            assert getattr(leaping, table).tobytes() == getattr(stepping, table).tobytes(), (seed, table)
        steps = leaping.steps
        decodes = steps[steps["num_decode"] > 0]
        assert (decodes["window_tokens"] <= np.minimum(decodes["context_tokens"], decodes["num_decode"] * WINDOW)).all()
        assert (decodes["window_tokens"] > 0).all()


@pytest.mark.parametrize(("ahead", "asked"), [(False, 1), (True, 2)])
def test_steps_are_leapt_along_one_line_after_another(ahead: bool, asked: int) -> None:
    """Of two requests one fills the window with its 30th token: the first steps alone are asked for one by one."""
    counted: list[int] = []

    class Counting:
        """The cost around which it is, whose questions for one step are counted."""

        def __getattr__(self, name: str) -> Any:
            return getattr(cost, name)

        def without_host(self) -> Counting:
            return self

        def lanes(self) -> Lanes:
            return Lanes(cast(Calibrated, self), 1)

        def step_ns(self, batch: Batch) -> int:
            counted.append(batch.window_tokens)
            return cost.step_ns(batch)

    cost = Calibrated(WITH_WINDOW, extrapolate=True)
    steps = records("0:10->200 0:100->200", cast(Calibrated, Counting()), leap=True, async_scheduling=ahead).steps
    assert (len(steps), len(counted)) == (200, asked)


def test_rows_are_explained_to_a_nanosecond() -> None:
    cost = Calibrated(WITH_WINDOW, extrapolate=True)
    steps = records(drawn(3), cost, leap=True, async_scheduling=False).steps
    terms = cost.explain(work_columns(steps))
    summed = sum((terms[name] for name in TIME_TERMS), np.zeros(1))
    assert np.abs(summed - steps["duration_ns"]).max() <= 1


def test_a_cost_without_windows_leaves_their_columns_empty() -> None:
    steps = records(drawn(3), Calibrated(PROFILE, extrapolate=True), leap=True, async_scheduling=False).steps
    assert not steps["window_tokens"].any() and not steps["window_pairs"].any()
