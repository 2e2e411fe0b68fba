"""One engine's deployment of a model: how it is split over GPUs, and the KV memory that they have room for."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.kv_pools import WindowDemand
from batchsim.deployment.kv_room import KvWanted, derive
from batchsim.deployment.memory import STEP_REQUESTS, STEP_TOKENS, KvBudget
from batchsim.deployment.on_gpus import DraftMemory, ModelOnGpus, Stage, Types

__all__ = ["Deployment", "DraftMemory", "Stage", "Types"]


@dataclass(frozen=True, slots=True)
class Deployment(ModelOnGpus):
    """One engine's model, GPUs and data types. ScenarioError if the model cannot be split over that many GPUs.

    `gpu` None: not in the catalog, and neither its memory nor its speed is known. `engine` and `version`: the software,
    "" where none in particular is meant. `tp`: GPUs that share every layer. `pp`: stages of `tp` × `dp_attention`
    GPUs, each with its part of the layers, the last one with the output matrix too. `ep`: GPUs among which whole
    experts are divided, a divisor of `tp` × `dp_attention`; what remains of that product cuts every expert.
    `dp_attention`: groups of `tp` GPUs of which each runs the attention and the dense MLPs of its own sequences and
    keeps their KV, while all share the experts. `weight_dtype`, `moe_dtype` (of experts) and `kv_dtype` (of the KV
    cache): types by their names in `ELEMENT_BYTES`; "": the checkpoint's own, and for experts that of the other weights
    where these are stated.
    """

    def derive_kv(
        self,
        *,
        utilisation: float | None = None,
        block_size: int = 16,
        reserve_bytes: int | None = None,
        step_tokens: int = STEP_TOKENS,
        step_requests: int = STEP_REQUESTS,
        draft: DraftMemory | None = None,
        adapter_bytes: int = 0,
        room_bytes: int | None = None,
        prefix_cache: bool | None = None,
        draft_tokens: int = 0,
        apart: bool = False,
        windows: WindowDemand | None = None,
        windows_in_groups: bool = False,
    ) -> KvBudget:
        """The blocks of `block_size` tokens for which each GPU's memory has room beside weights and reserves.

        `utilisation` is the engine's share, by default its own: of all memory (vLLM, SGLang), or of what is free
        (TensorRT-LLM). `reserve_bytes` takes the place of the reserves that its rule derives for steps of `step_tokens`
        tokens of `step_requests` requests. Layers with a window keep it for `step_requests` requests, or as all layers
        where that is less; TensorRT-LLM keeps all. `draft`: what a drafter takes of the last stage; `adapter_bytes`:
        slots of LoRA adapters, of all stages together. `room_bytes`: what is left for KV on a GPU, in the place of all
        that. With attention groups the blocks are those of one group, as engines report them.

        A model with states has a layout of groups (`kv_groups`), whose blocks are counted without the null block:
        `prefix_cache`: whether prefixes are cached, by default as the version does; `draft_tokens`: of a request in a
        step. `windows_in_groups`: whether one whose layers differ in their windows alone has a layout too. `apart`:
        whether layers with a window have a pool of their own where SGLang divides its memory so, as large as `windows`
        ever need. ScenarioError, saying what is missing, if there is no room for one block.
        """
        wanted = KvWanted(utilisation, block_size, reserve_bytes, step_tokens, step_requests, draft, room_bytes)
        wanted = wanted._replace(adapter_bytes=adapter_bytes)
        wanted = wanted._replace(apart=apart, windows=windows, windows_in_groups=windows_in_groups)
        return derive(self, wanted._replace(prefix_cache=prefix_cache, draft_tokens=draft_tokens))
