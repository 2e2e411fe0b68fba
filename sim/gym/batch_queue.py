"""`batchsim/BatchQueue-v0`: decisions at a `BatchServer`, a pure loop in which a decision takes microseconds."""

from __future__ import annotations

from collections import deque
from math import log1p
from typing import Any

import gymnasium  # pyright: ignore[reportMissingImports]
import numpy as np
from numpy.typing import NDArray

from batchsim.gym.batch_server import BatchServer

_DRAWN = 1024  # gaps that are drawn at once
_HIGHS = np.array([20.0, 600.0, 1.0], np.float32)


class BatchQueueEnv(gymnasium.Env):
    """Decisions at a batch server, whenever it is idle and requests wait.

    Action k of `Discrete(max_batch + 1)` serves the first k of them, all if they are fewer; 0 waits for the next
    arrival, for `max_wait_s` at most if that is given. Observation: log(1 + requests that wait), the seconds for which
    the oldest has waited, the latest action by `max_batch`. Reward: the cost of the seconds until the next decision
    (`BatchServer.cost`), negative. `truncated` at `horizon_s`; `terminated` only where more than `max_queue` wait.
    `info`: `queue`, `seconds` since the decision before, `discount` (`discount_per_s` to their power), `served`,
    `joules`; `reset(options={"rate": 80})` changes the rate of that episode and those after it.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  as Gymnasium has it

    def __init__(
        self,
        server: BatchServer | None = None,
        *,
        horizon_s: float = 60.0,
        max_wait_s: float | None = None,
        max_queue: int | None = None,
        discount_per_s: float = 1.0,
    ) -> None:
        if not horizon_s > 0 or (max_wait_s is not None and not max_wait_s > 0):
            raise ValueError(f"horizon_s {horizon_s:g} and max_wait_s {max_wait_s} must be above 0.")
        if not 0 < discount_per_s <= 1:
            raise ValueError(f"discount_per_s {discount_per_s:g} must be above 0, and at most 1.")
        self.server = BatchServer() if server is None else server
        self.rate = self.server.rate
        self.horizon_s, self.max_wait_s, self.max_queue = horizon_s, max_wait_s, max_queue
        self.discount_per_s = discount_per_s
        self.action_space = gymnasium.spaces.Discrete(self.server.max_batch + 1)
        self.observation_space = gymnasium.spaces.Box(np.zeros(3, np.float32), _HIGHS)
        self._waiting: deque[float] = deque()
        self._gaps: list[float] = []
        self._now_s = self._next_s = 0.0
        self._action = 0
        self._services = [0.0, *(self.server.service_s(k) for k in range(1, self.server.max_batch + 1))]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """An empty server at the first arrival. ValueError for an option other than `rate`, or none above 0."""
        super().reset(seed=seed)
        if options:
            if set(options) != {"rate"} or not options["rate"] > 0:
                raise ValueError(f"options {options}: only rate is one, and it must be above 0.")
            self.rate = float(options["rate"])
        self._waiting.clear()
        self._gaps = []
        self._now_s = self._next_s = 0.0
        self._action = 0
        self._draw()
        self._until_one_waits()
        return self._observed(), self._info(0.0, 0, 0.0)

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """The next decision, the cost until then, negative, whether the queue is beyond `max_queue`, and whether the
        horizon is reached. ValueError for an action outside the space, and without an episode."""
        waiting, begun_s = self._waiting, self._now_s
        if not waiting:
            raise ValueError("no episode has begun. Call reset() first.")
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r}: it must be from 0 to max_batch {self.server.max_batch}.")
        self._action = int(action)
        size = min(self._action, len(waiting))
        joules = 0.0
        if size:
            end_s, present = begun_s + self._services[size], len(waiting)
            joules = self.server.energy(size)
            for _ in range(size):
                waiting.popleft()
        else:
            end_s, present = self._next_s, len(waiting)
            if self.max_wait_s is not None:
                end_s = min(end_s, begun_s + self.max_wait_s)
        request_s = present * (end_s - begun_s)
        while self._next_s <= end_s:
            request_s += end_s - self._next_s
            waiting.append(self._next_s)
            self._draw()
        self._now_s = end_s
        if not waiting:
            self._until_one_waits()
        server = self.server
        cost = server.delay_weight / self.rate * request_s + server.energy_weight * joules
        terminated = self.max_queue is not None and len(waiting) > self.max_queue
        info = self._info(self._now_s - begun_s, size, joules)
        return self._observed(), -cost, terminated, self._now_s >= self.horizon_s, info

    def _draw(self) -> None:
        if not self._gaps:
            self._gaps = self.np_random.exponential(1 / self.rate, _DRAWN).tolist()
        self._next_s += self._gaps.pop()

    def _until_one_waits(self) -> None:
        self._now_s = self._next_s
        self._waiting.append(self._next_s)
        self._draw()

    def _observed(self) -> NDArray[np.float32]:
        waiting = self._waiting
        seen = (log1p(len(waiting)), self._now_s - waiting[0], self._action / self.server.max_batch)
        return np.minimum(np.array(seen, np.float32), _HIGHS)

    def _info(self, seconds: float, served: int, joules: float) -> dict[str, Any]:
        return {
            "queue": len(self._waiting),
            "seconds": seconds,
            "discount": self.discount_per_s**seconds,
            "served": served,
            "joules": joules,
        }
