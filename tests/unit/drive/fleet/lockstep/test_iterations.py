"""Ranks of SGLang that make every iteration together, by hand and against plain loops: a step takes 10 ns and 1 for
each token.

The rules are those of python/sglang/srt/managers/scheduler.py and scheduler_components/dp_attn.py of SGLang 0.5.23.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.drive.fleet.lockstep.iterations import Iterations
from batchsim.drive.fleet.lockstep.passes import LockstepCost
from batchsim.drive.fleet.lockstep.rank_costs import IteratedCosts
from batchsim.drive.simulate import simulate
from batchsim.kernel.events import Reaction
from batchsim.kernel.types import Arrival
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.testing.by_hand import same
from tests.plain.sglang_ranks import PlainRanks
from tests.support.iterations import PAGE, Ranks, TokensAndHost, engine, iterated
from tests.support.ranks import request
from tests.support.whole_batches import Listed


def spans(ranks: Ranks) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(made.start_ns, made.end_ns, made.tokens) for made in ranks.passes]


def test_requests_go_to_the_ranks_in_turn() -> None:
    """Whatever these have to do."""
    ranks = iterated(Listed([request(i, i, 40 - i, 3) for i in range(5)]), 3)
    assert ranks.routes == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]


def test_a_pass_lasts_as_long_as_that_of_the_slowest_rank() -> None:
    """Rank 1 has a prompt of 50 tokens while rank 0 decodes, in one pass; then both decode."""
    ranks = iterated(Listed([request(0, 0, 4, 4), request(1, 1, 50, 2)]))
    assert spans(ranks) == [(0, 14, (4, 0)), (14, 25, (1, 0)), (25, 85, (1, 50)), (85, 96, (1, 1))]
    steps = ranks.records(0).steps
    assert steps["start_ns"].tolist() == [0, 14, 25, 85]
    assert steps["duration_ns"].tolist() == [14, 11, 60, 11]


def test_a_rank_without_requests_runs_idle_batches_and_none_after_the_last() -> None:
    """Of no token, all of it waiting; unlike vLLM's ranks, which run dummies up to the 16th pass."""
    ranks = iterated(Listed([request(0, 0, 4, 3)]))
    assert spans(ranks) == [(0, 14, (4, 0)), (14, 25, (1, 0)), (25, 36, (1, 0))]
    idle = ranks.records(1)
    assert idle.steps["duration_ns"].tolist() == [14, 11, 11]
    assert not idle.steps["num_decode"].any()
    assert not idle.steps["pad_decode_rows"].any()


def test_ranks_at_rest_take_a_request_in_at_once() -> None:
    """No wave has to begin."""
    ranks = iterated(Listed([request(0, 0, 4, 1), request(1, 500, 4, 1)]))
    assert spans(ranks) == [(0, 14, (4, 0)), (500, 514, (0, 4))]


def test_an_idle_rank_without_overlap_chooses_before_the_pass_is_over() -> None:
    """Rank 1 gathers for the second pass at 0 already, so that the request that comes to it at 5 is in the third."""
    ranks = iterated(Listed([request(0, 0, 4, 4), request(1, 5, 6, 1)]))
    assert spans(ranks)[:3] == [(0, 14, (4, 0)), (14, 25, (1, 0)), (25, 41, (1, 6))]


def test_ranks_that_overlap_choose_a_pass_while_the_one_before_runs() -> None:
    """The host takes 2 ns to launch and 3 to process. Pass 1 is launched at 4 = 2 + 2; what comes at 5 to rank 1 enters
    once its idle batch of pass 0, which ends at 16, is processed, and is in pass 2."""
    ranks = iterated(Listed([request(0, 0, 4, 4), request(1, 5, 6, 1)]), ahead=True, host=(2, 3))
    assert [(made.launched_ns, *span) for made, span in zip(ranks.passes, spans(ranks), strict=True)] == [
        (2, 2, 16, (4, 0)),
        (4, 16, 27, (1, 0)),
        (21, 27, 43, (1, 6)),
        (32, 43, 54, (1, 0)),
    ]


def test_decodes_of_all_ranks_are_padded_to_the_captured_size_of_the_fullest() -> None:
    """Idle ranks too; none is while any rank has a prompt, and none beyond the largest size."""
    arrivals = [request(0, 0, 4, 3), request(1, 0, 4, 3), request(2, 0, 4, 3), request(3, 0, 4, 9)]
    ranks = iterated(
        Listed([*arrivals[:1], request(9, 0, 4, 1), *arrivals[1:2], request(8, 0, 4, 1), arrivals[2]]), sizes=(4, 8)
    )
    assert spans(ranks)[:2] == [(0, 22, (12, 8)), (22, 36, (3, 0))]
    assert ranks.records(0).steps["pad_decode_rows"].tolist()[:2] == [0, 1]
    assert ranks.records(1).steps["pad_decode_rows"].tolist()[:2] == [0, 4]
    assert not iterated(Listed(arrivals), sizes=(1,), count=1).records(0).steps["pad_decode_rows"].any()


