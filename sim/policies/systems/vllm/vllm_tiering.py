"""vLLM with KV offloaded to the memory of the host, and from there to a disk: its TieringOffloadingSpec.

Rule, beside that of `vllm_offload`:

1. Each store in the host, once the scheduler has noticed its end, is copied on to the disk.
2. A waiting request whose next chunks the host lacks is passed over (`kv_disk`): one call until it is known whether the
   disk has them, then until they are in the host, from where they are loaded like others.
3. While a copy is under way, or the disk is asked, the scheduler goes on being called.

Source: vllm/v1/kv_offload/tiering/manager.py and distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py of the
0.32.0 wheel.
Simplifies: as `disk_tier` and `disk_copies` say.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.disk_copies import DiskJob, TieringConnector
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.kv.disk_tier import MOST_FETCHES, DiskTier
from batchsim.kv.offload_chains import Part, num_chunks
from batchsim.policies.systems.vllm.offload_config import VllmOffloadConfig
from batchsim.policies.systems.vllm.vllm_offload import BEING_STORED, VllmOffload

FROM_DISK = "kv_disk"
"""Why a request is passed over whose chunks the disk is asked for, or is to bring."""


class VllmTiering(VllmOffload):
    """The scheduler."""

    def __init__(self, config: VllmOffloadConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        if not isinstance(context.connector, TieringConnector):
            raise ScenarioError("vllm: KV goes to a disk by a TieringConnector.")
        if config.store_threshold > 1:
            raise ScenarioError(
                f"vllm: store_threshold {config.store_threshold} is not simulated with a disk. Set it to 0."
            )
        self.disks = context.connector
        self.disk_tier = DiskTier(config.cpu_chunks, config.eviction_policy, config.blocks_per_chunk)
        self.tier = self.disk_tier
        self._copying: dict[DiskJob, list[Part]] = {}
        self._leaving: dict[Sequence, None] = {}  # ended, while their stores are under way
        self._now_ns = 0

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        tier, disks = self.disk_tier, self.disks
        self._now_ns = now_ns
        tier.new_call([(self._copying.pop(job), job.is_load) for job in disks.disk_over(now_ns)])
        ended = [seq for seq, _, _ in self._over]
        work = super().schedule(now_ns, drain)
        tier.call_over()
        if isinstance(work, Batch) and (work.chunks or work.num_decode):
            tier.fetched = {}
        for seq, parts in tier.to_read.items():
            assert isinstance(seq, Sequence)
            if parts:
                self._check_ends(seq)
                self._copy(seq, parts, num_chunks(parts), now_ns, is_load=True)
        tier.to_read = {}
        self._forget_ended(ended)
        disks.has_news = tier.is_asking or tier.has_unnoticed
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        tier = self.disk_tier
        # What waits is looked up at each call, and asks the disk for more as others take what it has on the GPU.
        if self.waiting or tier.is_asking or tier.has_unnoticed:
            return False
        if not super().repeat(batch, now_ns):
            return False
        tier.passed()
        return True

    def is_steady(self, batch: Batch) -> bool:
        return not self.waiting and super().is_steady(batch)

    def leapt(self, batches: list[Batch]) -> None:
        super().leapt(batches)
        self.disk_tier.passed()

    def complete(self, batch: Batch, finished: list[Sequence], now_ns: int) -> list[Sequence]:
        self._now_ns = now_ns
        return super().complete(batch, finished, now_ns)

    def notice(self) -> None:
        super().notice()
        tier = self.disk_tier
        stores = [job for job in self.offloading.jobs_noticed.jobs if not job.is_load]
        assert len(stores) == len(tier.to_write), "each store is copied on once"
        for job, parts in zip(stores, tier.to_write, strict=True):
            new = sum([key not in tier.on_disk for key in tier.keys_of(parts)])
            assert job.end_ns is not None, "it is over"
            self._copy(job.seq, parts, new, max(self._now_ns, job.end_ns), is_load=False)
        tier.to_write = []
        self._forget_ended([])

    def _copy(self, seq: Sequence, parts: list[Part], count: int, now_ns: int, *, is_load: bool) -> None:
        job = self.disks.copy(seq.request.id, count, count * self._chunk_tokens, now_ns, is_load=is_load)
        self._copying[job] = parts

    def _check_ends(self, seq: Sequence) -> None:
        """ScenarioError if chunks of `seq` keep on pushing each other out of the host, which in vLLM has no end."""
        tier, chunks = self.disk_tier, seq.num_tokens // self._chunk_tokens
        if tier.fetched.get(seq, 0) > MOST_FETCHES * chunks:
            raise ScenarioError(
                f"request {seq.request.id}: its {chunks:,} chunks of KV were fetched {tier.fetched[seq]:,} times from"
                f" the disk while no step ran, and push each other, or others', out of the {tier.num_places:,} of the"
                " host without end, as vLLM's do. Give the host a larger size, or leave out the disk."
            )

    def _forget_ended(self, ended: list[Sequence]) -> None:
        """Takes note that `ended` requests ask the disk for no more, once their stores are noticed."""
        self._leaving |= dict.fromkeys(ended)
        for seq in [seq for seq in self._leaving if seq not in self._stores]:
            self.disk_tier.forget(seq)
            del self._leaving[seq]

    def _why_later(self) -> str:
        return FROM_DISK if self.disk_tier.awaits_disk else BEING_STORED
