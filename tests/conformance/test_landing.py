"""Whom a step finishes, and which of its drafts are right, may be known at its launch, as in simulation, or when it
lands, as on a device: all alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchsim.drive.live import VirtualClock, live
from batchsim.drive.simulate import simulate
from batchsim.kernel.batch import Batch, Landed, StepResult
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Sequence
from batchsim.testing.by_hand import same
from batchsim.testing.random_engines import built, cases
from tests.conformance.ahead import asynchronous, engine_ahead
from tests.conformance.test_conformance import MANY, random_cases

RANDOM = random_cases(12)


class Late(SimExecutor):
    """Tells whom a step finishes, and what became of its drafts, when it lands."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.untold: dict[Sequence, int] = {}  # rejected tokens of the step in flight

    def execute(self, batch: Batch) -> StepResult:
        group, drafting, untold = batch.decodes, batch.drafting, self.untold
        members = [
            (seq, count) for seq, count in untold.items() if isinstance(group, DraftGroup) and seq.group is group
        ]
        for seq, count in members:
            group.rejected[seq.phase] += count
        result = super().execute(batch)
        for seq, count in members:
            group.rejected[seq.phase] -= count
        self.untold = {}
        if drafting is not None and result.verified is not None:
            rejected = (drafting.rows - result.verified.gained).tolist()
            self.untold = dict(zip(drafting.sequences, rejected, strict=True))
        mine = self.untold

        def landing() -> Landed:
            mine.clear()
            return Landed(result.finished, verified=result.verified)

        return replace(result, finished=[], verified=None, landing=landing)


@RANDOM
@given(data=st.data())
def test_results_known_at_landing_leave_the_records_of_those_known_at_launch(data: st.DataObject) -> None:
    """Random vLLM engines that schedule ahead, with stops, cancels, preemptions, prefix hits and drafts, in both
    drivers."""
    _alike(data)


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_that_is_so_in_many_more_cases(data: st.DataObject) -> None:
    _alike(data)


def _alike(data: st.DataObject) -> None:
    case = data.draw(cases("vllm"))
    assume(built(case) and case is not None and case.stages == 1)
    case = asynchronous(case)
    known, late, simulated = engine_ahead(case), engine_ahead(case, Late), engine_ahead(case, Late)
    live(known, case.workload, VirtualClock())
    live(late, case.workload, VirtualClock())
    simulate(simulated, case.workload)
    same(known.recorder.records(), late.recorder.records())
    same(known.recorder.records(), simulated.recorder.records())
