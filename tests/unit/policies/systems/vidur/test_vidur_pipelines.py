"""Vidur's pipelines: by hand, where a stage takes 10 ns whatever its batch and a KV block holds 4 tokens; and against a
model that walks Vidur's own lists, on random workloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.fleet_plan import FleetPlan
from batchsim.drive.fleet.routing import RoundRobin, RoundRobinConfig
from batchsim.drive.fleet.simulate_fleet import simulate_fleet
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.engine_loop import EVENTS, EngineLoop
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import STATE_NAMES, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vidur.orca import Orca, OrcaConfig
from batchsim.policies.systems.vidur.sarathi import Sarathi, SarathiConfig
from batchsim.policies.systems.vidur.vllm_v0 import VllmV0, VllmV0Config
from tests.support.random_cases import random_cases
from tests.support.stepping import Run, Stages, run_alike
from tests.support.whole_batches import Listed, blocked
from tests.unit.policies.systems.vllm.test_vllm import arrival
from tests.unit.policies.systems.vllm.test_vllm_pipelines import answered, timeline

BLOCK = 4
POLICIES: dict[str, tuple[type, Callable[..., Any]]] = {
    "orca": (Orca, OrcaConfig),
    "sarathi": (Sarathi, SarathiConfig),
    "vllm_v0": (VllmV0, VllmV0Config),
}


class Uneven(Stages):
    """The second stage is the slowest; the first one's time grows with the tokens."""

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        first = 5 + batch.num_prefill_tokens + batch.num_decode
        return (first, 17, 8)[: self.stages]


def pipeline(
    kind: str, arrivals: list[Arrival], stages: int = 2, blocks: int = 100, cost: Stages | None = None, **knobs: Any
) -> Run:
    """The run, the same under both drivers; the watermark is 0 unless stated."""
    policy, config_of = POLICIES[kind]
    if kind != "orca":
        knobs.setdefault("watermark_blocks_fraction", 0.0)
    config = config_of(**knobs)
    loop = config.traits.loop.over(stages)
    return run_alike(policy, config, arrivals, "leap", "live", blocks=blocks, cost=cost or Stages(stages), loop=loop)


def states(result: Run, request: int) -> list[tuple[int, str, str]]:
    """(time, state, reason) of what the request went through, but for its place in the queue."""
    rows = [row for row in result.records.states if row["request_id"] == request]
    named = [(int(r["time_ns"]), STATE_NAMES[r["state"]], result.records.texts[r["reason"]]) for r in rows]
    return [row for row in named if row[1] != "blocked"]


@pytest.mark.parametrize("kind", POLICIES)
def test_a_pipeline_has_as_many_batches_in_flight_as_stages(kind: str) -> None:
    """One stage is Vidur's plain engine, several are asked at each arrival and each end of a step."""
    loop = POLICIES[kind][1]().traits.loop
    assert loop.over(1).kind == "sync"
    assert loop.over(3) == EngineLoop("events", 3, stages=3, piped="events")


def test_each_batch_is_in_one_stage_and_its_members_wait_for_its_end() -> None:
    """Two prompts fill a batch each; their decodes follow when their own batch has left the last stage."""
    result = pipeline("vllm_v0", [arrival(i, 0, 3, prompt=8) for i in range(2)], max_tokens_in_batch=8)
    first, second = [(0, 1)], [(1, 1)]
    prompts = [(0, [(0, 8)]), (0, [(1, 8)])]
    assert timeline(result) == [*prompts, (20, first), (30, second), (40, first), (50, second)]
    assert result.records.steps["start_ns"].tolist() == [0, 10, 20, 30, 40, 50]
    assert answered(result) == [(20, 60), (30, 70)]


def test_an_arrival_is_scheduled_at_once_where_a_stage_has_no_batch() -> None:
    """At 3, while the first prompt is in the first stage; a third one at 4 finds two in flight, and waits for 20."""
    result = pipeline("orca", [arrival(0, 0, 1, prompt=4), arrival(1, 3, 1, prompt=4), arrival(2, 4, 1, prompt=4)])
    assert timeline(result) == [(0, [(0, 4)]), (3, [(1, 4)]), (20, [(2, 4)])]
    assert result.records.steps["start_ns"].tolist() == [0, 10, 20]


