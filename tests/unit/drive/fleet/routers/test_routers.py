"""Routers of real systems, each by timelines worked out from its rule: who goes where, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from batchsim.base.units import NS_PER_S
from batchsim.drive.fleet.fleet_plan import Failure, FleetPlan
from batchsim.drive.fleet.routers.dynamo_kv import DynamoKvConfig
from batchsim.drive.fleet.routers.llm_d import LlmDConfig, ScorerWeights
from batchsim.drive.fleet.routers.power_of_two import PowerOfTwoConfig
from batchsim.drive.fleet.routers.router import Router, Stage
from batchsim.drive.fleet.routers.session_affinity import SessionAffinityConfig
from batchsim.drive.fleet.routers.sglang_cache_aware import SglangCacheAwareConfig, VllmCacheAwareConfig
from batchsim.drive.fleet.scaling.autoscaler import EngineLoad
from batchsim.drive.fleet.simulate_fleet import simulate_fleet
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.tokens import TokenIds, output_stream, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.results.frames import frames
from tests.support.engine import Requests, arrival, engine, vllm

CacheAwareConfig = SglangCacheAwareConfig | VllmCacheAwareConfig


def asked(id_: int, *segments: tuple[int, int], at_ns: int = 0, prompt: int = 0) -> Request:
    """A request of `segments` (number of a text, its tokens), or of `prompt` tokens that it shares with nobody."""
    if not segments:
        return Request(id_, at_ns, prompt, 10)
    tokens = TokenIds.of([(prompt_stream(number), 0, count) for number, count in segments])
    return Request(id_, at_ns, tokens.num_tokens, 10, tokens=tokens)


def routes(router: Router, *requests: Request, up: tuple[int, ...] = (0, 1)) -> list[int]:
    return [router.route(request, "both", up) for request in requests]


def idle(*numbers: int) -> dict[int, EngineLoad]:
    return dict.fromkeys(numbers, EngineLoad(0, 0, 0.0))


# ---- power of two choices


def test_of_two_drawn_replicas_the_less_loaded_is_taken() -> None:
    """Of two there are, always the one with fewer; an answer counts; one alone needs no second."""
    router = PowerOfTwoConfig().build(0)
    found = routes(router, *(asked(i, prompt=9) for i in range(40)))
    assert found.count(0) == found.count(1) == 20
    assert all(found[i] != found[i + 1] for i in range(0, 40, 2))
    for _ in range(5):
        router.answered(asked(0, prompt=9), "both", 1)
    assert routes(router, *(asked(100 + i, prompt=9) for i in range(5))) == [1] * 5
    assert routes(router, asked(200, prompt=9), up=(3,)) == [3]


def test_both_of_the_two_are_drawn_alike() -> None:
    """Without load every replica is chosen as often, and the fullest of four never while it is fuller by far."""
    counts = [0, 0, 0, 0]
    for i in range(4000):
        counts[PowerOfTwoConfig().build(1).route(asked(i, prompt=9), "both", (0, 1, 2, 3))] += 1
    assert all(abs(count - 1000) < 110 for count in counts)
    router = PowerOfTwoConfig().build(1)
    for i in range(300):
        routes(router, asked(i, prompt=9), up=(2,))
    assert 2 not in routes(router, *(asked(1000 + i, prompt=9) for i in range(100)), up=(0, 1, 2, 3))


# ---- session affinity


def turn(id_: int, session: int, answers: list[int], system: int = 500) -> Request:
    """A turn of `session`, whose turns before have the request ids `answers`."""
    segments = [(prompt_stream(system), 0, 32), (prompt_stream(session), 0, 20)]
    for before in answers:
        segments += [(output_stream(before), 0, 5), (prompt_stream(900 + before), 0, 7)]
    return Request(id_, 0, sum(count for _, _, count in segments), 10, tokens=TokenIds.of(segments))


def test_turns_of_a_session_stay_on_a_replica_that_is_there() -> None:
    """The same system prompt ties nobody; the least loaded takes a first turn, and one whose replica is gone."""
    router = SessionAffinityConfig().build(0)
    assert routes(router, turn(0, 10, []), turn(1, 11, []), turn(2, 10, [0]), turn(3, 10, [0, 2])) == [0, 1, 0, 0]
    assert routes(router, turn(4, 12, []), turn(5, 11, [1])) == [1, 1]
    assert routes(router, turn(6, 10, [0, 2, 3]), up=(1,)) == [1]
    assert routes(router, turn(7, 10, [0, 2, 3, 6])) == [1]
    assert routes(router, asked(8, prompt=9), asked(9, prompt=9)) == [0, 0]


# ---- llm-d


def test_llm_d_weighs_queue_memory_and_prefix() -> None:
    """Hand-worked sums of the three scores, one weight changed at a time."""
    loads = {0: EngineLoad(4, 9, 0.5), 1: EngineLoad(0, 9, 0.9), 2: EngineLoad(2, 9, 0.2)}

    def chosen(**weights: float) -> int:
        router = LlmDConfig(weights=ScorerWeights(**weights), metrics_interval=0).build(0)
        router.observe(idle(0, 1, 2))
        routes(router, asked(0, (7, 64)), up=(0,))  # replica 0 has the prompt
        router.observe(loads)
        return router.route(asked(1, (7, 48), (8, 16)), "both", (0, 1, 2))

    # queue 0, 1, 1/2; memory 0.5, 0.1, 0.8; prefix 3/4, 0, 0
    assert chosen(queue=1, kv_utilisation=0, prefix=0) == 1
    assert chosen(queue=0, kv_utilisation=1, prefix=0) == 2
    assert chosen(queue=0, kv_utilisation=0, prefix=1) == 0
    assert chosen(queue=2, kv_utilisation=2, prefix=3) == 0  # 3.25, 2.2, 2.6
    assert chosen(queue=2, kv_utilisation=2, prefix=2) == 2  # 2.5, 2.2, 2.6
    assert chosen(queue=2, kv_utilisation=1, prefix=2) == 1  # 2.0, 2.1, 1.8


def test_llm_d_draws_among_equals_and_forgets_blocks_sent_long_ago() -> None:
    """All equal, every replica is drawn; with room for 4 blocks the first prompt's are gone after the second."""
    found = [LlmDConfig().build(0).route(asked(i, prompt=64), "both", (0, 1)) for i in range(200)]
    assert 70 < sum(found) < 130
    router = LlmDConfig(lru_capacity=4, metrics_interval=0).build(0)
    router.observe(idle(0, 1))
    routes(router, asked(0, (7, 64)), asked(1, (8, 64)), up=(0,))
    routes(router, asked(2, (7, 64)), up=(1,))
    assert routes(router, asked(3, (7, 64)), asked(4, (8, 64))) == [1, 0]
    router.removed(0)
    assert routes(router, asked(5, (8, 64)), up=(1,)) == [1]
    assert routes(router, *(asked(6 + i, (8, 64)) for i in range(8))) == [1] * 8


