"""The keys under which full KV blocks are found: each stands for the block's tokens and for all tokens before it.

The first of several blocks within one segment of tokens has a hash as its key, and the keys of the others count up from
it, so that the keys of a long prompt are a few runs. Hashes are of whole numbers only, so they are the same in every
process. Two runs of n blocks of different contents share a key with a probability of about n * 2**-60.
"""

from __future__ import annotations

from bisect import bisect_right

from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Request

_OWN_KEYS = 1 << 64
"""Keys from here on are of requests that share no tokens (`tokens` None); hashes are smaller."""
MOST_BLOCKS = 1 << 31
"""More than a request has; the keys of its partial blocks are beyond them, where it shares no tokens."""


class BlockKeys:
    """The keys of a request's KV blocks, those of its prompt and then of its output.

    With `lookahead` a block's key also covers that many tokens after it. Requests of different LoRA adapters have no
    key in common: an adapter's KV is its own.
    """

    __slots__ = ("_block_size", "_firsts", "_numbers", "_request", "_segments")

    def __init__(self, request: Request, block_size: int, lookahead: int = 0) -> None:
        self._request = request
        self._block_size = block_size
        self._segments: tuple[tuple[int, int, int], ...] = ()
        self._numbers = [0]  # of the first block of each run
        self._firsts = [own_key(request)]  # its key
        if request.tokens is not None:
            self._segments = (*request.tokens.segments, (output_stream(request.id), 0, MOST_BLOCKS * block_size))
            self._numbers, self._firsts = self._runs(block_size + lookahead)

    @property
    def request(self) -> Request:
        """The request whose blocks these are the keys of."""
        return self._request

    def run(self, number: int, stop: int) -> tuple[int, int]:
        """(The key of block `number`, how many blocks before `stop` have keys that count up from it)."""
        numbers = self._numbers
        at = bisect_right(numbers, number)
        end = numbers[at] if at < len(numbers) and numbers[at] < stop else stop
        return self._firsts[at - 1] + number - numbers[at - 1], end - number

    def rows(self) -> tuple[list[int], list[int]]:
        """(The numbers of the blocks at which keys begin to count up anew, the keys of these); not to be changed."""
        return self._numbers, self._firsts

    def key(self, number: int) -> int:
        """The key of block `number`, counted from 0."""
        at = bisect_right(self._numbers, number) - 1
        return self._firsts[at] + number - self._numbers[at]

    def up_to(self, count: int) -> list[int]:
        """The keys of the first `count` blocks, in order."""
        keys: list[int] = []
        while len(keys) < count:
            key, length = self.run(len(keys), count)
            keys += range(key, key + length)
        return keys

    def begun(self, num_tokens: int) -> int:
        """The key of the partial block at the end of the first `num_tokens` tokens."""
        if not self._segments:
            return self._firsts[0] + MOST_BLOCKS + num_tokens
        full = num_tokens // self._block_size
        before = self.key(full - 1) if full else self._root
        at, end = 0, 0
        for number, (_, _, length) in enumerate(self._segments):
            at, end = end, end + length
            if end > full * self._block_size:
                return hash((before, *self._parts(number, at, full * self._block_size, num_tokens)))
        raise AssertionError(f"{num_tokens} tokens are more than any request has")

    @property
    def _root(self) -> int:
        """What stands before the first block: the adapter; 0 for the base model."""
        return self._request.adapter + 1

    def _runs(self, window: int) -> tuple[list[int], list[int]]:
        """The number and the key of the first block of each run; a key covers `window` tokens from its block's first.

        A run are the blocks whose windows lie within one segment. A window that reaches beyond is a run of its own.
        """
        size, segments = self._block_size, self._segments
        numbers: list[int] = []
        firsts: list[int] = []
        next_, before, at = 0, self._root, 0
        for number, (stream, start, length) in enumerate(segments):
            end = at + length
            inside = (end - window) // size + 1  # blocks whose windows are over by the segment's end
            if next_ < inside:
                numbers.append(next_)
                firsts.append(hash((before, stream, start + next_ * size - at)))
                before = firsts[-1] + inside - next_ - 1
                next_ = inside
            if number + 1 == len(segments):
                break
            while next_ * size < end:
                numbers.append(next_)
                before = hash((before, *self._parts(number, at, next_ * size, next_ * size + window)))
                firsts.append(before)
                next_ += 1
            at = end
        return numbers, firsts

    def _parts(self, number: int, at: int, start: int, end: int) -> tuple[int, ...]:
        """Tokens `start` to `end` - 1, flat: stream, index of the first token, number of tokens, next stream, ...

        The first of them is in segment `number`, which begins with token `at`."""
        parts: tuple[int, ...] = ()
        while at < end:
            stream, first, length = self._segments[number]
            low, high = max(start, at), min(end, at + length)
            parts += (stream, first + low - at, high - low)
            at += length
            number += 1
        return parts


def own_key(request: Request) -> int:
    """The key of the first block of a request that shares no tokens; those of its next blocks count up from it."""
    return _OWN_KEYS + (request.id << 32)
