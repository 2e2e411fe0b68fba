"""Prefill and decode apart: a request's times with and without transfers, links, and what is conserved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.drive.fleet.pools import Pools, PrefillCore, simulate_pools
from batchsim.drive.fleet.routers.dynamo_kv import DynamoKvConfig
from batchsim.drive.fleet.routers.local_prefill import (
    DynamoIslBoundingConfig,
    LlmDAlwaysConfig,
    LlmDPrefixConfig,
    LocalPrefillConfig,
    TrtllmThresholdConfig,
)
from batchsim.drive.fleet.routing import LeastTokensConfig, RoundRobinConfig, RouterConfig, ShortestQueueConfig
from batchsim.drive.fleet.simulate_fleet import FleetRun
from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.kernel.core import EngineCore
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import CANCELLED, FINISHED, REJECTED, UNFINISHED, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.metrics.attribution import attribute
from batchsim.policies.systems.vllm.connector_config import VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm_connector import VllmConnector
from batchsim.testing.life_sums import check_lives
from batchsim.testing.random_configs import MS
from batchsim.testing.random_engines import Listed, TokenCost
from tests.record_hashes import record_hash
from tests.support.random_cases import random_cases

INSTANT = TransferConfig(bandwidth=1e15)
NAP_NS = MS


def _asked(number: int, at_ms: float, prompt: int, output: int, **more: Any) -> Arrival:
    tokens = TokenIds.of([(prompt_stream(more.pop("stream", number + 100)), 0, prompt)])
    cancel_ms = more.pop("cancel_ms", None)
    request = Request(number, int(at_ms * MS), prompt, output + more.pop("beyond", 0), tokens=tokens, **more)
    return Arrival(request, output, None if cancel_ms is None else int(cancel_ms * MS))


@dataclass
class _Case:
    """Engines with blocks of 16 tokens of 1,000 bytes each."""

    arrivals: list[Arrival]
    transfer: TransferConfig = INSTANT
    prefill: int = 1
    decode: int = 1
    blocks: tuple[int, int] = (4096, 4096)
    knobs: dict[str, Any] = field(default_factory=dict[str, Any])
    stop_ns: int | None = None
    router: RouterConfig = field(default_factory=RoundRobinConfig)
    local: LocalPrefillConfig | None = None
    failing: tuple[int, ...] = ()  # requests whose transfer fails
    cores: list[EngineCore] = field(default_factory=list[EngineCore])

    def run(self, *, leap: bool = True) -> FleetRun:
        self.cores = []
        decider = None if self.local is None else self.local.build()
        pools = Pools(self.prefill, self.decode, self.transfer, 16_000, decider, self.failing.__contains__)

        def new_engine(number: int) -> EngineCore:
            is_prefill = number < self.prefill
            role = "kv_producer" if is_prefill else "kv_consumer"
            knobs = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "async_scheduling": False} | self.knobs
            knobs["kv_load_failure_policy"] = self.transfer.on_failure
            config = VllmConnectorConfig(kv_role=role, **knobs)
            kv = new_kv(config, self.blocks[not is_prefill], 16, ids=False)
            context = PolicyContext(kv, 2048, loop=config.traits.loop, connector=pools.connector(number))
            recorder = Recorder()
            pools.records(number, recorder)
            kind = PrefillCore if is_prefill else EngineCore
            executor = SimExecutor(TokenCost(), 2048, config.traits.loop)
            options = {"max_model_len": 2048, "stop_ns": self.stop_ns, "loop": config.traits.loop}
            core = kind(VllmConnector(config, context), executor, recorder, **options)
            self.cores.append(core)
            return core

        chosen = self.router
        router = chosen.build_apart(0) if isinstance(chosen, DynamoKvConfig) else chosen.build(0)
        workload = Listed(tuple(self.arrivals))
        run = simulate_pools(new_engine, router, pools, workload, stop_ns=self.stop_ns, leap=leap)
        for core in self.cores:
            core.check_returned()
        return run


def test_without_transfer_time_the_first_token_is_prefill_and_one_decode_step() -> None:
    """vLLM 0.33.0, nixl/pull_scheduler.py: prefill's token is thrown away; the decode engine's first call begins the
    pull and notices its end, a sleep of 1 ms later the last token of the prompt is computed again. The pace is the
    decode engine's alone."""
    run = _Case([_asked(0, 0, 100, 5)]).run()
    (row,) = run.records.requests
    cost = TokenCost()
    host_ns = 300_000 + 200_000  # of a step with a prompt's chunk alone
    prefill_ns = host_ns + cost.base_ns + 100 * cost.per_token_ns
    first_ns = host_ns + cost.base_ns + cost.per_token_ns
    assert row["first_token_ns"] == prefill_ns + NAP_NS + first_ns
    later = [host_ns + 40_000 + cost.base_ns + cost.per_token_ns + cost.per_context_ns * n for n in range(100, 104)]
    assert row["last_token_ns"] - row["first_token_ns"] == sum(later)
    assert (row["output_tokens"], row["scheduled_ns"], row["recomputed_tokens"]) == (5, 0, 0)
    check_lives(run.records)


