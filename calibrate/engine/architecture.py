"""What a forward pass needs of a model beyond its shape, read from its config.json; unknown features are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_json, reason_text
from batchsim.deployment.catalog import MODELS, load_model
from batchsim.deployment.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies of RoPE stretched for long contexts. Source: `rope_type: llama3` of transformers."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's shape with the constants of its norms and RoPE. `eos_token_ids` is empty where no file names them."""

    spec: ModelSpec
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v (not o) have biases."""
        return self.spec.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and k is normalised before RoPE."""
        return self.spec.model_type == "qwen3"


_LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)
# Source: config.json of the repositories in batchsim.deployment.catalog.MODEL_SOURCES.
_CATALOG: dict[str, tuple[float, float, Llama3Scaling | None]] = {
    "llama-3.1-8b": (1e-5, 5e5, _LLAMA3),
    "llama-3.1-70b": (1e-5, 5e5, _LLAMA3),
    "qwen2.5-7b": (1e-6, 1e6, None),
    "qwen3-8b": (1e-6, 1e6, None),
    "qwen3-14b": (1e-6, 1e6, None),
    "mistral-7b": (1e-5, 1e6, None),
}
_UNSAID = (1e-6, 1e4, None)
"""(norm epsilon, RoPE base, scaling) where a config.json does not say: transformers' defaults. Also for a bare shape,
which runs on random weights, at a cost that does not depend on them.
"""


def load_architecture(model: str | ModelSpec) -> Architecture:
    """The architecture of a catalog name, of a config.json or of the folder that holds it, or of a bare shape.

    ScenarioError, headed by the file, for a feature that is not understood.
    """
    if isinstance(model, ModelSpec):
        known = model.name in _CATALOG and MODELS.get(model.name) == model
        return Architecture(model, *(_CATALOG[model.name] if known else _UNSAID))
    spec = load_model(model)
    if model in MODELS:
        return Architecture(spec, *_CATALOG[model])
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    config: dict[str, Any] = read_json(path)
    return from_config(spec, config, str(path), _eos_token_ids(config, path.with_name("generation_config.json")))


def from_config(
    spec: ModelSpec, config: Mapping[str, Any], name: str, eos_token_ids: tuple[int, ...] = ()
) -> Architecture:
    """The architecture that `config` describes, whose shape is `spec`. ScenarioError, headed `name`, if it cannot."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ScenarioError(f"{name}: hidden_act is {activation!r}, only silu is known. Use a model with silu.")
    theta, scaling = _rope(config, name)
    eps = _number(config, "rms_norm_eps", name, default=_UNSAID[0])
    return Architecture(spec, eps, theta, scaling, eos_token_ids)


def _rope(config: Mapping[str, Any], name: str) -> tuple[float, Llama3Scaling | None]:
    """RoPE's base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ScenarioError(f"{name}: the RoPE parameters are {rope!r}, not one set. Use a model with one RoPE.")
    theta = _number({**config, **rope}, "rope_theta", name, default=_UNSAID[1])
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise ScenarioError(f"{name}: partial_rotary_factor is {share!r}, only 1 is known. Use a model with full RoPE.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ScenarioError(
            f"{name}: rope_type is {kind!r}, known are default and llama3. Use a model with one of them."
        )
    low, high = (_number(rope, key, name) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ScenarioError(f"{name}: low_freq_factor {low} is not below high_freq_factor {high}. Correct them.")
    original = int(_number(rope, "original_max_position_embeddings", name))
    return theta, Llama3Scaling(_number(rope, "factor", name), low, high, original)


def _number(config: Mapping[str, Any], key: str, name: str, default: float | None = None) -> float:
    """The positive number at `key` of `config`; ScenarioError if it is not one, or missing without a default."""
    value = config.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ScenarioError(f"{name}: {key} is {value!r}. Write a number above 0.")
    return float(value)


def _eos_token_ids(config: Mapping[str, Any], generation: Path) -> tuple[int, ...]:
    """The end-of-sequence token ids: those of generation_config.json if it names any, else those of the config."""
    named = config.get("eos_token_id")
    if generation.is_file():
        try:
            named = read_json(generation).get("eos_token_id", named)
        except (OSError, ValueError, AttributeError) as error:
            raise ScenarioError(f"{generation}: cannot be read: {reason_text(error)}. Correct or remove it.") from None
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ScenarioError(f"{generation.parent}: eos_token_id is {named!r}. Write a token id or a list of them.")
    return tuple(ids)
