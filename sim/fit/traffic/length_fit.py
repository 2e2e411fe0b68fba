"""Prompt and output lengths of a trace as laws of pairs: what goes together stays together, and changes as it did.

Rows are cut into groups by their prompts and these by their outputs, at quantiles that grow denser toward the longest,
and each cell is one pair: the means of its rows, as likely as it has rows. Means are the trace's, to half a token.
Whether lengths change over time is asked of coarse cells: the likelihood of the rows' cells with other chances in each
of several equal periods, less BIC's penalty.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from batchsim.workload.lengths import PairLengths, StepLengths
from batchsim.workload.traces.trace_rows import Ints

PAIRS = 6000
"""The most pairs of a law, or of all its steps together."""
CELLS_A_GROUP = 6
"""Groups by prompt, for each cell by output of one of them."""
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
COARSE = 4
"""Cells on a side in which lengths may change over time: quartiles of prompts, and of the outputs of each."""
FEWEST_ROWS = 100
"""Rows of a step on average, below which no more steps are tried."""


def fit_lengths(prompt_tokens: Ints, output_tokens: Ints, sent_ns: Ints) -> PairLengths | StepLengths:
    """The law of pairs of these rows, at least one, sent at `sent_ns` from 0; in steps where lengths change in time."""
    steps = num_steps(prompt_tokens, output_tokens, sent_ns)
    every_ns = max(-(-int(sent_ns[-1] + 1) // steps), 1)
    part = sent_ns // every_ns
    if steps == 1 or len(np.unique(part)) < steps:
        return pairs_of(prompt_tokens, output_tokens, PAIRS)
    parts = [pairs_of(prompt_tokens[part == i], output_tokens[part == i], PAIRS // steps) for i in range(steps)]
    return StepLengths(tuple(parts), every_ns)


def num_steps(prompt_tokens: Ints, output_tokens: Ints, sent_ns: Ints) -> int:
    """The number of STEPS in which lengths change over time, 1 if they do not: that of the lowest BIC."""
    count = len(sent_ns)
    cell = COARSE * _quantile_group(prompt_tokens)
    for group in np.unique(cell):
        in_group = cell == group
        cell[in_group] += _quantile_group(output_tokens[in_group])
    num_cells = len(np.unique(cell))

    def bic(steps: int) -> float:
        part = sent_ns * steps // (sent_ns[-1] + 1)
        table = np.bincount(part * COARSE**2 + cell, minlength=steps * COARSE**2).reshape(steps, -1)
        shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
        likelihood = float((table * np.log(np.where(table > 0, shares, 1.0))).sum())
        return steps * (num_cells - 1) * math.log(count) - 2 * likelihood

    return min((steps for steps in STEPS if steps == 1 or count >= steps * FEWEST_ROWS), key=bic)


def _quantile_group(tokens: Ints) -> Ints:
    """The number of the quantile group, of COARSE, that each length lies in: equal lengths lie in one."""
    return np.searchsorted(np.quantile(tokens, np.arange(1, COARSE) / COARSE), tokens)


def pairs_of(prompt_tokens: Ints, output_tokens: Ints, most: int) -> PairLengths:
    """At most `most` pairs for these rows; where there are no more rows, the rows themselves."""
    if len(prompt_tokens) <= most:
        cells = [np.array([row]) for row in range(len(prompt_tokens))]
    else:
        cells_of_group = max(round(math.sqrt(most / CELLS_A_GROUP)), 1)
        cells = [
            group[inner]
            for group in _cut(np.lexsort((output_tokens, prompt_tokens)), most // cells_of_group)
            for inner in _cut(np.argsort(output_tokens[group], kind="stable"), cells_of_group)
        ]
    counted: dict[tuple[int, int], int] = {}
    for cell in cells:
        pair = round(float(prompt_tokens[cell].mean())), round(float(output_tokens[cell].mean()))
        counted[pair] = counted.get(pair, 0) + len(cell)
    prompts, outputs = zip(*counted, strict=True)
    return PairLengths(prompts, outputs, tuple(counted.values()))


def _cut(rows: NDArray[np.int64], parts: int) -> list[NDArray[np.int64]]:
    """`rows` in `parts` or fewer, none empty: the last has 1 of parts² rows, the first some 2 of parts."""
    shares = 1 - (1 - np.arange(1, parts) / parts) ** 2
    return [part for part in np.split(rows, np.unique(np.rint(shares * len(rows)).astype(int))) if len(part)]
