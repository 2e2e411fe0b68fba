"""The KV manager that goes with a policy's config: plain, or with one kind of prefix caching."""

from __future__ import annotations

from typing import Literal, overload

from batchsim.base.errors import ScenarioError
from batchsim.kernel.kv_blocks import BlockTables, CountingKV, KVBlockManager, TableKV
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.kv.radix_cache import RadixKV
from batchsim.kv.reuse_tree import ReuseTreeKV

MAX_IDS = 2**24
"""The most blocks of a pool that keeps their ids: a gigabyte of ids, for 268 million tokens in blocks of 16."""


@overload
def new_kv(
    config: PolicyConfig, num_blocks: int, block_size: int, num_swap_blocks: int = 0, *, ids: Literal[True]
) -> BlockTables: ...
@overload
def new_kv(
    config: PolicyConfig, num_blocks: int, block_size: int, num_swap_blocks: int = 0, *, ids: bool
) -> KVBlockManager: ...
def new_kv(
    config: PolicyConfig, num_blocks: int, block_size: int, num_swap_blocks: int = 0, *, ids: bool
) -> KVBlockManager:
    """An empty pool of the kind that `config.traits.prefix_cache` names: "blocks", "radix", "reuse", or "" for none.

    Without caching `ids` says whether block ids are kept, which a live executor needs; caches keep them once a
    block could be found again.
    ScenarioError for a kind that does not exist, or more than MAX_IDS blocks that have an id.
    """
    kind = config.traits.prefix_cache
    if (kind or ids) and num_blocks > MAX_IDS:
        raise ScenarioError(
            f"kv: {num_blocks:,} blocks of {block_size} tokens, of which each has an id where prefixes are cached; at"
            f" most {MAX_IDS:,} are possible. Lower kv.tokens, or cache no prefixes."
        )
    if kind == "blocks":
        return BlockHashKV(num_blocks, block_size, num_swap_blocks, ids=ids)
    if kind == "radix":
        return RadixKV(num_blocks, block_size, num_swap_blocks)
    if kind == "reuse":
        return ReuseTreeKV(num_blocks, block_size, num_swap_blocks)
    if kind:
        raise ScenarioError(
            f"{type(config).__name__}: prefix_cache {kind!r} is none. Use 'blocks', 'radix', 'reuse' or ''."
        )
    return (TableKV if ids else CountingKV)(num_blocks, block_size, num_swap_blocks)
