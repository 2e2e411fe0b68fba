"""vLLM with images: the encoder's budget and cache against a naive model, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from batchsim.base.errors import SchedulerStalled
from batchsim.cost.constant import Constant
from batchsim.cost.encoder import Encoding, ItemTime
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.kernel.batch import Batch, Idle
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import ItemsContext, PolicyContext
from batchsim.kernel.record import BLOCKED, Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.tokens import TokenIds, prompt_stream
from batchsim.kernel.types import Arrival, Item, Request
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_items import VllmWithItems
from tests.plain.vllm import calls_in_flight
from tests.plain.vllm_items import NaiveVllmItems
from tests.support.engine import DRIVERS, Requests
from tests.unit.policies.systems.vllm import test_naive_vllm
from tests.unit.policies.systems.vllm.test_naive_vllm import HOST_NS, NAP_NS, Watching, equal_rows, in_both_drivers

MAX_MODEL_LEN = 160
SIZES = (6, 10, 24, 30)
CONTENTS = [prompt_stream(1000 + k) for k in range(6)]
LIMIT = 4000


def scenario(seed: int) -> tuple[VllmConfig, int, int, list[Arrival]]:
    """Knobs, blocks, block size and requests, half of which have items of few contents between their texts."""
    pick = random.Random(seed)
    chunked = pick.random() < 0.8
    budget = pick.choice([24, 40, 160]) if chunked else MAX_MODEL_LEN
    size = pick.choice([2, 4, 16])
    whole = pick.random() < 0.3 and budget >= max(SIZES)
    requests, at = [], 0
    for i in range(pick.randint(2, 20)):
        at += pick.choice([0, 0, 0, 7, 10, 40, 200])
        parts: list[tuple[int, int, int]] = [(prompt_stream(pick.choice([0, 100 + i])), 0, pick.randint(1, 20))]
        items: list[Item] = []
        for _ in range(pick.choice([0, 0, 1, 2, 3])):
            content = pick.randrange(len(CONTENTS))
            items.append(Item(CONTENTS[content], sum(n for _, _, n in parts), SIZES[content % len(SIZES)]))
            parts.append((CONTENTS[content], 0, items[-1].tokens))
            if pick.random() < 0.8:
                parts.append((prompt_stream(200 + i), 50 * len(items), pick.randint(1, 12)))
        output = pick.choice([1, 2, 3, 12, 30])
        prompt = sum(n for _, _, n in parts)
        tokens = TokenIds.of(parts)
        request = Request(
            i,
            at,
            prompt,
            output + pick.choice([0, 0, 5]),
            priority=pick.randint(0, 2),
            tokens=tokens,
            items=tuple(items),
        )
        requests.append(Arrival(request, output))
    config = VllmConfig(
        enable_prefix_caching=pick.random() < 0.6,
        async_scheduling=False,
        max_num_seqs=pick.choice([2, 5, 16]),
        max_num_batched_tokens=budget,
        policy=pick.choice(["fcfs", "priority"]),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=0 if whole else pick.choice([0, 0, 5, 20]),
        scheduler_reserve_full_isl=pick.random() < 0.6,
        max_num_encoder_input_tokens=pick.choice([30, 34, 60]),
        encoder_cache_size=pick.choice([30, 40, 70]),
        disable_chunked_mm_input=whole,
    )
    return config, -(-MAX_MODEL_LEN // size) + pick.choice([0, 2, 40 // size, 400 // size]), size, requests


class Lanes(test_naive_vllm.Lanes):
    """Encoding takes no time."""

    encoder_time = ItemTime(0, 0)


class Watched(Watching, VllmWithItems):
    """Also writes down the room of the encoder's cache, and of each call what it encodes and drops."""

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        work = super().schedule(now_ns, drain)
        encode = [] if isinstance(work, Idle) else [[seq.request.id, list(places)] for seq, places in work.encoded]
        self.rows[-1] = (*self.rows[-1], encode, self.encoder.freed)
        return work

    @property
    def queues(self) -> tuple[int, ...]:
        return (*super().queues, self.encoder.num_free, self.encoder.num_freeable)


def compare(seed: int, ahead: bool) -> list[Any]:
    """Rows of the calls, which equal the naive model's; [] where the engine spins in both."""
    config, num_blocks, size, arrivals = scenario(seed)
    config = replace(config, async_scheduling=ahead)
    engine, lanes = NaiveVllmItems(config, num_blocks, size, MAX_MODEL_LEN), Lanes(1, HOST_NS)
    loop = replace(config.traits.loop.over(1), nap_ns=NAP_NS)
    host_ns = HOST_NS if ahead else (0, 0)
    naive = list(islice(calls_in_flight(engine, arrivals, loop, host_ns, lanes.stage_ns), LIMIT))

    def new_scheduler() -> Watched:
        kv = BlockHashKV(num_blocks, size, ids=seed % 2 == 0)
        return Watched(config, PolicyContext(kv, MAX_MODEL_LEN, loop=loop, items=ItemsContext(max(SIZES))))

    try:
        _, scheduler = in_both_drivers(new_scheduler, lanes, loop, arrivals, f"scenario {seed}")
    except SchedulerStalled as error:
        assert len(naive) == LIMIT, f"scenario {seed}: {error}"
        return []
    ours = [(*row[:3], 0, *row[4:]) if row[0] == "results" else row for row in scheduler.rows]
    theirs = [(*row[:3], 0, *row[4:]) if row[0] == "results" else row for row in naive]
    if not ahead:  # a plain loop is not asked where nobody is there, nor after the last has ended
        ours, theirs = ([row for row in rows if row[0] == "results" or row[2]] for rows in (ours, theirs))
    equal_rows(ours, theirs, f"scenario {seed}, {ahead=}")
    return ours


