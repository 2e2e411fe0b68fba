"""Derives the KV memory of a deployment: from the bytes that its engine leaves to blocks, of one pool or of groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_pools import KvPools, WindowDemand
from batchsim.deployment.config_json import SIZED
from batchsim.deployment.kv_groups import Grouped, group_layers, has_layout, has_states, may_have_layout, states_of
from batchsim.deployment.memory import STEP_REQUESTS, STEP_TOKENS, KvBudget, Reserve
from batchsim.deployment.on_gpus import DraftMemory, ModelOnGpus, Stage
from batchsim.deployment.quantisation import ELEMENT_BYTES
from batchsim.deployment.sglang_pools import (
    BUFFERED,
    SglangPools,
    pools_with_states,
    pools_with_windows,
    slots_of,
    state_bytes,
    window_tokens,
)

_STATED = (
    "State it: kv: {memory: ..., per_token: ..., per_request: ...}, bytes of a GPU in all, of a token, of a request."
)


class KvWanted(NamedTuple):
    """What `Deployment.derive_kv` is asked."""

    utilisation: float | None = None
    block_size: int = 16
    reserve_bytes: int | None = None
    step_tokens: int = STEP_TOKENS
    step_requests: int = STEP_REQUESTS
    draft: DraftMemory | None = None
    room_bytes: int | None = None
    prefix_cache: bool | None = None
    draft_tokens: int = 0
    adapter_bytes: int = 0
    apart: bool = False
    windows: WindowDemand | None = None
    windows_in_groups: bool = False


def derive(engine: ModelOnGpus, wanted: KvWanted) -> KvBudget:
    """The KV blocks of `engine`: see `Deployment.derive_kv`."""
    check_derivable(engine, room_is_known=wanted.room_bytes is not None)
    asked = _Asked(engine, wanted, groups_of(engine, wanted))
    stage = min(engine.stages(), key=asked.blocks)
    num_blocks, terms = asked.blocks(stage), asked.terms(stage)
    if num_blocks >= 1 or wanted.room_bytes is not None:
        if asked.grouped is None:
            return KvBudget(int(num_blocks), wanted.block_size, terms, pools=asked.pools(stage))
        layout = replace(asked.grouped.layout, block_bytes=asked.block_bytes(stage))
        return KvBudget(max(int(num_blocks), 0), layout.unit, terms, layout)
    missing, model = (1 - num_blocks) * asked.block_bytes(stage), engine.model
    degrees = (tp for tp in (2, 4, 8) if tp > engine.tp)
    fitting = next((tp for tp in degrees if _fits(engine, wanted, tp)), None)
    advice = f"It fits with tp: {fitting}." if fitting else "Use a smaller model or a GPU with more memory."
    assert engine.gpu is not None, "its room was found"
    raise ScenarioError(
        f"{model.name} on {engine.gpu.name}: {missing / 1e9:.1f} GB short of one KV block: {terms}. {advice}"
    )


def check_derivable(engine: ModelOnGpus, *, room_is_known: bool = False) -> None:
    """ScenarioError, with the way out, where what the engine keeps of a request is not known, or, unless the room for
    it is, the bytes of its weights."""
    model = engine.model
    if model.model_type not in SIZED and not room_is_known:
        raise ScenarioError(
            f"{model.name}: model_type {model.model_type!r} is none whose weights and KV are known in full. Add kv:"
            " tokens, from the engine's start-up log."
        )
    if any(each.attention.kind == "compressed" for each in model.kinds):
        raise ScenarioError(
            f"{model.name}: what compressed attention keeps of a request is not derived: no start-up log was found that"
            f" says it. {_STATED}"
        )
    if has_states(model) and engine.engine not in ("", "vllm", "sglang"):
        raise ScenarioError(f"{model.name}: what {engine.engine} keeps of linear layers is not known. {_STATED}")
    if engine.engine == "sglang" and model.model_type == "qwen3_next":  # whose config.json does not say it
        raise ScenarioError(
            f"{model.name}: in which type sglang keeps the states of qwen3_next is not known. {_STATED}"
        )


def groups_of(engine: ModelOnGpus, wanted: KvWanted) -> Grouped | None:
    """The groups of layers of the engine's model; None where it is simulated as one pool of blocks."""
    model = engine.model
    grouped = has_layout(model) or (wanted.windows_in_groups and may_have_layout(model))
    if engine.engine not in ("", "vllm") or not grouped:
        return None
    states = states_of(engine.version, prefix_cache=wanted.prefix_cache, drafts=wanted.draft_tokens, gpu=engine.gpu)
    layers = 0 if wanted.draft is None else wanted.draft.layers
    element = ELEMENT_BYTES[engine.types.kv]
    return group_layers(model, engine.tp, element, states, block_size=wanted.block_size, draft_layers=layers)


