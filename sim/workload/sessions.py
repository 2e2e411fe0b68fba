"""Conversations whose prompts grow, and sessions that arrive in time and ask again when they were answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.workload.arrivals import arrival_times_ns, check_count
from batchsim.workload.laws import draw_tokens
from batchsim.workload.processes import Process, process_name
from batchsim.workload.request_columns import Describe, RequestColumns, RequestSampler, mean_lengths
from batchsim.workload.sharing import Sessions
from batchsim.workload.texts import Turn, conversation
from batchsim.workload.traces.arrival_stats import describe_arrivals
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.trace_rows import Ints, TraceRows
from batchsim.workload.workload_config import Frontend, WorkloadConfig

SLICE = 8192  # arrivals that exist as objects at once
PILOT_SESSIONS = 1024  # a sample whose means stand for those of all: the first ones


@dataclass(frozen=True)
class Turns:
    """The turns of some sessions, session by session; `first` has for each turn the row at which its session begins.

    `num_cut` sessions end before their last turn, because the model holds no more.
    """

    requests: RequestColumns
    first: Ints
    num_cut: int

    def __len__(self) -> int:
        return len(self.first)

    def text(self, row: int, request_ids: range) -> TokenIds:
        """The tokens of the prompt at `row`. `request_ids` are those of its session's turns, from the first on."""
        requests, start = self.requests, int(self.first[row])
        own, output = requests.own_tokens[start : row + 1], requests.output_tokens[start : row + 1]
        turns = [Turn(*turn) for turn in zip(request_ids, own.tolist(), output.tolist(), strict=False)]
        return conversation(int(requests.group[row]), int(requests.group_tokens[row]), turns)


def draw_turns(
    source: RequestSampler,
    sessions: Sessions,
    seed: int,
    count: int,
    *,
    user: int = 0,
    block: int = 0,
    request_class: Ints | None = None,
) -> Turns:
    """The turns of `count` sessions, the first n sessions being the same for every count.

    `request_class` has the class index of each session, else it is drawn.
    """
    counts = draw_tokens(sessions.turns, random_stream(seed, "turns", user=user, block=block), count).tokens
    counts = np.minimum(counts, source.max_model_len)  # each turn brings a token or more, so no session has as many
    check_count(int(counts.sum()))
    first = np.repeat(np.cumsum(counts) - counts, counts)
    request_class = source.classes_of(count, user=user, block=block) if request_class is None else request_class
    drawn = source.draw(len(first), user=user, block=block, request_class=np.repeat(request_class, counts))
    requests, fits = _grown(source, drawn, first)
    kept = np.flatnonzero(fits)
    first = (np.cumsum(fits) - 1)[first[kept]]
    return Turns(requests.picked(kept), first, len(np.unique(first)) - int(fits[np.cumsum(counts) - 1].sum()))


def _grown(source: RequestSampler, requests: RequestColumns, first: Ints) -> tuple[RequestColumns, np.ndarray]:
    """`requests` of turns with the context before each in its prompt, and which turns the model has room for.

    A session's shared prefix and LoRA adapter are those of its first turn.
    """
    own, output = requests.own_tokens, source.answered(requests.asked_tokens)
    spent = own + output
    before = np.cumsum(spent) - spent
    context = before - before[first]
    group, group_tokens = requests.group[first], requests.group_tokens[first]
    prompt = group_tokens + context + own
    fits = (first == np.arange(len(first))) | (prompt + output <= source.max_model_len)
    shared = {"group": group, "group_tokens": group_tokens, "adapter": requests.adapter[first]}
    return source.with_prompts(requests, prompt, context_tokens=context, **shared), fits


def turn_notes(turns: Turns) -> Iterator[str]:
    """A line where sessions had to end early."""
    if turns.num_cut:
        total = len(np.unique(turns.first))
        yield f"{turns.num_cut:,} of {total:,} sessions end before their last turn, which max_model_len has no room for"