@pytest.mark.parametrize("ahead", [False, True])
def test_every_call_equals_the_naive_models(ahead: bool) -> None:
    """Tokens, items, the cache's room and what it drops are equal, in simulations and live; all of it occurs."""
    calls = [row for seed in range(20) for row in compare(seed, ahead) if row[0] == "call"]
    assert sum(bool(row[-2]) for row in calls) > 50
    assert sum(bool(row[-1]) for row in calls) > 10
    assert sum(bool(row[4]) for row in calls) > 5


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_many_more_calls_equal_the_naive_models(ahead: bool) -> None:
    """Fifty times as many."""
    for seed in range(20, 1000):
        compare(seed, ahead)


def vllm(**knobs: Any) -> tuple[EngineCore, VllmWithItems]:
    """A synchronous engine without a prefix cache, whose steps take 10 ns."""
    config = VllmConfig(
        enable_prefix_caching=False,
        async_scheduling=False,
        **{"max_num_seqs": 8, "max_num_batched_tokens": 40, **knobs},
    )
    scheduler = VllmWithItems(config, PolicyContext(CountingKV(100, 16), 400, items=ItemsContext(30)))
    cost = Encoding(Constant(10), EncoderConfig(0))
    return EngineCore(scheduler, SimExecutor(cost, 400), Recorder(), max_model_len=400), scheduler


def image(request: int, start: int = 0, tokens: int = 30, *, content: int = 0) -> Arrival:
    items = (Item(2 * content + 2, start, tokens),)
    return Arrival(Request(request, 0, start + tokens + 5, 1, items=items), 1)


@pytest.mark.parametrize(
    ("knobs", "knob"),
    [({"long_prefill_token_threshold": 12}, "long_prefill_token_threshold"), ({}, "max_num_batched_tokens")],
)
def test_an_engine_that_would_spin_says_why(knobs: dict[str, Any], knob: str) -> None:
    """Two requests have images that no step may compute whole: there is nothing to run, for ever."""
    core, _ = vllm(disable_chunked_mm_input=True, max_num_encoder_input_tokens=60, encoder_cache_size=90, **knobs)
    with pytest.raises(SchedulerStalled) as raised:
        DRIVERS["simulate"](core, Requests(image(0, 10, 60), image(1, 10, 60, content=1)))
    text = str(raised.value)
    assert "request 0 has an item of 60 tokens from token 10 on, which disable_chunked_mm_input keeps whole" in text
    assert f"Raise {knob}, or drop disable_chunked_mm_input." in text
    assert "\n" not in text


def test_a_lone_request_is_not_held_to_the_threshold() -> None:
    """vLLM caps no prompt where one request is all there is, so that it does not spin."""
    core, _ = vllm(disable_chunked_mm_input=True, long_prefill_token_threshold=12)
    DRIVERS["simulate"](core, Requests(image(0)))
    assert core.recorder.records().requests["output_tokens"].tolist() == [1]


def test_an_item_beyond_the_budget_or_the_cache_is_rejected() -> None:
    """By its numbers; unless given, the larger of a step's tokens and the largest item is the limit of both."""
    core, scheduler = vllm()
    assert (scheduler.encoder.budget, scheduler.encoder.size) == (40, 40)
    core, _ = vllm(encoder_cache_size=20)
    DRIVERS["simulate"](core, Requests(image(0)))
    details = core.recorder.records().details
    assert details == {"item_too_large": "an item of 30 embeddings, encoder_cache_size 20"}


def test_a_waiting_request_without_room_is_overtaken() -> None:
    """Its image is one too many for the step's budget; a text behind it comes in, and it does in the next step."""
    core, _ = vllm(max_num_batched_tokens=80, max_num_encoder_input_tokens=30)
    text = Arrival(Request(2, 0, 5, 1), 1)
    DRIVERS["simulate"](core, Requests(image(0), image(1, content=1), text))
    records = core.recorder.records()
    assert records.requests["scheduled_ns"].tolist() == [0, 10, 0]
    blocked = records.states[records.states["state"] == BLOCKED]
    assert [records.texts[code] for code in blocked["reason"]] == ["encoder"]
