"""Rollouts: groups of answers that a trainer asks for, takes, and learns from, by the rule of its scheme.

The trainer is a small machine between the ends of answers and its own times. At an instant: what was due before comes
first; an answer that ended is noted, and its group if that completes it; the trainer takes groups if it is free and
there are enough; then groups are sent as the scheme has room for. After every `trigger` trainings weights are loaded:
none is sent until they are, and what runs ends before (`drain`), is aborted and sent again with what it has
(`interrupt`), or stands still meanwhile (`in_flight`).

Simplifications: a prompt has the same answers however often it is sent; a training holds no engine's GPU unless the
scheme is synchronous; text of prompts is kept in prefix caches until weights are loaded, as engines reset them then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import nan

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.kernel.events import Ended, Finished, Pruned, Reaction
from batchsim.kernel.record import OUTCOME_NAMES
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.workload.offline_config import MAX_REQUESTS
from batchsim.workload.request_columns import FOR_EVER_NS, Describe, RequestSampler, mean_lengths
from batchsim.workload.rollout_config import Areal, Counts, Rollout, TailBatching
from batchsim.workload.rollout_draws import GroupDraws
from batchsim.workload.rollout_log import Answer, Group, RolloutLog, Update
from batchsim.workload.texts import answer_to, own_text
from batchsim.workload.workload_config import Frontend, WorkloadConfig


@dataclass
class _Now:
    """What is done at one instant."""

    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    given_up: list[int] = field(default_factory=list[int])
    call_ns: int | None = None
    pause_until_ns: int | None = None

    def call(self, at_ns: int) -> None:
        self.call_ns = at_ns if self.call_ns is None else min(self.call_ns, at_ns)


MOST_FAILED = 1000
"""Groups in a row that may fail: engines refuse all of them then."""


class RolloutWorkload:
    """A rollout; request ids count the sendings. `arrivals()` begins anew, so one run at a time. Read `log` and
    `window_ns` after the run."""

    all_at_once = False
    num_offered = None
    frontend = Frontend()

    def __init__(self, rollout: Rollout, draws: GroupDraws, source: RequestSampler, seed: int) -> None:
        self.rollout = rollout
        self.scheme = rollout.scheme
        self.draws = draws
        self.source = source
        self.seed = seed
        self.pilot = draws.block_of(0)[0].requests
        self._begin()

    def _begin(self) -> None:
        self._now = _Now()
        self._groups: list[Group] = []
        self._answers: dict[int, Answer] = {}  # at engines, by request id
        self._outputs: list[int] = []  # tokens yet to come, by request id
        self._texts: dict[tuple[int, int], int] = {}
        self._running: dict[Group, None] = {}
        self._queue: deque[Group] = deque()
        self._held: list[Answer] = []  # interrupted, to be sent again
        self._resting: deque[Group] = deque()  # aborted with what they have, to go on in the next step
        self._put_off: deque[Group] = deque()  # long ones, for a round of their own
        self._in_long_round = False
        self._updates: list[Update] = []
        self._version = self._accepted = self._since_load = self._generated = self._prefilled_again = 0
        self._given_up: set[int] = set()  # of the requests at engines, those that are to come back
        self._num_failed = 0  # groups in a row
        self._free_ns = 0  # since when the trainer waits
        self._trained_ns: int | None = None  # when the training at hand ends
        self._loaded_ns: int | None = None  # when the loading at hand ends
        self._load_due = self._interrupted = self._over = False

    # ---- what drivers call

    def arrivals(self) -> Iterator[Arrival]:
        """The first groups, at time 0. Begins anew, whatever was sent before."""
        self._begin()
        self._settle(0)
        yield from self._reaction().arrivals

    def ended(self, event: Ended, now_ns: int) -> Reaction:
        """What the trainer does as a request has ended at `now_ns`."""
        self._advance(now_ns - 1)
        self._note(event, now_ns)
        self._settle(now_ns)
        return self._reaction()

    def called(self, now_ns: int) -> Reaction:
        """What the trainer does at the end of a training or of a loading."""
        self._advance(now_ns)
        return self._reaction()

    def _reaction(self) -> Reaction:
        now, self._now = self._now, _Now()
        return Reaction(tuple(now.arrivals), tuple(now.given_up), now.call_ns, now.pause_until_ns)

    def acceptance(self, request: Request) -> float:
        """NaN: nothing says how likely draft tokens are right."""
        return nan

    def true_output_tokens(self, request: Request) -> int:
        """The true output length in tokens, hidden from schedulers."""
        return self._outputs[request.id]

    # ---- what reports ask for

    @property
    def window_ns(self) -> tuple[int, int]:
        """From the start to the end of the last training."""
        return 0, self.log.end_ns

    @property
    def log(self) -> RolloutLog:
        """What became of groups, as far as the run is."""
        end_ns = max((each.end_ns for each in self._updates), default=0)
        return RolloutLog(
            tuple(self._groups),
            tuple(self._updates),
            self.scheme.limit,
            self._generated,
            self._prefilled_again,
            end_ns,
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def mean_output_tokens(self) -> dict[str, float]:
        """The mean true output in tokens, by class name."""
        return self.source.mean_output_tokens(self.pilot)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on what changed the lengths asked for, and what is simplified."""
        return tuple(self.source.notes(self.pilot, f"a sample of {len(self.pilot):,} answers"))

    @property
    def describe(self) -> Describe:
        """The figures of the rollout, and a `text` for people."""
        r = self.rollout
        name = self.scheme.kind.replace("_", " ")
        return {
            "kind": r.kind,
            "text": f"rollout, {name}: {r.updates:,} trainings of {self.scheme.required(r.prompts):,} prompts"
            f" × {r.answers} answers, loading {format_duration(r.sync)}",
            "requests": None,
            "trace": None,
            **mean_lengths(self.pilot),
        }

    def check_done(self) -> None:
        """ScenarioError where the run has ended and the trainer still waits for groups."""
        if not self._over:
            raise ScenarioError(
                f"workload: the rollout stood still after {len(self._updates):,} of {self.rollout.updates:,} trainings,"
                f" with {len(self._queue):,} groups complete and {len(self._running):,} open. Have the scheme let more"
                " groups be under way."
            )

    # ---- the trainer

    def _advance(self, limit_ns: int) -> None:
        """Does what is due up to `limit_ns`, in order."""
        while True:
            due = [each for each in (self._trained_ns, self._loaded_ns) if each is not None and each <= limit_ns]
            if not due:
                return
            now_ns = min(due)
            if self._trained_ns == now_ns:
                self._end_training(now_ns)
            else:
                self._end_loading(now_ns)
            self._settle(now_ns)

    def _settle(self, now_ns: int) -> None:
        """Has the trainer take groups if it can, weights loaded if they are due, and groups sent."""
        if self._over:
            return
        if self._load_due:
            self._load(now_ns)
        if self._load_due or self._loaded_ns is not None:
            return
        while True:
            if self._trained_ns is None:
                self._take(now_ns)
            room = self.scheme.room(self._counts(), self.rollout.prompts)
            if self._given_up or room <= 0:
                return
            self._send_groups(room, now_ns)

    def _counts(self) -> Counts:
        return Counts(
            self._version,
            len(self._running),
            len(self._queue),
            self._accepted,
            self._since_load,
            self._trained_ns is None,
            self._in_long_round,
        )

    def _take(self, now_ns: int) -> None:
        """Begins a training if enough groups are complete; drops groups that are too old."""
        age = self.scheme.max_age
        if age is not None:
            for group in [each for each in self._queue if self._version - each.version > age]:
                self._queue.remove(group)
                group.outcome = "stale"
        taken = self._first_of_queue(self.scheme.required(self.rollout.prompts))
        if not taken:
            return
        update = Update(self._version, now_ns, now_ns - self._free_ns)
        for group in taken:
            self._queue.remove(group)
            group.outcome, group.update = "used", len(self._updates)
            update.tokens += sum(group.prompt_tokens + answer.made for answer in group.used)
        self._updates.append(update)
        self._trained_ns = now_ns + self.rollout.trainer.time + self.rollout.trainer.per_token * update.tokens
        self._now.call(self._trained_ns)
        if self.scheme.aborts:
            self._abort_rest()

    def _first_of_queue(self, required: int) -> list[Group]:
        """The groups that the next training takes; none where too few are complete."""
        ready = list(self._queue)
        if isinstance(self.scheme, Areal):
            ready.sort(key=lambda each: each.prompt)
            if self.scheme.in_order and (first := next(iter(self._running), None)) is not None:
                ready = [each for each in ready if each.prompt < first.prompt]
        return ready[:required] if len(ready) >= required else []

    def _end_training(self, now_ns: int) -> None:
        self._trained_ns, self._free_ns = None, now_ns
        self._updates[-1].end_ns = now_ns
        if len(self._updates) == self.rollout.updates:
            self._over = True
            self._give_up(list(self._answers.values()))
            for group in self._groups:
                group.outcome = group.outcome or "left"
        else:
            self._load_due = len(self._updates) % self.scheme.trigger == 0

    def _load(self, now_ns: int) -> None:
        """Begins to load weights as soon as what runs allows it."""
        pause = self.scheme.pause
        if pause == "interrupt" and not self._interrupted:
            self._interrupted = True
            self._give_up(list(self._answers.values()))
        if self._answers and pause != "in_flight":
            return
        self._load_due = self._interrupted = False
        self._updates[-1].loading_ns, self._loaded_ns = now_ns, now_ns + self.rollout.sync
        if self._answers and self.rollout.sync:
            self._now.pause_until_ns = self._loaded_ns
        self._now.call(self._loaded_ns)

    def _end_loading(self, now_ns: int) -> None:
        self._loaded_ns, self._free_ns = None, now_ns
        self._updates[-1].loaded_ns = now_ns
        self._version += 1
        self._since_load = len(self._running) + len(self._queue)
        held, self._held = self._held, []
        for answer in held:
            if not answer.group.outcome:
                self._send(answer, now_ns)

    # ---- groups

    def _send_groups(self, count: int, now_ns: int) -> None:
        """Sends `count` groups: first groups that rest, or in their own round groups that were put off."""
        if isinstance(self.scheme, TailBatching) and not self._running and not self._queue:
            self._in_long_round = len(self._put_off) >= self.rollout.prompts
            count = self.scheme.room(self._counts(), self.rollout.prompts)
        waiting = self._put_off if self._in_long_round else self._resting
        for _ in range(count):
            group = waiting.popleft() if waiting else self._new_group(now_ns)
            if group.place == "put off":
                group.sent_ns, group.version = now_ns, self._version
            group.place = "running"
            self._running[group] = None
            self._since_load += 1
            for answer in group.answers[: group.needed] if self._in_long_round else group.answers:
                if answer.done_ns < 0:
                    self._send(answer, now_ns)
            if group.num_done >= group.needed:  # all its answers had come as it was aborted
                self._complete(group, now_ns)

    def _new_group(self, now_ns: int) -> Group:
        """The next prompt that was never sent. ScenarioError where the trainer asks for prompts without end."""
        prompt, needed = len(self._groups), self.rollout.answers
        if prompt * needed >= MAX_REQUESTS:
            raise ScenarioError(
                f"workload: {prompt:,} prompts were sent for {len(self._updates)} of {self.rollout.updates} trainings,"
                " and more are asked for. Drop fewer groups, or ask for fewer updates."
            )
        block, row = self.draws.block_of(prompt)
        columns, first = block.requests, row * self.draws.per_group
        group = Group(prompt, int(columns.prompt_tokens[first]), needed, now_ns, self._version)
        for index in range(self.draws.per_group):
            at = first + index
            tokens, cap = int(columns.output_tokens[at]), int(columns.max_output_tokens[at])
            answer = Answer(group, index, tokens, cap, ignores_eos=bool(columns.ignore_eos[at]))
            answer.is_cut = bool(columns.drawn_output[at] > tokens)
            group.answers.append(answer)
        self._groups.append(group)
        return group

    def _send(self, answer: Answer, now_ns: int) -> None:
        """Sends an answer to the engines, to go on from the tokens that it has."""
        group, number = answer.group, len(self._outputs)
        text = self._texts.setdefault((group.prompt, self._version), len(self._texts))
        segments = [own_text(text, group.prompt_tokens), *(answer_to(part, made) for part, made in answer.parts)]
        prompt, left, cap = group.prompt_tokens + answer.made, answer.tokens - answer.made, answer.cap - answer.made
        if answer.made:
            self._prefilled_again += prompt
        else:
            answer.first_version = self._version
        answer.request_id = number
        self._answers[number] = answer
        self._outputs.append(left)
        carried = (0, prompt, left, cap, FOR_EVER_NS, answer.ignores_eos, 0, -1, -1, -1, 0)
        tokens = TokenIds.of(segments)
        self._now.arrivals.append(self.source.arrival(number, now_ns, now_ns, *carried, tokens=tokens))

    def _note(self, event: Ended, now_ns: int) -> None:
        """Notes what an answer came to, which was at an engine."""
        answer = self._answers.pop(event.request.id)
        self._given_up.discard(event.request.id)
        answer.request_id = -1
        group, made = answer.group, event.output_tokens
        self._generated += made
        answer.made += made
        if made:
            answer.parts.append((event.request.id, made))
        is_done = isinstance(event, Finished) or answer.made >= answer.tokens
        if is_done:
            answer.done_ns, answer.last_version = now_ns, self._version
        if group.place == "put off":
            self._lose(answer)
        elif group.outcome or group.place == "queued":
            return
        elif is_done:
            group.num_done += 1
            if group.place == "running" and group.num_done == group.needed:
                self._complete(group, now_ns)
        elif not isinstance(event, Pruned):
            self._fail(group, event)
        elif group.place == "running":
            self._held.append(answer)

    def _complete(self, group: Group, now_ns: int) -> None:
        """Has a group wait for the trainer, unless its answers are all right or all wrong."""
        group.done_ns = now_ns
        self._num_failed = 0
        del self._running[group]
        self._give_up(group.answers)
        if self.draws.right(group.prompt) in (0, group.needed):
            group.outcome = "filtered"
            self._since_load -= 1
            return
        group.place = "queued"
        self._queue.append(group)
        self._accepted += 1

    def _fail(self, group: Group, event: Ended) -> None:
        """Drops a group of which an answer was rejected or lost. ScenarioError where one after another is."""
        group.outcome = "failed"
        self._since_load -= 1
        self._running.pop(group, None)
        self._give_up(group.answers)
        self._num_failed += 1
        if self._num_failed >= MOST_FAILED:
            raise ScenarioError(
                f"workload: {self._num_failed:,} groups in a row failed, the last one as an answer was"
                f" {OUTCOME_NAMES[event.outcome]} ({event.reason}). Write lengths that engines accept."
            )

    def _abort_rest(self) -> None:
        """Aborts the groups that are generated, since enough others are complete."""
        rest, self._running = list(self._running), {}
        for group in rest:
            self._give_up(group.answers)
            if self.scheme.partial:
                group.place = "resting"
                self._resting.append(group)
            elif isinstance(self.scheme, TailBatching):
                group.place, group.num_done = "put off", 0
                self._put_off.append(group)
                for answer in group.answers:
                    if answer.request_id < 0:
                        self._lose(answer)
            else:
                group.outcome = "aborted"

    def _give_up(self, answers: list[Answer]) -> None:
        """Gives up the `answers` that are at engines; each comes back with what it has."""
        for answer in answers:
            if answer.request_id >= 0 and answer.request_id not in self._given_up:
                self._given_up.add(answer.request_id)
                self._now.given_up.append(answer.request_id)

    def _lose(self, answer: Answer) -> None:
        """Throws away what an answer has."""
        answer.group.lost_tokens += answer.made
        answer.made, answer.done_ns = 0, -1
        answer.parts.clear()


def build_rollout(config: WorkloadConfig, rollout: Rollout, seed: int, max_model_len: int) -> RolloutWorkload:
    """The workload of a config whose arrivals are `rollout`. ScenarioError for lengths that groups cannot have."""
    draws = GroupDraws(config, rollout, seed, max_model_len)
    source = RequestSampler(config, None, seed, max_model_len)
    return RolloutWorkload(rollout, draws, source, seed)
