"""Ranks that make every iteration together, for tests: SGLang's scheduler on each, a pass of 10 ns and 1 for each token
of the fullest rank, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from batchsim.drive.fleet.lockstep.iterations import Iterations
from batchsim.drive.fleet.lockstep.passes import LockstepCost
from batchsim.drive.fleet.lockstep.rank_costs import IteratedCosts
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import AnyWorkload
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig

MAX_MODEL_LEN = 1000
PAGE = 4


class TokensAndHost:
    """A step of 10 ns and 1 for each of its tokens, padding among them; the host takes `host`."""

    def __init__(self, host: tuple[int, int] = (0, 0)) -> None:
        self.host = host

    def step_ns(self, batch: Batch) -> int:
        tokens = batch.num_prefill_tokens + batch.num_decode_tokens
        return 10 + tokens + batch.pad_decode_rows + batch.pad_prefill_tokens

    device_ns = step_ns

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        return (self.step_ns(batch),)

    def lanes(self) -> TokensAndHost:
        return self

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return self.host


def engine(cost: Any, ahead: bool = False, blocks: int = 100, **knobs: Any) -> EngineCore:
    """An engine without a prefix cache."""
    config = SglangConfig(disable_radix_cache=True, disable_overlap_schedule=not ahead, **knobs)
    loop = config.traits.loop
    scheduler = Sglang(config, PolicyContext(CountingKV(blocks, PAGE), MAX_MODEL_LEN, loop=loop))
    return EngineCore(
        scheduler, SimExecutor(cost, MAX_MODEL_LEN, loop), Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop
    )


class Ranks(Iterations):
    """Ranks that are written down; `records` of each."""

    def records(self, rank: int) -> Records:
        return self._cores[rank].recorder.records()


def iterated(
    workload: AnyWorkload,
    count: int = 2,
    *,
    sizes: Sequence[int] = (),
    host: tuple[int, int] = (0, 0),
    experts_ns: Callable[..., float] | None = None,
    **knobs: Any,
) -> Ranks:
    """Ranks that have run the workload to its end."""
    cost = TokensAndHost(host)
    knobs = {"chunked_prefill_size": 64, **knobs}
    cores = [engine(LockstepCost(cost), **knobs) for _ in range(count)]
    ranks = Ranks(cores, IteratedCosts(cost.step_ns, sizes, experts_ns), workload, logs=True)
    ranks.run()
    for core in cores:
        core.check_returned()
    return ranks
