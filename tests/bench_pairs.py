"""Rows of `make bench` against one another, each pair in one process and in turn, by CPU time.

A row alone is compared with bare timeouts, whose pace on a shared machine moves on its own; what two rows take within
a second or two of each other moves together, so that a turn is short: of a trace it takes the first requests alone. The
median of the turns' ratios is printed, with the least and the most of them, and the share that is wanted. An engine
that schedules ahead makes other steps of the same requests, so that the ratio by steps stands beside that by requests.

`--wins` prints instead what each mechanism that saves a simulation its steps wins: a row with it, divided by the same
row without it, whose records are the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from unittest.mock import patch

from batchsim.cost.roofline_config import RooflineConfig
from batchsim.cost.shapes.lists import vllm_graph_sizes
from batchsim.deployment.catalog import load_model
from batchsim.drive.fleet.fleet_plan import FleetPlan
from batchsim.drive.fleet.lockstep.lockstep_config import LockstepConfig
from batchsim.drive.fleet.lockstep.passes import LockstepCost
from batchsim.drive.fleet.lockstep.rank_costs import RankCosts
from batchsim.drive.fleet.lockstep.recorded_ranks import simulate_ranks
from batchsim.drive.fleet.pools import Pools, PrefillCore, simulate_pools
from batchsim.drive.fleet.routing import LeastTokensConfig, RoundRobinConfig
from batchsim.drive.fleet.simulate_fleet import simulate_fleet
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.drive.simulate import simulate
from batchsim.kernel.acceptance import DrawnLuck
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext, Workload
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.vllm.connector_config import KvRole, VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_connector import VllmConnector
from tests.bench import BLOCK_SIZE, MAX_MODEL_LEN, ROWS, Row, azure, engine

PAIRS = {
    "vllm-async": ("vllm", 0.9),
    "steps-256-drafts": ("steps-256-vllm", 0.25),
    "mooncake-tier": ("mooncake-prefix", 0.67),
    "mooncake-hicache": ("mooncake-radix", 0.67),
    "fleet": ("fleet, engine by engine", 0.95),
    "fleet-least-tokens": ("fleet-least-tokens, engine by engine", 0.75),
    "pools": ("replicas of pools", 0.77),
    "ranks": ("ranks, engine by engine", 0.67),
}
"""Rows that are to do, a second, no less than so much of what the row named does."""
TURNS = 27
FIRST = 3_000
"""Requests of a trace in a turn."""
FEWER = {"mooncake-tier": (300, 5), "mooncake-hicache": (1000, 9), "pools": (FIRST, 9), "ranks": (FIRST, 9)}
"""Requests in a turn, and turns, of pairs one of which takes much longer."""
FLEETS: dict[str, RoundRobinConfig | LeastTokensConfig] = {
    "fleet": RoundRobinConfig(),
    "fleet-least-tokens": LeastTokensConfig(),
}
"""The router of each pair of fleets. Of one that hears of answers each engine must be as far as every arrival that may
hear of one of its own, so that a fleet of it is dearer than its engines."""
WINS = {
    "leaps": ("azure-conv-1x", "azure-conv-3x", "vllm", "orca"),
    "leaps ahead": ("vllm-async", "sglang", "tensorrt_llm"),
    "pipeline leaps": ("vllm-pp4", "vllm-pp4-async"),
    "drafts foreseen": ("steps-256-drafts",),
    "engines asleep": ("fleet",),
    "engines apart": ("fleet", "fleet-least-tokens"),
}
"""Mechanisms, and rows on which each is at work."""
WIN_TURNS = 3
REPLICAS, FLEETS_ROW, FACTOR = 7, "vllm-async", 10.5
"""Of a fleet: engines of a row, and by how much a trace is compressed for them."""
EACH, POOLS_FACTOR = 4, 12
"""Engines in each of two pools, against as many replicas in all, and by how much the trace is compressed for them."""
RANKS = 8
"""Ranks that step together, against engines that do not, with the same requests."""


@dataclass(frozen=True)
class First:
    """The first `most` requests of `workload`, an open loop."""

    workload: Workload
    most: int = FIRST

    def arrivals(self) -> Iterator[Arrival]:
        return islice(self.workload.arrivals(), self.most)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None


@dataclass(frozen=True)
class Known:
    """Arrivals that are there already, an open loop."""

    known: list[Arrival]

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self.known)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None


Run = Callable[[], tuple[float, float]]
"""Runs a row once; returns requests (or steps, for rows named so) and steps a second of CPU."""


def of_engine(name: str, traces: Path, leap: bool = True, most: int = FIRST) -> Run:
    """The simulation alone of `most` requests of a row of ROWS, its tables read; without leaps where not `leap`."""
    row = ROWS[name]

    def run() -> tuple[float, float]:
        workload, core = First(row.workload(traces), most), engine(row)
        gc.collect()
        start_s = time.process_time()
        simulate(core, workload, leap=row.leap and leap)
        records = core.recorder.records()  # some columns of an engine that schedules ahead are written as they are read
        cpu_s = time.process_time() - start_s
        amount = len(records.requests) if row.what == "requests" else records.num_steps
        return amount / cpu_s, records.num_steps / cpu_s

    return run


def of_fleet(name: str, traces: Path) -> Run:
    """Replicas behind a router, their requests' tables joined; or each of them simulated alone, one by one."""
    row, known = ROWS[FLEETS_ROW], list(First(azure(traces, FACTOR)).arrivals())
    fleet, is_alone = name.partition(",")[::2]
    router, plan = FLEETS[fleet], FleetPlan(REPLICAS)

    def together(cores: list[EngineCore]) -> list[EngineCore]:
        simulate_fleet(cores.__getitem__, router.build(0), plan, Known(known), feeds_back=False, join=False)
        return cores

    its: list[list[Arrival]] = []
    if is_alone:
        for core in together([engine(row) for _ in range(REPLICAS)]):
            ids = set(core.recorder.records().requests["request_id"].tolist())
            its.append([arrival for arrival in known if arrival.request.id in ids])

    def run() -> tuple[float, float]:
        cores = [engine(row) for _ in range(REPLICAS)]
        gc.collect()
        start_s = time.process_time()
        if is_alone:
            for core, arrivals in zip(cores, its, strict=True):
                simulate(core, Known(arrivals))
                core.recorder.records()
        else:
            together(cores)
        cpu_s = time.process_time() - start_s
        records = [core.recorder.records() for core in cores]
        return sum(len(each.requests) for each in records) / cpu_s, sum(each.num_steps for each in records) / cpu_s

    return run


