"""Small engines for unit tests: every step takes STEP_NS, so that a timeline can be written down by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from batchsim.drive.live import VirtualClock, live
from batchsim.drive.simulate import simulate
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV, TableKV
from batchsim.kernel.protocols import DecodeLine, PolicyContext, Scheduler, Workload
from batchsim.kernel.record import OUTCOME_NAMES, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

STEP_NS = 10
MAX_MODEL_LEN = 1_000
DRIVERS: dict[str, Callable[[EngineCore, Workload], int]] = {
    "live": lambda core, workload: live(core, workload, VirtualClock()).end_ns,
    "simulate": simulate,
    "simulate_stepwise": lambda core, workload: simulate(core, workload, leap=False),
}


class Constant:
    """Every step takes STEP_NS."""

    def step_ns(self, batch: Batch) -> int:
        return STEP_NS

    def decode_line(self, batch: Batch) -> DecodeLine:
        return STEP_NS, 0, inf


class Requests:
    """A workload of given arrivals; remembers who was answered and when."""

    def __init__(self, *arrivals: Arrival) -> None:
        self._arrivals = sorted(arrivals, key=lambda a: (a.request.arrival_ns, a.request.id))
        self.answered: list[tuple[int, int]] = []

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        self.answered.append((request.id, now_ns))
        return None


def arrival(
    id: int,
    at_ns: int,
    prompt: int = 4,
    output: int = 3,
    *,
    cap: int | None = None,
    cancel_ns: int | None = None,
    deadline_ns: int | None = None,
) -> Arrival:
    """`output` is the true length, `cap` what the client asked for, the same unless given."""
    request = Request(id, at_ns, prompt, output if cap is None else cap, deadline_ns=deadline_ns)
    return Arrival(request, output, cancel_ns)


def vllm(
    kv: CountingKV | TableKV, max_num_seqs: int = 4, max_num_batched_tokens: int = 64, kind: type[Vllm] = Vllm
) -> Vllm:
    config = VllmConfig(
        enable_prefix_caching=False,
        async_scheduling=False,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return kind(config, PolicyContext(kv, MAX_MODEL_LEN))


def engine(
    scheduler: Scheduler,
    *,
    max_waiting: int | None = None,
    per_chunk_ns: int = 0,
    per_stream_ns: int = 0,
    stop_ns: int | None = None,
    tells_tokens: bool = False,
) -> EngineCore:
    return EngineCore(
        scheduler,
        SimExecutor(Constant(), MAX_MODEL_LEN),
        Recorder(),
        max_model_len=MAX_MODEL_LEN,
        max_waiting=max_waiting,
        per_chunk_ns=per_chunk_ns,
        per_stream_ns=per_stream_ns,
        stop_ns=stop_ns,
        tells_tokens=tells_tokens,
    )


@dataclass(frozen=True)
class Outcome:
    """A request's row in words and numbers."""

    outcome: str
    reason: str
    scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    ended_ns: int
    output_tokens: int


def outcomes(records: Records) -> list[Outcome]:
    """The rows of all requests by id."""
    return [
        Outcome(
            OUTCOME_NAMES[int(row["outcome"])],
            records.texts[row["reason"]],
            int(row["scheduled_ns"]),
            int(row["first_token_ns"]),
            int(row["last_token_ns"]),
            int(row["ended_ns"]),
            int(row["output_tokens"]),
        )
        for row in records.requests
    ]
