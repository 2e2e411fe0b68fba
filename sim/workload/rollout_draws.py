"""The groups of a rollout, drawn prompt by prompt: lengths alike within a group, and how many answers are right."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import INT32_MAX
from batchsim.workload.laws import (
    DrawnTokens,
    EmpiricalTokens,
    FixedTokens,
    GammaTokens,
    Law,
    LognormalTokens,
    UniformTokens,
    draw_tokens,
)
from batchsim.workload.lengths import Lengths, ListLengths, NoTokens
from batchsim.workload.request_columns import RequestColumns, RequestSampler
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_rows import Ints
from batchsim.workload.workload_config import WorkloadConfig

PER_BLOCK = 64  # prompts drawn at once


@dataclass(frozen=True)
class DrawnGroups:
    """Some prompts with their answers: the requests prompt by prompt, and how many answers of each are right."""

    requests: RequestColumns
    right: Ints


class GroupDraws:
    """The groups of a rollout by their number, the same under every scheme and policy."""

    def __init__(self, config: WorkloadConfig, rollout: Rollout, seed: int, max_model_len: int) -> None:
        self.rollout = rollout
        self.lengths = check_lengths(rollout, config.lengths)
        blank = replace(config, lengths=Lengths(FixedTokens(1), FixedTokens(1)))  # lengths are drawn here, by group
        self.source = RequestSampler(blank, None, seed, max_model_len)
        self._seed = seed
        self._blocks: dict[int, DrawnGroups] = {}

    def block_of(self, prompt: int) -> tuple[DrawnGroups, int]:
        """The block that prompt number `prompt` stands in, and its row there. ScenarioError beyond a list's end."""
        if isinstance(self.lengths, ListLengths) and prompt * self.rollout.answers >= len(self.lengths.output):
            raise ScenarioError(
                f"workload: lengths list {len(self.lengths.output):,} answers, {self.rollout.answers} to each prompt,"
                " and more are sent. List more, or ask for fewer updates."
            )
        number, row = divmod(prompt, PER_BLOCK)
        if number not in self._blocks:
            self._blocks[number] = self._draw(number)
        return self._blocks[number], row

    def right(self, prompt: int) -> int | None:
        """How many answers of a prompt are right; None where that plays no part."""
        if self.rollout.success is None:
            return None
        block, row = self.block_of(prompt)
        return int(block.right[row])

    @property
    def per_group(self) -> int:
        """Answers that are drawn for each prompt: those beyond `answers` are for schemes that send more."""
        return ceil(self.rollout.scheme.speculation * self.rollout.answers)

    def _draw(self, number: int) -> DrawnGroups:
        each = self.per_group
        drawn = self.source.draw(PER_BLOCK * each, block=number)
        if isinstance(self.lengths, ListLengths):
            prompt, output = self._listed(self.lengths, number)
        else:
            rng = random_stream(self._seed, "rollout/prompt", block=number)
            prompt = np.repeat(draw_tokens(self.lengths.prompt, rng, PER_BLOCK).tokens, each)
            law = self.lengths.output
            assert not isinstance(law, NoTokens), "checked before"
            output = self._grown(law, self._answers(law, number), number)
        requests = replace(drawn, asked_tokens=output.tokens, drawn_prompt=prompt, drawn_output=output.drawn)
        return DrawnGroups(self.source.with_prompts(requests, prompt), self._right(number))

    def _listed(self, lengths: ListLengths, number: int) -> tuple[Ints, DrawnTokens]:
        """The lengths of a list, of which a group's first answer has the prompt; beyond its end those of no group."""
        answers = self.rollout.answers
        at = (number * PER_BLOCK * answers + np.arange(PER_BLOCK * answers)) % len(lengths.output)
        output = np.array(lengths.output)[at]
        return np.array(lengths.prompt)[at // answers * answers], DrawnTokens(output, output)

    def _answers(self, law: Law, number: int) -> DrawnTokens:
        """The lengths of answers, of `law` each, whose normal numbers correlate within a group."""
        answers, more, alike = self.rollout.answers, self.per_group - self.rollout.answers, self.rollout.correlation
        streams = [random_stream(self._seed, f"rollout/{name}", block=number) for name in ("answer", "more", "group")]
        if not alike:
            first, further = (
                draw_tokens(law, s, PER_BLOCK * n) for s, n in zip(streams, (answers, more), strict=False)
            )
            sides = ((a.reshape(PER_BLOCK, -1), b.reshape(PER_BLOCK, -1)) for a, b in _sides(first, further))
            return DrawnTokens(*(np.concatenate(side, axis=1).ravel() for side in sides))
        own = [s.standard_normal((PER_BLOCK, n)) for s, n in zip(streams, (answers, more), strict=False)]
        of_group = streams[2].standard_normal((PER_BLOCK, 1))
        normal = math.sqrt(alike) * of_group + math.sqrt(1 - alike) * np.concatenate(own, axis=1)
        return tokens_at(law, normal.ravel())

    def _grown(self, law: Law, answers: DrawnTokens, number: int) -> DrawnTokens:
        """The same lengths, each longer by how many trainings' prompts come before its own."""
        if not self.rollout.growth:
            return answers
        assert isinstance(law, LognormalTokens | GammaTokens), "checked before"
        trainings = (number * PER_BLOCK + np.arange(PER_BLOCK)) // self.rollout.prompts
        drawn = np.rint(answers.drawn * np.repeat((1 + self.rollout.growth) ** trainings, self.per_group))
        top = INT32_MAX if law.max is None else law.max
        return DrawnTokens(np.clip(drawn, law.min, top).astype(np.int64), drawn)

    def _right(self, number: int) -> Ints:
        success, answers = self.rollout.success, self.rollout.answers
        if success is None:
            return np.zeros(PER_BLOCK, np.int64)
        rng = random_stream(self._seed, "rollout/success", block=number)
        share = np.full(PER_BLOCK, success.mean)
        if success.spread:
            total = 1 / success.spread - 1
            share = rng.beta(success.mean * total, (1 - success.mean) * total, PER_BLOCK)
        return rng.binomial(answers, share)


def _sides(one: DrawnTokens, other: DrawnTokens) -> list[tuple[Any, Any]]:
    return [(one.tokens, other.tokens), (one.drawn, other.drawn)]


def tokens_at(law: Law, normal: NDArray[np.float64]) -> DrawnTokens:
    """Lengths of `law` at the quantiles where standard normal numbers stand: as many of each as the law has."""
    if isinstance(law, FixedTokens):
        return draw_tokens(law, np.random.default_rng(0), len(normal))
    if isinstance(law, UniformTokens | EmpiricalTokens):
        share = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in normal.tolist()])
        if isinstance(law, UniformTokens):
            tokens = law.min + np.minimum((share * (law.max - law.min + 1)).astype(np.int64), law.max - law.min)
            return DrawnTokens(tokens, tokens)
        order = np.argsort(law.values, kind="stable")  # so that long answers stand with long ones
        weights = np.ones(len(order)) if law.weights is None else np.array(law.weights)[order]
        edges = np.cumsum(weights / weights.sum())
        edges[np.flatnonzero(weights)[-1] :] = 1.0
        tokens = np.array(law.values)[order][np.searchsorted(edges, np.minimum(share, np.nextafter(1, 0)), "right")]
        return DrawnTokens(tokens, tokens)
    assert not isinstance(law, GammaTokens), "checked by the workload"
    variance = math.log1p(law.cv**2)
    drawn = np.rint(np.exp(math.log(law.mean) - variance / 2 + math.sqrt(variance) * normal))
    top = INT32_MAX if law.max is None else law.max
    return DrawnTokens(np.clip(drawn, law.min, top).astype(np.int64), drawn)


