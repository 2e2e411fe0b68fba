"""vLLM's scheduler with one rule changed each, for `--scheduler-cls` of recordings that must show it."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]


class NewestFirst(Scheduler):
    """Admits the request first that came last."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        assert isinstance(self.waiting, FCFSRequestQueue)

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self.waiting.rotate()


class BudgetOffByOne(Scheduler):
    """Has a token less for each step."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.max_num_scheduled_tokens -= 1


class FirstPartOnly(Scheduler):
    """Admits a prompt where the first part of it fits."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.scheduler_reserve_full_isl = False
