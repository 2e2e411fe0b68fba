"""The keys under which full KV blocks are found: each a hash of the block's tokens and of the key before it.

Hashes are of whole numbers only, so they are the same in every process. Two blocks of different contents get one key
with a probability of about 2**-61 a pair.
"""

from __future__ import annotations

from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Request

_OWN_KEYS = 1 << 64
"""Keys from here on are of requests that share no tokens (`tokens` None); hashes are smaller."""


class ChainKeys:
    """The keys of a request's KV blocks, those of its prompt and then of its output, made when needed.

    With `lookahead` a block's key also covers that many tokens after it.
    """

    __slots__ = ("_block_size", "_keys", "_lookahead", "_output", "_prompt_tokens", "_rest", "_segments")

    def __init__(self, request: Request, block_size: int, lookahead: int = 0) -> None:
        assert request.tokens is not None
        self._block_size = block_size
        self._prompt_tokens = request.prompt_tokens
        self._output = output_stream(request.id)
        self._segments = request.tokens.segments
        self._lookahead = lookahead
        self._keys, self._rest = ([], ()) if lookahead else _prompt_keys(self._segments, block_size)

    def up_to(self, count: int) -> list[int]:
        """The keys of at least the first `count` blocks, in order; the list is not to be changed."""
        keys, size = self._keys, self._block_size
        while len(keys) < count:
            at = len(keys) * size - self._prompt_tokens  # of the block's first token in the output
            before = keys[-1] if keys else 0
            if self._lookahead:
                start = len(keys) * size
                keys.append(hash((before, *self._parts(start, start + size + self._lookahead))))
            elif at < 0:
                keys.append(hash((before, *self._rest, self._output, 0, size + at)))
            else:
                keys.append(hash((before, self._output, at)))
        return keys

    def begun(self, num_tokens: int) -> int:
        """The key of the partial block at the end of the first `num_tokens` tokens."""
        full = num_tokens // self._block_size
        before = self.up_to(full)[full - 1] if full else 0
        return hash((before, *self._parts(full * self._block_size, num_tokens)))

    def _parts(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens `start` to `end` - 1, flat: stream, index of the first token, number of tokens, next stream, ..."""
        at = self._prompt_tokens
        parts: tuple[int, ...] = ()
        if end > at:
            first = max(start - at, 0)
            parts = (self._output, first, end - at - first)
        for stream, first, length in reversed(self._segments):
            if at <= start:
                break
            at -= length
            low, high = max(start, at), min(end, at + length)
            if low < high:
                parts = (stream, first + low - at, high - low, *parts)
        return parts


def keys_of(request: Request, block_size: int, lookahead: int = 0) -> ChainKeys | range:
    if request.tokens is None:
        first = own_key(request)
        return range(first, first + (1 << 32))
    return ChainKeys(request, block_size, lookahead)


def own_key(request: Request) -> int:
    """The key of the first block of a request that shares no tokens; those of its next blocks count up from it."""
    return _OWN_KEYS + (request.id << 32)


def _prompt_keys(segments: tuple[tuple[int, int, int], ...], block_size: int) -> tuple[list[int], tuple[int, ...]]:
    """The chained keys of a prompt's full blocks, and the tokens of its partial last one: stream, start, length, ...

    A block within one segment is hashed as (key before, stream, start), any other as (key before, parts).
    """
    keys: list[int] = []
    parts: tuple[int, ...] = ()
    before, room = 0, block_size
    for stream, start, length in segments:
        end = start + length
        if parts:
            n = min(room, length)
            parts += (stream, start, n)
            start += n
            room -= n
            if room:
                continue
            before = hash((before, *parts))
            keys.append(before)
            parts, room = (), block_size
        stop = end - (end - start) % block_size
        for at in range(start, stop, block_size):
            before = hash((before, stream, at))
            keys.append(before)
        if stop < end:
            parts, room = (stream, stop, end - stop), block_size - (end - stop)
    return keys, parts
