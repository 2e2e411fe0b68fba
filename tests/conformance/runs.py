"""Random engines and workloads for every registered policy. Registering a policy is enough to be tested."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from sim.core import EngineCore, SimExecutor
from sim.errors import ScenarioError
from sim.kv import CountingKV
from sim.live import VirtualClock, live
from sim.policies import POLICIES
from sim.record import Recorder
from sim.simulate import simulate
from sim.types import Arrival, Batch, PolicyContext, Request, Scheduler

MAX_MODEL_LEN = 400
MS = 1_000_000


@dataclass(frozen=True)
class TokenCost:
    """Integer costs of every kind of work, so that equal schedules mean equal times."""

    base_ns: int = 2 * MS
    per_token_ns: int = 30_000
    per_context_ns: int = 37
    per_swapped_block_ns: int = 11_000

    def step_ns(self, batch: Batch) -> int:
        tokens = batch.num_prefill_tokens + batch.num_decode + batch.pad_prefill_tokens + batch.pad_decode_rows
        context = batch.context_tokens + batch.pad_context_tokens
        swapped = sum(n for _, n in batch.swap_in) + sum(n for _, n in batch.swap_out)
        return (
            self.base_ns
            + self.per_token_ns * tokens
            + self.per_context_ns * context
            + self.per_swapped_block_ns * swapped
        )

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
            Request(r.id, sent_ns, r.prompt_tokens, r.max_output_tokens, r.priority, deadline_ns=deadline_ns),
            arrival.output_tokens,
            cancel_ns,
        )


@dataclass(frozen=True)
class Case:
    """One random engine with one random workload."""

    kind: str
    config: Any
    num_blocks: int
    block_size: int
    num_swap_blocks: int
    workload: Listed
    stop_ns: int | None = None

    def engine(self, kv_class: type = CountingKV) -> EngineCore:
        """A fresh engine; ScenarioError if the policy refuses this memory."""
        kv = kv_class(self.num_blocks, self.block_size, self.num_swap_blocks)
        cost = TokenCost()
        everything = [*self.workload.known, *(arrival for _, arrival in self.workload.following)]
        context = PolicyContext(kv, MAX_MODEL_LEN, TrueLengths(everything), cost)
        scheduler: Scheduler = POLICIES[self.kind][1](self.config, context)
        return EngineCore(
            scheduler,
            SimExecutor(cost, MAX_MODEL_LEN),
            Recorder(),
            max_model_len=MAX_MODEL_LEN,
            stop_ns=self.stop_ns,
        )

    def simulate(self, *, leap: bool = True) -> EngineCore:
        core = self.engine()
        simulate(core, self.workload, leap=leap)
        return core

    def live(self, kv_class: type = CountingKV) -> EngineCore:
        core = self.engine(kv_class)
        live(core, self.workload, VirtualClock())
        return core


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a config field by its type; small, so that limits bite."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, unit = get_args(hint)[:2]
        if unit.example == "50ms":
            return st.integers(0, 60 * MS)
        return st.floats(0.0, 0.5) if inner is float else st.integers(0, 1000)
    if origin is Literal:
        return st.sampled_from(get_args(hint))
    if origin in (Union, types.UnionType):
        return st.one_of([values(part) for part in get_args(hint)])
    if origin is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3, unique=True).map(lambda v: tuple(sorted(v)))
    simple = {int: st.integers(0, 40), bool: st.booleans(), float: st.floats(0.0, 0.3), type(None): st.none()}
    return simple[hint]


@st.composite
def configs(draw: st.DrawFn, kind: str) -> Any:
    """A config of the policy, its own checks deciding what is one. Token budgets are often ample."""
    config = POLICIES[kind][0]
    hints = get_type_hints(config, include_extras=True)
    knobs = {f.name: draw(values(hints[f.name])) for f in fields(config)}
    for name in ("enable_prefix_caching", "async_scheduling"):
        if name in knobs:
            knobs[name] = False
    if isinstance(knobs.get("max_num_batched_tokens"), int):
        small = knobs["max_num_batched_tokens"] + 8
        knobs["max_num_batched_tokens"] = draw(st.sampled_from([small, 64, MAX_MODEL_LEN]))
    try:
        return config(**knobs)
    except ValueError:
        return None


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
    )
    return Arrival(request, output, None if cancel is None else start + cancel)


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case | None:
    config = draw(configs(kind))
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
