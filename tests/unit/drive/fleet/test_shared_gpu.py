"""Models that take turns on a GPU, by hand: who waits for which move of weights, and what is conserved.

Steps take 10 ns; a request of three tokens with an engine of its own takes three. Weights leave in 5 ns and come in 7.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.drive.fleet.fleet_plan import ReplicaSpan
from batchsim.drive.fleet.shared_gpu import Models, simulate_shared
from batchsim.drive.fleet.simulate_fleet import FleetRun
from batchsim.drive.fleet.sleeping import Moves, SleepConfig
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import CANCELLED, FINISHED, UNFINISHED, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.metrics.attribution import attribute
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.testing.life_sums import check_lives
from batchsim.testing.random_configs import MS
from batchsim.testing.random_engines import Listed, TokenCost
from tests.support.engine import Requests, arrival, engine, vllm
from tests.support.random_cases import random_cases

MOVES = Moves(5, 7)


def run(*arrivals: Arrival, min_awake_ns: int = 0, models: str = "abc", own: str = "", leap: bool = True) -> FleetRun:
    """The run of models named by letters, those of `own` with a GPU of their own."""
    moves = {number: MOVES for number, name in enumerate(models) if name not in own}
    of = Models({name: number for number, name in enumerate(models)}, moves, min_awake_ns)
    cores: list[EngineCore] = []

    def new_engine(number: int) -> EngineCore:
        cores.append(engine(vllm(CountingKV(100, 4), max_num_seqs=4)))
        return cores[-1]

    found = simulate_shared(new_engine, of, Requests(*arrivals), leap=leap)
    for core in cores:
        core.check_returned()
    return found


def asked(number: int, at_ns: int, model: str, **more: Any) -> Arrival:
    plain = arrival(number, at_ns, **more)
    return replace(plain, request=replace(plain.request, request_class=model))


def parts(found: FleetRun, request_id: int) -> dict[str, int]:
    rows = attribute(found.records)
    mine = rows[rows["request_id"] == request_id]
    return dict(zip(mine["part"].astype(str), mine["ns"].tolist(), strict=True))


def ends(found: FleetRun) -> list[int]:
    return found.records.requests["ended_ns"].tolist()


@pytest.mark.parametrize("leap", [True, False])
def test_a_request_for_a_sleeping_model_waits_for_the_drain_and_both_moves(leap: bool) -> None:
    """a drains until 30; its weights have left at 35, those of b are there at 42. A request of a that comes at 20 may
    not join it any more: it waits for b's end at 72 and two moves more."""
    found = run(asked(0, 0, "a"), asked(1, 4, "b"), asked(2, 20, "a"), leap=leap)
    assert ends(found) == [30, 72, 114]
    assert parts(found, 0) == {"prefill": 10, "decode_alone": 20}
    assert parts(found, 1) == {"queued:no_replica": 31, "queued:waking": 7, "prefill": 10, "decode_alone": 20}
    assert parts(found, 2) == {"queued:no_replica": 57, "queued:waking": 7, "prefill": 10, "decode_alone": 20}
    assert found.spans == (
        ReplicaSpan(0, "up", 0, 4),
        ReplicaSpan(0, "draining", 4, 30),
        ReplicaSpan(0, "offloading", 30, 35),
        ReplicaSpan(0, "starting", 77, 84),
        ReplicaSpan(0, "up", 84, 114),
        ReplicaSpan(1, "starting", 35, 42),
        ReplicaSpan(1, "draining", 42, 72),
        ReplicaSpan(1, "offloading", 72, 77),
    )


def test_a_model_without_requests_goes_to_sleep_at_once() -> None:
    """Whatever its least time awake."""
    found = run(asked(0, 0, "a"), asked(1, 40, "b"), min_awake_ns=1000)
    assert ends(found) == [30, 40 + 5 + 7 + 30]
    found = run(asked(0, 0, "a"), asked(1, 20, "b"), min_awake_ns=1000)
    assert ends(found) == [30, 30 + 5 + 7 + 30]


def test_a_model_stays_awake_for_its_least_time_while_it_has_requests() -> None:
    """Requests of a come every 20 ns; that of b, from 4 on, waits until a has been awake for 65 ns: the request of 60
    is the last that joins, and ends at 90."""
    of_a = [asked(k, 20 * k, "a") for k in range(6)]
    found = run(*of_a, asked(6, 4, "b"), min_awake_ns=65)
    assert ends(found)[:4] == [30, 50, 70, 90]
    assert ends(found)[6] == 90 + 5 + 7 + 30
    assert ends(found)[4:6] == [132 + 5 + 7 + 30] * 2


