"""SGLang 0.5.23 for requests with images, videos or audios: `sglang` with a cache of embeddings.

Rule: as `sglang` (`batchsim.policies.systems.sglang.sglang`), where items count by their placeholder tokens alone; what
a prefill batch encodes is `embedding_cache`'s rule.
Simplifies: drafts beside items are refused.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.kernel.batch import Batch
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Sequence
from batchsim.policies.systems.sglang.embedding_cache import EmbeddingCache
from batchsim.policies.systems.sglang.prefill_adder import Prefill
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig

_MB, _DEFAULT_MB = 1024 * 1024, 100


class SglangWithItems(Sglang):
    """The scheduler of an engine whose requests may have items."""

    evidence = "hand-derived"

    def __init__(self, config: SglangConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        assert context.items is not None, "it is made for requests with items alone"
        if config.speculative_algorithm is not None:
            raise ScenarioError(
                f"sglang: speculative_algorithm {config.speculative_algorithm} beside images, audios or videos is not"
                " simulated. Drop one of the two."
            )
        self._embeddings = EmbeddingCache(
            (_DEFAULT_MB if config.vlm_cache_size_mb is None else config.vlm_cache_size_mb) * _MB,
            context.items.embedding_bytes,
        )

    def _work(self, made: Prefill, preempted: list[Sequence]) -> Batch:
        work = super()._work(made, preempted)
        if made.chunks:
            work.encoded = self._embeddings.encode(made.chunks)
        return work