def of_pools(name: str, traces: Path) -> Run:
    """Prefill engines and decode engines, their requests' tables joined; or as many replicas behind a router."""
    row, known = ROWS[FLEETS_ROW], list(First(azure(traces, POOLS_FACTOR)).arrivals())
    transfer = TransferConfig(bandwidth=50e9, latency=20_000, links="per_pair")
    size = load_model("llama-3.1-8b").kv_bytes_per_token * BLOCK_SIZE

    def run() -> tuple[float, float]:
        pools = Pools(EACH, EACH, transfer, size)
        is_mixed = name != "pools"
        cores = [engine(row) if is_mixed else pooled_engine(row, pools, number) for number in range(2 * EACH)]
        router = RoundRobinConfig().build(0)
        gc.collect()
        start_s = time.process_time()
        if is_mixed:
            plan = FleetPlan(2 * EACH)
            simulate_fleet(cores.__getitem__, router, plan, Known(known), feeds_back=False, join=False)
        else:
            simulate_pools(cores.__getitem__, router, pools, Known(known), join=False)
        cpu_s = time.process_time() - start_s
        return len(known) / cpu_s, sum(core.recorder.records().num_steps for core in cores) / cpu_s

    return run


def pooled_engine(row: Row, pools: Pools, number: int) -> EngineCore:
    """Engine `number` of `pools`, with the model, memory and knobs that a row of vLLM has."""
    like, is_prefill = engine(row), number in pools.prefill
    role: KvRole = "kv_producer" if is_prefill else "kv_consumer"
    config = VllmConnectorConfig(kv_role=role, **row.knobs)
    loop, recorder = config.traits.loop, Recorder()
    kv = new_kv(config, like.scheduler.kv.num_blocks, BLOCK_SIZE, ids=False)
    context = PolicyContext(kv, MAX_MODEL_LEN, loop=loop, connector=pools.connector(number))
    pools.records(number, recorder)
    kind = PrefillCore if is_prefill else EngineCore
    executor = SimExecutor(RooflineConfig("h200").build(load_model("llama-3.1-8b")), MAX_MODEL_LEN, loop)
    return kind(VllmConnector(config, context), executor, recorder, max_model_len=MAX_MODEL_LEN, loop=loop)


def of_ranks(name: str, traces: Path) -> Run:
    """Ranks in lockstep, their requests' tables joined; or as many engines simulated one by one, with the requests of
    each rank."""
    row, known = ROWS[FLEETS_ROW], list(First(azure(traces, POOLS_FACTOR)).arrivals())

    def together() -> list[EngineCore]:
        cores, cost = [rank_of(row) for _ in range(RANKS)], RooflineConfig("h200").build(load_model("llama-3.1-8b"))
        config = VllmConfig(**row.knobs)
        sizes = vllm_graph_sizes(config.max_num_seqs, config.max_num_batched_tokens)
        costs = RankCosts(cost.lanes().device_ns, sizes)
        simulate_ranks(cores, costs, LockstepConfig(api_servers=1), Known(known), join=False)
        return cores

    its: list[list[Arrival]] = []
    if name != "ranks":
        for core in together():
            ids = set(core.recorder.records().requests["request_id"].tolist())
            its.append([arrival for arrival in known if arrival.request.id in ids])

    def run() -> tuple[float, float]:
        cores = [engine(row) for _ in its]
        gc.collect()
        start_s = time.process_time()
        if not its:
            cores = together()
        for core, arrivals in zip(cores, its, strict=False):
            simulate(core, Known(arrivals))
            core.recorder.records()
        cpu_s = time.process_time() - start_s
        records = [core.recorder.records() for core in cores]
        return sum(len(each.requests) for each in records) / cpu_s, sum(each.num_steps for each in records) / cpu_s

    return run