def check_lengths(rollout: Rollout, lengths: object) -> Lengths | ListLengths:
    """`lengths` if groups can have them; ScenarioError, which says what to write, if not."""
    if not isinstance(lengths, Lengths | ListLengths):
        kind = getattr(lengths, "kind", "none")
        raise ScenarioError(
            f"workload.lengths of kind {kind}: groups of a rollout need laws or a list. Write lengths: {{prompt: ...,"
            " output: ...}."
        )
    if isinstance(lengths, ListLengths) and (left := len(lengths.output) % rollout.answers):
        raise ScenarioError(
            f"workload.lengths: a list of {len(lengths.output)} answers leaves {left} beyond whole groups of"
            f" {rollout.answers}. Write a multiple, or other arrivals.answers."
        )
    if isinstance(lengths, ListLengths) and rollout.scheme.speculation > 1:
        raise ScenarioError(
            f"workload.lengths: a list has {rollout.answers} answers to each prompt, and {rollout.scheme.kind} sends"
            " more. Write laws of lengths."
        )
    if isinstance(lengths, Lengths) and isinstance(lengths.output, NoTokens):
        raise ScenarioError("workload.lengths.output is 0: a rollout's trainer waits for answers. Write a law of them.")
    if rollout.growth and not (
        isinstance(lengths, Lengths) and isinstance(lengths.output, LognormalTokens | GammaTokens)
    ):
        raise ScenarioError(
            "workload.lengths: only a law with a mean and a CV can grow. Write lengths.output of kind lognormal or"
            " gamma, or drop arrivals.growth."
        )
    if isinstance(lengths, ListLengths) and rollout.correlation:
        raise ScenarioError("workload.lengths: a list says how long answers are. Drop arrivals.correlation.")
    if isinstance(lengths, Lengths) and isinstance(lengths.output, GammaTokens) and rollout.correlation:
        raise ScenarioError(
            "workload.lengths.output of kind gamma cannot correlate within groups. Write lognormal, or drop"
            " arrivals.correlation."
        )
    return lengths
