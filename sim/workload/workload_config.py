"""The `workload:` block of a scenario: which requests come, when, and how patient their clients are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, PositiveInt, Priority, Range, check_ranges
from batchsim.base.reading import later
from batchsim.base.units import NS_PER_S, Duration, PartDuration, PositiveDuration, Share, format_duration
from batchsim.workload.items import Items, check_items
from batchsim.workload.lengths import (
    AnyLengths,
    ListLengths,
    PairLengths,
    TraceLengths,
    asks_for_none,
    check_no_tokens,
    check_rows_of_classes,
)
from batchsim.workload.loras import Loras, check_loras
from batchsim.workload.offline_config import Offline, Requests, Users, check_beside
from batchsim.workload.popularity import SHARE_TOLERANCE, Popularity, check_popularity
from batchsim.workload.processes import (
    AllAtOnce,
    ConstantArrivals,
    DiurnalArrivals,
    GammaArrivals,
    MmppArrivals,
    OnOffArrivals,
    PoissonArrivals,
    RampArrivals,
    StepsArrivals,
    WeibullArrivals,
)
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.sharing import Sessions, SharedPrefix, check_sessions
from batchsim.workload.tagged import ByKind

if TYPE_CHECKING:
    from batchsim.workload.task_config import Tasks
    from batchsim.workload.traces.trace_config import TraceConfig
else:
    Tasks = later("batchsim.workload.task_config:Tasks")
    TraceConfig = later("batchsim.workload.traces.trace_config:TraceConfig")


@dataclass(frozen=True)
class ClosedLoop(Config):
    """Users who each send a request, wait for its end, think, and send the next.

    They are met amid a think time, or begin one after another (`ramp`).

    >>> batchsim.ClosedLoop(users=16, think_time="1s").think_time  # ns
    1000000000
    """

    users: Users
    """Users, each with one request at a time; `load.users` lists others."""
    think_time: Duration
    """Mean time between an answer and the user's next request."""
    think_kind: Literal["constant", "exponential"] = "constant"
    """How times to think are drawn: all alike, or exponential."""
    shared_list: bool = field(default=False, metadata=LEFT_OUT)
    """Whether a user takes the next request of one list when answered, as workers of benchmark clients do; else each
    has requests of its own."""
    ramp: Duration | None = field(default=None, metadata=LEFT_OUT)
    """Users begin one after another within this time; with 0 s all at once."""
    kind: Literal["closed_loop"] = "closed_loop"


@dataclass(frozen=True)
class TraceArrivals(Config):
    """The trace's own times, and its own lengths where the workload gives none."""

    kind: Literal["trace"] = "trace"


Arrivals = Annotated[
    PoissonArrivals
    | GammaArrivals
    | WeibullArrivals
    | ConstantArrivals
    | OnOffArrivals
    | MmppArrivals
    | RampArrivals
    | StepsArrivals
    | DiurnalArrivals
    | AllAtOnce
    | ClosedLoop
    | Rollout
    | TraceArrivals,
    ByKind(),
]


@dataclass(frozen=True)
class Patience(Config):
    """How long after sending a client cancels a request that has not ended; without one, never."""

    mean: PositiveDuration
    """The mean time after sending."""
    kind: Literal["constant", "exponential"] = "constant"


@dataclass(frozen=True)
class Stop(Config):
    """How answers end: by a stop token, which an engine sees when it comes, or by length.

    A client of the latter asks for as many tokens as come, and to ignore stop tokens, as benchmarks do.
    """

    by_eos: Share
    """Part of the answers that end by a stop token; the others end by length."""


