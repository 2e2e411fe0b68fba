"""The engines that run here without a GPU: how each is installed, given a model, started, and written as a scenario."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from batchsim.base.errors import CalibrationError, nearest
from tools.real_engines.models import Shape, write_gguf, write_hugging_face
from tools.real_engines.server import HOST, Server, free_port, running

MODEL = "tiny"
"""The name that every server gives its model."""


@dataclass(frozen=True)
class Engine(ABC):
    """An engine. `name` is the policy that simulates it, `package` what of pip it comes with; `slots` the most requests
    that it runs at once, `start_s` the longest that its start may take."""

    name: str
    package: str
    slots: int
    start_s: float
    shape: Shape = field(default_factory=Shape)
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @abstractmethod
    def python(self) -> Path:
        """The interpreter that has the engine, if there is one. CalibrationError with what installs it."""

    @abstractmethod
    def write_model(self, folder: Path) -> Path: ...
    @abstractmethod
    def command(self, python: Path, model: Path, port: int) -> list[str]: ...
    @abstractmethod
    def scenario(self) -> str:
        """The engine as YAML for `batchsim calibrate`, with the free form as its cost."""


@dataclass(frozen=True)
class LlamaCpp(Engine):
    """llama.cpp's server in this interpreter (`pip install '.[engines]'`), on one thread, so that the client has a core
    of its own. Its weights have 32 bits: with 16 a step of one token is computed by other kernels than one of two."""

    name: str = "llama_cpp"
    package: str = "xllamacpp"
    slots: int = 8
    start_s: float = 60.0
    context: int = 8192  # tokens of all slots together
    n_batch: int = 512
    n_ubatch: int = 256
    threads: int = 1

    def python(self) -> Path:
        return _with_package(Path(sys.executable), self.package, "Run `pip install '.[engines]'`.")

    def write_model(self, folder: Path) -> Path:
        path = folder / "tiny.gguf"
        write_gguf(self.shape, path)
        return path

    def command(self, python: Path, model: Path, port: int) -> list[str]:
        numbers = (port, self.slots, self.context, self.n_batch, self.n_ubatch, self.threads)
        return [str(python), str(Path(__file__).with_name("llama_server.py")), str(model), *map(str, numbers)]

    def scenario(self) -> str:
        policy = f"llama_cpp: {{n_parallel: {self.slots}, n_batch: {self.n_batch}, n_ubatch: {self.n_ubatch}}}"
        longest = self.context // self.slots
        return _SCENARIO.format(model=MODEL, policy=policy, kv=self.context, block=1, longest=longest)


_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
_CORES = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_ENVIRONMENT = _OFFLINE | _CORES | {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""Of vLLM's server; KV space in GiB."""


@dataclass(frozen=True)
class Vllm(Engine):
    """vLLM's server of its own interpreter in HOME (`make real-engines` installs 2 GB there), on one thread.

    Its model runs in the scheduler's process: with a worker of its own, as is its default on a CPU, the scheduler waits
    for each step in a loop that keeps the second core busy, and client and frontend get none of it."""

    name: str = "vllm"
    package: str = "vllm-cpu"
    slots: int = 16
    start_s: float = 300.0
    shape: Shape = field(default_factory=lambda: Shape(8, 512, 8, intermediate_size=1536))
    max_model_len: int = 2048
    max_num_batched_tokens: int = 512
    block_size: int = 32
    environment: Mapping[str, str] = field(default_factory=lambda: _ENVIRONMENT)

    def python(self) -> Path:
        return _with_package(HOME / "bin" / "python", self.package, "Run `make real-engines`: it takes 2 GB.")

    def write_model(self, folder: Path) -> Path:
        path = folder / MODEL
        write_hugging_face(self.shape, path)
        return path

    def command(self, python: Path, model: Path, port: int) -> list[str]:
        uniproc = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        words = f"""-m vllm.entrypoints.openai.api_server --enforce-eager --no-enable-prefix-caching --load-format dummy
            --served-model-name {MODEL} --host {HOST} --port {port} --dtype float32 --generation-config vllm
            --max-model-len {self.max_model_len} --max-num-seqs {self.slots} --block-size {self.block_size}
            --max-num-batched-tokens {self.max_num_batched_tokens} --distributed-executor-backend {uniproc}"""
        return [str(python), *words.split(), "--model", str(model)]

    def scenario(self) -> str:
        knobs = f"{{max_num_seqs: {self.slots}, max_num_batched_tokens: {self.max_num_batched_tokens}"
        policy = f"vllm: {knobs}, enable_prefix_caching: false, async_scheduling: false}}"
        kv = self.slots * self.max_model_len  # the server has room for more: it never fills
        return _SCENARIO.format(model=MODEL, policy=policy, kv=kv, block=self.block_size, longest=self.max_model_len)


_SCENARIO = """\
model: {model}
cost: {{kind: free}}
kv: {{tokens: {kv}, block_size: {block}}}
max_model_len: {longest}
workload:
  arrivals: {{kind: poisson, mean_rate: 1/s}}
  lengths: {{prompt: {{kind: uniform, min: 64, max: 256}}, output: {{kind: uniform, min: 16, max: 64}}}}
  output_cap: {longest}
  requests: 100
policies:
  {policy}
load: {{mean_rate: [1/s]}}
slo: ttft<1s
seeds: 1
"""

HOME = Path(__file__).parents[2] / ".vllm"
"""Where `make real-engines` puts vLLM."""

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (LlamaCpp(), Vllm())}


def engine_of(name: str) -> Engine:
    """The engine called `name`. CalibrationError for an unknown one."""
    if name not in ENGINES:
        raise CalibrationError(f"{name}: not an engine that runs here. {nearest(name, ENGINES)}")
    return ENGINES[name]


@contextmanager
def serving(engine: Engine, folder: Path) -> Iterator[Server]:
    """The engine's server with its model. What it prints is in `folder`/server.log, beside the model's config."""
    python = engine.python()
    write_hugging_face(engine.shape, folder / MODEL)
    port = free_port()
    log = folder / "server.log"
    with tempfile.TemporaryDirectory() as models:
        command = engine.command(python, engine.write_model(Path(models)), port)
        with running(command, port, log, environment=engine.environment, start_s=engine.start_s) as server:
            yield server


def version(engine: Engine) -> str:
    """The package of the engine and its version, as its interpreter says."""
    return f"{engine.package} {_version(engine.python(), engine.package)}"


def _version(python: Path, package: str) -> str:
    """The version of a package of an interpreter; "" where there is none of the two."""
    code = f"from importlib.metadata import version; print(version('{package}'))"
    found = python.exists() and subprocess.run([python, "-c", code], env=os.environ, capture_output=True, text=True)
    return found.stdout.strip() if found else ""


def _with_package(python: Path, package: str, advice: str) -> Path:
    if not _version(python, package):
        raise CalibrationError(f"{python}: has no {package}. {advice}")
    return python
