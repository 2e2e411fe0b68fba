"""The lengths of examples: by a law, of a file, or those of a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.files import parse_json, read_text, reason_text
from batchsim.base.ranges import INT32_MAX, Config, Range
from batchsim.workload.laws import Law, draw_tokens
from batchsim.workload.tagged import ByKind
from batchsim.workload.traces.read_trace import read_trace
from batchsim.workload.traces.trace_config import TraceConfig

Examples = Annotated[int, Range(1, 10**7)]
"""A number of examples."""


@dataclass(frozen=True)
class DrawnLengths(Config):
    """Lengths drawn from a law."""

    law: Law
    """The law, as that of prompts in `workload.lengths`."""
    examples: Examples
    """How many examples are drawn."""
    drift_to: Law | None = None
    """A law that takes the place of the first one by and by: example i of n is drawn from it with probability i/n.
    Null: all are drawn from the one."""
    kind: Literal["law"] = "law"


@dataclass(frozen=True)
class FileLengths(Config):
    """Lengths that a file lists: a number a line, or JSON, a list or an object with the key `lengths`."""

    path: str
    """The file, relative to the scenario's folder."""
    examples: Examples | None = None
    """How many of them are taken, from the first on. Null: all."""
    kind: Literal["file"] = "file"


@dataclass(frozen=True)
class TraceRowLengths(Config):
    """Lengths of the rows of a trace of requests, in its order."""

    trace: TraceConfig
    """The trace, as `workload.trace`."""
    of: Literal["prompt", "output", "both"] = "both"
    """Tokens of the prompt, of the answer, or of the two together."""
    examples: Examples | None = None
    """How many rows are taken, from the first on. Null: all."""
    kind: Literal["trace"] = "trace"


AnyExampleLengths = Annotated[DrawnLengths | FileLengths | TraceRowLengths, ByKind()]


def example_lengths(
    config: DrawnLengths | FileLengths | TraceRowLengths, folders: Sequence[Path], seed: int
) -> list[int]:
    """Tokens of each example. Files are looked for in `folders`, in their order; draws are keyed by `seed`.

    ScenarioError or TraceError where a file is missing, is not understood, or has too few.
    """
    if isinstance(config, DrawnLengths):
        drawn = draw_tokens(config.law, np.random.default_rng([seed, 0]), config.examples).tokens
        if config.drift_to is not None:
            later = draw_tokens(config.drift_to, np.random.default_rng([seed, 3]), config.examples).tokens
            turned = np.random.default_rng([seed, 4]).random(config.examples) * config.examples
            drawn = np.where(turned < np.arange(config.examples), later, drawn)
        return drawn.tolist()
    if isinstance(config, FileLengths):
        lengths = _of_file(_base(config.path, folders) / config.path)
        where = config.path
    else:
        trace = replace(config.trace, rate_scale=None, jitter=0)
        rows = read_trace(trace, _base(trace.path, folders))
        parts = {"prompt": rows.prompt_tokens, "output": rows.output_tokens}
        both = rows.prompt_tokens + rows.output_tokens
        lengths, where = parts.get(config.of, both).tolist(), trace.path
    if config.examples is not None:
        if config.examples > len(lengths):
            raise ScenarioError(
                f"training.lengths.examples is {config.examples:,} and {where} has {len(lengths):,}. Take fewer, or"
                " leave it out for all."
            )
        lengths = lengths[: config.examples]
    return lengths


def _base(path: str, folders: Sequence[Path]) -> Path:
    return next((folder for folder in folders if (folder / path).exists()), folders[0])


def _of_file(path: Path) -> list[int]:
    """The lengths that a file lists. ScenarioError, with the place, for what is none."""
    try:
        text = read_text(path)
        if text.lstrip()[:1] in ("[", "{"):
            value = parse_json(text)
            values = value.get("lengths") if isinstance(value, dict) else value
            if not isinstance(values, list):
                raise ScenarioError(f'{path}: has no list of lengths. Write [12, 34] or {{"lengths": [12, 34]}}.')
            places = [f"lengths[{i}]" for i in range(len(values))]
        else:
            lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
            places = [f"line {i}" for i, _ in lines]
            values = list[Any](int(word) if word.isdigit() else word for _, word in lines)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{path}: cannot be read: {reason_text(error)}. Give a file of lengths.") from None
    if not values:
        raise ScenarioError(f"{path}: has no lengths. Write a number a line.")
    for place, value in zip(places, values, strict=True):
        if type(value) is not int or not 1 <= value <= INT32_MAX:
            said = shown(value) if isinstance(value, str) else json.dumps(value)
            raise ScenarioError(f"{path}: {place} is {said}. A length is a whole number of tokens from 1.")
    return values
