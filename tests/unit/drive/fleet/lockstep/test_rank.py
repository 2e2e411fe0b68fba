"""Ranks that step together, by hand: a pass takes 10 ns and 1 for each token of the fullest rank.

The rules are those of vllm/v1/engine/core.py of vLLM 0.33.0, `DPEngineCoreProc.run_busy_loop`, `add_request` and
`_has_global_unfinished_reqs`.
"""

from __future__ import annotations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.drive.simulate import simulate
from batchsim.kernel.events import Reaction
from batchsim.kernel.types import Arrival, Request
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.testing.by_hand import same
from tests.support.ranks import FullestRank, Logged, engine, in_lockstep, request
from tests.support.whole_batches import Listed


def starts_and_ends(ranks: Logged) -> list[tuple[int, int]]:
    return [(made.start_ns, made.end_ns) for made in ranks.passes]


def test_ranks_run_dummies_up_to_the_16th_pass() -> None:
    """Five passes have a batch of rank 0; then both ranks run dummies, which they launch at once."""
    ranks = in_lockstep(Listed([request(0, 0, 4, 5)]))
    assert [made.tokens for made in ranks.passes[:6]] == [(4, 0), (1, 0), (1, 0), (1, 0), (1, 0), (0, 0)]
    assert len(ranks.passes) == 16
    assert starts_and_ends(ranks)[:2] == [(0, 14), (14, 25)]
    assert ranks.dummies[0] == [(number, 58) for number in range(5, 16)]
    assert [wave for wave in ranks.waves if wave[1] in ("sync", "wave_complete")] == [
        (14, "sync", 0, 1),
        (58, "sync", 15, 0),
        (58, "wave_complete", 0, 0),
    ]


def test_a_request_that_comes_to_the_last_dummies_begins_no_wave() -> None:
    """Rank 1 has a request to pass 6; the one of rank 0 that comes in pass 4 is of the same wave, whose end is pass 15
    for both."""
    arrivals = [request(0, 0, 4, 2), request(1, 1, 4, 6), request(2, 50, 4, 2)]
    ranks = in_lockstep(Listed(arrivals), given={0: 0, 1: 1, 2: 0})
    assert [made.tokens for made in ranks.passes[:7]] == [(4, 0), (1, 4), (0, 1), (0, 1), (0, 1), (4, 1), (1, 1)]
    assert len(ranks.passes) == 16
    assert sum(wave[1] == "wave_complete" for wave in ranks.waves) == 1


def test_a_wave_begins_with_two_messages_to_the_other_ranks() -> None:
    """With 7 ns a message: the request is there at 7, the coordinator knows at 14, rank 1 launches its dummy at 21, and
    then rank 0's batch begins; the clients know at 21."""
    ranks = in_lockstep(Listed([request(0, 0, 4, 2)]), hop=7)
    assert ranks.waves[:2] == [(7, "wave_started_by", 0, 0), (14, "start_wave", 0, 0)]
    assert (ranks.passes[0].launched_ns, ranks.passes[0].start_ns) == (21, 21)
    assert ranks.dummies[1][0] == (0, 21)
    assert ranks.news[0] == (21, None)
    steps, lanes = ranks.records(0).steps, ranks.records(0).lanes
    assert (int(lanes["launched_ns"][0]), int(steps["start_ns"][0])) == (7, 21)


def test_the_fullest_rank_sets_the_pace_of_all() -> None:
    """Rank 1's prompt of 50 tokens makes rank 0's decode as long."""
    ranks = in_lockstep(Listed([request(0, 0, 4, 3), request(1, 1, 50, 1)]), given={0: 0, 1: 1})
    assert starts_and_ends(ranks)[:3] == [(0, 14), (14, 74), (74, 85)]
    assert ranks.records(0).steps["duration_ns"].tolist() == [14, 60, 11]


@pytest.mark.parametrize("interval", [1, 4])
def test_the_wave_ends_at_a_multiple_of_the_interval(interval: int) -> None:
    """Six passes have a batch: with 1 the wave ends with them, with 4 at the eighth."""
    ranks = in_lockstep(Listed([request(0, 0, 4, 6)]), interval=interval)
    assert len(ranks.passes) == {1: 6, 4: 8}[interval]


def test_a_second_wave_has_a_number_of_its_own() -> None:
    """The first one ends with pass 3; rank 1 begins the second, and rank 0 says so once more behind its first pass."""
    ranks = in_lockstep(Listed([request(0, 0, 4, 2), request(1, 1000, 4, 2)]), interval=4, given={0: 0, 1: 1})
    said = [(what, wave, rank) for _, what, wave, rank in ranks.waves if what == "wave_started_by"]
    assert said == [
        ("wave_started_by", 0, 0),
        ("wave_started_by", 0, 0),
        ("wave_started_by", 1, 1),
        ("wave_started_by", 1, 0),
    ]
    assert [wave for _, what, wave, _ in ranks.waves if what == "wave_complete"] == [0, 1]


