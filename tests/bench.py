"""Speed and memory of the simulator: `make bench` prints a table with the machine and writes results/bench.json.

Each row runs in a process of its own, several times, and is compared with bare SimPy timeouts timed in the same
process just before and after, since machines drift: `share_of_simpy` is requests (or steps, for rows named so) per
bare timeout. The medians are printed; the peak of memory is that of the first repeat, before anything is packed. Full
records are kept; parsing and writing are rows of their own. A block
operation is a KV block taken by a request, found in a cache or not, or given back; repeats after preemptions are not
counted. `point-1x` is one point of `azure-conv` as sweeps do them: simulated, measured, written. `serve` is what a
server spends on a token of many streams, `serving/token_cost.py`. `packing` are a million
examples into rows, in seconds of CPU. `day` is the shipped scenario of that name, in
seconds of CPU and once. The last line is of a
whole sweep, points written, on one process and on two: 4 policies × 10 loads × 5 seeds of `chat` with 2,000 requests
each. `gym` rows are decisions in environments, `bench_gym.py`. The sweep runs on one and on two processes in turn,
beside bare timeouts in one process and in two:
how much more two processes can do is the machine's. The medians of both are printed. Rows that are to do no less than a
share of what another one does run in turn with that one, `tests/bench_pairs.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import simpy

from batchsim.cost.roofline_config import RooflineConfig
from batchsim.deployment.catalog import load_gpu, load_model
from batchsim.deployment.deployment import Deployment
from batchsim.drive.simulate import simulate
from batchsim.kernel.acceptance import DrawnLuck
from batchsim.kernel.core import EngineCore
from batchsim.kernel.host_copies import HostCopies
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.offload import OffloadConnector
from batchsim.kernel.protocols import PolicyContext, Workload
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.kv.hicache import HiCacheKV
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.sglang.sglang_hicache import SglangWithHiCache
from batchsim.policies.systems.vllm.offload_config import VllmOffloadConfig
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.policies.systems.vllm.vllm_offload import VllmOffload
from batchsim.results.frames import pack_tables
from batchsim.results.keep import measured_point
from batchsim.results.point_files import write_point
from batchsim.scenario import load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.sweep.points import Sweep
from batchsim.study.sweep.pool import start_early
from batchsim.workload.build import build_workload
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import RateScale, TraceConfig
from batchsim.workload.workload_config import TraceArrivals, WorkloadConfig
from tests.traces import tiled

TIMEOUTS = 500_000
TRACE = "azure2023/AzureLLMInferenceTrace_conv.csv"
MOONCAKE = "mooncake/conversation_trace.jsonl.gz"
MILLION = 1_000_000
BLOCK_SIZE = 16
MAX_MODEL_LEN = 131_072
NUM_LAYERS = 32
CHUNK_NS = 32_768  # a block of Llama-3.1-8B over a link of 64 GB/s
ALL_RUN = 400_000  # KV blocks with which 256 sequences of 20,512 tokens run at once


def bare_simpy() -> float:
    """Timeouts per second of SimPy alone."""
    env = simpy.Environment()

    def process() -> Iterator[simpy.Event]:
        for _ in range(TIMEOUTS):
            yield env.timeout(1)

    env.process(process())
    start = time.perf_counter()
    env.run()
    return TIMEOUTS / (time.perf_counter() - start)


def engine(row: Row) -> EngineCore:
    """The row's policy with Llama-3.1-8B on an H200, with as many KV blocks as it has or as the row states."""
    model, gpu = load_model("llama-3.1-8b"), load_gpu("h200")
    cost = RooflineConfig("h200", pp=row.pp).build(model)
    make_config, make_policy = POLICIES[row.policy]
    config = make_config(**row.knobs)
    num_blocks = row.num_blocks or Deployment(model, gpu, pp=row.pp).derive_kv(block_size=BLOCK_SIZE).num_blocks
    connector: OffloadConnector | HostCopies | None = None
    kv: KVBlockManager | None = None
    if row.host_pages:
        kv, make_policy = HiCacheKV(num_blocks, BLOCK_SIZE, row.host_pages, "write_through"), SglangWithHiCache
        connector = HostCopies(OffloadLink(0, CHUNK_NS), OffloadLink(0, CHUNK_NS), NUM_LAYERS)
    if row.tier_chunks:
        config, make_policy = VllmOffloadConfig.tier(config, cpu_chunks=row.tier_chunks), VllmOffload
        connector = OffloadConnector(OffloadLink(0, CHUNK_NS), OffloadLink(0, CHUNK_NS))
    kv = kv or new_kv(config, num_blocks, BLOCK_SIZE, ids=connector is not None)
    speculation, loop = config.traits.speculation, config.traits.loop.over(row.pp)
    scheduler: Any = make_policy(
        config, PolicyContext(kv, MAX_MODEL_LEN, estimator=cost, loop=loop, connector=connector)
    )
    luck = None if speculation is None else DrawnLuck(0, speculation.positions, speculation.found)
    executor = SimExecutor(cost, MAX_MODEL_LEN, loop, luck)
    core = EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop)
    if connector is not None:
        connector.attach(core.recorder, core.in_flight)
    return core


