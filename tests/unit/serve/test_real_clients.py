"""Clients that others wrote, against the simulated server: what they read and measure is what it recorded.

`make real-clients` installs them, each in an environment of its own under .clients; without, these tests skip.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.serving.definitions import Kind, Ours, of_client, table
from tests.support.serving.empty_server import empty_server
from tools.real_engines.engines import Vllm
from tools.real_engines.models import write_hugging_face

pytest.importorskip("h11", reason="batchsim serve needs h11")

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


def ran(command: list[str | Path], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a client prints, which must end well."""
    env = None if environment is None else {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def tokenizer(folder: Path) -> dict[str, str]:
    """The environment in which a client finds the tokenizer own/words, a word a token, and no network."""
    model = folder / "hub" / "models--own--words"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    vocabulary = {"[UNK]": 0} | {str(number): number for number in range(1, 1000)}
    found = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (snapshot / "tokenizer.json").write_text(json.dumps(found))
    its = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "unk_token": "[UNK]"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(its))
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": ""}


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


def _openai(folder: Path, count: int, rate_rps: float, *others: str) -> tuple[dict[str, Any], Served]:
    python = program("openai", "python")
    with server(folder) as served:
        script = Path(__file__).parent / "clients" / "openai_client.py"
        told = ran([python, script, f"{served.url}/v1", "m", str(count), str(rate_rps), *others], folder)
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
    assert [each["tokens"] for each in told["timed"][0]] == served.column("output_tokens")[-5:]


@pytest.mark.slow
def test_what_the_openai_package_can_send_is_served_or_refused_by_name(tmp_path: Path) -> None:
    """Of each parameter of a chat a good value is served, a bad or unsimulated one is 400 and names the parameter."""
    told, _ = _openai(tmp_path, 1, 20)
    given = told["words"]["given"]
    served = {asked for asked, said in given.items() if said.endswith("served")}
    refused = {asked: said for asked, said in given.items() if asked not in served}
    assert served == {
        json.dumps(each)
        for each in (
            {"n": 2},
            {"max_completion_tokens": 2},
            {"stop": "a"},
            {"seed": 7},
            {"temperature": 0},
            {"top_p": 0.5},
            {"logprobs": False},
            {"tools": []},
            {"tool_choice": "none"},
            {"response_format": {"type": "text"}},
            {"modalities": ["text"]},
            {"user": "me"},
            {"store": False},
            {"metadata": {"a": "b"}},
            {"service_tier": "auto"},
        )
    }
    assert given['{"n": 2}'] == "2 served" and len(refused) == 26
    assert refused == {asked: f"400 {next(iter(json.loads(asked)))}" for asked in refused}


BOUND_S: dict[Kind, float] = {"first token": 0.002, "latency": 0.002, "token": 0.0003, "rate": 0}
"""What a client may read beyond its own work, in s, where 2 % is less."""
OWN_S: dict[Kind, float] = {**BOUND_S, "first token": 0.005, "latency": 0.005}
"""What its own work may be, so that it hides no other definition: on two cores a first token was read 1.4 to 3.5 ms
after it was due at a server that does nothing but write."""
SHORT, LONG = 4, 30  # tokens of an answer
SHORT_TOKEN_S = 0.002
"""In place of a token's in both where answers have SHORT tokens: what the first one is late is spread over few gaps."""
RATES = [(10, LONG), (20, LONG), (100, SHORT), (200, SHORT), (100, LONG), (200, LONG)]
CROWDED = (200, LONG)
"""Where two cores are full, 6,000 tokens a second: a client's own work is 10 ms and more. Rates alone are compared."""
Metrics = dict[str, float]  # by a client's names, in s or 1/s
Rows = list[dict[str, int]]


def off(client: str, told: Metrics, rows: Rows) -> Metrics:
    """By how much more than `rows` say `client` has `told` of each of its metrics in the docs' table."""
    ours = Ours.of(rows)
    return {each.name: told[each.name] - each.value(ours) for each in of_client(client)}


