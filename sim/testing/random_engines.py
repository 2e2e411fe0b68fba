"""Random engines with random workloads, of any policy, on a cost of whole ns: cases for the checks to be held on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.drive.live import VirtualClock, live
from batchsim.drive.simulate import simulate
from batchsim.kernel.acceptance import DrawnLuck
from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import DecodeLine, PolicyContext, Scheduler
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.policies.named_policy import policy_and_config
from batchsim.testing.random_configs import MAX_MODEL_LEN, MS, configs

Policy = str | type
"""A policy by its name in the registry, or the class of one."""


@dataclass(frozen=True)
class TokenCost:
    """Integer costs of every kind of work, so that equal schedules mean equal times."""

    base_ns: int = 2 * MS
    per_token_ns: int = 30_000
    per_context_ns: int = 37
    per_swapped_block_ns: int = 11_000
    stages: int = 1

    def step_ns(self, batch: Batch) -> int:
        tokens = batch.num_prefill_tokens + batch.num_decode_tokens + batch.pad_prefill_tokens + batch.pad_decode_rows
        context = batch.context_tokens + batch.pad_context_tokens
        swapped = sum(n for _, n in batch.swap_in) + sum(n for _, n in batch.swap_out)
        return (
            self.base_ns
            + self.per_token_ns * tokens
            + self.per_context_ns * context
            + self.per_swapped_block_ns * swapped
        )

    def decode_line(self, batch: Batch) -> DecodeLine:
        """In pieces of a thousand tokens, so that leaps meet their ends."""
        alone_ns = self.base_ns + self.per_token_ns * batch.num_decode
        return alone_ns, self.per_context_ns, batch.context_tokens // 1000 * 1000 + 999

    def lanes(self) -> TokenCost:
        return self

    def device_ns(self, batch: Batch) -> int:
        return self.step_ns(batch)

    def stages_ns(self, batch: Batch) -> tuple[int, ...]:
        """Unequal stages, the second the slowest."""
        return tuple(self.step_ns(batch) // (3 - k % 2) for k in range(self.stages))

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        """Now shorter than a step, now longer."""
        return (0, 0) if batch is None else (300_000, 200_000 + 40_000 * batch.num_decode)

    def recompute_ns(self, num_tokens: int) -> int:
        return self.base_ns + self.per_token_ns * num_tokens

    def swap_ns(self, num_blocks: int) -> int:
        return self.per_swapped_block_ns * num_blocks


class TrueLengths:
    """A predictor that knows the output lengths of a workload."""

    name = "oracle"

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._lengths = {arrival.request.id: arrival.output_tokens or 1 for arrival in arrivals}

    def predict(self, request: Request) -> int:
        return self._lengths.get(request.id, 1)


@dataclass(frozen=True)
class Listed:
    """Arrivals given in full; `thinks` makes each request of a listed user be followed by the next after that time."""

    known: tuple[Arrival, ...]
    following: tuple[tuple[int, Arrival], ...] = ()  # (think ns, template), taken in the order of answers by id

    def arrivals(self) -> Iterator[Arrival]:
        return iter(sorted(self.known, key=lambda a: (a.request.arrival_ns, a.request.id)))

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        """The follower of request i is template i, sent a think time after the answer."""
        if request.id >= len(self.following):
            return None
        think_ns, arrival = self.following[request.id]
        r = arrival.request
        sent_ns = now_ns + think_ns
        deadline_ns = None if r.deadline_ns is None else sent_ns + r.deadline_ns
        cancel_ns = None if arrival.cancel_ns is None else sent_ns + arrival.cancel_ns
        return Arrival(
            replace(r, arrival_ns=sent_ns, deadline_ns=deadline_ns),
            arrival.output_tokens,
            cancel_ns,
        )


@dataclass(frozen=True)
class Case:
    """One random engine with one random workload."""

    kind: Policy
    config: Any
    num_blocks: int
    block_size: int
    num_swap_blocks: int
    workload: Listed
    stop_ns: int | None = None
    stages: int = 1
    cost: Any = None
    """The cost of its steps; None: `TokenCost`."""

    def engine(self, *, ids: bool = False) -> EngineCore:
        """A fresh engine; `ids`: with block ids in any case. ScenarioError if the policy refuses this memory."""
        kv = new_kv(self.config, self.num_blocks, self.block_size, self.num_swap_blocks, ids=ids)
        cost = self.cost or TokenCost(stages=self.stages)
        loop = self.config.traits.loop.over(self.stages)
        everything = [*self.workload.known, *(arrival for _, arrival in self.workload.following)]
        context = PolicyContext(kv, MAX_MODEL_LEN, TrueLengths(everything), cost, loop)
        scheduler: Scheduler = policy_and_config(self.kind)[1](self.config, context)
        return EngineCore(
            scheduler,
            SimExecutor(cost, MAX_MODEL_LEN, loop, self.luck),
            Recorder(),
            max_model_len=MAX_MODEL_LEN,
            stop_ns=self.stop_ns,
            loop=loop,
        )

    @property
    def luck(self) -> DrawnLuck | None:
        """What drafts are worth, if the policy has any; the classes of its law are none of the requests'."""
        speculation = self.config.traits.speculation
        if speculation is None:
            return None
        return DrawnLuck(0, {"": next(iter(speculation.positions.values()))}, speculation.found)

    def simulate(self, *, leap: bool = True) -> EngineCore:
        core = self.engine()
        simulate(core, self.workload, leap=leap)
        return core

    def live(self, *, ids: bool = False) -> EngineCore:
        core = self.engine(ids=ids)
        live(core, self.workload, VirtualClock())
        return core


