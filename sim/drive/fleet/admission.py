"""The admission gate before a router: which requests are admitted, in which order, and which are rejected.

Requests beyond a rate are turned away at once: each tenant (or class) has a token bucket that `per_second` fills up to
`burst`, in requests or in tokens, a prompt and its output cap. So are requests of a class in `shed` while as many wait
as it says. All others wait until fewer than `max_outstanding` for each replica that is up are dispatched and not
answered; of the waiting ones the next one is

    fifo      the one that came first
    deadline  the one with the earliest deadline; requests without one last
    priority  the one with the lowest priority − waiting / `ageing`: no starvation
    vtc       the first of the tenant that was served least

The service of a tenant counts `input_weight` for each prompt token and `output_weight` for each output token: the cap
as the request is dispatched, less the unused rest as it is answered. A tenant without waiting requests starts again at
least at the least count of the waiting tenants, or, where none waits, at that of the last one admitted, so that no
tenant accumulates credit.

Source: vtc: Y. Sheng et al., Fairness in serving large language models, OSDI 2024 (arXiv 2401.00588), algorithm 2 and
the variant that predicts lengths (here by the cap), weights 1 and 2 as there; it schedules inside an engine, this gate
before several. The service of two tenants with requests always waiting differs by at most twice the largest request.
Ageing in this form keeps the order of any two that wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Annotated, Literal

from batchsim.base.ranges import Config, NonNegative, NonNegativeInt, PositiveInt, Range, check_ranges
from batchsim.base.units import NS_PER_S, PositiveDuration
from batchsim.kernel.types import Request

Order = Literal["fifo", "deadline", "priority", "vtc"]
PerSecond = Annotated[float, Range(0, 1e9, above=True)]


@dataclass(frozen=True, kw_only=True)
class RateLimit(Config):
    """A token bucket for each tenant or class."""

    of: Literal["requests", "tokens"]
    """What the bucket counts: requests, or tokens of a prompt and its output cap."""
    per_second: PerSecond
    """How many come into the bucket each second."""
    burst: PerSecond
    """How many it holds, and so lets through at once."""

    def cost(self, request: Request) -> float:
        """What a request takes out of its bucket."""
        return 1.0 if self.of == "requests" else float(request.prompt_tokens + request.max_output_tokens)


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig(Config):
    """The gate before the router."""

    max_outstanding: PositiveInt | None = None
    """Requests for each replica that is up, beyond which others wait at the gate."""
    order: Order = "fifo"
    """Which waiting request is let in next: fifo, deadline, priority with ageing, or fair as in vtc."""
    by: Literal["tenant", "class"] = "tenant"
    """Whose buckets and shares there are: each tenant's, or each class's."""
    rate_limit: RateLimit | None = None
    """A token bucket for each tenant or class."""
    shed: dict[str, NonNegativeInt] = field(default_factory=dict)
    """By class how many wait where its requests are turned away."""
    ageing: PositiveDuration | None = None
    """Waiting time that is worth one level of priority."""
    input_weight: NonNegative | None = None
    """What a prompt token counts in vtc."""
    output_weight: NonNegative | None = None
    """What an output token counts in vtc."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.max_outstanding is None and (self.order != "fifo" or self.shed):
            key = "shed" if self.shed else "order"
            raise ValueError(
                f"admission: {key} needs max_outstanding: without it nobody waits at the gate. Write one, like 64."
            )
        if self.max_outstanding is None and self.rate_limit is None:
            raise ValueError("admission holds nobody. Write max_outstanding: 64, or a rate_limit.")
        if (self.order == "priority") != (self.ageing is not None):
            raise ValueError("admission: order priority needs ageing, like 30s, and no other order has it.")
        if self.order != "vtc" and (self.input_weight is not None or self.output_weight is not None):
            raise ValueError(
                f"admission: input_weight and output_weight are for order vtc, not {self.order}. Drop them."
            )

    def build(self) -> Gate:
        return Gate(self)


