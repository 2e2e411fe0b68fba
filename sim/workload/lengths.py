"""The kinds of `lengths:` of a scenario: prompts and outputs by laws, in pairs, as a list, or as a trace has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Literal

from batchsim.base.later import np
from batchsim.base.ranges import Config, PositiveInt, check_ranges
from batchsim.base.units import PositiveDuration
from batchsim.workload.laws import (
    DrawnTokens,
    EmpiricalTokens,
    FixedTokens,
    GammaTokens,
    Law,
    LognormalTokens,
    UniformTokens,
    Weight,
    draw_tokens,
)
from batchsim.workload.tagged import ByKind

if TYPE_CHECKING:
    from batchsim.workload.traces.trace_rows import Ints


@dataclass(frozen=True)
class NoTokens(Config):
    """`output: 0`: no answer, as of pooling models (embedding, reranking, classification)."""

    kind: Literal["none"] = "none"

    @property
    def mean_tokens(self) -> float:
        return 0.0


Output = Annotated[FixedTokens | UniformTokens | LognormalTokens | GammaTokens | EmpiricalTokens | NoTokens, ByKind()]


@dataclass(frozen=True)
class Lengths(Config):
    """Prompt and output lengths drawn independently.

    >>> batchsim.Lengths(batchsim.Fixed(100), batchsim.Uniform(2, 12)).output.mean_tokens
    7.0
    """

    prompt: Law
    """Tokens of prompts."""
    output: Output
    """Tokens of answers; 0 of pooling models."""
    kind: Literal["laws"] = "laws"


@dataclass(frozen=True)
class PairLengths(Config):
    """One of the pairs of `prompt[i]` and `output[i]`, which keep what they have to do with each other."""

    prompt: tuple[PositiveInt, ...]
    """Tokens of the prompt of each pair."""
    output: tuple[PositiveInt, ...]
    """Tokens of the answer of each pair."""
    weights: tuple[Weight, ...] | None = None
    """How often each pair is drawn, in proportion; all alike unless given."""
    kind: Literal["pairs"] = "pairs"

    def __post_init__(self) -> None:
        check_ranges(self)
        if len(self.prompt) != len(self.output):
            raise ValueError(f"{len(self.output)} outputs for {len(self.prompt)} prompts. Write one a prompt.")
        self.index()

    def index(self) -> EmpiricalTokens:
        """The law of the pair drawn, counted from 1."""
        return EmpiricalTokens(tuple(range(1, len(self.prompt) + 1)), self.weights)

    @property
    def mean_output_tokens(self) -> float:
        return float(np.average(self.output, weights=self.weights))


@dataclass(frozen=True)
class StepLengths(Config):
    """Pairs that change as time goes by: after each `every` those of the next of `parts`, of which the last one stays.

    Where requests are not sent at times known in advance, in sessions, closed loops and all at once, every pair of
    every part is drawn in proportion to its weight.
    """

    parts: tuple[PairLengths, ...]
    """The pairs, one part after another; the last one stays."""
    every: PositiveDuration
    """How long each part lasts."""
    kind: Literal["steps"] = "steps"

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.parts:
            raise ValueError("parts is empty. List the lengths of each step.")

    def all_parts(self) -> PairLengths:
        """The pairs of all parts."""
        weights = (each.weights or (1.0,) * len(each.prompt) for each in self.parts)
        return PairLengths(
            tuple(chain.from_iterable(each.prompt for each in self.parts)),
            tuple(chain.from_iterable(each.output for each in self.parts)),
            tuple(chain.from_iterable(weights)),
        )

    @property
    def mean_output_tokens(self) -> float:
        return self.all_parts().mean_output_tokens


@dataclass(frozen=True)
class ListLengths(Config):
    """Request i has `prompt[i]` and `output[i]`, each used once, in the order of sending: of a class its own i-th."""

    prompt: tuple[PositiveInt, ...]
    """Tokens of the prompt of each request, in order."""
    output: tuple[PositiveInt, ...]
    """Tokens of the answer of each request, in order."""
    kind: Literal["list"] = "list"

    def __post_init__(self) -> None:
        check_ranges(self)
        PairLengths(self.prompt, self.output)

    @property
    def mean_output_tokens(self) -> float:
        return float(np.mean(self.output))


@dataclass(frozen=True)
class TraceLengths(Config):
    """Prompt and output of the same trace row, rows drawn with replacement."""

    kind: Literal["trace"] = "trace"


AnyLengths = Annotated[Lengths | PairLengths | StepLengths | ListLengths | TraceLengths, ByKind(default="laws")]


def asks_for_none(lengths: AnyLengths | None) -> bool:
    """Whether requests of these lengths ask for no token, as those of pooling models do."""
    return isinstance(lengths, Lengths) and isinstance(lengths.output, NoTokens)


def check_no_tokens(
    stated: list[AnyLengths | None], arrivals: str, output_cap: int | str, beside: Mapping[str, object]
) -> None:
    """ValueError where, beside requests without a token, others of the `stated` lengths have some, or where arrivals,
    cap, or by name what is stated `beside` is of tokens."""
    if not all(map(asks_for_none, stated)):
        raise ValueError("lengths: some requests have output 0, of a pooling model, and others may not. Write one.")
    if arrivals == "rollout":
        raise ValueError("lengths.output 0: a rollout is of answers. Write how long they are.")
    for name, given in beside.items():
        if given is not None:
            raise ValueError(f"{name}: requests with output 0 get no answer. Drop {name}.")
    if output_cap != "exact":
        raise ValueError(f"output_cap {output_cap}: requests with output 0 ask for no token. Write exact.")


def check_rows_of_classes(drawn: Mapping[str, AnyLengths | None], *, replays: bool) -> None:
    """ValueError where classes of these lengths would be drawn beside a trace's rows: each would get the lengths of all
    rows. `replays`: those without lengths have the lengths of rows."""
    of_rows = [name for name, own in drawn.items() if isinstance(own, TraceLengths) or (replays and own is None)]
    if len(drawn) > 1 and len(of_rows) > (0 if replays else 1):
        which = "every class" if replays else "all of them but one"
        raise ValueError(
            f"classes: {', '.join(of_rows)} would be drawn at random beside the rows of the trace, so that each had"
            " the lengths of all rows. Name the column that says which row is whose, trace.columns.request_class,"
            f" or give {which} lengths: {{prompt: ..., output: ...}} of its own, or write assign: at_random."
        )


def draw_outputs(lengths: Lengths, stream: Callable[[], np.random.Generator], size: int) -> DrawnTokens:
    """The outputs of `size` requests, in tokens."""
    if isinstance(lengths.output, NoTokens):
        return DrawnTokens(none := np.zeros(size, np.int64), none)
    return draw_tokens(lengths.output, stream(), size)


def draw_pairs(
    lengths: PairLengths | StepLengths, stream: Callable[[], np.random.Generator], size: int, sent_ns: Ints | None
) -> tuple[Ints, Ints]:
    """Prompts and outputs of `size` pairs, of requests sent at `sent_ns` where that is known."""
    if isinstance(lengths, StepLengths) and sent_ns is None:
        lengths = lengths.all_parts()
    if isinstance(lengths, PairLengths):
        at = draw_tokens(lengths.index(), stream(), size).tokens - 1
        return np.array(lengths.prompt)[at], np.array(lengths.output)[at]
    assert sent_ns is not None, "all parts where it is"
    part = np.minimum(sent_ns // lengths.every, len(lengths.parts) - 1)
    drawn = [draw_pairs(each, stream, size, None) for each in lengths.parts]  # each by the same random numbers
    prompt, output = (np.choose(part, side) for side in zip(*drawn, strict=True))
    return prompt, output
