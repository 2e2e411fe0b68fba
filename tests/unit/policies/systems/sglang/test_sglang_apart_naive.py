"""SGLang's prefill and decode apart against plain loops over lists, step by step on random runs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from batchsim.drive.fleet.transfer import TransferConfig
from batchsim.kernel.batch import Batch
from tests.plain.sglang_apart import Apart, Decode, Links, Prefill
from tests.support.random_cases import random_cases
from tests.support.rooms import BLOCK_BYTES, MAX_MODEL_LEN, RoomCase, asked, room_cases


class Plain:
    """Steps of 10 ns, 1 more a prompt token, 2 a decode."""

    def step_ns(self, batch: Batch) -> int:
        return 10 + batch.num_prefill_tokens + 2 * batch.num_decode


def compared(case: RoomCase, page_ns: int) -> int:
    """The retractions of a run, after proving all steps and requests those of the plain loops."""
    knobs = case.knobs | {"disable_overlap_schedule": True, "disable_radix_cache": True}
    of_decode = case.of_decode | {"disaggregation_decode_retraction_backup": "cpu_tensor"}
    latency_ns = case.transfer.latency // 50_000
    transfer = TransferConfig(BLOCK_BYTES * 1e9 / page_ns, latency_ns, case.transfer.links)
    arrivals = [
        replace(arrival, request=replace(arrival.request, arrival_ns=arrival.request.arrival_ns // 5_000))
        for arrival in case.arrivals
    ]
    case = replace(
        case, arrivals=arrivals, transfer=transfer, knobs=knobs, of_decode=of_decode, fails=frozenset(), cost=Plain()
    )
    records = case.run().records
    links = Links(page_ns, latency_ns, shared=transfer.links == "shared")
    sizes = [(blocks, case.page, MAX_MODEL_LEN) for blocks in case.blocks]
    configs = [case.config(is_prefill=is_prefill) for is_prefill in (True, False)]
    plain = Apart(
        [Prefill(configs[0], *sizes[0], links) for _ in range(case.prefill)],
        [Decode(configs[1], *sizes[1]) for _ in range(case.decode)],
    )
    plain.run(arrivals)
    for core, engine in zip(case.cores, [*plain.prefill, *plain.decode], strict=True):
        steps = core.recorder.records().step_columns
        names = ("start_ns", "num_prefill_tokens", "num_decode", "num_preempted", "free_blocks")
        found = [tuple(map(int, line)) for line in zip(*(steps[name] for name in names), strict=True)]
        assert found == engine.lines
    columns = ("scheduled_ns", "first_token_ns", "last_token_ns", "num_preemptions")
    for row, trip in zip(records.requests, plain.trips, strict=True):
        assert tuple(int(row[name]) for name in columns) == (trip.began, trip.first, trip.last, trip.retractions)
    return sum(trip.retractions for trip in plain.trips)


@given(room_cases(cancels=False, fails=False))
@random_cases(100)
def test_every_step_is_that_of_the_plain_loops(case: RoomCase) -> None:
    """Blocks, slots, buffers, polling, reserves, retractions, links: all of them, of several engines."""
    compared(case, 40)
    compared(case, 400)


def test_the_plain_loops_retract() -> None:
    """The case of `test_rooms` in which one does."""
    of_decode = {"num_reserved_decode_tokens": 16}
    arrivals = [asked(0, 0, 96, 60), asked(1, 0.005, 96, 60), asked(2, 0.01, 16, 1)]
    assert compared(RoomCase(arrivals, blocks=(4096, 18), of_decode=of_decode), 40) >= 1