def check(client: str, told: Metrics, rows: Rows, own: Metrics, load: tuple[int, int] = RATES[0]) -> None:
    """Every metric of `client` is what `rows` say, but for its `own` work, which is little, and 2 % or its bound."""
    ours, wrong = Ours.of(rows), []
    more = off(client, told, rows)
    for each in of_client(client):
        expected, its_own = each.value(ours), 0.0 if each.kind == "rate" else own[each.name]
        print(f"{client} {each.name}: {told[each.name]:.6g}, recorded {expected:.6g}, its own work {its_own:.3g}")
        if each.kind != "rate" and load == CROWDED:
            continue
        for far, bounds in ((its_own, OWN_S), (more[each.name] - its_own, BOUND_S)):
            bound_s = SHORT_TOKEN_S if each.kind == "token" and load[1] == SHORT else bounds[each.kind]
            if abs(far) > max(0.02 * expected, bound_s):
                wrong.append(f"{each.name}: {told[each.name]:.6g}, recorded {expected:.6g}, its own work {its_own:.3g}")
    assert not wrong, wrong


def compare(client: str, measure: Callable[[str], Metrics], folder: Path, requests: int, load: tuple[int, int]) -> Rows:
    """Checks `measure` of the simulated server; its own work shows at one that keeps the times of the same requests
    and does nothing but write. Returns all that the simulated one recorded."""
    with server(folder) as served:
        told = measure(served.url)
    rows = served.rows[-requests:]
    assert len(rows) == requests
    with empty_server(rows) as empty:
        alone = measure(empty.url)
    check(client, told, rows, off(client, alone, rows), load)
    return served.rows


def test_the_docs_have_the_table_of_definitions() -> None:
    """The table in docs/serve.md is the one by which the tests here compare."""
    assert table() in (ROOT / "docs/serve.md").read_text()


@pytest.mark.judged
def test_the_openai_package_measures_what_was_recorded(tmp_path: Path) -> None:
    """At 10 requests a second its times are the server's in the median, but for its own work: what that takes it shows
    meanwhile at a server that does nothing but write, which gets as many, in turn."""
    with empty_server() as empty:
        told, served = _openai(tmp_path, 200, 20, f"{empty.url}/v1")
    timed, beside = told["timed"]
    timed.sort(key=lambda each: int(each["id"].removeprefix("cmpl-"), 16))
    rows, written = served.rows[-200:], [empty.rows[each["id"]] for each in beside]
    own = off("openai", _read_by_openai(beside, written), written)
    check("openai", _read_by_openai(timed, rows), rows, own)


def _read_by_openai(timed: list[dict[str, Any]], rows: Rows) -> Metrics:
    """The medians of what was timed of the answers in `rows`, which have as many tokens."""
    assert [each["tokens"] for each in timed] == [row["output_tokens"] for row in rows]
    ttft, e2e, tokens = (np.array([each[name] for each in timed]) for name in ("ttft_s", "e2e_s", "tokens"))
    values = {"ttft": ttft, "tpot": (e2e - ttft) / (tokens - 1), "e2e": e2e}
    return {name: float(np.median(value)) for name, value in values.items()}


