"""What a scenario says of the KV that goes from prefill to decode engines, and the links on which it goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import NS_PER_S, Bandwidth, Duration, PositiveDuration
from batchsim.drive.fleet.routers.router import drawn
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
    failed: Annotated[float, Range(0, 1)] | None = field(default=None, metadata=LEFT_OUT)
    """Share of the requests whose transfer fails as it ends, drawn at random; none unless given."""
    on_failure: Literal["fail", "recompute"] = field(default="fail", metadata=LEFT_OUT)
    """With `failed`: such a request ends, or its decode engine computes the prompt itself."""
    lease: PositiveDuration = field(default=30 * NS_PER_S, metadata=LEFT_OUT)
    """With `failed`: how long a prefill engine keeps blocks that were not read, unless heartbeats prolong it."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.failed is None and (self.on_failure, self.lease) != ("fail", 30 * NS_PER_S):
            key = "lease" if self.on_failure == "fail" else "on_failure"
            raise ValueError(f"{key} is of transfers that fail, and it is not said how many do. Set failed, like 0.01.")

    def fails(self, seed: int, request_id: int) -> bool:
        """Whether the transfer of the request fails."""
        return bool(self.failed) and drawn(seed, "failed transfer", request_id) < self.failed * (1 << 64)

    def lapses_ns(self, kept_ns: int, over_ns: int) -> int:
        """When a prefill engine frees the blocks that it keeps from `kept_ns` on for a transfer that fails at
        `over_ns`, ns: as the lease ends, or two thirds of a lease after the last heartbeat of the decode engine, which
        sends one every sixth of a lease until the transfer is over (vLLM 0.33.0, nixl/base_scheduler.py)."""
        beat_ns = max(self.lease // 6, 1)
        last_ns = kept_ns + (over_ns - kept_ns) // beat_ns * beat_ns
        return max(kept_ns + self.lease, last_ns + 2 * self.lease // 3)

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
