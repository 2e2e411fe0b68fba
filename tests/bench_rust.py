"""Rows of `make bench` beside NVIDIA's Rust replay core, by CPU time: `python -m tests.bench_rust --rust PYTHON`.

PYTHON is an interpreter with `ai-dynamo-runtime` (1.6.1), whose `dynamo._core.run_mocker_trace_replay` replays the very
requests of a row: equal arrivals, lengths, shared prefixes, KV blocks, slots and tokens a step. Each side simulates in
a process of its own, in turn, and counts its CPU seconds from the first arrival to the last record; the median ratio of
the turns is printed with the least and the most, and how many times as fast as theirs we are. Each has its own law of
step times (ours the roofline of Llama-3.1-8B on an H200, theirs its polynomial), so that it makes other steps of the
same requests. We keep full records, they keep summaries. Where batchsim is the compiled wheel, the line says so.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchsim.drive.fleet.fleet_plan import FleetPlan
from batchsim.drive.fleet.routing import RoundRobinConfig
from batchsim.drive.fleet.simulate_fleet import simulate_fleet
from batchsim.drive.simulate import simulate
from batchsim.kernel import core as core_module
from tests.bench import ALL_RUN, BLOCK_SIZE, MOONCAKE, PLAIN_VLLM, ROWS, Fixed, Row, azure, engine
from tests.bench_pairs import Known

REPLICAS = 8
PAIRS: dict[str, Row] = {
    "azure 1x": ROWS["vllm-plain-1x"],
    "azure 3x": ROWS["vllm-plain-3x"],
    "azure 1x, prefix cache": ROWS["vllm"],
    "azure 1x, asynchronous": ROWS["vllm-async"],
    "eight replicas": Row(lambda traces: azure(traces, REPLICAS), policy="vllm", knobs=PLAIN_VLLM),
    "mooncake, prefix cache": ROWS["mooncake-prefix"],
    "256 decode": Row(lambda _: Fixed(256, 20_000), num_blocks=ALL_RUN, policy="vllm", knobs=PLAIN_VLLM),
}
UNIT = 512
"""Tokens that one hash of a prompt stands for, as in the Mooncake trace."""
TURNS = 3
THEIRS = """
import json, sys, time
from dynamo import _core
config = json.loads(sys.argv[1])
begun = time.process_time()
engine = {"engine": config["engine"]}
replay = _core.run_mocker_trace_replay(
    [config["trace"]], extra_engine_args=engine, num_workers=config["workers"], trace_block_size=512
)
print(time.process_time() - begun, replay.summary["completed_requests"])
"""


def workers(name: str) -> int:
    """How many engines a pair has."""
    return REPLICAS if name == "eight replicas" else 1


def write_trace(name: str, traces: Path, path: Path) -> int:
    """Writes the requests of the pair in Mooncake's form, with hashes of their own but where prompts share tokens, and
    returns how many there are."""
    shared = iter(_hashes(traces)) if name.startswith("mooncake") else None
    count = next_hash = 0
    with path.open("w", encoding="utf-8") as file:
        for arrival in PAIRS[name].workload(traces).arrivals():
            request, units = arrival.request, -(-arrival.request.prompt_tokens // UNIT)
            row = {
                "timestamp": request.arrival_ns / 1e6,
                "input_length": request.prompt_tokens,
                "output_length": arrival.output_tokens,
                "hash_ids": next(shared) if shared else list(range(next_hash, next_hash + units)),
            }
            file.write(json.dumps(row) + "\n")
            count, next_hash = count + 1, next_hash + units
    return count


def _hashes(traces: Path) -> Iterator[list[int]]:
    with gzip.open(traces / MOONCAKE, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["hash_ids"]


def theirs_s(name: str, trace: Path, python: str) -> tuple[float, int]:
    """CPU seconds of the Rust core on `trace`, and the requests that it completed."""
    core = engine(PAIRS[name])
    blocks, knobs = core.scheduler.kv.num_blocks, {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    knobs |= {key: value for key, value in PAIRS[name].knobs.items() if key in knobs}
    caches = PAIRS[name].knobs.get("enable_prefix_caching", True)
    args: dict[str, Any] = {"backend": "vllm", "num_gpu_blocks": blocks, "block_size": BLOCK_SIZE, **knobs}
    config = {"trace": str(trace), "workers": workers(name), "engine": args | {"enable_prefix_caching": caches}}
    answer = subprocess.run([python, "-c", THEIRS, json.dumps(config)], capture_output=True, text=True, check=True)
    seconds, completed = answer.stdout.split()[-2:]
    return float(seconds), int(completed)


def ours_s(name: str, traces: Path) -> tuple[float, int]:
    """CPU seconds of batchsim on the pair, in this process, and the requests that it completed."""
    row = PAIRS[name]
    cores = [engine(row) for _ in range(workers(name))]
    workload = row.workload(traces)
    known = Known(list(workload.arrivals()))
    gc.collect()
    begun = time.process_time()
    if len(cores) > 1:
        plan = FleetPlan(len(cores))
        simulate_fleet(cores.__getitem__, RoundRobinConfig().build(0), plan, known, feeds_back=False, join=False)
    else:
        simulate(cores[0], known)
    records = [core.recorder.records() for core in cores]
    seconds = time.process_time() - begun
    return seconds, sum(int((each.requests["last_token_ns"] >= 0).sum()) for each in records)


def main() -> None:
    """Prints a line a pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=os.environ.get("BATCHSIM_TRACES"))
    parser.add_argument("--rust", default=sys.executable, metavar="PYTHON", help="with ai-dynamo-runtime")
    parser.add_argument("--pair", choices=list(PAIRS), action="append", help="one of them alone")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--ours", choices=list(PAIRS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.traces is None:
        parser.error("no folder of traces: give --traces, or set BATCHSIM_TRACES")
    if options.ours:
        print(*ours_s(options.ours, options.traces))
        return
    print(f"batchsim is {'plain Python' if (core_module.__file__ or '').endswith('.py') else 'the compiled wheel'}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.pair or PAIRS:
            trace = Path(folder, "trace.jsonl")
            count = write_trace(name, options.traces, trace)
            command = [sys.executable, "-m", "tests.bench_rust", "--traces", str(options.traces), "--ours", name]
            ours, theirs = list[float](), list[float]()
            for _ in range(options.turns):
                answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                seconds, completed = theirs_s(name, trace, options.rust)
                assert int(answer[1]) == completed == count, f"{name}: {answer[1]} and {completed} of {count} completed"
                ours.append(float(answer[0]))
                theirs.append(seconds)
            ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
            print(
                f"{name}: {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f});"
                f" CPU {statistics.median(ours):.2f} s, theirs {statistics.median(theirs):.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
