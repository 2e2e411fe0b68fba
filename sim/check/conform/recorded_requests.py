"""Reads the requests of a recording in batchsim's own form: their prompts, caps, adapters and items."""

from __future__ import annotations

import re
from typing import Any

from batchsim.check.conform import recording as form
from batchsim.check.conform.fields import (
    COUNT,
    FLAG,
    ITEMS,
    OBJECT,
    PRIORITY,
    SECONDS,
    SEGMENTS,
    TOKENS,
    BadRecording,
    check_row,
    whole,
)
from batchsim.kernel.protocols import ItemsContext
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import MISSING, Arrival, Item, Request

TOKENS_OR_NONE = whole(0, 10**9)
REQUEST = {"id": COUNT, "arrival": SECONDS, "prompt_len": TOKENS, "output_len": TOKENS_OR_NONE}
REQUEST_MAYBE = {
    "max_new_tokens": TOKENS,
    "max_tokens": TOKENS,
    "ignore_eos": FLAG,
    "priority": PRIORITY,
    "prompt": SEGMENTS,
    "lora": COUNT,
    "mm": ITEMS,
}
ITEMS_META = {"encoder_budget": TOKENS, "encoder_cache": TOKENS, "disable_chunked_mm_input": FLAG}
"""Of an engine whose requests have images, audios or videos: its budget a step and its cache, in embeddings."""


def items_context(meta: dict[str, Any], requests: list[Any]) -> ItemsContext | None:
    """What the policy may know of the recorded items; None where the recording is of an engine without an encoder."""
    if not ITEMS_META.keys() & meta.keys():
        return None
    check_row({name: meta[name] for name in ITEMS_META if name in meta}, "meta", {}, ITEMS_META)
    if missing := [name for name in ("encoder_budget", "encoder_cache") if name not in meta]:
        raise BadRecording(f"meta has no {missing[0]}, in embeddings. Write down what the engine ran with.")
    lengths = [0]
    for row in requests:
        items: Any = row.get("mm") if isinstance(row, dict) else None
        lengths += [item[2] for item in items or () if isinstance(item, list) and len(item) == 3]
    return ItemsContext(max((n for n in lengths if type(n) is int), default=0))


def arrivals(
    rows: list[Any],
    streams: dict[str, int] | None = None,
    *,
    with_tokens: bool,
    with_kv: bool = False,
    with_adapters: bool = False,
    with_items: ItemsContext | None = None,
    pooling: bool = False,
) -> list[Arrival]:
    """The recorded requests; `with_tokens`: with the identity of their prompt tokens, as a prefix cache needs, by
    `streams`, which this fills; `with_kv`: rows may say what passes between engines; `with_adapters`: they may have
    LoRA adapters; `with_items`: they may have items; `pooling`: they get no token."""
    maybe = {**REQUEST_MAYBE, "kv": OBJECT} if with_kv else REQUEST_MAYBE
    streams = {} if streams is None else streams
    made: list[Arrival] = []
    for i, row in enumerate(rows):
        where = f"requests[{i}]"
        check_row(row, where, REQUEST, maybe)
        prompt_tokens, output_tokens = row["prompt_len"], row["output_len"]
        name = "max_tokens" if "max_tokens" in row else "max_new_tokens"
        cap = row.get(name, output_tokens)
        if pooling != (output_tokens == 0):
            why = "of a pooling model, which makes none" if pooling else "and meta does not say pooling"
            raise BadRecording(f"{where} has output_len {output_tokens}, {why}. Record it again.")
        if output_tokens > cap or row.get("max_new_tokens", cap) != cap:
            raise BadRecording(f"{where} has output_len {output_tokens}, {name} {cap}. Record it again.")
        tokens = None
        if "prompt" in row:
            tokens = TokenIds.of(
                [(stream_number(name, streams), start, length) for name, start, length in row["prompt"]]
            )
            if tokens.num_tokens != prompt_tokens:
                lengths = f"{tokens.num_tokens} tokens, prompt_len says {prompt_tokens}"
                raise BadRecording(f"{where}.prompt has {lengths}. Record it again.")
        elif with_tokens:
            raise BadRecording(f"{where} has no prompt, and prefix caching is on. Record the prompts' segments.")
        if "lora" in row and not with_adapters:
            raise BadRecording(f"{where} has lora {row['lora']}, and meta no max_loras. Write down what it ran with.")
        request = Request(
            row["id"],
            form.to_ns(row["arrival"]),
            prompt_tokens,
            cap,
            priority=row.get("priority", 0),
            tokens=tokens if with_tokens else None,
            ignore_eos=row.get("ignore_eos", False),
            adapter=row.get("lora", MISSING),
            items=_items_of(row, where, streams, with_items),
        )
        made.append(Arrival(request, output_tokens))
    return made


def _items_of(
    row: dict[str, Any], where: str, streams: dict[str, int], context: ItemsContext | None
) -> tuple[Item, ...]:
    """The items of a request, whose prompt has their tokens in their places."""
    rows = row.get("mm")
    if not rows:
        return ()
    if context is None:
        raise BadRecording(f"{where} has mm, and meta no encoder_budget. Write down what the engine ran with.")
    items = tuple(Item(stream_number(name, streams), start, length) for name, start, length in rows)
    end = 0
    for item in items:
        if item.start < end or item.start + item.tokens > row["prompt_len"]:
            what = f"an item of {item.tokens} tokens from token {item.start} on"
            raise BadRecording(
                f"{where}.mm has {what}, which is not behind the one before, within the prompt. Correct it."
            )
        end = item.start + item.tokens
    return items


def stream_number(name: str, numbers: dict[str, int]) -> int:
    """The number of a token stream: `o<i>` is what request i generates, any other is prompt text, see `numbers`."""
    if re.fullmatch(r"o[0-9]{1,15}", name):
        return output_stream(int(name[1:]))
    return prompt_stream(numbers.setdefault(name, len(numbers)))
