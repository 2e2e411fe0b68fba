"""A model on GPUs as one engine runs it: what every GPU holds of its weights and of a token's KV, and the room left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from typing import NamedTuple

from batchsim.base.errors import ScenarioError
from batchsim.deployment.layers import Attention, DenseMlp, Experts, Layers, Mlp, Split, Weights
from batchsim.deployment.memory import ENGINES, EngineRule, Reserve
from batchsim.deployment.model import DTYPE_BYTES, GpuSpec, ModelSpec
from batchsim.deployment.quantisation import ELEMENT_BYTES
from batchsim.deployment.vllm_memory import Start


class Types(NamedTuple):
    """The types, by their names in `ELEMENT_BYTES`, of matrices of attention, of MLPs through which all tokens go and
    of routed experts, of the KV cache, of all `plain` weights, which no quantisation touches, of matrices of linear
    attention, and of the output matrix."""

    attention: str
    mlp: str
    experts: str
    kv: str
    plain: str
    linear: str
    head: str


class Stage(NamedTuple):
    """What each GPU of one stage holds: `weight_bytes`, bytes of a token's KV in layers that keep it to its request's
    end, in those whose window leaves it, and bytes of one request's windows, at most; and its `layers`, of which a
    pipeline's first stage has the first, and so on."""

    weight_bytes: int
    full_bytes: float
    windowed_bytes: float
    window_bytes: float
    layers: tuple[Layers, ...]
    is_first: bool
    is_last: bool


class DraftMemory(NamedTuple):
    """What a drafter takes on each GPU: bytes of weights, and of a token's KV in its layers, and how many these are."""

    weight_bytes: int
    token_bytes: float
    layers: int = 1


