"""The recommended group as manifests where prefill and decode are apart: Dynamo's graph, and values of llm-d's chart.

Sources: Dynamo 1.4, examples and documentation of DynamoGraphDeployment, nvidia.com/v1alpha1, with
`--disaggregation-mode` of its workers; llm-d's Helm chart llm-d-modelservice, whose README and examples name
`routing.proxy`, `prefill` and `decode`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

DYNAMO, LLM_D = "dynamo", "llm_d"
"""Names of the tables that have the manifests, line by line."""
_HEADS = {"vllm": ("vllm", "serve"), "sglang": ("python", "-m", "sglang.launch_server")}
_RUNTIMES = {"vllm": "nvcr.io/nvidia/ai-dynamo/vllm-runtime", "sglang": "nvcr.io/nvidia/ai-dynamo/sglang-runtime"}
_CAMEL = {"vllm": "Vllm", "sglang": "SGLang"}
_TAG = "1.4.0"
_PORT, _DECODE_PORT = 8000, 8200
"""Of a pod; of the decode engine behind the sidecar of its pod, which has the first."""


class Side(NamedTuple):
    """The engines of `prefill` or `decode`: their number, the GPUs of each, how many of them cut every layer, and
    the words of the command line that starts one, with what it does not say."""

    name: str
    replicas: int
    num_gpus: int
    tp: int
    line: str
    unsaid: tuple[str, ...]


def pool_manifests(engine: str, sides: Sequence[Side], router: str) -> dict[str, str]:
    """The manifests by their tables, as YAML; none for an engine that neither of the two starts. Requests were
    simulated to go to each side by `router`."""
    if engine not in _HEADS:
        return {}
    notes = [f"{side.name}: {side.replicas} × {side.num_gpus} GPU" for side in sides]
    notes += [f"simulated with engines of each side chosen by {router}: the gateway's own choice may differ"]
    notes += [f"{side.name}, not said by a flag: {text}" for side in sides for text in side.unsaid]
    made = {DYNAMO: _text([*notes, f"name the tag whose {engine} was measured"], _graph(engine, sides))}
    if engine == "vllm":
        head = ["values of the Helm chart llm-d-modelservice; name the tag whose vllm was measured"]
        made[LLM_D] = _text([*head, *notes], _values(sides))
    return made


def _text(notes: Sequence[str], content: Any) -> str:
    return "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(content, sort_keys=False, width=math.inf)


def _graph(engine: str, sides: Sequence[Side]) -> dict[str, Any]:
    """Dynamo's graph: a frontend, and the workers of each side."""
    image = f"{_RUNTIMES[engine]}:{_TAG}"
    services: dict[str, Any] = {
        "Frontend": {
            "componentType": "frontend",
            "replicas": 1,
            "extraPodSpec": {"mainContainer": {"image": image}},
        }
    }
    for side in sides:
        services[f"{_CAMEL[engine]}{side.name.capitalize()}Worker"] = {
            "componentType": "worker",
            "subComponentType": side.name,
            "replicas": side.replicas,
            "resources": {"limits": {"gpu": str(side.num_gpus)}},
            "extraPodSpec": {
                "mainContainer": {
                    "image": image,
                    "command": ["python3", "-m", f"dynamo.{engine}"],
                    "args": _dynamo_words(engine, side),
                }
            },
        }
    name = f"{engine}-disagg"
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name},
        "spec": {"services": services},
    }


def _dynamo_words(engine: str, side: Side) -> list[str]:
    """What Dynamo's worker is started with: the engine's own flags, and its side."""
    words = _words(engine, side)
    if engine == "vllm":
        return ["--model", *words, "--disaggregation-mode", side.name]
    return words  # which name the side already


def _words(engine: str, side: Side) -> list[str]:
    return shlex.split(side.line)[len(_HEADS[engine]) :]


def _values(sides: Sequence[Side]) -> dict[str, Any]:
    """llm-d's values: both sides, and the sidecar that asks a prefill engine first."""
    model = _words("vllm", sides[0])[0]
    values: dict[str, Any] = {
        "modelArtifacts": {"uri": f"hf://{model}", "name": model},
        "routing": {"servicePort": _PORT, "proxy": {"enabled": True, "connector": "nixlv2"}},
    }
    for side in sides:
        port = _PORT if side.name == "prefill" else _DECODE_PORT
        values[side.name] = {
            "create": True,
            "replicas": side.replicas,
            "parallelism": {"tensor": side.tp},
            "containers": [
                {
                    "name": "vllm",
                    "image": "ghcr.io/llm-d/llm-d-cuda:latest",
                    "modelCommand": "vllmServe",
                    "args": _without_tp(_words("vllm", side)[1:]),
                    "ports": [{"containerPort": port, "protocol": "TCP"}],
                }
            ],
        }
    return values


def _without_tp(words: list[str]) -> list[str]:
    """The words without the GPUs that cut every layer, of which the chart writes the flag."""
    text = re.sub(r"(^|\0)--tensor-parallel-size\0\d+", "", "\0".join(words))
    return [word for word in text.split("\0") if word]