@st.composite
def token_ids(draw: st.DrawFn, id_: int, prompt: int) -> TokenIds | None:
    """A prompt that may begin as others do or go on from what others generated, its end being its own; or None."""
    if draw(st.booleans()):
        return None
    streams = st.one_of(st.sampled_from([0, 0, 1]).map(prompt_stream), st.integers(0, id_ + 1).map(output_stream))
    part = st.tuples(streams, st.sampled_from([0, 0, 0, 3]), st.sampled_from([2, 16, 33, 64]))
    segments: list[Segment] = []
    left = prompt
    for stream, start, length in draw(st.lists(part, max_size=3)):
        if left:
            segments.append((stream, start, min(length, left)))
            left -= min(length, left)
    return TokenIds.of([*segments, (prompt_stream(1000 + id_), 0, left)] if left else segments)


@st.composite
def requests(draw: st.DrawFn, id_: int, arrival_ns: int, *, relative: bool) -> Arrival:
    prompt = draw(st.one_of(st.integers(1, 40), st.integers(1, 160)))
    output = draw(st.one_of(st.integers(1, 6), st.integers(1, 60)))
    cap = output + draw(st.sampled_from([0, 0, 7, 40]))
    start = 0 if relative else arrival_ns
    deadline = draw(st.one_of(st.none(), st.none(), st.integers(0, 400 * MS)))
    cancel = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 300 * MS)))
    request = Request(
        id_,
        arrival_ns,
        prompt,
        cap,
        priority=draw(st.integers(0, 2)),
        deadline_ns=None if deadline is None else start + deadline,
        tokens=draw(token_ids(id_, prompt)),
    )
    return Arrival(request, output, None if cancel is None else start + cancel)


@st.composite
def cases(draw: st.DrawFn, kind: Policy, fixed: Mapping[str, Any] | None = None) -> Case | None:
    """A case of this policy, with the `fixed` knobs; None where the drawn ones are refused."""
    config = draw(configs(policy_and_config(kind)[0], fixed or {}))
    if config is None:
        return None
    count = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 2 * MS, 9 * MS, 40 * MS]), min_size=count, max_size=count))
    now_ns, known = 0, []
    for i, gap in enumerate(gaps):
        now_ns += gap
        known.append(draw(requests(i, now_ns, relative=False)))
    thinks = draw(st.lists(st.sampled_from([0, 1, 5 * MS, 30 * MS]), max_size=count))
    following = tuple((think, draw(requests(count + i, 0, relative=True))) for i, think in enumerate(thinks))
    return Case(
        kind,
        config,
        num_blocks=draw(st.integers(3, 60)),
        block_size=draw(st.sampled_from([1, 4, 16])),
        num_swap_blocks=draw(st.sampled_from([0, 5, 60])),
        workload=Listed(tuple(known), following),
        stop_ns=draw(st.sampled_from([None, None, None, now_ns, now_ns + 50 * MS])),
        stages=draw(st.sampled_from([1, 1, 2, 3])) if config.traits.pipelines else 1,
    )


def built(case: Case | None) -> bool:
    """Whether the policy takes this config with this memory at all."""
    if case is None:
        return False
    try:
        case.engine()
    except ScenarioError:
        return False
    return True