def test_transfers_wait_for_their_link_one_after_the_other() -> None:
    """Two prompts of 7 blocks, 112,000 bytes each, end with the same step: at 0.112 GB/s a transfer takes 1 ms of the
    link and 0.5 ms of latency. Shared, the second one waits 1 ms; with links of their own, none does."""
    asked = [_asked(i, 0, 100, 3) for i in (0, 1)]
    waits: dict[str, list[int]] = {}
    for links in ("shared", "per_pair"):
        transfer = TransferConfig(bandwidth=0.112e9, latency=500_000, links=links)  # pyright: ignore
        run = _Case(asked, transfer, decode=2).run()
        parts = attribute(run.records)
        of = {part: parts[parts["part"] == f"queued:{part}"]["ns"].tolist() for part in ("transfer", "transfer_queue")}
        assert of["transfer"] == [1_500_000, 1_500_000]
        waits[links] = of["transfer_queue"]
        check_lives(run.records)
    assert waits == {"shared": [1_000_000], "per_pair": []}


def test_a_prompt_waits_for_blocks_at_its_decode_engine() -> None:
    """8 blocks there, and each request needs 7 and an eighth: the second one has none before the first has ended."""
    run = _Case([_asked(i, 0, 100, 20) for i in (0, 1)], blocks=(4096, 8)).run()
    parts = attribute(run.records)
    waits = parts[parts["part"] == "queued:waiting_decode_blocks"]
    assert waits["request_id"].tolist() == [1]
    first, second = run.records.requests
    assert second["first_token_ns"] > first["last_token_ns"] > int(np.asarray(waits["ns"])[0])
    check_lives(run.records)


def test_prefill_goes_on_until_its_memory_is_full_of_kept_blocks() -> None:
    """vLLM 0.33.0, scheduler.py, `_connector_finished`: with a decode engine that takes one request at a time, two
    prompts of 7 blocks are kept in 16 beside the one that was read; the fourth begins only once the next is read."""
    run = _Case([_asked(i, 0, 100, 30) for i in range(4)], blocks=(16, 9), knobs={"max_num_batched_tokens": 128}).run()
    scheduled = run.records.requests["scheduled_ns"]
    ended = run.records.requests["last_token_ns"]
    assert scheduled[2] < ended[0] < scheduled[3]
    check_lives(run.records)


def test_engines_are_taken_in_turn() -> None:
    """Two prefill, three decode engines: each request goes to the next of both kinds."""
    run = _Case([_asked(i, 50 * i, 40, 2) for i in range(6)], prefill=2, decode=3).run()
    replicas = run.records.replicas
    assert replicas is not None
    assert replicas.requests.tolist() == [2, 3, 4, 2, 3, 4]
    stays = sorted(zip(replicas.stays["request_id"].tolist(), replicas.stays["replica"].tolist(), strict=True))
    assert stays == [(i, i % 2) for i in range(6)]


def test_what_a_decode_engine_computes_alone_is_not_sent_to_another() -> None:
    """The second request has its prompt's first 6 blocks there: it is computed at once, beside the first, whose prompt
    was computed elsewhere. With one token less allowed it goes there, too."""
    asked = [_asked(0, 0, 100, 30, stream=7), _asked(1, 40, 100, 5, stream=7)]
    for most, stays in ((4, [0]), (3, [0, 1])):
        run = _Case(asked, local=TrtllmThresholdConfig(max_local_prefill_length=most)).run()
        assert run.records.replicas is not None
        assert run.records.replicas.stays["request_id"].tolist() == stays
        assert run.records.requests["cached_tokens"].tolist() == [0, 96]
        assert run.records.requests["output_tokens"].tolist() == [30, 5]
        check_lives(run.records)


def test_a_router_hears_of_each_stage() -> None:
    """Three prefill engines have one request each as the fourth comes, which goes to the first; of the decode engines
    that with the fewest is next, by number where both have as many."""
    run = _Case([_asked(i, i, 100, 30) for i in range(4)], prefill=3, decode=2, router=ShortestQueueConfig()).run()
    replicas = run.records.replicas
    assert replicas is not None
    stays = sorted(zip(replicas.stays["request_id"].tolist(), replicas.stays["replica"].tolist(), strict=True))
    assert stays == [(0, 0), (1, 1), (2, 2), (3, 0)]
    assert replicas.requests.tolist() == [3, 4, 3, 4]


