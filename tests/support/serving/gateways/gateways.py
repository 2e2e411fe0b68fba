"""The gateways of others that are tried before simulated replicas: how each is started, and where `make real-clients`
has put it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.serving.gateways.processes import HOST, Replica, await_url, free_ports, process

VOCABULARY = 128_256
"""That of the model in SCENARIO."""
KEY = "sk-0123456789abcdef0123456789abcdef"
Command = Callable[[Path, int, int, Sequence[Replica]], list[str | Path]]


@dataclass(frozen=True)
class Gateway:
    """A gateway: its folder in .clients, the program there, its options by (folder, port, a second port, replicas), the
    path that answers once it is up, whether it is asked with `KEY`, and its environment. `workers`: processes that it
    needs beside, one for each replica, by the options of its interpreter."""

    client: str
    program: str
    options: Command
    ready: str = "/health"
    has_key: bool = False
    env: tuple[tuple[str, str], ...] = ()
    workers: Callable[[Path, Replica], list[str | Path]] | None = None
    rate: float = 20.0
    """Requests a second that it passes on without a queue of its own, on a core that others use too."""


def _router(policy: str, *more: str) -> Command:
    def options(folder: Path, port: int, metrics: int, replicas: Sequence[Replica]) -> list[str | Path]:
        where = ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(metrics)]
        checks = ["--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"]
        checks += ["--health-failure-threshold", "1"]
        return [*where, *checks, "--policy", policy, *more, "--worker-urls", *(each.url for each in replicas)]

    return options


def _sglang(policy: str, *more: str) -> Command:
    made = _router(policy, *more)
    return lambda *given: ["-m", "sglang_router.launch_router", *made(*given)]


def _kv_aware(folder: Path, port: int, metrics: int, replicas: Sequence[Replica]) -> list[str | Path]:
    sources = [f"--kv-event-source={each.url}={each.events}" for each in replicas]
    sources += [f"--kv-event-replay-source={each.url}={each.replays}" for each in replicas]
    return [*_router("kv_aware")(folder, port, metrics, replicas), *sources, "--kv-event-model", "m"]


def _litellm(folder: Path, port: int, metrics: int, replicas: Sequence[Replica]) -> list[str | Path]:
    models = [
        {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": f"{each.url}/v1", "api_key": "none"}}
        for each in replicas
    ]
    router = {"routing_strategy": "simple-shuffle", "num_retries": 3, "allowed_fails": 0, "cooldown_time": 60}
    config = {"model_list": models, "router_settings": router, "litellm_settings": {"telemetry": False}}
    (folder / "litellm.yaml").write_text(json.dumps(config))
    return ["--config", folder / "litellm.yaml", "--host", HOST, "--port", str(port)]


def _dynamo(folder: Path, port: int, metrics: int, replicas: Sequence[Replica]) -> list[str | Path]:
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    router = ["--router-mode", "kv", "--no-router-kv-events", "--kv-cache-block-size", "16", "--migration-limit", "3"]
    return ["-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port), *planes, *router]


def _dynamo_worker(folder: Path, replica: Replica) -> list[str | Path]:
    return [ROOT / "tests/support/serving/gateways/dynamo_worker.py", replica.url, _tokenizer(folder / "model")]


def _tokenizer(folder: Path) -> Path:
    """The folder of a model whose tokens are the words of numbers, as those of simulated answers."""
    if folder.exists():
        return folder
    folder.mkdir()
    end = VOCABULARY - 1
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"eos_token_id": end, "bos_token_id": end}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, **shape}
    none = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    words = {"type": "WordLevel", "vocab": {str(i): i for i in range(end)} | {"[UNK]": end}, "unk_token": "[UNK]"}
    tokens = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": words,
        **none,
    }
    template = "99 {% for message in messages %}{{ message.content }} {% endfor %}98"
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "chat_template": template}
    for name, value in (
        ("config", config | ends | {"vocab_size": VOCABULARY}),
        ("generation_config", ends),
        ("tokenizer", tokens),
        ("tokenizer_config", kind | {"model_max_length": 4096}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


_ALONE = (("LITELLM_MASTER_KEY", KEY), ("LITELLM_LOCAL_MODEL_COST_MAP", "True"))
_LOOPBACK = tuple((name, HOST) for name in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"))
GATEWAYS = {
    "sglang-router cache_aware": Gateway("sglang-router", "python", _sglang("cache_aware")),
    "sglang-router round_robin": Gateway("sglang-router", "python", _sglang("round_robin")),
    "vllm-router cache_aware": Gateway("vllm-router", "vllm-router", _router("cache_aware")),
    "vllm-router kv_aware": Gateway("vllm-router", "vllm-router", _kv_aware),
    "litellm": Gateway("litellm", "litellm", _litellm, "/health/liveliness", has_key=True, env=_ALONE, rate=10.0),
    "ai-dynamo kv": Gateway("ai-dynamo", "python", _dynamo, "/v1/models/m", env=_LOOPBACK, workers=_dynamo_worker),
}


@dataclass(frozen=True)
class Front:
    """A gateway that is up."""

    url: str
    headers: dict[str, str]
    rate: float


@contextmanager
def front(gateway: Gateway, folder: Path, replicas: Sequence[Replica]) -> Iterator[Front]:
    """`gateway` before `replicas`, which ends with the block; skips where it is not installed."""
    program = ROOT / ".clients" / gateway.client / "bin" / gateway.program
    if not program.exists():
        pytest.skip(f"{gateway.client} is not installed: make real-clients")
    port, metrics = free_ports(2)
    command = [program, *gateway.options(folder, port, metrics, replicas)]
    log = folder / f"{gateway.client}.txt"
    env = {"PYTHONPATH": "", "NO_PROXY": "*", "DYN_FILE_KV": str(folder / "discovery"), **dict(gateway.env)}
    with ExitStack() as stack:
        started = stack.enter_context(process(command, folder, log, env))
        for number, each in enumerate(replicas if gateway.workers else ()):
            assert gateway.workers is not None
            beside = [program, *gateway.workers(folder, each)]
            stack.enter_context(process(beside, folder, folder / f"worker-{number}.txt", env))
        url = f"http://{HOST}:{port}"
        await_url(f"{url}{gateway.ready}", started, log)
        yield Front(url, {"authorization": f"Bearer {KEY}"} if gateway.has_key else {}, gateway.rate)
