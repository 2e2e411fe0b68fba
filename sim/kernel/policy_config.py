"""The base class of policies' configs: frozen dataclasses of knobs, and the traits that engines and reports read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchsim.base.kv_pools import WindowDemand
from batchsim.base.ranges import Config
from batchsim.kernel.engine_loop import SYNC, EngineLoop

DraftMethod = Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"]
"""The drafter: a search of the text, a head on the model's own hidden states, or a smaller model."""


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """A drafter that needs no model: where a sequence's last tokens, at least `shortest` and at most `longest` of them,
    stand in it before, it proposes the up to `num_drafts` tokens that followed there."""

    num_drafts: int
    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter (`method`) and how many of its draft tokens are accepted.

    Assumptions of a simulation: `num_drafts`, the most of a sequence in a step; `positions`, by request class, "" for
    all others, the shares of steps in which the first, second, ... draft is accepted, empty where each request has a
    probability of its own from a trace; `found`, the share of steps for which there are drafts. `branches`: tokens of
    each sequence in each of the drafter's passes but the first. `lookup` is the drafter that a real model can be run
    with; None: another one, which is not there.
    """

    method: DraftMethod
    num_drafts: int
    positions: Mapping[str, tuple[float, ...]]
    found: float = 1.0
    branches: int = 1
    lookup: PromptLookup | None = None


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """Where an engine keeps LoRA adapters: `slots` of GPU memory, and as many as `in_host` in host memory; None: all.

    `max_rank`: the largest that it takes; None: any, and slots are of that of the workload. `most`: how many adapters
    it takes at all; None: any number. `eviction`: of adapters on the GPU the one used longest ago goes, or the one that
    has been there longest. `pooled`: the base model has a slot too, which is given up last, and no step takes one that
    it needs itself. `overlaps`: adapters are copied beside steps, by the scheduler's word.
    """

    slots: int
    in_host: int | None = None
    max_rank: int | None = None
    most: int | None = None
    eviction: Literal["lru", "fifo"] = "lru"
    pooled: bool = False
    overlaps: bool = False


@dataclass(frozen=True, slots=True)
class Traits:
    """What drivers, KV memory and reports ask of any policy; the defaults hold for a policy that does not say.

    `max_num_seqs`: the most sequences that run at once, by which slot occupancy is measured; None: no such limit.
    `max_num_batched_tokens`: the most tokens of a step; None: no such limit.
    `waits_for`: requests without which no batch ever starts; None: a batch starts with fewer, at once or after a time.
    `prefix_cache`: the kind of KV manager that finds prompts' prefixes again (`batchsim.kv.choice.new_kv`); "": none
    does. `needs_predictor`: the policy asks a predictor for output lengths. `needs_swap_space`: it moves KV to host
    memory. `knobs`: names of its numbers that `batchsim capacity` doubles and halves, one at a time, in this order.
    `splits_steps`: a step may take several passes through the model (`Batch.num_passes`).
    `loop`: how the engine's host and one GPU wait for each other; its depth grows by the stages beyond the first of a
    pipeline where the policy `pipelines`, that is, can have a batch in each. `speculation`: of its drafts; None: it has
    none. `adapters`: of LoRA adapters; None: it serves none. `takes_items`: its requests may have images, audios and
    videos. `pooling`: its model is one of embeddings, reranking or classification, which ends each request with its
    prompt. `kv_groups`: it can run on a model whose layers keep KV in several groups; `kv_pools`: on one where layers
    with a window have a pool of their own, `windows` being what bounds that. `masks`: answers may be
    constrained by grammars, whose masks the host fills for the sequences of a step that get a token (`sampled`), or for
    all of them, those with a part of their prompt too; "": they may not.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    waits_for: int | None = None
    prefix_cache: Literal["", "blocks", "radix", "reuse"] = ""
    needs_predictor: bool = False
    needs_swap_space: bool = False
    knobs: tuple[str, ...] = ()
    splits_steps: bool = False
    loop: EngineLoop = SYNC
    pipelines: bool = False
    speculation: Speculation | None = None
    adapters: AdapterMemory | None = None
    takes_items: bool = False
    pooling: bool = False
    kv_groups: bool = False
    kv_pools: bool = False
    windows: WindowDemand | None = None
    masks: Literal["", "sampled", "all"] = ""


@dataclass(frozen=True, slots=True)
class Device:
    """What the defaults of an engine's knobs may depend on: the GPU by its name and memory, the longest sequence, and
    of a deployment its engine and the version asked for; "" without."""

    name: str
    memory_bytes: int
    max_model_len: int
    engine: str = ""
    version: str = ""


class PolicyConfig(Config):
    """The knobs of a policy: each policy has its own frozen dataclass, which derives from this class.

    What does not fit is refused as by any `Config`; a `__post_init__` of a derived class calls that of `Config` first.
    """

    @property
    def traits(self) -> Traits:
        """What others ask of the policy under these knobs."""
        return Traits()

    @classmethod
    def stated_defaults(cls, stated: Mapping[str, Any]) -> dict[str, Any]:
        """The knobs whose default depends on the `stated` ones (raw, not validated yet), without these."""
        return {}

    @classmethod
    def device_defaults(cls, device: Device, stated: Mapping[str, Any]) -> dict[str, Any]:
        """The knobs whose default depends on `device`, without the `stated` ones (raw, not validated yet). Where no
        device is known the dataclass's own defaults hold."""
        return {}