def test_a_failed_transfer_ends_its_request_or_has_its_prompt_computed_where_it_decodes() -> None:
    """vLLM A3: by default it ends as the failure is noticed, and the other one goes on; with recompute the whole prompt
    is computed again at its decode engine (C = 0), with all of its tokens."""
    asked = [_asked(0, 0, 100, 5), _asked(1, 0, 100, 5)]
    ended = _Case(asked, TransferConfig(bandwidth=1e15, failed=0.5), failing=(1,)).run()
    assert ended.records.requests["outcome"].tolist() == [FINISHED, REJECTED]
    again = _Case(asked, TransferConfig(bandwidth=1e15, failed=0.5, on_failure="recompute"), failing=(1,)).run()
    assert again.records.requests["outcome"].tolist() == [FINISHED, FINISHED]
    assert again.records.requests["output_tokens"].tolist() == [5, 5]
    cost = TokenCost()
    first, second = again.records.requests["first_token_ns"]
    assert second >= first and second > 500_000 + cost.base_ns + 100 * cost.per_token_ns
    for run in (ended, again):
        check_lives(run.records)


@pytest.mark.parametrize(("lease_ms", "waits"), [(60, False), (600, True)])
def test_blocks_of_a_failed_transfer_are_kept_until_their_lease_ends(lease_ms: int, waits: bool) -> None:
    """vLLM A3.3, A1.6: prefill has 8 blocks, and the first prompt keeps 7 of them; the second begins once the lease is
    over that began as the first prompt was done, not as its transfer failed."""
    transfer = TransferConfig(bandwidth=1e15, failed=0.5, lease=lease_ms * MS)
    asked = [_asked(0, 0, 100, 5), _asked(1, 100, 100, 5)]
    run = _Case(asked, transfer, blocks=(8, 4096), failing=(0,)).run()
    rows = run.records.requests
    assert rows["outcome"].tolist() == [REJECTED, FINISHED]
    (stay,) = [row for row in _stays(run) if row["request_id"] == 0]
    lapsed_ns = int(stay["end_ns"]) + lease_ms * MS
    assert rows["scheduled_ns"][1] == (pytest.approx(lapsed_ns, abs=2 * NAP_NS) if waits else 100 * MS)
    check_lives(run.records)


def test_a_lease_ends_after_the_last_heartbeat() -> None:
    """vLLM A1.6: 30 s from the finish; heartbeats every 5 s extend it to 20 s after them."""
    lapses = TransferConfig(bandwidth=1e9, failed=0.5).lapses_ns
    s = 1_000_000_000
    assert [lapses(7 * s, over) for over in (8 * s, 17 * s - 1, 22 * s - 1)] == [37 * s] * 3
    assert [lapses(7 * s, over) for over in (22 * s, 27 * s - 1, 27 * s)] == [42 * s, 42 * s, 47 * s]


def _stays(run: FleetRun) -> Any:
    assert run.records.replicas is not None
    return run.records.replicas.stays


def test_decode_is_chosen_as_a_request_comes_or_as_its_prompt_is_done() -> None:
    """Splitwise and llm-d choose both engines at once, DistServe the second one when the first is done. Two decode
    engines: the first request is still in its prompt of 500 tokens as the second comes with 10. At once, decode 1 takes
    the second; otherwise it is decode 0, as nothing decodes when its prompt is done."""
    asked = [_asked(0, 0, 500, 4), _asked(1, 1, 10, 200)]
    for local, ends in ((LlmDAlwaysConfig(), [2, 3]), (None, [3, 2])):
        run = _Case(asked, prefill=2, decode=2, router=LeastTokensConfig(), local=local).run()
        replicas = run.records.replicas
        assert replicas is not None
        assert replicas.requests.tolist() == ends
        check_lives(run.records)


def test_dynamo_sends_decodes_where_the_fewest_blocks_are() -> None:
    """Dynamo D1, D2, blocks of 16: the decode engine with the 12 blocks of one prompt takes none of the next three, of
    one whole block each."""
    asked = [_asked(0, 0, 200, 200)] + [_asked(i, 30 * i, 20, 100) for i in (1, 2, 3)]
    run = _Case(asked, decode=2, router=DynamoKvConfig()).run()
    replicas = run.records.replicas
    assert replicas is not None
    first, *others = replicas.requests.tolist()
    assert others == [3 - first] * 3
    check_lives(run.records)


@pytest.mark.parametrize("cancel_ms", [1, 6, 7, 8.5, 9.5, 12, 20])
def test_a_client_may_give_up_anywhere(cancel_ms: float) -> None:
    """In the prompt, waiting for blocks, for the link, in the transfer, in the decode: all blocks come back, and the
    record ends there."""
    slow = TransferConfig(bandwidth=0.112e9, latency=2 * MS)
    asked = [_asked(0, 0, 100, 30), _asked(1, 0, 100, 30, cancel_ms=cancel_ms)]
    run = _Case(asked, slow, blocks=(4096, 20)).run()
    assert run.records.requests["outcome"].tolist() == [FINISHED, CANCELLED]
    check_lives(run.records)


