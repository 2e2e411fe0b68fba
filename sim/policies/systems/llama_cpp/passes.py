"""The passes through the model that one call of llama_decode is split into, of commit 001d906a.

Rule: each slot has KV memory of its own, so that a pass (`ubatch`) takes tokens of slots whose numbers follow on each
other, and as many of each. It begins with the first token left, in the order of the batch: decodes by slot, then prompt
tokens by slot. A slot joins it if its number is one above that of the slot that joined before; the pass ends where one
of its slots has no token left, or with `n_ubatch` tokens. Slots 0, 1 and 3 decode in two passes; a prompt beside a
decode of the slot below it gives the first token to that pass, and the rest to passes of its own.
Source: src/llama-batch.cpp, `split_equal` with `sequential`, which src/llama-kv-cache.cpp, `init_batch`, asks for where
the KV memory has several streams.
"""

from __future__ import annotations

from collections.abc import Iterable


def passes_of(batch: Iterable[tuple[int, int]], n_ubatch: int) -> list[int]:
    """The tokens of each pass over `batch`, which has (slot, tokens) in its order, each slot once."""
    left, passes = [[slot, tokens] for slot, tokens in batch], list[int]()
    while left:
        joined: list[list[int]] = []
        for row in left:
            if not joined or row[0] == joined[-1][0] + 1:
                joined.append(row)
        each = min(min(tokens for _, tokens in joined), max(n_ubatch // len(joined), 1))
        for row in joined:
            row[1] -= each
        passes.append(each * len(joined))
        left = [row for row in left if row[1]]
    return passes