# ---- Dynamo


def test_dynamo_s_cost_is_prefill_left_plus_blocks_in_use() -> None:
    """Blocks of 16. Replica 0: 4 blocks cached, 8 in use of another's 128 tokens that are still to be computed."""
    router = DynamoKvConfig().build(0)
    routes(router, asked(0, (7, 64)), up=(0,))
    router.prefilled(0, 0)
    router.answered(asked(0, (7, 64)), "both", 0)
    routes(router, asked(1, prompt=128), up=(0,))
    # (8 + 5 - 4) + (8 + 5) = 22 at 0, 5 + 5 = 10 at 1
    assert routes(router, asked(2, (7, 64), (8, 16))) == [1]
    router.answered(asked(2, (7, 64), (8, 16)), "both", 1)
    router.prefilled(1, 0)  # now (5 - 4) + (8 + 5) = 14 at 0, and (5 - 5) + 5 = 5 at 1, which has it all
    assert routes(router, asked(3, (7, 64), (8, 16))) == [1]
    router.answered(asked(1, prompt=128), "both", 0)  # 1 + 5 = 6 at 0; (5 - 5 + 0) + 5 at 1, where it is shared
    assert routes(router, asked(4, (7, 64), (9, 16))) == [0]


def test_dynamo_counts_a_shared_block_once_and_forgets_after_the_ttl() -> None:
    """Two requests of the same 4 blocks use 4; 120 s after they were sent nothing is taken for cached."""
    router = DynamoKvConfig().build(0)
    same = (7, 64)
    routes(router, asked(0, same), asked(1, same), up=(0,))
    routes(router, asked(2, prompt=80), up=(1,))
    for id_, replica in ((0, 0), (1, 0), (2, 1)):
        router.prefilled(id_, replica)
    assert routes(router, asked(3, prompt=16)) == [0]  # 1 + 5 against 1 + 6
    for at_ns, replica in ((119 * NS_PER_S, 0), (300 * NS_PER_S, 1)):
        router = DynamoKvConfig().build(0)
        routes(router, asked(0, same), asked(1, prompt=16), up=(0,))
        for id_ in (0, 1):
            router.prefilled(id_, 0)
        router.answered(asked(0, same), "both", 0)
        # (4 - 4) + (1 + 4) at 0 against 4 + 4 at 1; 4 + (1 + 4) once it is forgotten
        assert routes(router, asked(2, same, at_ns=at_ns)) == [replica]


