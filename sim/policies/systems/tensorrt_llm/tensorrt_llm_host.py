"""TensorRT-LLM with a host cache (`kv_cache_config.host_cache_size`): a second pool of KV blocks in host memory.

Rule, beside that of `tensorrt_llm`; which block goes where is `kv/reuse_host.py`'s:

1. Neither stage knows what is on the host: a prompt is let in as if all its blocks were new, and finds them as it is.
2. The blocks of the prompts that start are handed out first, then those by which decodes grow: either may send what a
   free block held to the host.
3. All that goes and comes with a step is copied before it, each way at once, and the step waits for both.

Source: as for `tensorrt_llm`; cpp/tensorrt_llm/batch_manager/kvCacheTransferManager.cpp and refreshBlocks in
kvCacheManager.cpp, 2025.
Simplifies: copies to and from the host do not wait for each other; one that a step makes waits for all of these.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.host_link import StepCopies
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.kv.reuse_host import HostReuseKV
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm import TensorrtLlm
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig


class TensorrtLlmWithHost(TensorrtLlm):
    """The scheduler. Its links to the host come with the blocks."""

    evidence = "hand-derived"

    def __init__(self, config: TensorrtLlmConfig, context: PolicyContext) -> None:
        if not isinstance(context.kv, HostReuseKV):
            raise ScenarioError("tensorrt_llm: a host cache needs a HostReuseKV.")
        self._host = context.kv
        self._loaded: list[tuple[Sequence, int]] = []
        self._stored: list[tuple[Sequence, int]] = []
        self._num_loaded = self._num_stored = 0  # blocks that were copied before this call
        super().__init__(config, context)

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        if isinstance(work, Batch) and (self._loaded or self._stored):
            work.load = self._copies()
        return work

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        if not self._host.grows_in_place(self.group.blocks_due()) or not super().repeat(batch, now_ns):
            return False
        batch.load = None
        return True

    def _admit(self, seq: Sequence) -> int:
        host = self._host
        tokens, blocks = host.loaded_tokens, host.num_stored
        hit = super()._admit(seq)
        if host.loaded_tokens > tokens:
            self._loaded.append((seq, host.loaded_tokens - tokens))
        self._note_stored(seq, blocks)
        return min(hit, host.found_tokens)

    def _grow_group(self) -> bool:
        due, blocks = self.group.members_due(), self._host.num_stored
        fits = super()._grow_group()
        if fits and due:
            self._host.deal()
            self._note_stored(due[0], blocks)
        return fits

    def _note_stored(self, seq: Sequence, before: int) -> None:
        if self._host.num_stored > before:
            self._stored.append((seq, (self._host.num_stored - before) * self._host.block_size))

    def _copies(self) -> StepCopies:
        host = self._host
        loaded, stored = host.num_loaded - self._num_loaded, host.num_stored - self._num_stored
        copies = StepCopies(self._loaded, self._stored, loaded, stored, host.loading, host.storing)
        self._loaded, self._stored = [], []
        self._num_loaded, self._num_stored = host.num_loaded, host.num_stored
        return copies
