"""Random knobs for any config, by the types of its fields: small, so that limits bite."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.ranges import Range
from batchsim.base.units import NS_PER_S, Quantity
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.tensorrt_llm.decoding_config import DecodingConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.policies.systems.vidur.sarathi import ChunkSchedule
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.workload.processes import MmppState

MAX_MODEL_LEN = 400
MS = 1_000_000
TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
APART = ("speculative_algorithm", *TREE, "acceptance")  # knobs that are drawn together


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a config field by its type; small, so that limits bite."""
    origin = get_origin(hint)
    if origin is Annotated:
        inner, *marks = get_args(hint)
        unit = next((mark for mark in marks if isinstance(mark, Quantity)), None)
        if unit is None:
            range_ = next((mark for mark in marks if isinstance(mark, Range)), None)
            return values(inner) if range_ is None else _near_the_end(inner, range_)
        if unit.example == "8/s":
            return st.sampled_from([0.5, 8.0, 40.0])
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
        return st.lists(values(get_args(hint)[0]), max_size=3, unique=True).map(_in_order)
    if origin is dict:
        return st.dictionaries(*(values(part) for part in get_args(hint)), max_size=2)
    if hint is SpeculativeConfig:
        return drafts()
    if hint is ChunkSchedule:
        sizes = st.tuples(st.sampled_from([32, 64]), st.sampled_from([64, 96]))
        rest = st.tuples(st.sampled_from([100, MAX_MODEL_LEN]), st.integers(1, 4))
        return st.tuples(sizes, rest).map(lambda drawn: ChunkSchedule(*drawn[0], *drawn[1]))
    if hint is MmppState:
        rates, stays = st.sampled_from([0.1, 1.0, 5.0]), st.integers(1, 20).map(lambda s: s * NS_PER_S)
        return st.builds(MmppState, rates, stays, st.sampled_from([0.5, 1.0, 3.0]))
    if hint is DecodingConfig:
        return drafts_of_tensorrt_llm()
    if is_dataclass(hint):
        return knobs(hint, {}).map(lambda drawn: made(hint, drawn)).filter(lambda config: config is not None)
    shares = st.floats(0.0, 0.3).map(lambda share: round(share, 4))  # no rate so low that nothing ever comes
    simple = {int: st.integers(0, 40), bool: st.booleans(), float: shares, type(None): st.none()}
    if hint not in simple:
        raise ScenarioError(f"random values of type {shown(hint)} are not known. Fix this knob: --set KNOB=VALUE.")
    return simple[hint]


def _in_order(drawn: list[Any]) -> tuple[Any, ...]:
    return tuple(drawn if any(is_dataclass(one) for one in drawn) else sorted(drawn))


def _near_the_end(inner: Any, range_: Range) -> st.SearchStrategy[Any]:
    """The values of a number without a range, 0 and what is refused among them, unless all lie below `range_`."""
    if inner is int and range_.low > 40:
        return st.integers(int(range_.low), int(min(range_.low + 40, range_.high)))
    if inner is float and range_.low >= 0.3:
        return st.floats(range_.low, min(range_.low + 4, range_.high), exclude_min=range_.above)
    return values(inner)


@st.composite
def drafts(draw: st.DrawFn) -> SpeculativeConfig:
    """Any drafter with up to 9 draft tokens a step: random knobs would hardly ever agree with each other."""
    method: Any = draw(st.sampled_from(["ngram", "eagle", "eagle3", "mtp", "draft_model"]))
    in_text = draw(st.sampled_from([1.0, 0.6])) if method == "ngram" else 1.0
    return SpeculativeConfig(method, draw(st.integers(1, 9)), draw(st.sampled_from([0.0, 0.7, 1.0])), in_text)


@st.composite
def drafts_of_tensorrt_llm(draw: st.DrawFn) -> DecodingConfig:
    """The same by TensorRT-LLM's names; most often a drafter in the model, which may overlap."""
    kind = draw(st.sampled_from(["Eagle3", "Eagle3", "MTP", "Draft_Target", "NGram"]))
    in_text = draw(st.sampled_from([1.0, 0.6])) if kind == "NGram" else 1.0
    number: dict[str, Any] = {"num_nextn_predict_layers" if kind == "MTP" else "max_draft_len": draw(st.integers(1, 6))}
    return DecodingConfig(kind, draw(st.sampled_from([0.0, 0.7, 1.0])), found=in_text, **number)


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
def knobs(
    draw: st.DrawFn, config: Any, fixed: Mapping[str, Any], asked: Collection[str] | None = None
) -> dict[str, Any]:
    """A value for each field of a config, or for those `asked` for, that is not drawn APART; microseconds are up to
    some steps long."""
    hints = get_type_hints(config, include_extras=True)
    drawn = dict(fixed)
    for knob in fields(config):
        if knob.name in APART or (asked is not None and knob.name not in asked) or knob.name in fixed or not knob.init:
            continue
        of_time = knob.name.endswith(("_micros", "_microseconds"))
        drawn[knob.name] = draw(st.integers(0, 20_000) if of_time else values(hints[knob.name]))
    return drawn


def needed(config: Any) -> set[str]:
    """The knobs without a default."""
    return {knob.name for knob in fields(config) if knob.default is MISSING and knob.default_factory is MISSING}


def made(config: Any, drawn: dict[str, Any]) -> Any:
    """The config, or None where it refuses these values."""
    try:
        return config(**drawn)
    except ValueError:
        return None


def lone(config: Any, drawn: dict[str, Any], name: str) -> str:
    """What the config says of this one value, all others that have a default being at it; "" if it takes it."""
    try:
        config(**{knob: value for knob, value in drawn.items() if knob in needed(config) or knob == name})
    except ValueError as error:
        return str(error)
    return ""


@st.composite
def configs(draw: st.DrawFn, config: Any, fixed: Mapping[str, Any], asked: Collection[str] | None = None) -> Any:
    """A config of this type with the `fixed` knobs and random others, or those `asked` for; None where it refuses them.
    Token budgets are often ample.

    What is not simulated is left at its default, and so are some other knobs.
    """
    drawn = draw(knobs(config, fixed, asked))
    kept = needed(config) | set(fixed)
    for knob in [knob for knob in drawn if knob not in kept]:
        if "not simulated" in lone(config, drawn, knob) or draw(st.integers(0, 3)) == 0:
            del drawn[knob]
    if config is SglangConfig and (drafting := draw(drafts_of_sglang())):
        drawn |= drafting
        drawn.pop("disable_consecutive_prefill_overlap", None)
    if config is TensorrtLlmConfig and drawn.get("backend") != "tensorrt" and not drawn.get("enable_chunked_prefill"):
        drawn["max_num_tokens"] = max(drawn.get("max_num_tokens", 0), MAX_MODEL_LEN)  # else a pause may end the engine
    if isinstance(drawn.get("max_num_batched_tokens"), int):
        small = drawn["max_num_batched_tokens"] + 8
        drawn["max_num_batched_tokens"] = draw(st.sampled_from([small, 64, MAX_MODEL_LEN]))
    return made(config, drawn | dict(fixed))