@pytest.mark.parametrize(
    ("sizes", "prompt", "tokens", "rows"),
    [
        ((), 0, (3, 1), 6),  # decodes, eager: half of the fullest or more, so that all are as the fullest
        ((), 0, (3, 0), 6),
        ((8,), 0, (3, 1), 16),  # in graphs each has the captured size
        ((8,), 5, (5, 1), 6),  # a prompt somewhere: as they are
    ],
)
def test_what_the_experts_compute(sizes: tuple[int, ...], prompt: int, tokens: tuple[int, int], rows: int) -> None:
    """Of two ranks, in the four ways of SGLang's gather."""
    asked: list[int] = []

    def experts_ns(count: int, *, decodes: bool) -> float:
        asked.append(count)
        return 0.0

    if prompt:
        arrivals = [request(1, 0, 4, 3), request(0, 0, 4, 3), request(2, 15, prompt, 1)]
    else:
        most = max(tokens)
        arrivals = [request(i, 0, 4, 2 if i // 2 < tokens[i % 2] else 1) for i in range(2 * most)]
    made = iterated(Listed(arrivals), sizes=sizes, experts_ns=experts_ns)
    number = next(i for i, each in enumerate(made.passes) if each.tokens == tokens)
    assert asked[2 * number] == rows


@pytest.mark.parametrize("tp", [1, 4])
def test_each_ranks_rows_are_a_multiple_of_its_gpus(tp: int) -> None:
    """With a prompt of 5 tokens beside a decode."""
    asked: list[int] = []

    def experts_ns(count: int, *, decodes: bool) -> float:
        asked.append(count)
        return 0.0

    cost = TokensAndHost()
    cores = [engine(LockstepCost(cost), chunked_prefill_size=64) for _ in range(2)]
    Iterations(cores, IteratedCosts(cost.step_ns, (), experts_ns, tp), Listed([request(0, 0, 5, 1)])).run()
    assert asked[0] == {1: 5, 4: 8}[tp]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_among_empty_ones_steps_as_an_engine_alone(ahead: bool) -> None:
    """To the nanosecond, where nothing is padded and no request comes while it is at work."""
    arrivals = [request(i, at, 5 + i, 3 + i % 4) for i, at in enumerate((0, 0, 0, 400, 400))]
    host = (2, 3)
    spread = [each for arrival in arrivals for each in (arrival, *_refused(arrival))]
    ranks = iterated(Listed(spread), 3, host=host, ahead=ahead)
    alone = engine(TokensAndHost(host), ahead, chunked_prefill_size=64)
    simulate(alone, Listed(arrivals), leap=False)
    same(ranks.records(0), alone.recorder.records())


def _refused(arrival: Arrival) -> list[Arrival]:
    """Requests whose prompt is too long for any rank, to which the ranks after it get their turn."""
    return [request(100 + 2 * arrival.request.id + i, arrival.request.arrival_ns, 2000, 1) for i in range(2)]


@st.composite
def loads(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 12))
    at = sorted(draw(st.lists(st.integers(0, 300), min_size=count, max_size=count)))
    arrivals = [request(i, ns, draw(st.integers(1, 60)), draw(st.integers(1, 20))) for i, ns in enumerate(at)]
    sizes = draw(st.sampled_from([(), (1, 2, 4), (8,)]))
    knobs = {"chunked_prefill_size": draw(st.sampled_from([-1, 8, 24])), "enable_mixed_chunk": draw(st.booleans())}
    knobs["max_running_requests"] = draw(st.sampled_from([None, 2]))
    count, blocks = draw(st.integers(1, 4)), draw(st.sampled_from([40, 300]))
    return {"arrivals": arrivals, "count": count, "sizes": sizes, "knobs": knobs, "blocks": blocks}


@given(loads())
def test_ranks_are_those_of_plain_loops(load: dict[str, Any]) -> None:
    """Every pass, and when each request ends."""
    arrivals, count, sizes, knobs = load["arrivals"], load["count"], load["sizes"], load["knobs"]
    ranks = iterated(Listed(arrivals), count, sizes=sizes, blocks=load["blocks"], **knobs)
    plain = PlainRanks(SglangConfig(disable_radix_cache=True, **knobs), arrivals, count, load["blocks"], PAGE, sizes)
    assert spans(ranks) == plain.run()
    rows = [row for rank in range(count) for row in ranks.records(rank).requests]
    assert {int(row["request_id"]): int(row["ended_ns"]) for row in rows} == plain.over


@given(loads(), st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_ranks_that_overlap_serve_all_in_passes_one_after_the_other(
    load: dict[str, Any], host: tuple[int, int]
) -> None:
    """All tokens are computed once, in as many steps on every rank."""
    arrivals, count = load["arrivals"], load["count"]
    ranks = iterated(
        Listed(arrivals), count, sizes=load["sizes"], blocks=load["blocks"], ahead=True, host=host, **load["knobs"]
    )
    rows = [row for rank in range(count) for row in ranks.records(rank).requests]
    assert {int(row["request_id"]) for row in rows} == {arrival.request.id for arrival in arrivals}
    assert {
        int(row["output_tokens"]) - (each.output_tokens or 0) for row in rows for each in [arrivals[row["request_id"]]]
    } == {0}
    made = ranks.passes
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(made))
    assert {len(ranks.records(rank).steps) for rank in range(count)} == {len(made)}


def test_clients_that_act_between_answers_are_refused() -> None:
    class Called(Listed):
        def called(self, now_ns: int) -> Reaction:
            return Reaction()

    with pytest.raises(ScenarioError, match="clients that give requests up, or act between answers"):
        iterated(Called([]))
