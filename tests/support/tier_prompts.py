"""Prompts of a tier's tests, of which every token is a block."""

from __future__ import annotations

from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Request
from batchsim.kv.block_keys import BlockKeys

Prompt = list[tuple[int, int]]
"""Tokens: (whose, how many), each from the first one of theirs on. A block has one token, and so has a chunk."""


def keys_of(prompt: Prompt, number: int = 0) -> BlockKeys:
    tokens = TokenIds.of([(prompt_stream(whose), 0, count) for whose, count in prompt])
    return BlockKeys(Request(number, 0, tokens.num_tokens, 1, tokens=tokens), 1)