def test_two_ranks_take_equal_requests_in_turn() -> None:
    """One client, all at once."""
    ranks = in_lockstep(Listed([request(i, i, 4, 5) for i in range(6)]))
    assert [rank for _, rank in ranks.routes] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_among_empty_ones_steps_as_an_engine_alone(ahead: bool) -> None:
    """Where messages take no time and dummies no time of the device, to the nanosecond."""
    arrivals = [request(i, at, 5 + i, 3 + i % 4) for i, at in enumerate((0, 3, 9, 40, 41, 400, 401))]
    cost = FullestRank(host=(2, 3), dummies_ns=0)
    ranks = in_lockstep(Listed(arrivals), 3, cost=cost, given=dict.fromkeys(range(7), 1), ahead=ahead)
    alone = engine(cost, ahead)
    simulate(alone, Listed(arrivals))
    records = alone.recorder.records()
    same(ranks.records(1), records)
    assert not len(ranks.records(0).steps)


def test_ahead_of_results_a_call_that_collects_the_last_result_is_followed_by_a_dummy() -> None:
    """Three batches of rank 0, the fourth call has nothing to run, and neither have those that empty the queue."""
    ranks = in_lockstep(Listed([request(0, 0, 4, 3)]), ahead=True, interval=4)
    assert [made.tokens for made in ranks.passes] == [(4, 0), (1, 0), (1, 0), (0, 0)]
    assert [made.launched_ns for made in ranks.passes] == [0, 0, 14, 36]


def test_ahead_of_results_the_host_goes_on_once_all_ranks_have_launched() -> None:
    """Rank 0 launches two passes at 0 and rank 1 dummies beside them; its prompt, there at 1, is in pass 3, which waits
    for rank 0 to process pass 2 at 36."""
    arrivals = [request(0, 0, 4, 3), request(1, 1, 8, 2)]
    ranks = in_lockstep(Listed(arrivals), given={0: 0, 1: 1}, ahead=True)
    assert [(made.launched_ns, made.start_ns, made.end_ns, made.tokens) for made in ranks.passes[:5]] == [
        (0, 0, 14, (4, 0)),
        (0, 14, 25, (1, 0)),
        (14, 25, 36, (1, 0)),
        (36, 36, 54, (0, 8)),
        (36, 54, 65, (0, 1)),
    ]
    assert ranks.records(1).lanes["launched_ns"].tolist()[:2] == [14, 36]


def test_prompts_wait_for_the_same_passes_on_all_ranks() -> None:
    """With prefill_schedule_interval 3 the later prompts of both ranks are in pass 3."""
    arrivals = [request(0, 0, 4, 9), request(1, 1, 4, 9), request(2, 20, 6, 2), request(3, 30, 7, 2)]
    ranks = in_lockstep(Listed(arrivals), prefill_schedule_interval=3)
    assert [made.tokens for made in ranks.passes[:4]] == [(4, 0), (1, 4), (1, 1), (7, 8)]


def test_closed_loop_clients_go_on_when_they_are_answered() -> None:
    """A client's next request comes a message after its answer."""

    class Pair(Listed):
        def responded(self, request: Request, now_ns: int) -> Arrival | None:
            return None if request.id else Arrival(Request(1, now_ns, 4, 1), 1)

    ranks = in_lockstep(Pair([request(0, 0, 4, 2)]), hop=5)
    rows = [ranks.records(rank).requests for rank, _ in enumerate(ranks.ranks)]
    first = next(row for table in rows for row in table if row["request_id"] == 0)
    second = next(row for table in rows for row in table if row["request_id"] == 1)
    assert int(second["arrival_ns"]) == int(first["delivered_ns"]) + 5


def test_a_request_that_its_client_gives_up_ends_between_two_passes() -> None:
    """Rank 0 loses its only request at 40, in the pass that ends at 47, and runs dummies beside rank 1."""
    arrivals = [Arrival(Request(0, 0, 4, 50), 50, cancel_ns=40), request(1, 0, 4, 8)]
    ranks = in_lockstep(Listed(arrivals), interval=4)
    assert [made.tokens for made in ranks.passes[:6]] == [(4, 4), (1, 1), (1, 1), (1, 1), (0, 1), (0, 1)]
    assert int(ranks.records(0).requests["ended_ns"][0]) == ranks.passes[3].end_ns
    assert len(ranks.passes) == 8


def test_drafts_and_clients_that_act_between_answers_are_refused() -> None:
    """In one line each."""

    class Trainer(Listed):
        def called(self, now_ns: int) -> Reaction:
            return Reaction()

    with pytest.raises(ScenarioError, match="clients that give requests up, or act between answers, are not simulated"):
        in_lockstep(Trainer([request(0, 0, 4, 2)]))
    drafts = SpeculativeConfig("ngram", 2, acceptance=0.5, prompt_lookup_max=2)
    with pytest.raises(ScenarioError, match="drafts are not simulated"):
        in_lockstep(Listed([request(0, 0, 4, 2)]), speculative_config=drafts)
