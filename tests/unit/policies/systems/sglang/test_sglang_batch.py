"""What SGLang's running batch and its cache remember from step to step, by hand: order, full flag, evictions, recency.

Times in ns with stepping's LinearCost: a step is 10, 1 a prefill token, 2 a decode. The KV block is SGLang's page.
"""

from __future__ import annotations

from typing import Any

import pytest

from batchsim.kernel.batch import Batch
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.record import BLOCKED, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Request, Sequence
from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.sglang import Sglang, SglangConfig
from batchsim.policies.systems.sglang.waiting_queue import Fcfs
from tests.support.sglang_runs import sharing, timeline
from tests.support.stepping import LinearCost
from tests.support.whole_batches import requests

TRUSTING = {"schedule_conservativeness": 0.0}  # the running reserve nothing

# ---- the order of the batch


def test_after_a_retraction_the_batch_is_in_the_order_of_its_sort() -> None:
    """18 tokens of prompts and 3 a step fill 36 after 6 steps; of equal outputs the longest prompt goes, 2.

    Sorted, the shortest prompt stands first: 1 is before 0 from then on.
    """
    done = timeline("0:6->12 5:4->12 20:8->12", page=1, tokens=36, **TRUSTING)
    assert done.items[:4] == [[(0, 6)], [(1, 4)], [(2, 8)], [(0, 1), (1, 1), (2, 1)]]
    at = next(i for i, row in enumerate(done.log) if row.preempted)
    assert (at, done.log[at].preempted, done.items[at]) == (9, [2], [(1, 1), (0, 1)])
    assert done.items[at + 1] == [(1, 1), (0, 1)]


# ---- the full flag


def test_what_fills_an_empty_batch_is_tried_again_at_once() -> None:
    """Beside the whole cap of 0 there is no room for 1; once 0 runs, it is trusted to need nothing, and 1 comes in."""
    done = timeline("0:6->12 0:4->12", page=1, tokens=36, **TRUSTING)
    assert done.items[:3] == [[(0, 6)], [(1, 4)], [(0, 1), (1, 1)]]


def test_a_batch_that_ran_before_stays_full_until_somebody_leaves() -> None:
    """The same beside request 0, which runs: 2 does not fit beside the cap of 1 and waits for the end of 0."""
    done = timeline("0:4->9 5:6->12 5:4->12", page=1, tokens=36, **TRUSTING)
    assert [next(i for i, items in enumerate(done.items) if (2, 4) in items)] == [10]
    assert (0, 1) in done.items[9]
    assert (0, 1) not in done.items[11]


def test_a_mixed_step_loses_the_flag() -> None:
    """The same with decodes that ride along: the batch is a new one after it, and 2 is tried again in the next step."""
    done = timeline(
        "0:4->9 5:6->12 5:4->12", page=1, tokens=36, enable_mixed_chunk=True, chunked_prefill_size=64, **TRUSTING
    )
    assert done.items[:3] == [[(0, 4)], [(1, 6), (0, 1)], [(2, 4), (1, 1), (0, 1)]]


# ---- evictions


@pytest.mark.parametrize(("page", "computed"), [(4, 12), (2, 12), (1, 4)])
def test_a_prefill_evicts_for_a_page_more_than_it_needs(page: int, computed: int) -> None:
    """24 of 40 tokens are free and 24 needed; in pages of 4 or 2 text 0 is evicted for one more, and computed anew."""
    arrivals = sharing("0:8->1 100:8->1 200:24->1 300:12->1", ((0, 8),), ((1, 8),), ((2, 24),), ((0, 8), (3, 4)))
    assert timeline(arrivals, page=page, tokens=40).items[-1] == [(3, computed)]


def test_a_decode_step_evicts_for_a_page_a_request() -> None:
    """Of 10 pages text 0 has 2, and 1 is free when 1 and 2 decode: only 1 needs it, but text 0 goes for a second.

    Beside request 2 alone, which has a page of its own, it stays.
    """
    prompts: tuple[tuple[tuple[int, int], ...], ...] = (((0, 8),), ((1, 12),), ((2, 13),), ((0, 8), (3, 4)))
    done = timeline(sharing("0:8->1 100:12->3 105:13->3 300:12->1", *prompts), tokens=40, **TRUSTING)
    assert done.items[3] == [(1, 1), (2, 1)]
    assert done.items[-1] == [(3, 12)]


def test_decodes_that_sit_a_mixed_step_out_evict_all_the_same() -> None:
    """1, 2 and 3 need a page each; beside 4 one is free, and text 0's: it is evicted though that does not suffice.

    Request 5, which comes before they decode again, computes all of it.
    """
    done = timeline(
        sharing(
            "0:4->1 100:2->4 105:3->4 115:4->4 135:7->1 150:6->1",
            *[((0, 4),), ((1, 2),), ((2, 3),), ((3, 4),), ((4, 7),), ((0, 4), (5, 2))],
        ),
        tokens=28,
        enable_mixed_chunk=True,
        chunked_prefill_size=16,
        **TRUSTING,
    )
    assert done.items[3:5] == [[(3, 4), (2, 1), (1, 1)], [(4, 7)]]
    assert done.items[5][0] == (5, 6)


# ---- recency


