"""Which tokens of prompts are the same as those of earlier prompts and answers, for engines with a prefix cache.

Engines take streams (`batchsim.kernel.tokens`), clients send token ids: equal beginnings, by blocks of BLOCK tokens,
get the streams of the request that had them first.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchsim.kernel.tokens import Segment, TokenIds, output_stream, prompt_stream

BLOCK = 16
"""Tokens by which beginnings are compared: what is equal for less than a block more counts as different."""
MAX_BLOCKS = 1 << 19
"""Blocks that are remembered, those longest not met forgotten first: 8 million tokens, some 150 MB."""


class PrefixIdentity:
    """The blocks of all prompts and answers so far, each under a hash of its tokens and of all before it."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[int, tuple[Segment, ...]] = {}
        self._num_streams = 0
        self._first = 0  # earlier requests share nothing with later ones

    def of(self, ids: Sequence[int]) -> TokenIds:
        """The tokens of a prompt, at least one, whose blocks are then known."""
        key, segments, blocks = 0, list[Segment](), self._blocks
        full = len(ids) - len(ids) % BLOCK
        stream = -1  # the new one, from the first block on that is not known
        for at in range(0, full, BLOCK):
            key = hash((key, *ids[at : at + BLOCK]))
            block = blocks.pop(key, None) if stream < 0 else None
            if block is None:
                stream = self._new_stream() if stream < 0 else stream
                block = ((stream, at, BLOCK),)
            self._note(key, block)
            segments += block
        if full < len(ids):
            stream = self._new_stream() if stream < 0 else stream
            segments.append((stream, full, len(ids) - full))
        return TokenIds.of(segments)

    def answered(self, prompt: Sequence[int], tokens: TokenIds, request_id: int, output: Sequence[int]) -> None:
        """Notes what a request generated, which the next prompt of its session may hold. `tokens`: `of` its prompt."""
        if request_id < self._first:
            return
        tail, key = len(prompt) % BLOCK, 0
        for at in range(0, len(prompt) - tail, BLOCK):
            key = hash((key, *prompt[at : at + BLOCK]))
        rest: list[Segment] = []  # of the prompt's tokens beyond its last full block
        left = tail
        for stream, start, length in reversed(tokens.segments):
            if left:
                n = min(left, length)
                rest.insert(0, (stream, start + length - n, n))
                left -= n
        ids = [*prompt[len(prompt) - tail :], *output]
        stream = output_stream(request_id)
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = hash((key, *ids[at : at + BLOCK]))
            if key in self._blocks:
                continue
            first = max(at - tail, 0)
            own = (stream, first, at + BLOCK - tail - first)
            self._note(key, (*rest, own) if at == 0 else (own,))

    def forget(self, num_sent: int) -> None:
        """Lets no prompt share anything with what came before, the answers under way among the `num_sent` requests
        included: what an emptied prefix cache comes to."""
        self._blocks.clear()
        self._first = num_sent

    def _new_stream(self) -> int:
        self._num_streams += 1
        return prompt_stream(self._num_streams)

    def _note(self, key: int, segments: tuple[Segment, ...]) -> None:
        self._blocks[key] = segments
        if len(self._blocks) > self._max_blocks:
            del self._blocks[next(iter(self._blocks))]
