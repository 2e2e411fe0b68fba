"""Models known by name: those of the catalog, and checkpoints by their Hugging Face ids, whose config.json is kept in
short in `checkpoints.json`. Every figure has a source; any other model is named by the path of its config.json,
or by an id that huggingface_hub finds."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_json, reason_text
from batchsim.deployment.hub import config_of
from batchsim.deployment.model import ModelSpec

# Source: config.json of the Hugging Face repository named beside each model; the fields that differ between them.
_SHAPES: dict[str, tuple[str, str, int, int, int, int, int, int, int, int]] = {
    # name: repository, type, hidden, layers, heads, kv heads, head_dim, intermediate, vocabulary, longest context
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", "llama", 8192, 80, 64, 8, 128, 28672, 128256, 131072),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", "qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 32768),
    "qwen3-8b": ("Qwen/Qwen3-8B", "qwen3", 4096, 36, 32, 8, 128, 12288, 151936, 40960),
    "qwen3-14b": ("Qwen/Qwen3-14B", "qwen3", 5120, 40, 40, 8, 128, 17408, 151936, 40960),
    "mistral-7b": ("mistralai/Mistral-7B-Instruct-v0.3", "mistral", 4096, 32, 32, 8, 128, 14336, 32768, 32768),
}

MODELS: dict[str, ModelSpec] = {name: ModelSpec(name, *shape[1:]) for name, shape in _SHAPES.items()}
"""The models of the catalog by name: all in bf16, none with tied embeddings."""

MODEL_SOURCES: dict[str, str] = {name: f"huggingface.co/{shape[0]} config.json" for name, shape in _SHAPES.items()}

_REPOSITORIES = {shape[0]: name for name, shape in _SHAPES.items()}


@cache
def _checkpoints() -> dict[str, dict[str, Any]]:
    """config.json of every checkpoint by its id, under further ids of the same shape too."""
    kept = read_json(Path(str(resources.files("batchsim.deployment"))) / "checkpoints.json")
    return kept["models"] | {name: kept["models"][like] for name, like in kept["same_shape"].items()}


def hugging_face_id(name: str) -> str:
    """The id of a model of the catalog; any other name as it is."""
    return next((repository for repository, known in _REPOSITORIES.items() if known == name), name)


def checkpoint_names() -> Iterable[str]:
    """The Hugging Face ids that `read_model` knows."""
    return dict.fromkeys([*_REPOSITORIES, *_checkpoints()])


def load_model(name_or_path: str) -> ModelSpec:
    """The model of that name or path, as by `read_model`; ScenarioError too if it cannot be run and measured here."""
    model = read_model(name_or_path)
    model.check_runs()
    return model


def read_model(name_or_path: str) -> ModelSpec:
    """The model of that catalog name or Hugging Face id, or of the config.json at that path (a file, or the folder that
    holds it).

    An id that the catalog lacks, with `@REVISION` behind it if one is meant, is looked up by huggingface_hub, where
    that package is installed: in its cache, then on the hub (`hub.config_of`).

    A file's model is named after the file; after its folder where it is called config.json.

    ScenarioError if there is none of these, or if the file is not understood.
    """
    if name_or_path in MODELS:
        return MODELS[name_or_path]
    path = Path(name_or_path)
    if name_or_path in _REPOSITORIES and not path.exists():
        return replace(MODELS[_REPOSITORIES[name_or_path]], name=name_or_path)
    if name_or_path in _checkpoints() and not path.exists():
        return ModelSpec.from_config(_checkpoints()[name_or_path], name_or_path)
    try:
        if path.is_dir():
            path /= "config.json"
            if not path.is_file():
                raise ScenarioError(f"model: {path}: no such file. Give the folder of a Hugging Face model, or a name.")
        keys = _read_object(path)
    except FileNotFoundError:
        if isinstance(path := config_of(name_or_path), Path):
            return replace(_read_config(path), name=name_or_path)
        missing = f"model: {name_or_path} is neither in the catalog nor a file."
        raise ScenarioError(f"{missing} {_like(name_or_path)} {path}".rstrip()) from None
    spec = _read_config(path, keys)
    return replace(spec, name=path.resolve().parent.name if path.name == "config.json" else path.stem)


def _read_config(path: Path, keys: dict[str, object] | None = None) -> ModelSpec:
    """The model of the config.json at `path`, whose `keys` are read if they are not given."""
    keys = _read_object(path) if keys is None else keys
    beside = path.with_name("hf_quant_config.json")  # of modelopt checkpoints
    if "quantization_config" not in keys and beside.is_file():
        keys["hf_quant_config"] = _read_object(beside)
    return ModelSpec.from_config(keys, str(path))


def _read_object(path: Path) -> dict[str, object]:
    """The JSON object in that file. ScenarioError if it holds none; FileNotFoundError if there is no file."""
    try:
        value: object = read_json(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: cannot be read: {reason_text(error)}. Give a Hugging Face config.json.") from None
    if not isinstance(value, dict):
        raise ScenarioError(f"{path}: holds no JSON object. Give a Hugging Face config.json.")
    return cast("dict[str, object]", value)


def _like(name: str) -> str:
    """The advice for a name that is not known: the model most like it, else all of the catalog."""
    known = {each.lower(): each for each in (*MODELS, *checkpoint_names())}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    ids = "the Hugging Face ids that batchsim catalog lists, and any config.json"
    return f"Did you mean {known[near[0]]}?" if near else f"Known are {', '.join(MODELS)}, {ids}."
