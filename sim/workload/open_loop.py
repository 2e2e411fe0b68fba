"""Requests whose times are known in advance: drawn, replayed from a trace, or all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S, counted, format_duration
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Arrival, Item, Request
from batchsim.workload.arrivals import arrival_times_ns, check_count
from batchsim.workload.clocks import ends_rps
from batchsim.workload.items import unread_hash_ids
from batchsim.workload.processes import process_name
from batchsim.workload.request_columns import Describe, RequestColumns, RequestSampler, mean_lengths
from batchsim.workload.rollout_config import Rollout
from batchsim.workload.texts import grouped, hashed, items_of, with_items
from batchsim.workload.traces.arrival_stats import describe_arrivals
from batchsim.workload.traces.trace_rows import UNUSED_HASH_IDS, HashIds, Ints, TraceRows, cut_tasks
from batchsim.workload.workload_config import AllAtOnce, ClosedLoop, Frontend, TraceArrivals, WorkloadConfig

SLICE = 8192  # arrivals that exist as objects at once


@dataclass(frozen=True)
class OpenWorkload:
    """Requests whose times are known in advance, held as columns; request id = row, in the order of sending.

    `window_ns` is (end of the warm-up, end of arrivals) in times of sending, the end included. `describe` has the
    measured figures of the arrivals and a `text` for people, `notes` what changed what was asked for. `hash_ids` has
    the blocks of every prompt, `task_of` the number of each row's task (-1: of none), where a replayed trace has them.
    """

    sent_ns: Ints
    arrival_ns: Ints
    requests: RequestColumns
    source: RequestSampler
    window_ns: tuple[int, int]
    all_at_once: bool
    notes: tuple[str, ...]
    describe: Describe
    frontend: Frontend
    seed: int
    hash_ids: HashIds | None = None
    task_of: Ints | None = None

    @property
    def num_offered(self) -> int | None:
        return len(self.sent_ns)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.names

    @property
    def mean_output_tokens(self) -> dict[str, float]:
        """The mean true output in tokens, by class name."""
        return self.source.mean_output_tokens(self.requests)

    def arrivals(self) -> Iterator[Arrival]:
        """All requests by (arrival_ns, id); objects are made a slice at a time."""
        columns = (self.sent_ns, self.arrival_ns, *self.requests.carried)
        make = self.source.arrival
        shares = self.hash_ids is not None or self.source.shares
        order = np.argsort(self.arrival_ns, kind="stable")
        if self.requests.items is not None:
            for number in order.tolist():
                row = (int(column[number]) for column in columns)
                items = self._items(number)
                yield make(number, *row, tokens=self._tokens(number, items), items=items)
            return
        for start in range(0, len(order), SLICE):
            rows = order[start : start + SLICE]
            for number, *row in zip(rows.tolist(), *(column[rows].tolist() for column in columns), strict=True):
                yield make(number, *row, tokens=self._tokens(number) if shares else None)

    def sent_at(self, row: int, sent_ns: int) -> Arrival:
        """The request of `row`, sent at `sent_ns` instead."""
        requests, frontend = self.requests, self.frontend
        delay_ns = frontend.request + frontend.per_prompt_token * int(requests.prompt_tokens[row])
        carried = (int(column[row]) for column in requests.carried)
        items = self._items(row)
        tokens = self._tokens(row, items) if self.hash_ids is not None or self.source.shares else None
        return self.source.arrival(row, sent_ns, sent_ns + delay_ns, *carried, tokens=tokens, items=items)

    def _items(self, number: int) -> tuple[Item, ...]:
        return () if self.requests.items is None else items_of(number, self.requests.items.of(number))

    def _tokens(self, number: int, items: tuple[Item, ...] = ()) -> TokenIds | None:
        """The prompt's tokens by the texts they are part of, for prefix caches; None where the prompt shares none."""
        requests = self.requests
        prompt = int(requests.prompt_tokens[number])
        if self.hash_ids is not None:
            return hashed(number, prompt, self.hash_ids, number)
        group = int(requests.group[number]), int(requests.group_tokens[number])
        return with_items(number, prompt, *group, items) if items else grouped(number, prompt, *group)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        """Always None: no request waits for an answer."""
        return None

    def acceptance(self, request: Request) -> float:
        """The probability that a draft token is right where those before it are; NaN where no trace says so."""
        return float(self.requests.acceptance[request.id])

    def true_output_tokens(self, request: Request) -> int:
        """The true output length in tokens, hidden from schedulers."""
        return int(self.requests.output_tokens[request.id])

    def columns(self) -> dict[str, np.ndarray]:
        """The requests as columns by request id; `request_class` indexes `class_names`."""
        return {
            "request_id": np.arange(len(self.sent_ns)),
            "sent_ns": self.sent_ns,
            "arrival_ns": self.arrival_ns,
            "request_class": self.requests.request_class,
            "prompt_tokens": self.requests.prompt_tokens,
            "output_tokens": self.requests.output_tokens,
            "max_output_tokens": self.requests.max_output_tokens,
        }


