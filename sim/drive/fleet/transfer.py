"""What a scenario says of the KV that goes from prefill to decode engines, and the links on which it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchsim.base.ranges import Config
from batchsim.base.units import NS_PER_S, Bandwidth, Duration
from batchsim.kernel.types import MISSING


@dataclass(frozen=True)
class TransferConfig(Config):
    """How KV gets from prefill to decode engines."""

    bandwidth: Bandwidth
    """What a link carries, one way, like 50GB/s."""
    latency: Duration = 0
    """What each transfer takes beside its bytes, like 20us."""
    links: Literal["shared", "per_pair"] = "shared"
    """One link for all engines, or one for each pair of a prefill and a decode engine."""

    def busy_ns(self, num_bytes: int) -> int:
        """For how long a transfer occupies its link, ns."""
        return round(num_bytes * NS_PER_S / self.bandwidth)


class Links:
    """The links between engines. Each carries one transfer after another, in the order in which they are asked for,
    each for its bytes at the bandwidth; the latency comes on top and occupies no link."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._free_ns: dict[tuple[int, int], int] = {}  # when each is free again

    def take(self, prefill: int, decode: int, num_bytes: int, ready_ns: int) -> tuple[int, int]:
        """Sends what is there from `ready_ns` on from one engine to another, by their numbers; returns when it is on
        its link and when it is there, in ns."""
        link = (prefill, decode) if self._config.links == "per_pair" else (MISSING, MISSING)
        start_ns = max(ready_ns, self._free_ns.get(link, 0))
        self._free_ns[link] = start_ns + self._config.busy_ns(num_bytes)
        return start_ns, self._free_ns[link] + self._config.latency
