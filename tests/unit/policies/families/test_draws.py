"""Draws by a key: the published sequence, and the laws of what is made of it."""

from __future__ import annotations

from statistics import fmean, pstdev

from batchsim.policies.families.draws import Draws


def test_the_bits_are_those_of_splitmix64() -> None:
    """The first outputs of the reference implementation for the seed 0, and another key draws otherwise."""
    draws = Draws(0)
    assert [draws.bits(), draws.bits(), draws.bits()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert Draws(1).bits() != 0xE220A8397B1DCDAF


def test_uniform_and_normal_draws_have_their_moments() -> None:
    """Of 4,000 draws, within four standard errors."""
    draws = Draws(7)
    uniform = [draws.uniform() for _ in range(4000)]
    assert 0 < min(uniform) < max(uniform) < 1
    assert abs(fmean(uniform) - 0.5) < 4 * 0.2887 / 4000**0.5
    normal = [draws.normal(0.1, 0.05) for _ in range(4000)]
    assert abs(fmean(normal) - 0.1) < 4 * 0.05 / 4000**0.5
    assert abs(pstdev(normal) - 0.05) < 4 * 0.05 / 8000**0.5