@dataclass(frozen=True)
class TrafficClass(Config):
    """A share of the requests, or the rows of a trace that are of this class. What it leaves out is the workload's."""

    share: Share | None = None
    """Part of the requests that are of this class; all together 100 %."""
    priority: Priority = 0
    """Priority of its requests; lower goes first, for policies that look at it."""
    lengths: AnyLengths | None = None
    """Tokens of prompts and outputs."""
    slo: str | None = None
    """The requirement that the metrics hold its requests to."""
    deadline: PositiveDuration | None = None
    """Counted from sending: a request that has not ended by then is given up."""
    patience: Patience | None = None
    """After how long the client gives up."""
    shared_prefix: SharedPrefix | None = None
    """Which prompts begin with the same tokens."""
    items: Items | None = field(default=None, metadata=LEFT_OUT)
    """Images, audios and videos of its requests."""
    offline: Offline | None = field(default=None, metadata=LEFT_OUT)
    """A job beside the requests that arrive, in the place of a share of these."""
    loras: Loras | None = field(default=None, metadata=LEFT_OUT)
    """LoRA adapters of its own that its requests ask for."""
    structured: Share | None = field(default=None, metadata=LEFT_OUT)
    """Part of its requests whose answers a grammar constrains."""


@dataclass(frozen=True)
class Frontend(Config):
    """Time outside the engine: a request reaches it `request` + `per_prompt_token` * prompt after it was sent.

    The first piece of a response comes no later than the last: a server that writes all streams from one loop is at a
    new one the later the more there are. Pure delays: requests do not wait for another.
    """

    request: Duration = 0
    """Time from client to engine for each request."""
    per_prompt_token: PartDuration = 0
    """Time from client to engine for each token of the prompt, beside `request`."""
    per_chunk: Duration = 0
    """Time of each piece of the response back to the client."""
    per_stream: PartDuration = 0
    """Time of the first piece besides, for each answer that is being streamed by then, its own included."""

    @property
    def is_immediate(self) -> bool:
        """Whether pieces of answers are at their clients as soon as they are made."""
        return not (self.per_chunk or self.per_stream)


