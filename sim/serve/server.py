"""The server: which request goes where.

All runs in one thread, simulated engines too: a step's tokens go out in the order in which the engine made them, and
what a request costs to read delays the engines by no more than that. An engine on a model has a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from batchsim.base.units import NS_PER_S
from batchsim.base.version import VERSION
from batchsim.serve.answers import Answer, Asked
from batchsim.serve.api_error import ApiError
from batchsim.serve.body import (
    MOST_TOKENS,
    SHORT,
    Body,
    CompletionRequest,
    completion,
    detokenized,
    parse_json,
    tokenized,
)
from batchsim.serve.connection import Connection
from batchsim.serve.engine_info import ABOUT, About, asked_rank, num_ranks
from batchsim.serve.exchange import Exchange, rejection
from batchsim.serve.faults import Faults
from batchsim.serve.guard import OPEN, Guard
from batchsim.serve.incoming import HttpRequest, Limits
from batchsim.serve.keep_served import rows_so_far, table_so_far
from batchsim.serve.live_engine import LiveEngine
from batchsim.serve.pooled import PATHS, PooledExchange, PoolRequest, pool_request
from batchsim.serve.prefix_identity import PrefixIdentity
from batchsim.serve.realtime import RealtimeSimulation
from batchsim.serve.served_adapters import ServedAdapters
from batchsim.serve.served_workload import AnswerLengths
from batchsim.serve.sleeping import Sleep, asked_sleep, asked_tags
from batchsim.serve.turns import Turns
from batchsim.serve.words import Texts, Words

Route = Callable[[HttpRequest, Connection], None]
T = TypeVar("T")
_ACCEPTED, _BACKLOG = 64, 4096
"""Connections that a round of the event loop takes on: asyncio makes that of its backlog. The second: connections that
may wait."""


@dataclass
class Server:
    """The endpoint of `backend`, in the form of OpenAI's and vLLM's, under the model's name in its metrics."""

    backend: RealtimeSimulation | LiveEngine
    speed: float = 1.0
    api_key: str = ""
    limits: Limits = field(default_factory=Limits)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        setup = self.backend.setup
        self._ids = Words(setup.model.vocab_size)  # those of simulated answers
        self.words: Texts = (self.backend.texts if isinstance(self.backend, LiveEngine) else None) or self._ids
        self.max_model_len = setup.max_model_len
        self.model = self.backend.metrics.model
        self.connections: set[Connection] = set()
        self.exchanges: dict[str, Exchange] = {}
        self.started_s = int(time.time())
        self.failure: Exception | None = None
        self.stopped = asyncio.Event()
        self.is_draining = False
        # The lengths of answers that end by themselves are a model's to say, where there is one.
        self._lengths = (
            AnswerLengths.of(setup, self.backend.seed) if isinstance(self.backend, RealtimeSimulation) else None
        )
        self._pacer = self.backend.pacer(self.speed, self._break_down)
        self._listener: asyncio.Server | None = None
        self._count = 0
        self._prefixes = PrefixIdentity()
        self._turns = Turns()
        self._want_results: list[tuple[HttpRequest, Connection]] = []
        self._makes_results = False
        self._most_tokens = max(MOST_TOKENS, self.max_model_len)
        self._pools = self.backend.spec.config.traits.pooling
        self._guard = Guard(self.api_key)
        self._sleep = Sleep()
        adapters = self._adapters = ServedAdapters(self.backend, self.model)
        self._routes: dict[tuple[str, str], Route] = {
            ("POST", "/v1/completions"): lambda request, reply: self._complete(request, reply, chat=False),
            ("POST", "/v1/chat/completions"): lambda request, reply: self._complete(request, reply, chat=True),
            ("GET", "/"): self._addresses,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/health_generate"): self._health,
            **{("GET", path): partial(self._tell, make) for path, make in ABOUT.items()},
            ("POST", "/v1/load_lora_adapter"): partial(self._adapt, adapters.load),
            ("POST", "/v1/unload_lora_adapter"): partial(self._adapt, adapters.unload),
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("POST", "/flush_cache"): self._reset_prefix_cache,
            ("GET", "/is_sleeping"): self._is_sleeping,
            ("POST", "/sleep"): self._fall_asleep,
            ("POST", "/wake_up"): self._wake_up,
            ("GET", "/batchsim/results"): self._results,
            **{("POST", path): self._pool for path in PATHS},
        }

    # ---- from start to end

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, which is `port` unless that is 0. OSError where it cannot be had."""
        loop = asyncio.get_running_loop()
        self._guard = Guard(self.api_key, host)
        self._listener = await loop.create_server(lambda: Connection(self), host, port, backlog=_ACCEPTED)
        for listening in self._listener.sockets:
            with listening.dup() as same:
                same.listen(_BACKLOG)
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
        for send in self._sleep.wake([]):  # nothing would wake them any more
            send()
        self.backend.drain()
        self._pacer.arm()
        self._check_drained()

    def close(self) -> None:
        """Breaks off what is open. The records are `backend.close`'s."""
        self._pacer.is_broken = True
        self._turns.close()
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
        if self.is_draining and not self.exchanges and not self._turns.num_waiting:
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

    def check(self, request: HttpRequest) -> None:
        """ApiError for a client that is not allowed, an unknown path or a wrong method."""
        self._guard.check(request)
        if (request.method, request.path) not in self._routes:
            known = sorted({method for method, path in self._routes if path == request.path})
            if known:
                raise ApiError(405, f"{request.path} takes {', '.join(known)}")
            raise ApiError(404, f"there is no {request.path[:200]}")

    def handle(self, request: HttpRequest, reply: Connection) -> None:
        """Answers `request` when it is its turn, and a health check at once."""
        act = partial(self._routes[request.method, request.path], request, reply)
        if request.path in OPEN:
            self._answer(reply, act)
        else:
            self._turns.take(lambda: self._in_turn(reply, act))

    def _answer(self, reply: Connection, act: Callable[[], None]) -> None:
        """Calls `act`, which answers; answers with its error."""
        try:
            act()
        except ApiError as error:
            reply.answer(error.status, error.body(), headers=error.headers)
        except Exception as error:  # a bug: the client gets this alone, the server's log all
            self._report(error)
            reply.answer(500, ApiError(500, "the server made a mistake").body())

    def _read(self, request: HttpRequest, reply: Connection, read: Callable[[], T], then: Callable[[T], None]) -> None:
        """Answers by `then` with what `read` makes of the body: beside the event loop where it is long."""

        def read_unless_gone() -> T:
            if reply.is_gone:
                raise ApiError(408, "the client has left")
            return read()

        if len(request.body) <= SHORT:
            then(read())
        else:
            self._turns.aside(read_unless_gone, lambda outcome: self._in_turn(reply, lambda: then(outcome())))

    def _in_turn(self, reply: Connection, act: Callable[[], None]) -> None:
        self._answer(reply, act)
        self._check_drained()

    def _report(self, error: Exception) -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "a request failed", "exception": error})

    def _complete(self, request: HttpRequest, reply: Connection, *, chat: bool) -> None:
        real = isinstance(self.backend, LiveEngine)
        if self._pools:
            raise ApiError(400, f"{request.path}: the model makes no tokens. Ask {', '.join(PATHS)}.")

        def read() -> CompletionRequest:
            values = parse_json(request.body, self._most_tokens)
            return completion(values, self.words, self.max_model_len, chat=chat, real=real)

        self._read(request, reply, read, lambda asked: self._open(asked, request, reply))

    def _pool(self, request: HttpRequest, reply: Connection) -> None:
        kind, dimensions = PATHS[request.path], self.backend.setup.model.hidden_size
        if not self._pools:
            raise ApiError(400, f"{request.path}: the model makes tokens. Serve a policy with runner: pooling.")

        def read() -> PoolRequest:
            values = parse_json(request.body, self._most_tokens)
            return pool_request(values, kind, self.words, self.max_model_len, dimensions)

        self._read(request, reply, read, lambda it: self._open(it.asked, request, reply, partial(PooledExchange, it)))

    def _open(
        self,
        asked: CompletionRequest,
        request: HttpRequest,
        reply: Connection,
        make: Callable[..., Exchange] = Exchange,
    ) -> None:
        """Has what is asked for answered, by the exchange that `make` makes."""
        asked = replace(asked, adapter=self._adapters.number(asked.model))
        self._check_up()
        asked = replace(asked, rank=asked_rank(request, asked.rank, num_ranks(self.backend.setup)))
        self._count += 1
        if self.faults.errs(self._count):
            raise ApiError(500, "an error on demand")
        asked = replace(asked, model=asked.model or self.model)
        id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{self._count:08x}"
        exchange = self.exchanges[id] = make(id, int(time.time()), asked, reply, self)
        exchange.ended = lambda: self._ended(id)
        if asked.stream and self.faults.stalls(self._count):
            exchange.is_stalled = True
            if (stall_ns := self.faults.stall_ns) is not None:
                asyncio.get_running_loop().call_later(stall_ns / self.speed / NS_PER_S, exchange.resume)
        came_ns = self._pacer.at(request.came_ns)
        if self._sleep.level is None:
            self._send(exchange, came_ns)
        else:
            self._sleep.held[id] = lambda: self._send(exchange, self.now_ns, came_ns)
        if reply.is_gone:  # while it waited for its turn
            exchange.give_up()

    def _check_up(self) -> None:
        """ApiError 503 at the end."""
        if self.is_draining or self._pacer.is_broken:
            raise ApiError(503, "the server is shutting down", retry_after_s=1)

    def _send(self, exchange: Exchange, now_ns: int, came_ns: int | None = None) -> None:
        """Sends the requests of an exchange to the engines at `now_ns`; `came_ns`: when it came, if it has waited."""
        asked = exchange.request
        for choice in exchange.choices:
            number = self.backend.num_sent
            output: int | None = asked.max_tokens
            if not asked.ignore_eos:
                output = None
                if self._lengths is not None:
                    output = min(max(self._lengths.of_request(number), asked.min_tokens, 1), asked.max_tokens)
            sent = Asked(
                choice.prompt.num_tokens,
                asked.max_tokens,
                output,
                asked.ignore_eos,
                asked.priority,
                asked.user,
                self._prefixes.of(choice.prompt.ids) if self.backend.caches else None,
                choice.prompt.ids,
                asked.rank,
                asked.adapter,
            )
            choice.answer = self.backend.send(sent, now_ns, exchange.listener(choice), came_ns)
        self._pacer.arm()

    def _ended(self, id: str) -> None:
        exchange = self.exchanges.pop(id)
        self._sleep.held.pop(id, None)
        for choice in exchange.choices:
            answer = choice.answer
            if answer is not None and answer.asked.tokens is not None and choice.num_tokens:
                output = self.tokens(answer, 0, choice.num_tokens)
                self._prefixes.answered(choice.prompt.ids, answer.asked.tokens, answer.number, output)
        self._check_idle()
        self._check_drained()

    def _check_idle(self) -> None:
        """Settles the sleep once all exchanges are answered but the held ones, which wait for its end."""
        if len(self.exchanges) == len(self._sleep.held):
            self._sleep.settle()

    def tokens(self, answer: Answer | None, start: int, end: int) -> list[int]:
        """The ids of output tokens `start` to `end` - 1: a model's, or placeholders of a simulated one's."""
        if answer is None:
            return []
        return self._ids.generated(answer.number, start, end) if self._lengths is not None else answer.ids[start:end]

    def token(self, answer: Answer, place: int) -> int:
        """The id of output token `place` of an answer."""
        return answer.ids[place] if self._lengths is None else self._ids.generated_one(answer.number, place)

    def cancel(self, answer: Answer) -> None:
        self.backend.cancel(answer, self.now_ns)
        self._pacer.arm()

    def send(self, reply: Connection, num_tokens: int, make: Callable[[], bytes]) -> None:
        """Answers with the bytes that `make` returns, made beside the event loop where `num_tokens` are many."""
        if num_tokens <= SHORT:
            reply.answer(200, make())
        else:
            self._turns.aside(make, lambda outcome: self._in_turn(reply, lambda: reply.answer(200, outcome())))

    def rejection(self, answer: Answer) -> ApiError:
        details = [core.recorder.details.get(answer.reason) for core in self.backend.cores().values()]
        return rejection(answer, next((detail for detail in details if detail), "refused"))

    def _addresses(self, request: HttpRequest, reply: Connection) -> None:
        """What can be asked for here, as lines of method and path."""
        reply.answer(200, "".join(f"{method} {path}\n" for method, path in self._routes).encode(), "text/plain")

    def _models(self, request: HttpRequest, reply: Connection) -> None:
        base = {"id": self.model, "root": self.model, "parent": None, "max_model_len": self.max_model_len}
        shared = {"object": "model", "created": self.started_s, "owned_by": "batchsim"}
        cards = [card | shared for card in (base, *self._adapters.cards())]
        reply.answer(200, json.dumps({"object": "list", "data": cards}).encode())

    def _adapt(self, act: Callable[[Body], str], request: HttpRequest, reply: Connection) -> None:
        reply.answer(200, act(Body(parse_json(request.body))).encode(), "text/plain; charset=utf-8")

    def _health(self, request: HttpRequest, reply: Connection) -> None:
        reply.answer(503 if self.is_draining or self._pacer.is_broken else 200, b"")

    def _version(self, request: HttpRequest, reply: Connection) -> None:
        reply.answer(200, json.dumps({"version": f"batchsim {VERSION}"}).encode())

    def _tell(self, make: About, request: HttpRequest, reply: Connection) -> None:
        """Answers with what `make` says of the engines."""
        backend = self.backend
        reply.answer(200, json.dumps(make(backend.setup, backend.spec, self.model, backend.cores())).encode())

    def _metrics(self, request: HttpRequest, reply: Connection) -> None:
        text = self.backend.metrics.text(self.backend.cores(), self._sleep.level, len(self._sleep.held))
        reply.answer(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _tokenize(self, request: HttpRequest, reply: Connection) -> None:
        read = partial(tokenized, request.body, self.words, self.max_model_len, self._most_tokens)
        self._read(request, reply, read, lambda body: reply.answer(200, body))

    def _reset_prefix_cache(self, request: HttpRequest, reply: Connection) -> None:
        self._forget_prefixes()
        reply.answer(200, b"")

    def _forget_prefixes(self) -> None:
        """Empties the prefix caches."""
        self._prefixes.forget(self.backend.num_sent)
        if isinstance(self.backend, RealtimeSimulation) and self.backend.kv_events is not None:
            self.backend.kv_events.clear(self.backend.num_sent)

    def _is_sleeping(self, request: HttpRequest, reply: Connection) -> None:
        reply.answer(200, json.dumps({"is_sleeping": self._sleep.level is not None}).encode())

    def _fall_asleep(self, request: HttpRequest, reply: Connection) -> None:
        level, mode = asked_sleep(request.query)
        self._check_up()
        self._sleep.begin(level)
        if level:
            self._forget_prefixes()  # the KV cache is gone
        self._sleep.when_begun(lambda: reply.answer(200, b""))
        if mode == "abort":
            for exchange in list(self.exchanges.values()):
                exchange.abort()
        self._check_idle()

    def _wake_up(self, request: HttpRequest, reply: Connection) -> None:
        for send in self._sleep.wake(asked_tags(request.query)):
            send()
        reply.answer(200, b"")

    def _results(self, request: HttpRequest, reply: Connection) -> None:
        """The requests that have ended, as CSV that `batchsim validate --against` reads. ApiError 404 before any.

        The table of many takes seconds, so it is made beside the event loop, one at a time for all waiting clients.
        """
        backend = self.backend
        if not backend.num_sent:
            raise ApiError(404, "no request has come yet, so there are no results")
        if self._makes_results:
            self._want_results.append((request, reply))
            return
        records = None if isinstance(backend, LiveEngine) else rows_so_far(backend)
        replies = [reply, *(each for _, each in self._want_results)]
        self._makes_results = True
        self._want_results.clear()

        def make() -> bytes:
            so_far = (
                backend.between_steps(partial(rows_so_far, backend)) if isinstance(backend, LiveEngine) else records
            )
            assert so_far is not None, "taken where the engines run"
            if not (text := table_so_far(backend, so_far)):
                raise ApiError(404, "no request has ended yet, so there are no results")
            return text.encode()

        def tell(outcome: Callable[[], bytes]) -> None:
            self._makes_results = False
            for each in replies:
                self._answer(each, lambda each=each: each.answer(200, outcome(), "text/csv; charset=utf-8"))
            while self._want_results and not self._makes_results:
                request, reply = self._want_results.pop(0)
                self._answer(reply, partial(self._results, request, reply))
            self._check_drained()

        self._turns.aside(make, tell)

    def _detokenize(self, request: HttpRequest, reply: Connection) -> None:
        read = partial(detokenized, request.body, self.words, self._most_tokens)
        self._read(request, reply, read, lambda body: reply.answer(200, body))
