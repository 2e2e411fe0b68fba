"""The server: which request goes where, and simulated engines kept at the pace of a clock.

All runs in one thread, engines too: a step's tokens go out in the order in which the engine made them, and what a
request costs to read delays the engines by no more than that.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from batchsim.base.units import NS_PER_S
from batchsim.base.version import VERSION
from batchsim.serve.api_error import ApiError
from batchsim.serve.body import Body, completion, parse_json
from batchsim.serve.connection import Connection, HttpRequest, Limits
from batchsim.serve.exchange import Exchange, rejection
from batchsim.serve.faults import Faults
from batchsim.serve.keep_served import table_so_far
from batchsim.serve.known_texts import KnownTexts
from batchsim.serve.paced import Answer, Asked, Paced
from batchsim.serve.received import AnswerLengths
from batchsim.serve.words import Words

Route = Callable[[HttpRequest, Connection], None]


class Pacer:
    """Keeps `paced` at the pace of this machine's monotonic clock, `speed` simulated seconds to each of its own."""

    def __init__(self, paced: Paced, speed: float, failed: Callable[[Exception], None]) -> None:
        self.paced = paced
        self.speed = speed
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._start_ns = time.monotonic_ns()
        self.started_unix_ns = time.time_ns()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = self._due_ns = 0.0
        self.is_broken = False

    def now_ns(self) -> int:
        """The simulated time that it should be."""
        return self.at(time.monotonic_ns())

    def at(self, monotonic_ns: int) -> int:
        """The simulated time at a time of the clock."""
        return int((monotonic_ns - self._start_ns) * self.speed)

    def arm(self) -> None:
        """Has the engines run on when they next have something to do. After every change to them."""
        next_ns = self.paced.next_ns
        if self._timer is not None:
            if next_ns == self._timer_ns:
                return
            self._timer.cancel()
            self._timer = None
        if next_ns == float("inf") or self.is_broken:
            return
        self._timer_ns = next_ns
        now_ns = self.now_ns()
        # What an arrival starts stands at the instant handled last, long ago if engines were idle: it is due now.
        self._due_ns = max(next_ns, now_ns)
        left_s = (self._due_ns - now_ns) / self.speed / NS_PER_S
        self._timer = self._loop.call_later(left_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_ns = self.now_ns()
        self.paced.metrics.late.observe((now_ns - self._due_ns) / self.speed / NS_PER_S)
        try:
            self.paced.run_to(now_ns)
        except Exception as error:
            self.is_broken = True
            self._failed(error)
            return
        self.arm()


@dataclass
class Server:
    """The endpoint of `paced`, in the form of OpenAI's and vLLM's, under the model's name in its metrics."""

    paced: Paced
    speed: float = 1.0
    api_key: str = ""
    limits: Limits = field(default_factory=Limits)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        setup = self.paced.setup
        self.words = Words(setup.model.vocab_size)
        self.max_model_len = setup.max_model_len
        self.model = self.paced.metrics.model
        self.connections: set[Connection] = set()
        self.exchanges: dict[str, Exchange] = {}
        self.started_s = int(time.time())
        self.failure: Exception | None = None
        self.stopped = asyncio.Event()
        self.is_draining = False
        self._lengths = AnswerLengths.of(setup, self.paced.seed)
        self._pacer = Pacer(self.paced, self.speed, self._break_down)
        self._listener: asyncio.Server | None = None
        self._count = 0
        self._texts = KnownTexts()
        self._routes: dict[tuple[str, str], Route] = {
            ("POST", "/v1/completions"): lambda request, reply: self._complete(request, reply, chat=False),
            ("POST", "/v1/chat/completions"): lambda request, reply: self._complete(request, reply, chat=True),
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/is_sleeping"): self._is_sleeping,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._sleep,
            ("GET", "/batchsim/results"): self._results,
        }

    # ---- from start to end

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, which is `port` unless that is 0. OSError where it cannot be had."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), host, port, backlog=4096)
        return int(self._listener.sockets[0].getsockname()[1])

    def drain(self) -> None:
        """Takes no new requests; `stopped` once those at hand are answered."""
        if self.is_draining:
            return
        self.is_draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close_idle()
        self.paced.drain()
        self._pacer.arm()
        self._check_drained()

    def close(self) -> None:
        """Breaks off what is open. The records are `paced.close`'s."""
        self._pacer.is_broken = True
        if self._listener is not None:
            self._listener.close()
        for exchange in list(self.exchanges.values()):
            exchange.give_up()
        for connection in list(self.connections):
            connection.drop()

    @property
    def started_unix_ns(self) -> int:
        """When simulated time began, in ns since 1970."""
        return self._pacer.started_unix_ns

    @property
    def now_ns(self) -> int:
        """The simulated time by the clock."""
        return self._pacer.now_ns()

    def _check_drained(self) -> None:
        if self.is_draining and not self.exchanges:
            self.stopped.set()

    def _break_down(self, error: Exception) -> None:
        """Ends the server: its engines have raised `error`."""
        self.failure = error
        for exchange in list(self.exchanges.values()):
            exchange.give_up()
            if not exchange.reply.is_gone:
                exchange.reply.drop()
        self.stopped.set()

    # ---- requests

    def handle(self, request: HttpRequest, reply: Connection) -> None:
        """Answers `request`, now or as its tokens come."""
        try:
            self._check_key(request)
            route = self._routes.get((request.method, request.path))
            if route is None:
                known = sorted({method for method, path in self._routes if path == request.path})
                if known:
                    raise ApiError(405, f"{request.path} takes {', '.join(known)}")
                raise ApiError(404, f"there is no {request.path[:200]}")
            route(request, reply)
        except ApiError as error:
            reply.answer(error.status, error.body(), headers=error.headers)
        except Exception as error:  # a bug: the client is told no more than that, the server's log all
            self._report(error)
            reply.answer(500, ApiError(500, "the server made a mistake").body())

    def failed(self, status: int, message: str) -> bytes:
        return ApiError(status, message).body()

    def _report(self, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "a request failed", "exception": error})

    def _check_key(self, request: HttpRequest) -> None:
        if (
            self.api_key
            and request.path.startswith("/v1")
            and request.headers.get("authorization") != f"Bearer {self.api_key}"
        ):
            raise ApiError(401, "Unauthorized")

    def _complete(self, request: HttpRequest, reply: Connection, *, chat: bool) -> None:
        asked = completion(parse_json(request.body), self.words, self.max_model_len, chat=chat)
        if asked.model and asked.model != self.model:
            raise ApiError(404, f"The model `{asked.model[:200]}` does not exist.", "model")
        if self.is_draining or self._pacer.is_broken:
            raise ApiError(503, "the server is shutting down", retry_after_s=1)
        self._count += 1
        if self.faults.errs(self._count):
            raise ApiError(500, "an error on demand")
        asked = replace(asked, model=self.model)
        id = f"{'chatcmpl' if chat else 'cmpl'}-{self._count:08x}"
        exchange = self.exchanges[id] = Exchange(id, int(time.time()), asked, reply, self)
        exchange.ended = lambda: self._ended(id)
        if asked.stream and self.faults.stalls(self._count):
            exchange.is_stalled = True
            if (stall_ns := self.faults.stall_ns) is not None:
                asyncio.get_running_loop().call_later(stall_ns / self.speed / NS_PER_S, exchange.resume)
        for choice in exchange.choices:
            number = self.paced.num_sent
            output = asked.max_tokens
            if not asked.ignore_eos:
                output = min(max(self._lengths.of_request(number), asked.min_tokens, 1), output)
            its = Asked(
                choice.prompt.num_tokens,
                asked.max_tokens,
                output,
                asked.ignore_eos,
                asked.priority,
                asked.user,
                self._texts.of(choice.prompt.ids) if self.paced.caches else None,
            )
            choice.answer = self.paced.send(its, self._pacer.at(request.came_ns), exchange.listener(choice))
        self._pacer.arm()

    def _ended(self, id: str) -> None:
        exchange = self.exchanges.pop(id)
        for choice in exchange.choices:
            answer = choice.answer
            if answer is not None and answer.asked.tokens is not None and choice.num_tokens:
                output = self.words.generated(answer.number, 0, choice.num_tokens)
                self._texts.answered(choice.prompt.ids, answer.asked.tokens, answer.number, output)
        self._check_drained()

    def cancel(self, answer: Answer) -> None:
        self.paced.cancel(answer, self.now_ns)
        self._pacer.arm()

    def rejection(self, answer: Answer) -> ApiError:
        details = [engine.core.recorder.details.get(answer.reason) for engine in self.paced.engines()]
        return rejection(answer, next((detail for detail in details if detail), "refused"))

    def _models(self, request: HttpRequest, reply: Connection) -> None:
        model = {
            "id": self.model,
            "object": "model",
            "created": self.started_s,
            "owned_by": "batchsim",
            "root": self.model,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        reply.answer(200, json.dumps({"object": "list", "data": [model]}).encode())

    def _health(self, request: HttpRequest, reply: Connection) -> None:
        reply.answer(503 if self.is_draining or self._pacer.is_broken else 200, b"")

    def _version(self, request: HttpRequest, reply: Connection) -> None:
        reply.answer(200, json.dumps({"version": f"batchsim {VERSION}"}).encode())

    def _metrics(self, request: HttpRequest, reply: Connection) -> None:
        engines = {engine.slot.number: engine.core for engine in self.paced.engines()}
        text = self.paced.metrics.text(engines)
        reply.answer(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _tokenize(self, request: HttpRequest, reply: Connection) -> None:
        values = parse_json(request.body)
        if "messages" in values:
            ids = completion(values | {"max_tokens": 1}, self.words, self.max_model_len, chat=True).prompts[0].ids
        else:
            ids = self.words.encode(Body(values).text("prompt"))
        found = {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None}
        reply.answer(200, json.dumps(found).encode())

    def _reset_prefix_cache(self, request: HttpRequest, reply: Connection) -> None:
        self._texts.forget()
        reply.answer(200, b"")

    def _is_sleeping(self, request: HttpRequest, reply: Connection) -> None:
        reply.answer(200, b'{"is_sleeping": false}')

    def _sleep(self, request: HttpRequest, reply: Connection) -> None:
        raise ApiError(501, "sleep and wake_up are not simulated: the engines are always awake.")

    def _results(self, request: HttpRequest, reply: Connection) -> None:
        """The requests that have ended, as CSV that `batchsim validate --against` reads. ApiError 404 before any."""
        if not self.paced.num_sent:
            raise ApiError(404, "no request has come yet, so there are no results")
        reply.answer(200, table_so_far(self.paced).encode(), "text/csv; charset=utf-8")

    def _detokenize(self, request: HttpRequest, reply: Connection) -> None:
        values = parse_json(request.body)
        ids = values.get("tokens")
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise ApiError(400, "tokens must be a list of token ids", "tokens")
        reply.answer(200, json.dumps({"prompt": self.words.decode(ids)}).encode())
