"""Token identities: which tokens a prompt shares with others, as segments of numbered streams.

Token `i` of stream `s` is one and the same token wherever it occurs. What a request generates is a stream too, so that
a later prompt can hold it. Streams are numbered from 0: even ones are prompts', odd ones are requests' outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

Segment = tuple[int, int, int]
"""Stream, index of the first token, number of tokens."""


def prompt_stream(number: int) -> int:
    """The stream of prompt text number `number`."""
    return 2 * number


def output_stream(request_id: int) -> int:
    """The stream of a request's output: its j-th output token has index j."""
    return 2 * request_id + 1


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The tokens of a prompt in order. Made by `of`, so that equal tokens have equal segments."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, segments: list[Segment]) -> TokenIds:
        """The tokens of `segments`, neighbours that continue one stream joined.

        ValueError for a negative stream or index, or a length below 1.
        """
        joined: list[Segment] = []
        for stream, start, length in segments:
            if stream < 0 or start < 0 or length < 1:
                raise ValueError(f"segment {stream, start, length}: needs stream and start from 0, length from 1")
            if joined and joined[-1][0] == stream and sum(joined[-1][1:]) == start:
                joined[-1] = (stream, joined[-1][1], joined[-1][2] + length)
            else:
                joined.append((stream, start, length))
        return cls(tuple(joined))

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(length for _, _, length in self.segments)