def test_the_model_whose_request_has_waited_longest_is_next() -> None:
    """Of c, then b, which all its requests join at once."""
    found = run(asked(0, 0, "a"), asked(1, 5, "c"), asked(2, 6, "b"), asked(3, 7, "b"))
    assert ends(found) == [30, 72, 114, 114]


def test_a_model_stays_if_the_others_requests_have_gone() -> None:
    """The request of b is given up while a drains: that of a that was held meanwhile runs at once, with no move."""
    found = run(asked(0, 0, "a"), asked(1, 4, "b", deadline_ns=25), asked(2, 20, "a"))
    assert ends(found) == [30, 25, 60]
    assert parts(found, 2) == {"queued:no_replica": 10, "prefill": 10, "decode_alone": 20}
    assert {span.state for span in found.spans} == {"up", "draining"}


def test_a_request_may_give_up_as_its_model_wakes() -> None:
    """At 38, three ns after its model began to wake up at 35."""
    found = run(asked(0, 0, "a"), asked(1, 4, "b", deadline_ns=38))
    assert ends(found) == [30, 38]
    assert parts(found, 1) == {"queued:no_replica": 31, "queued:waking": 3}


def test_a_model_with_its_own_gpu_never_sleeps() -> None:
    """b runs beside a, which goes to sleep for c alone."""
    found = run(asked(0, 0, "a"), asked(1, 4, "b"), asked(2, 5, "c"), own="b")
    assert ends(found) == [30, 34, 72]


def test_weights_move_by_the_level() -> None:
    """16 GB at 50 GB/s both ways; read from disk, by the slower of both, and then nothing is to be written."""
    assert SleepConfig(1, 50e9).moves(16_000_000_000) == Moves(320_000_000, 320_000_000)
    assert SleepConfig(2, 50e9, 4e9).moves(16_000_000_000) == Moves(0, 4_000_000_000)
    assert SleepConfig(2, 2e9, 4e9).moves(16_000_000_000) == Moves(0, 8_000_000_000)


def test_cached_prefixes_are_gone_with_the_kv_of_a_model_that_slept() -> None:
    """Of three equal prompts of a, the second finds the first one's blocks, and the third, after b, none."""
    same = TokenIds.of([(prompt_stream(7), 0, 64)])
    of_a = [
        Arrival(Request(k, at * MS, 64, 2, tokens=same, request_class="a"), 2) for k, at in enumerate((0, 100, 500))
    ]
    of_b = Arrival(Request(3, 200 * MS, 64, 2, request_class="b"), 2)
    found = _Case([*of_a[:2], of_b, of_a[2]]).run()
    cached = found.records.requests["cached_tokens"]
    assert cached.tolist() == [0, 48, 0, 0]


TO_AND_FRO = [(0, "a"), (0, "b"), (1, "a")]


@pytest.mark.parametrize("min_awake_ns", [0, 1])
def test_models_that_wake_at_once_have_their_requests_before_they_sleep(min_awake_ns: int) -> None:
    """Each of both is asked for as the other wakes, which takes no time; up to 200 ms they could change 100 times."""
    arrivals = [Arrival(Request(i, at_ns, 8, 2, request_class=of), 2) for i, (at_ns, of) in enumerate(TO_AND_FRO)]
    models = Models({"a": 0, "b": 1}, {0: Moves(MS, 0), 1: Moves(MS, 0)}, min_awake_ns)
    found = _Case(arrivals, models, stop_ns=200 * MS).run()
    assert found.records.requests["outcome"].tolist() == [FINISHED] * 3


