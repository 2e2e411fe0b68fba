"""SGLang's pools by hand."""

from __future__ import annotations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.models import read_model
from batchsim.deployment.sglang_pools import (
    SglangPools,
    pools_with_states,
    pools_with_windows,
    slots_of,
    state_bytes,
    window_tokens,
)

QWEN = read_model("Qwen/Qwen3.5-27B")


def test_nine_nineteenths_are_for_states_and_one_slot_for_padding() -> None:
    """Of 19 GB 9 are for states of 0.1 GB: 90, less the one that pads; ten are for tokens of 65,536 bytes."""
    pools = pools_with_states(19_000_000_000, 65_536, 100_000_000, 5)
    assert pools == SglangPools(152_587, None, 89, 5)
    assert pools.max_running_requests == 17


def test_draft_tokens_have_states_for_each_running_request() -> None:
    """With three of them the padding slot is of four states, and of five slots each has 3/5 more: 86 / 1.6."""
    assert pools_with_states(19_000_000_000, 65_536, 100_000_000, 5, drafts=3).states == 53


def test_windows_have_eight_tenths_of_the_tokens_unless_what_they_ever_need_is_known() -> None:
    """A token has 100 bytes in full layers and 50 in windows: 1,400,000 bytes are 10,000 and 8,000 tokens."""
    assert pools_with_windows(1_400_000, 100, 50) == SglangPools(10_000, 8_000)
    assert pools_with_windows(1_400_000, 100, 50, window_cap=9_000) == SglangPools(9_500, 9_000)
    assert pools_with_windows(1_400_000, 100, 50, window_cap=2_000) == SglangPools(13_000, 2_000)
    assert pools_with_windows(1_400_000, 100, 50, share=0.1) == SglangPools(13_333, 1_333)
    assert window_tokens(4, 127, chunks=2 * 8192, page=16) == 4 * (127 + 128 + 32) + 2 * 8192 + 16


def test_a_running_request_has_slots_by_what_it_keeps() -> None:
    """One alone without a radix cache; buffers of Qwen3.5 are one more, two where steps overlap."""
    assert (slots_of(QWEN, radix_cache=False), slots_of(QWEN), slots_of(QWEN, overlap=False)) == (1, 5, 4)
    assert slots_of(read_model("moonshotai/Kimi-K3")) == 3


def test_the_pools_of_a_deployment_are_of_its_own_room() -> None:
    """48 states of Qwen3.5-27B are 154 MB; more requests than have states are refused with how many do."""
    assert state_bytes(QWEN.kinds, 1, 2) == 48 * 3_207_168
    engine = Deployment(QWEN, GPUS["h200"], "sglang")
    budget = engine.derive_kv(room_bytes=19_000_000_000, step_requests=8)
    assert budget.layout is None and budget.tokens == int(10e9 / 65_536 / 16) * 16
    with pytest.raises(ScenarioError, match=r"SGLang has 57 states .*5 for each .*256 at once.*requests: 11\."):
        engine.derive_kv(room_bytes=19_000_000_000)
    with pytest.raises(ScenarioError, match=r"on l40s: .* GB short of one KV block: .* fits with tp: 2"):
        Deployment(QWEN, GPUS["l40s"], "sglang").derive_kv(step_requests=1)
    with pytest.raises(ScenarioError, match=r"0\.1 GB hold 0 states of 153\.9 MB, and a request has 5"):
        engine.derive_kv(room_bytes=100_000_000, step_requests=1)
