"""Steps that encode images: how long they take, and whose time that is."""

from __future__ import annotations

import numpy as np
import pytest

from batchsim.cost.constant import Linear
from batchsim.cost.encoder import Encoding
from batchsim.cost.encoder_config import EncoderConfig
from batchsim.cost.scaled import Scaled
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import CountingKV
from batchsim.kernel.protocols import ItemsContext, PolicyContext
from batchsim.kernel.record import Recorder, Records
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Arrival, Item, Request
from batchsim.metrics.attribution import attribute
from batchsim.metrics.encoding import own_encoding, step_encode_ns
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_items import VllmWithItems
from tests.support.engine import DRIVERS, Requests

COST = Encoding(Linear(base=100, per_token=1), EncoderConfig(base=1000, per_token=10))  # type: ignore[arg-type]
CONFIG = VllmConfig(
    enable_prefix_caching=False, async_scheduling=False, max_num_seqs=8, max_num_batched_tokens=100,
    max_num_encoder_input_tokens=20, encoder_cache_size=40,
)  # fmt: skip


def run(*requests: tuple[int, int, int, tuple[Item, ...]], driver: str = "simulate") -> Records:
    """The records of requests of (arrival, prompt, output, items)."""
    kv = CountingKV(100, 16)
    scheduler = VllmWithItems(CONFIG, PolicyContext(kv, 1000, items=ItemsContext(20)))
    core = EngineCore(scheduler, SimExecutor(COST, 1000), Recorder(), max_model_len=1000)
    made = [Arrival(Request(i, at, p, o, items=items), o) for i, (at, p, o, items) in enumerate(requests)]
    DRIVERS[driver](core, Requests(*made))
    return core.recorder.records()


def parts(records: Records, request: int) -> dict[str, int]:
    rows = attribute(records)
    rows = rows[rows["request_id"] == request]
    return dict(zip(rows["part"], rows["ns"].tolist(), strict=True))


@pytest.mark.parametrize("driver", DRIVERS)
def test_all_requests_of_a_step_wait_for_what_it_encodes(driver: str) -> None:
    """A text decodes while two images of another request are encoded, one a step, for so the budget has it: steps of
    105 ns, then 1200 + 100 + 21 and 1150 + 100 + 21, the last one without items."""
    text = (0, 5, 4, ())
    images = (10, 41, 1, (Item(2, 0, 20), Item(6, 20, 15)))
    records = run(text, images, driver=driver)
    assert records.steps["duration_ns"].tolist() == [105, 1200 + 121, 1150 + 122, 101]
    assert step_encode_ns(records).tolist() == [0, 1200, 1150, 0]
    assert own_encoding(records).ns.tolist() == [1200, 1150]
    assert parts(records, 0) == {
        "prefill": 105, "decode_alone": 101, "decode_beside_prefill": 121 + 122, "encoding_of_others": 2350,
    }  # fmt: skip
    assert parts(records, 1) == {"waiting_step": 95, "prefill": 121 + 122, "encoding": 2350}


def test_an_equal_image_in_the_cache_takes_no_time() -> None:
    """The second request waits for none, its image being that of the first; a third one's is another."""
    item, other = (Item(2, 0, 20),), (Item(4, 0, 10),)
    records = run((0, 30, 1, item), (5000, 30, 1, item), (9000, 30, 1, other))
    assert step_encode_ns(records).tolist() == [1200, 0, 1100]
    assert parts(records, 1) == {"prefill": 130}


def test_items_of_two_requests_in_a_step_are_each_of_their_own() -> None:
    """Both are encoded in one step; each waits for the other's, too."""
    records = run((0, 12, 1, (Item(2, 0, 10),)), (0, 12, 1, (Item(4, 0, 8),)))
    assert records.steps["duration_ns"].tolist() == [1100 + 1080 + 124]
    assert parts(records, 0) == {"prefill": 124, "encoding": 1100, "encoding_of_others": 1080}
    assert parts(records, 1) == {"prefill": 124, "encoding": 1080, "encoding_of_others": 1100}


def test_a_stretched_cost_stretches_its_encoder() -> None:
    """Half as long again, for an item too; a cost without an encoder has none."""
    assert COST.encoder_time.items_ns([[20]]) == [1200]
    slower = Scaled(COST, 1.5).encoder_time
    assert slower is not None
    assert slower.items_ns([[20]]) == [1800]
    assert Scaled(COST.cost, 1.5).encoder_time is None


def test_a_run_without_items_says_nothing_of_encoding() -> None:
    """No row, no part."""
    records = run((0, 5, 4, ()))
    assert len(step_encode_ns(records)) == 0
    assert parts(records, 0) == {"prefill": 105, "decode_alone": 303}


@pytest.mark.parametrize("lacking", [0, 30])
def test_leaps_pass_over_no_item(lacking: int) -> None:
    """Texts decode beside images that are let go of, or wait for room for theirs: the records are those of steps."""
    requests: list[tuple[int, int, int, tuple[Item, ...]]]
    requests = [(0, 5, 40, ()), (10, 41, 30, (Item(2, 0, 20), Item(6, 20, 15)))]
    requests += [(20 + i, 20 + i, 9 + i, (Item(8 + i, 2, 18 - i),)) for i in range(3)]
    requests += [(3000 + lacking, 22, 20, (Item(20, 1, 20),))]
    one, other = (run(*requests, driver=driver) for driver in ("simulate", "simulate_stepwise"))
    for name in ("requests", "steps", "states"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
