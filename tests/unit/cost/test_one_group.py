"""The cost of one attention group of several: with the experts of all it is that of even groups, and the slowest group
decides where they are not even."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchsim.cost.calibrated import Calibrated
from batchsim.cost.one_group import of_one_group
from batchsim.cost.profile import load_profile
from batchsim.drive.fleet.lockstep.rank_costs import RankCosts
from batchsim.kernel.batch import Batch
from tests.unit.cost.test_cost import step

PROFILE = "deepseek-r1-h200-vllm-0.24.0-ep8-dp8-fp8_block"
GROUPS = 8
EVEN = {
    "decodes": ([1_200] * 32, []),
    "a_prompt": ([], [(0, 1_000)]),
    "prompts": ([], [(0, 300), (0, 500), (0, 200)]),
    "a_chunk_after_a_prefix": ([], [(4_096, 512)]),
    "both": ([700] * 16, [(0, 900)]),
}
"""Of each group: contexts of its decodes, and (tokens before, new tokens) of its chunks."""


@pytest.fixture(scope="module")
def whole() -> Calibrated:
    return Calibrated(load_profile(PROFILE))


@pytest.fixture(scope="module")
def own(whole: Calibrated) -> Calibrated:
    return of_one_group(whole)


@pytest.mark.parametrize("case", EVEN)
def test_even_groups_take_what_the_profile_says_of_all(whole: Calibrated, own: Calibrated, case: str) -> None:
    """To the ns that rounding takes."""
    decodes, chunks = EVEN[case]
    batches = [step(decodes, chunks) for _ in range(GROUPS)]
    together = step(decodes * GROUPS, chunks * GROUPS)
    ns = RankCosts(own.without_host().step_ns, [], own.experts_ns).pass_ns(batches)
    assert ns == pytest.approx(whole.without_host().step_ns(together), abs=2)


def test_of_uneven_groups_the_slowest_decides_and_experts_count_all_tokens(own: Calibrated) -> None:
    """A prompt on one group, decodes on another, and dummies of a token on the rest."""
    own = own.without_host()
    prompt, decodes = step([], [(0, 2_000)]), step([900] * 8, [])
    batches: list[Batch | None] = [prompt, decodes, *[None] * (GROUPS - 2)]
    experts_ns = int(own.experts_ns(2_000 + 8 + GROUPS - 2, decodes=False))
    assert RankCosts(own.step_ns, [], own.experts_ns).pass_ns(batches) == own.step_ns(prompt) + experts_ns
    assert own.step_ns(prompt) > own.step_ns(decodes)


def test_padding_counts_the_experts_of_the_padded_tokens(own: Calibrated) -> None:
    """All groups are padded to the size that holds the fullest one."""
    own = own.without_host()
    costs = RankCosts(own.step_ns, [1, 2, 4, 8, 16], own.experts_ns)
    full, one = step([500] * 9, []), step([500], [])
    pass_ns = costs.pass_ns([full, one, *[None] * (GROUPS - 2)])
    padded_ns, asked_ns = (int(own.experts_ns(n, decodes=True)) for n in (16 * GROUPS, 9 + 1 + GROUPS - 2))
    assert padded_ns > asked_ns
    assert costs.shares[1].padding_ns >= padded_ns - asked_ns
    assert pass_ns == max(share.own_ns for share in costs.shares) > padded_ns


def test_a_profile_without_experts_apart_is_refused(whole: Calibrated) -> None:
    plain = replace(whole.profile, costs=replace(whole.profile.costs, experts=None))
    with pytest.raises(ValueError, match="does not hold experts apart"):
        of_one_group(whole.of(plain))


def test_a_group_reaches_as_far_as_its_share(whole: Calibrated, own: Calibrated) -> None:
    """Of sequences and tokens; a context is a request's own."""
    assert own.profile.hull.max_sequences == whole.profile.hull.max_sequences // GROUPS
    assert own.profile.hull.max_tokens == whole.profile.hull.max_tokens // GROUPS
    assert own.profile.hull.max_context == whole.profile.hull.max_context
