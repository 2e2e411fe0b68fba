"""Engines of SGLang whose prefill and decode are apart, in a line, and random ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from batchsim.drive.fleet.pools import simulate_pools
from batchsim.drive.fleet.rooms import Rooms, SendingCore
from batchsim.drive.fleet.routing import RoundRobinConfig
from batchsim.drive.fleet.simulate_fleet import FleetRun
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import CostModel, PolicyContext
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.policies.systems.sglang.pd_config import SglangPdConfig
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_decode import SglangDecode
from batchsim.policies.systems.sglang.sglang_prefill import SglangPrefill
from batchsim.testing.random_configs import MS
from batchsim.testing.random_engines import Listed, TokenCost
from tests.conformance.ahead import LaneTokenCost

INSTANT = TransferConfig(bandwidth=1e15)
BLOCK_BYTES = 16_000
MAX_MODEL_LEN = 2048


def asked(number: int, at_ms: float, prompt: int, output: int, **more: Any) -> Arrival:
    """A request of `prompt` and `output` tokens; `beyond`: tokens of its cap that a stop token saves."""
    tokens = TokenIds.of([(prompt_stream(more.pop("stream", number + 100)), 0, prompt)])
    cancel_ms = more.pop("cancel_ms", None)
    request = Request(number, int(at_ms * MS), prompt, output + more.pop("beyond", 0), tokens=tokens, **more)
    return Arrival(request, output, None if cancel_ms is None else int(cancel_ms * MS))


@dataclass
class RoomCase:
    """Engines with blocks of 16 tokens of 1,000 bytes each; without overlap, and every step `step` ns long if that is
    stated. `fails`: the ids of requests whose transfer fails."""

    arrivals: list[Arrival]
    transfer: TransferConfig = INSTANT
    prefill: int = 1
    decode: int = 1
    blocks: tuple[int, int] = (4096, 4096)
    knobs: dict[str, Any] = field(default_factory=dict[str, Any])
    of_decode: dict[str, Any] = field(default_factory=dict[str, Any])
    stop_ns: int | None = None
    fails: frozenset[int] = frozenset()
    cost: CostModel | None = None
    cores: list[EngineCore] = field(default_factory=list[EngineCore])
    page: int = 16

    def config(self, *, is_prefill: bool) -> SglangPdConfig:
        """The knobs of an engine of either kind."""
        knobs = {"chunked_prefill_size": 512, "disable_overlap_schedule": True} | self.knobs
        mode = "prefill" if is_prefill else "decode"
        plain = SglangPdConfig(**(knobs if is_prefill else knobs | self.of_decode))
        return SglangPdConfig.of(plain, mode, {})

    def run(self, *, leap: bool = True) -> FleetRun:
        """Runs all requests to their ends; all blocks come back, or an error says so."""
        self.cores = []
        rooms = Rooms(self.prefill, self.decode, self.transfer, BLOCK_BYTES, self.fails.__contains__)

        def new_engine(number: int) -> EngineCore:
            is_prefill = number < self.prefill
            config = self.config(is_prefill=is_prefill)
            loop = config.traits.loop
            cost = self.cost or (LaneTokenCost() if loop.is_ahead else TokenCost())
            kv = new_kv(config, self.blocks[not is_prefill], self.page, ids=False)
            context = PolicyContext(kv, MAX_MODEL_LEN, loop=loop, connector=rooms.connector(number))
            recorder = Recorder()
            rooms.records(number, recorder)
            policy, kind = (SglangPrefill, SendingCore) if is_prefill else (SglangDecode, EngineCore)
            executor = SimExecutor(cost, MAX_MODEL_LEN, loop)
            options = {"max_model_len": MAX_MODEL_LEN, "stop_ns": self.stop_ns, "loop": loop}
            self.cores.append(kind(policy(config, context), executor, recorder, **options))
            return self.cores[-1]

        router, workload = RoundRobinConfig().build(0), Listed(tuple(self.arrivals))
        run = simulate_pools(new_engine, router, rooms, workload, stop_ns=self.stop_ns, leap=leap)
        for core in self.cores:
            core.check_returned()
        return run

    def alone(self, arrivals: list[Arrival], *, is_prefill: bool) -> EngineCore:
        """An engine that does both, of the knobs and memory of one side, through `arrivals`."""
        from batchsim.drive.simulate import simulate
        from batchsim.policies.systems.sglang.sglang import Sglang

        knobs = {"chunked_prefill_size": 512, "disable_overlap_schedule": True} | self.knobs
        config = SglangConfig(**knobs)
        loop = config.traits.loop
        cost = self.cost or (LaneTokenCost() if loop.is_ahead else TokenCost())
        kv = new_kv(config, self.blocks[not is_prefill], self.page, ids=False)
        scheduler = Sglang(config, PolicyContext(kv, MAX_MODEL_LEN, loop=loop))
        executor = SimExecutor(cost, MAX_MODEL_LEN, loop)
        core = EngineCore(scheduler, executor, Recorder(), max_model_len=MAX_MODEL_LEN, loop=loop)
        simulate(core, Listed(tuple(arrivals)))
        return core


@st.composite
def room_cases(draw: st.DrawFn, *, cancels: bool = True, fails: bool = True) -> RoomCase:
    """Random engines, links and requests."""
    at_ms, arrivals, longest = 0.0, list[Arrival](), draw(st.sampled_from([40, 200]))
    for number in range(draw(st.integers(1, 14))):
        at_ms += draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
        cancel = draw(st.sampled_from([None, None, None, 2.0, 15.0, 60.0])) if cancels else None
        more: dict[str, Any] = {} if cancel is None else {"cancel_ms": at_ms + cancel}
        stream, priority = draw(st.integers(0, 30)), draw(st.integers(0, 2))
        prompt, output = draw(st.integers(1, longest)), draw(st.integers(1, 60))
        more["beyond"] = draw(st.sampled_from([0, 0, 5, 90]))
        arrivals.append(asked(number, at_ms, prompt, output, stream=stream, priority=priority, **more))
    transfer = TransferConfig(
        bandwidth=draw(st.sampled_from([1e7, 1e8, 1e12])),
        latency=draw(st.sampled_from([0, 20_000, 3 * MS])),
        links=draw(st.sampled_from(["shared", "per_pair"])),
    )
    knobs = {
        "disable_overlap_schedule": draw(st.booleans()),
        "enable_priority_scheduling": draw(st.booleans()),
        "max_running_requests": draw(st.sampled_from([None, 1, 3, 16, 40])),
        "chunked_prefill_size": draw(st.sampled_from([32, 64, 512])),
    }
    of_decode = {
        "num_reserved_decode_tokens": draw(st.sampled_from([0, 1, 16, 16, 100, 512])),
        "disaggregation_decode_extra_slots": draw(st.sampled_from([None, 0, 1, 5])),
        "disaggregation_decode_polling_interval": draw(st.sampled_from([1, 1, 2, 5])),
        "disaggregation_decode_retraction_backup": draw(st.sampled_from(["cpu_tensor", "cpu_tensor", "none"])),
    }
    prefill_knobs = {"disable_radix_cache": draw(st.booleans())}
    blocks = draw(st.sampled_from([(20, 20), (20, 40), (200, 25), (40, 60), (30, 100)]))
    failing = frozenset(draw(st.sets(st.integers(0, 13), max_size=2)) if fails else ())
    sizes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return RoomCase(arrivals, transfer, *sizes, blocks, knobs | prefill_knobs, of_decode, fails=failing)
