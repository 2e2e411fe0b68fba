"""The engines of a scenario that keep KV in the memory of their host: how much fits, how fast it is copied, and what
does not go with it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from math import ceil

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import KvPools
from batchsim.cost.base import Cost
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.memory import KvBudget
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.quantisation import ELEMENT_BYTES
from batchsim.kernel.host_copies import HostCopies
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.offload import OffloadConnector
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.policies.systems.vllm.offload_config import VllmOffloadConfig
from batchsim.policies.systems.vllm.vllm_offload import VllmOffload
from batchsim.policies.systems.vllm.vllm_tiering import VllmTiering
from batchsim.scenario.config import PolicySpec, Scenario, ScenarioFile
from batchsim.scenario.disk_below import DiskBelow
from batchsim.scenario.hicache_tier import HiCacheTier, Link
from batchsim.scenario.host_cache import HostCache
from batchsim.scenario.lmcache_tier import LmcacheTier
from batchsim.scenario.request_kinds import features
from batchsim.scenario.tier_config import TierConfig
from batchsim.workload.structured import is_structured

_CACHES = {
    "vllm": ("blocks", "enable_prefix_caching: true", "speculative_config"),
    "sglang": ("radix", "disable_radix_cache: false", "speculative_algorithm"),
    "tensorrt_llm": ("reuse", "enable_block_reuse: true", "speculative_config"),
}
"""By kind of policy: its prefix cache, how that is switched on, and the knob of drafts."""
TIERED_KINDS = tuple(_CACHES)
"""Kinds of policies that may keep KV in tiers."""
_LMCACHE = ("chunk_size", "use_layerwise")
_KNOBS = ("blocks_per_chunk", "eviction_policy", "store_threshold", "max_tracker_size", "offload_prompt_only")


@dataclass(frozen=True)
class HostTier:
    """The tier of one engine under `vllm`: `num_chunks` of `chunk_tokens` tokens and `chunk_bytes` on all GPUs.

    `load_ns` and `store_ns` are what a chunk takes on the link of each GPU, `bandwidth_text` says how fast that is and
    by what source. `disk`: what is below it.
    """

    config: TierConfig
    num_chunks: int
    chunk_tokens: int
    chunk_bytes: int
    load_ns: int
    store_ns: int
    bandwidth_text: str
    disk: DiskBelow | None = None

    def __str__(self) -> str:
        tokens, chunk = self.num_chunks * self.chunk_tokens, f"chunks of {self.chunk_tokens}"
        prompts = "prompts only" if self.config.offload_prompt_only else "prompts and answers"
        return (
            f"host tier {tokens:,} tokens ({self.num_chunks:,} {chunk}: {(self.config.size or 0) / 1e9:.4g} GB over"
            f" {self.chunk_bytes / self.chunk_tokens:,.0f} B a token; {self.config.eviction_policy}, {prompts};"
            f" {self.bandwidth_text}){'' if self.disk is None else self.disk}"
        )

    def connector(self) -> OffloadConnector:
        """A connector for an engine that is about to be made."""
        fixed_ns, disk = self.config.latency, self.disk
        storing, loading = OffloadLink(fixed_ns, self.store_ns), OffloadLink(fixed_ns, self.load_ns)
        return OffloadConnector(storing, loading) if disk is None else disk.connector(storing, loading)

    def policy(self, spec: PolicySpec) -> PolicySpec:
        """The policy `spec` of an engine with this tier. ScenarioError for knobs that do not go with one."""
        knobs = {name: getattr(self.config, name) for name in _KNOBS}
        try:
            config = VllmOffloadConfig.tier(spec.config, cpu_chunks=self.num_chunks, **knobs)
        except (TypeError, ValueError) as error:
            raise ScenarioError(f"{spec.name}: {error}.".replace("..", ".")) from None
        return replace(spec, config=config, policy=VllmOffload if self.disk is None else VllmTiering)


@dataclass(frozen=True)
class EngineTiers:
    """The tier of each engine of a scenario, as policies of each kind keep it; None where the scenario has none of that
    kind. A token has `token_bytes` there."""

    token_bytes: int
    vllm: HostTier | LmcacheTier | None = None
    sglang: HiCacheTier | None = None
    tensorrt_llm: HostCache | None = None

    def __str__(self) -> str:
        return " · ".join(str(each) for each in (self.vllm, self.sglang, self.tensorrt_llm) if each is not None)


def kv_under(
    tiers: EngineTiers | None,
    config: PolicyConfig,
    num_blocks: int,
    block_size: int,
    num_swap_blocks: int,
    pools: KvPools | None = None,
) -> KVBlockManager:
    """A block manager with all KV blocks free, of the kind that a policy's `config` asks for in an engine with
    `tiers`, or with `pools` beside that of layers which keep all tokens."""
    if tiers is not None and tiers.sglang is not None and isinstance(config, SglangConfig):
        return tiers.sglang.new_kv(num_blocks, block_size)
    if tiers is not None and tiers.tensorrt_llm is not None and isinstance(config, TensorrtLlmConfig):
        return tiers.tensorrt_llm.new_kv(num_blocks, block_size)
    return new_kv(config, num_blocks, block_size, num_swap_blocks, ids=tiers is not None, pools=pools)


def under_tier(tiers: EngineTiers | None, spec: PolicySpec) -> tuple[PolicySpec, OffloadConnector | HostCopies | None]:
    """The policy `spec` as an engine with `tiers` runs it, and a new connector to that, where copies need one; without
    tiers `spec`, and None."""
    if tiers is None:
        return spec, None
    tier = {"sglang": tiers.sglang, "tensorrt_llm": tiers.tensorrt_llm}.get(spec.kind, tiers.vllm)
    assert tier is not None, "the tier is made for all policies of the scenario"
    return tier.policy(spec), tier.connector()


def check_no_tiers(scenario: Scenario, what: str) -> None:
    """ScenarioError, saying in `what` that this does not go, if any engine of `scenario` keeps KV in tiers."""
    groups = {} if scenario.file.replicas is None else scenario.file.replicas.groups or {}
    if scenario.file.kv.tiers or any(group.kv is not None and group.kv.tiers for group in groups.values()):
        raise ScenarioError(f"{scenario.places.get('kv', scenario.source)}: kv.tiers {what}. Remove them.")


def tier_of(scenario: Scenario, model: ModelSpec, cost: Cost, kv: KvBudget) -> EngineTiers | None:
    """The tier of each engine of `scenario`, whose KV on the GPU is `kv`; None without one. ScenarioError for what does
    not go with it, and for a size or bandwidth that is none."""
    if not scenario.file.kv.tiers:
        return None
    config, *below = scenario.file.kv.tiers
    try:
        _check_file(scenario.file, cost, kv)
        kinds = {spec.kind for spec in scenario.specs}
        for spec in scenario.specs:
            _check_policy(spec, scenario.file)
        _check_keys(config, kinds)
        if below and (kinds != {"vllm"} or config.connector != "offloading"):
            raise ScenarioError(
                "a disk is simulated below the host of vLLM's own connector alone, not under LMCache, sglang or"
                " tensorrt_llm. Leave out {kind: disk}, or the others."
            )
        link = Link.of(config, cost)
        on_gpu, of_all = _token_bytes(scenario.file, model, cost.deployment)
        num_gpus = 1 if cost.deployment is None else cost.deployment.tp
        # Under the others each GPU has a pool of its own on the host.
        layers = sum(each.count for each in model.kinds)
        tiers = EngineTiers(of_all if "vllm" in kinds else on_gpu * num_gpus)
        if "vllm" in kinds:
            if config.connector == "lmcache":
                vllm = LmcacheTier.of(config, link, on_gpu, of_all, kv.block_size, layers)
            else:
                vllm = _offloading(config, scenario.file, link, on_gpu, of_all)
                if below:
                    vllm = replace(vllm, disk=DiskBelow.of(below[0], config, vllm.chunk_bytes))
            tiers = replace(tiers, vllm=vllm)
        if "sglang" in kinds:
            sglang = HiCacheTier.of(config, kv.num_blocks, kv.block_size, link, on_gpu, num_gpus, layers)
            tiers = replace(tiers, sglang=sglang)
        if "tensorrt_llm" in kinds:
            tiers = replace(tiers, tensorrt_llm=HostCache.of(config, kv.block_size, link, on_gpu, num_gpus))
        return tiers
    except ScenarioError as error:
        raise ScenarioError(f"kv.tiers: {error}") from None


def _check_file(file: ScenarioFile, cost: Cost, kv: KvBudget) -> None:
    """ScenarioError for what a scenario asks for beside a tier that is not simulated there."""
    deployment = cost.deployment
    with_others = {
        "prefill and decode apart": (file.replicas is not None and file.replicas.transfer is not None, "pools"),
        "a pipeline": (cost.stages > 1, "pp"),
        "attention groups": (deployment is not None and deployment.dp_attention > 1, "dp_attention"),
        "KV in groups of layers": (kv.layout is not None, "that model"),
        "pools of windows or states": (kv.pools is not None, "that model"),
    }
    keys = {"compiled shapes": "shapes", "LoRA adapters": "loras", "images, audios and videos": "items"}
    keys |= {"models that make no tokens": "that workload", "rollouts": "that workload", "offline jobs": "offline"}
    with_others |= {name: (asked, keys[name]) for name, asked in features(file, *keys).items()}
    for what, (asked, key) in with_others.items():
        if asked:
            raise ScenarioError(f"not simulated beside {what}. Leave out {key}, or tiers.")
    engine = getattr(file.cost, "engine", "")
    if engine not in ("", *_CACHES):
        raise ScenarioError(
            f"engine {engine}: only vLLM's OffloadingConnector, LMCache, SGLang's HiCache and TensorRT-LLM's host cache"
            " are simulated. Write engine: vllm, sglang or tensorrt_llm."
        )


def _check_policy(spec: PolicySpec, file: ScenarioFile) -> None:
    """ScenarioError for a policy that keeps no KV beyond the GPU here."""
    if spec.kind not in _CACHES:
        raise ScenarioError(
            f"{spec.name} is of kind {spec.kind}, and only vllm, sglang and tensorrt_llm offload KV here. Leave it out."
        )
    config, (cache, to_cache, drafts) = spec.config, _CACHES[spec.kind]
    if config.traits.prefix_cache != cache:
        raise ScenarioError(f"{spec.name} caches no prefixes, and these are what tiers keep. Set {to_cache}.")
    if config.traits.speculation is not None:
        raise ScenarioError(f"{spec.name} drafts tokens, not simulated with a tier. Leave out {drafts}.")
    if spec.kind == "sglang":
        if is_structured(file.workload):
            raise ScenarioError(
                f"{spec.name} with constrained answers: not simulated beside HiCache. Leave out structured, or tiers."
            )
        return
    if spec.kind != "vllm":
        return
    if config.is_older:
        raise ScenarioError(f"{spec.name} has version {config.version}, not simulated with a tier. Drop it.")
    if config.prefill_schedule_interval != 1:
        raise ScenarioError(
            f"{spec.name} has prefill_schedule_interval {config.prefill_schedule_interval}, not simulated with a tier."
            " Set it to 1."
        )


def _check_keys(config: TierConfig, kinds: Collection[str]) -> None:
    """ScenarioError for keys that are another engine's than those of `kinds`."""
    defaults = TierConfig()
    stated = {f.name for f in fields(config) if getattr(config, f.name) != getattr(defaults, f.name)}
    hicache, lmcache = ("ratio", "write_policy"), ("connector", *_LMCACHE)
    unread = {
        "vllm": hicache,
        "sglang": (*_KNOBS, *lmcache),
        "tensorrt_llm": (*_KNOBS, *hicache, *lmcache),
    }
    for kind, names in unread.items():
        for name in names:
            if kind in kinds and name in stated:
                raise ScenarioError(f"{name} is not read under {kind}. Leave it out, or {kind}.")
    for name in _KNOBS if config.connector == "lmcache" else _LMCACHE:
        if name in stated:
            raise ScenarioError(f"{name} is not read with connector {config.connector}. Leave it out.")


