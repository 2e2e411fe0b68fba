"""LoRA adapters that clients load and unload by hand, as vLLM has it with VLLM_ALLOW_RUNTIME_LORA_UPDATING.

Bodies, answers and errors: vllm/entrypoints/serve/lora and openai/models/serving.py of vLLM 0.32.0. Simplifies: the
first step that needs an adapter reads it from disk, where vLLM does so during the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import shown
from batchsim.kernel.types import MISSING
from batchsim.serve.api_error import ApiError
from batchsim.serve.body import MAX_USER, Body
from batchsim.serve.live_engine import LiveEngine
from batchsim.serve.realtime import RealtimeSimulation

MOST_LOADS = 4096
"""Adapters that a server takes in its life, unloaded ones too: the records keep their names."""


@dataclass(frozen=True)
class _Loaded:
    path: str
    number: int


class ServedAdapters:
    """The adapters that are loaded, by name; none at the start. `model`: the name of the base model."""

    def __init__(self, backend: RealtimeSimulation | LiveEngine, model: str) -> None:
        self._backend, self._model = backend, model
        self._loaded: dict[str, _Loaded] = {}
        memory = backend.spec.config.traits.adapters
        self._takes = memory is not None and backend.setup.scenario.file.workload.lora_rank is not None
        if memory is not None and self._takes:
            backend.metrics.max_lora = memory.slots

    def number(self, name: str) -> int:
        """The number of the adapter that a request names as its model, MISSING for the base model. ApiError 404."""
        if name in ("", self._model):
            return MISSING
        if name not in self._loaded:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")
        return self._loaded[name].number

    def cards(self) -> list[dict[str, Any]]:
        """The adapters as /v1/models lists them."""
        return [
            {"id": name, "root": loaded.path, "parent": self._model, "max_model_len": None}
            for name, loaded in self._loaded.items()
        ]

    def load(self, body: Body) -> str:
        """The answer to /v1/load_lora_adapter. ApiError 400 for what vLLM refuses, and what is not simulated."""
        backend = self._backend
        name, path, again = body.text("lora_name"), body.text("lora_path"), body.flag("load_inplace")
        if not name or not path:
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
        if len(name) > MAX_USER or not name.isprintable() or "," in name:
            known = f"at most {MAX_USER} printable letters, no comma"
            raise ApiError(400, f"lora_name {shown(name)} is no name: {known}. Give another.", "lora_name")
        if name == self._model:
            raise _invalid(f"The lora adapter '{name}' conflicts with a served base model.")
        if body.flag("is_3d_lora_weight"):
            raise ApiError(400, "is_3d_lora_weight: adapters of experts are not simulated. Leave it out.")
        if not again and name in self._loaded:
            raise _invalid(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
                " 'load_inplace' to True."
            )
        if isinstance(backend, LiveEngine) or not self._takes or backend.spec.kind != "vllm":
            raise ApiError(
                400,
                "adapters are loaded by policy vllm alone, simulated, in a scenario with workload.loras. Serve one.",
            )
        if backend.kv_events is not None:
            raise ApiError(400, "KV events of adapters are not published. Serve without --kv-events-config.")
        if (known := self._loaded.get(name)) is None:
            if len(backend.adapter_names) >= MOST_LOADS:
                raise ApiError(400, f"{MOST_LOADS:,} adapters were loaded, no more are taken. Start a new server.")
            known = _Loaded(path, len(backend.adapter_names))
            backend.name_adapters((*backend.adapter_names, name))
        self._loaded[name] = _Loaded(path, known.number)
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: Body) -> str:
        """The answer to /v1/unload_lora_adapter; requests at hand go on. ApiError 400 without a name, 404 for one that
        is not loaded."""
        name = body.text("lora_name")
        body.whole("lora_int_id", 0)
        if not name:
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._loaded:
            raise ApiError(404, f"The lora adapter '{name[:200]}' cannot be found.")
        del self._loaded[name]
        return f"Success: LoRA adapter '{name}' removed successfully."


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, kind="InvalidUserInput")
