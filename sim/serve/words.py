"""Text and token ids where no model's tokenizer is at hand: a word is a token.

The text of token 1234 is " 1234", and the token of the word 1234 is 1234, so that an answer sent back as part of the
next prompt is the same tokens again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol
from zlib import crc32

_STRIDE, _START = 104_729, 7_919  # primes, so that answers differ and seldom repeat a token


class Texts(Protocol):
    """Text as tokens of a vocabulary of `vocab_size`, and back. `stands_alone`: the text of several tokens is that of
    each, one behind the other."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stands_alone(self) -> bool: ...

    def encode(self, text: str, most: int = sys.maxsize) -> list[int]:
        """The token ids of `text`; of one of more than `most` tokens at least one more than `most`."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], most: int = sys.maxsize) -> list[int] | None:
        """The token ids, as of `encode`, of the prompt that a model's template makes of `messages`, each with a role,
        and a content where it was sent. None where there is no template; ValueError for messages that it refuses."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...


class Words:
    """Words as tokens of a vocabulary of `vocab_size`."""

    stands_alone = True

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return len(text.split())

    def encode(self, text: str, most: int = sys.maxsize) -> list[int]:
        """The token ids of `text`; of one of more than `most` tokens one more than `most`."""
        return [self._id(word) for word in text.split(None, most)]

    def chat(self, messages: Sequence[Mapping[str, Any]], most: int = sys.maxsize) -> None:
        """Words have no template."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens `ids`."""
        return "".join([f" {id_}" for id_ in ids])

    def generated(self, number: int, start: int, end: int) -> list[int]:
        """The ids of output tokens `start` to `end` - 1 of answer `number`: the same whenever they are asked for."""
        size, first = self.vocab_size, number * _START
        return [id_ % size for id_ in range(first + start * _STRIDE, first + end * _STRIDE, _STRIDE)]

    def generated_one(self, number: int, place: int) -> int:
        """The id of output token `place` of answer `number`."""
        return (number * _START + place * _STRIDE) % self.vocab_size

    def _id(self, word: str) -> int:
        if word.isascii() and word.isdigit() and len(word) < 10 and (number := int(word)) < self.vocab_size:
            return number
        return crc32(word.encode()) % self.vocab_size
