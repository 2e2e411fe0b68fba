"""Ranks in lockstep as they leave records: D1 to D5 of vLLM's rules by hand, and sums over random cases.

A rank's step costs 10 ns and 1 for each token, padding among them, unless a test says otherwise.
"""

from __future__ import annotations

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cost.constant import Linear
from batchsim.drive.fleet.lockstep.lockstep_config import LockstepConfig
from batchsim.drive.fleet.lockstep.passes import LockstepCost
from batchsim.drive.fleet.lockstep.rank_costs import RankCosts
from batchsim.drive.fleet.lockstep.recorded_ranks import simulate_ranks
from batchsim.drive.simulate import simulate
from batchsim.explain.story import Stories
from batchsim.kernel.record import RANKS_PADDED, RANKS_WAITED, Records
from batchsim.kernel.types import Arrival
from batchsim.metrics.attribution import attribute
from batchsim.metrics.rank_waits import rank_waits
from tests.support.ranks import engine, request
from tests.support.whole_batches import Listed

COST = Linear(base=10, per_token=1)
SIZES = [1, 2, 4, 8, 16]


def ranks(
    arrivals: list[Arrival], count: int = 2, *, sizes: list[int] | None = None, ahead: bool = False, **options: int
) -> Records:
    """The records of ranks that have run `arrivals`, sent by one API server unless said otherwise."""
    cores = [engine(LockstepCost(COST.lanes()), ahead=ahead) for _ in range(count)]
    config = LockstepConfig(**({"api_servers": 1} | options))
    records = simulate_ranks(cores, RankCosts(COST.step_ns, sizes or []), config, Listed(arrivals)).records
    for core in cores:
        core.check_returned()
    return records


def of_rank(records: Records, rank: int) -> np.ndarray:
    """(start, duration, sequences, padded rows) of the steps of a rank."""
    assert records.replicas is not None
    steps = records.steps[records.replicas.steps == rank]
    return np.stack(
        [steps["start_ns"], steps["duration_ns"], steps["num_decode"] + steps["num_chunks"], steps["pad_decode_rows"]]
    ).T


@pytest.mark.parametrize("ahead", [False, True])
def test_a_busy_rank_among_idle_ones_is_as_fast_as_alone(ahead: bool) -> None:
    """D1: as many passes on all ranks; the times of the requests are those of one engine, to the nanosecond."""
    arrivals = [request(0, 0, 4, 5)]
    records = ranks(arrivals, 3, ahead=ahead)
    alone = engine(COST, ahead=ahead)
    simulate(alone, Listed(arrivals), leap=False)
    one = alone.recorder.records()
    for name in ("scheduled_ns", "first_token_ns", "last_token_ns", "ended_ns", "delivered_ns"):
        assert records.requests[name].tolist() == one.requests[name].tolist()
    assert [len(of_rank(records, rank)) for rank in range(3)] == [16, 16, 16]
    assert of_rank(records, 0)[:5].tolist() == [[0, 14, 1, 0], *([14 + 11 * i, 11, 1, 0] for i in range(4))]


def test_two_ranks_take_equal_requests_in_turn() -> None:
    """D2: one API server."""
    records = ranks([request(i, i, 4, 5) for i in range(6)])
    assert records.replicas is not None
    assert records.replicas.requests.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(("interval", "passes"), [(16, 16), (4, 8), (5, 5)])
def test_dummies_fill_the_way_to_the_next_multiple_of_the_interval(interval: int, passes: int) -> None:
    """D3: five passes have a batch; each dummy has a row of padding, and waits all its time."""
    records = ranks([request(0, 0, 4, 5)], sync_interval=interval)
    assert of_rank(records, 0)[5:, 2:].tolist() == [[0, 1]] * (passes - 5)
    assert of_rank(records, 1)[:, 2].tolist() == [0] * passes
    assert records.replicas is not None
    waited = records.states[(records.states["state"] == RANKS_WAITED) & (records.replicas.states == 1)]
    assert waited["blocker"].tolist() == of_rank(records, 1)[:, 1].tolist()


