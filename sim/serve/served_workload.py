"""What a server has received as a workload, so that its run is kept, explained and simulated again like any other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchsim.check.validation.replay import playing
from batchsim.kernel.record import Records
from batchsim.scenario.setup import Setup
from batchsim.workload.request_columns import RequestSampler
from batchsim.workload.traces.trace_config import RateScale, TraceConfig
from batchsim.workload.traces.trace_rows import Ints, TraceRows
from batchsim.workload.workload_config import TraceArrivals, WorkloadConfig

SOURCE = "received"
_DRAWN = 4096


@dataclass(frozen=True)
class AnswerLengths:
    """The lengths of answers that end by themselves: those of the scenario's workload, one after another.

    None has fewer tokens than 1; where the scenario has classes they are those of its mix.
    """

    tokens: Ints

    @classmethod
    def of(cls, setup: Setup, seed: int) -> AnswerLengths:
        """The lengths that the workload of `setup` draws with `seed`, or those of its trace in order."""
        rows = setup.trace_rows(seed)
        sampler = RequestSampler(setup.traffic.of_any_number, rows, seed, setup.max_model_len)
        size = len(rows) if rows is not None and sampler.of_rows else _DRAWN
        return cls(sampler.draw(size, rows=rows if sampler.of_rows else None).asked_tokens)

    def of_request(self, number: int) -> int:
        """The length of answer `number`, in tokens."""
        return int(self.tokens[number % len(self.tokens)])


def with_served_workload(setup: Setup, records: Records) -> Setup:
    """`setup` whose workload is the requests of `records`, by their ids, at their times of sending."""
    rows = records.requests
    sent_ns, prompt, output = (
        rows[name].astype(np.int64) for name in ("sent_ns", "prompt_tokens", "max_output_tokens")
    )
    return _playing(setup, TraceRows(sent_ns, prompt, output, SOURCE, SOURCE))


def unplayed(setup: Setup) -> Setup:
    """`setup` whose workload is nothing in particular: for engines whose requests are yet to come."""
    one = np.ones(1, np.int64)
    return _playing(setup, TraceRows(0 * one, one, one, SOURCE, SOURCE))


def _playing(setup: Setup, rows: TraceRows) -> Setup:
    config = WorkloadConfig(
        arrivals=TraceArrivals(),
        output_cap="exact",
        trace=TraceConfig(SOURCE, rate_scale=RateScale(1.0, "compress")),
        frontend=setup.traffic.frontend,
    )
    return playing(setup, config, rows)
