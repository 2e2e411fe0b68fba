"""Reads from the two lines of vLLM how many blocks a model has whose layers are in several groups.

Up to 0.20 `GPU KV cache size` is the blocks over the groups, times the tokens of the least block, and `Maximum
concurrency` the blocks over those of a longest request; from 0.21 on the former is the latter times that length. Which
states a request keeps, no line says: every way is tried, and the numbers must allow exactly one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import NamedTuple

from batchsim.base.errors import ScenarioError
from batchsim.deployment.kv_groups import Grouped, States, group_layers, has_states
from batchsim.deployment.log_lines import CACHES, DEGREES, DRAFT_TOKENS, FP8, FULL, GROWN, RUNNING, STEP, Wanted
from batchsim.deployment.model import ModelSpec
from batchsim.deployment.on_gpus import ModelOnGpus, stage_layers
from batchsim.deployment.quantisation import ELEMENT_BYTES
from batchsim.deployment.vllm_memory import release

OLDEST_BY_REQUESTS = (0, 21)
"""The release from which on tokens are those of longest requests. Source: vllm-project/vllm issue 43308."""
_ROUNDED = 0.0051
"""By how much a quotient may be off that is printed with two digits."""


class VllmLines(NamedTuple):
    """What a log of vLLM says. `tokens` and `count` requests of `length` tokens fit. `version` "": not said.
    `step_tokens`: of the largest step. `drafts`: draft tokens of a request in a step, of a drafter with `draft_layers`.
    `block_size`: of attention, where it is said that it grew for states, else None. `prefix_cache`: None: not said."""

    tokens: int
    length: int
    count: float
    version: str = ""
    step_tokens: int = 8192
    drafts: int = 0
    draft_layers: int = 0
    block_size: int | None = None
    prefix_cache: bool | None = None


class LoggedGroups(NamedTuple):
    """The groups, and how many blocks they share, the null block among them."""

    grouped: Grouped
    num_blocks: int


def read_groups(lines: VllmLines, engine: ModelOnGpus, block_size: int, path: object) -> LoggedGroups:
    """The one way in which the model of `engine` can be in groups of which these lines are; ScenarioError, which names
    the log at `path`, where there is none, or where there are several."""
    ways: dict[tuple[object, int], LoggedGroups] = {}
    for grouped, batches in _ways(lines, engine, block_size):
        needed = grouped.request_blocks(lines.length, lines.step_tokens * batches)
        for blocks in _blocks(lines, grouped, needed):
            ways.setdefault((grouped.layout, blocks), LoggedGroups(grouped, blocks))
    if len(ways) == 1:
        return next(iter(ways.values()))
    model, said = engine.model, f"{lines.tokens:,} tokens and {lines.count:g} requests of {lines.length:,}"
    if not ways:
        grouped, _ = next(_ways(lines._replace(block_size=None, prefix_cache=None), engine, block_size))
        size = max(map(len, grouped.layers))
        blocks = grouped.layout.unit if has_states(model) else block_size
        raise ScenarioError(
            f"kv.log: {path} says {said}, which {len(grouped.layers)} groups of {size} layers of {model.name} cannot be"
            f" in blocks of {blocks}. Give its own log, or write kv: {{tokens: N}}."
        )
    shown = "; ".join(f"{way.num_blocks:,} blocks of {way.grouped.layout}" for way in ways.values())
    raise ScenarioError(
        f"kv.log: {path} says {said}, which may be {shown}. Give the whole log, with vLLM's version and configuration."
    )


def _ways(lines: VllmLines, engine: ModelOnGpus, block_size: int) -> Iterator[tuple[Grouped, int]]:
    """The groups that the model may be in, by which states are kept, and how many batches may be in flight."""
    keeps = [States(False, lines.drafts)]
    if has_states(engine.model):
        keeps += [States(True, lines.drafts), States(True, lines.drafts, checkpoint=True)]
    for states in keeps:
        if lines.prefix_cache is not None and has_states(engine.model) and states.aligned != lines.prefix_cache:
            continue
        element = ELEMENT_BYTES[engine.types.kv]
        layers = lines.draft_layers
        grouped = group_layers(engine.model, engine.tp, element, states, block_size=block_size, draft_layers=layers)
        if lines.block_size in (None, *(group.block_size for group in grouped.layout.groups)):
            yield from ((grouped, batches) for batches in (1, 2))


def _blocks(lines: VllmLines, grouped: Grouped, needed: int) -> Iterator[int]:
    """Blocks of which the lines can be, where a longest request holds `needed` of them, by the rule of the version, or
    by either where none is known."""
    version = release(lines.version) if lines.version else None
    if version is None or version >= OLDEST_BY_REQUESTS:
        blocks = ceil(lines.tokens * needed / lines.length)
        if int(blocks * lines.length / needed) == lines.tokens and abs(blocks / needed - lines.count) <= _ROUNDED:
            yield blocks
    if version is None or version < OLDEST_BY_REQUESTS:  # the line has lost up to one block of all groups but one
        groups, size = len(grouped.layers), min(group.block_size for group in grouped.layout.groups)
        first = lines.tokens // size * groups
        fitting = [n for n in range(first, first + groups) if abs(n / needed - lines.count) <= _ROUNDED]
        if fitting and not lines.tokens % size:
            yield fitting[0]


def groups_in(text: str, path: Path, model: ModelSpec, wanted: Wanted, version: str, tokens: int) -> LoggedGroups:
    """The groups of a model's layers and the blocks that they share, by vLLM's two lines."""
    degrees = {name: getattr(wanted, name) for name in DEGREES}
    for name, pattern in DEGREES.items():
        logged = pattern.search(text)
        degrees[name] = degrees[name] if isinstance(degrees[name], int) else int(logged[1]) if logged else 1
    kv_type = wanted.kv if wanted.kv in ELEMENT_BYTES else "fp8" if FP8.search(text) else ""
    engine = ModelOnGpus(model, engine="vllm", tp=degrees["tp"], pp=degrees["pp"], kv_dtype=kv_type)
    said = FULL.search(text)
    sure = version or has_states(model) or len({each.attention for each in model.kinds}) == 1
    if said is None or not sure:
        raise ScenarioError(
            f"kv.log: {path} does not say enough of {model.name}, whose layers keep unlike numbers of tokens: needed"
            " are vLLM's version, 'GPU KV cache size' and 'Maximum concurrency'. Give the whole log, or write kv:"
            " {tokens: N}."
        )
    drafts = DRAFT_TOKENS.search(text)
    grown, cached = GROWN.search(text), CACHES.search(text)
    lines = VllmLines(
        tokens,
        int(said[1].replace(",", "")),
        float(said[2]),
        version,
        int(next(iter(STEP.findall(text)), 8192)),
        int(drafts[1]) if drafts else 0,
        1 if drafts and "ngram" not in text[drafts.start() - 200 : drafts.start()] else 0,
        int(grown[1]) if grown else None,
        None if cached is None else cached[1] == "True",
    )
    return read_groups(lines, engine, wanted.block_size, path)


def block_bytes(grouped: Grouped, model: ModelSpec, wanted: Wanted) -> int:
    """Bytes of a block on a GPU of the stage that has most of it."""
    stages = wanted.pp if isinstance(wanted.pp, int) and wanted.pp > 0 else 1
    last = 1 + max(max(group) for group in grouped.layers)
    starts = [0, *accumulate(stage_layers(model.num_hidden_layers, stages))][:-1]
    ends = [*starts[1:], last]
    return max(grouped.block_bytes(*own) for own in zip(starts, ends, strict=True))


def check_states(text: str, path: Path, model: ModelSpec, wanted: Wanted, engine: str) -> None:
    """ScenarioError where a log of another engine than vLLM does not say for how many requests there are states, or the
    policies run more."""
    if engine != "sglang":
        raise ScenarioError(
            f"kv.log: {path} is of {engine}, and what it keeps of the linear layers of {model.name} is not known. Write"
            " kv: {memory: ..., per_token: ..., per_request: ...}."
        )
    most = RUNNING.search(text)
    if most is None:
        raise ScenarioError(
            f"kv.log: {path} does not say for how many requests there are states: 'max_running_requests=N', beside"
            " 'max_total_num_tokens=N'. Give the whole log."
        )
    if wanted.max_num_seqs is None or wanted.max_num_seqs > int(most[1]):
        ours = "do not say how many" if wanted.max_num_seqs is None else f"run up to {wanted.max_num_seqs:,}"
        raise ScenarioError(
            f"kv.log: {path} says that {int(most[1]):,} requests run at once, for each of which there are states, and"
            f" the policies {ours}. Write max_running_requests: {most[1]}."
        )
