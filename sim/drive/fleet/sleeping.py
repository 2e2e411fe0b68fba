"""What a scenario says of models that share a GPU: side by side, or in turns, and how long their weights take to move.

An engine that sleeps keeps no KV. At level 1 its weights are copied to the host's memory and back, both over the
GPU's link to the host; at level 2 they are dropped, and read from disk again: vLLM 0.33.0, v1/engine/core.py, `sleep`
and `wake_up`. Of an engine of several GPUs each moves its part over its own link, all at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchsim.base.ranges import Config, check_ranges
from batchsim.base.units import NS_PER_S, Bandwidth, Duration


@dataclass(frozen=True)
class SleepConfig(Config):
    """Models that take turns on a GPU: one is awake, the others sleep."""

    level: Literal[1, 2]
    """1: the weights of a sleeping model are in the host's memory; 2: on disk."""
    link: Bandwidth
    """What goes between the host and each GPU, one way at a time, like 25GB/s."""
    disk: Bandwidth | None = None
    """At level 2, what is read from disk for each GPU, like 3GB/s."""
    min_awake: Duration = 0
    """How long a model that has requests stays awake at least when others are asked for, like 5s."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.level == 1 and self.disk is not None:
            raise ValueError("sleep.disk: at level 1 weights are in the host's memory. Drop disk, or write level: 2.")
        if self.level == 2 and self.disk is None:
            raise ValueError("sleep.disk is missing: at level 2 weights come from disk. Write disk: 3GB/s, say.")

    def moves(self, weight_bytes: int) -> Moves:
        """How long a model with `weight_bytes` on each GPU takes to go to sleep and to wake up."""
        if self.disk is None:
            copy_ns = round(weight_bytes * NS_PER_S / self.link)
            return Moves(copy_ns, copy_ns)
        return Moves(0, round(weight_bytes * NS_PER_S / min(self.disk, self.link)))


@dataclass(frozen=True)
class ShareConfig(Config):
    """Models that are awake side by side on a GPU, each with its share of the memory."""

    steps: Literal["queued"]
    """`queued`: the GPU runs one step at a time, whole, in the order in which they were launched."""


@dataclass(frozen=True)
class Moves:
    """For how long the GPU is busy as a model goes to sleep and as it wakes up, ns."""

    sleep_ns: int
    wake_ns: int