def pressed(num_before: int) -> list[Arrival]:
    """After `num_before` passes texts 0 and 1, then 30 tokens for which one of them goes, and 0 and 1 again."""
    before = "0:1->1 " * num_before
    return sharing(
        before + "1000:8->1 2000:8->1 3000:30->1 3000:12->1 3000:12->1",
        *[((9, 1),)] * num_before,
        ((0, 8),),
        ((1, 8),),
        ((2, 30),),
        ((0, 8), (3, 4)),
        ((1, 8), (4, 4)),
    )


@pytest.mark.parametrize("knobs", [{}, {"enable_priority_scheduling": True, "disable_priority_preemption": True}])
@pytest.mark.parametrize(("num_before", "computed"), [(30, 4), (29, 12), (31, 12)])
def test_every_32nd_pass_uses_the_prefixes_of_those_who_wait(
    num_before: int, computed: int, knobs: dict[str, Any]
) -> None:
    """In the 33rd pass texts 0 and 1 are used by those that wait for the slot, the first of them last: 1 is evicted.

    In others text 0 is the older one, and goes. In order of priority, too.
    """
    done = timeline(pressed(num_before), page=1, tokens=40, max_running_requests=1, **knobs)
    assert done.items[-2] == [(num_before + 3, computed)]


@pytest.mark.parametrize(("knob", "computed"), [("prefill_max_requests", 4), ("max_running_requests", 12)])
def test_the_head_is_looked_at_before_the_number_of_requests(knob: str, computed: int) -> None:
    """Refused by prefill_max_requests, text 0 has been used and stays; refused a slot, it has not."""
    assert timeline(pressed(0), page=1, tokens=40, **{knob: 1}).items[-2] == [(3, computed)]


def test_what_ends_with_its_prompt_is_used_in_batch_order() -> None:
    """0 ends as text 1 of request 1 is stored: text 0 is the older one, and goes when 2 and 3 come.

    Request 1, retracted for 3, computes only its last token when it returns.
    """
    prompts = [((i, 8),) for i in (0, 1)] + [((i, 20),) for i in (2, 3)]
    arrivals = sharing("0:8->1p0 0:8->9p0 5:20->1p50 5:20->1p50", *prompts)
    done = timeline(arrivals, page=1, tokens=50, max_running_requests=2, enable_priority_scheduling=True)
    assert done.items[:3] == [[(0, 8), (1, 8)], [(2, 20), (3, 20)], [(1, 1)]]


def test_there_are_no_passes_while_the_batch_is_full() -> None:
    """Request 3 runs for 45 steps; 4, of text 0, does not fit beside it, and 5, of text 1, waits behind 4.

    When 3 needs the memory nobody has looked at 5 again, so that text 1 goes, not the younger text 2.
    """
    prompts: tuple[tuple[tuple[int, int], ...], ...] = (
        *[((i, 8),) for i in (0, 1, 2)],
        ((3, 10),),
        *[((text, 8), (i, 4)) for text, i in ((0, 4), (1, 5), (2, 6))],
    )
    arrivals = sharing("0:8->1 100:8->1 200:8->1 300:10->45 305:12->20 305:12->1 305:12->1", *prompts)
    done = timeline(arrivals, page=1, tokens=70)
    assert done.items[-20] == [(4, 4), (5, 12), (6, 4)]


def test_all_of_what_waits_is_used() -> None:
    """A page of 8 is all that waits: it counts, where a match to compute from would leave one token out."""
    kv = RadixKV(4, 8)
    texts = [TokenIds.of([(prompt_stream(i), 0, 8)]) for i in range(2)]
    for i, tokens in enumerate(texts):
        seq = Sequence(Request(i, 0, 8, 1, tokens=tokens))
        assert kv.allocate(seq, 8)
        seq.settled_computed_tokens = 8
        kv.insert(seq)
        kv.free(seq)
    queue = Fcfs(kv)
    queue.push(Sequence(Request(2, 0, 8, 1, tokens=texts[0])))
    queue.arrange()
    kv.make_room(3)
    found = [kv.match(Sequence(Request(3, 0, 8, 1, tokens=tokens)), 8) for tokens in texts]
    assert found == [8, 0]


# ---- what is repeated, and who stands in the way


def test_decodes_alone_are_repeated_and_prompts_are_not() -> None:
    """Asked of the step that was just made: prompts are over, decodes go on while nobody waits."""
    scheduler = Sglang(
        SglangConfig(chunked_prefill_size=-1, disable_radix_cache=True), PolicyContext(CountingKV(10, 4), 100)
    )
    core = EngineCore(scheduler, SimExecutor(LinearCost(), 100), Recorder(), max_model_len=100)
    core.submit(requests("0:4->9")[0])
    steps = []
    now_ns = 0
    for _ in range(2):
        batch = core.schedule(now_ns, drain=True)
        assert isinstance(batch, Batch)
        now_ns = core.execute(batch, now_ns)
        steps.append((bool(batch.chunks), scheduler.repeat(batch, now_ns)))
        core.complete(now_ns)
    assert steps == [(True, False), (False, True)]


def test_a_head_that_lacks_tokens_names_the_prompt_in_its_way() -> None:
    """0 takes the whole chunk of 8 while 1 waits behind it."""
    states = timeline("0:20->1 0:4->1", chunked_prefill_size=8).records.states
    rows = states[states["state"] == BLOCKED]
    assert list(zip(rows["request_id"].tolist(), rows["blocker"].tolist(), strict=True)) == [(1, 0)]