def test_a_call_in_vain_takes_no_place_and_no_time() -> None:
    """With one request the pipeline runs it through, and through again, without a pause."""
    assert timeline(pipeline("sarathi", [arrival(0, 0, 3, prompt=4)], 4)) == [
        (0, [(0, 4)]), (40, [(0, 1)]), (80, [(0, 1)])
    ]  # fmt: skip


def test_the_host_launches_and_processes_beside_the_stages() -> None:
    """Launched at 3, through at 23, processed by 25: the next token is launched at 28."""
    result = pipeline("orca", [arrival(0, 0, 2, prompt=4)], cost=Stages(2, (3, 2)))
    assert result.records.lanes["launched_ns"].tolist() == [3, 28]
    assert answered(result) == [(25, 50)]


def test_the_next_chunk_of_a_prompt_waits_for_the_one_before() -> None:
    """The second batch of 0 takes the next prompt; in flight, the first one does not sit out."""
    result = pipeline("sarathi", [arrival(0, 0, 1, prompt=10), arrival(1, 0, 1, prompt=4)], chunk_size=8)
    assert timeline(result) == [(0, [(0, 8)]), (0, [(1, 4)]), (20, [(0, 2)])]
    assert states(result, 0) == [(0, "prefill", "")]


def test_a_batch_has_at_most_its_share_of_the_cap() -> None:
    """4 over two stages are 2 a batch, of prompts and of decodes; all 4 run."""
    for kind in ("sarathi", "vllm_v0"):
        result = pipeline(kind, [arrival(i, 0, 2, prompt=4) for i in range(5)], batch_size_cap=4)
        pairs = [(0, [(0, 4), (1, 4)]), (0, [(2, 4), (3, 4)]), (20, [(0, 1), (1, 1)]), (30, [(2, 1), (3, 1)])]
        assert timeline(result) == [*pairs, (40, [(4, 4)]), (60, [(4, 1)])]
        assert blocked(result.records) == [(0, 2, "no_slot"), (0, 4, "no_slot")]


def test_orca_shares_no_cap_among_its_batches() -> None:
    """Each stage's batch takes 2, so that 4 run under a cap of 2; the slots alone bound them."""
    arrivals = [arrival(i, 0, 1, prompt=4) for i in range(5)]
    one, other = [(0, 4), (1, 4)], [(2, 4), (3, 4)]
    knobs: dict[str, Any] = {"batch_size_cap": 2, "max_tokens_per_request": 8}
    assert timeline(pipeline("orca", arrivals, **knobs)) == [(0, one), (0, other), (20, [(4, 4)])]
    short = pipeline("orca", arrivals, blocks=6, **knobs)
    assert timeline(short) == [(0, one), (0, [(2, 4)]), (20, [(3, 4), (4, 4)])]
    assert blocked(short.records) == [(0, 2, "no_slot"), (0, 3, "kv_blocks")]


def test_orca_takes_the_ready_as_their_batches_ended() -> None:
    """2 is ready at 30, behind 0 and 1 since 20: all three decode together from then on, if one batch has room."""
    arrivals = [arrival(0, 0, 4, prompt=4), arrival(1, 0, 4, prompt=4), arrival(2, 1, 3, prompt=4)]
    result = pipeline("orca", arrivals, batch_size_cap=2)
    assert timeline(result)[2:4] == [(20, [(0, 1), (1, 1)]), (30, [(2, 1)])]
    arrivals = [arrival(0, 0, 3, prompt=4), arrival(1, 0, 3, prompt=4), arrival(2, 0, 2, prompt=4)]
    result = pipeline("orca", arrivals, 2, batch_size_cap=1)
    assert [row[1] for row in timeline(result)] == [
        [(0, 4)], [(1, 4)], [(0, 1)], [(1, 1)], [(0, 1)], [(1, 1)], [(2, 4)], [(2, 1)]
    ]  # fmt: skip


def test_prompts_beside_decodes_in_flight_merge_their_batches() -> None:
    """vllm_v0: at 20 the prompt of 2 goes first and 0 and 1 stand still; at 30 they decode; 2 stays apart."""
    arrivals = [arrival(0, 0, 3, prompt=4), arrival(1, 0, 3, prompt=4), arrival(2, 15, 2, prompt=4)]
    result = pipeline("vllm_v0", arrivals, max_tokens_in_batch=4)
    assert timeline(result) == [
        (0, [(0, 4)]), (0, [(1, 4)]), (20, [(2, 4)]), (30, [(0, 1), (1, 1)]), (40, [(2, 1)]), (50, [(0, 1), (1, 1)])
    ]  # fmt: skip


