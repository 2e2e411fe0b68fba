"""The open answers of an endpoint, with the tokens delivered so far, and the tallies of them.

Events of an engine are taken in where the engine runs, and delivered where the clients are: that may be two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from batchsim.base.errors import ScenarioError
from batchsim.kernel.core import EngineCore
from batchsim.kernel.events import Ended, EngineEvent, Tokens
from batchsim.kernel.record import Recorder
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import MISSING, Arrival, Request
from batchsim.scenario import PolicySpec
from batchsim.scenario.setup import Setup
from batchsim.serve.disk_spool import DiskSpool
from batchsim.serve.metrics import Life, Metrics, Tally

STOPPED = "server_stopped"
"""The reason of requests that were open when the server ended."""
SPILL_BYTES = 1 << 22
"""Bytes of an engine's rows beyond which they go to disk: a server's memory does not grow with what it has answered."""
_OF_LIFE = tuple(field.name for field in fields(Life) if field.name != "by_length")


@dataclass(frozen=True)
class Asked:
    """What a client asks of an engine; `output_tokens` is the length at which the answer ends by itself, None where a
    model decides. `ids` are the prompt's tokens, where a model is to read them. `rank`: the replica that must answer,
    None: any. `adapter`: the number of the LoRA adapter."""

    prompt_tokens: int
    max_output_tokens: int
    output_tokens: int | None
    ignore_eos: bool = False
    priority: int = 0
    tenant: str = ""
    tokens: TokenIds | None = None
    ids: Sequence[int] = ()
    rank: int | None = None
    adapter: int = MISSING


class Answer:
    """State of one answer: `num_tokens` delivered so far, and once it has ended its `outcome` and `reason`.

    `arrival` is how it was sent; `listener` is called with it after each delivery. `ids` are the tokens that a model
    has made, delivered or not; `by_eos`: the last of them ended the answer.
    """

    __slots__ = (
        "arrival",
        "asked",
        "attempt",
        "by_eos",
        "cached_tokens",
        "has_row",
        "held",
        "ids",
        "last_token_ns",
        "listener",
        "not_before_ns",
        "num_made",
        "num_tokens",
        "outcome",
        "reason",
        "sent_ns",
    )

    def __init__(self, arrival: Arrival, asked: Asked, sent_ns: int, listener: Callable[[Answer], None]) -> None:
        self.arrival = arrival
        self.asked = asked
        self.sent_ns = sent_ns
        self.listener = listener
        self.num_tokens = self.cached_tokens = self.held = 0
        self.attempt = self.num_made = 0  # sent anew so often after failures of replicas; tokens of this attempt
        self.outcome: int | None = None
        self.reason = ""
        self.last_token_ns = -1
        self.not_before_ns = 0  # when its first piece is at the client, which no later one overtakes
        self.ids: list[int] = []
        self.by_eos = False
        self.has_row = False  # its end is in the records, and may be on its way to the client

    @property
    def number(self) -> int:
        """The number of the request, from 0, in the order of sending."""
        return self.arrival.request.id

    def gain(self, num_tokens: int) -> None:
        """Adds tokens of this attempt; tokens that an earlier attempt had delivered are not delivered again."""
        self.num_made = made = self.num_made + num_tokens
        if made > self.num_tokens:
            self.num_tokens = made


@dataclass(slots=True)
class Update:
    """Update of request `number` at one instant: new tokens (with `ids` from a real model), and its end.

    `answer` and `attempt` are filled in by `Answers.count`.
    """

    number: int
    num_tokens: int = 0
    outcome: int | None = None
    reason: str = ""
    ids: Sequence[int] = ()
    by_eos: bool = False
    answer: Answer | None = None
    attempt: int = 0


def _can_wait(update: Update) -> bool:
    """Sort key: True for updates delivered after first tokens and ends. To write a step's tokens takes milliseconds at
    hundreds of streams, which is the whole error of a first or a last token, but averages out of gaps."""
    assert update.answer is not None, "noted before"
    return update.outcome is None and update.answer.last_token_ns >= 0


def _has_tokens(heard: tuple[Answer, int]) -> bool:
    """As `_can_wait` where no answer ends: whether its first token was delivered before."""
    return heard[0].last_token_ns >= 0


@dataclass(frozen=True, slots=True)
class End:
    """The row of a request that has ended, as the tallies need it."""

    number: int
    sent_ns: int
    life: Life


class _Counts:
    """What a step at `now_ns` brought to clients, for a `tally`."""

    __slots__ = ("gaps", "now_ns", "output", "prompts", "tally")

    def __init__(self, tally: Tally, now_ns: int) -> None:
        self.tally = tally
        self.now_ns = now_ns
        self.output = self.prompts = 0
        self.gaps: dict[int, int] = {}  # how many had their last token when: most in the same step

    def add(self, answer: Answer, num_tokens: int) -> None:
        """Counts tokens of an answer."""
        self.output += num_tokens
        last_ns = answer.last_token_ns
        if last_ns < 0:
            self.tally.first_token(self.now_ns - answer.sent_ns, answer.asked.prompt_tokens)
            self.prompts += answer.asked.prompt_tokens
        else:
            self.gaps[last_ns] = self.gaps.get(last_ns, 0) + 1
        answer.last_token_ns = self.now_ns

    def tell(self) -> None:
        """Adds the sums of the whole step to the tally."""
        for last_ns, requests in self.gaps.items():
            self.tally.next_tokens(self.now_ns - last_ns, requests)
        if self.output:
            self.tally.step(self.prompts + self.output, self.output)


class Answers:
    """The answers of engines under `spec`. Rows beyond `spill_bytes` of an engine are on disk.

    ScenarioError where the policy needs to know of its requests what only a simulation knows.
    """

    def __init__(self, setup: Setup, spec: PolicySpec, metrics: Metrics, seed: int, spill_bytes: int) -> None:
        if spec.predictor is not None:
            raise ScenarioError(
                f"{spec.name}: predicts lengths, and nobody knows those of an endpoint's answers. Choose another."
            )
        self.setup = setup
        self.spec = spec
        self.metrics = metrics
        self.seed = seed
        self.caches = bool(spec.config.traits.prefix_cache)
        self.now_ns = -1
        self.answers: dict[int, Answer] = {}  # whose end was not delivered yet
        self.num_sent = 0
        self._spill_bytes = spill_bytes
        self._num_rows: dict[Recorder, int] = {}  # rows of requests of each engine that were read
        self._spools: dict[Recorder, DiskSpool] = {}

    def cores(self) -> dict[int, EngineCore]:
        """The engines that are there, by the numbers of their replicas."""
        raise NotImplementedError

    @property
    def streams(self) -> bool:
        """Whether tokens go out as they come."""
        return all(core.scheduler.streams for core in self.cores().values())

    # ---- where an engine runs

    def hear(self, core: EngineCore, events: Iterable[EngineEvent]) -> tuple[list[Update], list[End]]:
        """(updates by request, rows of ended requests) of `events`. Many rows go to disk."""
        updates: dict[int, Update] = {}
        has_ended = False
        for event in events:
            number = event.request.id
            update = updates.get(number)
            if update is None:
                update = updates[number] = Update(number)
            if type(event) is Tokens:
                update.num_tokens += event.count
            elif isinstance(event, Ended):
                update.outcome, update.reason = event.outcome, event.reason
                has_ended = True
        ends: list[End] = []
        if has_ended:
            ends = self._ends(core.recorder)
            self._spill(core)
        return list(updates.values()), ends

    def _ends(self, recorder: Recorder) -> list[End]:
        """The requests whose rows an engine has written since it was last asked."""
        rows = recorder.requests_from(self._num_rows.get(recorder, 0))
        self._num_rows[recorder] = len(recorder)
        ends: list[End] = []
        for row in rows:
            by_length = bool(row["output_tokens"] >= row["max_output_tokens"])
            life = Life(by_length=by_length, **{name: int(row[name]) for name in _OF_LIFE})
            ends.append(End(int(row["request_id"]), int(row["sent_ns"]), life))
        return ends

    def _spill(self, core: EngineCore) -> None:
        """Puts an engine's rows on disk where they are many."""
        recorder = core.recorder
        if recorder.num_bytes > self._spill_bytes:
            if recorder not in self._spools:
                self._spools[recorder] = DiskSpool()
            recorder.spill(self._spools[recorder], len(core.in_flight.steps))

    # ---- where its clients are

    def begin(self, asked: Asked, arrival_ns: int, sent_ns: int, listener: Callable[[Answer], None]) -> Answer:
        """The answer to a request that its client sent at `sent_ns` and that arrives at the engines at `arrival_ns`;
        `listener` is called with it after each delivery."""
        request = Request(
            id=self.num_sent,
            arrival_ns=arrival_ns,
            prompt_tokens=asked.prompt_tokens,
            max_output_tokens=asked.max_output_tokens,
            priority=asked.priority,
            tenant=asked.tenant,
            tokens=asked.tokens,
            ignore_eos=asked.ignore_eos,
            adapter=asked.adapter,
        )
        arrival = Arrival(request, asked.output_tokens, None, None if arrival_ns == sent_ns else sent_ns)
        self.num_sent += 1
        answer = self.answers[request.id] = Answer(arrival, asked, sent_ns, listener)
        return answer

    def count(
        self, replica: int, updates: Iterable[Update], ends: Iterable[End], now_ns: int, streams: bool
    ) -> list[Update]:
        """Counts what a replica's engine did at `now_ns`; returns the updates of requests whose clients are still
        connected, first tokens and ends before others.

        An engine that does not stream has its tokens delivered with the end of the answer.
        """
        listening: list[Update] = []
        for update in updates:
            answer = self.answers.get(update.number)
            if answer is not None:
                update.answer, update.attempt = answer, answer.attempt
                listening.append(update)
        listening.sort(key=_can_wait)
        tally = self.metrics.of(replica)
        counts = _Counts(tally, now_ns)
        for update in listening:
            if update.num_tokens and update.answer is not None:
                counts.add(update.answer, update.num_tokens)
        counts.tell()
        for end in ends:
            tally.end(end.life, now_ns - end.sent_ns, self.caches)
            if (answer := self.answers.get(end.number)) is not None:
                answer.cached_tokens, answer.has_row = end.life.cached_tokens, True
        if not streams:
            for update in listening:
                assert update.answer is not None
                update.answer.held += update.num_tokens
                update.num_tokens = 0 if update.outcome is None else update.answer.held
        return listening

    def pass_on(self, replica: int, events: Iterable[Tokens], now_ns: int) -> None:
        """Counts and delivers at once the tokens of a step at `now_ns` without ends: what `hear`, `count` and `deliver`
        do, in one loop, since at many streams most of a server's time goes there."""
        counts = _Counts(self.metrics.of(replica), now_ns)
        heard = [
            (answer, event.count) for event in events if (answer := self.answers.get(event.request.id)) is not None
        ]
        heard.sort(key=_has_tokens)
        for answer, num_tokens in heard:
            counts.add(answer, num_tokens)
            answer.gain(num_tokens)
            answer.listener(answer)
        counts.tell()

    def deliver(self, updates: Iterable[Update]) -> None:
        """Delivers updates to their answers."""
        for update in updates:
            answer, count = update.answer, update.num_tokens
            assert answer is not None, "noted as it was counted"
            if update.attempt == answer.attempt:  # else lost with its replica
                answer.gain(count)
            if update.ids:
                answer.ids += update.ids
            if update.outcome is not None:
                answer.outcome, answer.reason, answer.by_eos = update.outcome, update.reason, update.by_eos
                self._forget(answer)
            if count or update.outcome is not None:
                answer.listener(answer)

    def _forget(self, answer: Answer) -> None:
        """Drops what is kept of an answer that has ended."""
        del self.answers[answer.number]
