"""A made log of half an hour of requests, for tutorials: conversations whose prompts grow, and a batch job.

Seconds since its beginning, lengths in tokens, a class, and the name of a conversation. Every number is invented.
Of `random` only its uniform numbers are used, which Python keeps the same from version to version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from statistics import NormalDist

HEADER = "sent_s,prompt_tokens,output_tokens,class,session"
COLUMNS = "arrival=sent_s,prompt=prompt_tokens,output=output_tokens,request_class=class,session=session"
"""The columns as `--columns` names them."""

SPAN_S = 1800.0
_SESSION_GAP_S = 7.0  # between beginnings of conversations, in the mean
_SWING = 0.6  # by which the rate of conversations rises and falls over the span
_THINK_S = 25.0  # between an answer and the next turn, in the mean
_TOKEN_S = 0.02
_ON = 0.72  # chance of another turn
_NEW, _ANSWER = (180, 0.8), (220, 0.7)  # mean and CV of a turn's own tokens and of its answer's
_JOB_EVERY_S, _JOB_S, _JOB_SIZE = 300.0, 20.0, 40
_DOCUMENT, _SUMMARY = (2500, 0.6), (60, 0.4)

Row = tuple[float, int, int, str, str]


def example_log(seed: int = 0) -> str:
    """The text of a CSV file with a row a request, in the order of their times."""
    chance = Random(seed)
    rows = sorted([*_conversations(chance), *_jobs(chance)])
    return "\n".join([HEADER, *(",".join((f"{row[0]:.3f}", *map(str, row[1:]))) for row in rows)]) + "\n"


def _conversations(chance: Random) -> Iterator[Row]:
    start_s = number = 0
    while True:
        start_s += _gap(chance, _SESSION_GAP_S / (1 + _SWING * math.sin(2 * math.pi * start_s / SPAN_S)))
        at_s, number, context = start_s, number + 1, 0
        if start_s >= SPAN_S:
            return
        while at_s < SPAN_S:
            prompt, answer = context + _tokens(chance, *_NEW), _tokens(chance, *_ANSWER)
            yield at_s, prompt, answer, "chat", f"c{number}"
            if chance.random() > _ON:
                break
            context = prompt + answer
            at_s += answer * _TOKEN_S + _gap(chance, _THINK_S)


def _jobs(chance: Random) -> Iterator[Row]:
    for begin_s in range(int(_JOB_EVERY_S / 2), int(SPAN_S), int(_JOB_EVERY_S)):
        for _ in range(_JOB_SIZE):
            at_s = begin_s + _JOB_S * chance.random()
            yield at_s, _tokens(chance, *_DOCUMENT), _tokens(chance, *_SUMMARY), "batch", ""


def _gap(chance: Random, mean_s: float) -> float:
    return -mean_s * math.log(1 - chance.random())


def _tokens(chance: Random, mean: float, cv: float) -> int:
    """A lognormal length of at least one token."""
    variance = math.log(1 + cv**2)
    normal = NormalDist(math.log(mean) - variance / 2, math.sqrt(variance))
    return max(round(math.exp(normal.inv_cdf(max(chance.random(), 1e-9)))), 1)
