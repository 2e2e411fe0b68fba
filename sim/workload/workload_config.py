"""The `workload:` block of a scenario: which requests come, when, and how patient their clients are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Literal

from batchsim.base.later import later, np
from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, PositiveInt, Priority, Range, check_ranges
from batchsim.base.units import Duration, PartDuration, PositiveDuration, Share, format_duration
from batchsim.workload.laws import EmpiricalTokens, Law, Weight
from batchsim.workload.processes import (
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
from batchsim.workload.sharing import Sessions, SharedPrefix
from batchsim.workload.tagged import ByKind

if TYPE_CHECKING:
    from batchsim.workload.task_config import Tasks
    from batchsim.workload.traces.trace_config import TraceConfig
else:
    Tasks = later("batchsim.workload.task_config:Tasks")
    TraceConfig = later("batchsim.workload.traces.trace_config:TraceConfig")

SHARE_TOLERANCE = 1e-9  # shares are decimal percentages: their sum misses 1 by rounding only
Users = Annotated[int, Range(1, 1_000_000)]
"""Users of a closed loop: each is an object while the loop runs. Requests in flight of a client likewise."""
MAX_REQUESTS = 20_000_000
"""Requests of a run: about 1 GB of columns; more is a slip of a unit."""
Requests = Annotated[int, Range(1, MAX_REQUESTS)]


@dataclass(frozen=True)
class AllAtOnce(Config):
    """Every request at time 0: offline work.

    >>> batchsim.AllAtOnce()
    AllAtOnce(kind='all_at_once')
    """

    kind: Literal["all_at_once"] = "all_at_once"


@dataclass(frozen=True)
class ClosedLoop(Config):
    """Users who each send a request, wait for its end, think, and send the next.

    They are met amid a think time; with `ramp` they begin one after another within that time, with 0 s all at once.
    Each has requests of its own, or with `shared_list` takes the next of one list when it was answered, as benchmark
    clients with a number of workers do.

    >>> batchsim.ClosedLoop(users=16, think_time="1s").think_time  # ns
    1000000000
    """

    users: Users
    think_time: Duration
    think_kind: Literal["constant", "exponential"] = "constant"
    shared_list: bool = field(default=False, metadata=LEFT_OUT)
    ramp: Duration | None = field(default=None, metadata=LEFT_OUT)
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
    | TraceArrivals,
    ByKind(),
]


@dataclass(frozen=True)
class Lengths(Config):
    """Prompt and output lengths drawn independently.

    >>> batchsim.Lengths(batchsim.Fixed(100), batchsim.Uniform(2, 12)).output.mean_tokens
    7.0
    """

    prompt: Law
    output: Law
    kind: Literal["laws"] = "laws"


@dataclass(frozen=True)
class PairLengths(Config):
    """One of the pairs of `prompt[i]` and `output[i]`, equally likely or in proportion to `weights[i]`, so that the two
    keep what they have to do with each other."""

    prompt: tuple[PositiveInt, ...]
    output: tuple[PositiveInt, ...]
    weights: tuple[Weight, ...] | None = None
    kind: Literal["pairs"] = "pairs"

    def __post_init__(self) -> None:
        check_ranges(self)
        if len(self.prompt) != len(self.output):
            raise ValueError(f"{len(self.output)} outputs for {len(self.prompt)} prompts. Write one a prompt.")
        self.index()

    def index(self) -> EmpiricalTokens:
        """The law of the pair drawn, counted from 1."""
        return EmpiricalTokens(tuple(range(1, len(self.prompt) + 1)), self.weights)

    @property
    def mean_output_tokens(self) -> float:
        return float(np.average(self.output, weights=self.weights))


@dataclass(frozen=True)
class StepLengths(Config):
    """Pairs that change as time goes by: after each `every` those of the next of `parts`, of which the last one stays.

    Where requests are not sent at times known in advance, in sessions, closed loops and all at once, every pair of
    every part is drawn in proportion to its weight.
    """

    parts: tuple[PairLengths, ...]
    every: PositiveDuration
    kind: Literal["steps"] = "steps"

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.parts:
            raise ValueError("parts is empty. List the lengths of each step.")

    def all_parts(self) -> PairLengths:
        """The pairs of all parts."""
        weights = (each.weights or (1.0,) * len(each.prompt) for each in self.parts)
        return PairLengths(
            tuple(chain.from_iterable(each.prompt for each in self.parts)),
            tuple(chain.from_iterable(each.output for each in self.parts)),
            tuple(chain.from_iterable(weights)),
        )

    @property
    def mean_output_tokens(self) -> float:
        return self.all_parts().mean_output_tokens


@dataclass(frozen=True)
class ListLengths(Config):
    """Request i has `prompt[i]` and `output[i]`, each used once, in the order of sending: of a class its own i-th."""

    prompt: tuple[PositiveInt, ...]
    output: tuple[PositiveInt, ...]
    kind: Literal["list"] = "list"

    def __post_init__(self) -> None:
        check_ranges(self)
        PairLengths(self.prompt, self.output)

    @property
    def mean_output_tokens(self) -> float:
        return float(np.mean(self.output))


@dataclass(frozen=True)
class TraceLengths(Config):
    """Prompt and output of the same trace row, rows drawn with replacement."""

    kind: Literal["trace"] = "trace"


AnyLengths = Annotated[Lengths | PairLengths | StepLengths | ListLengths | TraceLengths, ByKind(default="laws")]


@dataclass(frozen=True)
class Patience(Config):
    """How long after sending a client cancels a request that has not ended; without one, never."""

    mean: PositiveDuration
    kind: Literal["constant", "exponential"] = "constant"


@dataclass(frozen=True)
class Stop(Config):
    """How answers end: the share `by_eos` by a stop token, which an engine sees when it comes, the others by length.

    A client of the others asks for as many tokens as come, and to ignore stop tokens, as benchmarks do.
    """

    by_eos: Share


@dataclass(frozen=True)
class TrafficClass(Config):
    """A share of the requests, or the rows of a trace that are of this class. What it leaves out is the workload's.

    `slo` is read by the metrics.
    """

    share: Share | None = None
    priority: Priority = 0
    lengths: AnyLengths | None = None
    slo: str | None = None
    deadline: PositiveDuration | None = None
    patience: Patience | None = None
    shared_prefix: SharedPrefix | None = None


@dataclass(frozen=True)
class Frontend(Config):
    """Time outside the engine: a request reaches it `request` + `per_prompt_token` * prompt after it was sent.

    Every piece of the response takes `per_chunk` back to the client. The first one takes `per_stream` besides for each
    answer that is being streamed by then, its own included, and comes no later than the last: a server that writes all
    streams from one loop is at a new one the later the more there are. Pure delays: requests do not wait for another.
    """

    request: Duration = 0
    per_prompt_token: PartDuration = 0
    per_chunk: Duration = 0
    per_stream: PartDuration = 0

    @property
    def is_immediate(self) -> bool:
        """Whether pieces of answers are at their clients as soon as they are made."""
        return not (self.per_chunk or self.per_stream)


@dataclass(frozen=True)
class WorkloadConfig(Config):
    """The whole block.

    Arrivals end with `duration` or after `requests`; a trace may also end by itself. The first `warmup` is left out of
    the measured cohort. After the last arrival the run drains to its end; with `drain`, at most that long: what is open
    then ends as unfinished and misses every objective. `output_cap` is what clients ask for at most: a number of
    tokens, all that `max_model_len` leaves, or `exact`, the true length. `deadline` and `patience` count from the
    sending. `shared_prefix` and `sessions` say which prompts begin alike, for policies with a prefix cache; a trace may
    say it itself. `prompt_scale` makes every prompt that many times as long, the text of `shared_prefix` aside. `stop`
    says how answers end: by a stop token unless given, as far as the output cap lets them. Of arrivals over time or
    all at once the client has at most `max_concurrency` in flight: others wait at the client, in order, and latencies,
    `deadline` and `patience` count from their sending. Classes are those of the trace's rows where `trace.columns`
    names a request_class (`by_row`, which needs no word); with `assign: at_random` they are drawn by their shares
    beside the rows, so that each has the lengths of all. `tasks` makes requests parts of tasks, in stages.

    >>> lengths = batchsim.Lengths(batchsim.Fixed(100), batchsim.Fixed(20))
    >>> batchsim.Workload(batchsim.Poisson("8/s"), output_cap=32, lengths=lengths, duration="60s").duration  # ns
    60000000000
    """

    arrivals: Arrivals
    output_cap: PositiveInt | Literal["max_model_len", "exact"]
    lengths: AnyLengths | None = None
    trace: TraceConfig | None = None
    duration: PositiveDuration | None = None
    requests: Requests | None = None
    warmup: Duration = 0
    drain: Duration | None = None
    classes: dict[str, TrafficClass] = field(default_factory=dict)
    deadline: PositiveDuration | None = None
    patience: Patience | None = None
    frontend: Frontend = field(default_factory=Frontend)
    shared_prefix: SharedPrefix | None = None
    sessions: Sessions | None = None
    prompt_scale: Annotated[float, Range(1e-3, 1e3)] = 1.0
    stop: Stop | None = field(default=None, metadata=LEFT_OUT)
    max_concurrency: Users | None = field(default=None, metadata=LEFT_OUT)
    assign: Literal["by_row", "at_random"] | None = field(default=None, metadata=LEFT_OUT)
    tasks: Tasks | None = field(default=None, metadata=LEFT_OUT)

    @property
    def by_row(self) -> bool:
        """Whether the rows of the trace say of which class each request is."""
        named = self.trace is not None and self.trace.columns is not None and self.trace.columns.request_class
        return bool(named) and self.assign != "at_random"

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.stop is not None and self.output_cap == "exact":
            raise ValueError("stop: with output_cap exact all answers end by length. Drop one of them.")
        self._check_end()
        self._check_lengths()
        if self.sessions is not None:
            self._check_sessions(self.sessions)
        if self.tasks is not None:
            self._check_tasks()
        if self.max_concurrency is not None:
            self._check_max_concurrency(self.max_concurrency)
        if "" in self.classes:
            raise ValueError("a class has no name. Name it.")
        self._check_classes()

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
            if traffic.share is None:
                raise ValueError(
                    f"classes.{name} has no share. Write one, like share: 30%, or name the column of a trace that tells"
                    " classes: trace.columns.request_class."
                )
        if self.classes:
            total = sum(traffic.share or 0.0 for traffic in self.classes.values())
            if abs(total - 1) > SHARE_TOLERANCE:
                raise ValueError(f"the shares of the classes add up to {100 * total:.6g}%. They must make 100%.")
            if self.assign is None:
                self._check_rows_of_classes()

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

    def _check_rows_of_classes(self) -> None:
        """ValueError where classes would be drawn beside a trace's rows: each would get the lengths of all rows."""
        replay = self.arrivals.kind == "trace"
        drawn = {name: traffic.lengths or self.lengths for name, traffic in self.classes.items() if traffic.share}
        of_rows = [name for name, own in drawn.items() if isinstance(own, TraceLengths) or (replay and own is None)]
        if len(drawn) > 1 and len(of_rows) > (0 if replay else 1):
            which = "every class" if replay else "all of them but one"
            raise ValueError(
                f"classes: {', '.join(of_rows)} would be drawn at random beside the rows of the trace, so that each had"
                " the lengths of all rows. Name the column that says which row is whose, trace.columns.request_class,"
                f" or give {which} lengths: {{prompt: ..., output: ...}} of its own, or write assign: at_random."
            )

    def _check_sessions(self, sessions: Sessions) -> None:
        kind = self.arrivals.kind
        if kind in ("trace", "all_at_once"):
            raise ValueError(f"sessions need arrivals over time that are drawn, not {kind}. Write poisson, say.")
        if isinstance(self.arrivals, ClosedLoop):
            if self.arrivals.shared_list:
                raise ValueError("arrivals.shared_list: turns of a session belong to one user. Drop one of the two.")
            if sessions.think_time is not None or sessions.think_kind is not None:
                raise ValueError("sessions.think_time is for open arrivals. Users think as arrivals.think_time says.")
            return
        if sessions.think_time is None:
            raise ValueError(f"sessions with {kind} arrivals need think_time, from an answer to the next turn.")
        if self.requests is not None:
            raise ValueError(f"sessions with {kind} arrivals end with a duration, not with a number of requests.")
