"""What gateways ask an engine about itself, as SGLang answers it: /model_info, /server_info, /get_load.

Only fields that a simulated engine has; names as in sglang/srt/entrypoints/http_server.py of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchsim.base.errors import shown
from batchsim.base.version import VERSION
from batchsim.kernel.core import EngineCore
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.setup import Setup
from batchsim.serve.api_error import ApiError
from batchsim.serve.incoming import HttpRequest

_RANK = "x-data-parallel-rank"


def model_info(setup: Setup, spec: PolicySpec, served_name: str, cores: Mapping[int, EngineCore]) -> dict[str, Any]:
    """The model: `served_name` is its name to clients."""
    return {
        "model_path": setup.model.name,
        "tokenizer_path": setup.model.name,
        "served_model_name": served_name,
        "is_generation": not spec.config.traits.pooling,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def server_info(setup: Setup, spec: PolicySpec, served_name: str, cores: Mapping[int, EngineCore]) -> dict[str, Any]:
    """The server: each replica is a data parallel rank of it."""
    deployment = setup.cost.deployment
    return {
        "model_path": setup.model.name,
        "served_model_name": served_name,
        "tp_size": 1 if deployment is None else deployment.tp,
        "dp_size": num_ranks(setup),
        "context_length": setup.max_model_len,
        "disaggregation_mode": "null",
        "load_balance_method": "round_robin",
        "max_total_num_tokens": {rank: _num_tokens(core) for rank, core in cores.items()}.get(0, 0),
        "internal_states": [
            {"dp_rank": rank, "max_total_num_tokens": _num_tokens(core)} for rank, core in sorted(cores.items())
        ],
        "version": f"batchsim {VERSION}",
    }


def loads(setup: Setup, spec: PolicySpec, served_name: str, cores: Mapping[int, EngineCore]) -> list[dict[str, int]]:
    """The requests and the KV tokens in use of each replica that is up."""
    rows: list[dict[str, int]] = []
    for rank, core in sorted(cores.items()):
        kv, waiting = core.scheduler.kv, core.num_waiting
        rows.append(
            {
                "dp_rank": rank,
                "num_reqs": core.scheduler.num_running + waiting,
                "num_waiting_reqs": waiting,
                "num_tokens": (kv.num_blocks - kv.num_free) * kv.block_size,
            }
        )
    return rows


About = Callable[[Setup, PolicySpec, str, Mapping[int, EngineCore]], Any]
ABOUT: dict[str, About] = {
    "/model_info": model_info,
    "/get_model_info": model_info,
    "/server_info": server_info,
    "/get_server_info": server_info,
    "/get_load": loads,
}
"""What is answered at each path, of a setup, the policy served, the name to clients, the engines that are up."""


def num_ranks(setup: Setup) -> int:
    """The replicas that there are at the start."""
    replicas = setup.scenario.file.replicas
    return 1 if replicas is None else replicas.plan.count


def asked_rank(request: HttpRequest, in_body: int | None, ranks: int) -> int | None:
    """The rank that must answer, by vLLM's header X-data-parallel-rank or SGLang's field data_parallel_rank; None: any.

    ApiError 400 for one that there is not.
    """
    text = request.headers.get(_RANK)
    name, value = ("data_parallel_rank", in_body) if text is None else ("X-data-parallel-rank", None)
    if text is not None:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise ApiError(400, f"X-data-parallel-rank is {shown(text)}, no number from 0 on.", "X-data-parallel-rank")
        value = int(text)
    if value is not None and value >= ranks:
        raise ApiError(400, f"data_parallel_rank {value} is out of range [0, {ranks}).", name)
    return value


def _num_tokens(core: EngineCore) -> int:
    return core.scheduler.kv.num_blocks * core.scheduler.kv.block_size