@pytest.mark.judged
@pytest.mark.parametrize(("rate_rps", "tokens"), RATES)
def test_aiperf_measures_what_was_recorded(tmp_path: Path, rate_rps: int, tokens: int) -> None:
    """Its metrics are what the docs' table says."""
    aiperf, environment = program("aiperf", "aiperf"), tokenizer(tmp_path / "hf")
    command = "profile --model m --endpoint-type completions --streaming --tokenizer own/words --isl 100"
    command += f" --osl {tokens} --osl-stddev {tokens // 6} --extra-inputs ignore_eos:true --use-server-token-count"
    command += f" --request-rate {rate_rps}"
    command += f" --request-count {15 * rate_rps} --random-seed 1 --ui none --artifact-dir told --url "
    lengths = list[float]()

    def measure(url: str) -> Metrics:
        ran([aiperf, *(command + url).split()], tmp_path, environment)
        told = json.loads((tmp_path / "told" / "profile_export_aiperf.json").read_text())
        assert told["request_count"]["avg"] == 15 * rate_rps
        lengths.append(told["output_sequence_length"]["avg"])
        return {
            each.name: told[each.name]["avg"] if each.kind == "rate" else told[each.name]["p50"] / 1e3
            for each in of_client("aiperf")
        }

    rows = compare("aiperf", measure, tmp_path, 15 * rate_rps, (rate_rps, tokens))
    assert len(rows) == 15 * rate_rps
    assert lengths == pytest.approx([np.mean([row["output_tokens"] for row in rows])] * 2)


ONE_WORKER = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}
"""Its ten processes are more than two cores have room for: at 200 requests a second they read first tokens after 34 ms
that were sent after 21, and one process after 24."""


@pytest.mark.judged
@pytest.mark.parametrize(("rate_rps", "tokens"), RATES)
def test_guidellm_measures_what_was_recorded(tmp_path: Path, rate_rps: int, tokens: int) -> None:
    """Its metrics are what the docs' table says."""
    guidellm, environment = program("guidellm", "guidellm"), tokenizer(tmp_path / "hf") | ONE_WORKER
    command = f" --profile kind=constant,rate={rate_rps} --constraint kind=max_requests,count={10 * rate_rps}"
    command += " --tokenizer kind=huggingface_auto,model=own/words --disable-progress --output kind=json,path=told.json"
    command += f" --data kind=synthetic_text,prompt_tokens=100,output_tokens={tokens}"

    def measure(url: str) -> Metrics:
        backend = f"run --backend kind=openai_http,target={url},model=m,request_format=/v1/completions"
        ran([guidellm, *(backend + command).split()], tmp_path, environment)
        (benchmark,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
        told = {name: its["successful"] for name, its in benchmark["metrics"].items() if its and "successful" in its}
        assert told["output_token_count"]["median"] == tokens
        return {
            each.name: told[each.name]["mean"]
            if each.kind == "rate"
            else told[each.name]["median"] / (1e3 if each.name.endswith("_ms") else 1)
            for each in of_client("guidellm")
        }

    compare("guidellm", measure, tmp_path, 10 * rate_rps, (rate_rps, tokens))


BENCH = """\
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.mark.judged
@pytest.mark.parametrize(("rate_rps", "tokens"), RATES)
def test_vllm_bench_serve_measures_what_was_recorded(tmp_path: Path, rate_rps: int, tokens: int) -> None:
    """Its metrics are what the docs' table says; its ITL is a mean over all gaps, the others medians over requests."""
    python = ROOT / ".vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("vLLM is not installed (2 GB): make real-engines")
    write_hugging_face(Vllm().shape, tmp_path / "tokenizer")
    count = 15 * rate_rps
    command = " --backend openai --model m --tokenizer tokenizer --dataset-name random --random-input-len 100"
    command += f" --random-output-len {tokens} --num-prompts {count} --request-rate {rate_rps}"
    command += " --ignore-eos --seed 1 --disable-tqdm --save-result --result-dir . --result-filename told.json"
    command += " --percentile-metrics ttft,tpot,itl,e2el --base-url "

    def measure(url: str) -> Metrics:
        environment = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        ran([python, "-c", BENCH, *(command + url).split()], tmp_path, environment)
        told = json.loads((tmp_path / "told.json").read_text())
        assert told["completed"] == count
        return {
            each.name: told[each.name]
            if each.kind == "rate"
            else told[("mean_" if each.name == "itl_ms" else "median_") + each.name] / 1e3
            for each in of_client("vllm bench serve")
        }

    compare("vllm bench serve", measure, tmp_path, count, (rate_rps, tokens))
