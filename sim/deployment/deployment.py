"""A model on GPUs as one engine runs it: what every GPU holds of its weights and of a token's KV, and the room left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from batchsim.base.errors import ScenarioError
from batchsim.deployment.config_json import SIZED
from batchsim.deployment.layers import DenseMlp, Experts, Layers, Split, Weights
from batchsim.deployment.memory import ENGINES, STEP_REQUESTS, STEP_TOKENS, EngineRule, KvBudget, Reserve
from batchsim.deployment.model import DTYPE_BYTES, GpuSpec, ModelSpec
from batchsim.deployment.quantisation import ELEMENT_BYTES


class Types(NamedTuple):
    """The types, by their names in `ELEMENT_BYTES`, of matrices of attention, of MLPs through which all tokens go and
    of routed experts, of the KV cache, and of all `plain` weights, which no quantisation touches."""

    attention: str
    mlp: str
    experts: str
    kv: str
    plain: str


class Stage(NamedTuple):
    """What each GPU of one stage holds: `weight_bytes`, bytes of a token's KV in layers that keep it to its request's
    end, in those whose window leaves it, and bytes of one request's windows, at most."""

    weight_bytes: int
    full_bytes: float
    windowed_bytes: float
    window_bytes: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine's model, GPUs and data types. ScenarioError if the model cannot be split over that many GPUs.

    `gpu` None: not in the catalog, and neither its memory nor its speed is known. `engine` and `version`: the software,
    "" where none in particular is meant. `tp`: GPUs that share every layer. `pp`: stages of `tp` × `dp_attention`
    GPUs, each with an equal part of the layers, the last one with the output matrix too. `ep`: GPUs among which whole
    experts are divided, a divisor of `tp` × `dp_attention`; what remains of that product cuts every expert.
    `dp_attention`: groups of `tp` GPUs of which each runs the attention and the dense MLPs of its own sequences and
    keeps their KV, while all share the experts. `weight_dtype`, `moe_dtype` (of experts) and `kv_dtype` (of the KV
    cache): types by their names in `ELEMENT_BYTES`; "": the checkpoint's own, and for experts that of the other weights
    where these are stated.
    """

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
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        widths = [("MLP width", each.mlp.width) for each in model.kinds if isinstance(each.mlp, DenseMlp)]
        widths += [("shared width", w) for each in model.kinds if (w := getattr(each.mlp, "shared_width", 0))]
        width, size = next(
            ((what, size) for what, size in widths if tp < 1 or size % tp), widths[0] if widths else ("", 0)
        )
        if tp < 1 or heads % tp or size % tp or (kv_heads % tp and tp % kv_heads):
            shape = f"{heads} heads, {kv_heads} KV heads" + (f", {width} {size}" if width else "")
            raise ScenarioError(f"tp: {model.name} ({shape}) cannot be cut into {tp} equal parts. Use another tp.")
        if self.pp < 1 or model.num_hidden_layers % self.pp:
            raise ScenarioError(
                f"pp: the {model.num_hidden_layers} layers of {model.name} cannot be cut into {self.pp} equal stages."
                " Use another pp."
            )
        for what, dtype in (("weights", self.weight_dtype), ("moe", self.moe_dtype), ("kv", self.kv_dtype)):
            if dtype and dtype not in ELEMENT_BYTES:
                raise ScenarioError(f"{what}: {dtype} is not a known type. Write one of {', '.join(ELEMENT_BYTES)}.")
        self._check_experts()

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
            attention, experts = own.attention or plain, own.experts or plain
        else:
            attention = experts = mlp
        return Types(attention, mlp, self.moe_dtype or experts, self.kv_dtype or own.kv or plain, plain)

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
        every, routed, share = model.head_parameters * ELEMENT_BYTES[types.plain], 0.0, 1.0
        for each in model.kinds:
            weights = each.weights(model.hidden_size)
            every += each.count * (weights.attention * attention + weights.mlp * mlp)
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
        bytes_of = (attention, mlp, self._expert_bytes, plain)
        each_layer = [layers for layers in model.kinds for _ in range(layers.count)]
        count = model.num_hidden_layers // self.pp
        matrix = -(-model.head_parameters // self.tp)
        stages: list[Stage] = []
        for first in range(0, model.num_hidden_layers, count):
            in_stage = each_layer[first : first + count]
            weights = Weights(
                *map(sum, zip(*(each.weights(model.hidden_size, split) for each in in_stage), strict=True))
            )
            last = first + count == model.num_hidden_layers
            tied = model.tie_word_embeddings and self.pp == 1
            vocabulary = matrix * ((first == 0) + last - tied) + model.hidden_size * last
            size = sum(n * b for n, b in zip(weights, bytes_of, strict=True)) + vocabulary * plain
            stages.append(Stage(ceil(size), *self._kv(in_stage)))
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

    def check_one_scheduler(self) -> None:
        """ScenarioError if groups of GPUs schedule for themselves, which one simulated engine does not."""
        if self.dp_attention > 1:
            raise ScenarioError(
                f"dp_attention {self.dp_attention}: so many schedulers with a queue and KV memory of their own, whose"
                " steps wait for each other, are not simulated as one engine. Use dp_attention: 1."
            )

    @property
    def rule(self) -> EngineRule:
        """How the engine finds its room for KV; that of no engine in particular where it has no rule of its own."""
        return ENGINES.get(self.engine, ENGINES[""])

    def derive_kv(
        self,
        *,
        utilisation: float | None = None,
        block_size: int = 16,
        reserve_bytes: int | None = None,
        step_tokens: int = STEP_TOKENS,
        step_requests: int = STEP_REQUESTS,
    ) -> KvBudget:
        """The blocks of `block_size` tokens for which each GPU's memory has room beside weights and reserves.

        `utilisation` is the engine's share, by default its own: of all memory (vLLM, SGLang), or of what is free
        (TensorRT-LLM). `reserve_bytes` takes the place of the reserves that its rule derives for steps of `step_tokens`
        tokens of `step_requests` requests. Layers with a window keep it for `step_requests` requests, or as all layers
        where that is less; TensorRT-LLM keeps all. With attention groups the blocks are those of one group, as engines
        report them. ScenarioError, saying what is missing, if there is no room for one block.
        """
        gpu, model = self.gpu, self.model
        assert gpu is not None, "whoever asks knows the GPU"
        if model.model_type not in SIZED:
            raise ScenarioError(
                f"{model.name}: model_type {model.model_type!r} is none whose weights and KV are known in full. Add kv:"
                " tokens, from the engine's start-up log."
            )
        rule = self.rule
        share = (
            rule.default_share(self.version, gpu.memory_bytes, self.num_gpus) if utilisation is None else utilisation
        )
        reserve = rule.reserve(self.version, model, self.split, step_tokens, step_requests)
        if reserve_bytes is not None:
            reserve = Reserve.stated(reserve_bytes)

        def blocks(stage: Stage) -> float:
            """Blocks that fit on a GPU of the stage; negative where bytes are missing for the first."""
            room = rule.room(gpu.memory_bytes, share, stage.weight_bytes, reserve)
            plain = room / (stage.full_bytes + stage.windowed_bytes)
            if not stage.windowed_bytes or not stage.full_bytes or rule.keeps_windows:
                return plain / block_size
            windows = stage.window_bytes * step_requests + stage.windowed_bytes * step_tokens
            return max(plain, (room - windows) / stage.full_bytes) / block_size

        stage = min(self.stages(), key=blocks)
        terms = rule.terms(gpu.memory_bytes, share, stage.weight_bytes, reserve)
        terms += f", on each of {self.num_gpus} GPUs" if self.num_gpus > 1 else ""
        if (num_blocks := blocks(stage)) >= 1:
            return KvBudget(int(num_blocks), block_size, terms)
        missing = (1 - num_blocks) * (stage.full_bytes + stage.windowed_bytes) * block_size
        step = {"step_tokens": step_tokens, "step_requests": step_requests}
        degrees = (tp for tp in (2, 4, 8) if tp > self.tp)
        fitting = next((tp for tp in degrees if self._fits(tp, utilisation, block_size, reserve_bytes, step)), None)
        advice = f"It fits with tp: {fitting}." if fitting else "Use a smaller model or a GPU with more memory."
        raise ScenarioError(
            f"{model.name} on {gpu.name}: {missing / 1e9:.1f} GB short of one KV block: {terms}. {advice}"
        )

    def _fits(
        self, tp: int, utilisation: float | None, block_size: int, reserve_bytes: int | None, step: dict[str, int]
    ) -> bool:
        """Whether on `tp` GPUs there is room for one KV block beside weights and reserve."""
        try:
            wider = replace(self, tp=tp)
            wider.derive_kv(utilisation=utilisation, block_size=block_size, reserve_bytes=reserve_bytes, **step)
        except ScenarioError:
            return False
        return True
