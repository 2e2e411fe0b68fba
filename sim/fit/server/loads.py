"""The requests of one load: how many, how long, when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Lengths = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """Requests of lengths drawn evenly from `prompt` and `output`, both ends included, in tokens, for `seconds`.

    They come at random with a mean rate of `rate_rps`; without one from `users` in turn, who begin one after another
    and each ask again when they have their answer, until the time is up, and once at least. `most`: no more requests
    than these. A share `long_share` of the prompts has `long_prompt` tokens. `shared`: the number of prompts used in
    turn, alike but for their last 16 tokens. `seed` draws the same requests at the same times.
    """

    name: str
    prompt: Lengths
    output: Lengths
    seconds: float
    rate_rps: float | None = None
    users: int = 1
    most: int | None = None
    long_prompt: int = 0
    long_share: float = 0.0
    shared: int = 0
    seed: int = 0

    def requests(self) -> Requests:
        """The first requests, one after another without end."""
        return Requests(self)


@dataclass(frozen=True)
class Ask:
    """A request to send `at_s` seconds after the start, None: as soon as a user is free. `group` is the one of the
    shared prompts that it begins with, -1 for none."""

    at_s: float | None
    prompt_tokens: int
    output_tokens: int
    group: int = -1


class Requests:
    """The requests of `load` by number. Number i is the same whatever was asked for before."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._draw = np.random.default_rng([load.seed, len(load.name)])
        self._at_s = 0.0
        self._count = 0

    def following(self) -> Ask | None:
        """The next request; None when the load ends before it."""
        load, draw = self._load, self._draw
        if load.most is not None and self._count >= load.most:
            return None
        gap, prompt, output = (
            draw.exponential(1.0),
            draw.integers(*_ends(load.prompt)),
            draw.integers(*_ends(load.output)),
        )
        is_long = draw.random() < load.long_share
        at_s = None
        if load.rate_rps is not None:
            self._at_s += float(gap) / load.rate_rps if self._count else 0.0
            at_s = self._at_s
            if at_s > load.seconds:
                return None
        group = self._count % load.shared if load.shared else -1
        self._count += 1
        return Ask(at_s, load.long_prompt if is_long else int(prompt), int(output), group)


def _ends(lengths: Lengths) -> Lengths:
    return lengths[0], lengths[1] + 1
