"""The memory of the host that LMCache keeps KV in below a vLLM engine: how many chunks it holds, how fast they go."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.base.errors import ScenarioError
from batchsim.policies.systems.vllm.lmcache_config import VllmLmcacheConfig
from batchsim.policies.systems.vllm.vllm_lmcache import VllmLmcache
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.hicache_tier import Link
from batchsim.scenario.tier_config import TierConfig

CHUNK_TOKENS = 256
"""Tokens of a chunk unless stated; lmcache/v1/config.py of the 0.5.6 wheel."""


@dataclass(frozen=True)
class LmcacheTier:
    """The tier of one engine under `vllm` with LMCache: `num_chunks` of `chunk_tokens` tokens and `chunk_bytes` on all
    GPUs.

    `load_ns` and `store_ns` are what a chunk takes on the link of each GPU; `num_layers` are the model's, 0 where KV is
    copied whole.
    """

    config: TierConfig
    num_chunks: int
    chunk_tokens: int
    chunk_bytes: int
    load_ns: int
    store_ns: int
    num_layers: int
    link: Link

    @classmethod
    def of(cls, config: TierConfig, link: Link, on_gpu: int, of_all: int, page: int, layers: int) -> LmcacheTier:
        """The tier that `config` states, a token having `on_gpu` bytes on each GPU, `of_all` on the host, and a block
        of vLLM `page` tokens, of a model of `layers` layers. ScenarioError where it holds no chunk."""
        tokens = config.chunk_size or CHUNK_TOKENS
        if tokens % page:
            raise ScenarioError(f"chunk_size {tokens} is no multiple of the {page} tokens of a KV block. Make it one.")
        if config.size is None:
            raise ScenarioError("size is missing: LMCache's own is 5 GiB for each GPU. Write size: 64GB, say.")
        if (num_chunks := config.size // (of_all * tokens)) < 1:
            raise ScenarioError(
                f"size {config.size:,} B holds no chunk of {of_all * tokens:,} B ({tokens} tokens). State more, or"
                " leave out tiers."
            )
        return cls(
            config,
            num_chunks,
            tokens,
            of_all * tokens,
            *link.times_ns(on_gpu * tokens),
            layers * config.use_layerwise,
            link,
        )

    def __str__(self) -> str:
        return (
            f"LMCache {self.num_chunks * self.chunk_tokens:,} tokens ({self.num_chunks:,} chunks of"
            f" {self.chunk_tokens}: {(self.config.size or 0) / 1e9:.4g} GB over"
            f" {self.chunk_bytes / self.chunk_tokens:,.0f} B a token; {'layer by layer, ' * (self.num_layers > 0)}"
            f"{self.link.text})"
        )

    def connector(self) -> None:
        """None: the scheduler makes its links."""

    def policy(self, spec: PolicySpec) -> PolicySpec:
        """The policy `spec` of an engine with this tier. ScenarioError for knobs that do not go with one."""
        try:
            config = VllmLmcacheConfig.tier(
                spec.config,
                cpu_chunks=self.num_chunks,
                chunk_size=self.chunk_tokens,
                copy_ns=self.config.latency,
                load_ns=self.load_ns,
                store_ns=self.store_ns,
                num_layers=self.num_layers,
            )
        except (TypeError, ValueError) as error:
            raise ScenarioError(f"{spec.name}: {error}.".replace("..", ".")) from None
        return replace(spec, config=config, policy=VllmLmcache)
