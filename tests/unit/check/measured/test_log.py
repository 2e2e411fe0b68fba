"""A service's own log beside its simulation: rows that tell TTFT and E2E are a measured run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.log import measured_log, tells_latencies
from batchsim.workload.traces.trace_rows import TraceRows

MS = 1_000_000
ROWS = TraceRows(
    arrival_ns=np.array([0, 10, 20]) * MS,
    prompt_tokens=np.array([5, 6, 7]),
    output_tokens=np.array([3, 3, 3]),
    source="day.csv",
    format="mapping",
    notes=("1 row dropped",),
    labels={"ttft": np.array([4 * MS, -1, 8 * MS]), "e2e": np.array([10 * MS, -1, 20 * MS])},
)


def test_rows_that_tell_latencies_are_a_measured_run() -> None:
    """Latencies are the log's; a row without one is replayed and counted; what reading altered stays said."""
    run = measured_log(ROWS)
    assert run.requests is not None and run.client.arrivals == "open"
    assert run.figures["ttft_mean_s"] == pytest.approx(0.006)
    assert run.figures["e2e_p99_s"] == pytest.approx(0.020)
    assert run.figures["tpot_mean_s"] == pytest.approx((0.003 + 0.006) / 2)
    assert run.notes == ("1 row dropped", "1 of 3 rows tell no latency: replayed, and compared with nothing")


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({"arrival_ns": None}, "has no arrival times"),
        ({"labels": {"e2e": np.array([-1, -1, -1])}}, "none of 3 rows tells a latency"),
        ({"labels": {**ROWS.labels, "e2e": np.array([MS, -1, 20 * MS])}}, "1 rows have a TTFT above their E2E"),
    ],
)
def test_log_that_is_no_measured_run(changes: dict[str, object], blamed: str) -> None:
    """A log that cannot be compared is one line with what to do."""
    with pytest.raises(MeasuredError, match=blamed):
        measured_log(replace(ROWS, **changes))  # type: ignore[arg-type]


def test_a_log_without_latencies_is_none() -> None:
    """Arrivals and lengths alone are a trace, not a measurement."""
    assert tells_latencies(ROWS) and not tells_latencies(replace(ROWS, labels={}))
