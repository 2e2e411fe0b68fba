"""Examples that arrive: windows, the clock of steps, ages, by hand and by law."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchsim.training.lengths import DrawnLengths, example_lengths
from batchsim.training.load import load_training, run_training
from batchsim.training.stream import Cut, arrivals_s, stream_times, windows
from batchsim.workload.laws import FixedTokens
from tests.support.training import run, scenario

ARRIVALS = [0.0, 1.0, 2.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (Cut(2, None), [(range(2), 1.0), (range(2, 4), 6.0), (range(4, 5), 7.0)]),
        (Cut(9, None), [(range(5), 7.0)]),
        (Cut(None, 2.0), [(range(3), 2.0), (range(3, 5), 8.0)]),
        (
            Cut(None, 0.5),
            [(range(1), 0.5), (range(1, 2), 1.5), (range(2, 3), 2.5), (range(3, 4), 6.5), (range(4, 5), 7.5)],
        ),
    ],
)
def test_a_window_closes_when_full_or_when_time_is_up(cut: Cut, expected: list[tuple[range, float]]) -> None:
    """A full one with its last arrival; one by time so long after its first example, one that comes then included."""
    assert list(windows(ARRIVALS, cut)) == expected


def test_a_step_waits_for_its_window_and_for_the_one_before() -> None:
    """Two steps of 3 s, ready at 1 and at 2: the second begins at 4; ages count from arrival to the start."""
    times = stream_times(ARRIVALS, [1.0, 2.0], [3.0, 3.0], [[0, 1], [2]])
    assert (times.starts_s, times.ends_s) == ([1.0, 4.0], [4.0, 7.0])
    assert (times.ages_s, times.step_ages_s) == ([1.0, 0.0, 2.0], [0.5, 2.0])
    assert times.behind == [1, 2]  # 2.0 by 4 s, 6.0 and 7.0 by 7 s
    assert (times.idle_s, times.left) == (1.0, 0)
    late = stream_times(ARRIVALS, [7.0, 7.0], [1.0, 1.0], [[0, 1], [2]])
    assert (late.idle_s, late.left) == (7.0, 1)


def test_arrivals_are_poisson_and_keyed(tmp_path: Path) -> None:
    """Gaps of the mean that the rate says and as much spread; the same for a seed, whatever comes after."""
    gaps = np.diff([0.0, *arrivals_s(20.0, 20_000, 5)])
    assert gaps.mean() == pytest.approx(0.05, rel=0.03) and gaps.std() == pytest.approx(0.05, rel=0.03)
    assert arrivals_s(20.0, 9, 5) == arrivals_s(20.0, 20, 5)[:9] != arrivals_s(20.0, 9, 6)


def test_the_mean_age_in_a_window_is_half_of_its_time(tmp_path: Path) -> None:
    """A window of W examples at rate r, all in one step of next to no time: ages are (W − 1)/2r in the mean."""
    stream = {"rate": "10/s", "windows": [100]}
    packer, lengths = {"kind": "torchtune.packed"}, [1] * 10_000
    result = run(tmp_path, lengths, packer, capacity=100, micro_batch=1, stream=stream)
    assert len(result.steps) == 100 and result.figures["fill"] == 1
    assert result.figures["age_mean_s"] == pytest.approx(99 / 20, rel=0.04)
    assert (result.figures["behind"] or 0) < 0.05 and result.figures["left"] == 0
    assert result.figures["idle"] == pytest.approx(1, abs=0.01)


def test_each_window_and_timeout_is_an_epoch(tmp_path: Path) -> None:
    """Labels name it; larger windows fill better and are older."""
    stream = {"rate": "100/s", "windows": [10, 200], "timeouts": ["1s"]}
    lengths = np.random.default_rng(1).integers(1, 60, 2000).tolist()
    runs = run_training(scenario(tmp_path, lengths, {"kind": "trl.bfd"}, capacity=100, stream=stream))
    assert [each.label for each in runs] == ["p, 10", "p, 200", "p, 1 s"]
    ages = [each.figures["age_mean_s"] or 0 for each in runs]
    fills = [each.figures["fill"] or 0 for each in runs]
    assert ages[0] < ages[2] < ages[1] and fills[0] < fills[2] < fills[1]


def test_a_stream_that_outruns_the_trainer_is_behind(tmp_path: Path) -> None:
    """Half as many tokens a second as come: half of the examples are left when the last one arrives."""
    stream = {"rate": "1000/s", "windows": [10]}
    cost = {"kind": "linear", "base": "0s", "per_token": "20us"}
    result = run(tmp_path, [100] * 2000, {"kind": "torchtune.packed"}, capacity=100, cost=cost, stream=stream)
    assert result.figures["left"] == pytest.approx(0.5, abs=0.03)
    assert (result.figures["idle"] or 0) < 0.02


def test_lengths_drift_from_one_law_to_another() -> None:
    """The last examples are of the second law, half of those in the middle."""
    law = DrawnLengths(FixedTokens(10), 10_000, drift_to=FixedTokens(20))
    lengths = np.array(example_lengths(law, [Path()], 0))
    assert (lengths[:100].mean(), lengths[-100:].mean()) == (pytest.approx(10, abs=0.5), pytest.approx(20, abs=0.5))
    assert lengths[4500:5500].mean() == pytest.approx(15, abs=0.5)


@pytest.mark.slow
def test_the_shipped_stream_falls_behind_where_rows_are_not_full() -> None:
    """Best fit keeps up with examples that grow longer, next fit does not."""
    figures = {each.label: each.figures for each in run_training(load_training("stream"))}
    assert (figures["next fit, 50"]["age_p99_s"] or 0) > 5 * (figures["best fit, 50"]["age_p99_s"] or 9)
    assert (figures["best fit, 1,000"]["fill"] or 0) > (figures["best fit, 50"]["fill"] or 1) + 0.03
