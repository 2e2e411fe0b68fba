"""A client with one list of requests and a limit on those in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from batchsim.kernel.types import Arrival, Request
from batchsim.workload.open_loop import ClientOfList, OpenWorkload
from batchsim.workload.request_columns import Describe, RequestColumns, RequestSampler
from batchsim.workload.traces.trace_rows import Ints
from batchsim.workload.workload_config import WorkloadConfig


@dataclass
class LimitedClient(ClientOfList):
    """The requests of `listed` in its order, at most `limit` in flight; request id = row of the list.

    The first `limit` are sent at the times of the list. Each that ends lets the next one go: it is sent `think_ns` of
    its row after the answer reached the client, but not before the list's time. `arrivals()` begins anew, so one run
    at a time. `users`: the list belongs to users of a closed loop, and its times are theirs alone; else they are the
    intended times, and `sent_ns` of the records is later where a request waited at the client.
    """

    limit: int
    think_ns: Ints | None = None
    users: bool = False
    _num_sent: int = field(default=0, init=False)

    def arrivals(self) -> Iterator[Arrival]:
        """The first requests of the list, as many as may be in flight, by (arrival_ns, id)."""
        self._num_sent = min(self.limit, len(self.listed.sent_ns))
        sent_ns = self.listed.sent_ns[: self._num_sent]
        self._last_sent_ns = int(sent_ns.max())
        for row in np.argsort(self.listed.arrival_ns[: self._num_sent], kind="stable").tolist():
            yield self.listed.sent_at(row, int(sent_ns[row]))

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        """The next request of the list, which `request`, ended at `now_ns`, lets go; None where it is at its end."""
        row = self._num_sent
        if row >= len(self.listed.sent_ns):
            return None
        self._num_sent += 1
        free_ns = now_ns + self.frontend.per_chunk + (0 if self.think_ns is None else int(self.think_ns[row]))
        sent_ns = max(free_ns, int(self.listed.sent_ns[row]))
        self._last_sent_ns = max(self._last_sent_ns, sent_ns)
        return self.listed.sent_at(row, sent_ns)


def limited(listed: OpenWorkload, limit: int) -> LimitedClient:
    """The requests of `listed` from a client that has at most `limit` in flight."""
    text = f"{listed.describe['text']}, at most {limit:,} in flight"
    return LimitedClient(replace(listed, describe=listed.describe | {"text": text, "max_concurrency": limit}), limit)


def shared_list(
    config: WorkloadConfig,
    users: int,
    waits_ns: Ints,
    requests: RequestColumns,
    source: RequestSampler,
    notes: tuple[str, ...],
    describe: Describe,
    seed: int,
) -> LimitedClient:
    """A closed loop of `users` users, each taking the next of `requests` when free.

    `waits_ns`: before each of the first, when its user begins; of the others, the think time before it is sent.
    """
    frontend = config.frontend
    sent_ns = np.where(np.arange(len(requests)) < users, waits_ns, 0)
    listed = OpenWorkload(
        sent_ns=sent_ns,
        arrival_ns=sent_ns + (frontend.request + frontend.per_prompt_token * requests.prompt_tokens),
        requests=requests,
        source=source,
        window_ns=(config.warmup, 0),
        all_at_once=False,
        notes=notes,
        describe=describe,
        frontend=frontend,
        seed=seed,
    )
    return LimitedClient(listed, users, think_ns=waits_ns, users=True)
