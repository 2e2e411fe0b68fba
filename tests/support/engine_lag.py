"""A measured run of vLLM and its simulation: how long a scheduled request waits, and its latencies.

The run is of vLLM with asynchronous scheduling on an RTX 4090; its folder holds `requests.csv`, `timeline.csv`,
`trace.jsonl` and `engine.json`, made from casys-kaist/LLMServingSim @ 5daddb2 (MIT), bench/examples/RTX4090/
Llama-3.1-8B. It is simulated with asynchronous scheduling and without, by that GPU's roofline, of which nothing is
fitted to these files.

The lag is the time from the call of the scheduler that admits requests to their first token, less the step that
computes their prompts, in decode steps. Only calls count whose prompts, and no others, end in one and the same step of
fewer tokens than the engine's limit. In the simulation all of that is recorded. The measured files have no steps, but
whatever is scheduled, begins or ends tells when one step ended and the next was taken up:

    decode step   running requests / generated tokens per second, the median over seconds without prompts in which
                  requests wait
    own step      where a step is seen to end between call and first token, the time from there on; a line over the
                  prompts' tokens through these calls (Theil-Sen) stands for the others
    lag           the median over those others: (first token - call - own step) / decode step
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchsim.kernel.record import Records
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup

Floats = NDArray[np.float64]
GPU, MODEL = "rtx4090", "llama-3.1-8b"
_SAME_S = 0.001  # times closer than this are of one step: requests of a step are stamped one after another
_APART_S = 0.002  # and those farther apart than this are of different ones


@dataclass(frozen=True)
class EngineRun:
    """One run: `lag` and how many calls it is the median of, `decode_s`, and of each request `ttft, tpot, e2e` in s."""

    lag: float
    num_calls: int
    decode_s: float
    latencies: dict[str, Floats]


@dataclass(frozen=True)
class Calls:
    """Calls of the scheduler, an element each, in s: `called_s`, `first_token_s`, the `tokens` of the prompts admitted,
    and `seen_s`, the last step's end seen between; NaN where none was."""

    called_s: Floats
    first_token_s: Floats
    tokens: Floats
    seen_s: Floats

    @classmethod
    def of(cls, requests: pd.DataFrame, limit: int) -> Calls:
        """The calls that count. `requests`: `scheduled_s, first_token_s, last_token_s, prompt_tokens`."""
        called, first = requests.scheduled_s.to_numpy(), requests.first_token_s.to_numpy()
        stamps = np.unique(np.concatenate([called, first, requests.last_token_s.to_numpy()]))
        rows: list[tuple[float, float, float, float]] = []
        for call_s in np.unique(called):
            admitted = called == call_s
            end_s, tokens = first[admitted][0], int(requests.prompt_tokens[admitted].sum())
            if tokens >= limit or (admitted != (np.abs(first - end_s) < _SAME_S)).any():
                continue
            seen = stamps[(stamps > call_s + _APART_S) & (stamps < end_s - _APART_S)]
            rows.append((call_s, end_s, tokens, seen[-1] if len(seen) else np.nan))
        return cls(*np.array(rows, float).reshape(-1, 4).T)

    def lag(self, own_s: Floats, decode_s: float) -> tuple[float, int]:
        """The median lag, by the time of each call's own step, over calls without a step seen to end; their number."""
        unseen = np.isnan(self.seen_s)
        lags = (self.first_token_s - self.called_s - own_s)[unseen] / decode_s
        return float(np.median(lags)), len(lags)


def measured(folder: Path) -> EngineRun:
    """The run in `folder`."""
    requests, seconds = pd.read_csv(folder / "requests.csv"), pd.read_csv(folder / "timeline.csv")
    calls = Calls.of(requests, int(_knobs(folder)["max_num_batched_tokens"]))
    alone = (seconds.prompt_throughput == 0) & (seconds.gen_throughput > 0) & (seconds.waiting > 0)
    decode_s = float((seconds.running[alone] / seconds.gen_throughput[alone]).median())
    lag, num_calls = calls.lag(_line(calls.tokens, calls.first_token_s - calls.seen_s), decode_s)
    return EngineRun(lag, num_calls, decode_s, _latencies(requests))


