"""The shape of a model and the sheet of a GPU.

A shape is read from a Hugging Face config.json. The roofline can time dense decoders whose layers are alike, full
attention and a gated MLP. Experts, windows, latent attention and quantised weights are read too, so that memory is
known and profiles can time them; what the roofline cannot time says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import ceil
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import NonNegativeInt, PositiveInt, check_ranges
from batchsim.deployment.config_families import FAMILIES, input_of_layers, rotary_dim
from batchsim.deployment.config_json import (
    attention_vectors,
    check_flags,
    check_kinds,
    largest_image,
    read_layers,
    window_told,
)
from batchsim.deployment.config_values import count_at, flag_at, object_at
from batchsim.deployment.layers import DenseMlp, GroupedAttention, Layers
from batchsim.deployment.quantisation import Quantisation, read_quantisation
from batchsim.deployment.vision import VisionTower, vision_tower

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one element by its type, of the types that a config.json has for a model that is not quantised."""

_TIMED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that the roofline can time."""

_REFUSED = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "moe_num_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "attention_bias": "biases on all attention matrices",
    "mlp_bias": "biases on the MLP matrices",
}
_DROPPABLE = {"attention_bias": "no biases", "mlp_bias": "no biases"}
"""Keys of a config.json without which the roofline can time its model, and what the model then has instead."""

_STATED = (
    "state them: cost: {kind: linear, base: ..., per_token: ...} and kv: {tokens: ...}, and for model any name of the"
    " catalog, of which only the longest context counts then."
)
_WAYS_OUT = (
    "A deployment on a GPU of the catalog may have them from kernel tables: deployment: {engine: vllm, gpu: h200_sxm,"
    f" tp: 8}}. Or {_STATED}"
)
_STATED_INSTEAD = _STATED.replace("state them", "Or state step times and KV memory")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder, with the field names of its config.json. Of a model that sees or hears, the part that writes.

    Where layers differ, heads and sizes are those of the first that has them, 0 where none has.
    `dtype` is the type of its computations and of all that `quantised`, the types of a quantised checkpoint, leaves.
    `layers`: the layers in order, where they differ or are not dense with full attention; () where the fields before
    say all. `untimed`: why a roofline cannot time a step, with the ways out; "" where it can. `image`: tokens and
    pixels, in three colours, of the largest image of a model that sees, where known; (0, 0) without. `rotary_dim`: how
    many elements of a head are rotated by the position, 0: none; None: all of the first layer's. `vision`: the
    tower of a model that sees, where known. `layer_input`: words and width of an embedding that gives each
    layer an input of its own.
    """

    name: str
    model_type: str
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: NonNegativeInt
    intermediate_size: NonNegativeInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    layers: tuple[Layers, ...] = field(default=(), metadata=LEFT_OUT)
    untimed: str = field(default="", metadata=LEFT_OUT)
    quantised: Quantisation = field(default=Quantisation(), metadata=LEFT_OUT)
    image: tuple[NonNegativeInt, NonNegativeInt] = field(default=(0, 0), compare=False, metadata=LEFT_OUT)
    rotary_dim: NonNegativeInt | None = field(default=None, compare=False, metadata=LEFT_OUT)
    vision: VisionTower | None = field(default=None, compare=False, metadata=LEFT_OUT)
    layer_input: tuple[NonNegativeInt, NonNegativeInt] = field(default=(0, 0), metadata=LEFT_OUT)

    __post_init__ = check_ranges

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str) -> ModelSpec:
        """The shape in `config`, a parsed config.json. ScenarioError, headed `name`, if it is not understood.

        What a roofline cannot time is understood as far as its layers are; `untimed` says why.
        """
        # where a model that reads more than text keeps its decoder
        keys = dict(config)
        if config.get("text_config") is not None:
            keys = {**object_at(config, "text_config", name), **keys}
        check_kinds(keys.get("model_type"), name, _STATED_INSTEAD.replace("Or s", "S"))
        check_flags(keys, name)
        try:
            return cls._understand(keys, name)
        except ValueError as error:  # of a size that is a product of several numbers
            raise ScenarioError(f"{name}: {error} Correct the sizes that it is made of.") from None

    @classmethod
    def _understand(cls, keys: Mapping[str, object], name: str) -> ModelSpec:
        """The shape in `keys`, those of the decoder among them; ValueError where a product of sizes is out of range."""
        if not (untimed := _untimed(keys, name)):
            spec = replace(cls._read(keys, name), quantised=read_quantisation(keys, name))
            _ = spec.kinds  # which are refused here, where their sizes are out of range
            return spec
        try:
            if (family := FAMILIES.get(str(keys.get("model_type")))) is not None:
                spec = cls._read_family(keys, name, family(keys, name))
            else:
                spec = cls._read(keys, name)
                spec = replace(spec, layers=read_layers(keys, name, spec.kinds[0]))
        except ScenarioError as error:
            raise ScenarioError(f"{name}: {str(error).removeprefix(f'{name}: ')} {_STATED_INSTEAD}") from None
        quantised = read_quantisation(keys, name, spec.kinds)
        seen = {"image": largest_image(keys, name), "vision": vision_tower(keys, name)}
        return replace(spec, untimed=untimed, quantised=quantised, **seen)

    @classmethod
    def _read_family(cls, config: Mapping[str, object], name: str, layers: Sequence[Layers]) -> ModelSpec:
        """The shape in `config` of a family whose layers, each by itself, are read already: what they do not have alike
        is 0, or that of the first that has it."""
        if not any(each.attention.kv_elements() for each in layers):
            raise ScenarioError(f"{name}: no layer keeps keys and values of tokens; known are models of which some do.")
        heads = [each.attention for each in layers if isinstance(each.attention, GroupedAttention)]
        shape = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 0, "intermediate_size": 0}
        if heads:
            first = heads[0]
            shape |= {"num_attention_heads": first.num_heads, "num_key_value_heads": first.num_kv_heads}
            shape |= {"head_dim": first.head_dim}
        numbers = {
            key: count_at(config, key, name, default=unsaid) if config.get(key) else unsaid
            for key, unsaid in shape.items()
        }
        runs = tuple(replace(kind, count=len(list(same))) for kind, same in groupby(layers))
        return cls(
            name=name,
            model_type=str(config.get("model_type")),
            hidden_size=count_at(config, "hidden_size", name),
            num_hidden_layers=len(layers),
            vocab_size=count_at(config, "vocab_size", name),
            max_position_embeddings=count_at(config, "max_position_embeddings", name),
            **numbers,
            **_types(config, name),
            layers=runs,
            rotary_dim=rotary_dim(config, name),
            layer_input=input_of_layers(config, name),
        )

    @classmethod
    def _read(cls, config: Mapping[str, object], name: str) -> ModelSpec:
        """The shape in `config` without `layers` and `untimed`."""
        heads = count_at(config, "num_attention_heads", name)
        kv_heads = count_at(config, "num_key_value_heads", name, default=heads)
        hidden = count_at(config, "hidden_size", name)
        if heads % kv_heads:
            raise ScenarioError(
                f"{name}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}. Correct one."
            )
        if config.get("head_dim") is None and hidden % heads:
            raise ScenarioError(
                f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}. Write head_dim."
            )
        return cls(
            name=name,
            model_type=str(config.get("model_type")),
            hidden_size=hidden,
            num_hidden_layers=count_at(config, "num_hidden_layers", name),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=count_at(config, "head_dim", name, default=hidden // heads),
            intermediate_size=count_at(config, "intermediate_size", name),
            vocab_size=count_at(config, "vocab_size", name),
            max_position_embeddings=count_at(config, "max_position_embeddings", name),
            **_types(config, name),
        )

    @property
    def kinds(self) -> tuple[Layers, ...]:
        """The layers in order, each run of equal ones as one `Layers`."""
        if self.layers:
            return self.layers
        shape = (self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        vectors = attention_vectors({"model_type": self.model_type}, *shape, self.hidden_size)
        attention = GroupedAttention(*shape, vectors=vectors)
        return (Layers(self.num_hidden_layers, attention, DenseMlp(self.intermediate_size)),)

    def check_timed(self) -> None:
        """ScenarioError, with the reason and the ways out, unless a roofline can time the model's steps."""
        if self.untimed:
            raise ScenarioError(self.untimed)

    def check_runs(self) -> None:
        """ScenarioError, with the ways out, unless the model can be run and measured here: dense, in 16 or 32 bits."""
        self.check_timed()
        if self.quantised != Quantisation():
            raise ScenarioError(
                f"{self.name}: its weights are quantised ({self.quantised}), which cannot be run here. Remove"
                " quantization_config from a copy of the file: that is the model with 16-bit weights. A deployment's"
                " profile, or a roofline, can time it in a simulation."
            )

    @property
    def q_size(self) -> int:
        """Width of all query heads together; also of the attention output."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; all value heads have the same."""
        return self.num_key_value_heads * self.head_dim

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_matmul_parameters(self) -> int:
        """Number of weights of the four matmuls of one layer: qkv, o, gate-up, down."""
        attention = self.hidden_size * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Number of weights of the output projection, which a step reads whether or not tied to the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_embedding(self) -> int:
        """Number of weights of the embedding from which layers have inputs of their own, with its projection and norm,
        of which each GPU of several has its part (vLLM 0.33.0, `Gemma4Model`)."""
        words, width = self.layer_input
        return self.num_hidden_layers * width * (words + self.hidden_size) + width

    @property
    def num_parameters(self) -> int:
        """Number of all parameters, exact for model types that can be timed; others may lack biases and norms."""
        embeddings = self.head_parameters * (1 if self.tie_word_embeddings else 2)
        return (
            sum(each.count * sum(each.weights(self.hidden_size)) for each in self.kinds)
            + embeddings
            + self.layer_embedding
            + self.hidden_size
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, unquantised."""
        return self.num_parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, on one GPU, while the token is in their windows."""
        return ceil(sum(each.count * each.attention.kv_bytes(1, self.dtype_bytes) for each in self.kinds))

    def kv_elements(self, tp: int = 1) -> int:
        """Elements of a token's KV that each of `tp` GPUs keeps, in all layers."""
        return sum(each.count * each.attention.kv_elements(tp) for each in self.kinds)

    @property
    def matmul_flops_per_token(self) -> int:
        """FLOPs of the layers' matmuls, counting the experts that a token goes through; the output projection costs
        2 × `head_parameters` more for a sampled token."""
        return 2 * sum(each.count * each.active_weights(self.hidden_size) for each in self.kinds)

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of one query token reading one key: scores and weighted sum, all heads and layers. Of layers with a
        window too, whose pairs beyond it are none."""
        return 2 * sum(each.count * each.attention.pair_size for each in self.kinds)

    def same_shape(self, other: ModelSpec) -> bool:
        """Whether steps of both are the same work: all is equal but the name and the longest context."""
        return replace(self, name=other.name, max_position_embeddings=other.max_position_embeddings) == other


def _types(config: Mapping[str, object], name: str) -> dict[str, Any]:
    """The type of a config.json's unquantised weights, and whether its embedding is the output matrix too."""
    unsaid = "bfloat16" if config.get("quantization_config") else None  # of gpt-oss and MiniMax, which have none
    dtype = config.get("torch_dtype", config.get("dtype", unsaid))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ScenarioError(f"{name}: torch_dtype is {dtype!r}. Write one of {', '.join(DTYPE_BYTES)}.")
    # Gemma's own default, which its files may leave out. Source: its configuration classes in transformers.
    tied = flag_at(config, "tie_word_embeddings", name, default=str(config.get("model_type")).startswith("gemma"))
    return {"dtype": dtype, "tie_word_embeddings": tied}


def _untimed(config: Mapping[str, object], name: str) -> str:
    """Why the steps of a config.json's model cannot be timed, with the ways out; "" if they can."""
    model_type = config.get("model_type")
    refused = {key: meaning for key, meaning in _REFUSED.items() if config.get(key)}
    if refused:
        meanings = " and ".join(f"{key} means {meaning}" for key, meaning in refused.items())
        way = ""
        if all(key in _DROPPABLE for key in refused):
            instead = " and ".join(dict.fromkeys(_DROPPABLE[key] for key in refused))
            way = f" Or remove {' and '.join(refused)} from a copy of the file: that is the model with {instead}."
        return f"{name}: {meanings}, whose step times cannot be derived. {_WAYS_OUT}{way}"
    if not isinstance(model_type, str) or model_type not in _TIMED:
        known = ", ".join(_TIMED)
        why = f"model_type {model_type!r} is none of the known {known}"
    elif window := window_told(config, model_type):
        why = f"{window}: sliding windows are not modelled"
    else:
        return ""
    return f"{name}: {why}, so its step times cannot be derived. {_WAYS_OUT}"


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """How much of a GPU's sheet its kernels reach: one set per GPU, the same for every model.

    The shares are of the sheet's peak or bandwidth. `gemm_ns` and `attention_ns` are constants of a layer,
    `sequence_ns` is a layer's cost of one more sequence in its attention. `error_p50` and `error_p95` are the absolute
    relative errors of what was `compared` on the models `held_out`, which took no part in the fit; None and "" where
    nothing was. `models` are those fitted on and those held out; other models, other types than `dtype` and more than
    one GPU were not compared: their error is not known.
    """

    matmul: float
    weights: float
    attention: float
    kv: float
    gemm_ns: float
    attention_ns: float
    sequence_ns: float
    error_p50: float | None
    error_p95: float | None
    compared: str
    fitted_on: str
    held_out: str
    models: tuple[ModelSpec, ...]
    source: str
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU. Bandwidths are bytes/s in one direction; `peak_flops` is dense 16-bit with 32-bit accumulation,
    `fp8_flops` and `fp4_flops` dense FP8 and FP4; None: not known, or it has none. `link`: how GPUs of one machine
    reach each other, in words; "": not known, but for its figures. `cuda_bytes`: the memory that CUDA gives a program,
    as PyTorch reports it; None: not known, and taken as `memory_bytes`."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: float
    host_link: float
    peer_link: float
    peer_latency_ns: int
    efficiencies: Efficiencies
    source: str
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    link: str = ""
    cuda_bytes: int | None = field(default=None, metadata=LEFT_OUT)
    multiprocessors: int = field(default=132, metadata=LEFT_OUT)

    @property
    def program_bytes(self) -> int:
        """Bytes of memory that a program is given."""
        return self.memory_bytes if self.cuda_bytes is None else self.cuda_bytes

    @property
    def over_pcie(self) -> bool:
        """Whether its peers are reached over PCIe, without NVLink."""
        return self.link.startswith("PCIe")

    @property
    def via(self) -> str:
        """The link to its peers, in words, where that is PCIe."""
        return f" over {self.link}" if self.over_pcie else ""

    @property
    def peers(self) -> str:
        """How a roofline takes its peers to be reached, in words."""
        link = f"{self.link} of {self.peer_link / 1e9:g}".strip()
        return f"between GPUs {link} GB/s one way, all of it reached, and {self.peer_latency_ns / 1e3:g} µs (assumed)"
