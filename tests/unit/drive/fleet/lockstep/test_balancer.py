"""A client's choice by hand; vllm/v1/engine/core_client.py of vLLM 0.33.0, `get_core_engine_for_request`."""

from __future__ import annotations

import pytest

from batchsim.drive.fleet.lockstep.balancer import Balancer
from batchsim.drive.fleet.lockstep.coordinator import RankLoad


def test_equal_loads_are_taken_in_turn() -> None:
    """The scan begins one rank later each time, and the first smallest wins."""
    balancer = Balancer(3)
    assert [balancer.choose(None).rank for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_choice_counts_until_the_next_news_and_shows_what_it_was_made_by() -> None:
    """A request that was sent waits, as far as its client knows; it is in flight until it is answered."""
    balancer = Balancer(2)
    balancer.loads = [RankLoad(0, 3, 0.1), RankLoad(0, 1, 0.1)]
    choice = balancer.choose(None)
    assert (choice.rank, choice.first) == (1, 0)
    assert choice.loads == [RankLoad(0, 3, 0.1), RankLoad(0, 1, 0.1)]
    assert choice.in_flight == [0, 0]
    assert balancer.loads[1] == RankLoad(1, 1, 0.1)
    assert balancer.in_flight == [0, 1]


def test_own_requests_in_flight_outweigh_older_news() -> None:
    """A rank that is said to be empty has three of the client's own."""
    balancer = Balancer(2)
    balancer.in_flight = [3, 1]
    balancer.loads = [RankLoad(0, 0, 0.0), RankLoad(0, 2, 0.0)]
    assert balancer.choose(None).rank == 1


def test_requests_that_wait_weigh_more_on_a_full_rank() -> None:
    """2 waiting at 0.9 of the KV blocks: 2 + 6 x 2 x 0.4 = 6.8, more than the other rank's 6; at half only 2."""
    balancer = Balancer(2)
    balancer.loads = [RankLoad(2, 0, 0.9), RankLoad(0, 6, 0.9)]
    assert balancer.choose(None).rank == 1
    balancer = Balancer(2)
    balancer.loads = [RankLoad(2, 0, 0.5), RankLoad(0, 6, 0.9)]
    assert balancer.choose(None).rank == 0


def test_a_request_that_names_its_rank_goes_there_and_moves_nothing_else() -> None:
    """Neither the copy of the loads nor the beginning of the scan."""
    balancer = Balancer(2)
    assert balancer.choose(1).rank == 1
    assert (balancer.in_flight, balancer.loads[1]) == ([0, 1], RankLoad(0, 0, 0.0))
    assert balancer.choose(None).first == 0


@pytest.mark.parametrize(("client", "rank"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_several_clients_begin_at_different_ranks(client: int, rank: int) -> None:
    """Client i of 4 begins at rank floor(4 i / 4); it counts each of its own as one of every client's."""
    balancer = Balancer(4, 4, client)
    assert balancer.choose(None).rank == rank
    assert balancer.loads[rank] == RankLoad(4, 0, 0.0)
