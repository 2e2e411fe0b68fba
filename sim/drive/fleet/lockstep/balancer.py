"""Which rank a client sends a request to: that of the least load, by the client's own count and the coordinator's.

Source: vllm/v1/engine/core_client.py of the vLLM 0.33.0 wheel, `DPLBAsyncMPClient.get_core_engine_for_request`.
"""

from __future__ import annotations

from typing import NamedTuple

from batchsim.drive.fleet.lockstep.coordinator import NO_LOAD, RankLoad

KV_FROM = 0.5
"""The share of KV blocks in use from which on requests that wait weigh more."""
KV_WEIGHT = 6
"""By how much more at most each of them does, at a share of 1: half of this."""


class Choice(NamedTuple):
    """A rank, and what it was chosen by: the client's copy of the loads, its requests in flight, and the first rank
    that it looked at."""

    rank: int
    loads: list[RankLoad]
    in_flight: list[int]
    first: int


class Balancer:
    """One of `num_clients` API servers; each knows of the requests in flight its own alone."""

    def __init__(self, num_ranks: int, num_clients: int = 1, client: int = 0) -> None:
        self._num_clients = num_clients
        self.loads = [NO_LOAD] * num_ranks
        self.in_flight = [0] * num_ranks
        self._first = num_ranks * client // num_clients

    def choose(self, given: int | None) -> Choice:
        """Counts one more request to the rank that it returns, which is the `given` one if not None."""
        loads, in_flight, first = list(self.loads), list(self.in_flight), self._first
        rank = self._least_loaded() if given is None else given
        self.in_flight[rank] += 1
        return Choice(rank, loads, in_flight, first)

    def _least_loaded(self) -> int:
        count = len(self.loads)
        turns = [(self._first + i) % count for i in range(count)]
        rank = min(turns, key=self._load_of)
        load = self.loads[rank]
        self.loads[rank] = load._replace(waiting=load.waiting + self._num_clients)
        self._first = (self._first + 1) % count
        return rank

    def _load_of(self, rank: int) -> float:
        waiting, running, kv_usage = self.loads[rank]
        load = max(self._num_clients * self.in_flight[rank], waiting + running)
        return load + KV_WEIGHT * waiting * max(0.0, kv_usage - KV_FROM) if waiting else load
