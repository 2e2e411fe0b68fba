"""A model on GPUs as one engine runs it: what every GPU holds of its weights and of a token's KV, and the room left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from batchsim.base.errors import ScenarioError
from batchsim.deployment.model import ELEMENT_BYTES, GpuSpec, ModelSpec

RESERVE_BYTES = 2_600_000_000
"""Bytes of each GPU that an engine needs besides weights and KV: CUDA context, workspaces, the activations and logits
of its largest step. Assumed, and the same for every model: with it Llama-3.1-8B in bf16 has 55.8k blocks of 16 on an
H200 at 0.90, as expected of a measured engine there. An engine's own number, from its start-up log, is better."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """KV blocks of one engine, and in `terms` the sum they come from. With `tp` GPUs each has a part of every block."""

    num_blocks: int
    block_size: int
    terms: str

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        return f"KV {self.tokens:,} tokens ({self.num_blocks:,} blocks of {self.block_size}: {self.terms})"


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine's model, GPUs and data types. ScenarioError if the model cannot be split over `tp` GPUs.

    `gpu` None: not in the catalog, and neither its memory nor its speed is known. `engine` and `version`: the software,
    "" where none in particular is meant. `tp`: GPUs that share every layer. `pp`: stages of so many GPUs, of
    which each holds an equal part of the layers, the last one the output matrix too. `ep`: GPUs among which whole
    experts are divided, a divisor of `tp` × `dp_attention`; what remains of that product cuts every expert.
    `dp_attention`: groups of `tp` GPUs of which each runs the attention of its own sequences and keeps their KV, while
    all share the experts. `weight_dtype`, `moe_dtype` (of experts) and `kv_dtype` (of the KV cache): types by their
    names in `ELEMENT_BYTES`; "": the model's own, for experts that of the other weights.
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
        if tp < 1 or heads % tp or model.intermediate_size % tp or (kv_heads % tp and tp % kv_heads):
            raise ScenarioError(
                f"tp: {model.name} ({heads} heads, {kv_heads} KV heads, MLP width {model.intermediate_size}) cannot be"
                f" cut into {tp} equal parts. Use another tp."
            )
        if self.pp < 1 or model.num_hidden_layers % self.pp:
            raise ScenarioError(
                f"pp: the {model.num_hidden_layers} layers of {model.name} cannot be cut into {self.pp} equal stages."
                " Use another pp."
            )

    @property
    def num_gpus(self) -> int:
        return self.tp * self.dp_attention * self.pp

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
        """Bytes of weights on each GPU; of several stages, on each of the last, which has the output matrix too."""
        model, parameters = self.model, self.model.num_parameters
        if self.pp > 1:
            embeddings = model.head_parameters * (1 if model.tie_word_embeddings else 2)
            parameters = -(-(parameters - embeddings) // self.pp) + model.head_parameters
        return ceil(parameters * ELEMENT_BYTES[self.weight_dtype or model.dtype] / self.tp)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers, on each GPU that shares a layer; fewer KV heads than these
        are replicated."""
        return ceil(self.model.kv_elements(self.tp) * ELEMENT_BYTES[self.kv_dtype or self.model.dtype])

    def derive_kv(
        self, *, utilisation: float = 0.90, block_size: int = 16, reserve_bytes: int = RESERVE_BYTES
    ) -> KvBudget:
        """The blocks of `block_size` tokens that weights and `reserve_bytes` leave of the share `utilisation` of each
        GPU's memory. ScenarioError, saying what is missing, if there is no room for one block."""
        gpu, model = self.gpu, self.model
        assert gpu is not None, "whoever asks knows the GPU"
        free_bytes = int(gpu.memory_bytes * utilisation) - self.weight_bytes - reserve_bytes
        block_bytes = self.kv_bytes_per_token // self.pp * block_size
        terms = f"{gpu.memory_bytes / 1e9:.1f} GB × {utilisation:.2f} − {self.weight_bytes / 1e9:.1f} weights"
        terms += f" − {reserve_bytes / 1e9:.1f} reserve" + (
            f", on each of {self.num_gpus} GPUs" if self.num_gpus > 1 else ""
        )
        if free_bytes >= block_bytes:
            return KvBudget(free_bytes // block_bytes, block_size, terms)
        degrees = [tp for tp in (2, 4, 8) if tp > self.tp]
        fitting = next((tp for tp in degrees if self._fits(tp, utilisation, block_size, reserve_bytes)), None)
        advice = f"It fits with tp: {fitting}." if fitting else "Use a smaller model or a GPU with more memory."
        short = f"{(block_bytes - free_bytes) / 1e9:.1f} GB short of one KV block"
        raise ScenarioError(f"{model.name} on {gpu.name}: {short}: {terms}. {advice}")

    def _fits(self, tp: int, utilisation: float, block_size: int, reserve_bytes: int) -> bool:
        """Whether on `tp` GPUs there is room for one KV block beside weights and reserve."""
        assert self.gpu is not None
        try:
            wider = replace(self, tp=tp)
        except ScenarioError:
            return False
        free_bytes = int(self.gpu.memory_bytes * utilisation) - wider.weight_bytes - reserve_bytes
        return free_bytes >= wider.kv_bytes_per_token // wider.pp * block_size
