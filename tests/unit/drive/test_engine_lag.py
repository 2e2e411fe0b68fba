"""The wait of a scheduled request for its first token, in a measured run of an engine that is ahead of results."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.support import engine_lag
from tests.support.engine_lag import Calls


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder of the measured run."""
    found = Path(os.environ.get("BATCHSIM_MEASURED", "")) / "engines" / "rtx4090_llama-3.1-8b"
    if "BATCHSIM_MEASURED" not in os.environ or not found.is_dir():
        pytest.skip("BATCHSIM_MEASURED names no folder with engines/rtx4090_llama-3.1-8b in it")
    return found


def test_the_measured_lag_is_a_decode_step(folder: Path) -> None:
    """0.97 decode steps of 25.6 ms, the median of 84 calls; where the step between was seen, it was one as long."""
    run = engine_lag.measured(folder)
    assert (run.lag, run.num_calls) == (pytest.approx(0.973, abs=0.0005), 84)
    assert run.decode_s == pytest.approx(0.0256, abs=0.0001)


@pytest.mark.slow
def test_asynchronous_scheduling_has_the_measured_lag_and_synchronous_has_none(folder: Path) -> None:
    """Within a tenth of a decode step, though the steps themselves, of a GPU not fitted, take 8 % longer."""
    real = engine_lag.measured(folder)
    ahead, lockstep = (engine_lag.simulated(folder, ahead=ahead) for ahead in (True, False))
    assert ahead.lag == pytest.approx(real.lag, abs=0.1)
    assert lockstep.lag == pytest.approx(0, abs=1e-6)
    errors = [run.latencies["ttft"].mean() / real.latencies["ttft"].mean() - 1 for run in (ahead, lockstep)]
    assert errors == pytest.approx([0.174, 0.195], abs=0.0005)


def test_only_calls_alone_in_one_step_count() -> None:
    """A prompt cut in two, one that ends with another call's, and prompts that fill the engine's limit say nothing."""
    rows = [  # scheduled, first token, last token, prompt
        (0.0, 0.3, 9.0, 700),  # alone, and a step is seen to end at 0.1
        (0.1, 0.5, 9.0, 500),  # first tokens of one call in two steps
        (0.1, 0.6, 9.0, 500),
        (1.0, 1.2, 9.0, 300),  # two calls that end in one step
        (1.1, 1.2, 9.0, 300),
        (2.0, 2.4, 9.0, 1000),  # two prompts that together reach the limit
        (2.0, 2.4, 9.0, 1000),
        (3.0, 3.2, 9.0, 100),  # alone
    ]
    names = ["scheduled_s", "first_token_s", "last_token_s", "prompt_tokens"]
    calls = Calls.of(pd.DataFrame(rows, columns=names), 2000)
    assert calls.called_s.tolist() == [0.0, 3.0] and calls.tokens.tolist() == [700.0, 100.0]
    assert calls.seen_s[0] == 0.1 and np.isnan(calls.seen_s[1])
    assert calls.lag(np.array([0.0, 0.15]), 0.1) == (pytest.approx(0.5), 1)
