"""Engines of known step times, simulated, and their runs written out as the files of benchmark tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchsim.check.measured.run import MeasuredRequests
from batchsim.check.validation.replay import simulated_requests
from batchsim.scenario import Point
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup

_SCENARIO = """
model: llama-3.1-8b
{cost}
kv: {{tokens: 400000}}
max_model_len: 8192
policies:
  vllm: {{max_num_seqs: {seqs}, max_num_batched_tokens: 2048, async_scheduling: {ahead}, enable_prefix_caching: false}}
workload:
  arrivals: {{kind: poisson, mean_rate: {rate}/s}}
  lengths:
    prompt: {{kind: lognormal, mean: {prompt}, cv: 0.7, max: 4000}}
    output: {{kind: lognormal, mean: {output}, cv: 0.7, max: 2000}}
  output_cap: exact
  requests: {requests}
{frontend}
load: {{mean_rate: [{rate}/s]}}
slo: ttft<1s @ 99%
seeds: 1
"""


LINEAR_ENGINE = "cost: {kind: linear, base: 8ms, per_token: 60us, per_sequence: 40us, per_context_token: 60ns}"


@dataclass(frozen=True)
class Load:
    """Requests/s and mean lengths in tokens."""

    rate: float
    prompt: int = 300
    output: int = 100

    def __str__(self) -> str:
        return f"r{self.rate:g}-p{self.prompt}-o{self.output}"


def scenario_text(
    cost: str, *, load: Load = Load(1), requests: int = 200, ahead: bool = False, seqs: int = 64, way: str = ""
) -> str:
    """An engine with `cost`, a line of a scenario, under a load; `way`: the time from the client, "" for none said."""
    return _SCENARIO.format(
        cost=cost,
        rate=load.rate,
        prompt=load.prompt,
        output=load.output,
        requests=requests,
        ahead=str(ahead).lower(),
        seqs=seqs,
        frontend=f"  frontend: {{request: {way}}}" if way else "",
    )


def setup_of(text: str) -> Setup:
    return Setup.of(parse_scenario(text, "engine.yaml", Path()))


def measured(text: str) -> MeasuredRequests:
    """The requests of a scenario's one point, as a client of that engine would have measured them."""
    setup = setup_of(text)
    return simulated_requests(simulate_point(setup, Point(setup.scenario.specs[0], setup.scenario.loads[0], 0)))


def tidy(requests: MeasuredRequests) -> str:
    """A table of requests, in seconds."""
    assert requests.sent_ns is not None
    columns = (requests.sent_ns / 1e9, requests.prompt_tokens, requests.output_tokens)
    rows = zip(*columns, requests.ttft_ns / 1e9, requests.e2e_ns / 1e9, strict=True)
    lines = [",".join(f"{value:.9g}" if value < 1e6 else f"{value:.0f}" for value in row) for row in rows]
    return "\n".join(["sent_s,prompt_tokens,output_tokens,ttft_s,e2e_s", *lines]) + "\n"


def vllm_bench(requests: MeasuredRequests, rate: float) -> str:
    """A result of `vllm bench serve --save-result --save-detailed`."""
    assert requests.sent_ns is not None
    ttfts, decodes = requests.ttft_ns / 1e9, (requests.e2e_ns - requests.ttft_ns) / 1e9
    gaps = [
        [float(whole) / max(tokens - 1, 1)] * (tokens - 1)
        for whole, tokens in zip(decodes, requests.output_tokens.tolist(), strict=True)
    ]
    result = {
        "backend": "vllm",
        "model_id": "m",
        "request_throughput": 0.0,
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": None,
        "completed": len(requests),
        "total_input_tokens": int(requests.prompt_tokens.sum()),
        "total_output_tokens": int(requests.output_tokens.sum()),
        "input_lens": requests.prompt_tokens.tolist(),
        "output_lens": requests.output_tokens.tolist(),
        "start_times": (100 + requests.sent_ns / 1e9).tolist(),
        "ttfts": ttfts.tolist(),
        "itls": gaps,
        "errors": [""] * len(requests),
    }
    return json.dumps(result)


def write_runs(folder: Path, cost: str, loads: Sequence[Load], form: str = "csv", **engine: object) -> list[Path]:
    """The files of an engine's runs at each load, in one of the forms `csv` and `json` (vllm bench serve)."""
    found: list[Path] = []
    for load in loads:
        requests = measured(scenario_text(cost, load=load, **engine))  # type: ignore[arg-type]
        found.append(folder / f"{load}.{form}")
        found[-1].write_text(tidy(requests) if form == "csv" else vllm_bench(requests, load.rate))
    return found
