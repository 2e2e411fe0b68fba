"""KV cache events in vLLM's form: what a block's hash is, and the msgpack of a batch of events.

A batch is [time in s since 1970, events, data parallel rank]; an event is a map whose `type` is BlockStored,
BlockRemoved or AllBlocksCleared. A block's hash is that of the SHA-256 of pickle of (hash of the block before it, its
token ids, None), as a whole number of its last 64 bits; before the first block of a prompt stands the hash of a fixed
text. So equal prompts have equal hashes on every replica, and the same ones as in vLLM with the same token ids.
Source: vllm/distributed/kv_events.py, vllm/v1/core/block_pool.py and kv_cache_utils.py of vLLM 0.32.0.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from batchsim.kv.block_keys import BlockKeys

Tokens = Callable[[int, int], Sequence[int]]
"""The token ids `start` to `end` - 1 of a request, prompt and answer."""
_MASK = (1 << 64) - 1


def _hash(value: object) -> bytes:
    return sha256(pickle.dumps(value, protocol=5)).digest()


NO_BLOCK = _hash("vllm-none-hash")
"""What stands before the first block."""


def _as_number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash, "big") & _MASK


@dataclass(frozen=True)
class Stored:
    """The blocks `first` to `last` - 1 of a request, which can be found from now on."""

    keys: BlockKeys
    first: int
    last: int
    tokens: Tokens


@dataclass(frozen=True)
class Removed:
    """The `count` blocks with keys from `key` on: a copy of each is gone, `left` others are there."""

    key: int
    count: int
    left: int


class BlockHashes:
    """The hashes of the blocks that an engine's prefix cache holds, of `block_size` tokens each, by their keys."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_key: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def stored(self, change: Stored) -> dict[str, Any]:
        """The event of blocks that were published; they are known from then on."""
        size = self._block_size
        before = self._before(change)
        ids = list(change.tokens(change.first * size, change.last * size))
        parent, numbers = before, list[int]()
        for place, number in enumerate(range(change.first, change.last)):
            parent = _hash((parent, tuple(ids[place * size : (place + 1) * size]), None))
            self._by_key[change.keys.key(number)] = parent
            numbers.append(_as_number(parent))
        return {
            "type": "BlockStored",
            "block_hashes": numbers,
            "parent_block_hash": _as_number(before) if change.first else None,
            "token_ids": ids,
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(numbers),
            "group_idx": 0,
        }

    def _before(self, change: Stored) -> bytes:
        """The hash of the block before the first of `change`, made of all tokens where that block is not known."""
        if not change.first:
            return NO_BLOCK
        known = self._by_key.get(change.keys.key(change.first - 1))
        if known is not None:
            return known
        size, parent = self._block_size, NO_BLOCK
        ids = change.tokens(0, change.first * size)
        for at in range(0, len(ids), size):
            parent = _hash((parent, tuple(ids[at : at + size]), None))
        return parent

    def removed(self, change: Removed) -> list[dict[str, Any]]:
        """The events of blocks that were reused, the last one of a prompt first; of unknown ones none."""
        events: list[dict[str, Any]] = []
        for key in range(change.key + change.count - 1, change.key - 1, -1):
            known = self._by_key.get(key) if change.left else self._by_key.pop(key, None)
            if known is not None:
                events.append(
                    {"type": "BlockRemoved", "block_hashes": [_as_number(known)], "medium": "GPU", "group_idx": 0}
                )
        return events

    def cleared(self) -> dict[str, Any]:
        """The event of a cache that was emptied."""
        self._by_key.clear()
        return {"type": "AllBlocksCleared"}

    def events(self, changes: Sequence[Stored | Removed]) -> list[dict[str, Any]]:
        """The events of `changes`, in order."""
        events: list[dict[str, Any]] = []
        for change in changes:
            if isinstance(change, Stored):
                events.append(self.stored(change))
            else:
                events += self.removed(change)
        return events
