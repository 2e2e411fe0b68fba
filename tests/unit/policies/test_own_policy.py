"""The policy of examples/, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode."""

from __future__ import annotations

from typing import Any

import pytest

from examples.own_policy import ShortestFirst, ShortestFirstConfig
from tests.support.stepping import Run, run_every_way
from tests.support.whole_batches import blocked, requests


def shortest(arrivals: str, **knobs: Any) -> Run:
    config = ShortestFirstConfig(max_num_seqs=1, max_num_batched_tokens=100, **knobs)
    return run_every_way(ShortestFirst, config, requests(arrivals))


@pytest.mark.parametrize(("patience", "second"), [(26, (2, 3)), (25, (1, 9))])
def test_the_shortest_prompt_goes_first_unless_another_has_waited_for_so_long(
    patience: int, second: tuple[int, int]
) -> None:
    """The slot is empty at 26, where request 1 has waited for 25 ns: it goes before the shorter one if that is late."""
    result = shortest("0:4->2 1:9->1 2:3->1", patience=patience)
    assert [row.start_ns for row in result.log][:3] == [0, 14, 26]
    assert result.items[2] == [second]


def test_equal_prompts_go_in_the_order_of_arrival() -> None:
    assert shortest("0:4->1 2:5->1 1:5->1 3:2->1").items == [[(0, 4)], [(3, 2)], [(2, 5)], [(1, 5)]]


def test_who_is_stopped_changes_when_patience_ends_between_two_equal_steps() -> None:
    """Decodes start at 14, 26, 38, 50: request 2, the shorter, is next up to 38, request 1 from 41 on, and runs at 74.
    Leaping says the same, so `repeat` refuses while somebody waits."""
    events = blocked(shortest("0:4->6 1:9->1 2:3->1", patience=40).records)
    assert events == [(14, 2, "no_slot"), (50, 1, "no_slot"), (74, 2, "no_slot")]
