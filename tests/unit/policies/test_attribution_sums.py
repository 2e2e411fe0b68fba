"""For every registered policy and both drivers: the parts and the chapters of every life sum to its E2E."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchsim.policies.registry import POLICIES
from tests.conformance.runs import built, cases
from tests.conformance.test_conformance import random_cases
from tests.support.life_sums import check_lives

MANY = random_cases(40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
@MANY
@given(data=st.data())
def test_parts_and_chapters_sum_to_the_life_on_both_drivers(kind: str, data: st.DataObject) -> None:
    """Far more often than the conformance tests ask it."""
    case = data.draw(cases(kind))
    assume(built(case))
    check_lives(case.simulate().recorder.records())
    check_lives(case.live().recorder.records())