def _offloading(config: TierConfig, file: ScenarioFile, link: Link, on_gpu: int, of_all: int) -> HostTier:
    """The tier that `config` states under `vllm`. ScenarioError where it holds no chunk."""
    tokens = file.kv.block_size * config.blocks_per_chunk
    chunk_bytes = of_all * tokens
    if config.size is None:
        raise ScenarioError("size is missing, for which vLLM has no default. Write size: 64GB, say.")
    if (num_chunks := config.size // chunk_bytes) < 1:
        raise ScenarioError(
            f"size {config.size:,} B holds no chunk of {chunk_bytes:,} B ({tokens} tokens), and vLLM does not start"
            " then. State more, or leave out tiers."
        )
    load_ns, store_ns = link.times_ns(on_gpu * tokens)
    return HostTier(config, num_chunks, tokens, chunk_bytes, load_ns, store_ns, link.text)


def _token_bytes(file: ScenarioFile, model: ModelSpec, deployment: Deployment | None) -> tuple[int, int]:
    """Bytes of a token's KV on each GPU, and in the host's memory for all of them: latent attention, of which each GPU
    has the same, once; fewer KV heads than GPUs as often as they are replicated."""
    tp = 1 if deployment is None else deployment.tp
    if file.kv.per_token is not None:
        is_same = all(each.attention.kind == "latent" for each in model.kinds)
        return file.kv.per_token, file.kv.per_token * (1 if is_same else tp)
    if deployment is None:
        return model.kv_bytes_per_token, model.kv_bytes_per_token
    own = replace(deployment, model=model)
    element = ELEMENT_BYTES[own.types.kv]
    of_all = sum(
        each.count * each.attention.kv_bytes(tp, element) * (1 if each.attention.kind == "latent" else tp)
        for each in model.kinds
    )
    return own.kv_bytes_per_token, ceil(of_all)
