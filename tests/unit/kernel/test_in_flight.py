"""What becomes known as a step in flight lands, and what the host needs before one is launched."""

from __future__ import annotations

import pytest

from batchsim.kernel.batch import Batch, StepResult
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.engine_loop import OVERLAP, SYNC
from batchsim.kernel.in_flight import StepsInFlight
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Request, Sequence
from tests.support.stepping import HostCost


@pytest.mark.parametrize("beside_the_group", [True, False])
def test_the_token_of_a_prompt_in_a_step_that_verifies_nothing_is_known_as_it_lands(beside_the_group: bool) -> None:
    """Whether the batch names the group that the sequence has joined, or has prompts alone."""
    group, seq = DraftGroup(4), Sequence(Request(0, 0, 5, 9))
    seq.settled_computed_tokens, seq.settled_output_tokens, seq.num_blocks = 5, 1, 3
    group.join(seq, drafts=3, unknown=1)
    batch, steps = Batch(group if beside_the_group else None, [], 0), StepsInFlight(SYNC)
    batch.sampled = [seq]
    steps.launch(batch, StepResult(10, []), 0, 2)
    assert group.unknown.tolist() == [1]
    assert steps.land({seq}).batch.sampled == [seq] and group.unknown.tolist() == [0]


class RowCost(HostCost):
    """The host takes 3 ns and 1 a decode to launch a step, and half an hour to process its results."""

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return 3 + (0 if batch is None else batch.num_decode), 1_800_000_000_000


def test_the_host_time_before_a_launch_is_not_that_of_results() -> None:
    """Of so many decodes, each number asked of the cost once."""
    executor = SimExecutor(RowCost(), 1000, OVERLAP)
    assert [executor.launch_ns(rows) for rows in (1, 7, 1)] == [4, 10, 4]
