"""Energy-aware batching, by hand: a step takes 10 ns, 1 more a prefill token, 2 a decode; a KV block holds 4 tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.policies.families.energy_aware import EnergyAware, EnergyAwareConfig
from batchsim.policies.families.gated import Gated, GatedConfig
from tests.support.stepping import Run, run, run_every_way
from tests.support.whole_batches import blocked, requests

POWER = {"power_budget": 100.0, "step_power": 200.0, "idle_power": 50.0}


def aware(arrivals: str, **knobs: Any) -> Run:
    return run_every_way(EnergyAware, EnergyAwareConfig(**knobs), requests(arrivals))


def starts(done: Run) -> list[int]:
    return [row.start_ns for row in done.log]


def test_an_idle_engine_waits_for_the_control_limit() -> None:
    """The first of two comes at 0 and starts with the second, at 5; while they run the third waits for the gate."""
    result = aware("0:4->2 5:4->1 6:4->1 7:4->1", control_limit=2, max_hold=100)
    assert result.items == [[(0, 4), (1, 4)], [(0, 1)], [(2, 4), (3, 4)]]
    assert starts(result) == [5, 23, 35]
    assert blocked(result.records) == [(0, 0, "batch_window"), (23, 2, "gate")]


@pytest.mark.parametrize(("hold", "first", "together"), [(4, 4, False), (5, 5, True)])
def test_the_oldest_waits_max_hold_at_most(hold: int, first: int, together: bool) -> None:
    """Under a limit of 3 the first is held until 4, alone, or until 5, when the second is there too."""
    result = aware("0:4->1 5:4->1 99:4->1", control_limit=3, max_hold=hold)
    assert starts(result)[0] == first
    assert (len(result.items[0]) == 2) is together


def test_who_waited_max_hold_while_others_ran_starts_at_once() -> None:
    """The second comes at 5 and waits for the gate until 30: longer than 20 already."""
    assert starts(aware("0:4->2 25:4->1 99:4->1", control_limit=2, max_hold=4)) == [4, 18, 30, 99]


def test_a_run_that_drains_holds_nothing_back() -> None:
    """No second request will come: the only one starts at once."""
    assert starts(aware("3:4->1", control_limit=2, max_hold=100)) == [3]


def test_a_budget_lets_the_engine_rest_until_nothing_is_owed() -> None:
    """100 W are paid, a step draws 200, rest 50. The first step, of 14 ns, draws 400 nJ more than the 1,000 saved and
    the budget pay, and 8 ns of rest pay them; the next, of 12 ns, owe 1,200: 24 ns."""
    result = aware("0:4->3", window=10, **POWER)
    assert starts(result) == [0, 22, 58]


def test_what_is_saved_is_bounded_by_the_window() -> None:
    """After 1,000 ns of rest a step of 14 ns is paid by a window of 14, of 13 it owes 100 nJ: 2 ns."""
    for window, second in ((14, 1014), (13, 1016)):
        assert starts(aware("1000:4->2", window=window, **POWER)) == [1000, second]


def test_a_request_that_comes_while_energy_is_owed_waits_with_the_others() -> None:
    """It comes at 16, in the rest from 14 to 22 after the only step of another, and says why it waits."""
    result = aware("0:4->1 16:4->1", window=10, **POWER)
    assert starts(result) == [0, 22] and blocked(result.records) == [(16, 1, "power_budget")]


def test_without_a_limit_and_a_budget_it_is_gated_batching() -> None:
    arrivals = requests("0:4->2 1:4->1 26:4->1 27:4->3 27:4->1")
    plain = run(Gated, GatedConfig(max_num_seqs=2), arrivals)
    assert run(EnergyAware, EnergyAwareConfig(max_num_seqs=2), arrivals).log == plain.log


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=12))
def test_the_energy_of_any_stretch_is_the_budget_one_window_and_one_step_at_most(
    drawn: list[tuple[int, int, int]],
) -> None:
    """In nJ, of every stretch from the start of one step to the end of a later one."""
    window = 30
    text = " ".join(f"{at}:{prompt}->{output}" for at, prompt, output in sorted(drawn))
    steps = aware(text, window=window, **POWER).records.steps
    begun, ended = steps["start_ns"].tolist(), (steps["start_ns"] + steps["duration_ns"]).tolist()
    for i, start in enumerate(begun):
        for j in range(i, len(begun)):
            in_steps = sum(ended[k] - begun[k] for k in range(i, j + 1))
            drawn_nj = 200 * in_steps + 50 * (ended[j] - start - in_steps)
            last = 200 * (ended[j] - begun[j])
            assert drawn_nj <= 100 * (ended[j] - start) + 100 * window + last


MISTAKES = {
    "limit_above_slots": ({"control_limit": 9, "max_num_seqs": 8}, "control_limit 9 is above max_num_seqs 8"),
    "limit_zero": ({"control_limit": 0}, "control_limit is 0. It must be from 1"),
    "no_hold": ({"max_hold": 0}, "max_hold is 0s. It must be from 1ns"),
    "slots_above_tokens": ({"max_num_batched_tokens": 255}, "max_num_seqs 256 is above max_num_batched_tokens 255"),
    "budget_below_rest": (POWER | {"power_budget": 40.0}, "power_budget 40 W must be above idle_power 50 W"),
    "budget_of_rest": (POWER | {"power_budget": 50.0}, "must be above idle_power 50 W and at most step_power 200 W"),
    "budget_beyond_steps": (POWER | {"power_budget": 201.0}, "at most step_power 200 W"),
    "budget_without_watts": ({"power_budget": 400.0}, "power_budget, step_power and idle_power belong together"),
    "watts_without_budget": ({"step_power": 400.0}, "power_budget, step_power and idle_power belong together"),
    "power_of_nothing": ({"step_power": 0.0}, "step_power is 0W. It must be from 1W"),
    "no_window": (POWER | {"window": 0}, "window is 0s. It must be from 1ns"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_knobs_are_refused(name: str) -> None:
    knobs, expected = MISTAKES[name]
    with pytest.raises(ValueError, match=re.escape(expected)):
        EnergyAwareConfig(**knobs)
