"""FLOPs of a training step against numbers worked out for a model of 8 billion parameters."""

from __future__ import annotations

import pytest

from batchsim.training.flops import Shape, attention, counted, done, palm

SHAPE = Shape(8.03e9, 32, 4096)
DOCUMENTS = [1024, 2048, 512, 4608]
SQUARES = sum(length**2 for length in DOCUMENTS)


def test_flops_of_documents_behind_a_mask() -> None:
    """6·N·T and 6·L·h·S2, the sum of squares of documents; padded and unmasked rows have squares of rows."""
    assert SQUARES == 26_738_688
    assert counted(SHAPE, 8192, 0) == pytest.approx(3.946906e14, rel=1e-6)
    assert attention(SHAPE, SQUARES) == pytest.approx(2.102816e13, rel=1e-6)
    assert counted(SHAPE, 8192, SQUARES) == pytest.approx(4.157187e14, rel=1e-6)
    assert counted(SHAPE, 4 * 4608, 4 * 4608**2) == pytest.approx(9.548491e14, rel=1e-6)
    assert attention(SHAPE, 8192**2) == pytest.approx(5.277656e13, rel=1e-6)


def test_equal_full_rows_differ_by_their_squares() -> None:
    """One document of 8192 tokens costs 9.7 % more than four of 2048."""
    whole, parts = counted(SHAPE, 8192, 8192**2), counted(SHAPE, 8192, 4 * 2048**2)
    assert (whole, parts) == (pytest.approx(4.474671e14, rel=1e-6), pytest.approx(4.078847e14, rel=1e-6))
    assert whole / parts - 1 == pytest.approx(0.097, abs=5e-4)


def test_palms_convention_counts_attention_twice() -> None:
    """12·L·h·S2, without the causal halving."""
    assert palm(SHAPE, 8192, SQUARES) - counted(SHAPE, 8192, SQUARES) == pytest.approx(attention(SHAPE, SQUARES))


def test_what_is_done_is_more_than_what_is_counted() -> None:
    """FlashAttention's backward is 2.5 forwards, recomputation is a forward more, LoRA leaves a third out."""
    plain = done(SHAPE, 8192, SQUARES, flash=False, recompute=False, lora=False)
    assert sum(plain) == pytest.approx(counted(SHAPE, 8192, SQUARES))
    flash = done(SHAPE, 8192, SQUARES, flash=True, recompute=False, lora=False)
    assert flash == (plain[0], pytest.approx(plain[1] * 7 / 6))
    again = done(SHAPE, 8192, SQUARES, flash=False, recompute=True, lora=False)
    assert again == (pytest.approx(plain[0] * 8 / 6), pytest.approx(plain[1] * 8 / 6))
    assert done(SHAPE, 8192, 0, flash=True, recompute=False, lora=True)[0] == pytest.approx(plain[0] * 4 / 6)
