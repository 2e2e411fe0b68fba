"""Where two schedules part and why, on runs whose difference is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchsim.check.validation.divergence import first_divergence
from batchsim.kernel.record import FINISHED, PREFILL, Records
from tests.support.metrics_helpers import records_of
from tests.support.validation_samples import Sample, late, played

LOAD = 12.0


@pytest.fixture(scope="module")
def simulated() -> Records:
    return played("continuous", LOAD).records


def test_equal_runs_do_not_diverge(simulated: Records) -> None:
    """A run and its like, even late by a constant, schedule the same all along."""
    assert first_divergence(simulated, simulated) is None


def test_a_slower_run_parts_where_a_request_arrives_between_the_two_starts(simulated: Records) -> None:
    """The request named arrived after the one start and before the other, and the drift is what lies between."""
    slow = played("continuous", LOAD, 1.02).records
    found = first_divergence(simulated, slow)
    assert found is not None and found.cause == "arrival"
    assert found.simulated is not None and found.live is not None
    assert found.simulated.start_ns < found.arrival_ns <= found.live.start_ns  # type: ignore[operator]
    assert found.drift_ns == found.live.start_ns - found.simulated.start_ns > 0
    assert found.request in found.live.admitted and found.request not in found.simulated.admitted
    same = slice(0, found.step)
    assert (simulated.steps["num_decode"][same] == slow.steps["num_decode"][same]).all()


def test_the_roles_can_be_exchanged(simulated: Records) -> None:
    """Seen from the slower side the same step and request are found, and the drift changes its sign."""
    slow = played("continuous", LOAD, 1.02).records
    here, there = first_divergence(simulated, slow), first_divergence(slow, simulated)
    assert here is not None and there is not None
    assert (here.step, here.request) == (there.step, there.request)
    assert here.drift_ns == -there.drift_ns  # type: ignore[operator]


def _steps(*rows: dict[str, int]) -> list[dict[str, int]]:
    return [{"duration_ns": 10, "free_blocks": 9} | row for row in rows]


def _let_in(*rows: tuple[int, int]) -> list[tuple[int, int, int, int, int]]:
    return [(time, request, PREFILL, 0, -1) for time, request in rows]


TWO = [{"arrival_ns": 0, "delivered_ns": 30}, {"arrival_ns": 8, "delivered_ns": 40}]


def test_a_late_load_source_is_named() -> None:
    """A request handed over after a step that began at the same time on both sides parts them, and its lag is said."""
    steps = _steps({"start_ns": 0, "num_chunks": 1}, {"start_ns": 10, "num_decode": 1, "num_chunks": 1})
    ours = records_of(TWO, steps, _let_in((0, 0), (10, 1)))
    other = _steps({"start_ns": 0, "num_chunks": 1}, {"start_ns": 10, "num_decode": 1})
    theirs = records_of([TWO[0], TWO[1] | {"lag_ns": 5}], other, _let_in((0, 0)))
    found = first_divergence(ours, theirs)
    assert found is not None
    assert (found.step, found.cause, found.request, found.drift_ns) == (1, "arrival", 1, 0)
    assert "handed over 5 ns late" in found.text


def test_a_request_that_came_after_the_scheduler_was_asked_is_named() -> None:
    """Live a step starts a little after the scheduler was asked; who came in between was not known to it."""
    ours = records_of(TWO, _steps({"start_ns": 0}, {"start_ns": 10, "num_chunks": 1}), _let_in((10, 1)))
    theirs = records_of([TWO[0], TWO[1] | {"lag_ns": 3}], _steps({"start_ns": 0}, {"start_ns": 12}))
    found = first_divergence(ours, theirs)
    assert found is not None and (found.cause, found.request) == ("arrival", 1)


def test_another_length_is_a_finish() -> None:
    """Where both knew the same requests and one had ended on one side, that one is named."""
    early = [{"arrival_ns": 0, "delivered_ns": 10}, {"arrival_ns": 0, "delivered_ns": 40}]
    late_end = [{"arrival_ns": 0, "delivered_ns": 20}, {"arrival_ns": 0, "delivered_ns": 40}]
    ours = records_of(early, _steps({"start_ns": 0, "num_decode": 2}, {"start_ns": 10, "num_decode": 1}))
    theirs = records_of(late_end, _steps({"start_ns": 0, "num_decode": 2}, {"start_ns": 10, "num_decode": 2}))
    found = first_divergence(ours, theirs)
    assert found is not None and (found.step, found.cause, found.request) == (1, "finish", 0)


def test_other_free_blocks_are_memory() -> None:
    """A preemption on one side alone is put down to the KV blocks."""
    ours = records_of(TWO, _steps({"start_ns": 10, "num_decode": 2, "free_blocks": 0}))
    theirs = records_of(TWO, _steps({"start_ns": 10, "num_decode": 1, "num_preempted": 1, "free_blocks": 4}))
    found = first_divergence(ours, theirs)
    assert found is not None and found.cause == "memory"
    assert "0 simulated, 4 live" in found.text


def test_other_drafts_are_named_before_what_follows_from_them() -> None:
    """How many were accepted up to there, or were found for the step itself; a request that ended sooner by them, or
    came in between, is not to blame."""
    drafted = {"start_ns": 0, "num_decode": 2, "num_decode_tokens": 4}
    told = {"first": {"num_accepted_tokens": 1}, "second": {"start_ns": 10, "num_decode": 1, "context_tokens": 5}}
    early = [TWO[0] | {"delivered_ns": 10}, TWO[1] | {"lag_ns": 3}]
    ours = records_of(TWO, _steps(drafted | told["first"], told["second"]))
    theirs = records_of(early, _steps(drafted | {"num_accepted_tokens": 2}, told["second"] | {"context_tokens": 6}))
    found = first_divergence(ours, theirs)
    assert found is not None and (found.step, found.cause, found.request) == (1, "drafts", None)
    assert "draft tokens accepted before it: 1 simulated, 2 live" in found.text
    fewer = records_of(TWO, _steps(drafted | {"num_decode_tokens": 3}))
    found = first_divergence(ours, fewer)
    assert found is not None and (found.step, found.cause) == (0, "drafts")
    assert "drafts in it: 2 simulated, 1 live" in found.text


def test_a_run_that_goes_on_longer_diverges_at_its_first_step_more() -> None:
    """Equal as far as both go: the end is the difference, and only one side has that step."""
    ours = records_of(TWO, _steps({"start_ns": 0}, {"start_ns": 10}))
    found = first_divergence(ours, records_of(TWO, _steps({"start_ns": 0})))
    assert found is not None and (found.step, found.cause) == (1, "end")
    assert found.simulated is not None and found.live is None


def test_who_is_let_in_counts_and_not_only_how_many(simulated: Records) -> None:
    """Two requests of the same shape exchanged: the counters are equal, the schedules are not."""
    states = simulated.states.copy()
    first = np.flatnonzero(states["state"] == PREFILL)[:2]
    states["request_id"][first] = states["request_id"][first[::-1]]
    found = first_divergence(simulated, replace(simulated, states=states))
    assert found is not None and found.step == 0


def test_samples_are_what_they_say() -> None:
    """The helper's runs finish all requests, and a late one differs in its lag alone."""
    sample = played("continuous", LOAD)
    assert isinstance(sample, Sample)
    assert (sample.records.requests["outcome"] == FINISHED).all()
    assert (late(sample, 7).records.requests["lag_ns"] == 7).all()