def azure(traces: Path, factor: float, requests: int | None = None) -> Workload:
    """The conversation trace at `factor` times its rate, tiled to `requests` rows."""
    trace = TraceConfig(path=TRACE, rate_scale=RateScale(factor=factor, by="compress"))
    rows = read_trace(TraceConfig(path=TRACE), traces)
    config = WorkloadConfig(arrivals=TraceArrivals(), output_cap=1024, trace=trace)
    rows = tiled(rows, requests) if requests else rows
    return build_workload(config, load={}, seed=0, max_model_len=MAX_MODEL_LEN, base=traces, rows=rows)


def mooncake(traces: Path) -> Workload:
    """The first 2,000 requests of the conversation trace at its rate, with what their prompts share."""
    trace = TraceConfig(path=MOONCAKE, rows=(0, 2000), prefix="hash_ids")
    config = WorkloadConfig(arrivals=TraceArrivals(), output_cap=2000, trace=trace)
    return build_workload(config, load={}, seed=0, max_model_len=MAX_MODEL_LEN, base=traces)


@dataclass(frozen=True)
class Fixed:
    """`count` equal requests at time 0 that decode together."""

    count: int
    output_tokens: int

    def arrivals(self) -> Iterator[Arrival]:
        for i in range(self.count):
            yield Arrival(Request(i, 0, 512, self.output_tokens), self.output_tokens)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None


CONTINUOUS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
VLLM = {"async_scheduling": False}
PLAIN_VLLM = CONTINUOUS | VLLM | {"enable_prefix_caching": False}
DRAFTS = PLAIN_VLLM | {"speculative_config": SpeculativeConfig("eagle", 3, (0.8, 0.6, 0.45))}


@dataclass(frozen=True)
class Row:
    """`what` is the quantity per bare timeout: requests or steps. `num_blocks` replaces the GPU's KV blocks. `pp`: GPUs
    in a row, each a stage. `tier_chunks` and `host_pages`: blocks that the memory of the host holds beyond these, as
    vLLM offloads them and by SGLang's HiCache."""

    workload: Callable[[Path], Workload] = lambda traces: azure(traces, 1)
    leap: bool = True
    what: str = "requests"
    repeats: int = 3
    num_blocks: int | None = None
    policy: str = "continuous"
    knobs: dict[str, Any] = field(default_factory=lambda: CONTINUOUS)
    pp: int = 1
    tier_chunks: int = 0
    host_pages: int = 0


def of_system(policy: str, **knobs: Any) -> Row:
    """The conversation trace under a system's own defaults but for `knobs`."""
    return Row(policy=policy, knobs=knobs)


