"""Fields of recordings of engines that offload KV to the memory of their host, and what a replay does with them.

Source of the form: vLLM 0.33's OffloadingConnector.
"""

from __future__ import annotations

from typing import Any

from batchsim.base.errors import shown
from batchsim.base.units import NS_PER_S
from batchsim.check.conform.fields import (
    COUNT,
    FLAG,
    IDS,
    OBJECT,
    SECONDS,
    TEXT,
    BadRecording,
    Fields,
    Kind,
    ListOf,
    check_row,
    columns,
    whole,
)
from batchsim.check.conform.kv_transfers import with_connector
from batchsim.check.conform.recording import Names, to_ns
from batchsim.check.conform.step_forms import StepForm, as_here
from batchsim.kernel.core import EngineCore
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.offload import NewOffload, OffloadConnector
from batchsim.policies.systems.vllm.offload_config import VllmOffloadConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_offload import VllmOffload

META: dict[str, Kind] = {"tier": OBJECT, "link": OBJECT}
"""Keys of `meta` that say of an engine to where, and how fast, it offloads."""
_CHUNKS = whole(1, 10**7)
_TIER: Fields = {"cpu_chunks": _CHUNKS}
_TIER_MAYBE: Fields = {
    "blocks_per_chunk": _CHUNKS,
    "eviction_policy": TEXT,
    "store_threshold": COUNT,
    "max_tracker_size": _CHUNKS,
    "offload_prompt_only": FLAG,
}
_LINK: Fields = {"fixed": SECONDS, "store_per_chunk": SECONDS, "load_per_chunk": SECONDS}
_WAY = Kind('"s" or "l"', lambda value: value in ("s", "l"))
_TRIPLES = ListOf(columns("[id, chunks, job], all whole numbers from 0", COUNT, COUNT, COUNT))
_MATCHED = ListOf(columns("[id, tokens, tokens or null], whole numbers from 0", COUNT, COUNT, COUNT.or_null))
_OFFERS = ListOf(
    columns("[id, chunks, chunks or null, chunks], whole numbers from 0", COUNT, COUNT, COUNT.or_null, COUNT)
)
_TRANSFERS = ListOf(columns('[job, "s" or "l", id, chunks, start, end]', COUNT, _WAY, COUNT, COUNT, SECONDS, SECONDS))
_CPU = columns("[chunks used, evictable, being stored], whole numbers from 0", COUNT, COUNT, COUNT)
_STEP: Names = {
    "matched": ("matched", _MATCHED),
    "loads_started": ("chunks_loading", _TRIPLES),
    "remote": ("remote_in_order", IDS),
    "offers": ("offers", _OFFERS),
    "stores_queued": ("stores_queued", _TRIPLES),
    "flushed": ("flushed", IDS),
    "t_launch": ("launched_ns", SECONDS),
    "xfers": ("xfers", _TRANSFERS),
    **as_here(IDS, "jobs_done", "loads_done"),
    "cpu": ("cpu", _CPU),
}
_TOTALS = as_here(
    COUNT, "chunks_loaded", "chunks_stored", "stores_refused", "evicted", "flushed_jobs", "deferred_lookups"
)


def with_offload(depth: int) -> StepForm:
    """The form of an engine that offloads KV, with at most `depth` steps in flight, synchronous ones too."""
    none = {name: list[Any]() for name in _STEP if name != "t_launch"}
    others = ("loads_started", "sends_started", "sends_done", "remote")
    return with_connector(depth).plus(_STEP, _TOTALS, if_any={**none, "cpu": [0, 0, 0]}, without=others)


def with_launch(row: Any) -> Any:
    """A recorded step, where it has none with the time of its launch: that at which it is scheduled."""
    if isinstance(row, dict) and "t_scheduled" in row and "t_launch" not in row:
        return {**row, "t_launch": row["t_scheduled"]}
    return row