@dataclass(frozen=True)
class OpenSessions:
    """Sessions that begin at times known in advance; request id = row of `turns`.

    A turn is sent `think_ns` after the answer to the one before reached its client, none at or after the window's end.
    Like `OpenWorkload` in all else.
    """

    start_ns: Ints
    think_ns: Ints
    turns: Turns
    source: RequestSampler
    window_ns: tuple[int, int]
    notes: tuple[str, ...]
    describe: Describe
    frontend: Frontend
    seed: int
    all_at_once: bool = False
    num_offered: int | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def mean_output_tokens(self) -> dict[str, float]:
        """The mean true output in tokens, by class name."""
        return self.source.mean_output_tokens(self.turns.requests)

    def arrivals(self) -> Iterator[Arrival]:
        """The first turn of every session by (arrival_ns, id); objects are made a slice at a time."""
        rows = np.unique(self.turns.first)
        late_ns = self.frontend.per_prompt_token * self.turns.requests.prompt_tokens[rows]
        order = np.argsort(self.start_ns + late_ns, kind="stable")
        for begin in range(0, len(order), SLICE):
            chosen = order[begin : begin + SLICE]
            for row, sent_ns in zip(rows[chosen].tolist(), self.start_ns[chosen].tolist(), strict=True):
                yield self._arrival(row, sent_ns)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        """The session's next turn; None after the last, or where it would be sent at or after the window's end."""
        row = request.id + 1
        if row >= len(self.turns) or self.turns.first[row] == row:
            return None
        sent_ns = now_ns + self.frontend.per_chunk + int(self.think_ns[row])
        return self._arrival(row, sent_ns) if sent_ns < self.window_ns[1] else None

    def acceptance(self, request: Request) -> float:
        """The probability that a draft token is right where those before it are; NaN where no trace says so."""
        return float(self.turns.requests.acceptance[request.id])

    def true_output_tokens(self, request: Request) -> int:
        """The true output length in tokens, hidden from schedulers."""
        return int(self.turns.requests.output_tokens[request.id])

    def _arrival(self, row: int, sent_ns: int) -> Arrival:
        requests, frontend = self.turns.requests, self.frontend
        prompt = int(requests.prompt_tokens[row])
        arrival_ns = sent_ns + frontend.request + frontend.per_prompt_token * prompt
        text = self.turns.text(row, range(int(self.turns.first[row]), row + 1))
        carried = (int(column[row]) for column in requests.carried)
        return self.source.arrival(row, sent_ns, arrival_ns, *carried, tokens=text)


def build_sessions(
    config: WorkloadConfig,
    sessions: Sessions,
    process: Process,
    source: RequestSampler,
    rows: TraceRows | None,
    seed: int,
) -> OpenSessions:
    """The workload of a config whose `sessions` arrive by `process`."""
    assert config.duration is not None and sessions.think_time is not None, "checked by the config"
    pilot = draw_turns(source, sessions, seed, PILOT_SESSIONS)
    session_rps = process.mean_rate * PILOT_SESSIONS / len(pilot)
    try:
        start_ns = arrival_times_ns(replace(process, mean_rate=session_rps), seed, config.duration, None)
    except ValueError as error:
        raise ScenarioError(f"workload: of sessions the {error}") from None
    turns = draw_turns(source, sessions, seed, len(start_ns))
    shares = np.ones(len(turns))
    if sessions.think_kind == "exponential":
        shares = random_stream(seed, "think").standard_exponential(len(turns))
    mean_turns = len(turns) / len(start_ns)
    think = f"think time {format_duration(sessions.think_time)} {sessions.think_kind or 'constant'}"
    stats = describe_arrivals(start_ns)
    return OpenSessions(
        start_ns=start_ns,
        think_ns=np.rint(shares * sessions.think_time).astype(np.int64),
        turns=turns,
        source=source,
        window_ns=(config.warmup, config.duration),
        notes=(
            *(rows.notes if rows is not None else ()),
            f"{session_rps:.3g} sessions/s begin, for {process.mean_rate:g} requests/s at"
            f" {len(pilot) / PILOT_SESSIONS:.3g} turns a session; what would be sent after the duration is not",
            *turn_notes(turns),
            *source.notes(turns.requests, f"{len(turns):,} turns"),
        ),
        describe={
            "kind": process.kind,
            "text": f"{process_name(process.kind)} arrivals of {len(start_ns):,} sessions, {mean_turns:.3g} turns on"
            f" average, {think}",
            "sessions": len(start_ns),
            "sessions_rps": stats.rate_rps,
            "cv": stats.cv,
            "mean_turns": mean_turns,
            "think_time_ns": sessions.think_time,
            "trace": rows.source if rows is not None else None,
            **mean_lengths(turns.requests),
        },
        frontend=config.frontend,
        seed=seed,
    )