ROWS = {
    "azure-conv-1x": Row(),
    "azure-conv-3x": Row(lambda traces: azure(traces, 3)),
    "azure-conv-1x-noleap": Row(leap=False, what="steps"),
    "steps-8": Row(lambda _: Fixed(8, 20_000), False, "steps", num_blocks=ALL_RUN),
    "steps-256": Row(lambda _: Fixed(256, 20_000), False, "steps", num_blocks=ALL_RUN),
    "million": Row(lambda traces: azure(traces, 3, MILLION), repeats=1),
    "vllm-plain-1x": Row(policy="vllm", knobs=PLAIN_VLLM),
    "vllm-plain-3x": Row(lambda traces: azure(traces, 3), policy="vllm", knobs=PLAIN_VLLM),
    "vllm-plain-1x-noleap": Row(leap=False, what="steps", policy="vllm", knobs=PLAIN_VLLM),
    "steps-256-vllm": Row(
        lambda _: Fixed(256, 20_000), False, "steps", num_blocks=ALL_RUN, policy="vllm", knobs=PLAIN_VLLM
    ),
    "steps-256-drafts": Row(
        lambda _: Fixed(256, 20_000), True, "steps", num_blocks=ALL_RUN, policy="vllm", knobs=DRAFTS
    ),
    "mooncake-prefix": Row(mooncake, num_blocks=60_000, policy="vllm", knobs=VLLM),
    "mooncake-tier": Row(mooncake, num_blocks=60_000, policy="vllm", knobs=VLLM, tier_chunks=1_000_000),
    "mooncake-radix": Row(mooncake, num_blocks=60_000, policy="sglang", knobs={}),
    "mooncake-hicache": Row(mooncake, num_blocks=60_000, policy="sglang", knobs={}, host_pages=1_000_000),
    "vllm": of_system("vllm", **VLLM),
    "vllm-async": of_system("vllm", async_scheduling=True),
    "vllm-pp4": replace(of_system("vllm", **VLLM), pp=4),
    "vllm-pp4-async": replace(of_system("vllm", async_scheduling=True), pp=4),
    "sglang": of_system("sglang"),
    "tensorrt_llm": of_system("tensorrt_llm"),
    "tgi": of_system("tgi"),
    "orca": of_system("orca"),
    "sarathi": of_system("sarathi"),
    "vllm_v0": of_system("vllm_v0"),
    "faster_transformer": of_system("faster_transformer"),
    "hf_static": of_system("hf_static"),
    "triton": of_system("triton"),
    "tf_serving": of_system("tf_serving", num_batch_threads=1, pad_variable_length_inputs=True),
    "ray_serve": of_system("ray_serve"),
}