class Gate:
    """See the module's text. It has no clock; times are in ns."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._came: list[Request] = []
        self._buckets: dict[str, tuple[float, int]] = {}  # by owner: what is in it, and since when
        self._waiting: Waiting = _Shares(config) if config.order == "vtc" else _Queue(config)

    def __len__(self) -> int:
        return len(self._waiting.requests)

    def capacity(self, num_up: int) -> float:
        """How many requests may be outstanding with `num_up` replicas that take requests."""
        most = self._config.max_outstanding
        return float("inf") if most is None and num_up else (most or 0) * num_up

    def refuses(self, request: Request, now_ns: int) -> str:
        """Why a request that has just come is turned away, in one word; "" if it may wait, or go."""
        if (most := self._config.shed.get(request.request_class)) is not None and len(self) >= most:
            return "shed"
        limit = self._config.rate_limit
        if limit is None:
            return ""
        owner = _owner(request, self._config)
        filled, since_ns = self._buckets.get(owner, (limit.burst, now_ns))
        filled = min(filled + (now_ns - since_ns) * limit.per_second / NS_PER_S, limit.burst)
        cost = limit.cost(request)
        allowed = cost <= filled + 1e-9  # of what the clock's nanoseconds leave
        self._buckets[owner] = filled - cost if allowed else filled, now_ns
        return "" if allowed else "rate_limited"

    def put(self, request: Request) -> None:
        """Lets a request wait."""
        self._came.append(request)
        self._waiting.put(request)

    def pop(self) -> Request:
        """Takes out the next one; it counts as dispatched."""
        return self._waiting.pop()

    def remove(self, request: Request) -> None:
        """Takes out one that gave up."""
        self._waiting.requests.pop(request.id, None)

    def newcomers(self) -> list[Request]:
        """Requests that came since the last call and still wait."""
        came, self._came = self._came, []
        return [request for request in came if request.id in self._waiting.requests]

    def answered(self, request: Request, output_tokens: int) -> None:
        """Notes the end of an admitted request, of which the client got `output_tokens` tokens."""
        self._waiting.answered(request, output_tokens)


def _owner(request: Request, config: AdmissionConfig) -> str:
    return request.tenant if config.by == "tenant" else request.request_class


class _Queue:
    """Waiting requests by a key that does not change while they wait."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self.requests: dict[int, Request] = {}
        self._heap: list[tuple[float, int, int]] = []

    def put(self, request: Request) -> None:
        self.requests[request.id] = request
        heappush(self._heap, (self._key(request), request.arrival_ns, request.id))

    def _key(self, request: Request) -> float:
        if self._config.order == "deadline":
            return float("inf") if request.deadline_ns is None else request.deadline_ns
        if self._config.order == "priority":
            return request.priority * (self._config.ageing or 0) + request.arrival_ns
        return 0.0

    def pop(self) -> Request:
        while (request_id := heappop(self._heap)[2]) not in self.requests:
            continue
        return self.requests.pop(request_id)

    def answered(self, request: Request, output_tokens: int) -> None: ...


class _Shares:
    """Waiting requests by the service that their tenants have had."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self.requests: dict[int, Request] = {}
        self.served: dict[str, float] = {}
        self._queues: dict[str, deque[Request]] = {}  # of tenants, by when they first came
        self._last = ""  # the tenant let in last

    def put(self, request: Request) -> None:
        owner = _owner(request, self._config)
        waiting = [name for name in self._queues if self._first(name) is not None]
        if owner not in waiting:
            floor = min((self.served[name] for name in waiting), default=self.served.get(self._last, 0.0))
            self.served[owner] = max(self.served.get(owner, 0.0), floor)
        self.requests[request.id] = request
        self._queues.setdefault(owner, deque()).append(request)

    def _first(self, owner: str) -> Request | None:
        """The first of an owner's requests that still wait."""
        queue = self._queues[owner]
        while queue and queue[0].id not in self.requests:
            queue.popleft()
        return queue[0] if queue else None

    def pop(self) -> Request:
        waiting = [name for name in self._queues if self._first(name) is not None]
        self._last = min(waiting, key=lambda name: self.served[name])
        request = self._queues[self._last].popleft()
        self.served[self._last] += self._cost(request.prompt_tokens, request.max_output_tokens)
        return self.requests.pop(request.id)

    def answered(self, request: Request, output_tokens: int) -> None:
        self.served[_owner(request, self._config)] -= self._cost(0, request.max_output_tokens - output_tokens)

    def _cost(self, prompt_tokens: int, output_tokens: int) -> float:
        weights = self._config.input_weight, self._config.output_weight
        into, out = (default if weight is None else weight for weight, default in zip(weights, (1.0, 2.0), strict=True))
        return into * prompt_tokens + out * output_tokens


Waiting = _Queue | _Shares