def test_who_is_given_up_while_ready_does_not_come_back() -> None:
    """As above, but request 0, which stands still from 20 to 30, is given up at 25."""
    arrivals = [arrival(0, 0, 3, prompt=4), arrival(1, 0, 3, prompt=4), arrival(2, 15, 2, prompt=4)]
    arrivals[0] = replace(arrivals[0], cancel_ns=25)
    result = pipeline("vllm_v0", arrivals, max_tokens_in_batch=4)
    assert timeline(result)[3:] == [(30, [(1, 1)]), (40, [(2, 1)]), (50, [(1, 1)])]


def test_what_a_cancel_frees_is_taken_at_once() -> None:
    """The only slot is given up at 5 and taken then, though its batch runs to 20."""
    arrivals = [replace(arrival(0, 0, 3, prompt=4), cancel_ns=5), arrival(1, 0, 1, prompt=4)]
    result = pipeline("orca", arrivals, blocks=2, max_tokens_per_request=8)
    assert timeline(result) == [(0, [(0, 4)]), (5, [(1, 4)])]


def test_a_prompt_that_finds_no_token_left_sits_out() -> None:
    """The host needs 25 ns for results, so that both prompts are ready at 70: the first one takes the chunk of 2, and
    the second is in the next batch. At 140 a token of each makes one batch of two."""
    arrivals = [arrival(0, 0, 2, prompt=5), arrival(1, 0, 1, prompt=5)]
    result = pipeline("sarathi", arrivals, cost=Stages(2, (0, 25)), chunk_size=2)
    assert timeline(result) == [
        (0, [(0, 2)]), (0, [(1, 2)]), (70, [(0, 2)]), (70, [(1, 2)]), (140, [(0, 1), (1, 1)]), (185, [(0, 1)])
    ]  # fmt: skip
    assert states(result, 1) == [(0, "prefill", ""), (70, "sat_out", "token_budget"), (70, "prefill", "")]


def test_a_prompt_behind_a_full_batch_sits_out() -> None:
    """At 140 the decode of 0 fills the batch of one, and the prompt begun behind it is in the next."""
    arrivals = [arrival(0, 0, 3, prompt=4), arrival(1, 0, 3, prompt=6)]
    result = pipeline("sarathi", arrivals, cost=Stages(2, (0, 25)), chunk_size=2, batch_size_cap=2)
    assert timeline(result)[2:6] == [(70, [(0, 2)]), (70, [(1, 2)]), (140, [(0, 1)]), (140, [(1, 2)])]
    sat_out = [row for row in states(result, 1) if row[1] == "sat_out"]
    assert sat_out == [(70, "sat_out", "token_budget"), (140, "sat_out", "no_slot")]


def test_only_the_ready_are_preempted() -> None:
    """At 30 request 1 lacks a block, and 0, in flight, is spared: 1 itself goes, and comes back when 0 has ended."""
    arrivals = [arrival(0, 0, 3, prompt=4), arrival(1, 0, 2, prompt=4)]
    result = pipeline("vllm_v0", arrivals, blocks=3, max_tokens_in_batch=4)
    assert timeline(result) == [
        (0, [(0, 4)]), (0, [(1, 4)]), (20, [(0, 1)]), (30, []), (40, [(0, 1)]), (60, [(1, 5)])
    ]  # fmt: skip
    assert result.preemptions() == [(30, 1, "kv_blocks", 1)]


def test_a_cap_below_the_stages_is_refused() -> None:
    """It leaves no request for a batch."""
    for kind in ("sarathi", "vllm_v0"):
        with pytest.raises(ScenarioError, match="batch_size_cap 2 over 3 stages leaves no request for a batch"):
            pipeline(kind, [arrival(0, 0, 1, prompt=4)], 3, batch_size_cap=2)


