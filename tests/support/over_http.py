"""Engines whose step times nobody tells the calibrator, simulated behind HTTP and measured there in real time.

    python -m tests.support.over_http linear roofline ahead --minutes 3 -o FOLDER

For each: `batchsim serve` with the truth, `batchsim calibrate --url` with another cost, and whether its held-out loads
were predicted within the bounds. What was sent late, or by a machine that moved, is not judged.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsim.fit.server.experiment import MOVED
from batchsim.results.provenance import provenance

BOUNDS = {"tpot_mean_s": 0.015, "throughput_rps": 0.015, "ttft_mean_s": 0.05, "load": 0.015}
KNOWN = 0.05
HOST = "host: {base: 2ms, per_sequence: 50us, per_token: 10us}"
LINEAR = "{kind: linear, base: 12ms, per_token: 40us, per_sequence: 200us, per_context_token: 100ns}"
ENGINES = {
    "linear": (LINEAR, "{kind: free}", False),
    "roofline": (f"{{kind: roofline, gpu: l40s, {HOST}}}", "{kind: roofline, gpu: h100}", False),
    "ahead": (LINEAR.replace("12ms", "16ms"), "{kind: free}", True),
}
"""(the truth, the cost that the calibrator begins with, whether steps are scheduled ahead of results) by name."""
TERMS = {
    "linear": {"base": 12e6, "sequence": 240e3, "prompt_token": 40e3, "context_token": 100},
    "ahead": {"base": 16e6, "sequence": 240e3, "prompt_token": 40e3, "context_token": 100},
}
"""What a fit should find, in ns: a decoding sequence brings a token besides."""
_SCENARIO = """
model: llama-3.1-8b
cost: {cost}
kv: {{tokens: 40000}}
max_model_len: 2048
policies:
  vllm: {{max_num_seqs: 16, max_num_batched_tokens: 512, async_scheduling: {ahead}, enable_prefix_caching: false}}
workload:
  arrivals: {{kind: poisson, mean_rate: 1/s}}
  lengths: {{prompt: {{kind: fixed, tokens: 100}}, output: {{kind: fixed, tokens: 50}}}}
  output_cap: exact
  requests: 50
load: {{mean_rate: [1/s]}}
slo: ttft<1s @ 99%
seeds: 1
"""


@dataclass(frozen=True)
class Verdict:
    """`met`, `not met` or `not judged`, and why, a line each."""

    word: str
    lines: tuple[str, ...]


def measure(name: str, folder: Path, minutes: float) -> Verdict:
    """The verdict on one of ENGINES, whose files are left in `folder`."""
    truth, start, ahead = ENGINES[name]
    folder.mkdir(parents=True, exist_ok=True)
    for file, cost in (("truth.yaml", truth), ("mine.yaml", start)):
        (folder / file).write_text(_SCENARIO.format(cost=cost, ahead=str(ahead).lower()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    batchsim = [sys.executable, "-m", "batchsim"]
    serve = [*batchsim, "serve", str(folder / "truth.yaml"), "--port", str(port), "--out", str(folder / "served")]
    with (folder / "serve.txt").open("w") as log:
        server = subprocess.Popen(serve, stdout=log, stderr=subprocess.STDOUT)
    try:
        _await(port, server)
        command = [*batchsim, "calibrate", "--url", f"http://127.0.0.1:{port}", "--scenario", str(folder / "mine.yaml")]
        command += ["--minutes", f"{minutes:g}", "-o", str(folder / "mine.json"), "--force"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120 + 240 * minutes)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    (folder / "calibrate.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        return Verdict("not met", (f"calibrate ended with {done.returncode}: {done.stderr.strip()[-300:]}",))
    return judge(name, *(json.loads((folder / file).read_text()) for file in ("mine.json", "mine/experiment.json")))


def judge(name: str, found: dict[str, Any], measured: dict[str, Any]) -> Verdict:
    """The verdict on a fit, and on what it was made of."""
    disturbed = [f"{load} was sent late" for load, row in measured["loads"].items() if row["void"]]
    if abs(measured["moved"]) > MOVED:
        disturbed.append(f"a lone answer's time per token moved by {measured['moved']:+.1%}")
    if disturbed or not found["held_out"]:
        return Verdict("not judged", tuple(disturbed or ["no load was held out"]))
    wrong: list[str] = []
    for run in found["held_out"]:
        of = ("load",) if run["beyond_knee"] else ("ttft_mean_s",)
        for figure in ("tpot_mean_s", "throughput_rps", *of):
            error = run["errors"][figure]
            if error is None or abs(error) > BOUNDS[figure]:
                wrong.append(f"{Path(run['run']).stem}: {figure} off by {error}, {BOUNDS[figure]} allowed")
    for term in found["known"]:
        right = TERMS.get(name, {}).get(term["name"])
        if term["identified"] and right is not None and abs(term["value"] / right - 1) > KNOWN:
            wrong.append(f"{term['name']}: {term['value']:.4g}, the truth is {right:.4g}, and is called identified")
    return Verdict("not met" if wrong else "met", tuple(wrong))


def _await(port: int, server: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def main(
    names: Annotated[list[str], typer.Argument(help=f"Of {', '.join(ENGINES)}.")],
    out: Annotated[Path, typer.Option("-o", "--out")],
    minutes: float = 3.0,
) -> None:
    """Prints the verdicts and leaves the files in a folder each."""
    found = {}
    for name in names:
        verdict = measure(name, out / name, minutes)
        found[name] = {"verdict": verdict.word, "why": verdict.lines}
        typer.echo(f"{name}: {verdict.word}")
        for line in verdict.lines:
            typer.echo(f"- {line}")
    (out / "verdicts.json").write_text(json.dumps({"engines": found, "made": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
