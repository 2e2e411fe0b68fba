"""The memory of the host below an SGLang engine's radix cache: how many pages it holds, how fast they are copied."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.cost.base import Cost
from batchsim.kernel.host_copies import HostCopies
from batchsim.kernel.host_link import OffloadLink
from batchsim.kv import WritePolicy
from batchsim.kv.hicache import HiCacheKV
from batchsim.policies.systems.sglang.sglang_hicache import SglangWithHiCache
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.tier_config import TierConfig

RATIO = 2.0
"""Tokens of the host for each of the GPU, unless stated; hicache_hook.py of the 0.5.23 wheel."""


@dataclass(frozen=True)
class Link:
    """The bytes per second of each GPU's link to its host, for loads and for stores, and in words with their source."""

    load: float
    store: float
    text: str

    @classmethod
    def of(cls, config: TierConfig, cost: Cost) -> Link:
        """The link that `config` states, or the data sheet of the GPU. ScenarioError where neither does."""
        gpu = None if cost.deployment is None else cost.deployment.gpu
        load = config.bandwidth or (None if gpu is None else gpu.host_link)
        if load is None:
            raise ScenarioError("no GPU of the catalog says how fast its host is. Write bandwidth: 50GB/s, say.")
        store = config.store_bandwidth or load
        text = f"{load / 1e9:.4g} GB/s a GPU and way"
        if store != load:
            text = f"loads at {load / 1e9:.4g}, stores at {store / 1e9:.4g} GB/s a GPU"
        if config.bandwidth is None and gpu is not None:
            text += f", the most that the data sheet of {gpu.name} has"
        return cls(load, store, text)

    def times_ns(self, num_bytes: int) -> tuple[int, int]:
        """(ns of a load, of a store) of `num_bytes` a GPU."""
        return round(num_bytes * NS_PER_S / self.load), round(num_bytes * NS_PER_S / self.store)


@dataclass(frozen=True)
class HiCacheTier:
    """The tier of one engine under `sglang`: `num_pages` of `page_tokens` tokens, each of which takes `token_bytes` on
    every GPU, for which the host has a pool of its own.

    `load_ns` and `store_ns` are what a page takes on the link of each GPU; `num_layers` are the model's.
    """

    config: TierConfig
    num_pages: int
    page_tokens: int
    token_bytes: int
    load_ns: int
    store_ns: int
    num_layers: int
    link: Link

    @classmethod
    def of(
        cls,
        config: TierConfig,
        num_blocks: int,
        page: int,
        link: Link,
        token_bytes: int,
        num_gpus: int,
        num_layers: int,
    ) -> HiCacheTier:
        """The tier that `config` states for an engine with `num_blocks` pages on the GPU. ScenarioError where it holds
        no page.

        SGLang rounds down to whole pages and adds one (pool_host/base.py of the 0.5.23 wheel).
        """
        if config.size is not None and config.ratio is not None:
            raise ScenarioError("size and ratio both say how much fits. Write one of them.")
        if config.size is not None:
            tokens = config.size // num_gpus // token_bytes
            text = f"size {config.size:,} B holds no page of {token_bytes * page * num_gpus:,} B ({page} tokens)"
        else:
            ratio = RATIO if config.ratio is None else config.ratio
            tokens = int(num_blocks * page * ratio)
            text = f"ratio {ratio:g} of {num_blocks * page:,} tokens holds no page of {page} tokens"
        if tokens < page:
            raise ScenarioError(f"{text}. State more, or leave out tiers.")
        times = link.times_ns(token_bytes * page)
        return cls(config, tokens // page + 1, page, token_bytes, *times, num_layers, link)

    @property
    def write_policy(self) -> WritePolicy:
        """When pages are stored."""
        return self.config.write_policy or "write_through"

    def __str__(self) -> str:
        if self.config.size is None:
            how = f"{RATIO if self.config.ratio is None else self.config.ratio:g} times the GPU's"
        else:
            how = f"{self.config.size / 1e9:.4g} GB"
        return (
            f"HiCache {self.num_pages * self.page_tokens:,} tokens on the host ({self.num_pages:,} pages of"
            f" {self.page_tokens}: {how}, {self.token_bytes:,} B a token and GPU; {self.write_policy};"
            f" {self.link.text})"
        )

    def connector(self) -> HostCopies:
        """The copies of an engine that is about to be made."""
        fixed_ns = self.config.latency
        return HostCopies(OffloadLink(fixed_ns, self.store_ns), OffloadLink(fixed_ns, self.load_ns), self.num_layers)

    def policy(self, spec: PolicySpec) -> PolicySpec:
        """The policy `spec` of an engine with this tier."""
        return replace(spec, policy=SglangWithHiCache)

    def new_kv(self, num_blocks: int, block_size: int) -> HiCacheKV:
        """A block manager with all pages free."""
        return HiCacheKV(num_blocks, block_size, self.num_pages, self.write_policy)
