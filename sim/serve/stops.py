"""The text of an answer as its tokens come, and the first place in it where its client wants it to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchsim.serve.words import Texts

Tokens = Callable[[int, int], list[int]]
"""The ids of output tokens from a place up to another."""


class RunningText:
    """The text of an answer piece by piece. Each piece is read with the tokens of the one before it, not with all."""

    __slots__ = ("_context", "_end")

    def __init__(self) -> None:
        self._context = self._end = 0  # of the tokens whose text was made, the first of the last piece, and their end

    def up_to(self, end: int, words: Texts, tokens: Tokens, *, is_last: bool) -> str:
        """What the tokens up to `end` add. Half a letter waits for its other half, unless that is the last piece."""
        if words.stands_alone:
            start, self._end = self._end, end
            return words.decode(tokens(start, end))
        text = words.decode(tokens(self._context, end))
        if text.endswith("\ufffd") and not is_last:
            return ""
        before = words.decode(tokens(self._context, self._end))
        self._context, self._end = self._end, end
        return text[len(before) :]


class StopSearch:
    """Looks for stop strings and stop tokens in an answer, behind its first `min_tokens` tokens: each token once.

    `num_held`: the last letters of an answer that goes on in which a stop string may have begun.
    """

    __slots__ = ("_ids", "_min_tokens", "_num_tokens", "_stops", "_tail", "_text", "num_held")

    def __init__(self, stops: Sequence[str], ids: Sequence[int], min_tokens: int) -> None:
        self._stops = stops
        self._ids = ids
        self._min_tokens = min_tokens
        self.num_held = max(map(len, stops), default=1) - 1
        self._num_tokens = 0  # that were looked at
        self._text = RunningText()
        self._tail = ""  # the last letters before what comes next, in which a stop string may have begun

    def find(self, end: int, words: Texts, tokens: Tokens, *, is_last: bool) -> tuple[int, str | int, int] | None:
        """Looks at the tokens up to `end`, the answer's last if `is_last`. Returns the number of tokens with which the
        answer stops, at what, and how many letters of their text go, those of a stop string and behind it; or None."""
        while self._num_tokens < end:
            self._num_tokens = count = self._num_tokens + 1
            size = len(self._tail)
            text = self._tail
            if self._stops:
                text += self._text.up_to(count, words, tokens, is_last=is_last and count == end)
            if count > self._min_tokens:
                if self._ids and (last := tokens(count - 1, count)[0]) in self._ids:
                    return count, last, 0
                for stop in self._stops:
                    if (at := text.find(stop, max(size - len(stop) + 1, 0))) >= 0:
                        return count, stop, len(text) - at
            self._tail = text[max(len(text) - self.num_held, 0) :]
        return None