def block_operations(records: Records) -> int:
    """KV blocks taken and given back by the requests that ran to their end."""
    done = records.requests[records.requests["last_token_ns"] >= 0]
    tokens = done["prompt_tokens"] + done["output_tokens"] - 1
    return 2 * int(np.sum(-(-tokens // BLOCK_SIZE)))


def measure(name: str, traces: Path) -> list[dict[str, float]]:
    """Runs one row in this process; a dict a repeat."""
    row = ROWS[name]
    measured, peak_mb = list[dict[str, float]](), 0.0
    for _ in range(row.repeats):
        start = time.perf_counter()
        workload = row.workload(traces)
        parse_s = time.perf_counter() - start
        core = engine(row)
        before = bare_simpy()
        start = time.perf_counter()
        simulate(core, workload, leap=row.leap)
        wall_s = time.perf_counter() - start
        simpy_per_s = (before + bare_simpy()) / 2
        records = core.recorder.records()
        requests, steps = len(records.requests), records.num_steps
        if not measured:  # later repeats would show what packing the tables of the first one took
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        start = time.perf_counter()
        if row.repeats > 1:  # the million rows would take minutes and measure the disk
            with tempfile.TemporaryDirectory() as folder:
                for name, data in pack_tables(records).items():
                    (Path(folder) / name).write_bytes(data)
        amount = requests if row.what == "requests" else steps
        measured.append(
            {
                "requests_per_s": requests / wall_s,
                "steps_per_s": steps / wall_s,
                "steps": steps,
                "block_operations_per_s": block_operations(records) / wall_s,
                "peak_rss_mb": peak_mb,
                "share_of_simpy": amount / wall_s / simpy_per_s,
                "simpy_per_s": simpy_per_s,
                "parse_s": parse_s,
                "write_s": time.perf_counter() - start,
            }
        )
    return measured


POINT = "point-1x"
POINT_REPEATS = 5


def measure_point(traces: Path) -> list[dict[str, float]]:
    """Wall times of the point of `azure-conv` under `continuous`: simulated, measured and packed, written."""
    scenario = load_scenario("azure-conv", trace_folders=[traces])
    setup = Setup.of(scenario)
    point = next(point for point in scenario.points() if point.spec.kind == "continuous")
    setup.workload(point.load, point.seed)  # reads the trace
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(POINT_REPEATS):
            before = bare_simpy()
            times = [time.perf_counter()]
            run = simulate_point(setup, point)
            times.append(time.perf_counter())
            packed = measured_point(setup, run, POINT)
            times.append(time.perf_counter())
            write_point(packed, Path(folder) / str(repeat))
            times.append(time.perf_counter())
            simpy_per_s, whole_s = (before + bare_simpy()) / 2, times[-1] - times[0]
            parts = zip(("simulate_s", "measure_s", "write_s"), pairwise(times), strict=True)
            measured.append(
                {name: end - start for name, (start, end) in parts}
                | {"whole_s": whole_s, "simpy_per_s": simpy_per_s}
                | {"share_of_simpy": len(run.records.requests) / whole_s / simpy_per_s}
            )
    return measured


DAY = "day"


def measure_day() -> dict[str, float]:
    """Seconds of CPU and peak memory of the shipped scenario `day`, as `batchsim run` does it, but for the report."""
    scenario = load_scenario(DAY)
    (point,), before = scenario.points(), bare_simpy()
    times = [time.process_time()]
    run = simulate_point(Setup.of(scenario), point)
    times.append(time.process_time())
    packed = measured_point(Setup.of(scenario), run, DAY)
    times.append(time.process_time())
    with tempfile.TemporaryDirectory() as folder:
        write_point(packed, Path(folder) / DAY)
    times.append(time.process_time())
    parts = zip(("simulate_s", "measure_s", "write_s"), pairwise(times), strict=True)
    return {name: end - start for name, (start, end) in parts} | {
        "requests": len(run.records.requests),
        "steps": sum(life.records.num_steps for life in run.lives),
        "replicas": 1 + max(span.replica for span in run.spans),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "simpy_per_s": (before + bare_simpy()) / 2,
    }


SWEEP = "sweep"
SWEEPS = 2
SWEEP_CHANGES = (
    "workload.duration=null",
    "workload.drain=null",
    "workload.requests=2000",
    "load={mean_rate: [4/s, 6/s, 8/s, 10/s, 12/s, 14/s, 16/s, 18/s, 20/s, 24/s]}",
    "seeds=5",
)


def measure_sweep() -> dict[str, float]:
    """Wall times of the whole sweep with one job and with two, workers started; `faster` is the ratio of runs that
    follow each other, `bare_faster` that of bare timeouts. All are medians."""
    scenario = load_scenario("chat", overrides=SWEEP_CHANGES)
    setup = Setup.of(scenario)
    wanted = [(setup, point) for point in scenario.points()]
    start_early("batchsim.study.sweep.points")
    taken: dict[int, list[float]] = {1: [], 2: []}
    faster, bare_faster = [], []
    with multiprocessing.get_context("spawn").Pool(2) as bare, tempfile.TemporaryDirectory() as folder:
        bare.map(_bare, [0, 0], chunksize=1)
        for turn in range(SWEEPS):
            for jobs, times in taken.items():
                start = time.perf_counter()
                Sweep(Path(folder) / f"{turn}-{jobs}", jobs=jobs).run(wanted)
                times.append(time.perf_counter() - start)
                faster += [taken[1][-1] / taken[2][-1]] if taken[2] else []
                alone = bare.map(_bare, [0], chunksize=1)
                bare_faster.append(sum(bare.map(_bare, [0, 0], chunksize=1)) / alone[0])
    return {
        "points": len(wanted),
        **{f"jobs_{jobs}_s": statistics.median(times) for jobs, times in taken.items()},
        "faster": statistics.median(faster),
        "bare_faster": statistics.median(bare_faster),
    }


def _medians(repeats: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(repeat[key] for repeat in repeats) for key in repeats[0]}


def _bare(_: int) -> float:
    return bare_simpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=os.environ.get("BATCHSIM_TRACES"), help=f"holds {TRACE}")
    parser.add_argument("--out", type=Path, default=Path("results/bench.json"))
    parser.add_argument(
        "--row", choices=[*ROWS, POINT, DAY, SWEEP], help="run one row here and print its repeats as JSON"
    )
    options = parser.parse_args()
    for needed in (TRACE, MOONCAKE):
        if options.traces is None or not (Path(options.traces) / needed).exists():
            sys.exit(
                f"bench: {needed} is not in the folder --traces (or BATCHSIM_TRACES). Give the folder that has it."
            )
    if options.row == SWEEP:
        print(json.dumps(measure_sweep()))
        return
    if options.row == DAY:
        print(json.dumps(measure_day()))
        return
    if options.row == POINT:
        print(json.dumps(measure_point(Path(options.traces))))
        return
    if options.row:
        print(json.dumps(measure(options.row, Path(options.traces))))
        return
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, SimPy {simpy.__version__}"
    )
    rows = []
    columns = "row | requests/s | steps/s | steps | block operations/s | leap | peak RSS MB | per bare timeout"
    print(f"{machine}\n\n| {columns} |")
    print("|---|---|---|---|---|---|---|---|")
    bare = []
    for name, row in ROWS.items():
        command = [sys.executable, "-m", "tests.bench", "--row", name, "--traces", str(options.traces)]
        repeats = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        median = _medians(repeats)
        bare.append(median["simpy_per_s"])
        rows.append({"name": name, "leap": row.leap, **median})
        print(
            f"| {name} | {median['requests_per_s']:,.0f} | {median['steps_per_s']:,.0f} | {median['steps']:,.0f} |"
            f" {median['block_operations_per_s']:,.0f} | {'yes' if row.leap else 'no'} | {median['peak_rss_mb']:,.0f} |"
            f" {median['share_of_simpy']:.4f} {row.what} |",
            flush=True,
        )
    rows.insert(0, {"name": "simpy-timeouts", "steps_per_s": statistics.median(bare), "share_of_simpy": 1.0})
    print(f"| simpy-timeouts | | {rows[0]['steps_per_s']:,.0f} | | | | | 1 |")
    parse = {row["name"]: (row["parse_s"], row["write_s"]) for row in rows[1:]}
    print("\nparsing and writing, s: " + ", ".join(f"{n} {p:.2f} / {w:.2f}" for n, (p, w) in parse.items()))
    command = [sys.executable, "-m", "tests.bench", "--row", POINT, "--traces", str(options.traces)]
    point = _medians(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(
        f"{POINT}, s: simulated {point['simulate_s']:.2f}, measured {point['measure_s']:.2f}, written"
        f" {point['write_s']:.2f}; {point['share_of_simpy']:.4f} requests per bare timeout"
    )
    rows.append({"name": POINT, **point})
    command = [sys.executable, "-m", "tests.bench_pairs", "--traces", str(options.traces), "--json"]
    pairs = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for pair in map(json.loads, pairs):
        print(pair["text"])
        rows.append(pair)
    command = [sys.executable, "-m", "tests.support.serving.token_cost", "--json"]
    served = _medians(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    print(
        f"serve: {served['us_per_token']:.1f} µs of CPU a token of many streams, beside writing it to its socket;"
        f" {served['share_of_simpy']:.4f} tokens per bare timeout"
    )
    rows.append({"name": "serve", **served})
    command = [sys.executable, "-m", "tests.bench_gym", "--json"]
    decided = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for name, row in decided.items():
        print(f"gym {name}: {row['decisions']:,.0f} decisions and {row['steps']:,.0f} steps a second of CPU")
        rows.append({"name": f"gym-{name}", **row})
    command = [sys.executable, "-m", "tests.support.serving.lateness", "--json"]
    late = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"late: 99 % of the tokens of 1,000 streams of 50 a second by {late['serve_p99']:.1f} ms, of a server that does"
        f" nothing but write by {late['empty_p99']:.1f}, {late['serve_p99'] / late['empty_p99']:.2f} times as much; no"
        " more than 5 ms beyond are wanted"
    )
    rows.append({"name": "late", **late})
    command = [sys.executable, "-m", "tests.support.packing_speed", "--json"]
    packed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    decreasing = packed["megatron_bridge.first_fit_decreasing"]
    print(
        f"packing, s of CPU: a million examples by first fit decreasing {decreasing:.1f}, in random order"
        f" {packed['megatron_bridge.first_fit_shuffle']:.1f}, by TRL's best fit {packed['trl.bfd']:.1f}; less than 10"
        " are wanted of the first"
    )
    rows.append({"name": "packing", **packed})
    command = [sys.executable, "-m", "tests.bench", "--row", DAY, "--traces", str(options.traces)]
    day = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"day, s of CPU: simulated {day['simulate_s']:.1f}, measured {day['measure_s']:.1f}, written"
        f" {day['write_s']:.1f}; {day['requests']:,} requests, {day['steps']:,} steps, up to {day['replicas']}"
        f" replicas, peak RSS {day['peak_rss_mb']:,.0f} MB; less than 60 s and 1,500 MB are wanted"
    )
    rows.append({"name": DAY, **day})
    command = [sys.executable, "-m", "tests.bench", "--row", SWEEP, "--traces", str(options.traces)]
    sweep = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"sweep of {sweep['points']} points, s: one job {sweep['jobs_1_s']:.1f}, two {sweep['jobs_2_s']:.1f},"
        f" {sweep['faster']:.2f} times as fast; two bare processes do {sweep['bare_faster']:.2f} times as much as one"
    )
    rows.append({"name": SWEEP, **sweep})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
