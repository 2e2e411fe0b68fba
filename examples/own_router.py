"""A router of one's own: tenants keep to a replica while that holds at most `most` more requests than the emptiest.

    replicas: {count: 4, router: {kind: "own_router:TenantRouterConfig", most: 8}}

with this folder on PYTHONPATH and --allow-code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from batchsim.base.ranges import Config, NonNegativeInt
from batchsim.drive.fleet.routers.router import Stage
from batchsim.kernel.types import Request


@dataclass(frozen=True)
class TenantRouterConfig(Config):
    most: NonNegativeInt

    def build(self, seed: int) -> TenantRouter:
        return TenantRouter(self)


class TenantRouter:
    def __init__(self, config: TenantRouterConfig) -> None:
        self.most = config.most
        self.held: Counter[int] = Counter()

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        home, emptiest = up[crc32(request.tenant.encode()) % len(up)], min(up, key=lambda one: self.held[one])
        chosen = emptiest if self.held[home] - self.held[emptiest] > self.most else home
        self.held[chosen] += 1
        return chosen

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self.held[replica] -= 1
