"""Which tokens prompts are made of: what the scenario or the trace says they share, and text of their own.

Texts are numbered: 2 n is request n's own, 2 n + 1 is group n of the shared prefixes or block n of a trace.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Item
from batchsim.workload.traces.trace_rows import HashIds

_ITEMS, _OWN = 1 << 40, 1 << 32
"""The numbers of items' contents come after those of shared texts; of items like no other, after all contents."""
_MANY = 10  # bits that tell the items of a request apart


def own_text(request_id: int, tokens: int) -> Segment:
    """The beginning of a request's own text, which only later turns of its session repeat."""
    return prompt_stream(2 * request_id), 0, tokens


def answer_to(request_id: int, tokens: int) -> Segment:
    """The first `tokens` that a request generates."""
    return output_stream(request_id), 0, tokens


def shared_text(number: int, tokens: int) -> Segment:
    """The beginning of a text that many prompts share: of group `number`, or of block `number` of a trace."""
    return prompt_stream(2 * number + 1), 0, tokens


@dataclass(frozen=True)
class Turn:
    """A request of a session as the later ones see it: its id, what it added to the context, and its true output."""

    request_id: int
    own_tokens: int
    output_tokens: int


def grouped(request_id: int, prompt_tokens: int, group: int, group_tokens: int) -> TokenIds | None:
    """The tokens of a prompt that begins with `group_tokens` of a group's text; None without a group (-1)."""
    if group < 0:
        return None
    return TokenIds.of([shared_text(group, group_tokens), own_text(request_id, prompt_tokens - group_tokens)])


def items_of(request_id: int, drawn: list[tuple[int, int, int]]) -> tuple[Item, ...]:
    """The items of a request, drawn as (content, first token, tokens); content below 0: like no other."""
    return tuple(
        Item(_item_stream(content if content >= 0 else _OWN + (request_id << _MANY) + place), start, tokens)
        for place, (content, start, tokens) in enumerate(drawn)
    )


def _item_stream(number: int) -> int:
    """The stream of placeholder tokens of an item by the number of its content."""
    return prompt_stream(2 * (_ITEMS + number) + 1)


def with_items(
    request_id: int, prompt_tokens: int, group: int, group_tokens: int, items: tuple[Item, ...]
) -> TokenIds | None:
    """As `grouped` of a prompt with `items`, of which each is made of tokens of its own stream."""
    if not items:
        return grouped(request_id, prompt_tokens, group, group_tokens)
    segments = [shared_text(group, group_tokens)] if group >= 0 else []
    at, own = (group_tokens if group >= 0 else 0), 0
    for item in items:
        if item.start > at:
            segments.append((own_text(request_id, 1)[0], own, item.start - at))
            own += item.start - at
        segments.append((item.identifier, 0, item.tokens))
        at = item.start + item.tokens
    if prompt_tokens > at:
        segments.append((own_text(request_id, 1)[0], own, prompt_tokens - at))
    return TokenIds.of(segments)


def conversation(group: int, group_tokens: int, turns: list[Turn]) -> TokenIds:
    """The tokens of the last prompt: a group's text, if any (-1: none), every earlier turn and answer, its own text."""
    segments = [shared_text(group, group_tokens)] if group >= 0 else []
    for turn in turns[:-1]:
        segments += own_text(turn.request_id, turn.own_tokens), answer_to(turn.request_id, turn.output_tokens)
    return TokenIds.of([*segments, own_text(turns[-1].request_id, turns[-1].own_tokens)])


def hashed(request_id: int, prompt_tokens: int, hash_ids: HashIds, row: int) -> TokenIds | None:
    """The tokens of a trace row's prompt: its blocks, the last one cut to fit, then own text. None without blocks."""
    size = hash_ids.block_tokens
    segments = [shared_text(number, size) for number in hash_ids.row(row)[: -(-prompt_tokens // size)]]
    if not segments:
        return None
    rest = prompt_tokens - size * len(segments)
    if rest < 0:
        segments[-1] = (segments[-1][0], 0, size + rest)
    elif rest:
        segments.append(own_text(request_id, rest))
    return TokenIds.of(segments)
