"""`batchsim serve`: what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.support.tiny_scenario import TINY, batchsim

pytest.importorskip("h11", reason="batchsim serve needs h11")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has 2 policies, an engine runs one. Write --policy and one of static, continuous."),
        (["--policy", "sjf"], "has no policy sjf"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: others could use the server. Add --api-key"),
        (["--api-key", "k\n"], "--api-key: has a line break or white space at an end, which no client can send."),
        (["--served-model-name", "a\ud800"], "--served-model-name 'a\\ud800': is no name. Write printable letters."),
        (["--policy", "static", "--set", "policies.static.batch_size=0"], "batch_size"),
        (["--policy", "static", "--device", "cpu"], "--device cpu: a simulated engine has none. Add --engine live"),
        (["--policy", "static", "--weights", "w"], "--weights w: a simulated engine has none. Add --engine live"),
        (["--policy", "static", "--engine", "live", "--speed", "2"], "--speed 2: a model runs as fast as it does."),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: list[str], message: str, scenario: Path) -> None:
    """Bad input ends with 2 and one line that says what to do."""
    done = batchsim("serve", scenario, *arguments)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_without_torch_a_live_engine_says_what_to_install(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else find_spec(name))
    done = batchsim("serve", scenario, "--policy", "continuous", "--engine", "live")
    told = "batchsim serve --engine live: needs torch, which is not installed. pip install 'batchsim[live]'\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", told)


def test_a_port_in_use_is_one_line(scenario: Path, tmp_path: Path) -> None:
    """Where another listens already, that is said."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = batchsim("serve", scenario, "--policy", "static", "--port", port, "--out", tmp_path)
    told = f"--port {port}: Address already in use at 127.0.0.1. Give another.\n"
    assert (done.exit_code, done.stderr) == (2, told)


def test_an_address_of_another_machine_is_one_line(scenario: Path, tmp_path: Path) -> None:
    """An address that is not this machine's is the mistake that is told, not the port. 192.0.2.1 is nobody's."""
    options = ["--policy", "static", "--host", "192.0.2.1", "--api-key", "k", "--out", tmp_path]
    done = batchsim("serve", scenario, *options)
    assert done.exit_code == 2 and done.stderr.startswith("--host 192.0.2.1: ") and done.stderr.count("\n") == 1


def _of_curl(line: list[str]) -> Request:
    """The request of a curl command of words: its address, its one header and its body."""
    _, address, _, header, _, body = line
    return Request(address, body.encode(), dict([header.split(": ")]))


@pytest.mark.slow
def test_sigterm_answers_what_is_open_and_leaves_results(scenario: Path, tmp_path: Path) -> None:
    """A request that is open at SIGTERM is answered whole; the folder printed at the end holds it."""
    command = [sys.executable, "-m", "batchsim", "serve", str(scenario), "--policy", "continuous", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    url = process.stderr.readline().split()[0]
    _, *tried = shlex.split(process.stderr.readline())
    assert tried[0] == "curl" and json.loads(urlopen(_of_curl(tried)).read())["usage"]["completion_tokens"] <= 16
    assert url.removesuffix("/v1") + "/metrics;" in process.stderr.readline()
    body = json.dumps({"prompt": [1, 2], "max_tokens": 50, "ignore_eos": True, "stream": True}).encode()
    with urlopen(Request(f"{url}/completions", body)) as answer:
        first = answer.readline()
        os.kill(process.pid, signal.SIGTERM)
        rest = answer.read()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (first + rest).count(b'"index"') == 50 and rest.endswith(b"data: [DONE]\n\n")
    (manifest,) = tmp_path.glob("mine-served/*/manifest.json")
    assert "in SLO" in out and "2 requests came to an engine" in out
    assert "divided by" not in out and "CV" not in out  # of a trace as it came there is nothing to say
    (received,) = (tmp_path / "mine-served").glob("received/*.csv")
    assert str(received) in out.replace("\n", "") and json.loads(manifest.read_text())["served"]["speed"] == 1
