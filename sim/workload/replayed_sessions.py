"""A log whose rows wait for each other: turns of sessions, trees of calls that fan out and join."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.kernel.tokens import Segment, TokenIds
from batchsim.kernel.types import Arrival, Request
from batchsim.workload.open_loop import ClientOfList, OpenWorkload
from batchsim.workload.texts import answer_to, own_text
from batchsim.workload.traces.labels import NOT_TOLD
from batchsim.workload.traces.trace_rows import Ints, TraceRows
from batchsim.workload.workload_config import WorkloadConfig


@dataclass(frozen=True)
class Links:
    """What each row waits for: `parents[i]` are rows before row i. `root[i]` is the first row of its session or tree.

    `wait_ns[i]` is how long after the last of these answers the row is sent; NOT_TOLD where the log has no answers'
    times: then no sooner after its root than in the log. `notes` counts what was altered. `trees`: rows name their
    parents, else each follows the one before it of its session.
    """

    parents: tuple[tuple[int, ...], ...]
    root: Ints
    wait_ns: Ints
    notes: tuple[str, ...]
    trees: bool = False


@dataclass
class ReplayedSessions(ClientOfList):
    """The requests of `listed`; requests that wait for others, by `links`, are sent after the answers of these.

    A request that failed counts as answered when it ended. With `by_tree` a prompt begins with its first parent's
    prompt and answer where it has room for both.
    """

    links: Links
    by_tree: bool
    _children: dict[int, list[int]] = field(default_factory=dict[int, "list[int]"])
    _open: dict[int, int] = field(default_factory=dict[int, int])
    _sent_ns: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        for row, parents in enumerate(self.links.parents):
            for parent in parents:
                self._children.setdefault(parent, []).append(row)

    @property
    def task_of(self) -> Ints | None:
        """The number of each row's task, by request id (-1: of none): the log's, else its tree of calls. None of
        sessions, which have no end."""
        if self.listed.task_of is not None:
            return self.listed.task_of
        return self.links.root if self.links.trees else None

    @property
    def depth(self) -> Ints:
        """The most rows, one waiting for the other, before each row."""
        depth = np.zeros(len(self.links.parents), np.int64)
        waits = {row: len(parents) for row, parents in enumerate(self.links.parents)}
        ready = [row for row, parents in waits.items() if not parents]
        while ready:
            row = ready.pop()
            for child in self._children.get(row, ()):
                depth[child] = max(depth[child], depth[row] + 1)
                waits[child] -= 1
                if not waits[child]:
                    ready.append(child)
        return depth

    @property
    def all_at_once(self) -> bool:
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.listed.notes, *self.links.notes)

    def arrivals(self) -> Iterator[Arrival]:
        """The rows that wait for none, by (arrival_ns, id). Begins the replay anew, whatever was sent before."""
        self._open = {row: len(parents) for row, parents in enumerate(self.links.parents) if parents}
        self._sent_ns.clear()
        self._last_sent_ns = 0
        for row in np.argsort(self.listed.arrival_ns, kind="stable").tolist():
            if row not in self._open:
                yield self._sent(row, int(self.listed.sent_ns[row]))

    def responded(self, request: Request, now_ns: int) -> tuple[Arrival, ...]:
        """The rows whose last parent is `request`, which ended at `now_ns`."""
        ready: list[int] = []
        for child in self._children.get(request.id, ()):
            self._open[child] -= 1
            if not self._open[child]:
                ready.append(child)
        return tuple(self._sent(row, self._due_ns(row, now_ns + self.frontend.per_chunk)) for row in ready)

    def _due_ns(self, row: int, answered_ns: int) -> int:
        wait_ns = int(self.links.wait_ns[row])
        if wait_ns != NOT_TOLD:
            return answered_ns + wait_ns
        root = int(self.links.root[row])
        return max(answered_ns, self._sent_ns[root] + int(self.listed.sent_ns[row] - self.listed.sent_ns[root]))

    def _sent(self, row: int, sent_ns: int) -> Arrival:
        self._sent_ns[row] = sent_ns
        self._last_sent_ns = max(self._last_sent_ns, sent_ns)
        arrival = self.listed.sent_at(row, sent_ns)
        if not self.by_tree:
            return arrival
        return replace(arrival, request=replace(arrival.request, tokens=self._text(row)))

    def _text(self, row: int) -> TokenIds:
        """The prompt of `row` as the texts that the prompts before it in its tree have too."""
        path = [row]
        while (parents := self.links.parents[path[-1]]) and self._holds(path[-1], parents[0]):
            path.append(parents[0])
        prompt, output = self.listed.requests.prompt_tokens, self.listed.requests.output_tokens
        segments: list[Segment] = []
        known = 0
        for each in reversed(path):
            segments.append(own_text(each, int(prompt[each]) - known))
            if each != row:
                segments.append(answer_to(each, int(output[each])))
            known = int(prompt[each] + output[each])
        return TokenIds.of(segments)

    def _holds(self, row: int, parent: int) -> bool:
        requests = self.listed.requests
        return bool(requests.prompt_tokens[row] > requests.prompt_tokens[parent] + requests.output_tokens[parent])


def response_driven(config: WorkloadConfig, listed: OpenWorkload, rows: TraceRows) -> ReplayedSessions:
    """`listed`, the requests of `rows`, with rows that wait for others sent after their answers.

    ScenarioError where the trace is scaled by copying or leaving out rows, or requests are held back besides.
    """
    assert config.trace is not None, "called for traces only"
    scale = config.trace.rate_scale
    if scale is not None and scale.by != "compress":
        raise ScenarioError(
            f"workload.trace.rate_scale by {scale.by}: rows of this trace wait for others. Write by: compress, which"
            " lets sessions begin sooner, or trace.replay: as_recorded."
        )
    if config.max_concurrency is not None:
        raise ScenarioError(
            f"workload.max_concurrency {config.max_concurrency}: rows of this trace wait for others. Drop it, or write"
            " trace.replay: as_recorded."
        )
    if listed.source.shares:
        raise ScenarioError(
            "workload.shared_prefix: prompts of this trace begin as those they follow on. Drop it, or write"
            " trace.replay: as_recorded."
        )
    links = links_of(rows)
    by_tree = listed.hash_ids is None and config.trace.prefix != "ignore"
    sessions = len(np.unique(links.root))
    waiting = sum(1 for parents in links.parents if parents)
    text = f"{listed.describe['text']}; {sessions:,} sessions, {waiting:,} requests wait for answers"
    replayed = ReplayedSessions(
        replace(listed, describe=listed.describe | {"text": text, "sessions": sessions}), links, by_tree
    )
    if by_tree:
        held = sum(replayed._holds(row, parents[0]) for row, parents in enumerate(links.parents) if parents)
        note = (
            f"prompts begin with the prompt and the answer before them in their session: {held:,} of {waiting:,} that"
            " have one; the others are too short and share nothing"
        )
        replayed.links = replace(links, notes=(*links.notes, note))
    return replayed


def links_of(rows: TraceRows) -> Links:
    """What waits for what among `rows`, in time order, and how long after the answers each was sent in the log."""
    parents, notes = _by_parent(rows) if "parent" in rows.labels else _by_session(rows)
    count = len(rows)
    root = np.arange(count)
    wait_ns = np.full(count, NOT_TOLD)
    recorded, e2e, delay = rows.labels["recorded"], rows.labels.get("e2e"), rows.labels.get("delay")
    early = untold = 0
    for row, before in enumerate(parents):
        if not before:
            continue
        root[row] = root[before[0]]
        if delay is not None and delay[row] != NOT_TOLD:
            wait_ns[row] = delay[row]
            continue
        if e2e is None or min(e2e[list(before)]) == NOT_TOLD:
            untold += 1
            continue
        gap_ns = int(recorded[row]) - max(int(recorded[each] + e2e[each]) for each in before)
        early += gap_ns < 0
        wait_ns[row] = max(gap_ns, 0)
    if early:
        notes.append(f"{early:,} rows were sent before the answer they wait for had come: sent when it comes")
    if untold:
        notes.append(
            f"{untold:,} rows wait for answers whose time is not told (columns.e2e): sent when these have come, no"
            " sooner after the beginning of their session than recorded"
        )
    return Links(tuple(parents), root, wait_ns, tuple(notes), "parent" in rows.labels)


def _by_session(rows: TraceRows) -> tuple[list[tuple[int, ...]], list[str]]:
    """Each row waits for the one before it of its session, by turn where the log has turns, else by time."""
    session, turn = rows.labels["session"], rows.labels.get("turn")
    last: dict[int, int] = {}
    parents: list[tuple[int, ...]] = []
    back = 0
    for row, number in enumerate(session.tolist()):
        before = last.get(number) if number != NOT_TOLD else None
        parents.append(() if before is None else (before,))
        back += before is not None and turn is not None and turn[row] <= turn[before]
        last[number] = row
    notes = (
        [f"{back:,} rows have no later turn than the row before them of their session: taken by time"] if back else []
    )
    return parents, notes


def _by_parent(rows: TraceRows) -> tuple[list[tuple[int, ...]], list[str]]:
    """Each row waits for those whose ids it names."""
    ids, codes = rows.texts["id"], rows.labels["id"].tolist()
    row_of: dict[str, int] = {}
    for row, code in enumerate(codes):
        if code != NOT_TOLD and row_of.setdefault(ids[code], row) != row:
            raise ScenarioError(
                f"{rows.source}: two rows, by time number {row_of[ids[code]] + 1:,} and {row + 1:,} of those used, have"
                f" the id {ids[code]!r}, so that nothing says which is waited for. Correct it, or write trace.replay:"
                " as_recorded."
            )
    lists: list[list[str]] = [json.loads(text) for text in rows.texts["parent"]]
    parents: list[tuple[int, ...]] = []
    lost: list[str] = []
    later: list[str] = []
    for row, code in enumerate(rows.labels["parent"].tolist()):
        asked = [] if code == NOT_TOLD else lists[code]
        row_by_name = {row_of[each]: each for each in reversed(asked) if each in row_of}
        before = tuple(each for each in reversed(row_by_name) if each < row)
        lost += [each for each in asked if each not in row_of]
        later += [name for each, name in reversed(row_by_name.items()) if each >= row]
        parents.append(before)
    notes: list[str] = []
    if lost:
        notes.append(f"{len(lost):,} parents are no row that is used, the first {lost[0]!r}: not waited for")
    if later:
        notes.append(
            f"{len(later):,} parents arrived no sooner than the row that names them, the first {later[0]!r}: not waited"
            " for"
        )
    return parents, notes