def test_dynamo_counts_blocks_in_use_of_the_same_prompt_once() -> None:
    """Without credit for caches: 4 + 4 at replica 0, which has the 4 blocks in use, against 4 + 1 + 4 at 1."""
    router = DynamoKvConfig(overlap_score_credit=0.0).build(0)
    routes(router, asked(0, (7, 64)), up=(0,))
    routes(router, asked(1, prompt=16), up=(1,))
    router.prefilled(0, 0)
    router.prefilled(1, 1)
    assert routes(router, asked(2, (7, 64))) == [0]


def test_dynamo_s_router_of_prefill_engines_counts_no_decodes() -> None:
    """Dynamo D1, D2: (active prefill tokens + prompt) / 16 less what is cached. Replica 0 has the first 4 blocks of the
    prompt: (0 + 80) / 16 - 4 = 1 there, 5 at 1, whatever was sent; with 65 tokens under way, of which none are cached,
    9.06 - 4 = 5.06; with 64, 5 at both."""
    prefix, beyond = (7, 64), (8, 16)
    for beside, takes in ((65, {1}), (63, {0}), (64, {0, 1})):
        chosen = set[int]()
        for seed in range(12):
            router = DynamoKvConfig().build_apart(seed)
            first, other, last = asked(0, prefix), asked(1, prompt=beside), asked(2, prefix, beyond)
            assert router.route(first, "prefill", (0,)) == 0
            router.answered(first, "prefill", 0)
            assert router.route(other, "prefill", (0,)) == 0
            chosen.add(router.route(last, "prefill", (0, 1)))
        assert chosen == takes
    router = DynamoKvConfig().build_apart(0)
    for number in range(8):  # answered prompts leave nothing
        router.route(asked(number, prompt=640), "prefill", (0,))
        router.answered(asked(number, prompt=640), "prefill", 0)
    router.route(asked(8, prompt=16), "prefill", (1,))
    assert router.route(asked(9, prompt=16), "prefill", (0, 1)) == 0