def rank_of(row: Row) -> EngineCore:
    """One of several ranks, with the model, memory and knobs that a row of vLLM has."""
    like, config = engine(row), VllmConfig(**row.knobs)
    loop = config.traits.loop
    kv = new_kv(config, like.scheduler.kv.num_blocks, BLOCK_SIZE, ids=False)
    lanes = RooflineConfig("h200").build(load_model("llama-3.1-8b")).lanes()
    executor = SimExecutor(LockstepCost(lanes), MAX_MODEL_LEN, loop)
    scheduler = Vllm(config, PolicyContext(kv, MAX_MODEL_LEN, loop=loop))
    return EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop)


def _run_of(name: str, traces: Path, most: int) -> Run:
    if name in ROWS:
        return of_engine(name, traces, most=most)
    if "ranks" in name:
        return of_ranks(name, traces)
    return of_pools(name, traces) if "pools" in name else of_fleet(name, traces)


def _without(run: Run, owner: str, name: str, value: object) -> Run:
    """`run` with `name` of `owner` replaced."""

    def changed() -> tuple[float, float]:
        with patch(f"{owner}.{name}", value):
            return run()

    return changed


def with_and_without(mechanism: str, name: str, traces: Path) -> tuple[Run, Run]:
    """A row with a mechanism of WINS, and the same without it."""
    if name in ROWS:
        run = of_engine(name, traces)
        if mechanism == "drafts foreseen":
            owner = f"{DrawnLuck.__module__}.{DrawnLuck.__name__}"
            return run, _without(run, owner, "foreseen", lambda luck, group: None)
        return run, of_engine(name, traces, leap=False)
    run, driver = of_fleet(name, traces), "batchsim.drive.fleet"
    together = _without(run, f"{driver}.simulate_fleet", "hears_answers_only", lambda router: False)
    if mechanism == "engines apart":
        return run, together
    return together, _without(together, f"{driver}.engine", "quiet_until_ns", lambda core, executor, now_ns: None)


def wins(mechanism: str, name: str, traces: Path) -> str:
    """How many times as many requests a second of CPU a row does with a mechanism as without it, in words."""
    with_it, without = with_and_without(mechanism, name, traces)
    ratios = [with_it()[0] / without()[0] for _ in range(WIN_TURNS)]
    return f"{mechanism}, {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compared(name: str, other: str, traces: Path) -> dict[str, float]:
    """What `name` does a second, divided by what `other` does: the median `ratio` of `turns` by what the rows are named
    for, its extremes, and `by_steps`."""
    most, turns = FEWER.get(name, (FIRST, TURNS))
    runs = [_run_of(row, traces, most) for row in (name, other)]
    ratios, by_steps = list[float](), list[float]()
    for turn in range(turns):
        order = (0, 1) if turn % 2 else (1, 0)
        did = {number: runs[number]() for number in order}
        ratios.append(did[0][0] / did[1][0])
        by_steps.append(did[0][1] / did[1][1])
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "turns": len(ratios),
        "by_steps": statistics.median(by_steps),
    }


def main() -> None:
    """Prints a line a pair, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=os.environ.get("BATCHSIM_TRACES"))
    parser.add_argument("--pair", choices=list(PAIRS), action="append", help="one of them alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--wins", action="store_true", help="what each mechanism wins on rows on which it is at work")
    options = parser.parse_args()
    if options.traces is None:
        parser.error("no folder of traces: give --traces, or set BATCHSIM_TRACES")
    if options.wins:
        for mechanism, name in ((mechanism, name) for mechanism, names in WINS.items() for name in names):
            print(wins(mechanism, name, options.traces), flush=True)
        return
    for name in options.pair or PAIRS:
        other, wanted = PAIRS[name]
        found = compared(name, other, options.traces)
        if options.json:
            print(json.dumps({"name": f"{name} of {other}", "wanted": wanted, **found, "text": line(name, found)}))
        else:
            print(line(name, found), flush=True)


def line(name: str, found: dict[str, float]) -> str:
    """What `compared` found of the pair `name`, in words."""
    other, wanted = PAIRS[name]
    steps = "" if found["by_steps"] == found["ratio"] else f"; {found['by_steps']:.2f} by steps"
    return (
        f"{name}: {found['ratio']:.2f} of {other} by the median of {found['turns']} turns ({found['least']:.2f} to"
        f" {found['most']:.2f}{steps}); no less than {wanted:g} is wanted"
    )


if __name__ == "__main__":
    main()
