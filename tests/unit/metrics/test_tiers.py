"""KV in the memory of the host at one engine: times by hand, and what is conserved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from batchsim.drive.simulate import simulate
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.offload import OffloadConnector
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import (
    CANCELLED,
    FINISHED,
    STORE_FLUSH,
    TIER_LOAD,
    TIER_STORE,
    UNFINISHED,
    Recorder,
    Records,
)
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import TailFirstKV, new_kv
from batchsim.policies.systems.vllm.offload_config import VllmOffloadConfig
from batchsim.policies.systems.vllm.vllm import Vllm
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_offload import VllmOffload
from batchsim.testing.life_sums import check_lives
from batchsim.testing.random_configs import MS
from batchsim.testing.random_engines import Listed, TokenCost
from batchsim.workload.traces.reuse import reuse_curve
from batchsim.workload.traces.trace_rows import HashIds, TraceRows
from tests.support.random_cases import few_and_many
from tests.support.tier_lives import moved, parts_of

BLOCK = 16
MAX_LEN = 4096


def _asked(number: int, at_ms: float, prompt: int, output: int, like: int, **more: Any) -> Arrival:
    """A request whose prompt begins as that of all others that are `like` the same number."""
    tokens = TokenIds.of([(prompt_stream(like + 1000), 0, prompt)])
    cancel_ms = more.pop("cancel_ms", None)
    request = Request(number, int(at_ms * MS), prompt, output, tokens=tokens, **more)
    return Arrival(request, output, None if cancel_ms is None else int(cancel_ms * MS))


def _run(
    arrivals: list[Arrival],
    blocks: int,
    chunks: int | None = None,
    *,
    store_ns: int = 1000,
    load_ns: int = 1000,
    stop_ns: int | None = None,
    leap: bool = True,
    calls: list[int] | None = None,
    cost: TokenCost | None = None,
    **knobs: Any,
) -> Records:
    """An engine of `blocks` blocks of 16 tokens, with a tier of so many `chunks` of one block unless None. `calls` gets
    the number of calls of its scheduler."""
    engine: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048} | {
        name: knobs.pop(name) for name in list(knobs) if name in VllmConfig.__dataclass_fields__
    }
    config: Any = VllmConfig(**engine)
    connector = None
    if chunks is not None:
        config = VllmOffloadConfig.tier(config, cpu_chunks=chunks, **knobs)
        connector = OffloadConnector(OffloadLink(0, store_ns), OffloadLink(0, load_ns))
    caches = config.enable_prefix_caching is not False
    kv = new_kv(config, blocks, BLOCK, ids=True) if caches else TailFirstKV(blocks, BLOCK)
    loop = config.traits.loop
    context = PolicyContext(kv, MAX_LEN, loop=loop, connector=connector)
    scheduler = (Vllm if connector is None else VllmOffload)(config, context)
    recorder = Recorder()
    if connector is not None:
        connector.recorder = recorder
    core = EngineCore(
        scheduler,
        SimExecutor(cost or TokenCost(), MAX_LEN, loop),
        recorder,
        max_model_len=MAX_LEN,
        stop_ns=stop_ns,
        loop=loop,
    )
    if calls is not None:
        calls.append(0)
        schedule = scheduler.schedule

        def counted(now_ns: int, drain: bool) -> Batch | Idle:
            calls[-1] += 1
            return schedule(now_ns, drain)

        scheduler.schedule = counted
    simulate(core, Listed(tuple(arrivals)), leap=leap)
    core.check_returned()
    if isinstance(scheduler, VllmOffload) and stop_ns is None:
        assert scheduler.tier.num_evictable == scheduler.tier.num_used
        scheduler.tier.check()
    return recorder.records()


# ---- by hand


def test_a_load_is_waited_for_in_three_parts() -> None:
    """A prompt of 4 blocks whose KV the GPU no longer has: the load waits for the step that was launched with it, takes
    4 x 1 ms, and goes on with the call after the one that noticed it."""
    asked = [_asked(0, 0, 65, 1, 0), _asked(1, 100, 150, 1, 1), _asked(2, 200, 65, 1, 0)]
    records = _run(asked, 10, 100, load_ns=MS, async_scheduling=False)
    assert moved(records, TIER_LOAD) == {2: 64}
    mine = parts_of(records, 2)
    assert mine["queued:kv_load"] == 4 * MS
    assert 0 < mine["queued:kv_loaded"] <= 2 * MS
    assert records.requests["cached_tokens"].tolist() == [0, 0, 0]
    check_lives(records)


def test_a_store_is_flushed_and_the_device_waits() -> None:
    """Stores of 10 ms a block: the second prompt needs the blocks of the first one, which has ended, before these are
    stored. The time that the device stands idle for that is on record, and in the life of the second request."""
    asked = [_asked(0, 0, 80, 1, 0), _asked(1, 1, 150, 2, 1)]
    records = _run(asked, 10, 100, store_ns=10 * MS)
    flushes = records.states[records.states["state"] == STORE_FLUSH]
    assert len(flushes) == 1
    mine = parts_of(records, 1)
    assert mine["kv_store_flush"] == flushes["blocker"].sum() > 30 * MS
    check_lives(records)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("chunks", "stored"), [(10_000, 40), (1, 0)])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_tier_that_is_never_hit_changes_no_time_of_a_request(
    ahead: bool, chunks: int, stored: int, policy: str
) -> None:
    """Prompts that share nothing: tokens, times and steps are those of an engine without a tier, unless a launch waits
    for stores, as none does here. So they are with one chunk, as near as vLLM starts to none, for which every prompt is
    too long. Blocks are free a step later, as of any engine with a connector that schedules ahead."""
    asked = [_asked(i, 7.3 * i, 40 + 17 * i % 200, 3 + i % 5, i) for i in range(40)]
    plain = _run(asked, 400, cost=_NoHost(), async_scheduling=ahead)
    knobs: dict[str, Any] = {"store_ns": 1, "eviction_policy": policy, "async_scheduling": ahead}
    tiered = _run(asked, 400, chunks, cost=_NoHost(), **knobs)
    assert moved(tiered, TIER_LOAD) == {}
    assert len(moved(tiered, TIER_STORE)) == stored
    names = [name for name in plain.requests.dtype.names or () if name not in ("request_class", "tenant", "reason")]
    assert plain.requests[names].tolist() == tiered.requests[names].tolist()
    same = [name for name in plain.steps.dtype.names or () if name != "free_blocks" or not ahead]
    assert plain.steps[same].tolist() == tiered.steps[same].tolist()


@pytest.mark.parametrize("ahead", [False, True])
def test_stores_under_way_cost_an_idle_engine_its_sleep_alone(ahead: bool) -> None:
    """Requests one by one, each sent while the stores of the one before go on, for which the engine stays awake between
    sleeps of 1 ms: it begins up to one later than without a tier, and takes as long."""
    asked = [_asked(i, 100.3 * i, 40 + 17 * i % 200, 3 + i % 5, i) for i in range(20)]
    plain = _run(asked, 400, cost=_NoHost(), async_scheduling=ahead)
    tiered = _run(asked, 400, 10_000, cost=_NoHost(), store_ns=40 * MS, async_scheduling=ahead)
    late = tiered.requests["scheduled_ns"] - plain.requests["scheduled_ns"]
    assert (late >= 0).all() and (late <= MS).all() and late.max() > 0
    for name in ("first_token_ns", "last_token_ns"):
        assert (tiered.requests[name] - plain.requests[name] == late).all()


class _NoHost(TokenCost):
    """Steps whose time is all the device's: synchronous engines and those ahead count the host's part differently."""

    def host_ns(self, batch: Batch | None) -> tuple[int, int]:
        return 0, 0


@pytest.mark.parametrize("ahead", [False, True])
def test_leaps_change_no_record(ahead: bool) -> None:
    """An engine with a tier leaps over decodes while no copy begins or ends, with a request waiting or none,
    and every row is that of stepping."""
    asked = [_asked(i, 40 * i, 100 + 7 * i, 60, i % 3) for i in range(12)]
    for blocks, chunks, load_ns in ((30, 200, 1000), (60, 20, 9 * MS), (40, 7, MS)):
        both: list[Any] = []
        calls: list[int] = []
        for leap in (True, False):
            run = {"leap": leap, "calls": calls, "async_scheduling": ahead, "load_ns": load_ns, "store_ns": 4 * MS}
            records = _run(asked, blocks, chunks, **run)
            tables = records.requests, records.steps, records.states, records.lanes
            both.append([table.tolist() for table in tables])
        assert both[0] == both[1]
        assert calls[0] < 0.9 * calls[1], (blocks, chunks)


def test_a_stopped_engine_copies_nothing_twice() -> None:
    """The run is stopped while a load and a store are under way and steps go on to be launched: each is made once."""
    asked = [_asked(0, 0, 65, 1, 0), _asked(1, 100, 150, 40, 1), _asked(2, 200, 65, 30, 0), _asked(3, 200, 90, 30, 3)]
    for stop_ms in range(200, 220):
        records = _run(asked, 20, 100, load_ns=3 * MS, store_ns=3 * MS, stop_ns=stop_ms * MS)
        for remark in (TIER_LOAD, TIER_STORE):
            rows = records.states[records.states["state"] == remark]
            assert len(set(rows["request_id"].tolist())) == len(rows)


def test_round_r_of_equal_turns_hits_r_of_r_plus_one() -> None:
    """20 clients, each of whose turns is the prompt before and as many new tokens again, whose KV the GPU has lost
    meanwhile: in round r, from 0, r of r + 1 parts come from the host while all clients' prompts fit there."""
    users, turn, rounds = 20, 160, 5
    number, asked = 0, list[Arrival]()
    for r in range(rounds):
        for user in range(users):
            asked.append(_asked(number, 100 * number, turn * (r + 1), 1, user))
            number += 1
    blocks = turn * rounds // BLOCK + 2
    records = _run(asked, blocks, users * turn * rounds // BLOCK)
    loads = moved(records, TIER_LOAD)
    for k, arrival in enumerate(asked):
        r, prompt = k // users, arrival.request.prompt_tokens
        cached = int(records.requests["cached_tokens"][k])
        assert (loads.get(k, 0) + cached) / prompt == pytest.approx(r / (r + 1)), k
    # With room for 3 parts of each, the fourth part of each client pushes out the last ones, tail first, of those that
    # come next: the first client has 3 parts in round 3, the second 2, the third 1, and from then on none has any.
    few = _run(asked, blocks, users * turn * 3 // BLOCK)
    loads, cached = moved(few, TIER_LOAD), few.requests["cached_tokens"]
    hits = [(loads.get(k, 0) + int(cached[k])) // turn for k in range(len(asked))]
    assert hits == [0] * users + [1] * users + [2] * users + [3, 2, 1] + [0] * (2 * users - 3)


@pytest.mark.parametrize("seed", range(4))
def test_each_size_of_a_host_finds_what_stack_distances_foretell(seed: int) -> None:
    """Conversations one request at a time, below a GPU that caches nothing: the tokens loaded at every size of the host
    are those of the curve of `trace reuse`. A request's chunks are touched as it ends, tail first."""
    rng, texts, unused = np.random.default_rng(seed), list[list[int]](), 0
    for _ in range(80):
        begun = list(texts[rng.integers(len(texts))]) if texts and rng.random() < 0.8 else []
        begun = begun[: rng.integers(len(begun) + 1)] if rng.random() < 0.4 else begun
        more = int(rng.integers(1, 5))
        texts.append([*begun, *range(unused, unused + more)])
        unused += more
    asked, lengths = list[Arrival](), list[int]()
    for number, text in enumerate(texts):
        lengths.append(BLOCK * len(text) + int(rng.integers(1, BLOCK)))
        own = (prompt_stream(10_000 + number), 0, lengths[-1] - BLOCK * len(text))
        tokens = TokenIds.of([*((prompt_stream(unit), 0, BLOCK) for unit in text), own])
        asked.append(Arrival(Request(number, 2000 * MS * number, lengths[-1], 1, tokens=tokens), 1))
    hashed = HashIds.of(BLOCK, np.concatenate(texts), np.cumsum([0, *map(len, texts)]))
    ones = np.ones(len(texts), np.int64)
    curve = reuse_curve(TraceRows(np.arange(len(texts)), np.array(lengths), ones, "made", "made", hash_ids=hashed))
    largest = max(map(len, texts))
    sizes = [size for size in (largest, largest + 1, 20, 30, 45, 60, 90, 130, 200) if size >= largest]
    found = [
        sum(moved(_run(asked, largest + 2, size, enable_prefix_caching=False), TIER_LOAD).values()) for size in sizes
    ]
    assert found == [round(curve.hit_rate(BLOCK * size) * curve.num_tokens) for size in sizes]
    assert len(set(found)) > 3, "the sizes make a difference"


def test_a_working_set_that_the_gpu_holds_gains_nothing() -> None:
    """Ten documents of 2,000 tokens, each with a word behind it, read five times beside a GPU cache of 445,000 tokens:
    no load, and every TTFT as without a tier."""
    asked = [_asked(i, 400 * i, 2001, 2, i % 10) for i in range(50)]
    plain = _run(asked, 445_000 // BLOCK)
    tiered = _run(asked, 445_000 // BLOCK, 100_000, store_ns=100)
    assert moved(tiered, TIER_LOAD) == {}
    assert plain.requests["first_token_ns"].tolist() == tiered.requests["first_token_ns"].tolist()


def test_a_prompt_of_whole_blocks_has_its_last_block_loaded_though_the_gpu_has_all() -> None:
    """vLLM 0.33.0, offloading/scheduler.py: the prefix cache leaves a token to compute, so that of 125 blocks it gives
    124; the tier gives the last one, and a load is waited for. It is slower than without a tier."""
    asked = [_asked(i, 400 * i, 2000, 2, 0) for i in range(2)]
    plain, tiered = (_run(asked, 445_000 // BLOCK, chunks) for chunks in (None, 1000))
    assert moved(tiered, TIER_LOAD) == {1: BLOCK}
    assert tiered.requests["first_token_ns"][1] > plain.requests["first_token_ns"][1]


def test_a_working_set_that_the_gpu_does_not_hold_gains_what_prefill_takes_longer_than_loading() -> None:
    """12 documents of 2,000 tokens in turn, 1.5 times what 1,000 blocks hold of them: LRU finds none on the GPU, and
    each later reading is sooner by hit tokens x (prefill - transfer) a token, within 10 %."""
    asked = [_asked(i, 400 * i, 2000, 2, i % 12) for i in range(48)]
    load_ns = 100_000  # a block, of which the computation takes 480,000
    plain = _run(asked, 1000)
    tiered = _run(asked, 1000, 12 * 125, load_ns=load_ns)
    ttft = [records.requests["first_token_ns"] - records.requests["sent_ns"] for records in (plain, tiered)]
    assert (plain.requests["cached_tokens"][12:] == 0).all()
    loads = moved(tiered, TIER_LOAD)
    assert set(loads) == set(range(12, 48))
    assert set(loads.values()) == {2000}
    gain = (ttft[0] - ttft[1])[12:]
    formula = 2000 * (TokenCost().per_token_ns - load_ns / BLOCK)
    assert gain == pytest.approx(np.full(36, formula), rel=0.1)


@pytest.mark.parametrize("cancel_ms", [201, 202, 203, 204.5, 206, 209])
def test_a_client_may_give_up_while_its_kv_is_loaded(cancel_ms: float) -> None:
    """All blocks and chunks come back, and the record ends there."""
    asked = [_asked(0, 0, 65, 1, 0), _asked(1, 100, 150, 1, 1), _asked(2, 200, 65, 30, 0, cancel_ms=cancel_ms)]
    records = _run(asked, 10, 100, load_ns=MS)
    assert records.requests["outcome"].tolist() == [FINISHED, FINISHED, CANCELLED]
    check_lives(records)


# ---- random


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    at_ms, asked = 0.0, list[Arrival]()
    for number in range(draw(st.integers(1, 16))):
        at_ms += draw(st.sampled_from([0.0, 0.5, 3.0, 20.0, 60.0]))
        cancel = draw(st.sampled_from([None, None, None, 2.0, 15.0, 60.0]))
        more: dict[str, Any] = {} if cancel is None else {"cancel_ms": at_ms + cancel}
        like, priority = draw(st.integers(0, 4)), draw(st.integers(0, 2))
        prompt, output = draw(st.integers(1, 200)), draw(st.integers(1, 40))
        asked.append(_asked(number, at_ms, prompt, output, like, priority=priority, **more))
    return {
        "arrivals": asked,
        "blocks": draw(st.sampled_from([16, 20, 40, 200])),
        "chunks": draw(st.sampled_from([1, 5, 20, 200])),
        "store_ns": draw(st.sampled_from([0, 20_000, MS, 9 * MS])),
        "load_ns": draw(st.sampled_from([0, 20_000, MS, 9 * MS])),
        "stop_ns": draw(st.sampled_from([None, None, 40 * MS])),
        "async_scheduling": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 16])),
        "max_num_batched_tokens": draw(st.sampled_from([32, 64, 512])),
        "blocks_per_chunk": draw(st.sampled_from([1, 1, 2, 4])),
        "eviction_policy": draw(st.sampled_from(["lru", "arc"])),
        "store_threshold": draw(st.sampled_from([0, 2])),
        "offload_prompt_only": draw(st.booleans()),
    }


CASES = _cases()


def is_conserved(case: dict[str, Any]) -> None:
    """Every request ends once, with all its tokens unless its client gave up or the run was cut; all blocks and chunks
    come back, all parts sum to the life, and steps that are leapt over leave the rows of stepping."""
    arrivals = case["arrivals"]
    records = _run(**case)
    requests = records.requests
    assert requests["request_id"].tolist() == list(range(len(requests)))
    if case["stop_ns"] is None:
        assert len(requests) == len(arrivals)
        assert UNFINISHED not in requests["outcome"]
    for row, arrival in zip(requests, arrivals, strict=False):
        if row["outcome"] == FINISHED:
            assert row["output_tokens"] == arrival.output_tokens
        elif case["stop_ns"] is None:
            assert arrival.cancel_ns is not None
    check_lives(records)
    stepped = _run(leap=False, **case)
    for table, other in zip(*([each.requests, each.steps, each.states] for each in (records, stepped)), strict=True):
        assert table.tolist() == other.tolist()


test_requests_and_blocks_are_conserved, test_they_are_conserved_in_many_more_cases = few_and_many(
    is_conserved, CASES, few=60, many=1500
)
