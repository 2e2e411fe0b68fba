"""A router that keeps long prompts apart: those above `limit` tokens go to the last replica, others to the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchsim.base.ranges import Config, PositiveInt
from batchsim.drive.fleet.routers.router import Outstanding, Stage
from batchsim.kernel.types import Request


@dataclass(frozen=True)
class ByLengthConfig(Config):
    limit: PositiveInt

    def build(self, seed: int) -> ByLength:
        return ByLength(self)


class ByLength:
    def __init__(self, config: ByLengthConfig) -> None:
        self._limit = config.limit
        self._requests = Outstanding()

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        is_long = request.prompt_tokens > self._limit
        replica = up[-1] if is_long or len(up) == 1 else self._requests.least(up[:-1])
        self._requests.add(replica, 1)
        return replica

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._requests.add(replica, -1)
