"""Stop strings are found as the tokens come, in what is new of the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from batchsim.serve.stops import StopSearch


class Bytes:
    """Bytes as tokens, which notes how many were read at most at a time."""

    vocab_size = 256
    stands_alone = False
    most = 0

    def encode(self, text: str, most: int = 0) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, Any]], most: int = 0) -> None:
        raise AssertionError(messages)

    def decode(self, ids: Iterable[int]) -> str:
        read = bytes(ids)
        self.most = max(self.most, len(read))
        return read.decode(errors="replace")


def search(
    text: str, *stops: str, min_tokens: int = 0, at_a_time: int = 1
) -> tuple[tuple[int, str | int, int] | None, int]:
    """What is found in the bytes of `text`, and the most bytes that were read at a time."""
    words, looks = Bytes(), StopSearch(stops, (), min_tokens)
    ids = words.encode(text)
    for end in [*range(at_a_time, len(ids), at_a_time), len(ids)]:
        found = looks.find(end, words, lambda start, end: ids[start:end], is_last=end == len(ids))
        if found is not None:
            return found, words.most
    return None, words.most


@pytest.mark.parametrize("at_a_time", [1, 7])
def test_a_long_answer_is_not_read_again_for_every_token(at_a_time: int) -> None:
    """A letter and the one before it are read together, 4 bytes each at most, however long the answer is."""
    text = "caf\u00e9 \u4e2d\U0001f600 " * 100
    found, most = search(text + "the end.", "the end", at_a_time=at_a_time)
    assert found == (len(text.encode()) + 7, "the end", 7) and most <= 8


@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "found"),
    [
        ("xabab", ("ab",), 0, (3, "ab", 2)),
        ("xabab", ("ab",), 2, (3, "ab", 2)),  # it ends behind them
        ("xabab", ("ab",), 3, (5, "ab", 2)),
        ("xabxx", ("ab",), 3, None),
        ("aab", ("ba", "aab", "ab"), 0, (3, "aab", 3)),  # the first that is asked for
        ("x\u4e2dy", ("\u4e2d",), 0, (4, "\u4e2d", 1)),
        ("x\u4e2dy", ("y\u4e2d",), 0, None),
    ],
)
def test_where_an_answer_stops(
    text: str, stops: tuple[str, ...], min_tokens: int, found: tuple[int, str, int] | None
) -> None:
    """At the first stop string that ends behind min_tokens, with the letters that go."""
    assert search(text, *stops, min_tokens=min_tokens)[0] == found


def test_a_stop_token_ends_an_answer_with_all_its_text() -> None:
    """Behind min_tokens, and nothing is cut."""
    words, ids = Bytes(), [5, 6, 5, 6]
    looks = StopSearch((), (6,), 2)
    assert looks.find(4, words, lambda start, end: ids[start:end], is_last=False) == (4, 6, 0)
