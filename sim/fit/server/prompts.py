"""Prompts of exact lengths: token ids where a server takes them, else words whose tokens it counts itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchsim.fit.server.loads import Ask

TAIL = 16
"""Tokens at the end of a shared prompt that are a request's own."""
BLOCK = 16
"""Tokens of an id by which a table says what its prompts share."""
_WORDS = (
    *("sun", "river", "stone", "paper", "green", "north", "seven", "light", "house", "cloud", "table", "bread"),
    *("horse", "winter", "garden", "silver", "music", "window", "bridge", "yellow", "forest", "island", "corner"),
)


@dataclass(frozen=True)
class Prompts:
    """How prompts are written: ids from `low` to `high`, both included; where `ids` is false as words, of
    `tokens_per_word` on average."""

    low: int = 0
    high: int = 0
    ids: bool = True
    tokens_per_word: float = 1.0

    def write(self, ask: Ask, number: int, seed: int) -> list[int] | str:
        """The prompt of request `number` of a load of that seed: no two are alike but by `ask.group`."""
        size = ask.prompt_tokens
        draw = np.random.default_rng([seed, 1, number])
        if ask.group >= 0:
            head = np.random.default_rng([seed, 2, ask.group])
            own = min(TAIL, size)
            return self._text(head, size - own) + self._text(draw, own)  # type: ignore[operator]
        return self._text(draw, size)

    def _text(self, draw: np.random.Generator, size: int) -> list[int] | str:
        if self.ids:
            return draw.integers(self.low, self.high + 1, size).tolist()
        words = max(round(size / self.tokens_per_word), 1) if size else 0
        return "".join(f" {_WORDS[i]}" for i in draw.integers(0, len(_WORDS), words))


def hash_ids(ask: Ask, number: int, prompt_tokens: int) -> list[int]:
    """What a prompt shares, an id for each BLOCK tokens of it; those of the shared part are its group's."""
    blocks = -(-prompt_tokens // BLOCK)
    shared = (ask.prompt_tokens - TAIL) // BLOCK if ask.group >= 0 else 0
    own = (number + 1) * 1_000_000
    return [(ask.group + 1) * 1_000 + i + 10**12 if i < shared else own + i for i in range(blocks)]