class Told(Orca):
    """Keeps when it was asked, and whether it was told then that nothing will come."""

    def __init__(self, config: OrcaConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self.told: list[tuple[int, bool]] = []

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        self.told.append((now_ns, drain))
        return super().schedule(now_ns, drain)


def test_a_replica_that_waits_for_a_step_may_still_bring_requests_to_another() -> None:
    """Until 20 the answer of the first replica may cause a request for the second; from then on nothing can."""
    loop = EVENTS.over(2)
    policies = [Told(OrcaConfig(), PolicyContext(CountingKV(500, 4), 1000, loop=loop)) for _ in range(2)]
    simulate_fleet(
        lambda replica: EngineCore(
            policies[replica], SimExecutor(Stages(2), 1000, loop), Recorder(), max_model_len=1000, loop=loop
        ),
        RoundRobin(RoundRobinConfig(), 0),
        FleetPlan(2),
        Listed([arrival(0, 0, 1, prompt=4), arrival(1, 0, 3, prompt=4)]),
        feeds_back=True,
    )
    assert policies[1].told == [(0, False), (0, False), (20, True), (20, True), (40, True), (40, True)]


# ---- the rules read literally


@dataclass(eq=False)
class One:
    """A request of the model. `goal` tokens must be computed before it makes its next token."""

    arrival: Arrival
    made: int = 0
    computed: int = 0
    blocks: int = 0
    decodes: bool = False
    told_ns: list[int] = field(default_factory=list[int])

    @property
    def request(self) -> Request:
        return self.arrival.request

    @property
    def goal(self) -> int:
        return self.request.prompt_tokens + self.made


Items = list[tuple[One, int]]


class Replica:
    """Vidur's replica: lists of requests, and stages that are busy until some time."""

    def __init__(
        self,
        arrivals: list[Arrival],
        stages: int,
        blocks: int,
        cap: int,
        tokens: int,
        mark: float,
        host: tuple[int, int],
    ) -> None:
        self.host = host
        self.coming = [One(each) for each in arrivals]
        self.all = list(self.coming)
        self.blocks, self.cap, self.tokens, self.watermark = blocks, cap, tokens, int(mark * blocks)
        self.micro = cap // stages
        self.busy = [0] * stages
        self.queue: list[One] = []
        self.ready: list[One] = []
        self.held: list[One] = []
        self.flying: list[tuple[int, Items]] = []
        self.out: list[int] = []
        self.rows: list[tuple[int, list[tuple[int, int]], list[int], int]] = []

    @property
    def free(self) -> int:
        return self.blocks - sum(one.blocks for one in self.held)

    def play(self) -> None:
        """Fills `rows`: of each batch when it was made, its requests, the preempted, the blocks free then."""
        now = 0
        while True:
            if self.flying and self.flying[0][0] <= now:
                now += self.host[1]
                self.end(self.flying.pop(0)[1], now)
                continue
            while self.coming and self.coming[0].request.arrival_ns <= now:
                self.queue.append(self.coming.pop(0))
            times = [end for end, _ in self.flying[:1]]
            if len(self.flying) < len(self.busy):
                self.out = []
                items = self.make()
                if items or self.out:
                    self.rows.append((now, [(one.request.id, n) for one, n in items], self.out, self.free))
                if items:
                    now += self.host[0]
                    self.flying.append((self.through(items, now), items))
                    continue
                times += [one.request.arrival_ns for one in self.coming[:1]]
            if not times:
                return
            now = min(times)

    def through(self, items: Items, now: int) -> int:
        """When `items` leave the last stage, each of which they enter when it is free."""
        batch_tokens = sum(n for _, n in items)
        for stage, duration in enumerate((5 + batch_tokens, 17, 8)[: len(self.busy)]):
            now = self.busy[stage] = max(now, self.busy[stage]) + duration
        return now

    def end(self, items: Items, now: int) -> None:
        for one, n in items:
            one.computed += n
            if one.computed == one.goal:
                one.made += 1
                one.decodes = True
                one.told_ns.append(now)
            if one.made == one.arrival.output_tokens:
                self.held.remove(one)
            else:
                self.ready.append(one)

    def make(self) -> Items:
        raise NotImplementedError

    def fits(self, one: One) -> bool:
        spare = self.free - -(-one.goal // BLOCK)
        return spare >= (self.watermark if self.held else 0)

    def let_in(self, blocks: int) -> One:
        one = self.queue.pop(0)
        one.blocks = blocks
        self.held.append(one)
        return one

    def grow(self, one: One) -> bool:
        while not self.free:
            victim = self.ready.pop() if self.ready else one
            victim.blocks = victim.computed = 0
            victim.decodes = False
            self.held.remove(victim)
            self.queue.insert(0, victim)
            self.out.append(victim.request.id)
            if victim is one:
                return False
        one.blocks = max(one.blocks, -(-(one.computed + 1) // BLOCK))
        return True

    def sort(self) -> None:
        self.ready.sort(key=lambda one: one.request.arrival_ns)


class OrcaReplica(Replica):
    """A slot has room for 42 tokens, in blocks."""

    def make(self) -> Items:
        items: Items = []
        while self.ready and len(items) < self.cap:
            one = self.ready.pop(0)
            items.append((one, one.goal - one.computed))
        while self.queue and len(items) < self.cap and self.free >= -(-42 // BLOCK):
            one = self.let_in(-(-42 // BLOCK))
            items.append((one, one.goal))
        return items


class SarathiReplica(Replica):
    """Decodes, prompts begun, new ones."""

    def make(self) -> Items:
        items: Items = []
        begun: list[One] = []
        late: list[One] = []
        while self.ready and len(items) != self.micro:
            one = self.ready.pop(0)
            if not one.decodes:
                begun.append(one)
            elif self.grow(one):
                items.append((one, 1))
        for one in begun:
            n = min(one.goal - one.computed, max(self.tokens - sum(k for _, k in items), 0))
            if n:
                items.append((one, n))
            else:
                late.append(one)
        self.ready = late + self.ready
        self.sort()
        while self.queue and len(self.held) != self.cap and len(items) != self.micro and self.fits(self.queue[0]):
            n = min(self.queue[0].goal, max(self.tokens - sum(k for _, k in items), 0))
            if not n:
                break
            items.append((self.let_in(-(-self.queue[0].goal // BLOCK)), n))
        return items


class VllmReplica(Replica):
    """New prompts alone if any fits, else decodes."""

    def make(self) -> Items:
        items: Items = []
        while self.queue and self.fits(self.queue[0]):
            longest = max([self.queue[0].goal, *(n for _, n in items)])
            if (longest * (len(items) + 1) > self.tokens and self.held) or len(self.held) == self.cap:
                break
            if len(items) == self.micro:
                break
            one = self.let_in(-(-self.queue[0].goal // BLOCK))
            items.append((one, one.goal))
        if items:
            return items
        self.sort()
        while self.ready and len(items) != self.micro:
            one = self.ready.pop(0)
            if self.grow(one):
                items.append((one, 1))
        return items


@st.composite
def crowds(draw: st.DrawFn) -> list[Arrival]:
    """Requests that end alone in 12 blocks, closer to each other than they are served."""
    at, found = 0, []
    for i in range(draw(st.integers(2, 12))):
        at += draw(st.sampled_from([0, 0, 0, 1, 10, 13, 47]))
        prompt, output = draw(st.integers(1, 20)), draw(st.integers(1, 22))
        found.append(Arrival(Request(i, at, prompt, output), output))
    return found


@pytest.mark.parametrize(
    ("kind", "model"), [("orca", OrcaReplica), ("sarathi", SarathiReplica), ("vllm_v0", VllmReplica)]
)
@random_cases(50, derandomize=True)
@given(
    work=crowds(),
    stages=st.integers(2, 3),
    blocks=st.integers(12, 30),
    cap=st.integers(3, 9),
    tokens=st.sampled_from([2, 6, 20, 64]),
    mark=st.sampled_from([0.0, 0.1, 0.5]),
    host=st.sampled_from([(0, 0), (0, 0), (3, 2), (9, 21)]),
)
def test_every_batch_equals_that_of_the_plain_model(
    kind: str,
    model: type[Replica],
    work: list[Arrival],
    stages: int,
    blocks: int,
    cap: int,
    tokens: int,
    mark: float,
    host: tuple[int, int],
) -> None:
    """When it was made, batch order, tokens, preemptions, free blocks; and when each token came."""
    if kind == "orca":
        knobs: dict[str, Any] = {"batch_size_cap": cap, "max_tokens_per_request": 42}
    elif kind == "sarathi":
        knobs = {"batch_size_cap": cap, "chunk_size": tokens, "watermark_blocks_fraction": mark}
    else:
        tokens = max(tokens, 20)
        knobs = {"batch_size_cap": cap, "max_tokens_in_batch": tokens, "watermark_blocks_fraction": mark}
    plain = model(work, stages, blocks, cap, tokens, mark, host)
    plain.play()
    result = pipeline(kind, work, stages, blocks, Uneven(stages, host), **knobs)
    assert [(row.start_ns, row.items, row.preempted, row.free) for row in result.log] == plain.rows
    assert answered(result) == [(one.told_ns[0], one.told_ns[-1]) for one in plain.all]
