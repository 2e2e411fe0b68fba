"""The KV manager that goes with a policy's config: plain, or with one kind of prefix caching."""

from __future__ import annotations

from typing import Literal, overload

from batchsim.base.errors import ScenarioError
from batchsim.base.kv_groups import KvLayout
from batchsim.base.kv_pools import KvPools
from batchsim.kernel.kv_blocks import BlockTables, CountingKV, KVBlockManager, TableKV
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.types import Sequence
from batchsim.kv.grouped import GroupedBlocks, GroupedKV
from batchsim.kv.grouped_cache import GroupedHashKV
from batchsim.kv.pooled_radix import PooledRadixKV
from batchsim.kv.prefix_cache import BlockHashKV
from batchsim.kv.radix_cache import RadixKV
from batchsim.kv.reuse_tree import ReuseTreeKV
from batchsim.kv.states import StateRadixKV, StatesKV
from batchsim.kv.windows import PooledKV

MAX_IDS = 2**24
"""The most blocks of a pool that keeps their ids: a gigabyte of ids, for 268 million tokens in blocks of 16."""


class TailFirstKV(TableKV):
    """As `TableKV`, but the last block that a sequence had is the next one to be used, as in vLLM without prefix
    caching (`free_blocks` of vllm/v1/core/block_pool.py)."""

    __slots__ = ()

    def free(self, seq: Sequence) -> None:
        if not (self._pinned and self.is_kept(seq)):
            self._free += self._tables.pop(seq, ())
            seq.num_blocks = 0


@overload
def new_kv(
    config: PolicyConfig, num_blocks: int, block_size: int, num_swap_blocks: int = 0, *, ids: Literal[True]
) -> BlockTables: ...
@overload
def new_kv(
    config: PolicyConfig,
    num_blocks: int,
    block_size: int,
    num_swap_blocks: int = 0,
    *,
    ids: bool,
    pools: KvPools | None = None,
) -> KVBlockManager: ...
def new_kv(
    config: PolicyConfig,
    num_blocks: int,
    block_size: int,
    num_swap_blocks: int = 0,
    *,
    ids: bool,
    pools: KvPools | None = None,
) -> KVBlockManager:
    """An empty pool of the kind that `config.traits.prefix_cache` names: "blocks", "radix", "reuse", or "" for none.

    `ids`: whether block ids are kept, which a live executor needs. "radix" and "reuse" keep them all the same.
    `pools`: see `new_pooled_kv`.
    ScenarioError for a kind that does not exist, or more than MAX_IDS blocks that have an id.
    """
    if pools is not None:
        return new_pooled_kv(config, pools, num_blocks, block_size)
    kind = config.traits.prefix_cache
    if ids or kind in ("radix", "reuse"):
        _check_ids(num_blocks, block_size)
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


def new_grouped_kv(
    config: PolicyConfig, layout: KvLayout, num_blocks: int, max_model_len: int, stages: int = 1
) -> GroupedBlocks:
    """An empty pool from which the groups of `layout` draw, for an engine of `stages` pipeline stages whose sequences
    have at most `max_model_len` tokens.

    ScenarioError where the policy of `config` cannot have groups, or not find these again by their contents.
    """
    traits = config.traits
    if not traits.kv_groups:
        raise ScenarioError(
            f"{type(config).__name__.removesuffix('Config')} with groups of layers is not simulated. Use vllm, or a"
            " policy that takes all blocks of a request at once, like continuous."
        )
    drafts = 0 if traits.speculation is None else traits.speculation.num_drafts
    for group in layout.groups:
        if group.kind == "state" and group.drafts != drafts:
            states = group.states - group.drafts + drafts
            raise ScenarioError(
                f"a group of {group.states} states is of {group.drafts} draft tokens, and the policy has {drafts}."
                f" Write states: {states}."
            )
    batches = traits.loop.over(stages).depth
    in_flight = max_model_len if traits.max_num_batched_tokens is None else traits.max_num_batched_tokens * batches
    if not traits.prefix_cache:
        return GroupedKV(layout, num_blocks, max_model_len, in_flight, batches)
    _check_found(layout)
    return GroupedHashKV(layout, num_blocks, max_model_len, in_flight, batches)


def new_pooled_kv(config: PolicyConfig, pools: KvPools, num_blocks: int, block_size: int) -> KVBlockManager:
    """An empty pool of `num_blocks` blocks of layers that keep all tokens, with `pools` beside it.

    ScenarioError where the policy of `config` cannot have these, or there are more than MAX_IDS blocks that have an id.
    """
    traits, kind = config.traits, "windows" if pools.states is None else "states"
    if not traits.kv_pools:
        drafts = " with drafts" if traits.speculation is not None else ""
        raise ScenarioError(
            f"{type(config).__name__.removesuffix('Config')}{drafts} with a pool of {kind} apart is not simulated. Use"
            " sglang without drafts, or leave out kv.pools."
        )
    if traits.prefix_cache:
        _check_ids(num_blocks, block_size)
    if pools.states is not None:
        if not traits.prefix_cache:
            return StatesKV(num_blocks, block_size, pools.states)
        buffers = (2 if traits.loop.is_ahead else 1) if pools.extra_buffer else 0
        return StateRadixKV(num_blocks, block_size, pools.states, buffers)
    if (pools.window_tokens or 0) < block_size:
        raise ScenarioError(
            f"kv.pools: window_tokens {pools.window_tokens} must hold at least one block of block_size {block_size}."
        )
    return (PooledRadixKV if traits.prefix_cache else PooledKV)(num_blocks, block_size, pools)


def _check_ids(num_blocks: int, block_size: int) -> None:
    """ScenarioError for more than MAX_IDS blocks, of which each has an id."""
    if num_blocks > MAX_IDS:
        raise ScenarioError(
            f"kv: {num_blocks:,} blocks of {block_size} tokens, of which each has an id where prefixes are cached; at"
            f" most {MAX_IDS:,} are possible. Lower kv.tokens, or cache no prefixes."
        )


def _check_found(layout: KvLayout) -> None:
    """ScenarioError where it is not simulated how blocks of `layout` are found by their contents."""
    states = [group for group in layout.groups if group.kind == "state"]
    if any(not group.aligned for group in states):
        raise ScenarioError(
            "prefix caching of states that are kept nowhere finds nothing. Write aligned: true for groups of states,"
            " with a state more, or set enable_prefix_caching: false."
        )
    sizes = sorted({group.block_size for group in layout.groups})
    if states and len(sizes) > 1:
        raise ScenarioError(
            f"prefix caching of states beside blocks of other sizes ({', '.join(map(str, sizes))}) is not simulated."
            " Set enable_prefix_caching: false."
        )
