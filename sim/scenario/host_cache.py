"""The memory of the host below a TensorRT-LLM engine's KV blocks: how many fit there, how fast they are copied."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.base.errors import ScenarioError
from batchsim.kernel.host_link import OffloadLink
from batchsim.kv.reuse_host import HostReuseKV
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_host import TensorrtLlmWithHost
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.hicache_tier import Link
from batchsim.scenario.tier_config import TierConfig


@dataclass(frozen=True)
class HostCache:
    """The host cache of one engine under `tensorrt_llm`: `num_blocks` of `block_tokens` tokens, each of which takes
    `token_bytes` on every GPU, for which the host has a pool of its own.

    `load_ns` and `store_ns` are what a block takes on the link of each GPU.
    """

    config: TierConfig
    num_blocks: int
    block_tokens: int
    token_bytes: int
    load_ns: int
    store_ns: int
    link: Link

    @classmethod
    def of(cls, config: TierConfig, block: int, link: Link, token_bytes: int, num_gpus: int) -> HostCache:
        """The host cache that `config` states, in blocks of `block` tokens. ScenarioError where it holds none."""
        if config.size is None:
            raise ScenarioError("size is missing: TensorRT-LLM has no host cache by default. Write size: 64GB, say.")
        num_bytes = token_bytes * block
        if (num_blocks := config.size // num_gpus // num_bytes) < 1:
            raise ScenarioError(
                f"size {config.size:,} B holds no block of {num_bytes * num_gpus:,} B ({block} tokens). State more, or"
                " leave out tiers."
            )
        return cls(config, num_blocks, block, token_bytes, *link.times_ns(num_bytes), link)

    def __str__(self) -> str:
        return (
            f"host cache {self.num_blocks * self.block_tokens:,} tokens ({self.num_blocks:,} blocks of"
            f" {self.block_tokens}: {(self.config.size or 0) / 1e9:.4g} GB, {self.token_bytes:,} B a token and GPU;"
            f" {self.link.text})"
        )

    def connector(self) -> None:
        """None: the links come with the blocks."""

    def policy(self, spec: PolicySpec) -> PolicySpec:
        """The policy `spec` of an engine with this host cache."""
        return replace(spec, policy=TensorrtLlmWithHost)

    def new_kv(self, num_blocks: int, block_size: int) -> HostReuseKV:
        """A block manager with all blocks free, and links without a copy on them."""
        fixed_ns = self.config.latency
        links = OffloadLink(fixed_ns, self.load_ns), OffloadLink(fixed_ns, self.store_ns)
        return HostReuseKV(num_blocks, block_size, self.num_blocks, *links)
