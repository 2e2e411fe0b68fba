"""Ranks in lockstep for tests: vLLM's scheduler on each, a pass of 10 ns and 1 for each token of the fullest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchsim.drive.fleet.lockstep.balancer import Choice
from batchsim.drive.fleet.lockstep.coordinator import RankLoad
from batchsim.drive.fleet.lockstep.passes import Launched, LockstepCost, Pass, num_tokens
from batchsim.drive.fleet.lockstep.simulate_ranks import Lockstep, LockstepPlan
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_drafts import VllmWithDrafts

BASE_NS = 10
MAX_MODEL_LEN = 1000


@dataclass(frozen=True)
class FullestRank:
    """A pass takes as long as its fullest rank; one of dummies alone takes `dummies_ns`. The host takes `host`."""

    host: tuple[int, int] = (0, 0)
    dummies_ns: int = BASE_NS + 1

    def pass_ns(self, batches: Sequence[Batch | None]) -> int:
        most = max(num_tokens(batch) for batch in batches)
        return BASE_NS + most if most else self.dummies_ns

    def step_ns(self, batch: Batch) -> int:
        return self.pass_ns([batch])

    device_ns = step_ns

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        return (self.step_ns(batch),)

    def lanes(self) -> FullestRank:
        return self

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return self.host


class Logged(Lockstep):
    """Writes down what the ranks do together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.passes: list[Pass] = []
        self.dummies: list[list[tuple[int, int]]] = []
        self.waves: list[tuple[int, str, int, int]] = []
        self.routes: list[tuple[int, int]] = []
        self.news: list[tuple[int, list[RankLoad] | None]] = []
        super().__init__(*args, **kwargs)
        self.dummies = [[] for _ in self.ranks]

    def routed(self, now_ns: int, request_id: int, choice: Choice) -> None:
        self.routes.append((request_id, choice.rank))

    def heard(self, now_ns: int, loads: list[RankLoad] | None, wave: int, is_running: bool) -> None:
        self.news.append((now_ns, loads))

    def waved(self, now_ns: int, what: str, wave: int, rank: int) -> None:
        self.waves.append((now_ns, what, wave, rank))

    def reduced(self, now_ns: int, number: int, unfinished: int) -> None:
        self.waves.append((now_ns, "sync", number, unfinished))

    def passed(self, made: Pass, launched: Sequence[Launched]) -> None:
        self.passes.append(made)
        for rank, (batch, launch_ns) in enumerate(launched):
            if batch is None:
                self.dummies[rank].append((made.number, launch_ns))

    def records(self, rank: int) -> Records:
        return self.ranks[rank].core.recorder.records()


def request(id_: int, at: int, prompt: int, output: int) -> Arrival:
    return Arrival(Request(id_, at, prompt, output), output)


def engine(cost: Any, ahead: bool = False, blocks: int = 100, **knobs: Any) -> EngineCore:
    """An engine whose loop has the host's times."""
    config = VllmConfig(enable_prefix_caching=False, async_scheduling=ahead, **knobs)
    loop = replace(config.traits.loop, kind="batch_queue", nap_ns=0)
    scheduler = VllmWithDrafts(config, PolicyContext(CountingKV(blocks, 4), MAX_MODEL_LEN, loop=loop))
    executor = SimExecutor(cost, MAX_MODEL_LEN, loop)
    return EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop)


def in_lockstep(
    workload: AnyWorkload,
    count: int = 2,
    *,
    cost: FullestRank | None = None,
    hop: int = 0,
    interval: int = 16,
    clients: int = 1,
    given: Mapping[int, int] | None = None,
    **knobs: Any,
) -> Logged:
    """Ranks that have run the workload to its end."""
    cost = cost or FullestRank()
    cores = [engine(LockstepCost(cost), **knobs) for _ in range(count)]
    ranks = Logged(cores, cost, LockstepPlan(hop, interval, clients, given or {}), workload)
    ranks.run()
    for core in cores:
        core.check_returned()
    return ranks
