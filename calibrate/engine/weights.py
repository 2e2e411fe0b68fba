"""A model's weights on their device, q, k, v in one matrix and gate, up in another: random, or from a folder's files.

Names and shapes are those of the Hugging Face checkpoints of the Llama family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchsim.base.errors import CalibrationError
from batchsim.base.files import check_regular, read_json, reason_text
from batchsim.calibrate.engine.architecture import Architecture

_FLOATS = ("BF16", "F16", "F32")  # dtypes of tensors as safetensors names them
STD = 0.02
"""Standard deviation of random weights; the `initializer_range` that the families' configs share."""

Shape = tuple[int, ...]
TensorSource = Callable[[str], Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights; matrices are [out, in]. `qkv` has the rows of q, k and v, `gate_up` those of gate and up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """A model's weights. `head` is the embedding itself where the two are tied. `origin` says where they come from."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    origin: str


def tensor_shapes(architecture: Architecture) -> dict[str, Shape]:
    """The shape of every tensor of a checkpoint of this architecture, by name; a tied output projection has none."""
    spec = architecture.spec
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    attention = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    for layer in range(spec.num_hidden_layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        for part, size in attention.items():
            shapes[f"{at}self_attn.{part}_proj.weight"] = (size, hidden)
            if architecture.qkv_bias:
                shapes[f"{at}self_attn.{part}_proj.bias"] = (size,)
        if architecture.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (spec.head_dim,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, spec.q_size)
        shapes[at + "mlp.gate_proj.weight"] = shapes[at + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def random_weights(architecture: Architecture, device: torch.device, seed: int) -> Weights:
    """Random weights: matrices normal with deviation STD, norms 1, biases 0; the same for a seed and kind of device."""
    shapes = tensor_shapes(architecture)
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, architecture.spec.dtype)

    def draw(name: str) -> Tensor:
        tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        if name.endswith("bias"):
            return tensor.zero_()
        return tensor.fill_(1.0) if len(tensor.shape) == 1 else tensor.normal_(0.0, STD, generator=generator)

    return _assemble(architecture, draw, f"random (seed {seed})")


def load_weights(architecture: Architecture, folder: Path, device: torch.device) -> Weights:
    """The weights in the *.safetensors of `folder`. CalibrationError for a tensor missing, left over or misshapen."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CalibrationError(
            f"{folder}: reading its weights needs the safetensors library. pip install safetensors"
        ) from None
    files: dict[str, Any] = {}
    for path in _weight_files(folder):
        try:
            check_regular(path)
            opened = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"{path}: cannot be read: {reason_text(error)}. Download it again.") from None
        files.update(dict.fromkeys(opened.keys(), opened))
    _check_names(architecture, files, folder)
    dtype = getattr(torch, architecture.spec.dtype)
    return _assemble(architecture, lambda name: files[name].get_tensor(name).to(device, dtype), str(folder))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that the folder's index names; without an index the usual file, or else all there are."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        usual = folder / "model.safetensors"
        return [usual] if usual.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{index}: holds no weight_map: {reason_text(error)}. Download it again.") from None
    for name in names:
        if not (folder / name).is_file():
            raise CalibrationError(f"{folder / name}: named in {index.name} but missing. Download it again.")
    return [folder / name for name in names]


def _check_names(architecture: Architecture, files: dict[str, Any], folder: Path) -> None:
    """CalibrationError naming the first tensor that is missing, misshapen or unknown."""
    shapes = tensor_shapes(architecture)
    for name, shape in shapes.items():
        if name not in files:
            missing = sum(other not in files for other in shapes)
            raise CalibrationError(
                f"{folder}: {name} {list(shape)} is missing, {missing} of {len(shapes)} tensors in all."
                " Give a complete checkpoint of this config.json."
            )
        stored = files[name].get_slice(name).get_shape()
        if tuple(stored) != shape:
            raise CalibrationError(
                f"{folder}: {name} is {list(stored)}, its config.json says {list(shape)}."
                " Give the config.json of these weights."
            )
        dtype = files[name].get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise CalibrationError(
                f"{folder}: {name} is {dtype}; known are {', '.join(_FLOATS)}. Give a checkpoint without quantisation."
            )
    # A tied head may be stored all the same; inverse frequencies are derived, not learnt.
    for name in files:
        if name not in shapes and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            raise CalibrationError(
                f"{folder}: {name} {list(files[name].get_slice(name).get_shape())} is no tensor of the model its"
                f" config.json describes ({architecture.spec.model_type}). Give the config.json of these weights."
            )


def _assemble(architecture: Architecture, tensor: TensorSource, origin: str) -> Weights:
    """The model from its tensors by name, each taken once, so that no more than one part is in memory twice."""
    embedding = tensor("model.embed_tokens.weight")
    layers = tuple(_layers(architecture, tensor))
    norm = tensor("model.norm.weight")
    head = embedding if architecture.spec.tie_word_embeddings else tensor("lm_head.weight")
    return Weights(embedding, layers, norm, head, origin)


def _layers(architecture: Architecture, tensor: TensorSource) -> Iterator[LayerWeights]:
    for layer in range(architecture.spec.num_hidden_layers):
        at = f"model.layers.{layer}."
        qkv = [f"{at}self_attn.{part}_proj" for part in "qkv"]
        normed = architecture.qk_norm
        yield LayerWeights(
            input_norm=tensor(at + "input_layernorm.weight"),
            qkv=torch.cat([tensor(name + ".weight") for name in qkv]),
            qkv_bias=torch.cat([tensor(name + ".bias") for name in qkv]) if architecture.qkv_bias else None,
            q_norm=tensor(at + "self_attn.q_norm.weight") if normed else None,
            k_norm=tensor(at + "self_attn.k_norm.weight") if normed else None,
            o=tensor(at + "self_attn.o_proj.weight"),
            post_norm=tensor(at + "post_attention_layernorm.weight"),
            gate_up=torch.cat([tensor(f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")]),
            down=tensor(at + "mlp.down_proj.weight"),
        )