@dataclass
class ClientOfList:
    """What clients have in common that send the requests of `listed` at times of their own: all but the times is as in
    the list. The window ends with the last sending so far, where that is later: read it after the run."""

    listed: OpenWorkload
    _last_sent_ns: int = field(default=0, init=False)

    @property
    def num_offered(self) -> int | None:
        return self.listed.num_offered

    @property
    def window_ns(self) -> tuple[int, int]:
        warmup_ns, end_ns = self.listed.window_ns
        return warmup_ns, max(end_ns, self._last_sent_ns)

    @property
    def all_at_once(self) -> bool:
        return self.listed.all_at_once

    @property
    def source(self) -> RequestSampler:
        return self.listed.source

    @property
    def notes(self) -> tuple[str, ...]:
        return self.listed.notes

    @property
    def describe(self) -> Describe:
        return self.listed.describe

    @property
    def frontend(self) -> Frontend:
        return self.listed.frontend

    @property
    def seed(self) -> int:
        return self.listed.seed

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.listed.class_names

    @property
    def mean_output_tokens(self) -> dict[str, float]:
        """The mean true output in tokens, by class name."""
        return self.listed.mean_output_tokens

    def acceptance(self, request: Request) -> float:
        """The probability that a draft token is right where those before it are; NaN where no trace says so."""
        return self.listed.acceptance(request)

    def true_output_tokens(self, request: Request) -> int:
        """The true output length in tokens, hidden from schedulers."""
        return self.listed.true_output_tokens(request)


def build_open(config: WorkloadConfig, source: RequestSampler, rows: TraceRows | None, seed: int) -> OpenWorkload:
    """The workload of a config whose arrivals are not a closed loop. ScenarioError if nothing is left to send."""
    replayed = None
    notes = list(rows.notes) if rows is not None else []
    if isinstance(config.arrivals, TraceArrivals):
        assert rows is not None, "checked by the config"
        replayed, note = _within(rows, config)
        notes += note
        sent_ns = replayed.arrival_ns
        assert sent_ns is not None, "checked when read"
    elif isinstance(config.arrivals, AllAtOnce):
        check_count(config.requests or 0)
        sent_ns = np.zeros(config.requests or 0, np.int64)
    else:
        assert not isinstance(config.arrivals, ClosedLoop | Rollout), "for builders of their own"
        sent_ns = arrival_times_ns(config.arrivals, seed, config.duration, config.requests)
    requests = source.draw(
        len(sent_ns), rows=replayed, sent_ns=None if isinstance(config.arrivals, AllAtOnce) else sent_ns
    )
    hash_ids, hash_notes = _hash_ids(rows, replayed, source)
    trace = config.trace
    waits = replayed is not None and replayed.linked and trace is not None and trace.replay != "as_recorded"
    at_once = isinstance(config.arrivals, AllAtOnce) or not (waits or sent_ns.any())
    if at_once and replayed is not None:
        notes.append(f"all {len(sent_ns):,} rows are of one time: sent all at once")
    frontend = config.frontend
    arrival_ns = sent_ns + (frontend.request + frontend.per_prompt_token * requests.prompt_tokens)
    end_ns = int(sent_ns[-1])
    if config.duration is not None and (replayed is None or len(replayed) < len(rows or ())):
        end_ns = config.duration
    if config.warmup and config.warmup >= end_ns:
        raise ScenarioError(
            f"workload: warmup {format_duration(config.warmup)} leaves nothing of the arrivals, which end at"
            f" {format_duration(end_ns)}. Shorten it or ask for more requests."
        )
    return OpenWorkload(
        sent_ns=sent_ns,
        arrival_ns=arrival_ns,
        requests=requests,
        source=source,
        window_ns=(config.warmup, end_ns),
        all_at_once=at_once,
        notes=(*notes, *hash_notes, *source.notes(requests, f"{len(requests):,} requests")),
        describe=_describe_open(config, sent_ns, requests, rows, at_once),
        frontend=frontend,
        seed=seed,
        hash_ids=hash_ids,
        task_of=None if replayed is None else replayed.labels.get("task"),
    )


