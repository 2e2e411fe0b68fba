"""SGLang without its cache told again as plain loops, rules 1 and 4 to 9, and compared step by step on random runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_systems import Engine, Row, Step
from stepping import crowds, run
from whole_batches import MAX_MODEL_LEN, requests

from sim.policies.systems.sglang import Sglang
from sim.policies.systems.sglang_config import SglangConfig
from sim.types import Arrival

CLIP = 4096
BUSY = "0:8->30 20:4->12 40:4->12"


@dataclass
class Naive:
    """The queue, the decodes in batch order, and the request whose prompt is cut."""

    config: SglangConfig
    engine: Engine
    waiting: list[Row] = field(default_factory=list[Row])
    decodes: list[Row] = field(default_factory=list[Row])
    chunked: Row | None = None
    is_full: bool = False

    def __post_init__(self) -> None:
        self.start = self.ratio = min(0.7 * self.config.schedule_conservativeness, 1.0)
        tokens = self.engine.blocks * self.engine.block_size
        asked = self.config.max_running_requests or max(min(tokens * 512 // MAX_MODEL_LEN, 4096), 2048)
        self.slots = min(asked, tokens // 2)

    def steps(self) -> list[Step]:
        engine = self.engine
        while self.waiting or self.decodes or self.chunked or engine.to_come:
            self.waiting += engine.arrived()
            if not (self.waiting or self.decodes or self.chunked):
                self.ratio = self.start
                engine.now_ns = engine.to_come[0].arrival_ns
                continue
            retracted: list[Row] = []
            work = self.prefill()
            is_prefill = bool(work)
            if not is_prefill:
                self.make_decodes_fit(retracted)
                work = [(row, 1) for row in self.decodes]
                if not work:
                    work = self.prefill()
                    is_prefill = True
            for row, n in work:
                engine.grow(row, row.computed + n)
            ended = engine.run(work, retracted)
            self.decodes += [row for row, _ in work if row.decodes and row not in self.decodes]
            self.decodes = [row for row in self.decodes if row not in ended]
            if ended or (is_prefill and self.chunked):
                self.is_full = False
        return engine.log

    def prefill(self) -> list[tuple[Row, int]]:
        engine, page = self.engine, self.engine.block_size
        chunk = self.config.chunked_prefill_size
        if not self.decodes:
            self.is_full = False
        if not self.chunked and (self.is_full or not self.waiting):
            return []
        free = engine.free * page
        left_input, left_chunk = self.config.max_prefill_tokens, chunk if chunk > 0 else 1 << 40
        left = free - self.ratio * sum(min(row.cap - row.generated, CLIP) for row in self.decodes)
        left_now = free
        work: list[tuple[Row, int]] = []

        def take(row: Row, n: int) -> None:
            nonlocal left_input, left_chunk, left, left_now
            is_last = row.computed + n == row.known
            self.chunked = None if is_last else row
            work.append((row, n))
            tokens = engine.ceil(n) * page
            left -= tokens + page + (min(row.cap, CLIP) if is_last else 0)
            left_now -= tokens + page
            left_input -= tokens
            left_chunk -= tokens

        if self.chunked:
            row = self.chunked
            limit = min(left_chunk, int(left))
            limit = left_chunk if limit <= 0 else limit
            n = min(row.known - row.computed, limit, row.held * page + free - row.computed)
            if n < 1:
                return []
            take(row, n)
        while self.waiting:
            has_kv = left > 0 and left_now > 0
            if has_kv and min(left_input, left_chunk) <= 0:
                break
            if len(work) >= self.slots - len(self.decodes):
                self.is_full = True
                break
            row = self.waiting[0]
            n, tokens = row.known, engine.ceil(row.known) * page
            if n + min(row.cap - row.generated, CLIP) + page >= left:
                self.is_full = bool(work or self.decodes)
                break
            if chunk <= 0 and work and tokens >= left_input:
                break
            if tokens > left_chunk:
                n = left_chunk // page * page
                if n < 1 or self.chunked:
                    break
            take(self.waiting.pop(0), n)
            if left <= 0 or left_now <= 0:
                self.is_full = True
                break
        return work

    def make_decodes_fit(self, retracted: list[Row]) -> None:
        engine = self.engine
        stay = sorted(self.decodes, key=lambda row: (row.generated, -row.prompt), reverse=True)
        while stay and sum(row.computed % engine.block_size == 0 for row in stay) > engine.free:
            row = stay.pop()
            engine.drop(row)
            self.decodes.remove(row)
            self.waiting.append(row)
            retracted.append(row)
        if retracted:
            self.is_full = False
            generated = sum(row.generated for row in stay) + 20 * len(stay)
            self.ratio = min(generated / (sum(row.cap for row in stay) + 1), 1.0)
        elif stay:
            self.ratio = max(self.ratio - self.start * 0.86 / 600, self.start * 0.14)


def compared(config: SglangConfig, arrivals: str | list[Arrival], blocks: int, page: int) -> list[Step]:
    """The steps, after proving them those of the plain loops."""
    log = run(Sglang, config, arrivals, blocks=blocks, block_size=page).log
    listed = requests(arrivals) if isinstance(arrivals, str) else arrivals
    found: list[Step] = [(row.start_ns, row.items, row.preempted, row.free) for row in log]
    assert found == Naive(config, Engine(listed, blocks, page)).steps()
    return found


@settings(max_examples=200, deadline=None)
@given(
    arrivals=crowds(),
    slots=st.sampled_from([None, 2, 5]),
    prefill=st.sampled_from([4, 20, 100]),
    chunk=st.sampled_from([-1, 4, 8, 24]),
    conservativeness=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    pool=st.sampled_from([(11, 4), (40, 1), (20, 4)]),
)
def test_the_steps_are_those_of_the_plain_loops(
    arrivals: list[Arrival], slots: int | None, prefill: int, chunk: int, conservativeness: float, pool: tuple[int, int]
) -> None:
    """Step by step the same work in the same order, retractions and free blocks."""
    config = SglangConfig(
        max_running_requests=slots,
        max_prefill_tokens=prefill,
        chunked_prefill_size=chunk,
        schedule_conservativeness=conservativeness,
        disable_radix_cache=True,
    )
    compared(config, [replace(arrival, cancel_ns=None) for arrival in arrivals], *pool)


@pytest.mark.parametrize("chunk", [-1, 4, 24])
def test_the_loops_retract_too(chunk: int) -> None:
    """Two join one that is trusted to end early and does not, so that 44 tokens get short: retractions are compared."""
    config = SglangConfig(chunked_prefill_size=chunk, schedule_conservativeness=0.1, disable_radix_cache=True)
    assert any(preempted for _, _, preempted, _ in compared(config, BUSY, 11, 4))
