"""Groups of layers: what one is, what a layout of them says of a request."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from batchsim.base.kv_groups import KvGroup, KvLayout


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "window", "block_size": 16}, "a group of kind window has no window. Write its tokens: window"),
        ({"kind": "full", "block_size": 16, "window": 8}, "a group of kind full has a window. Leave window out"),
        ({"kind": "full", "block_size": 16, "states": 1}, "states is of states, and the group is of kind full"),
        ({"kind": "window", "block_size": 16, "window": 8, "aligned": True}, "aligned is of states"),
        ({"kind": "state", "block_size": 16}, "states is 0, and a sequence has 1 at a time. Write at least that"),
        (
            {"kind": "state", "block_size": 16, "states": 1, "aligned": True},
            "states is 1, and a sequence has 2 at a time where they are aligned",
        ),
        ({"kind": "state", "block_size": 16, "states": 2, "checkpoint": 64}, "checkpoint is where aligned states"),
        ({"kind": "full", "block_size": 0}, "block_size"),
    ],
)
def test_a_group_that_is_none_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        KvGroup(**fields)
    assert said in str(raised.value)


@pytest.mark.parametrize(("states", "aligned", "checkpoint"), [(1, False, None), (2, True, None), (3, True, 64)])
def test_a_state_is_kept_for_each_draft_token(states: int, aligned: bool, checkpoint: int | None) -> None:
    """`MambaSpec.max_memory_usage_bytes` of vllm/v1/kv_cache_interface.py, 0.33.0: 1 + drafts without a prefix cache, 2
    + drafts with one, and one more where a state can be kept within a step."""
    for drafts in (0, 3):
        assert KvGroup("state", 16, None, states + drafts, aligned, checkpoint).drafts == drafts


def test_a_layout_of_no_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="groups is empty"):
        KvLayout(())


def test_tokens_of_blocks() -> None:
    """32 and 16 tokens a block: a sequence may grow at multiples of 16, a prefix ends at those of 32. States that are
    kept nowhere have no part in where blocks end."""
    full, window = KvGroup("full", 32), KvGroup("window", 16, 1024)
    layout = KvLayout((full, window, window))
    assert (layout.unit, layout.alignment) == (16, 32)
    assert KvLayout((full, KvGroup("state", 24, states=1))).unit == 32
    assert KvLayout((KvGroup("state", 24, states=1),)).unit == 16
    assert KvLayout((KvGroup("state", 24, states=2, aligned=True), full)).unit == 8


def test_what_a_request_holds_by_token_and_besides() -> None:
    """A block for 784 tokens in one group of full attention, and three groups of two states: 6 blocks, worth 4,704
    tokens; of a window of 1,024 in blocks of 16 a request keeps ceil(1023 / 16) + 1 = 65."""
    state = KvGroup("state", 784, states=2, aligned=True)
    layout = KvLayout((KvGroup("full", 784), state, state, state), 784 * 65_536)
    assert (layout.blocks_per_token, layout.fixed_blocks) == (Fraction(1, 784), 6)
    assert layout.per_request == "65,536 B a token, and 4,704 tokens' worth a request"
    assert str(layout) == "1 × full in blocks of 784, 3 × 2 states"
    windows = KvLayout((KvGroup("full", 16), KvGroup("full", 16), KvGroup("window", 16, 1024)))
    assert windows.per_request == "1 block for 8 tokens, and 520 tokens' worth a request"
    assert KvLayout((state,)).per_request == "2 blocks a request"
