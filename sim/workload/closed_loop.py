"""Closed loops: users that wait for an answer, think, and send again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.workload.arrivals import check_count
from batchsim.workload.limited_client import LimitedClient, shared_list
from batchsim.workload.request_columns import Describe, RequestColumns, RequestSampler, mean_lengths
from batchsim.workload.sessions import PILOT_SESSIONS, Turns, draw_turns, turn_notes
from batchsim.workload.sharing import Sessions
from batchsim.workload.texts import grouped, items_of, with_items
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_rows import UNUSED_HASH_IDS, Ints, TraceRows
from batchsim.workload.workload_config import ClosedLoop, Frontend, WorkloadConfig

PILOT = 8192  # requests drawn as a sample of the loop, for notes and means
TURNS_PER_BLOCK = 64  # drawn at once for a user, since a stream costs as much as many draws
SESSIONS_PER_BLOCK = 16  # likewise
MAX_INSTANT_TURNS = 1000  # of one user in a row without time passing: then it never will
_Turn = tuple[int, ...]  # wait before it in ns, then what `RequestColumns.carried` has


@dataclass(frozen=True)
class _Block:
    """Consecutive turns of a user, drawn at once, from turn `first` on: whole sessions, or independent requests."""

    number: int
    first: int
    turns: list[_Turn]
    drawn: Turns


class Users:
    """The state of a closed loop: the turns that each user has sent. All draws are keyed by (user, turn).

    Request ids are turn * users + user. No request is sent at or after `duration_ns`, nor beyond `requests` in all.
    With `sessions` a user's turns are those of one session after the other.
    """

    def __init__(
        self,
        loop: ClosedLoop,
        source: RequestSampler,
        frontend: Frontend,
        seed: int,
        duration_ns: int | None,
        requests: int | None,
        sessions: Sessions | None,
    ) -> None:
        self.loop = loop
        self.duration_ns = duration_ns
        self.requests = requests
        self.num_sent = 0
        self.last_sent_ns = 0
        self._source = source
        self._frontend = frontend
        self._seed = seed
        self._sessions = sessions
        self._blocks: dict[int, _Block] = {}
        self._firsts: dict[int, list[int]] = {}  # with sessions: first turns of a user's blocks, up to the next to draw
        self._instant_turns: dict[int, int] = {}

    def start(self) -> Iterator[Arrival]:
        """Every user's first request, by (arrival_ns, id). Begins the loop anew, whatever was sent before."""
        self.num_sent = self.last_sent_ns = 0
        self._instant_turns.clear()
        first = [self._send(user, 0, 0) for user in range(self.loop.users)]
        yield from sorted((a for a in first if a is not None), key=lambda a: (a.request.arrival_ns, a.request.id))

    def next(self, request: Request, now_ns: int) -> Arrival | None:
        """The next request of the user whose `request` ended; None where the loop is over.

        ScenarioError if this user's requests keep ending at the instant of their arrival: time would stand still.
        """
        turn, user = divmod(request.id, self.loop.users)
        following = self._send(user, turn + 1, now_ns + self._frontend.per_chunk)
        if following is None or following.request.arrival_ns > request.arrival_ns:
            self._instant_turns.pop(user, None)
            return following
        count = self._instant_turns[user] = self._instant_turns.get(user, 0) + 1
        if count >= MAX_INSTANT_TURNS:
            raise ScenarioError(
                f"workload: {count} requests of user {user} in a row ended when they were sent, at {now_ns} ns; the"
                " loop would never end. Give think_time, fewer users, or lengths that the engine accepts."
            )
        return following

    def turns_before(self, ids: Ints) -> Ints | None:
        """How many turns of its session were before each of the requests `ids`; None without sessions."""
        if self._sessions is None:
            return None
        before = np.zeros(len(ids), np.int64)
        for at in np.lexsort((ids, ids % self.loop.users)).tolist():  # a user's turns one after another
            turn, user = divmod(int(ids[at]), self.loop.users)
            block = self._block(user, turn)
            before[at] = turn - block.first - int(block.drawn.first[turn - block.first])
        return before

    def turn(self, user: int, turn: int) -> _Turn:
        """The wait in ns before a user's request, then its values of `RequestColumns.carried`."""
        block = self._block(user, turn)
        return block.turns[turn - block.first]

    def acceptance(self, request: Request) -> float:
        """`RequestColumns.acceptance` of a user's request."""
        turn, user = divmod(request.id, self.loop.users)
        block = self._block(user, turn)
        return float(block.drawn.requests.acceptance[turn - block.first])

    def _block(self, user: int, turn: int) -> _Block:
        block = self._blocks.get(user)
        if block is not None and block.first <= turn < block.first + len(block.turns):
            return block
        if self._sessions is None:
            number = turn // TURNS_PER_BLOCK
            block = self._blocks[user] = self._draw(user, number, number * TURNS_PER_BLOCK)
            return block
        firsts = self._firsts.setdefault(user, [0])
        number = bisect_right(firsts, turn) - 1
        while True:
            block = self._blocks[user] = self._draw(user, number, firsts[number])
            number += 1
            if number == len(firsts):
                firsts.append(block.first + len(block.turns))
            if turn < firsts[number]:
                return block

    def _text(self, user: int, turn: int) -> TokenIds | None:
        """The prompt's tokens by the texts they are part of, for prefix caches; None where the prompt shares none."""
        block, users = self._block(user, turn), self.loop.users
        row, requests = turn - block.first, block.drawn.requests
        if self._sessions is not None:
            start = block.first + int(block.drawn.first[row])
            return block.drawn.text(row, range(start * users + user, turn * users + user + 1, users))
        if not self._source.shares:
            return None
        prompt, group, group_tokens = requests.prompt_tokens[row], requests.group[row], requests.group_tokens[row]
        return grouped(turn * users + user, int(prompt), int(group), int(group_tokens))

    def _send(self, user: int, turn: int, now_ns: int) -> Arrival | None:
        if self.requests is not None and self.num_sent >= self.requests:
            return None
        wait_ns, *carried = self.turn(user, turn)
        sent_ns = now_ns + wait_ns
        if self.duration_ns is not None and sent_ns >= self.duration_ns:
            return None
        self.num_sent += 1
        self.last_sent_ns = max(self.last_sent_ns, sent_ns)
        arrival_ns = sent_ns + self._frontend.request + self._frontend.per_prompt_token * carried[1]
        number = turn * self.loop.users + user
        if self._source.has_items:
            return self._with_items(user, turn, number, sent_ns, arrival_ns, carried)
        text = self._text(user, turn)
        return self._source.arrival(number, sent_ns, arrival_ns, *carried, tokens=text)

    def _with_items(
        self, user: int, turn: int, number: int, sent_ns: int, arrival_ns: int, carried: list[int]
    ) -> Arrival:
        """The request with its images, audios and videos."""
        block = self._block(user, turn)
        row, requests = turn - block.first, block.drawn.requests
        assert requests.items is not None, "the source has some"
        items = items_of(number, requests.items.of(row))
        text = with_items(number, carried[1], int(requests.group[row]), int(requests.group_tokens[row]), items)
        return self._source.arrival(number, sent_ns, arrival_ns, *carried, tokens=text, items=items)

    def _draw(self, user: int, number: int, first: int) -> _Block:
        if self._sessions is None:
            requests = self._source.draw(TURNS_PER_BLOCK, user=user, block=number)
            drawn = Turns(requests, np.arange(len(requests)), 0)
        else:
            request_class = np.repeat(self._source.classes_of(1, user=user), SESSIONS_PER_BLOCK)
            drawn = draw_turns(
                self._source,
                self._sessions,
                self._seed,
                SESSIONS_PER_BLOCK,
                user=user,
                block=number,
                request_class=request_class,
            )
            requests = drawn.requests
        rng = random_stream(self._seed, "think", user=user, block=number)
        starts = range(user, user + 1) if number == 0 else range(0)
        columns = (_waits_ns(self.loop, rng, len(requests), starts), *requests.carried)
        return _Block(number, first, list(zip(*(column.tolist() for column in columns), strict=True)), drawn)


