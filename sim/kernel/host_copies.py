"""Copies of KV between a GPU and the memory of its host that a scheduler makes itself, as SGLang's HiCache does.

1. Each direction is a link that makes one copy after another. What is to be stored is gathered and goes as one copy,
   once the device is through with all steps in flight. The scheduler asks at each of its calls what is over.
2. Loads run beside the step that was scheduled with them (`kernel/host_link.py`).
3. What is written back must be stored before the call goes on: the host stands still, and launches the step of that
   call so much later.

Source: python/sglang/srt/managers/cache_controller.py and mem_cache/unified_radix_cache.py of the 0.5.23 wheel.
"""

from __future__ import annotations

from collections import deque

from batchsim.kernel.host_link import LayerLoad, OffloadLink
from batchsim.kernel.in_flight import StepsInFlight
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.offload import NoPeers
from batchsim.kernel.record import STORE_FLUSH, TIER_STORE, Recorder
from batchsim.kernel.types import Sequence

Part = tuple[int, int, int]
"""What is stored of one request: its id, tokens, pages."""


class HostCopies(KvConnector):
    """The copies of one engine. `attach` it to that before the first step."""

    def __init__(self, storing: OffloadLink, loading: OffloadLink, num_layers: int) -> None:
        super().__init__(NoPeers())
        self.leaps = "scheduler"
        self._storing, self._loading, self._num_layers = storing, loading, num_layers
        self._recorder: Recorder | None = None
        self._in_flight: StepsInFlight | None = None
        self._gathered: list[Part] = []
        self._stores: deque[tuple[int, int, int]] = deque()  # under way: number, end, a request's id
        self._loads: deque[LayerLoad] = deque()
        self._made = 0
        self._called_ns = self._still_until_ns = 0
        self._waits_since_ns: int | None = None

    def attach(self, recorder: Recorder, in_flight: StepsInFlight) -> None:
        """Makes these the copies of the engine whose records and steps in flight these are."""
        self._recorder, self._in_flight = recorder, in_flight

    @property
    def is_busy(self) -> bool:
        """Whether anything is being stored or loaded."""
        return bool(self._gathered or self._stores or self._loads)

    @property
    def next_end_ns(self) -> int | None:
        """When the next copy under way is over, in ns; None without any."""
        ends = [self._stores[0][1]] if self._stores else []
        if self._loads:
            ends.append(self._loads[0].end_ns)
        return min(ends, default=None)

    def called(self, now_ns: int) -> tuple[list[int], list[LayerLoad]]:
        """Notes that the scheduler is called; returns the numbers of the stores, and the loads, that are over by now
        and were not returned before."""
        self._called_ns = now_ns
        if self._waits_since_ns is not None:
            self._write_idle(self._waits_since_ns, now_ns, self._stores[0][2] if self._stores else None)
            self._waits_since_ns = None
        stored: list[int] = []
        loaded: list[LayerLoad] = []
        while self._stores and self._stores[0][1] <= now_ns:
            stored.append(self._stores.popleft()[0])
        while self._loads and self._loads[0].end_ns <= now_ns:
            loaded.append(self._loads.popleft())
        return stored, loaded

    def gather(self, part: Part) -> None:
        """Puts `part` to what is stored next."""
        self._gathered.append(part)

    def submit(self, now_ns: int) -> int | None:
        """Begins to store what was gathered; returns the number of that copy, None where nothing was."""
        if not self._gathered:
            return None
        end_ns = self._store(self._gathered, now_ns)
        self._stores.append((self._made, end_ns, self._gathered[0][0]))
        self._gathered = []
        self._made += 1
        return self._made - 1

    def load(self, parts: list[tuple[Sequence, int]], num_pages: int) -> LayerLoad:
        """A copy of `num_pages` pages to the GPU beside the step that is being scheduled. `parts`: (sequence, tokens
        copied for it)."""
        load = LayerLoad(parts, num_pages, self._loading, self._num_layers)
        self._loads.append(load)
        return load

    def write_back(self, parts: list[Part], now_ns: int) -> int:
        """Stores each of `parts` by itself, before the scheduler's call of `now_ns` goes on; returns when it does, in
        ns."""
        for part in parts:
            idle_ns = max(self._still_until_ns, now_ns, self._computed_ns)
            self._still_until_ns = self._store([part], idle_ns)
            self._write_idle(idle_ns, self._still_until_ns, part[0])
        return max(self._still_until_ns, now_ns)

    def wait(self, now_ns: int) -> None:
        """Notes that requests run but no step is made at `now_ns`, since pages are short until KV is stored."""
        if not self._computed_ns:
            self._waits_since_ns = now_ns

    def before_launch(self, now_ns: int, computed_ns: int) -> int:
        return now_ns + max(self._still_until_ns - self._called_ns, 0)

    def launched(self, now_ns: int, computed_ns: int = 0) -> None:
        """Does nothing: what is over is asked by the scheduler's calls."""

    @property
    def _computed_ns(self) -> int:
        return 0 if self._in_flight is None else self._in_flight.computed_ns

    def _store(self, parts: list[Part], now_ns: int) -> int:
        ready_ns = max(now_ns, self._computed_ns)
        _, end_ns = self._storing.take(sum([pages for _, _, pages in parts]), ready_ns)
        if self._recorder is not None:
            for request_id, tokens, _ in parts:
                self._recorder.state(now_ns, request_id, TIER_STORE, "host", tokens)
        return end_ns

    def _write_idle(self, since_ns: int, until_ns: int, request_id: int | None) -> None:
        if self._recorder is not None and request_id is not None and until_ns > since_ns:
            self._recorder.state(since_ns, request_id, STORE_FLUSH, "", until_ns - since_ns)