@dataclass(frozen=True)
class _Asked:
    """What there is on a GPU of each stage. `grouped`: None where all layers share one block table."""

    engine: ModelOnGpus
    wanted: KvWanted
    grouped: Grouped | None

    def room(self, stage: Stage) -> int:
        """Bytes for KV on a GPU of the stage; negative where there are none."""
        engine, wanted = self.engine, self.wanted
        if wanted.room_bytes is not None:
            return wanted.room_bytes
        return engine.rule.room(self._memory_bytes, self._share, *self._parts(stage))

    def terms(self, stage: Stage) -> str:
        """The sum of `room` in words."""
        engine, wanted = self.engine, self.wanted
        if wanted.room_bytes is not None:
            return f"{wanted.room_bytes / 1e9:.1f} GB of each GPU"
        terms = engine.rule.terms(self._memory_bytes, self._share, *self._parts(stage))
        return terms + (f", on each of {engine.num_gpus} GPUs" if engine.num_gpus > 1 else "")

    def blocks(self, stage: Stage) -> float:
        """Blocks that can be given out for the room on a GPU of the stage; negative where bytes lack for the first."""
        room, wanted = self.room(stage), self.wanted
        if self.grouped is not None:
            return room / self.block_bytes(stage) - 1  # of the null block, which stands for blocks that are not there
        if self._is_apart and room >= 0:
            return self._apart(stage, room).full_tokens / wanted.block_size
        if has_states(self.engine.model):
            if room < 0:
                return room / self.block_bytes(stage)
            return self._pools(stage, room).full_tokens / wanted.block_size
        tokens = self.engine.tokens_in(stage, room, wanted.step_tokens, wanted.step_requests, wanted.draft)
        return tokens / wanted.block_size

    def pools(self, stage: Stage) -> KvPools | None:
        """The pools beside that of the layers that keep all tokens; None where there is none."""
        if not self._is_apart:
            return None
        model, apart = self.engine.model, self._apart(stage, self.room(stage))
        if apart.states is not None:
            buffered = model.model_type in BUFFERED and self.wanted.prefix_cache is not False
            return KvPools(states=apart.states, extra_buffer=buffered)
        return KvPools(max(each.attention.window or 0 for each in model.kinds), apart.window_tokens)

    @property
    def _is_apart(self) -> bool:
        """Whether layers with a window, or with states, have a pool of their own."""
        engine = self.engine
        if engine.engine != "sglang" or not self.wanted.apart:
            return False
        windowed = [bool(stage.windowed_bytes) for stage in engine.stages()]
        if has_states(engine.model):
            return not any(windowed)
        return all(windowed) and all(stage.full_bytes for stage in engine.stages())

    def _apart(self, stage: Stage, room: int) -> SglangPools:
        """SGLang's pools in `room` bytes of a GPU of the stage."""
        engine, wanted = self.engine, self.wanted
        demand, cap = wanted.windows, None
        draft = wanted.draft.token_bytes if stage.is_last and wanted.draft is not None else 0
        if has_states(engine.model):
            slots = slots_of(engine.model, radix_cache=wanted.prefix_cache is not False)
            state = state_bytes(stage.layers, engine.tp, engine.model.dtype_bytes)
            token_bytes, asked = stage.full_bytes + stage.windowed_bytes + draft, demand and demand.requests
            return pools_with_states(room, token_bytes, state, slots, drafts=wanted.draft_tokens, asked=asked)
        if demand is not None and demand.prompt_tokens:
            window = max(each.attention.window or 0 for each in engine.model.kinds)
            cap = window_tokens(demand.requests, window - 1, chunks=demand.prompt_tokens, page=wanted.block_size)
        return pools_with_windows(room, stage.full_bytes + draft, stage.windowed_bytes, window_cap=cap)

    def block_bytes(self, stage: Stage) -> int:
        """Bytes of a block on a GPU of the stage; with one pool while all its tokens are in all windows."""
        if self.grouped is None:
            return int((stage.full_bytes + stage.windowed_bytes) * self.wanted.block_size)
        stages = self.engine.stages()
        own = stages.index(stage)
        layers = [sum(each.count for each in one.layers) for one in stages]
        draft = self.wanted.draft.layers if stage.is_last and self.wanted.draft is not None else 0
        return self.grouped.block_bytes(sum(layers[:own]), sum(layers[: own + 1]) + draft)

    @property
    def _memory_bytes(self) -> int:
        assert self.engine.gpu is not None, "whoever asks knows the GPU"
        return self.engine.rule.memory_bytes(self.engine.gpu, self.engine.version)

    @property
    def _share(self) -> float:
        engine, stated = self.engine, self.wanted.utilisation
        return (
            engine.rule.default_share(engine.version, self._memory_bytes, engine.num_gpus) if stated is None else stated
        )

    def _parts(self, stage: Stage) -> tuple[int, Reserve]:
        """Bytes of weights on a GPU of the stage, and what is kept there besides."""
        engine, wanted = self.engine, self.wanted
        weight_bytes = engine.rule.loaded_bytes(stage.weight_bytes, engine.model, engine.version)
        reserve = engine.reserve(stage, wanted.step_tokens, wanted.step_requests)
        if wanted.reserve_bytes is not None:
            reserve = Reserve.stated(wanted.reserve_bytes)
        if wanted.adapter_bytes:
            slots = -(-wanted.adapter_bytes // engine.pp)
            reserve = reserve._replace(after=(*reserve.after, ("LoRA adapters", slots)))
        if wanted.draft is None or not stage.is_last:
            return weight_bytes, reserve
        return weight_bytes, reserve._replace(after=(*reserve.after, ("drafter", wanted.draft.weight_bytes)))

    def _pools(self, stage: Stage, room: int) -> SglangPools:
        """SGLang's pools; ScenarioError where fewer requests can run at once than a step may have."""
        engine, pools = self.engine, self._apart(stage, room)
        if (most := pools.max_running_requests) is not None and most < self.wanted.step_requests:
            raise ScenarioError(
                f"{engine.model.name}: SGLang has {pools.states:,} states of linear layers, {pools.slots} for each"
                f" running request, and the scenario allows {self.wanted.step_requests:,} at once. Write"
                f" max_running_requests: {most}."
            )
        return pools


def _fits(engine: ModelOnGpus, wanted: KvWanted, tp: int) -> bool:
    """Whether on `tp` GPUs there is room for one KV block beside weights and reserve."""
    try:
        derive(replace(engine, tp=tp), wanted._replace(draft=None))
    except ScenarioError:
        return False
    return True
