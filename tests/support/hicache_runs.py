"""Runs of the SGLang policy with HiCache, by every driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchsim.drive.simulate import simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import OVERLAP, SYNC
from batchsim.kernel.host_copies import HostCopies
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival
from batchsim.kv import WritePolicy
from batchsim.kv.hicache import HiCacheKV
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_hicache import SglangWithHiCache
from batchsim.testing.by_hand import same
from batchsim.testing.life_sums import check_lives
from tests.support.stepping import HostCost, LinearCost, Logged, Run
from tests.support.whole_batches import Listed


@dataclass(frozen=True)
class Host:
    """A host of `pages` pages, to which a copy takes `fixed_ns` and so many ns a page; a step has `layers`."""

    pages: int
    policy: WritePolicy = "write_through"
    fixed_ns: int = 0
    load_ns: int = 0
    store_ns: int = 0
    layers: int = 4


def hicache_run(
    arrivals: list[Arrival],
    host: Host,
    *,
    blocks: int,
    page: int = 4,
    overlaps: bool = False,
    leaps: bool = False,
    max_model_len: int = 1000,
    **knobs: Any,
) -> Run:
    """One run with steps of 10 ns, 1 more a prompt token and 2 a decode. All pages must come back, and all parts of a
    life sum to it."""
    kv = HiCacheKV(blocks, page, host.pages, host.policy)
    loop = OVERLAP if overlaps else SYNC
    storing, loading = (OffloadLink(host.fixed_ns, ns) for ns in (host.store_ns, host.load_ns))
    copies = HostCopies(storing, loading, host.layers)
    config = SglangConfig(**{"chunked_prefill_size": -1, "disable_overlap_schedule": not overlaps, **knobs})
    scheduler: Any = Logged(SglangWithHiCache(config, PolicyContext(kv, max_model_len, loop=loop, connector=copies)))
    recorder = Recorder()
    cost = HostCost() if overlaps else LinearCost()
    core = EngineCore(
        scheduler, SimExecutor(cost, max_model_len, loop), recorder, max_model_len=max_model_len, loop=loop
    )
    copies.attach(recorder, core.in_flight)
    simulate(core, Listed(arrivals), leap=leaps)
    core.check_returned()
    kv.check()
    records = recorder.records()
    check_lives(records)
    return Run(records, scheduler.log)


def hicache_timeline(arrivals: list[Arrival], host: Host, **setting: Any) -> Run:
    """As `hicache_run`, with leaps and without: both leave the same records."""
    done, leapt = (hicache_run(arrivals, host, leaps=leaps, **setting) for leaps in (False, True))
    same(done.records, leapt.records)
    return done
