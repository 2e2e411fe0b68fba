"""Models awake side by side on a GPU, by hand: whose steps wait for whose, and what is conserved.

Steps take 10 ns; a request of three tokens with an engine of its own takes three.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import pytest

from batchsim.drive.fleet.side_by_side import simulate_side_by_side
from batchsim.drive.fleet.simulate_fleet import FleetRun
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import FINISHED, GPU_WAITED, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.metrics.attribution import attribute
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.testing.life_sums import check_lives
from batchsim.testing.random_configs import MS
from batchsim.testing.random_engines import Listed, TokenCost
from tests.support.engine import Requests, engine, vllm
from tests.unit.drive.fleet.test_shared_gpu import asked, ends, parts


def run(*arrivals: Arrival, sharing: str = "ab", models: str = "abc") -> FleetRun:
    """The run of models named by letters, of which `sharing` are on one GPU."""
    cores: list[EngineCore] = []

    def new_engine(number: int) -> EngineCore:
        cores.append(engine(vllm(CountingKV(100, 4), max_num_seqs=4)))
        return cores[-1]

    homes = {name: number for number, name in enumerate(models)}
    found = simulate_side_by_side(new_engine, homes, [homes[name] for name in sharing], Requests(*arrivals))
    for core in cores:
        core.check_returned()
    check_lives(found.records)
    return found


def test_steps_of_two_models_take_turns() -> None:
    """b's first step is launched at 4 and waits for a's until 10; from then on each waits for one of the other's."""
    found = run(asked(0, 0, "a"), asked(1, 4, "b"))
    assert ends(found) == [50, 60]
    assert parts(found, 0) == {"prefill": 10, "decode_alone": 20, "waiting_for_gpu": 20}
    assert parts(found, 1) == {"prefill": 10, "decode_alone": 20, "waiting_for_gpu": 26}


def test_a_model_with_its_own_gpu_waits_for_none() -> None:
    """Nor does one whose neighbour has nothing to do."""
    found = run(asked(0, 0, "a"), asked(1, 4, "c"), asked(2, 100, "b"))
    assert ends(found) == [30, 34, 130]
    assert "waiting_for_gpu" not in set(attribute(found.records)["part"])


def test_a_batch_shares_its_turn() -> None:
    """Two requests of a in one batch take as many turns as one: b ends no later for it."""
    found = run(asked(0, 0, "a"), asked(1, 0, "a"), asked(2, 4, "b"))
    assert ends(found) == [50, 50, 60]


def test_a_step_ahead_of_results_waits_in_its_turn() -> None:
    """Of engines ahead, too: two equal requests take about twice as long as one alone, and half of it is the wait."""
    case = _Case(random.Random(0), is_ahead=True)
    case.stop_ns, case.sharing = None, range(2)
    case.arrivals = [Arrival(Request(k, 0, 20, 30, request_class="ab"[k]), 30) for k in range(2)]
    shared, alone = case.run(), case.run(sharing=())
    (both_ns, _), (alone_ns, _) = ends(shared), ends(alone)
    assert 1.9 * alone_ns < both_ns < 2.1 * alone_ns
    assert 0.4 < parts(shared, 0)["waiting_for_gpu"] / both_ns < 0.6


class _Case:
    """Random requests for three models, two or three of which share the GPU, whose engines are ahead or not."""

    def __init__(self, pick: random.Random, *, is_ahead: bool | None = None) -> None:
        self.knobs: dict[str, Any] = {
            "async_scheduling": pick.random() < 0.5 if is_ahead is None else is_ahead,
            "enable_prefix_caching": pick.random() < 0.5,
            "max_num_seqs": pick.choice([1, 3, 16]),
            "max_num_batched_tokens": pick.choice([32, 512]),
        }
        self.sharing = range(pick.choice([2, 3]))
        self.stop_ns = pick.choice([None, None, 30 * MS])
        self.arrivals: list[Arrival] = []
        at_ms = 0.0
        for number in range(pick.randint(6, 20)):
            at_ms += pick.choice([0.0, 0.5, 3.0, 20.0, 200.0])
            prompt, output, cancel_ms = pick.randint(1, 200), pick.randint(1, 40), pick.choice([None, None, 2.0, 60.0])
            tokens = TokenIds.of([(prompt_stream(pick.randint(0, 4)), 0, prompt)])
            request = Request(number, int(at_ms * MS), prompt, output, tokens=tokens, request_class=pick.choice("abc"))
            self.arrivals.append(Arrival(request, output, None if cancel_ms is None else int((at_ms + cancel_ms) * MS)))

    def run(self, sharing: Collection[int] | None = None) -> FleetRun:
        cores: list[EngineCore] = []

        def new_engine(number: int) -> EngineCore:
            config = VllmConfig(**self.knobs)
            context = PolicyContext(new_kv(config, 40, 16, ids=False), 2048, loop=config.traits.loop)
            executor = SimExecutor(TokenCost(), 2048, config.traits.loop)
            options: dict[str, Any] = {"max_model_len": 2048, "stop_ns": self.stop_ns, "loop": config.traits.loop}
            cores.append(EngineCore(Vllm(config, context), executor, Recorder(), **options))
            return cores[-1]

        on_one = self.sharing if sharing is None else sharing
        listed = Listed(tuple(self.arrivals))
        found = simulate_side_by_side(new_engine, {"a": 0, "b": 1, "c": 2}, on_one, listed, stop_ns=self.stop_ns)
        for core in cores:
            core.check_returned()
        return found


@pytest.mark.parametrize("seed", range(60))
def test_the_gpu_runs_one_step_at_a_time(seed: int) -> None:
    """What steps do after their wait never overlaps with another model's, and follows it at once where it waited; parts
    sum to lives, requests end as they should; and a GPU that one model has changes nothing."""
    case = _Case(random.Random(seed))
    found = case.run()
    steps, replicas, states = found.records.steps, found.records.replicas, found.records.states
    assert replicas is not None
    waited = {
        (int(replica), int(row["time_ns"])): int(row["blocker"])
        for row, replica in zip(states, replicas.states, strict=True)
        if row["state"] == GPU_WAITED
    }
    spans: list[tuple[int, int, int]] = []
    for step, replica in zip(steps, replicas.steps.tolist(), strict=True):
        start_ns = int(step["start_ns"])
        if replica in case.sharing:
            wait_ns = waited.pop((replica, start_ns), 0)
            spans.append((start_ns + wait_ns, start_ns + int(step["duration_ns"]), wait_ns))
    assert not waited
    spans.sort()
    for (_, one_end_ns, _), (start_ns, _, wait_ns) in pairwise(spans):
        assert one_end_ns <= start_ns
        assert not wait_ns or one_end_ns == start_ns
    check_lives(found.records)
    for row, each in zip(found.records.requests, case.arrivals, strict=True):
        assert row["outcome"] != FINISHED or row["output_tokens"] == each.output_tokens
    alone = case.run(sharing=[0])
    assert not (alone.records.states["state"] == GPU_WAITED).any()
    assert (alone.records.steps == case.run(sharing=()).records.steps).all()