def test_a_long_prompt_on_one_rank_stretches_the_tokens_of_the_other() -> None:
    """D4: a pass lasts as long as its slowest rank; rank 0's first decode waits 49 ns for a prompt of 50 tokens."""
    records = ranks([request(0, 0, 4, 3), request(1, 1, 50, 1)])
    assert of_rank(records, 0)[:3].tolist() == [[0, 14, 1, 0], [14, 60, 1, 0], [74, 11, 1, 0]]
    parts = attribute(records).set_index(["request_id", "part"])["ns"]
    assert parts[0].to_dict() == {"prefill": 14, "decode_alone": 22, "waiting_for_ranks": 49}
    assert parts[1].to_dict() == {"waiting_for_ranks": 13, "prefill": 60}


def test_ranks_are_padded_to_the_size_of_the_fullest() -> None:
    """Rank 0's prompt of 3 makes passes of 4 tokens; the padding of decodes is rows, of prompts tokens."""
    records = ranks([request(0, 0, 3, 3), request(1, 0, 7, 2)], sizes=SIZES)
    steps = of_rank(records, 0)[:3].tolist()
    assert steps == [[0, 18, 1, 0], [18, 11, 1, 0], [29, 11, 1, 0]]
    assert records.steps["pad_prefill_tokens"][:2].tolist() == [5, 1]
    padded = records.states[records.states["state"] == RANKS_PADDED]
    assert padded["blocker"].tolist() == [5, 1]
    assert attribute(records).set_index(["request_id", "part"])["ns"][0, "padding_of_ranks"] == 5


def test_a_batch_beyond_the_largest_size_pads_no_rank() -> None:
    """17 tokens fit no size of 16: all ranks run eager."""
    records = ranks([request(0, 0, 17, 2), request(1, 0, 3, 2)], sizes=SIZES)
    assert records.steps["pad_prefill_tokens"].tolist()[:2] == [0, 0]
    assert of_rank(records, 1)[0].tolist() == [0, 27, 1, 0]


def test_a_rank_that_launches_first_waits_for_the_others_to_launch() -> None:
    """7 ns a message: rank 0 could begin at 7 and begins at 21, when rank 1 is awake; so it is on record from 7."""
    records = ranks([request(0, 0, 4, 2)], message=7)
    assert of_rank(records, 0)[0].tolist() == [7, 28, 1, 0]
    assert of_rank(records, 1)[0].tolist() == [21, 14, 0, 1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_parts_sum_to_the_life_of_each_request(seed: int, ahead: bool) -> None:
    """Of random cases: no part is negative, stories have the same parts, each request ends on one rank, and all ranks
    make as many passes."""
    rng = np.random.default_rng(seed)
    count, at, arrivals = int(rng.integers(2, 5)), 0, []
    for i in range(40):
        at += int(rng.integers(0, 60))
        arrivals.append(request(i, at, int(rng.integers(1, 40)), int(rng.integers(1, 12))))
    options = {"message": int(rng.integers(0, 20)), "sync_interval": int(rng.integers(1, 20))}
    records = ranks(arrivals, count, sizes=SIZES if seed % 2 else [], ahead=ahead, **options)
    rows, requests = attribute(records), records.requests
    total = rows.groupby("request_id")["ns"].sum()
    assert total.tolist() == (requests["delivered_ns"] - requests["sent_ns"]).tolist()
    assert (rows["ns"] > 0).all()
    assert requests["request_id"].tolist() == list(range(40))
    stories = Stories(records)
    for i in range(40):
        mine = rows[rows["request_id"] == i]
        assert stories.tell(i).parts() == dict(zip(mine["part"], mine["ns"].tolist(), strict=True))
    assert records.replicas is not None
    assert len(np.unique(np.bincount(records.replicas.steps, minlength=count))) == 1


def test_an_engine_that_is_no_rank_waits_for_none() -> None:
    """Its records have no remark on ranks."""
    alone = engine(COST)
    simulate(alone, Listed([request(0, 0, 4, 5)]))
    assert rank_waits(alone.recorder.records()) is None


@pytest.mark.parametrize(("name", "value"), [("sync_interval", 0), ("message", -1), ("api_servers", 0)])
def test_a_number_out_of_its_range_is_refused(name: str, value: int) -> None:
    """By its name."""
    with pytest.raises((ValueError, ScenarioError), match=name):
        LockstepConfig(**{name: value})
