"""Clients that others wrote, against the simulated server: what they read is what it recorded.

`make real-clients` installs them, each in an environment of its own under .clients; without, these tests skip.
"""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
SCENARIO = """\
model: llama-3.1-8b
cost: {kind: linear, base: 8ms, per_token: 20us, per_sequence: 50us}
kv: {tokens: 400000}
max_model_len: 4096
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths: {prompt: {kind: fixed, tokens: 100}, output: {kind: fixed, tokens: 50}}
  output_cap: exact
  requests: 50
policies:
  vllm: {max_num_seqs: 256, max_num_batched_tokens: 2048, enable_prefix_caching: false}
slo: ttft<1s @ 99%
seeds: 1
"""


def program(client: str, name: str) -> Path:
    """A program of a client's environment; skips where that is not installed."""
    path = ROOT / ".clients" / client / "bin" / name
    if not path.exists():
        pytest.skip(f"{client} is not installed: make real-clients")
    return path


@dataclass
class Served:
    """A server under way: where it is, and once it has ended the requests that it had, by sending, in ns."""

    url: str
    rows: list[dict[str, int]]

    def column(self, name: str) -> list[int]:
        """A column of the requests."""
        return [row[name] for row in self.rows]


@contextmanager
def server(folder: Path, scenario: str = SCENARIO) -> Iterator[Served]:
    """A server of `scenario` in a process of its own, which ends with the block and must have ended well."""
    (folder / "served.yaml").write_text(scenario)
    command = [sys.executable, "-m", "batchsim", "serve", "served.yaml", "--port", "0", "--served-model-name", "m"]
    log = folder / "log.txt"
    with log.open("w") as stdout:
        process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=stdout, text=True)
    assert process.stderr is not None
    try:
        url = process.stderr.readline().split()[0]
        assert url.startswith("http://127.0.0.1:"), url
        served = Served(url.removesuffix("/v1"), [])
        yield served
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.wait()
    (table,) = folder.glob("results/*-served/received/*.csv")
    with table.open() as lines:
        served.rows += [
            {key: int(value) for key, value in row.items() if key != "status"} for row in csv.DictReader(lines)
        ]


def ran(command: list[str | Path], folder: Path) -> str:
    """What a client prints, which must end well."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_curl_streams_to_the_end(tmp_path: Path) -> None:
    """curl gets each token as an event, and the results folder has its request."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    with server(tmp_path) as served:
        asked = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "stream": True}
        text = ran([curl, "-sSN", f"{served.url}/v1/completions", "-d", json.dumps(asked)], tmp_path)
        so_far = ran([curl, "-sS", f"{served.url}/batchsim/results"], tmp_path)
    assert text.count("data: ") == 6 and text.endswith("data: [DONE]\n\n")
    assert [(row["prompt_tokens"], row["output_tokens"]) for row in served.rows] == [(3, 5)]
    (table,) = tmp_path.glob("results/*-served/received/*.csv")
    assert so_far == table.read_text()


def _openai(folder: Path, count: int, rate_rps: float) -> tuple[dict[str, Any], Served]:
    python = program("openai", "python")
    with server(folder) as served:
        script = Path(__file__).parent / "clients" / "openai_client.py"
        told = ran([python, script, f"{served.url}/v1", "m", str(count), str(rate_rps)], folder)
    return json.loads(told), served


@pytest.mark.slow
def test_the_openai_package_reads_every_answer(tmp_path: Path) -> None:
    """Models, choices, streams with usage, and errors as the package's own classes."""
    told, served = _openai(tmp_path, 5, 20)
    words = told["words"]
    assert words["models"] == ["m"] and words["choices"] == ["assistant"] * 2
    assert words["errors"] == {
        "logprobs": ["BadRequestError", 400, "logprobs"],
        "max_tokens": ["BadRequestError", 400, "max_tokens"],
        "model": ["NotFoundError", 404, "model"],
    }
    assert [each["tokens"] for each in told["timed"]] == served.column("output_tokens")[-5:]
