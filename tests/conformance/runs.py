"""Random engines and workloads for every registered policy. Registering a policy is enough to be tested."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.base.units import Quantity
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
from batchsim.policies.registry import POLICIES
from batchsim.policies.systems.tensorrt_llm.decoding_config import DecodingConfig
from batchsim.policies.systems.vidur.sarathi import ChunkSchedule
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig

MAX_MODEL_LEN = 400
MS = 1_000_000
TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
APART = ("speculative_algorithm", *TREE, "acceptance")  # knobs that are drawn together


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

    kind: str
    config: Any
    num_blocks: int
    block_size: int
    num_swap_blocks: int
    workload: Listed
    stop_ns: int | None = None
    stages: int = 1

    def engine(self, *, ids: bool = False) -> EngineCore:
        """A fresh engine; `ids`: with block ids in any case. ScenarioError if the policy refuses this memory."""
        kv = new_kv(self.config, self.num_blocks, self.block_size, self.num_swap_blocks, ids=ids)
        cost = TokenCost(stages=self.stages)
        loop = self.config.traits.loop.over(self.stages)
        everything = [*self.workload.known, *(arrival for _, arrival in self.workload.following)]
        context = PolicyContext(kv, MAX_MODEL_LEN, TrueLengths(everything), cost, loop)
        scheduler: Scheduler = POLICIES[self.kind][1](self.config, context)
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


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a config field by its type; small, so that limits bite."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *marks = get_args(hint)
        unit = next((mark for mark in marks if isinstance(mark, Quantity)), None)
        if unit is None:
            return values(inner)
        if unit.example == "50ms":
            return st.integers(0, 60 * MS)
        if unit.example == "500W":
            return st.sampled_from([50.0, 100.0, 200.0, 400.0])
        return st.floats(0.0, 0.5) if inner is float else st.integers(0, 1000)
    if origin is Literal:
        return st.sampled_from(get_args(hint))
    if origin in (Union, types.UnionType):
        return st.one_of([values(part) for part in get_args(hint)])
    if origin is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3, unique=True).map(lambda v: tuple(sorted(v)))
    if origin is dict:
        return st.dictionaries(*(values(part) for part in get_args(hint)), max_size=2)
    if hint is SpeculativeConfig:
        return drafts()
    if hint is ChunkSchedule:
        sizes = st.tuples(st.sampled_from([32, 64]), st.sampled_from([64, 96]))
        rest = st.tuples(st.sampled_from([100, MAX_MODEL_LEN]), st.integers(1, 4))
        return st.tuples(sizes, rest).map(lambda drawn: ChunkSchedule(*drawn[0], *drawn[1]))
    if hint is DecodingConfig:
        return drafts_of_tensorrt_llm()
    if is_dataclass(hint):
        return knobs(hint).map(lambda drawn: made(hint, drawn)).filter(lambda config: config is not None)
    simple = {int: st.integers(0, 40), bool: st.booleans(), float: st.floats(0.0, 0.3), type(None): st.none()}
    return simple[hint]


@st.composite
def drafts(draw: st.DrawFn) -> SpeculativeConfig:
    """Any drafter with up to 9 draft tokens a step: random knobs would hardly ever agree with each other."""
    method = draw(st.sampled_from(["ngram", "eagle", "eagle3", "mtp", "draft_model"]))
    found = draw(st.sampled_from([1.0, 0.6])) if method == "ngram" else 1.0
    return SpeculativeConfig(method, draw(st.integers(1, 9)), draw(st.sampled_from([0.0, 0.7, 1.0])), found)


@st.composite
def drafts_of_tensorrt_llm(draw: st.DrawFn) -> DecodingConfig:
    """The same by TensorRT-LLM's names; most often a drafter in the model, which may overlap."""
    kind = draw(st.sampled_from(["Eagle3", "Eagle3", "MTP", "Draft_Target", "NGram"]))
    found = draw(st.sampled_from([1.0, 0.6])) if kind == "NGram" else 1.0
    number = {"num_nextn_predict_layers" if kind == "MTP" else "max_draft_len": draw(st.integers(1, 6))}
    return DecodingConfig(kind, draw(st.sampled_from([0.0, 0.7, 1.0])), found=found, **number)


@st.composite
def drafts_of_sglang(draw: st.DrawFn) -> dict[str, Any]:
    """The same by SGLang's arguments, which are knobs of the policy itself; often none."""
    algorithm = draw(st.sampled_from([None, "EAGLE", "STANDALONE", "NGRAM"]))
    if algorithm is None:
        return {}
    drawn = {"speculative_algorithm": algorithm, "disable_overlap_schedule": draw(st.booleans())}
    drawn["acceptance"] = draw(st.sampled_from([0.0, 0.7, 1.0]))
    if algorithm == "NGRAM":
        return drawn | {"enable_mixed_chunk": False, "speculative_num_draft_tokens": draw(st.integers(2, 12))}
    if algorithm == "STANDALONE":
        return drawn | {"enable_mixed_chunk": False}
    topk = draw(st.sampled_from([1, 1, 2, 4]))
    tree = {"speculative_num_draft_tokens": draw(st.integers(2, 12))} if topk > 1 else {}
    return drawn | tree | {"speculative_num_steps": draw(st.integers(1, 6)), "speculative_eagle_topk": topk}


@st.composite
def knobs(draw: st.DrawFn, config: Any) -> dict[str, Any]:
    """A value for each field of a config that is not drawn APART; microseconds are up to some steps long."""
    hints = get_type_hints(config, include_extras=True)
    drawn = {}
    for knob in fields(config):
        if knob.name in APART:
            continue
        of_time = knob.name.endswith(("_micros", "_microseconds"))
        drawn[knob.name] = draw(st.integers(0, 20_000) if of_time else values(hints[knob.name]))
    return drawn


def made(config: Any, drawn: dict[str, Any]) -> Any:
    """The config, or None where it refuses these values."""
    try:
        return config(**drawn)
    except ValueError:
        return None


def lone(config: Any, drawn: dict[str, Any], name: str) -> str:
    """What the config says of this one value, all others that have a default being at it; "" if it takes it."""
    needed = {f.name for f in fields(config) if f.default is MISSING and f.default_factory is MISSING}
    try:
        config(**{knob: value for knob, value in drawn.items() if knob in needed or knob == name})
    except ValueError as error:
        return str(error)
    return ""


@st.composite
def configs(draw: st.DrawFn, kind: str) -> Any:
    """A config of the policy, its own checks deciding what is one. Token budgets are often ample.

    What is not simulated is left at its default, and so are some other knobs.
    """
    config = POLICIES[kind][0]
    drawn = draw(knobs(config))
    for knob in fields(config):
        if knob.name not in drawn or (knob.default is MISSING and knob.default_factory is MISSING):
            continue
        if "not simulated" in lone(config, drawn, knob.name) or draw(st.integers(0, 3)) == 0:
            del drawn[knob.name]
    if kind == "sglang" and (drafting := draw(drafts_of_sglang())):
        drawn |= drafting
        drawn.pop("disable_consecutive_prefill_overlap", None)
    if kind == "tensorrt_llm" and drawn.get("backend") != "tensorrt" and not drawn.get("enable_chunked_prefill"):
        drawn["max_num_tokens"] = max(drawn.get("max_num_tokens", 0), MAX_MODEL_LEN)  # else a pause may end the engine
    if isinstance(drawn.get("max_num_batched_tokens"), int):
        small = drawn["max_num_batched_tokens"] + 8
        drawn["max_num_batched_tokens"] = draw(st.sampled_from([small, 64, MAX_MODEL_LEN]))
    return made(config, drawn)


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
