"""Ranks that wait for each other, by hand: pipelines, DDP and FSDP."""

from __future__ import annotations

import numpy as np
import pytest

from batchsim.training.waiting import asynchronous, ddp, fsdp, one_forward_one_backward

RANKS = [[3, 1, 2], [1, 1, 5], [2, 2, 2]]


def test_a_pipeline_of_equal_micro_batches_has_its_bubble() -> None:
    """m micro-batches of t on p stages take (m + p − 1)·t."""
    for stages, count in ((4, 8), (1, 3), (4, 2), (2, 1)):
        assert one_forward_one_backward([3.0] * count, stages) == pytest.approx((count + stages - 1) * 3)


@pytest.mark.parametrize(
    ("times", "end"),
    [
        ([3, 6, 9, 12, 15, 18, 21, 24], 160),
        ([24, 21, 18, 15, 12, 9, 6, 3], 162),
        ([6, 12, 18, 24, 21, 15, 9, 3], 149),  # small ones at both ends, as verl orders them
        ([24, 18, 12, 6, 3, 9, 15, 21], 213),
    ],
)
def test_the_order_of_unequal_micro_batches_counts(times: list[float], end: float) -> None:
    """Of the same micro-batches the order with small ones at both ends takes least."""
    assert one_forward_one_backward(times, 4) == pytest.approx(end)


def test_a_send_is_paid_at_every_hop() -> None:
    """One micro-batch on two stages: forward, send, forward, backward, send, backward."""
    assert one_forward_one_backward([3.0], 2, send=0.5) == pytest.approx(1 + 0.5 + 1 + 2 + 0.5 + 2)


def test_staleness_by_hand() -> None:
    """Updates of 2 2 2 and 3 3, at 2, 3, 4 and both at 6, the first worker's first: it has read all, the other not."""
    both = asynchronous([[2, 2, 2], [3, 3]])
    assert (both.end, both.staleness) == (6, [0, 1, 1, 0, 2])
    assert asynchronous([[2, 2, 2], []]).staleness == [0, 0, 0]


def test_mean_staleness_is_the_number_of_others() -> None:
    """n − 1 whatever the speeds: between reading and update of each come, in the mean, all others once."""
    rng = np.random.default_rng(3)
    for speeds in ([1.0] * 5, [1.0, 1.3, 2.0, 2.5, 4.0]):
        times = [rng.uniform(0.5, 1.5, int(3000 / speed)) * speed for speed in speeds]
        assert np.mean(asynchronous([each.tolist() for each in times]).staleness) == pytest.approx(4, rel=0.01)


def test_a_bound_holds_the_fast_ones_back() -> None:
    """Without lead all go in turn, as slow as the slowest; with a lead of s a worker is at most s + 1 updates ahead."""
    times = [[1.0] * 6, [4.0] * 6]
    assert asynchronous(times).end == 24
    tied = asynchronous(times, 0)
    assert (tied.end, max(tied.staleness)) == (24, 1)
    assert max(asynchronous(times, 2).staleness) == 3
    assert max(asynchronous(times).staleness) == 4


def test_ranks_meet_once_a_step_or_at_every_micro_batch() -> None:
    """DDP waits for the largest sum, FSDP for the largest of each micro-batch."""
    assert (ddp(RANKS), fsdp(RANKS)) == (7, 3 + 2 + 5)
    with pytest.raises(ValueError, match="zip"):
        fsdp([[1, 2], [1]])
