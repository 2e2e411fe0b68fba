"""Runs of tokens as segments of streams: their parts and what two of them have in common, without looking at tokens.

All functions are O(segments). A run has no two neighbours that continue each other, so equal runs are equal tuples.
"""

from __future__ import annotations

from batchsim.kernel.tokens import Segment, output_stream
from batchsim.kernel.types import MISSING, Sequence

TokenRun = tuple[Segment, ...]

_OF_AN_ADAPTER = 1 << 48
"""Streams of one LoRA adapter: more than a workload has."""


def known_tokens(seq: Sequence, num_tokens: int) -> TokenRun:
    """The first `num_tokens` known tokens of `seq`: its prompt, then its output.

    A prompt that shares no tokens is a stream of its own, numbered below 0, so that only its own sequence finds it.
    With a LoRA adapter the streams are that adapter's own.
    """
    request = seq.request
    if request.tokens is None:
        prompt: TokenRun = ((-1 - request.id, 0, request.prompt_tokens),)
    else:
        prompt = request.tokens.segments
        if request.adapter != MISSING:
            first = (request.adapter + 1) * _OF_AN_ADAPTER
            prompt = tuple([(first + stream, start, length) for stream, start, length in prompt])
            if num_tokens > request.prompt_tokens:
                output = first + output_stream(request.id), 0, num_tokens - request.prompt_tokens
                return (*prompt, output)
    if num_tokens > request.prompt_tokens:
        return (*prompt, (output_stream(request.id), 0, num_tokens - request.prompt_tokens))
    return head(prompt, num_tokens)


def head(run: TokenRun, num_tokens: int) -> TokenRun:
    """The first `num_tokens` tokens of `run`, or all if there are fewer."""
    left = num_tokens
    for i, (stream, start, length) in enumerate(run):
        if length >= left:
            return (*run[:i], (stream, start, left)) if left > 0 else run[:i]
        left -= length
    return run


def tail(run: TokenRun, num_tokens: int) -> TokenRun:
    """The tokens of `run` behind its first `num_tokens`."""
    left = num_tokens
    for i, (stream, start, length) in enumerate(run):
        if length > left:
            return ((stream, start + left, length - left), *run[i + 1 :])
        left -= length
    return ()


def common_tokens(one: TokenRun, other: TokenRun) -> int:
    """Length of the longest common prefix of two runs, in tokens."""
    common = 0
    for (stream, start, length), (other_stream, other_start, other_length) in zip(one, other, strict=False):
        if stream != other_stream or start != other_start:
            break
        common += min(length, other_length)
        if length != other_length:
            break
    return common
