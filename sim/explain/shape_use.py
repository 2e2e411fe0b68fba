"""What compiled shapes came to in a run: padding by dimension, steps by program, compilations while requests waited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import parse_duration_ns
from batchsim.kernel.record import Records


@dataclass(frozen=True)
class ProgramUse:
    """Steps of one program: what it is of and its sizes in words, their number and their time in ns."""

    what: str
    sizes: str
    steps: int
    ns: int


@dataclass(frozen=True)
class ShapeUse:
    """The use of compiled shapes in one run.

    `padding`: by dimension (rows of decodes, context read, tokens of prompts) the part that was padding, None of what
    no step had. `programs` by time, most first. `compiled` are the programs that steps waited for, `wait_ns` their
    waiting in all, `held` the requests that were running or queued in each such step, summed.
    """

    preset: str
    padding: Mapping[str, float | None]
    programs: tuple[ProgramUse, ...]
    compiled: int = 0
    wait_ns: int = 0
    held: int = 0

    @property
    def total_ns(self) -> int:
        """The time of all steps in ns."""
        return sum(each.ns for each in self.programs)


def shapes_of(scenario: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The compiled shapes that a scenario, as plain values, states for its engines; None if it states none."""
    cost = scenario.get("cost")
    return (cost.get("shapes") or None) if isinstance(cost, Mapping) else None


def shape_use(shapes: Mapping[str, Any], records: Records, rest_ns: NDArray[np.float64] | None = None) -> ShapeUse:
    """The use of `shapes`, as a scenario states them, in the steps of `records`.

    `rest_ns`: by how much each step was longer than its work explains; None: not known, and no waiting is stated.
    """
    columns = {name: column.astype(np.int64) for name, column in records.step_columns.items()}
    rows = columns["num_decode_tokens"] + columns["pad_decode_rows"]
    context = columns["context_tokens"] + columns["pad_context_tokens"]
    tokens = columns["num_prefill_tokens"] + columns["pad_prefill_tokens"]
    padding = {
        "rows of decodes": _share(columns["pad_decode_rows"], rows),
        "context read": _share(columns["pad_context_tokens"], context),
        "tokens of prompts": _share(columns["pad_prefill_tokens"], tokens),
    }
    read = np.where(columns["pad_context_tokens"] > 0, context // np.maximum(rows, 1), 0)
    if flat := shapes["preset"] in ("tpu", "cuda_graphs") or bool(shapes.get("mix")):
        padding = {"tokens": _share(columns["pad_decode_rows"], rows + tokens)}
        rows, tokens, read = rows + tokens, np.zeros_like(rows), np.zeros_like(rows)
    keys, at = np.unique(np.stack([rows, read, tokens], axis=1), axis=0, return_inverse=True)
    at = at.reshape(-1)
    steps, ns = np.bincount(at), np.bincount(at, columns["duration_ns"])
    programs = [
        ProgramUse(*_words(row, each, token, flat=flat), int(steps[i]), int(ns[i]))
        for i, (row, each, token) in enumerate(keys.tolist())
    ]
    programs.sort(key=lambda each: -each.ns)
    compiled, waited_ns, held = 0, 0, 0
    each_ns = _compile_ns(shapes)
    if each_ns and rest_ns is not None:
        of_step = np.rint(rest_ns / each_ns).astype(np.int64)
        compiled, waits = int(of_step.sum()), of_step > 0
        waited_ns = int(rest_ns[waits].sum())
        held = int((columns["num_running"] + columns["num_waiting"])[waits].sum())
    return ShapeUse(shapes["preset"], padding, tuple(programs), compiled, waited_ns, held)


def _compile_ns(shapes: Mapping[str, Any]) -> int:
    """The ns of a compilation while a step waits; 0 where there are none."""
    stated = shapes.get("compile") or 0
    return parse_duration_ns(stated) if isinstance(stated, str) else int(stated)


def _share(pad: NDArray[np.int64], whole: NDArray[np.int64]) -> float | None:
    every = int(whole.sum())
    return int(pad.sum()) / every if every else None


def _words(rows: int, read: int, tokens: int, *, flat: bool) -> tuple[str, str]:
    """(What a program is of, its sizes) in words."""
    if flat:
        return "steps", f"{rows:,} tokens"
    decodes = f"{rows:,} decodes" + (f" of {read:,} tokens" if read else "")
    if rows and tokens:
        return "mixed", f"{decodes}, {tokens:,} tokens of prompts"
    return ("decodes", decodes) if rows else ("prompts", f"{tokens:,} tokens of prompts")