@dataclass(frozen=True, slots=True)
class ModelOnGpus:
    """A model split over GPUs, in the types of one engine; the fields are explained in `Deployment`."""

    model: ModelSpec
    gpu: GpuSpec | None = None
    engine: str = ""
    version: str = ""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_attention: int = 1
    weight_dtype: str = ""
    moe_dtype: str = ""
    kv_dtype: str = ""

    def __post_init__(self) -> None:
        model, tp = self.model, self.tp
        parts = [part for each in model.kinds for part in (each.attention, each.mlp)]
        if tp < 1 or any(part.cannot_cut(tp) for part in parts):
            heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
            shape = dict.fromkeys([f"{heads} heads", f"{kv_heads} KV heads", *self._widths(parts)])
            raise ScenarioError(
                f"tp: {model.name} ({', '.join(shape)}) cannot be cut into {tp} equal parts. Use another tp."
            )
        if not 1 <= self.pp <= model.num_hidden_layers:
            raise ScenarioError(
                f"pp: the {model.num_hidden_layers} layers of {model.name} cannot be cut into {self.pp} stages. Use"
                " another pp."
            )
        if model.num_hidden_layers % self.pp and self.engine != "vllm":
            raise ScenarioError(
                f"pp: the {model.num_hidden_layers} layers of {model.name} cannot be cut into {self.pp} equal stages."
                " Use another pp, or a deployment with engine: vllm, whose rule for unequal ones is known."
            )
        for what, dtype in (("weights", self.weight_dtype), ("moe", self.moe_dtype), ("kv", self.kv_dtype)):
            if dtype and dtype not in ELEMENT_BYTES:
                raise ScenarioError(f"{what}: {dtype} is not a known type. Write one of {', '.join(ELEMENT_BYTES)}.")
        self._check_experts()

    def _widths(self, parts: Iterable[Attention | Mlp]) -> Iterable[str]:
        """The first size of `parts` that cannot be cut, numbers of heads aside; else the width of the first MLP."""
        cut = [part.cannot_cut(self.tp) for part in parts] if self.tp > 0 else []
        named = [text for text in cut if text and not text.startswith(("heads", "KV heads"))]
        widths = [f"MLP width {part.width}" for part in parts if isinstance(part, DenseMlp)]
        shared = [f"shared width {w}" for part in parts if (w := getattr(part, "shared_width", 0))]
        return named[:1] or [*widths, *shared][:1]

    def _check_experts(self) -> None:
        model, gpus = self.model, self.tp * self.dp_attention
        experts = next((each.mlp for each in model.kinds if isinstance(each.mlp, Experts)), None)
        if self.dp_attention < 1 or self.ep < 1 or gpus % self.ep:
            raise ScenarioError(
                f"ep: {self.ep} is not a divisor of the {gpus} GPUs of a stage (tp {self.tp} × dp_attention"
                f" {self.dp_attention}). Use another ep."
            )
        if experts is None and (self.ep > 1 or self.dp_attention > 1):
            raise ScenarioError(f"ep: {model.name} has no experts to divide. Leave out ep and dp_attention.")
        if experts is not None and (experts.count % self.ep or experts.width % self.split.moe_tp):
            raise ScenarioError(
                f"ep: {model.name} has {experts.count} experts of width {experts.width}, which {self.ep} groups of"
                f" {self.split.moe_tp} GPUs cannot share equally. Use another ep."
            )
        own = 0 if experts is None else experts.width // self.split.moe_tp
        if self.types.experts == "fp8_block" and own % 128:
            raise ScenarioError(
                f"ep: experts of {model.name} would be {own} wide on each GPU, and fp8_block has a scale for every 128"
                " columns. Use a larger ep."
            )

    @property
    def num_gpus(self) -> int:
        return self.tp * self.dp_attention * self.pp

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return stage_layers(self.model.num_hidden_layers, self.pp)

    @property
    def split(self) -> Split:
        """How the GPUs of a stage share its layers."""
        return Split(self.tp, self.ep, self.tp * self.dp_attention // self.ep)

    @property
    def types(self) -> Types:
        """The types of weights and KV, as stated or as the checkpoint has them.

        Where the checkpoint's own type is stated, what it leaves unquantised stays so; another type is for all
        matrices of the layers, as when an engine quantises them itself, and one of 16 or 32 bits for all weights.
        """
        own = self.model.quantised
        plain = self.weight_dtype if self.weight_dtype in DTYPE_BYTES else self.model.dtype
        mlp = self.weight_dtype or own.weights or plain
        if self.weight_dtype in ("", own.weights):
            attention, experts, linear, head = (
                part or plain for part in (own.attention, own.experts, own.linear, own.head)
            )
        else:
            attention = experts = linear = mlp
            head = plain
        return Types(attention, mlp, self.moe_dtype or experts, self.kv_dtype or own.kv or plain, plain, linear, head)

    @property
    def peak_flops(self) -> float | None:
        """Dense 16-bit FLOP/s of all GPUs together, by their sheet; None where the GPU is not known."""
        return None if self.gpu is None else self.gpu.peak_flops * self.num_gpus

    @property
    def memory_bandwidth(self) -> float | None:
        """Bytes/s of all GPUs together, by their sheet; None where the GPU is not known."""
        return None if self.gpu is None else self.gpu.memory_bandwidth * self.num_gpus

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each GPU; of several stages, on each of that which has most."""
        return max(stage.weight_bytes for stage in self.stages())

    @property
    def _expert_bytes(self) -> float:
        """Bytes of one weight of a routed expert. vLLM pads the hidden size to a multiple of 256 where they are MXFP4.

        Source: 64.38 GiB of gpt-oss-120b's 60.8 on a GPU (github.com/vllm-project/vllm issue 33155).
        """
        kind, hidden = self.types.experts, self.model.hidden_size
        padded = kind == "mxfp4" and self.engine == "vllm"
        return ELEMENT_BYTES[kind] * (-(-hidden // 256) * 256 / hidden if padded else 1)

    def step_bytes(self) -> tuple[float, float, float]:
        """(Bytes of the matrices that every step reads, bytes of all routed experts, the share of these that a token
        goes through), of all GPUs together, copies left out."""
        model, types = self.model, self.types
        attention, mlp, experts = (ELEMENT_BYTES[kind] for kind in (types.attention, types.mlp, types.experts))
        linear = ELEMENT_BYTES[types.linear]
        every, routed, share = model.head_parameters * ELEMENT_BYTES[types.head], 0.0, 1.0
        for each in model.kinds:
            weights = each.weights(model.hidden_size)
            every += each.count * (weights.attention * attention + weights.linear * linear + weights.mlp * mlp)
            routed += each.count * weights.experts * experts
            share = each.mlp.per_token / each.mlp.count if isinstance(each.mlp, Experts) else share
        return every, routed, share

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers, while it is in their windows, on each GPU that shares a
        layer; fewer KV heads than these are replicated."""
        element = ELEMENT_BYTES[self.types.kv]
        return ceil(sum(each.count * each.attention.kv_bytes(self.tp, element) for each in self.model.kinds))

    def stages(self) -> list[Stage]:
        """What the GPUs of each stage hold, from first to last."""
        model, types, split = self.model, self.types, self.split
        attention, mlp, plain = (ELEMENT_BYTES[kind] for kind in (types.attention, types.mlp, types.plain))
        bytes_of = (attention, mlp, self._expert_bytes, plain, ELEMENT_BYTES[types.linear])
        each_layer = [layers for layers in model.kinds for _ in range(layers.count)]
        matrix = -(-model.head_parameters // self.tp)
        stages: list[Stage] = []
        for stage, count in enumerate(self.stage_layers):
            first = sum(self.stage_layers[:stage])
            in_stage = each_layer[first : first + count]
            weights = Weights(
                *map(sum, zip(*(each.weights(model.hidden_size, split) for each in in_stage), strict=True))
            )
            last = first + count == model.num_hidden_layers
            tied = model.tie_word_embeddings and self.pp == 1
            vocabulary = matrix * ((first == 0) - tied * last) + model.hidden_size * last
            vocabulary += -(-model.layer_embedding // self.tp) * (first == 0)
            head = matrix * last * ELEMENT_BYTES[types.head]
            size = sum(n * b for n, b in zip(weights, bytes_of, strict=True)) + vocabulary * plain + head
            runs = tuple(replace(kind, count=len(list(same))) for kind, same in groupby(in_stage, _alone))
            stages.append(Stage(ceil(size), *self._kv(in_stage), runs, first == 0, last))
        return stages

    def _kv(self, layers: list[Layers]) -> tuple[float, float, float]:
        """(bytes of a token in layers without a window, in those with one, bytes of a request's full windows)."""
        element = ELEMENT_BYTES[self.types.kv]
        rows = [(each.attention.kv_bytes(self.tp, element), each.attention.window) for each in layers]
        return (
            sum(size for size, window in rows if window is None),
            sum(size for size, window in rows if window is not None),
            sum(size * window for size, window in rows if window is not None),
        )

    def reserve(self, stage: Stage, step_tokens: int, step_requests: int) -> Reserve:
        """The bytes of each GPU of `stage` that the engine keeps besides weights and KV, by its rule."""
        types = self.types
        start = Start(self.version, self.model, stage.layers, self.split, step_tokens, step_requests)
        start = start._replace(is_first=stage.is_first, is_last=stage.is_last)
        start = start._replace(mlp_type=types.mlp, experts_type=types.experts)
        return self.rule.reserve(
            start if self.gpu is None else start._replace(multiprocessors=self.gpu.multiprocessors)
        )

    def check_one_scheduler(self) -> None:
        """ScenarioError if groups of GPUs schedule for themselves, which one simulated engine does not."""
        if self.dp_attention > 1:
            raise ScenarioError(
                f"dp_attention {self.dp_attention}: so many schedulers with a queue and KV memory of their own, whose"
                " steps wait for each other, are not simulated as one engine. Use dp_attention: 1; those of vllm,"
                " sglang and tensorrt_llm are simulated as ranks where there are no replicas, pools or plan."
            )

    @property
    def rule(self) -> EngineRule:
        """How the engine finds its room for KV; that of no engine in particular where it has no rule of its own."""
        return ENGINES.get(self.engine, ENGINES[""])

    def tokens_in(
        self, stage: Stage, room: int, step_tokens: int, step_requests: int, draft: DraftMemory | None = None
    ) -> float:
        """Tokens for which `room` bytes on a GPU of the stage are enough in one pool; negative where `room` is."""
        full = stage.full_bytes + (draft.token_bytes if draft is not None and stage.is_last else 0)
        plain = room / (full + stage.windowed_bytes)
        if not stage.windowed_bytes or not stage.full_bytes or self.rule.keeps_windows:
            return plain
        windows = stage.window_bytes * step_requests + stage.windowed_bytes * step_tokens
        return max(plain, (room - windows) / full)


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """How many of the `layers` each of the `stages` has: as many, and of the layers left over one more each in the
    last stages but the last one, which has the output matrix too.

    Source: vLLM 0.33.0, vllm/distributed/utils.py, `get_pp_indices`.
    """
    each, over = divmod(layers, stages)
    return tuple(each + (stages - 1 - over <= stage < stages - 1) for stage in range(stages))


def _alone(layers: Layers) -> Layers:
    """One of these layers."""
    return replace(layers, count=1)