def offload_config(config: Any, meta: dict[str, Any]) -> Any:
    """`config` of an engine with the tier that `meta` states. BadRecording where it is none that is simulated."""
    if not isinstance(config, VllmConfig):
        raise BadRecording("meta.tier is not simulated for this policy, only for vllm. Name it with --policy.")
    if "kv_role" in meta:
        raise BadRecording("meta has kv_role and tier, KV that is passed on and offloaded, which is not simulated.")
    check_row({name: meta[name] for name in META if name in meta}, "meta", META)
    tier = check_row(meta["tier"], "meta.tier", _TIER, _TIER_MAYBE)
    policy = tier.get("eviction_policy", "lru")
    if policy not in ("lru", "arc"):
        raise BadRecording(f"meta.tier.eviction_policy is {shown(policy)}, not lru or arc. Record it again.")
    try:
        return VllmOffloadConfig.tier(config, **tier)
    except ValueError as error:
        raise BadRecording(f"meta.tier: {error}.") from None


def new_offload(meta: dict[str, Any]) -> NewOffload:
    """What makes the connector whose transfers take the times that `meta` states."""
    link = check_row(meta["link"], "meta.link", _LINK)
    fixed_ns = to_ns(link["fixed"])
    store_ns, load_ns = to_ns(link["store_per_chunk"]), to_ns(link["load_per_chunk"])
    return lambda: OffloadConnector(OffloadLink(fixed_ns, store_ns), OffloadLink(fixed_ns, load_ns))


class ObservedOffload:
    """Watches what `scheduler` offloads. `totals` are sums of the whole replay."""

    def __init__(self, scheduler: VllmOffload) -> None:
        self._scheduler = scheduler
        self.connector = scheduler.offloading
        self.totals = dict.fromkeys(_TOTALS, 0)

    @classmethod
    def of(cls, core: EngineCore) -> ObservedOffload | None:
        """Watches the engine `core`, None if it offloads nothing."""
        return cls(core.scheduler) if isinstance(core.scheduler, VllmOffload) else None

    def asked(self) -> dict[str, Any]:
        """Facts of the scheduler's latest call."""
        scheduler, connector, totals = self._scheduler, self.connector, self.totals
        flushed = [job.number for job in connector.flushed]
        totals["chunks_loaded"] += sum(job.num_chunks for job in connector.loads)
        totals["chunks_stored"] += sum(job.num_chunks for job in connector.stores)
        totals["stores_refused"] += sum(stored is None for _, _, stored, _ in scheduler.offers)
        totals["evicted"] += sum(evicted for _, _, _, evicted in scheduler.offers)
        totals["deferred_lookups"] += sum(beyond is None for _, _, beyond in scheduler.matched)
        totals["flushed_jobs"] += len(flushed)
        return {
            "matched": [[seq.request.id, hit, beyond] for seq, hit, beyond in scheduler.matched],
            "chunks_loading": [[job.seq.request.id, job.num_chunks, job.number] for job in connector.loads],
            "offers": [[seq.request.id, *numbers] for seq, *numbers in scheduler.offers],
            "stores_queued": [
                [job.seq.request.id, job.num_chunks, job.number]
                for job in connector.stores
                if job not in connector.flushed
            ],
            "flushed": flushed,
            "remote_in_order": [seq.request.id for seq in scheduler.pulled],
        }

    def launched(self, now_ns: int) -> dict[str, Any]:
        """Facts of the launch, at `now_ns`, of what the latest call asked for."""
        return {"scheduled_ns": self.connector.scheduled_ns, "launched_ns": now_ns}

    def processed(self) -> dict[str, Any]:
        """Facts of the step processed latest."""
        noticed, tier = self.connector.jobs_noticed, self._scheduler.tier
        transfers: list[list[Any]] = []
        for job in noticed.submitted:
            assert job.start_ns is not None and job.end_ns is not None
            way, times = "l" if job.is_load else "s", (job.start_ns / NS_PER_S, job.end_ns / NS_PER_S)
            transfers.append([job.number, way, job.seq.request.id, job.num_chunks, *times])
        return {
            "xfers": transfers,
            "jobs_done": [job.number for job in noticed.jobs],
            "cpu": [tier.num_used, tier.num_evictable, tier.num_storing],
        }
