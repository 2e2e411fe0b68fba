"""vLLM with a disk below the memory of its host: timelines by hand, and what is conserved. Each test names its rule.

Blocks of 16 tokens. Source: vllm/v1/kv_offload/tiering of the 0.32.0 wheel.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from batchsim.base.errors import ScenarioError
from batchsim.drive.simulate import simulate
from batchsim.kernel.core import EngineCore
from batchsim.kernel.disk_copies import DISK, TieringConnector
from batchsim.kernel.host_link import OffloadLink
from batchsim.kernel.offload import OffloadConnector
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import CANCELLED, FINISHED, TIER_LOAD, TIER_STORE, UNFINISHED, Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request
from batchsim.kv.choice import new_kv
from batchsim.metrics.tiers import tier_use
from batchsim.policies.systems.vllm.offload_config import VllmOffloadConfig
from batchsim.policies.systems.vllm.vllm_tiering import VllmTiering
from batchsim.testing.life_sums import check_lives
from batchsim.testing.random_configs import MS
from batchsim.testing.random_engines import Listed, TokenCost
from tests.support.random_cases import few_and_many
from tests.support.tier_lives import parts_of

BLOCK, MAX_LEN = 16, 4096


def _asked(number: int, at_ms: float, prompt: int, output: int, like: int, **more: Any) -> Arrival:
    """A request whose prompt begins as that of all others that are `like` the same number."""
    tokens = TokenIds.of([(prompt_stream(like + 1000), 0, prompt)])
    cancel_ms = more.pop("cancel_ms", None)
    request = Request(number, int(at_ms * MS), prompt, output, tokens=tokens, **more)
    return Arrival(request, output, None if cancel_ms is None else int(cancel_ms * MS))


def _engine(config: VllmOffloadConfig, blocks: int, connector: OffloadConnector) -> VllmTiering:
    kv = new_kv(config, blocks, BLOCK, ids=True)
    return VllmTiering(config, PolicyContext(kv, MAX_LEN, loop=config.traits.loop, connector=connector))


def _connector(store_ns: int = 1000, load_ns: int = 1000, write_ns: int = MS, read_ns: int = MS) -> TieringConnector:
    return TieringConnector(*(OffloadLink(0, ns) for ns in (store_ns, load_ns, write_ns, read_ns)))


def _run(
    arrivals: list[Arrival], blocks: int, chunks: int, *, times: dict[str, int] | None = None, leap: bool = True,
    stop_ns: int | None = None, **knobs: Any,
) -> Records:  # fmt: skip
    """An engine of `blocks` blocks with `chunks` on its host; at the end nothing is pinned or asked for."""
    knobs = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "async_scheduling": False} | knobs
    config, connector, recorder = VllmOffloadConfig(cpu_chunks=chunks, **knobs), _connector(**times or {}), Recorder()
    connector.recorder = recorder
    scheduler, loop = _engine(config, blocks, connector), config.traits.loop
    core = EngineCore(
        scheduler,
        SimExecutor(TokenCost(), MAX_LEN, loop),
        recorder,
        max_model_len=MAX_LEN,
        stop_ns=stop_ns,
        loop=loop,
    )
    simulate(core, Listed(tuple(arrivals)), leap=leap)
    core.check_returned()
    if stop_ns is None:
        tier = scheduler.disk_tier
        tier.check()
        assert tier.num_evictable == tier.num_used and not connector.disk_jobs
        assert not (tier.is_asking or tier._lookups or tier._loading or tier._coming)  # pyright: ignore[reportPrivateUsage]
    records = recorder.records()
    check_lives(records)
    return records


def _rows(records: Records, what: int, where: str) -> list[tuple[int, int]]:
    """(request, tokens) of each copy."""
    rows = records.states[records.states["state"] == what]
    return [(int(row["request_id"]), int(row["blocker"])) for row in rows if records.texts[int(row["reason"])] == where]


def test_what_the_host_gave_up_comes_back_from_the_disk() -> None:
    """5 blocks, 4 chunks on the host: each prompt of 4 pushes the other out of both."""
    asked = [_asked(0, 0, 65, 1, 0), _asked(1, 100, 65, 1, 1), _asked(2, 200, 65, 1, 0)]
    records = _run(asked, 5, 4)
    assert _rows(records, TIER_STORE, DISK) == [(0, 64), (1, 64)]
    assert _rows(records, TIER_LOAD, DISK) == [(2, 64)]
    assert _rows(records, TIER_LOAD, "host") == [(2, 64)]


def test_a_prompt_from_the_disk_waits_for_the_answer_then_for_its_copy() -> None:
    """Asked for at 200 ms, known at the call 1 ms behind, 4 x 1 ms to read, noticed as the next call finds that."""
    asked = [_asked(0, 0, 65, 1, 0), _asked(1, 100, 65, 1, 1), _asked(2, 200, 65, 1, 0)]
    mine = parts_of(_run(asked, 5, 4), 2)
    assert mine["queued:kv_disk"] == 5 * MS
    assert mine["queued:kv_load"] == 4000


def test_each_prompt_with_a_whole_chunk_waits_a_call_for_the_disk_to_say_no() -> None:
    """Rule 2: 15 tokens are no chunk; 16 are one, which the idle engine asks for and sleeps 1 ms."""
    short, whole = (parts_of(_run([_asked(0, 0, prompt, 1, 0)], 10, 4), 0) for prompt in (15, 16))
    assert "queued:kv_disk" not in short
    assert whole["queued:kv_disk"] == MS


def test_what_is_on_the_disk_is_not_written_again() -> None:
    """The first prompt is pushed out, and with its blocks gone everywhere but on the disk it is read, not written."""
    asked = [_asked(i, 100 * i, 65, 1, i % 2) for i in range(6)]
    records = _run(asked, 5, 4)
    assert _rows(records, TIER_STORE, DISK) == [(0, 64), (1, 64)]
    assert [request for request, _ in _rows(records, TIER_LOAD, DISK)] == [2, 3, 4, 5]


def test_what_is_being_written_to_the_disk_is_not_evicted() -> None:
    """A write of 4 x 60 ms is under way as the next prompt is offered: refused at each of its steps."""
    asked = [_asked(0, 0, 65, 1, 0), _asked(1, 100, 65, 3, 1)]
    assert _rows(_run(asked, 12, 4), TIER_STORE, "host") == [(0, 64), (1, 64)]
    records = _run(asked, 12, 4, times={"write_ns": 60 * MS})
    assert _rows(records, TIER_STORE, "host") == [(0, 64)]


def test_a_host_smaller_than_the_prompt_brings_chunks_that_push_each_other_out() -> None:
    """Rule 3: 2 chunks on the host, a prompt of 4 on the disk. The first two come, then those behind, for which these
    go again, as only the chunk at hand is kept; then there is no room for the first, and all is computed."""
    asked = [_asked(0, 0, 65, 20, 0), _asked(1, 100, 65, 20, 1), _asked(2, 200, 65, 1, 0)]
    records = _run(asked, 6, 2, max_num_batched_tokens=32, max_num_seqs=4)
    assert _rows(records, TIER_STORE, DISK)[:2] == [(0, 32), (0, 32)]
    assert [row for row in _rows(records, TIER_LOAD, DISK) if row[0] == 2] == [(2, 32), (2, 32)]
    assert _rows(records, TIER_LOAD, "host") == []
    use = tier_use(records.requests, [records], 1)
    assert use.disk.loads >= 2 and use.disk.loaded_first.sum() == 0  # none of it was of use


def test_chunks_that_push_each_other_out_without_end_are_an_error() -> None:
    """2 places for 3 chunks, each call's there by the next: the third pushes out the second, which pushes out the
    first, for which the third goes."""
    asked = [_asked(0, 0, 49, 20, 0), _asked(1, 100, 65, 20, 1), _asked(2, 200, 49, 1, 0)]
    with pytest.raises(ScenarioError, match=r"request 2: its 3 chunks .* fetched 301 times .* the 2 of the host with"):
        _run(asked, 6, 2, times={"read_ns": 0}, max_num_batched_tokens=32, max_num_seqs=4)


def test_reads_and_writes_have_links_of_their_own() -> None:
    """While 4 x 40 ms are written another prompt's 4 chunks are read in 4 ms."""
    asked = [_asked(0, 0, 65, 1, 0), _asked(1, 300, 65, 1, 1), _asked(2, 340, 65, 1, 0)]
    fast = _run(asked, 5, 12, times={"read_ns": MS, "write_ns": 40 * MS})
    assert _rows(fast, TIER_LOAD, DISK) == []
    asked = [_asked(0, 0, 65, 1, 0), _asked(1, 300, 65, 1, 1), _asked(3, 600, 65, 1, 3), _asked(4, 640, 65, 1, 0)]
    records = _run(asked, 5, 8, times={"read_ns": MS, "write_ns": 40 * MS})
    assert _rows(records, TIER_LOAD, DISK) == [(4, 64)]
    assert parts_of(records, 4)["queued:kv_disk"] < 10 * MS


