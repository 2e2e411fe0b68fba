"""What a campaign says of the executor's speed, on a profile whose kernels are those of public tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchsim.cost.profile import HostTerm, Profile, load_profile
from tools.campaign.targets import line, targets

CEILINGS = {"matmul_flops": 700e12}


def profile(host_ms: float, **changes: object) -> Profile:
    shipped = load_profile("h200-llama-3.1-8b-aiconfigurator")
    host = HostTerm(host_ms * 1e6, 0.0, 0.0, "serial", assumed=False)
    return replace(shipped, costs=replace(shipped.costs, host=host), **changes)


def verdicts(of: Profile, ceilings: dict[str, float] = CEILINGS) -> list[bool | None]:
    return [row["met"] for row in targets(of, ceilings)]


def test_kernels_as_the_tables_say_meet_all() -> None:
    """5 ms of weights, 13 ms with 256 contexts of 1024, a prefill near the ceiling, and hardly any host."""
    rows = targets(profile(0.1), CEILINGS)
    assert [row["met"] for row in rows] == [True] * 4
    assert [row["bound"] for row in rows] == pytest.approx([5.5, 16, 60, 15])
    assert line(rows[0]).startswith("decode of 1 at context 1024: ") and line(rows[0]).endswith("at most 5.5 ms: met")


def test_what_is_slow_is_not_met() -> None:
    """Much host time spoils the small decode and its share, a higher ceiling the prefill's share."""
    assert verdicts(profile(1.2)) == [False, True, True, False]
    assert verdicts(profile(0.1), {"matmul_flops": 1400e12}) == [True, True, False, True]
    assert "NOT MET" in line(targets(profile(1.2), CEILINGS)[0])


def test_bounds_in_ms_are_of_one_card_and_model() -> None:
    """On another card the times are said without a verdict, and what was not measured is not said."""
    assert verdicts(profile(0.1, gpu="h100"))[:2] == [None, None]
    small = profile(0.1)
    rows = targets(replace(small, hull=replace(small.hull, max_sequences=100)), CEILINGS)
    assert len(rows) == 3 and "256" not in "".join(map(line, rows))
