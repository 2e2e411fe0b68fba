"""The experiment: loads for a server from which the terms of its step costs can be identified.

Single prompts of various lengths separate prompt tokens from the base; decoding users, varied in number and in context,
separate sequences from contexts; long prompts beside decodes show how chunks slow them; repeated prompts show what a
prefix cache saves; two mixes of lengths, below and above saturation, are the loads themselves. Three loads are held
out: a rate between for each mix, and a third mix. All but the shortest are asked for in an order of their own
(`spread`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchsim.fit.server.loads import Lengths, Load
from batchsim.fit.server.prompts import BLOCK, TAIL

LONGEST = 8192
"""Tokens beyond which the experiment asks for no longer requests, whatever the server takes."""
SHARES = {"given": (0.3, 0.75, 1.3), "held": (0.5,)}
"""Rates of each mix as shares of what the server answers when all users ask at once; the last is an overload."""
_GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples leave the most even gaps between 0 and 1, however many they are."""
_PARTS = 51.0  # into which the time is divided; what each kind of load has of them stands below


@dataclass(frozen=True)
class Design:
    """An experiment of `seconds` with at most `users` in flight and `max_model_len` tokens a request, on a server that
    takes `token_s` for a token of a lone answer. Closed loops of several users have `fewest_users` at least."""

    seconds: float
    users: int
    max_model_len: int
    token_s: float
    fewest_users: int = 2

    @property
    def _part_s(self) -> float:
        return self.seconds / _PARTS

    @property
    def _longest(self) -> int:
        return min(self.max_model_len, LONGEST)

    @property
    def _output(self) -> int:
        """Tokens of an answer such that a user of half a part has at least one."""
        return max(min(64, round(self._part_s / 4 / self.token_s), self._longest // 8), 4)

    @property
    def sentinel(self) -> Load:
        """A few lone answers, sent before every load: spread over the experiment, they separate a machine that grows
        slower from one that is disturbed for seconds, as many at its two ends do not."""
        return Load("sentinel", (16, 16), (self._output, self._output), self._part_s / 4, most=3)

    def singles(self) -> Iterator[Load]:
        """From the shortest prompt to the longest; the runner may stop when one takes too long."""
        size = 16
        while size + self._output <= self._longest:
            output = min(self._output, 16)
            yield Load(f"single-{size}", (size, size), (output, output), self._part_s / 2, most=4, seed=size)
            size *= 4

    def closed(self) -> Iterator[Load]:
        """Loads of decoding users; long contexts; long prompts beside decodes; repeated prompts."""
        output, part_s = self._output, self._part_s
        for users in (users for users in _ladder(self.users) if users >= self.fewest_users):
            yield Load(f"users-{users}", (16, 48), (output // 2, 3 * output // 2), part_s, users=users, seed=users)
        context = self._longest // 2
        half = min(max(self.users // 2, self.fewest_users), self.users)
        yield Load("long-contexts", (context // 2, context), (output, output), 2 * part_s, users=half, seed=101)
        yield Load(
            "long-beside-decodes", (16, 48), (output, 2 * output), 2 * part_s, users=half, seed=102,
            long_prompt=context, long_share=0.15,
        )  # fmt: skip
        shared = max(min(512, self._longest // 4) // BLOCK * BLOCK, BLOCK) + TAIL
        yield Load("repeated", (shared, shared), (output // 2 + 1, output), part_s, shared=3, seed=103)

    @property
    def mixes(self) -> dict[str, tuple[Lengths, Lengths]]:
        """(prompt, output) lengths in tokens of each mix, by name."""
        longest, output = self._longest, self._output
        return {
            "short": ((max(longest // 64, 4), max(longest // 16, 8)), (output // 2, 3 * output // 2)),
            "long": ((longest // 8, longest * 3 // 8), (output // 4 + 1, output // 2 + 1)),
        }

    def full(self) -> Iterator[Load]:
        """All users at once, for each mix."""
        for number, (name, (prompt, output)) in enumerate(self.mixes.items()):
            yield Load(f"full-{name}", prompt, output, 2 * self._part_s, users=self.users, seed=200 + number)

    def rates(self, full_rps: dict[str, float]) -> Iterator[tuple[str, Load]]:
        """("given" or "held", load) of open loads, where all users had `full_rps` answers a second of each mix."""
        between = {"between": 1 / sum(0.5 / rps for rps in full_rps.values())}
        (short, short_out), (long, long_out) = self.mixes["short"], self.mixes["long"]
        third = ((short[1], long[0]), (long_out[0], short_out[1])) if short[1] <= long[0] else (short, short_out)
        for number, (name, rps) in enumerate((full_rps | between).items()):
            prompt, output = self.mixes.get(name, third)
            for kind, shares in SHARES.items():
                parts = 4 if kind == "held" else 2  # what judges must be known better
                for share in shares if name != "between" or kind == "held" else ():
                    load = Load(
                        f"{name}-{share:.0%}".rstrip("%"), prompt, output, parts * self._part_s, rate_rps=share * rps,
                        seed=300 + 10 * number + round(10 * share),
                    )  # fmt: skip
                    yield kind, load


def spread(loads: Iterable[tuple[str, Load]]) -> list[tuple[str, Load]]:
    """The loads in such an order that those of each kind, which stand together, come all through the experiment: a
    machine that grows slower would else make one kind look dearer than another."""
    numbered = list(enumerate(loads))
    return [load for number, load in sorted(numbered, key=lambda each: each[0] * _GOLDEN % 1)]


def _ladder(users: int) -> list[int]:
    """2, 3, 4, 6, 8, 16, ..., up to `users`, and `users`: among few tokens one more may cost a tile more."""
    doubled = (2**power for power in range(3, users.bit_length()))
    fewer = [number for number in (2, 3, 4, 6, *doubled) if number < users]
    return [*fewer, users] if users > 1 else fewer