def test_dynamo_s_router_of_decode_engines_counts_blocks_alone() -> None:
    """Dynamo D1: overlap credit 0, no prefill tokens, and no reuse assumed: two requests of the same 4 blocks use 8, so
    that a third of them goes to the replica with 7 that has none of it; what ended leaves nothing."""
    router = DynamoKvConfig().build_apart(0)
    same = (7, 64)
    for number in (0, 1):
        router.route(asked(number, same), "decode", (2,))
    router.route(asked(2, prompt=112), "decode", (3,))
    assert router.route(asked(3, same), "decode", (2, 3)) == 3  # 8 + 4 against 7 + 4
    router.answered(asked(0, same), "decode", 2)
    assert router.route(asked(4, same), "decode", (2, 3)) == 2  # 4 + 4 against 11 + 4


def test_dynamo_s_temperature_spreads() -> None:
    """At 0 the cheaper always wins; hot, with costs one range apart, it wins by e^(1/T) to 1."""

    def count(heat: float) -> int:
        found = 0
        for i in range(1000):
            router = DynamoKvConfig(router_temperature=heat).build(3)
            routes(router, asked(10_000, prompt=64), up=(0,))
            found += routes(router, asked(i, prompt=64))[0]
        return found

    assert count(0) == 1000
    assert abs(count(1.0) - 731) < 45  # e / (1 + e) of them


# ---- SGLang and vLLM


@pytest.mark.parametrize("config", [SglangCacheAwareConfig(), VllmCacheAwareConfig()])
def test_a_prompt_goes_where_most_of_it_was_sent_above_the_threshold(config: CacheAwareConfig) -> None:
    """Half of the prompt was sent: above 0.3. An eighth is not: the fewest outstanding, of equals the first, take it,
    and so one that shares nothing."""
    router = config.build(0)
    assert routes(router, asked(0, (7, 64)), asked(1, (8, 160))) == [0, 1]
    assert routes(router, asked(2, (8, 80), (9, 80)), asked(3, (8, 48), (11, 112))) == [1, 0]
    assert routes(router, asked(4, (8, 64), (12, 96)), asked(5, (8, 16), (10, 112))) == [1, 0]  # 4 tenths; an eighth
    assert routes(router, asked(6, prompt=300), asked(7, prompt=10)) == [0, 1]


@pytest.mark.parametrize(("config", "replica"), [(SglangCacheAwareConfig(), 0), (VllmCacheAwareConfig(), 1)])
def test_of_two_that_have_the_text_one_takes_it(config: CacheAwareConfig, replica: int) -> None:
    """Sent to 0 first, and to 1 while 0 was not up: SGLang takes 0 though it has more outstanding, vLLM takes the
    one with fewer, and where as many the first."""
    router = config.build(0)
    routes(router, asked(0, (7, 64)), asked(1, (7, 64)), up=(0,))
    routes(router, asked(2, (7, 64)), up=(1,))
    assert routes(router, asked(3, (7, 64))) == [replica]
    for id_ in (0, 1):
        router.answered(asked(id_, (7, 64)), "both", 0)
    router.answered(asked(2, (7, 64)), "both", 1)
    if replica:
        router.answered(asked(3, (7, 64)), "both", 1)
    assert routes(router, asked(4, (7, 64))) == [0]


@pytest.mark.parametrize("config", [SglangCacheAwareConfig(), VllmCacheAwareConfig()])
def test_text_passes_on_from_a_replica_that_is_gone(config: CacheAwareConfig) -> None:
    """What both were sent belongs to the other once one is removed, what one alone was sent to none."""
    router = config.build(0)
    routes(router, asked(0, (7, 64)), asked(1, (8, 64)), up=(0,))
    routes(router, asked(2, (7, 64)), asked(3, (9, 64)), up=(1,))
    router.removed(0)
    for id_ in (0, 1):
        router.answered(asked(id_, (7, 64)), "both", 0)
    assert routes(router, asked(4, (7, 64)), asked(5, (8, 64))) == [1, 0]


def test_sglang_balances_where_one_holds_far_more() -> None:
    """More than the absolute threshold apart and more than the relative times: the shortest queue, match or not."""
    config = SglangCacheAwareConfig(balance_abs_threshold=2, balance_rel_threshold=1.5)
    router = config.build(0)
    assert routes(router, *(asked(i, (7, 64)) for i in range(5))) == [0, 0, 0, 1, 0]  # at 3 and 0, then at 3 and 1
    router.answered(asked(0, (7, 64)), "both", 0)
    assert routes(router, asked(6, (7, 64))) == [0]