def test_a_disk_needs_its_connector_and_no_threshold() -> None:
    """One line each."""
    config = VllmOffloadConfig(cpu_chunks=4)
    with pytest.raises(ScenarioError, match="by a TieringConnector"):
        _engine(config, 8, OffloadConnector(OffloadLink(0, 1), OffloadLink(0, 1)))
    with pytest.raises(ScenarioError, match="store_threshold 2 is not simulated with a disk"):
        _engine(VllmOffloadConfig(cpu_chunks=4, store_threshold=2), 8, _connector())


def test_what_waits_asks_the_disk_for_more_as_decodes_take_its_blocks() -> None:
    """Request 10 has a chunk on the GPU, whose blocks the running ones take while it waits: leaps end before."""
    sizes = [(160, 1, 2), (1, 1, 0), (1, 1, 0), (1, 1, 0), (1, 33, 0), (1, 1, 0), (115, 19, 4), (1, 1, 0), (99, 16, 6)]
    sizes += [(1, 1, 0), (64, 1, 2), (65, 1, 0), (1, 1, 0)]
    asked = [_asked(i, 60 * (i > 5), prompt, output, like) for i, (prompt, output, like) in enumerate(sizes)]
    times = {"store_ns": 0, "load_ns": 0, "write_ns": 0, "read_ns": 9 * MS}
    knobs = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "blocks_per_chunk": 2, "times": times}
    leapt, stepped = (_run(asked, 20, 3, leap=leap, **knobs) for leap in (True, False))
    assert leapt.states.tolist() == stepped.states.tolist()
    assert _rows(leapt, TIER_LOAD, DISK)[:2] == [(10, 32), (10, 32)]


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    at_ms, asked = 0.0, list[Arrival]()
    for number in range(draw(st.integers(1, 14))):
        at_ms += draw(st.sampled_from([0.0, 0.5, 3.0, 20.0, 60.0]))
        cancel = draw(st.sampled_from([None, None, None, 2.0, 15.0]))
        more: dict[str, Any] = {} if cancel is None else {"cancel_ms": at_ms + cancel}
        like, prompt = draw(st.integers(0, 4)), draw(st.integers(1, 200))
        asked.append(_asked(number, at_ms, prompt, draw(st.integers(1, 40)), like, **more))
    link = st.sampled_from([0, 20_000, MS, 9 * MS])
    return {
        "arrivals": asked,
        "blocks": draw(st.sampled_from([16, 20, 40])),
        "chunks": draw(st.sampled_from([1, 3, 8, 20])),
        "times": {name: draw(link) for name in ("store_ns", "load_ns", "write_ns", "read_ns")},
        "stop_ns": draw(st.sampled_from([None, None, 40 * MS])),
        "async_scheduling": draw(st.booleans()),
        "max_num_seqs": draw(st.sampled_from([1, 3, 16])),
        "max_num_batched_tokens": draw(st.sampled_from([32, 64, 512])),
        "blocks_per_chunk": draw(st.sampled_from([1, 1, 2])),
        "eviction_policy": draw(st.sampled_from(["lru", "arc"])),
        "offload_prompt_only": draw(st.booleans()),
    }


def _is_conserved(case: dict[str, Any]) -> None:
    """Every request ends once, blocks, chunks and questions come back, and leaps leave the rows of stepping, unless the
    host is too small for what is fetched; then both stop with that."""
    try:
        records = _run(**case)
    except ScenarioError as error:
        assert "without end" in str(error)
        with pytest.raises(ScenarioError, match="without end"):
            _run(leap=False, **case)
        return
    if case["stop_ns"] is None:
        assert len(records.requests) == len(case["arrivals"])
        assert UNFINISHED not in records.requests["outcome"]
    assert set(records.requests["outcome"].tolist()) <= {FINISHED, CANCELLED, UNFINISHED}
    stepped = _run(leap=False, **case)
    for table, other in zip(*([each.requests, each.steps, each.states] for each in (records, stepped)), strict=True):
        assert table.tolist() == other.tolist()


test_requests_and_chunks_are_conserved, test_they_are_conserved_in_many_more_cases = few_and_many(
    _is_conserved, _cases(), few=60, many=1500
)
