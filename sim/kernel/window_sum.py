"""The keys that a decode group reads in layers with a sliding window: the sum over its members of min(context, window).

A member below the window reads one key more with each step, up to the step at which its context fills the window. Those
steps are kept in a heap, so that the sum costs O(log members) a join and nothing a step until it is asked for.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf


class WindowSum:
    """Sums of one group, at its step `step`: `tokens` of all members, `below`: how many have less context than the
    `window`."""

    __slots__ = ("_fills", "_heap", "below", "step", "tokens", "window")

    def __init__(self, window: int, step: int) -> None:
        self.window = window
        self.step = step
        self.tokens = self.below = 0
        self._fills: dict[int, int] = {}  # members by the step with which their context fills the window
        self._heap: list[int] = []  # those steps

    def move_to(self, step: int) -> None:
        """Counts the steps up to `step`, in each of which the members below the window gained a token."""
        while self._heap and self._heap[0] <= step:
            filled = heappop(self._heap)
            self.tokens += self.below * (filled - self.step)
            self.below -= self._fills.pop(filled)
            self.step = filled
        self.tokens += self.below * (step - self.step)
        self.step = step

    def add(self, context: int, step: int) -> None:
        """Adds a member of `context` tokens that joins at `step`."""
        self.move_to(step)
        self.tokens += min(context, self.window)
        if context < self.window:
            self.below += 1
            filled = step + self.window - context
            if filled not in self._fills:
                self._fills[filled] = 0
                heappush(self._heap, filled)
            self._fills[filled] += 1

    def remove(self, context: int, step: int) -> None:
        """Takes out a member that has `context` tokens as it leaves at `step`."""
        self.move_to(step)
        self.tokens -= min(context, self.window)
        if context < self.window:
            self.below -= 1
            self._fills[step + self.window - context] -= 1

    @property
    def fills_in(self) -> float:
        """Steps until members have as much context as the window, which ends the line on which the sum grows; inf:
        there are none below it."""
        return self._heap[0] - self.step if self.below else inf


def keys_in_window(tokens: int, before: int, window: int) -> int:
    """Keys that `tokens` of a prompt read after `before` computed ones, where each reads at most `window`, itself
    among them."""
    growing = min(max(window - before, 0), tokens)
    return growing * before + growing * (growing + 1) // 2 + (tokens - growing) * window
