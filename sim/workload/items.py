"""Images, audios and videos of requests: how many each has, how many tokens they are, and which of them are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from batchsim.base.errors import ScenarioError
from batchsim.base.later import np
from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import Share
from batchsim.workload.laws import EmpiricalTokens, FixedTokens, Law, draw_tokens
from batchsim.workload.sharing import Exponent
from batchsim.workload.traces.trace_config import MAX_ITEMS

if TYPE_CHECKING:
    from batchsim.workload.traces.trace_rows import Ints

Contents = Annotated[int, Range(1, 1_000_000)]
"""Different contents; a table holds the chance and the size of each."""


@dataclass(frozen=True)
class Distinct(Config):
    """How many different items there are, of which some are used more often: the k-th with a chance in proportion to
    k^-zipf. Equal items have equal sizes, are found in an encoder's cache, and make prompts alike."""

    count: Contents
    """Number of different items."""
    zipf: Exponent = 0.0
    """Exponent of how unevenly they are used; 0: all alike."""

    def chances(self) -> np.ndarray:
        """The chance of each, which sum to 1."""
        weights = np.arange(1, self.count + 1, dtype=np.float64) ** -self.zipf
        return weights / weights.sum()


@dataclass(frozen=True)
class Items(Config):
    """Images, audios or videos in prompts: placeholder tokens beside those of the text, whose embeddings an encoder
    computes."""

    tokens: Law
    """The law of the tokens of each item; it has a largest value."""
    per_request: Law = FixedTokens(1)  # noqa: RUF009 - which is frozen
    """The law of the number of items of a request that has some."""
    share: Share = 1.0
    """Part of the requests that have items."""
    distinct: Distinct | None = None
    """How many different items there are; without it each is another."""
    place: Literal["before_text", "after_text"] = "before_text"
    """Where they stand: before the request's own text, behind any shared prefix, or after it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        for name, law in (("tokens", self.tokens), ("per_request", self.per_request)):
            if largest(law) is None:
                raise ValueError(f"{name} has no largest value, and {_WHY[name]}. Write max.")
        if (most := largest(self.per_request) or 0) > MAX_ITEMS:
            raise ValueError(f"per_request goes up to {most:,} items. At most {MAX_ITEMS:,} are possible.")


_WHY = {
    "tokens": "the largest item decides how much an encoder must hold",
    "per_request": "no request can have any number of items",
}


def largest(law: Law) -> int | None:
    """The largest value that `law` draws; None where it has none."""
    if isinstance(law, FixedTokens):
        return law.tokens
    return max(law.values) if isinstance(law, EmpiricalTokens) else law.max


Stream: TypeAlias = "Callable[[str], np.random.Generator]"
OWN_CONTENT = -1
"""The content of an item that is like no other."""


@dataclass(frozen=True)
class DrawnItems:
    """Items of requests, those of request i from `first[i]` up to `first[i + 1]`: the number of the content of each,
    OWN_CONTENT of one like no other, its tokens, and the tokens of its prompt before it."""

    first: Ints
    content: Ints
    tokens: Ints
    start: Ints

    @property
    def tokens_of(self) -> Ints:
        """Tokens of all items of each request."""
        before = np.concatenate(([0], np.cumsum(self.tokens)))
        return before[self.first[1:]] - before[self.first[:-1]]

    def of(self, row: int) -> list[tuple[int, int, int]]:
        """(Content, first token, tokens) of the items of a request, in order."""
        at = slice(int(self.first[row]), int(self.first[row + 1]))
        columns = (column[at].tolist() for column in (self.content, self.start, self.tokens))
        return list(zip(*columns, strict=True))

    def note(self, prompt_tokens: Ints, of: str) -> str:
        """A line on how many requests have how many items; `of` names the requests, of which these are the prompts."""
        tokens = self.tokens_of
        share, all_tokens = 100 * float((tokens > 0).mean()), f"{int(tokens.sum()):,} of {int(prompt_tokens.sum()):,}"
        have = f"{share:.3g} % of {of} have images, audios or videos"
        return f"{have}: {len(self.tokens):,} items, {all_tokens} prompt tokens"

    def picked(self, index: Ints | slice) -> DrawnItems:
        """The items of the requests `index`."""
        rows = np.arange(len(self.first) - 1)[index]
        counts = (self.first[1:] - self.first[:-1])[rows]
        first = np.concatenate(([0], np.cumsum(counts)))
        at = np.repeat(self.first[:-1][rows] - first[:-1], counts) + np.arange(first[-1])
        return DrawnItems(first, self.content[at], self.tokens[at], self.start[at])


def draw_items(
    each: list[tuple[str, Items | None]], request_class: Ints, text_tokens: Ints, group_tokens: Ints, stream: Stream,
    whole: Stream,
    counted: Ints | None = None,
) -> DrawnItems:  # fmt: skip
    """The items of requests of the classes `request_class`, each with what is said of its items and whose that is;
    `counted`: how many each has, where a trace says so.

    `text_tokens` of each prompt are text, of which the first `group_tokens` are shared with others. `stream` gives the
    random numbers of these requests, `whole` those of the whole workload.
    """
    size = len(request_class)
    counts = np.zeros(size, np.int64)
    drawn: list[tuple[Ints, Ints, Ints]] = []
    numbers: dict[str, int] = {}
    next_content = 0
    for index, (name, items) in enumerate(each):
        if items is None:
            continue
        if name not in numbers:
            numbers[name] = next_content
            next_content += items.distinct.count if items.distinct is not None else 0
        chosen = (request_class == index) & (stream(f"items/{name}/share").random(size) < items.share)
        of_class = counted
        if of_class is None:
            of_class = draw_tokens(items.per_request, stream(f"items/{name}/count"), size).tokens
        counts = np.where(chosen, of_class, counts)
        num_items = int(of_class.sum())  # of all requests, so that the n-th draw depends on nothing else
        rows = np.repeat(np.arange(size), of_class)
        content = np.full(num_items, OWN_CONTENT)
        if items.distinct is None:
            tokens = draw_tokens(items.tokens, stream(f"items/{name}/tokens"), num_items).tokens
        else:
            edges = np.cumsum(items.distinct.chances())[:-1]
            content = np.searchsorted(edges, stream(f"items/{name}/content").random(num_items), side="right")
            sizes = draw_tokens(items.tokens, whole(f"items/{name}/sizes"), items.distinct.count).tokens
            tokens, content = sizes[content], content + numbers[name]
        kept = chosen[rows]
        drawn.append((rows[kept], content[kept], tokens[kept]))
    rows, content, tokens = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    order = np.argsort(rows, kind="stable")
    rows, content, tokens = rows[order], content[order], tokens[order]
    first = np.concatenate(([0], np.cumsum(counts)))
    before = np.cumsum(tokens) - tokens
    within = before - before[first[rows]] if len(rows) else before  # tokens of the request's items before it
    after = np.array([items is not None and items.place == "after_text" for _, items in each])[request_class]
    base = np.where(after, text_tokens, group_tokens)
    return DrawnItems(first, content, tokens, base[rows] + within)


def check_items(said: list[Items], beside: dict[str, bool], *, column: str | None, replays: bool) -> None:
    """ValueError where a workload has items and, by name, something `beside` that goes without; or where a `column` of
    the trace counts items, and their sizes are not said, their number is said twice, or rows are not replayed."""
    if column is not None:
        if not said:
            raise ValueError(
                f"trace.columns.items {column!r}: of how many tokens is not said. Write items: {{tokens: ...}}."
            )
        if not replays:
            raise ValueError(
                f"trace.columns.items {column!r} is of rows that are replayed. Write arrivals: {{kind: trace}}."
            )
        if any(items.share != 1 or items.per_request != FixedTokens(1) for items in said):
            raise ValueError(
                f"items: trace.columns.items {column!r} says how many there are. Drop share and per_request."
            )
    for name, is_there in beside.items():
        if said and is_there:
            raise ValueError(f"items: images, audios and videos beside {name} are not simulated. Drop one of the two.")


def unread_hash_ids(source: str) -> ScenarioError:
    """The error for items beside a trace that says which blocks of text prompts share."""
    return ScenarioError(
        f"{source}: its hash_ids say what all of a prompt is, and items add to it. Write trace.prefix: ignore, or drop"
        " items."
    )


def largest_item(each: list[Items]) -> int:
    """The tokens of the largest item that any of these laws draws; 0 without one."""
    return max((largest(items.tokens) or 0 for items in each), default=0)
