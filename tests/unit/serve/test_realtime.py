"""Engines told the time by a server leave the records of a simulation of the same arrivals."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from batchsim.drive.fleet.simulate_fleet import simulate_fleet
from batchsim.drive.simulate import simulate
from batchsim.kernel.record import CANCELLED, FINISHED, UNFINISHED
from batchsim.kernel.types import Arrival, Request
from batchsim.serve.answers import SPILL_BYTES, Answer, Asked
from batchsim.serve.realtime import RealtimeSimulation
from batchsim.serve.served_workload import unplayed
from tests.support.serving.served import setup_of, simulation_of

POLICIES = {
    "vllm": "vllm: {max_num_seqs: 8, max_num_batched_tokens: 512, enable_prefix_caching: false}",
    "sglang": "sglang: {chunked_prefill_size: 512, disable_radix_cache: true}",
    "continuous": "continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}",
    "static": "static: {batch_size: 4, max_wait: 100ms}",
}


class Sent:
    """A workload of arrivals that were sent before."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._arrivals = arrivals

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def responded(self, request: Request, now_ns: int) -> Arrival | None:
        return None


def served(simulation: RealtimeSimulation, count: int, seed: int = 1) -> list[Answer]:
    """Sends `count` requests at random times, of which the server's clock shows but few, and drains."""
    rng, now_ns, answers = random.Random(seed), 0, []
    for _ in range(count):
        now_ns += rng.randrange(1, 60_000_000)
        if rng.random() < 0.7:
            simulation.run_to(now_ns, within_s=rng.choice((0.0, math.inf)))  # as far as it goes, or all of it
        cap = rng.randrange(1, 30)
        asked = Asked(rng.randrange(1, 400), cap, rng.randrange(1, cap + 1))
        answers.append(simulation.send(asked, now_ns, lambda answer: None))
    simulation.run_to(now_ns)
    simulation.drain()
    while simulation.answers:
        simulation.run_to(int(simulation.next_ns))
    return answers


@pytest.mark.parametrize("spill_bytes", [SPILL_BYTES, 500])
@pytest.mark.parametrize("policy", POLICIES)
def test_records_are_those_of_a_simulation_of_the_same_arrivals(policy: str, spill_bytes: int) -> None:
    """However seldom the clock was looked at, and whether rows were put on disk or not, steps and requests are what
    `run` makes of the same arrivals."""
    setup = setup_of(POLICIES[policy])
    simulation = simulation_of(setup, spill_bytes=spill_bytes)
    sent = served(simulation, 120)
    records, _ = simulation.close(simulation.now_ns)
    playing = unplayed(setup)
    core = playing.engine(setup.scenario.specs[0], playing.workload(1.0, 0))
    simulate(core, Sent([answer.arrival for answer in sent]))
    simulated = core.recorder.records()
    assert len(records.requests) == 120
    for name in records.requests.dtype.names or ():
        np.testing.assert_array_equal(records.requests[name], simulated.requests[name], name)
    for name in records.steps.dtype.names or ():
        np.testing.assert_array_equal(records.steps[name], simulated.steps[name], name)
    np.testing.assert_array_equal(records.states, simulated.states)
    np.testing.assert_array_equal(records.lanes, simulated.lanes)


def test_replicas_behind_a_router_are_those_of_a_simulation() -> None:
    """With replicas, requests go where the router of `run` sends them, and steps are the same on each."""
    setup = setup_of(POLICIES["continuous"], "replicas: {count: 3, router: shortest_queue}")
    spec = setup.scenario.specs[0]
    simulation = simulation_of(setup)
    sent = served(simulation, 150)
    records, spans = simulation.close(simulation.now_ns)
    playing = unplayed(setup)
    workload = playing.workload(1.0, 0)
    config = setup.scenario.file.replicas
    assert config is not None
    fleet = simulate_fleet(
        lambda replica: playing.group_of(replica).setup.engine(spec, workload),
        config.chosen_router.build(0),
        config.plan,
        Sent([answer.arrival for answer in sent]),
        feeds_back=False,
    )
    assert records.replicas is not None and fleet.records.replicas is not None
    np.testing.assert_array_equal(records.replicas.requests, fleet.records.replicas.requests)
    np.testing.assert_array_equal(records.requests["ended_ns"], fleet.records.requests["ended_ns"])
    np.testing.assert_array_equal(records.steps["start_ns"], fleet.records.steps["start_ns"])
    assert len(spans) == 3


def test_tokens_are_told_one_by_one_when_their_steps_end() -> None:
    """Who asked hears of each token once the clock has passed the end of its step, and not before."""
    setup = setup_of(POLICIES["continuous"])
    simulation, heard = simulation_of(setup), []
    answer = simulation.send(Asked(10, 3, 3), 0, lambda answer: heard.append((answer.num_tokens, answer.outcome)))
    for ms in (9, 10, 11, 20, 21, 29, 31):
        simulation.run_to(ms * 1_000_000)
        heard.append(ms)
    assert heard == [9, 10, (1, None), 11, 20, (2, None), 21, 29, (3, FINISHED), 31]
    assert answer.outcome == FINISHED