@dataclass
class _Case:
    """Models with 40 blocks of 16 tokens each."""

    arrivals: list[Arrival]
    models: Models = field(default_factory=lambda: Models({"a": 0, "b": 1}, {0: Moves(MS, MS), 1: Moves(MS, MS)}))
    knobs: dict[str, Any] = field(default_factory=dict[str, Any])
    stop_ns: int | None = None
    cores: list[EngineCore] = field(default_factory=list[EngineCore])

    def run(self, *, leap: bool = True) -> FleetRun:
        def new_engine(number: int) -> EngineCore:
            config = VllmConfig(**{"max_num_seqs": 64, "max_num_batched_tokens": 512} | self.knobs)
            context = PolicyContext(new_kv(config, 40, 16, ids=False), 2048, loop=config.traits.loop)
            executor = SimExecutor(TokenCost(), 2048, config.traits.loop)
            options = {"max_model_len": 2048, "stop_ns": self.stop_ns, "loop": config.traits.loop}
            self.cores.append(EngineCore(Vllm(config, context), executor, Recorder(), **options))
            return self.cores[-1]

        listed = sorted(self.arrivals, key=lambda each: each.request.arrival_ns)
        found = simulate_shared(new_engine, self.models, Listed(tuple(listed)), stop_ns=self.stop_ns, leap=leap)
        for core in self.cores:
            core.check_returned()
        return found


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    at_ms, arrivals = 0.0, list[Arrival]()
    names = "abcd"[: draw(st.integers(2, 4))]
    for number in range(draw(st.integers(1, 14))):
        at_ms += draw(st.sampled_from([0.0, 0.5, 3.0, 20.0, 200.0]))
        cancel = draw(st.sampled_from([None, None, None, 2.0, 15.0, 60.0]))
        prompt, output = draw(st.integers(1, 200)), draw(st.integers(1, 40))
        tokens = TokenIds.of([(prompt_stream(draw(st.integers(0, 4))), 0, prompt)])
        model = draw(st.sampled_from(names))
        request = Request(number, int(at_ms * MS), prompt, output, tokens=tokens, request_class=model)
        arrivals.append(Arrival(request, output, None if cancel is None else int((at_ms + cancel) * MS)))
    move = st.sampled_from([0, 1, 300_000, 5 * MS, 50 * MS])
    sharing = range(draw(st.integers(2, len(names))))
    moves = {number: Moves(draw(move), draw(move)) for number in sharing}
    min_awake_ns = draw(st.sampled_from([0, 1, 10 * MS, 300 * MS]))
    knobs = {
        "async_scheduling": draw(st.booleans()),
        "enable_prefix_caching": draw(st.booleans()),
        "max_num_seqs": draw(st.sampled_from([1, 3, 16])),
        "max_num_batched_tokens": draw(st.sampled_from([32, 512])),
    }
    stop_ns = draw(st.sampled_from([None, None, 30 * MS]))
    return _Case(arrivals, Models({name: k for k, name in enumerate(names)}, moves, min_awake_ns), knobs, stop_ns)


@given(_cases())
@random_cases(60)
def test_requests_blocks_and_the_gpu_are_conserved(case: _Case) -> None:
    """Every request ends once at its own model, with all its tokens unless its client gave up or the run was cut; all
    blocks come back whenever a model goes to sleep; no two models are on the GPU at a time, and none computes while it
    moves; parts sum to lives, and leaps change no row."""
    found = case.run()
    requests, replicas = found.records.requests, found.records.replicas
    assert replicas is not None
    by_id = {each.request.id: each for each in case.arrivals}
    assert requests["request_id"].tolist() == sorted(by_id)
    for row, replica in zip(requests, replicas.requests.tolist(), strict=True):
        each = by_id[int(row["request_id"])]
        assert replica in (-1, case.models.homes[each.request.request_class])
        if row["outcome"] == FINISHED:
            assert row["output_tokens"] == each.output_tokens
        elif row["outcome"] == CANCELLED:
            assert each.cancel_ns is not None
        else:
            assert row["outcome"] == UNFINISHED and case.stop_ns is not None
    shared = sorted((each for each in found.spans if each.replica in case.models.moves), key=lambda each: each.start_ns)
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(shared))
    steps = found.records.steps
    for start_ns, end_ns, replica in zip(
        steps["start_ns"], steps["start_ns"] + steps["duration_ns"], replicas.steps, strict=True
    ):
        awake = [span for span in found.spans if span.replica == replica and span.state in ("up", "draining")]
        assert any(span.start_ns <= start_ns and start_ns < span.end_ns for span in awake), (start_ns, end_ns)
    check_lives(found.records)
    stepped = case.run(leap=False)
    assert (stepped.records.requests == requests).all()
    assert (stepped.records.steps == steps).all()