def simulated(folder: Path, *, ahead: bool) -> EngineRun:
    """The simulation of that run, with asynchronous scheduling if `ahead`."""
    knobs = _knobs(folder)
    trace = {
        "path": str((folder / "trace.jsonl").resolve()),
        "columns": {"arrival": "arrival", "prompt": "prompt", "output": "output", "hash_ids": "hash_ids"},
        "time_unit": "s",
        "hash_id_block_size": knobs["block_size"],
        "rate_scale": {"factor": 1, "by": "compress"},
    }
    policy = {"kind": "vllm", "async_scheduling": ahead}
    policy |= {name: knobs[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    cap = int(pd.read_csv(folder / "requests.csv").output_tokens.max())
    text = json.dumps(
        {
            "model": MODEL,
            "cost": {"kind": "roofline", "gpu": GPU},
            "kv": {"tokens": knobs["num_gpu_blocks"] * knobs["block_size"], "block_size": knobs["block_size"]},
            "max_model_len": knobs["max_model_len"],
            "workload": {"arrivals": {"kind": "trace"}, "trace": trace, "output_cap": cap},
            "policies": {"engine": policy},
            "load": {"rate_scale": [1]},
            "slo": "ttft<10s",
            "seeds": 1,
        }
    )
    scenario = parse_scenario(text, "engine.json", folder)
    records = simulate_point(Setup.of(scenario), scenario.points()[0]).records
    requests = _requests(records)
    calls = Calls.of(requests, int(knobs["max_num_batched_tokens"]))
    steps = records.steps
    decode_s = float(np.median(steps["duration_ns"][(steps["num_chunks"] == 0) & (steps["num_waiting"] > 0)])) / 1e9
    told_ns = records.lanes["processed_ns"] if ahead else steps["start_ns"] + steps["duration_ns"]
    own = np.searchsorted(told_ns / 1e9, calls.first_token_s)
    lag, num_calls = calls.lag(steps["duration_ns"][own] / 1e9, decode_s)
    return EngineRun(lag, num_calls, decode_s, _latencies(requests))


def _requests(records: Records) -> pd.DataFrame:
    """The requests of a simulation as `requests.csv` has them: scheduled when the scheduler was called."""
    rows, steps = records.requests, records.steps
    called_ns = records.lanes["called_ns"] if len(records.lanes) else steps["start_ns"]
    scheduled_ns = called_ns[np.searchsorted(steps["start_ns"], rows["scheduled_ns"])]
    times = {"scheduled": scheduled_ns} | {n: rows[f"{n}_ns"] for n in ("arrival", "first_token", "last_token")}
    return pd.DataFrame(
        {f"{name}_s": ns / 1e9 for name, ns in times.items()}
        | {name: rows[name] for name in ("prompt_tokens", "output_tokens")}
    )


def _latencies(requests: pd.DataFrame) -> dict[str, Floats]:
    arrival, first, last = (requests[f"{name}_s"].to_numpy() for name in ("arrival", "first_token", "last_token"))
    tpot = (last - first) / (requests.output_tokens.to_numpy() - 1)
    return {"ttft": first - arrival, "tpot": tpot, "e2e": last - arrival}


def _line(x: Floats, y: Floats) -> Floats:
    """y at every x on the line of Theil and Sen through the points whose y is known."""
    known = ~np.isnan(y)
    at, found = x[known], y[known]
    i, j = np.triu_indices(len(at), 1)
    i, j = i[at[i] != at[j]], j[at[i] != at[j]]
    slope = np.median((found[j] - found[i]) / (at[j] - at[i]))
    return np.median(found - slope * at) + slope * x


def _knobs(folder: Path) -> dict[str, int]:
    """The engine's limits and KV memory by vLLM's names."""
    engine = json.loads((folder / "engine.json").read_text())
    kv, args = engine["kv_cache"], engine["engine_kwargs"]
    found = {name: int(kv[name]) for name in ("num_gpu_blocks", "block_size")}
    return found | {name: int(args[name]) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
