"""What a scenario says of the KV that goes from prefill to decode engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchsim.base.ranges import Config
from batchsim.base.units import NS_PER_S, Bandwidth, Duration


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