def test_first_tokens_and_ends_are_told_before_others_of_their_step() -> None:
    """A batch's tokens are written one after another: those of which a delay is a whole error go first."""
    simulation, heard = simulation_of(setup_of(POLICIES["continuous"])), []

    def told(answer: Answer) -> None:
        heard.append((answer.last_token_ns, answer.number, answer.num_tokens == 1 or answer.outcome is not None))

    for ms, tokens in ((0, 4), (0, 9), (15, 6)):
        simulation.run_to(ms * 1_000_000)
        simulation.send(Asked(10, tokens, tokens), ms * 1_000_000, told)
    simulation.run_to(90_000_000)
    steps = {ends_ns: [each for each in heard if each[0] == ends_ns] for ends_ns, _, _ in heard}
    assert steps[30_000_001][0][1:] == (2, True) and steps[80_000_001][0][1:] == (2, True)
    assert max(map(len, steps.values())) == 3
    for told_at in steps.values():
        assert told_at == sorted(told_at, key=lambda each: not each[2]), "stable, the others behind"


def test_one_given_up_leaves_the_engine_at_the_end_of_the_step() -> None:
    """A cancelled request frees its KV at the next boundary; its row says who ended it and how far it was."""
    setup = setup_of(POLICIES["continuous"])
    simulation = simulation_of(setup)
    answer = simulation.send(Asked(100, 50, 50), 0, lambda answer: None)
    simulation.run_to(25_000_000)
    simulation.cancel(answer, 25_000_000)
    simulation.run_to(200_000_000)
    assert answer.outcome == CANCELLED
    (engine,) = simulation.engines()
    assert engine.core.scheduler.kv.num_free == engine.core.scheduler.kv.num_blocks
    records, _ = simulation.close(simulation.now_ns)
    assert records.requests["output_tokens"].tolist() == [3]
    assert records.requests["ended_ns"].tolist() == [30_000_001]


def test_what_is_open_at_the_end_is_unfinished() -> None:
    """No request is lost: those in a batch and those on their way to an engine end unfinished."""
    setup = setup_of(POLICIES["continuous"], workload="frontend: {request: 1s}")
    simulation = simulation_of(setup)
    simulation.send(Asked(100, 50, 50), 0, lambda answer: None)
    simulation.run_to(1_100_000_000)
    simulation.send(Asked(100, 50, 50), 1_100_000_000, lambda answer: None)
    records, _ = simulation.close(1_200_000_000)
    assert records.requests["outcome"].tolist() == [UNFINISHED, UNFINISHED]


def test_engines_that_cost_too_much_are_run_a_bit_at_a_time() -> None:
    """What is due is handled up to a limit of this machine's time, and what is left is due yet."""
    simulation = simulation_of(setup_of(POLICIES["continuous"]))
    answer = simulation.send(Asked(100, 20, 20), 0, lambda answer: None)
    num_turns = 1
    while not simulation.run_to(500_000_000, within_s=0.0):
        num_turns += 1
    assert num_turns > 20 and answer.outcome == FINISHED and simulation.now_ns == 500_000_000


def test_one_sent_at_an_instant_already_handled_comes_after_it() -> None:
    """A request that comes as the end of a step has just been handled is not in the step that began then, here or in
    a simulation of the same arrivals."""
    setup = setup_of(POLICIES["continuous"])
    simulation = simulation_of(setup)
    sent: list[Answer] = []
    for now_ns in (0, 10_000_001):
        simulation.run_to(now_ns)
        sent.append(simulation.send(Asked(10, 3, 3), now_ns, lambda answer: None))
    simulation.run_to(60_000_000)
    records, _ = simulation.close(60_000_000)
    playing = unplayed(setup)
    core = playing.engine(setup.scenario.specs[0], playing.workload(1.0, 0))
    simulate(core, Sent([answer.arrival for answer in sent]))
    assert records.requests["scheduled_ns"].tolist() == [1, 20_000_001]
    assert core.recorder.records().requests["scheduled_ns"].tolist() == [1, 20_000_001]


def test_a_first_piece_is_late_by_the_streams_and_none_overtakes_it() -> None:
    """Two answers stream: their first token, made at 10 ms, comes 2 x 12 ms later, the second, of 20 ms, with it."""
    setup = setup_of(POLICIES["continuous"], workload="frontend: {per_stream: 12ms}")
    simulation = simulation_of(setup)
    told: list[tuple[int, int]] = []
    for _ in range(2):
        simulation.send(Asked(100, 9, 9), 0, lambda answer: told.append((answer.number, answer.num_tokens)))
    times: dict[int, int] = {}
    for ms in range(100):
        simulation.run_to(ms * 1_000_000)
        for number, tokens in told:
            times.setdefault((number, tokens), ms)
        told.clear()
    made = [int(row["first_token_ns"]) // 1_000_000 for row in simulation.records().requests]
    assert [times[number, 1] for number in (0, 1)] == [ms + 24 + 1 for ms in made]
    assert times[0, 2] == times[0, 1] and times[0, 9] < 100


def test_an_answer_on_its_way_at_the_end_is_recorded_once() -> None:
    """One whose last token the frontend still holds when the server ends has the one row of its end, FINISHED."""
    setup = setup_of(POLICIES["continuous"], workload="frontend: {per_chunk: 5ms}")
    simulation = simulation_of(setup)
    answer = simulation.send(Asked(100, 2, 2), 0, lambda answer: None)
    simulation.run_to(22_000_000)
    assert answer.outcome is None
    records, _ = simulation.close(22_000_000)
    assert records.requests["outcome"].tolist() == [FINISHED]
