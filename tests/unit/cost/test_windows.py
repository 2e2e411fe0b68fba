"""Layers with a window cost what the contexts within it cost, one by one, and recurrent layers what their states do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchsim.base.errors import CalibrationError
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.interpolation import Curve, Grid
from batchsim.cost.profile import ChunkGrid, Profile, Recurrence, StepCosts, WindowedAttention
from batchsim.cost.work import columns_of
from tests.unit.cost.test_cost import step
from tests.unit.cost.test_profile import COSTS, PROFILE

WINDOW = 1_000
DECODES = Grid((1, 64), (100.0, 1_000.0), ((1e5, 1e6), (6.4e6, 6.4e7)))
CHUNKS = Grid((1, 1_000), (1.0, 1_000.0), ((0.0, 0.0), (0.0, 1e6)))


def cost_with(**costs: object) -> Calibrated:
    return Calibrated(replace(PROFILE, costs=replace(COSTS, in_situ=1.0, **costs)), extrapolate=True)


PLAIN, WINDOWED = cost_with(), cost_with(windowed=WindowedAttention(WINDOW, DECODES, CHUNKS))


def test_half_of_a_batch_beyond_the_window_costs_what_half_does() -> None:
    """32 sequences of 200 tokens and 32 of 60,000 read 600 keys on average within a window of 1,000, not 1,000."""
    mixed, alike = step([200] * 32 + [60_000] * 32), step([30_100] * 64)
    added = [WINDOWED.step_ns(batch) - PLAIN.step_ns(batch) for batch in (mixed, alike)]
    assert added == [pytest.approx(6.4e7 * 0.6, abs=2), pytest.approx(6.4e7, abs=2)]
    assert (mixed.window_tokens, alike.window_tokens) == (32 * 1_200, 64 * 1_000)


@pytest.mark.parametrize(
    ("computed", "tokens", "keys"),
    [(0, 1_000, 500.5), (0, 2_000, 750.25), (500, 1_000, 875.25), (100_000, 9, 1_000)],
)
def test_a_chunk_reads_the_keys_of_its_tokens_within_the_window(computed: int, tokens: int, keys: float) -> None:
    batch = step(chunks=[(computed, tokens)])
    added = WINDOWED.step_ns(batch) - PLAIN.step_ns(batch)
    assert added == pytest.approx(1e6 * (tokens - 1) / 999 * (keys - 1) / 999, abs=2)
    assert batch.window_pairs == round(keys * tokens)


def test_steps_recorded_without_their_windows_are_taken_as_alike() -> None:
    """Of an engine's own log nothing says how many contexts fill the window."""
    columns = {name: values * 1 for name, values in columns_of(step([200] * 32 + [60_000] * 32)).items()}
    columns["window_tokens"] = np.zeros(1, np.int64)
    added = WINDOWED.kernel_ns(columns) - PLAIN.kernel_ns(columns)
    assert added[0] == pytest.approx(6.4e7)


def test_recurrent_layers_scan_prompts_and_update_decodes_beside_them() -> None:
    """1,000 tokens of prompts are scanned; the 64 decodes beside them are no tokens of a scan."""
    scan, update = Grid((1,), (1.0, 1_001.0), ((0.0, 1e6),)), Curve((1.0, 64.0), (0.0, 2e6))
    recurrent = cost_with(recurrence=Recurrence(scan, update))
    mixed, prompts, decodes = step([500] * 64, [(0, 1_001)]), step(chunks=[(0, 1_001)]), step([500] * 64)
    added = [recurrent.step_ns(batch) - PLAIN.step_ns(batch) for batch in (mixed, prompts, decodes)]
    assert added == [3_000_000, 1_000_000, 0]  # of decodes alone the graph holds the update


def test_a_profile_with_windows_is_read_as_it_was_written() -> None:
    profile = replace(
        PROFILE,
        costs=replace(
            COSTS,
            windowed=WindowedAttention(WINDOW, DECODES, CHUNKS),
            recurrence=Recurrence(Grid((1,), (1.0,), ((1.0,),)), Curve((1.0,), (2.0,))),
        ),
    )
    assert Profile.from_json(profile.to_json(), "here") == profile


def test_a_knot_beyond_the_window_is_refused_in_one_line() -> None:
    costs: StepCosts = replace(COSTS, windowed=WindowedAttention(WINDOW, DECODES, CHUNKS))
    text = replace(PROFILE, costs=costs).to_json().replace('"window": 1000', '"window": 900')
    with pytest.raises(CalibrationError, match=r"^here: .*decode has a knot at 1000 tokens beyond the window of 900\."):
        Profile.from_json(text, "here")


def test_between_grids_of_more_chunks_the_time_is_linear_in_their_number() -> None:
    """Of one chunk 0, of 3 a ms, of more what 3 take."""
    flat, slow = (Grid((1,), (1.0,), ((ns,),)) for ns in (0.0, 1e6))
    cost = cost_with(chunk_grid=flat, more_chunks=(ChunkGrid(3, slow),))
    none = cost_with(chunk_grid=flat)
    added = []
    for count in (1, 2, 3, 7):
        batch = step(chunks=[(0, 10)] * count)
        added.append(cost.step_ns(batch) - none.step_ns(batch))
    assert added == [0, 500_000, 1_000_000, 1_000_000]


def test_grids_of_more_chunks_increase_from_one() -> None:
    grid = Grid((1,), (1.0,), ((1.0,),))
    with pytest.raises(ValueError, match=r"more_chunks are of \[4, 2\] chunks"):
        replace(COSTS, chunk_grid=grid, more_chunks=(ChunkGrid(4, grid), ChunkGrid(2, grid)))