@dataclass(frozen=True)
class WorkloadConfig(Config):
    """The whole block.

    After the last arrival the run drains to its end. Prompts begin alike by `shared_prefix`, `sessions`, `tasks` or the
    trace. Classes are those of the trace's rows where `trace.columns` names a request_class (`by_row`, which needs no
    word); with `assign: at_random` they are drawn beside the rows, so that each has the lengths of all.

    >>> lengths = batchsim.Lengths(batchsim.Fixed(100), batchsim.Fixed(20))
    >>> batchsim.Workload(batchsim.Poisson("8/s"), output_cap=32, lengths=lengths, duration="60s").duration  # ns
    60000000000
    """

    arrivals: Arrivals
    """When requests come."""
    output_cap: PositiveInt | Literal["max_model_len", "exact"]
    """What clients ask for at most: tokens, all that `max_model_len` leaves, or `exact`, the true length."""
    lengths: AnyLengths | None = None
    """Tokens of prompts and outputs."""
    trace: TraceConfig | None = None
    """The log whose requests are replayed."""
    duration: PositiveDuration | None = None
    """When arrivals end, unless `requests` or a trace end them."""
    requests: Requests | None = None
    """Requests after which arrivals end, unless `duration` or a trace end them."""
    warmup: Duration = 0
    """Time at the start whose requests are left out of the measured cohort."""
    drain: Duration | None = None
    """How long the run drains at most after the last arrival; what is open then misses every objective."""
    classes: dict[str, TrafficClass] = field(default_factory=dict)
    """Classes of requests by name, each with what differs from the workload's own."""
    deadline: PositiveDuration | None = None
    """Counted from sending: a request that has not ended by then is given up."""
    patience: Patience | None = None
    """After how long the client gives up, counted from sending."""
    frontend: Frontend = field(default_factory=Frontend)
    """Time between client and engine, outside of both; `vllm` is that of vLLM's server."""
    shared_prefix: SharedPrefix | None = None
    """Which prompts begin with the same tokens, for policies with a prefix cache."""
    sessions: Sessions | None = None
    """Requests that follow on each other, each prompt beginning with the talk so far."""
    items: Items | None = field(default=None, metadata=LEFT_OUT)
    """Images, audios and videos of the requests, beside the text that lengths say; needs `encoder` of the cost."""
    prompt_scale: Annotated[float, Range(1e-3, 1e3)] = 1.0
    """How many times as long every prompt is, the text of `shared_prefix` aside."""
    stop: Stop | None = field(default=None, metadata=LEFT_OUT)
    """How answers end: by a stop token unless given, as far as the output cap lets them."""
    max_concurrency: Users | None = field(default=None, metadata=LEFT_OUT)
    """Requests in flight at most, of arrivals over time or all at once; others wait at the client, in order, and
    latencies, `deadline` and `patience` count from their sending."""
    assign: Literal["by_row", "at_random"] | None = field(default=None, metadata=LEFT_OUT)
    """How requests of a trace come by their classes; at_random: by their shares."""
    tasks: Tasks | None = field(default=None, metadata=LEFT_OUT)
    """Requests are parts of tasks, in stages."""
    loras: Loras | None = field(default=None, metadata=LEFT_OUT)
    """LoRA adapters that requests ask for; a session and a task ask for one."""
    structured: Share | None = field(default=None, metadata=LEFT_OUT)
    """Part of the requests whose answers a grammar constrains (JSON, a regular expression)."""
    popularity: Popularity | None = field(default=None, metadata=LEFT_OUT)
    """The shares of the classes, in their order, by a law."""

    @property
    def rows_tell_loras(self) -> bool:
        """Whether the rows of the trace say which LoRA adapter each request asks for."""
        return self.trace is not None and self.trace.columns is not None and self.trace.columns.lora is not None

    @property
    def lora_rank(self) -> int | None:
        """The largest rank of the LoRA adapters that requests ask for; None: none asks for one."""
        own = [each.loras.rank for each in (self, *self.classes.values()) if each.loras is not None]
        return max(own) if own else Loras().rank if self.rows_tell_loras else None

    @property
    def by_row(self) -> bool:
        """Whether the rows of the trace say of which class each request is."""
        named = self.trace is not None and self.trace.columns is not None and self.trace.columns.request_class
        return bool(named) and self.assign != "at_random"

    def requests_at(self, mean_rate: float) -> float:
        """The number of requests, in the mean, at `mean_rate` of them a second."""
        return self.requests or mean_rate * (self.duration or math.inf) / NS_PER_S

    @property
    def offline_class(self) -> str | None:
        """The name of the first class that is an offline job; None where there is none."""
        return next((name for name, traffic in self.classes.items() if traffic.offline is not None), None)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.stop is not None and self.output_cap == "exact":
            raise ValueError("stop: with output_cap exact all answers end by length. Drop one of them.")
        self._check_items()
        if self.makes_no_tokens:
            said = {"sessions": self.sessions, "tasks": self.tasks, "stop": self.stop}
            check_no_tokens(self._stated_lengths, self.arrivals.kind, self.output_cap, said)
        if isinstance(self.arrivals, Rollout):
            self._check_rollout()
            return
        self._check_end()
        self._check_lengths()
        if self.sessions is not None:
            of_list = self.arrivals.shared_list if isinstance(self.arrivals, ClosedLoop) else None
            check_sessions(self.sessions, self.arrivals.kind, self.requests, shared_list=of_list)
        if self.tasks is not None:
            self._check_tasks()
        if self.max_concurrency is not None:
            self._check_max_concurrency(self.max_concurrency)
        if "" in self.classes:
            raise ValueError("a class has no name. Name it.")
        self._check_offline()
        if self.popularity is None:
            self._check_classes()
        else:
            check_popularity(self.popularity, self.classes, by_row=self.by_row)
        own = {f"classes.{name}.loras": traffic.loras for name, traffic in self.classes.items()}
        check_loras({"loras": self.loras, **own}, by_rows=self.rows_tell_loras)

    def _check_items(self) -> None:
        """ValueError where requests with items are ones whose prompts hold others, or jobs' or a trainer's."""
        beside = {"a rollout": isinstance(self.arrivals, Rollout), "an offline job": self.offline_class is not None}
        beside |= {"sessions": self.sessions is not None, "tasks": self.tasks is not None}
        named = None if self.trace is None or self.trace.columns is None else self.trace.columns.items
        check_items(self.all_items, beside, column=named, replays=self.arrivals.kind == "trace")

    @property
    def all_items(self) -> list[Items]:
        """What is said of items, of the workload and of its classes."""
        return [each for each in (self.items, *(c.items for c in self.classes.values())) if each is not None]

    @property
    def makes_no_tokens(self) -> bool:
        """Whether requests ask for no token, as those of pooling models do."""
        return any(map(asks_for_none, self._stated_lengths))

    @property
    def _stated_lengths(self) -> list[AnyLengths | None]:
        own = [traffic.lengths for traffic in self.classes.values()]
        return own if own and None not in own else [self.lengths, *(each for each in own if each is not None)]

    def _check_offline(self) -> None:
        """ValueError where an offline job cannot be beside the arrivals, or has what its client decides."""
        jobs = {name: traffic for name, traffic in self.classes.items() if traffic.offline is not None}
        if not jobs:
            return
        besides = ("sessions", "tasks", "max_concurrency", "deadline", "patience")
        given = [key for key in besides if getattr(self, key) is not None]
        check_beside(next(iter(jobs)), self.arrivals.kind, given, alone=len(jobs) == len(self.classes))
        for name, traffic in jobs.items():
            for key in ("share", "deadline", "patience"):
                if getattr(traffic, key) is not None:
                    raise ValueError(f"classes.{name}.{key}: an offline job has requests and a window. Drop {key}.")
            if isinstance(traffic.lengths or self.lengths, ListLengths | TraceLengths):
                raise ValueError(f"classes.{name}.lengths: an offline job draws its lengths. Write laws or pairs.")

    def _check_classes(self) -> None:
        if self.by_row and self.assign is None:
            if written := [name for name, traffic in self.classes.items() if traffic.share is not None]:
                raise ValueError(
                    f"classes.{written[0]}.share: the rows of the trace say of which class each request is. Drop share,"
                    " or write assign: at_random to draw classes beside the rows."
                )
            return
        if self.by_row and all(traffic.share is None for traffic in self.classes.values()):
            return
        if self.assign == "by_row" and not self.by_row:
            raise ValueError("assign by_row: no column says of which class a row is. Name trace.columns.request_class.")
        if self.assign == "at_random" and (self.trace is None or not self.classes):
            raise ValueError("assign at_random is for classes beside the rows of a trace. Drop it.")
        for name, traffic in self.classes.items():
            if traffic.share is None and traffic.offline is None:
                raise ValueError(
                    f"classes.{name} has no share. Write one, like share: 30%, or name the column of a trace that tells"
                    " classes: trace.columns.request_class."
                )
        if self.classes:
            total = sum(traffic.share or 0.0 for traffic in self.classes.values())
            if abs(total - 1) > SHARE_TOLERANCE:
                raise ValueError(f"the shares of the classes add up to {100 * total:.6g}%. They must make 100%.")
            if self.assign is None:
                drawn = {
                    name: traffic.lengths or self.lengths for name, traffic in self.classes.items() if traffic.share
                }
                check_rows_of_classes(drawn, replays=self.arrivals.kind == "trace")

    def _check_end(self) -> None:
        kind, requests, duration = self.arrivals.kind, self.requests, self.duration
        if kind == "all_at_once":
            if requests is None or duration is not None or self.warmup:
                raise ValueError("all_at_once takes requests, and neither duration nor warmup: it has no time span.")
        elif requests is not None and duration is not None:
            raise ValueError("both duration and requests are given. Keep the one that ends the arrivals.")
        elif requests is None and duration is None and kind != "trace":
            raise ValueError(f"{kind} arrivals have no end. Give a duration or a number of requests.")
        if self.drain is not None and isinstance(self.arrivals, ClosedLoop) and duration is None:
            raise ValueError("drain needs a duration: a closed loop of so many requests has no end to count it from.")
        if duration is not None and self.warmup >= duration:
            raise ValueError(
                f"warmup {format_duration(self.warmup)} leaves nothing of the duration {format_duration(duration)}."
                " Shorten it."
            )
        if isinstance(self.arrivals, ClosedLoop) and requests is not None and requests < self.arrivals.users:
            raise ValueError(f"requests is {requests} for {self.arrivals.users} users. Give each at least one.")
        if isinstance(self.arrivals, ClosedLoop) and self.arrivals.shared_list and requests is None:
            raise ValueError("arrivals.shared_list: a list has a length. Give requests in place of duration.")

    def _check_max_concurrency(self, most: int) -> None:
        if isinstance(self.arrivals, ClosedLoop):
            raise ValueError(
                f"max_concurrency {most}: a closed loop never has more in flight than its users, here"
                f" {self.arrivals.users}. Drop it, or set arrivals.users."
            )
        if self.sessions is not None:
            raise ValueError(f"max_concurrency {most}: the turns of sessions wait for answers. Drop one of the two.")

    def _check_rollout(self) -> None:
        """ValueError for what the trainer decides, and what answers of its groups cannot have."""
        for name in ("duration", "requests", "warmup", "drain"):
            if getattr(self, name):
                raise ValueError(f"{name}: a rollout ends with its last training. Write arrivals.updates and drop it.")
        refused = ("trace", "sessions", "tasks", "max_concurrency", "deadline", "patience", "shared_prefix", "loras")
        for name in (*refused, "structured"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: the trainer of a rollout says which requests come, and when. Drop it.")
        if self.classes:
            raise ValueError("classes: all answers of a rollout are of one class. Drop them.")
        if self.frontend != Frontend():
            raise ValueError("frontend: the trainer of a rollout is beside its engines. Drop it.")
        if self.prompt_scale != 1:
            raise ValueError("prompt_scale: write the lengths of a rollout's prompts as they are. Drop it.")
        if self.lengths is None:
            raise ValueError("lengths are missing. Write lengths: {prompt: ..., output: ...}.")

    def _check_tasks(self) -> None:
        kind = self.arrivals.kind
        if kind in ("trace", "all_at_once", "closed_loop"):
            raise ValueError(f"tasks need arrivals over time that are drawn, not {kind}. Write poisson, say.")
        if self.requests is not None:
            raise ValueError("tasks end with a duration, not with a number of requests. Write duration.")
        for name, given in (("sessions", self.sessions), ("max_concurrency", self.max_concurrency)):
            if given is not None:
                raise ValueError(f"{name}: requests of tasks wait for answers by their stages. Drop one of the two.")
        if self.lengths is not None or any(traffic.lengths is not None for traffic in self.classes.values()):
            raise ValueError("lengths: the stages of tasks have their own. Drop lengths.")

    def _check_lengths(self) -> None:
        if self.tasks is not None:
            return
        replay = self.arrivals.kind == "trace"
        own = [traffic.lengths for traffic in self.classes.values()]
        lists = [lengths for lengths in [self.lengths, *own] if isinstance(lengths, ListLengths)]
        apart = isinstance(self.arrivals, ClosedLoop) and not self.arrivals.shared_list
        if lists and (self.sessions is not None or apart):
            instead = "drop sessions" if self.sessions is not None else "write arrivals.shared_list: true"
            raise ValueError(f"lengths of kind list need requests in one order: {instead}, or write kind: pairs.")
        resamples = any(isinstance(lengths, TraceLengths) for lengths in [self.lengths, *own])
        if replay and isinstance(self.lengths, TraceLengths):
            raise ValueError("arrivals of kind trace take each row's own lengths. Leave lengths out.")
        if self.lengths is None and not replay and (not own or None in own):
            raise ValueError("lengths are missing. Write lengths: {prompt: ..., output: ...} or {kind: trace}.")
        if self.trace is None and (replay or resamples):
            raise ValueError("arrivals or lengths of kind trace need trace: {path: ...}.")
        if self.trace is not None and not replay and not resamples:
            raise ValueError("trace is given, but neither arrivals nor lengths are of kind trace. Use it or drop it.")
        if self.trace is not None and not replay and self.trace.rate_scale is not None:
            raise ValueError(f"trace.rate_scale changes the trace's times, but arrivals are {self.arrivals.kind}.")

    @property
    def of_any_number(self) -> WorkloadConfig:
        """The workload with lists of lengths drawn from, so that it may have any number of requests."""

        def drawn(lengths: AnyLengths | None) -> AnyLengths | None:
            return PairLengths(lengths.prompt, lengths.output) if isinstance(lengths, ListLengths) else lengths

        classes = {name: replace(traffic, lengths=drawn(traffic.lengths)) for name, traffic in self.classes.items()}
        return replace(self, lengths=drawn(self.lengths), classes=classes)