@pytest.mark.parametrize("stop_ms", [0.5, 4, 6.5, 8, 9.5, 14, 40])
def test_a_run_may_be_cut_anywhere(stop_ms: float) -> None:
    """With requests in prompts, kept, on the link and decoding: each of them ends there, and the engines do not go
    on looking for transfers."""
    slow = TransferConfig(bandwidth=0.05e9, latency=MS)
    asked = [_asked(i, 0.3 * i, 100, 60) for i in range(4)]
    run = _Case(asked, slow, blocks=(4096, 24), stop_ns=int(stop_ms * MS)).run()
    assert run.records.requests["outcome"].tolist() == [UNFINISHED] * 4
    assert run.end_ns < (stop_ms + 12) * MS  # the step that ran is 11.3 ms long
    check_lives(run.records)


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    at_ms, asked = 0.0, list[Arrival]()
    for number in range(draw(st.integers(1, 12))):
        at_ms += draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
        cancel = draw(st.sampled_from([None, None, None, 2.0, 15.0, 60.0]))
        more: dict[str, Any] = {} if cancel is None else {"cancel_ms": at_ms + cancel}
        stream, priority = draw(st.integers(0, 30)), draw(st.integers(0, 2))
        prompt, output = draw(st.integers(1, 200)), draw(st.integers(1, 40))
        more["beyond"] = draw(st.sampled_from([0, 0, 5]))  # tokens that a stop token saves
        asked.append(_asked(number, at_ms, prompt, output, stream=stream, priority=priority, **more))
    transfer = TransferConfig(
        bandwidth=draw(st.sampled_from([1e7, 1e8, 1e12])),
        latency=draw(st.sampled_from([0, 20_000, 3 * MS])),
        links=draw(st.sampled_from(["shared", "per_pair"])),
        failed=0.5,
        on_failure=draw(st.sampled_from(["fail", "recompute"])),
        lease=draw(st.sampled_from([5 * MS, 200 * MS])),
    )
    failing = draw(st.sampled_from([(), (), (0,), (1, 2, 5)]))
    knobs = {
        "async_scheduling": draw(st.booleans()),
        "enable_prefix_caching": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 16])),
        "max_num_batched_tokens": draw(st.sampled_from([32, 64, 512])),
    }
    blocks = draw(st.sampled_from([(16, 16), (20, 40), (200, 17)]))
    routers = RoundRobinConfig(), ShortestQueueConfig(), LeastTokensConfig(), DynamoKvConfig(router_temperature=0.3)
    router = draw(st.sampled_from(routers))
    local = draw(
        st.sampled_from(
            [
                None,
                None,
                TrtllmThresholdConfig(max_local_prefill_length=60),
                LlmDPrefixConfig(non_cached_tokens=90),
                DynamoIslBoundingConfig(),
                LlmDAlwaysConfig(),
            ]
        )
    )
    sizes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if isinstance(router, DynamoKvConfig):
        local = None
    return _Case(asked, transfer, *sizes, blocks, knobs, router=router, local=local, failing=failing)


@given(_cases())
@random_cases(60)
def test_requests_and_blocks_are_conserved(case: _Case) -> None:
    """Every request ends once, with all its tokens unless its client gave up; all blocks come back, and all parts sum
    to the life."""
    run = case.run()
    requests = run.records.requests
    assert requests["request_id"].tolist() == [arrival.request.id for arrival in case.arrivals]
    finished = requests["outcome"] == FINISHED
    assert set(requests["outcome"].tolist()) <= {FINISHED, CANCELLED, REJECTED}
    rejected = set(requests["request_id"][requests["outcome"] == REJECTED].tolist())
    assert rejected <= (set(case.failing) if case.transfer.on_failure == "fail" else set())
    lengths = np.array([arrival.output_tokens for arrival in case.arrivals])
    assert (requests["output_tokens"][finished] == lengths[finished]).all()
    patient = np.array([arrival.cancel_ns is None for arrival in case.arrivals])
    assert (finished | (requests["outcome"] == REJECTED))[patient].all()
    check_lives(run.records)


@given(_cases(), st.sampled_from([None, None, 30.0, 90.0]))
@random_cases(60)
def test_leaps_and_naps_slept_over_change_no_record(case: _Case, stop_ms: float | None) -> None:
    """Engines leap over steps and sleep over calls that have nothing to run until something arrives, a transfer is over
    or a timer is due: the rows are those of stepping, and the run ends when it does."""
    case.stop_ns = None if stop_ms is None else int(stop_ms * MS)
    leapt, stepped = case.run(), case.run(leap=False)
    assert record_hash(leapt.records) == record_hash(stepped.records)
    assert leapt.end_ns == stepped.end_ns
