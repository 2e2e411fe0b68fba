"""Rules that an agent must beat, and how they are compared: paired on the same seeds, with intervals.

A rule is called with an observation and the `info` beside it and returns an action. Those here need the `queue` of
`info`, which the environments of whole batches have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]

from batchsim.metrics.intervals import Difference, paired

Rule = Callable[[Any, dict[str, Any]], Any]


@dataclass(frozen=True)
class ControlLimit:
    """Waits until `limit` requests are there, then serves as many as `max_batch`. A limit of 1 serves at once, one of
    `max_batch` whole batches only."""

    limit: int
    max_batch: int

    def __call__(self, observation: Any, info: dict[str, Any]) -> int:
        return self.max_batch if info["queue"] >= self.limit else 0


@dataclass(frozen=True)
class Timeout:
    """Serves a whole batch, or, once the oldest has waited `wait_s`, the requests there. `age` is the place of the
    oldest one's seconds in an observation."""

    wait_s: float
    max_batch: int
    age: int = 1

    def __call__(self, observation: Any, info: dict[str, Any]) -> int:
        return self.max_batch if info["queue"] >= self.max_batch or observation[self.age] >= self.wait_s else 0


@dataclass(frozen=True)
class Constant:
    """Always the same action."""

    action: Any

    def __call__(self, observation: Any, info: dict[str, Any]) -> Any:
        return self.action


@dataclass(frozen=True)
class Played:
    """One episode: its reward, its simulated seconds, and the sums of what `info` counts."""

    reward: float
    seconds: float
    decisions: int
    counts: dict[str, float]

    @property
    def rate(self) -> float:
        """The reward of a second."""
        return self.reward / self.seconds


_COUNTED: tuple[str, ...] = ("served", "joules", "finished", "in_slo", "missed", "preemptions", "steps")


def play(env: gymnasium.Env[Any, Any], rule: Rule, seed: int, options: dict[str, Any] | None = None) -> Played:
    """One episode of `env` under `rule`, from `seed`."""
    observation, info = env.reset(seed=seed, options=options)
    reward, seconds, decisions, over = 0.0, 0.0, 0, False
    counts: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
    while not over:
        observation, gained, terminated, truncated, info = env.step(rule(observation, info))
        reward, seconds, decisions = reward + float(gained), seconds + info["seconds"], decisions + 1
        for name in _COUNTED:
            counts[name] += info.get(name, 0)
        over = terminated or truncated
    return Played(reward, seconds, decisions, counts)


def best_of(env: gymnasium.Env[Any, Any], rules: Iterable[Rule], seeds: Sequence[int], **reset: Any) -> Rule:
    """The rule with the most reward a second over `seeds`; of equals the first."""
    return max(rules, key=lambda rule: sum(play(env, rule, seed, **reset).rate for seed in seeds))


def compare(env: gymnasium.Env[Any, Any], rule: Rule, other: Rule, seeds: Sequence[int], **reset: Any) -> Difference:
    """By how much the reward a second of `rule` is above that of `other`: each seed is played by both, paired."""
    rates = [{seed: play(env, each, seed, **reset).rate for seed in seeds} for each in (rule, other)]
    return paired(*rates)