def _hash_ids(
    rows: TraceRows | None, replayed: TraceRows | None, source: RequestSampler
) -> tuple[HashIds | None, list[str]]:
    """The hash ids of every request's prompt, and a note where those of the trace are not used.

    ScenarioError if the scenario has a shared_prefix besides.
    """
    if rows is None or rows.hash_ids is None:
        return None, []
    if source.has_items:
        raise unread_hash_ids(rows.source)
    if source.shares:
        raise ScenarioError(
            f"{rows.source}: its hash_ids say what prompts share, and so does shared_prefix. Write trace.prefix: ignore"
            " or drop shared_prefix."
        )
    if replayed is None or not source.of_rows:
        return None, [UNUSED_HASH_IDS]
    return replayed.hash_ids, []


def _within(rows: TraceRows, config: WorkloadConfig) -> tuple[TraceRows, list[str]]:
    """The rows that `requests` or `duration` keep, and notes on the others."""
    assert rows.arrival_ns is not None, "checked when read"
    keep, why = len(rows), ""
    if config.requests is not None:
        if config.requests > len(rows):
            raise ScenarioError(
                f"{rows.source}: requests is {config.requests:,}, but {len(rows):,} rows are usable. Ask for fewer."
            )
        keep, why = config.requests, "beyond requests"
    elif config.duration is not None:
        keep = int(np.searchsorted(rows.arrival_ns, config.duration))
        why = f"at or after the duration {format_duration(config.duration)}"
        if keep == len(rows):
            end_s = int(rows.arrival_ns[-1]) / NS_PER_S
            return rows, [f"the trace ends at {end_s:,.1f} s, before the duration: arrivals end there"]
    if keep == len(rows):
        return rows, []
    if keep == 0:
        raise ScenarioError(f"{rows.source}: no row is before the duration. Raise it.")
    kept = rows.picked(slice(keep), rows.arrival_ns[:keep])
    reused = ""
    cut = cut_tasks(rows, keep, "requests" if config.requests is not None else "duration")
    if kept.hash_ids is not None:
        reused = f"; of the others' units {100 * kept.hash_ids.reused_share:.1f} % stand in an earlier row"
    return kept, [f"{len(rows) - keep:,} of {len(rows):,} rows left out: {why}{reused}", *cut]


def _describe_open(
    config: WorkloadConfig, sent_ns: Ints, requests: RequestColumns, rows: TraceRows | None, at_once: bool
) -> Describe:
    stats = describe_arrivals(np.sort(sent_ns))  # of a client that is full, times are from when on, in no order
    kind = config.arrivals.kind
    name = process_name(kind)
    if at_once:
        text = f"{counted(len(sent_ns), 'request')} at once"
    else:
        spread = stats.cv if stats.requests > 2 else None  # one gap alone has none
        figures = (("CV", spread), ("IDC(1 s)", stats.idc_1s), ("IDC(60 s)", stats.idc_60s))
        if isinstance(config.arrivals, TraceArrivals):
            ends = None if stats.change is None else stats.change.ends_rps
        else:
            ends = None if isinstance(config.arrivals, AllAtOnce | ClosedLoop | Rollout) else ends_rps(config.arrivals)
        rates = () if ends is None else (f"rate from {ends[0]:.3g}/s to {ends[1]:.3g}/s",)
        text = ", ".join([f"{name} arrivals", *rates, *(f"{label} {x:.1f}" for label, x in figures if x is not None)])
    if rows is not None and "task" in rows.labels:
        task = rows.labels["task"][: len(sent_ns)]
        text += f"; {len(np.unique(task[task >= 0])):,} tasks"
    return {
        "kind": kind,
        "text": text,
        "requests": len(sent_ns),
        "rate_rps": stats.rate_rps,
        "cv": stats.cv,
        "idc_1s": stats.idc_1s,
        "idc_60s": stats.idc_60s,
        "trace": rows.source if rows is not None else None,
        **mean_lengths(requests),
    }
