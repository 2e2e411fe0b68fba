"""The policies of examples/, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode."""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.named_policy import find_policy
from examples.learn_steps import BUDGETS, HERE, SCALES, Learned, LearnedConfig, choice
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


LEARNED: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8192, "budgets": BUDGETS, "caps": (4,)}


def test_a_trained_agent_squeezes_a_line_into_a_place_of_the_budgets() -> None:
    """Without weights the middle one; an offset of -0.85 is the second; behind a long wait the last."""
    still = [0.0] * len(SCALES)
    assert [choice([*still, offset], [0.0] * 14)[0] for offset in (-40.0, -0.85, 0.0, 40.0)] == [0, 1, 2, 4]
    by_age = [0.0, 3.0, *still[2:], -0.85]
    assert [choice(by_age, [0.0, age, *still[2:]])[0] for age in (0.0, 1.0, 3.0)] == [1, 2, 4]


def test_the_trained_agent_of_the_examples_runs_under_every_driver() -> None:
    """By its import path, with the weights that lie beside it."""
    config, policy = find_policy("examples.learn_steps:Learned", allow_code=True)
    assert (config, policy) == (LearnedConfig, Learned)
    assert (HERE / "learned_steps.json").exists()
    arrivals = requests("0:40->9 1:30->3 40:50->5 41:60->2 500:9->3")
    result = run_every_way(policy, config(**LEARNED, every=50), arrivals)
    assert sum(n for items in result.items for _, n in items) == 40 + 30 + 50 + 60 + 9 + (8 + 2 + 4 + 1 + 2)


def test_weights_that_are_not_there_are_an_error_in_a_line() -> None:
    with pytest.raises(ScenarioError, match=r"no such file of weights. Make it: python examples/learn_steps.py train"):
        Learned(LearnedConfig(**LEARNED, weights="none.json"), PolicyContext(CountingKV(9, 4), 64))