def _waits_ns(loop: ClosedLoop, rng: np.random.Generator, size: int, starts: range) -> Ints:
    """The think time in ns before each of `size` requests; the first ones are those by which users `starts` begin.

    A run begins amid a think time: the rest of an exponential one has the law of the whole, the rest of a constant one
    is uniform. With a ramp, user i of n begins at i/n of it.
    """
    if loop.think_kind == "exponential":
        shares = rng.standard_exponential(size)
    else:
        shares = np.ones(size)
        shares[: len(starts)] = rng.random(len(starts))
    waits_ns = np.rint(shares * loop.think_time).astype(np.int64)
    if loop.ramp is not None:
        waits_ns[: len(starts)] = [loop.ramp * user // loop.users for user in starts]
    return waits_ns


@dataclass(frozen=True)
class ClosedLoopWorkload:
    """A closed loop: each user sends the next request after the answer. `arrivals()` begins anew, so one run at a time.

    With a number of requests the window's end is the last sending so far: read it after the run. Lengths in `notes`,
    `describe` and `mean_output_tokens` are those of `pilot`, a sample of the requests.
    """

    users: Users
    pilot: RequestColumns
    source: RequestSampler
    warmup_ns: int
    notes: tuple[str, ...]
    describe: Describe
    frontend: Frontend
    seed: int
    all_at_once: bool = False

    @property
    def num_offered(self) -> int | None:
        return self.users.requests

    @property
    def window_ns(self) -> tuple[int, int]:
        end_ns = self.users.duration_ns
        return self.warmup_ns, self.users.last_sent_ns if end_ns is None else end_ns

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def mean_output_tokens(self) -> dict[str, float]:
        """The mean true output in tokens, by class name."""
        return self.source.mean_output_tokens(self.pilot)

    def arrivals(self) -> Iterator[Arrival]:
        """Every user's first request, by (arrival_ns, id)."""
        return self.users.start()

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        """The next request of the user whose `request` ended at `now_ns`; None at the end of the loop."""
        return self.users.next(request, now_ns)

    def acceptance(self, request: Request) -> float:
        """The probability that a draft token is right where those before it are; NaN where no trace says so."""
        return self.users.acceptance(request)

    def true_output_tokens(self, request: Request) -> int:
        """The true output length in tokens, hidden from schedulers."""
        turn, user = divmod(request.id, self.users.loop.users)
        return self.users.turn(user, turn)[3]


def build_closed(
    config: WorkloadConfig, loop: ClosedLoop, source: RequestSampler, rows: TraceRows | None, seed: int
) -> ClosedLoopWorkload | LimitedClient:
    """The workload of a config whose arrivals are `loop`."""
    check_count(config.requests or loop.users)
    think = f"think time {format_duration(loop.think_time)} {loop.think_kind}" if loop.think_time else "no think time"
    if loop.ramp is not None:
        think += f", begun over {format_duration(loop.ramp)}" if loop.ramp else ", begun at once"
    notes = list(rows.notes) if rows is not None else []
    if rows is not None and rows.hash_ids is not None:
        notes.append(UNUSED_HASH_IDS)
    if loop.shared_list:
        assert config.requests is not None, "checked by the config"
        pilot, of = source.draw(config.requests), f"{config.requests:,} requests"
        think += ", one list of requests"
    elif config.sessions is None:
        pilot, of = source.draw(PILOT), f"a sample of {PILOT:,} requests"
    else:
        turns = draw_turns(source, config.sessions, seed, PILOT_SESSIONS)
        pilot, of = turns.requests, f"a sample of {len(turns):,} requests"
        think += f", sessions of {len(turns) / PILOT_SESSIONS:.3g} turns on average"
        notes += turn_notes(turns)
    notes += source.notes(pilot, of)
    describe: Describe = {
        "kind": loop.kind,
        "text": f"closed loop, {loop.users:,} users, {think}",
        "users": loop.users,
        "think_time_ns": loop.think_time,
        "trace": rows.source if rows is not None else None,
        **mean_lengths(pilot),
    }
    if loop.shared_list:
        waits_ns = _waits_ns(loop, random_stream(seed, "think"), len(pilot), range(loop.users))
        return shared_list(config, loop.users, waits_ns, pilot, source, tuple(notes), describe, seed)
    return ClosedLoopWorkload(
        users=Users(loop, source, config.frontend, seed, config.duration, config.requests, config.sessions),
        pilot=pilot,
        source=source,
        warmup_ns=config.warmup,
        notes=tuple(notes),
        describe=describe,
        frontend=config.frontend,
        seed=seed,
    )