def test_sglang_forgets_text_beyond_the_tree_s_size() -> None:
    """Only at the interval, and what was sent last stays: 0 has more outstanding, and takes what is its own alone."""
    router = SglangCacheAwareConfig(max_tree_size=64, eviction_interval=100).build(0)
    routes(router, asked(0, (7, 64)), asked(1, (8, 64)), up=(0,))
    assert routes(router, asked(2, (8, 64), at_ns=98), asked(3, (7, 64), at_ns=99)) == [0, 0]
    assert routes(router, asked(4, (8, 64), at_ns=100), asked(5, (7, 64), at_ns=101)) == [1, 0]


# ---- in a fleet


def fleet(router: Router, plan: FleetPlan, *arrivals: Arrival) -> list[int]:
    def new_engine(replica: int) -> EngineCore:
        return engine(vllm(CountingKV(100, 4), max_num_seqs=1))

    found = simulate_fleet(new_engine, router, plan, Requests(*arrivals), feeds_back=False)
    return frames(found.records)["requests"]["replica"].tolist()


class Watching:
    """A router that sends all to replica 0 and keeps what it last saw of it at each dispatch."""

    def __init__(self, metrics_interval: int) -> None:
        self.metrics_interval = metrics_interval
        self.last: EngineLoad | None = None
        self.seen: list[EngineLoad | None] = []

    def observe(self, loads: Mapping[int, EngineLoad]) -> None:
        self.last = loads.get(0)

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        self.seen.append(self.last)
        return 0

    def answered(self, request: Request, stage: Stage, replica: int) -> None: ...


@pytest.mark.parametrize(
    ("interval", "seen"), [(0, [(0, 0), (0, 1), (0, 1), (1, 1)]), (100, [(0, 0), (0, 0), (1, 0), (1, 0)])]
)
def test_a_router_s_view_may_be_stale(interval: int, seen: list[tuple[int, int]]) -> None:
    """One slot, 100 ns a request. At 100 ns the second request waits, since the first has just ended; by then metrics
    are read again if every 100 ns. Read at every dispatch they count what was sent at the same instant."""
    router = Watching(interval)
    arrivals = [
        arrival(0, 0, output=10),
        arrival(1, 10, output=10),
        arrival(2, 150, output=1),
        arrival(3, 150, output=1),
    ]
    fleet(router, FleetPlan(1), *arrivals)
    assert [(load.num_waiting, load.num_running) for load in router.seen if load is not None] == seen


@pytest.mark.parametrize("interval", [1, 999_999])
def test_metrics_are_read_no_more_often_than_steps_run(interval: int) -> None:
    """Each reading is an event of the simulation."""
    with pytest.raises(ValueError, match=f"metrics_interval is {interval} ns. It must be 0s, at every dispatch, or"):
        LlmDConfig(metrics_interval=interval)


def test_dynamo_is_told_of_first_tokens_and_survives_a_failure() -> None:
    """Blocks of 4. At 29 the prompt of 40 is computed and costs its replica 1 + 11, that of 36 is not: 10 + 10. What
    was lost is routed anew."""
    router = DynamoKvConfig(block_tokens=4).build(0)
    arrivals = [arrival(0, 0, prompt=40, output=50), arrival(1, 25, prompt=36, output=50), arrival(2, 29, prompt=4)]
    where = fleet(router, FleetPlan(2), *arrivals)
    assert where[2] == where[0] != where[1]
    router = DynamoKvConfig(block_tokens=4).build(0)
    plan = FleetPlan(2, (Failure(0, 105, 20), Failure(1, 205, 20)), "retry")
    assert len(fleet(router, plan, *(arrival(i, 10 * i, prompt=8, output=9) for i in range(12)))) == 12
