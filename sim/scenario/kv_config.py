"""What a scenario says of KV memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from batchsim.base.kv_groups import KvGroup, KvLayout
from batchsim.base.kv_pools import KvPools
from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, PositiveInt, Range, check_ranges
from batchsim.base.units import Share, Size, percent
from batchsim.scenario.tier_config import TierConfig


@dataclass(frozen=True)
class KvConfig(Config):
    """The KV memory. What `utilisation` is a part of is the engine's rule (`sim/deployment/memory.py`).

    >>> batchsim.Kv(utilisation="92%").utilisation
    0.92
    """

    tokens: PositiveInt | None = None
    """Tokens that it holds; derived from the GPU's memory unless given."""
    log: str = ""
    """In the place of `tokens`: an engine's start-up log, from whose lines they are read."""
    block_size: PositiveInt = 16
    """Tokens of a KV block."""
    utilisation: Annotated[Share, Range(0, 1, above=True, show=percent)] | None = None
    """Part of the GPU's memory that the engine takes; its own default unless given, 90 % where no engine is named."""
    swap_space: Size = 0
    """Host memory for swapped sequences."""
    memory: Size | None = None
    """In the place of `tokens`: memory of each GPU for KV, like vLLM's `--kv-cache-memory-bytes`."""
    per_token: Size | None = None
    """With `memory`: bytes of a token on each GPU, in the place of what the model's layers keep."""
    per_request: Size = 0
    """With `per_token`: bytes of a request on each GPU beside its tokens, such as states and windows."""
    source: str = ""
    """What `tokens` or `memory` are from, as headings say it; by `log` its name and what it is of."""

    groups: tuple[KvGroup, ...] = ()
    """Groups of layers that take their blocks from one pool; none: all layers keep all tokens, in the same blocks."""
    num_blocks: PositiveInt | None = None
    """Blocks of the pool of `groups`, as an engine counts them: one of them is never handed out."""
    block_bytes: PositiveInt | None = None
    """Bytes of a block of `groups` on each GPU."""
    pools: KvPools | None = field(default=None, metadata=LEFT_OUT)
    """Pools beside that of `tokens`, which is then of the layers that keep all tokens, as SGLang has them."""
    tiers: tuple[TierConfig, ...] = field(default=(), metadata=LEFT_OUT)
    """Where KV is kept beyond the GPU's memory: that of the host, under `vllm` and `sglang` with prefix
    caching, and a disk below it under `vllm`."""

    def __post_init__(self) -> None:
        check_ranges(self)
        kinds = [tier.kind for tier in self.tiers]
        if kinds not in ([], ["host"], ["host", "disk"]):
            raise ValueError(
                f"tiers are {', '.join(kinds)}: one host's memory is simulated, and one disk below it. Write"
                " [{kind: host, ...}, {kind: disk, ...}], or the first alone"
            )
        if self.groups and self.tiers:
            raise ValueError("tiers: KV of groups of layers is not offloaded here. Leave out tiers, or groups")
        if self.pools is not None and (self.tokens is None or self.groups or self.tiers):
            raise ValueError(
                "pools are beside that of tokens, without groups or tiers. Write tokens, of the layers that keep all"
            )
        if self.groups:
            self._check_groups()
        elif self.num_blocks is not None or self.block_bytes is not None:
            name = "num_blocks" if self.num_blocks is not None else "block_bytes"
            raise ValueError(f"{name} is of groups, and there are none. Write groups, or tokens and block_size")
        if self.memory is not None and self.tokens is not None:
            raise ValueError("tokens and memory both say how much fits. Write one of them")
        for name, needs in (("per_token", "memory"), ("per_request", "per_token")):
            if getattr(self, name) and getattr(self, needs) is None:
                raise ValueError(f"{name} is read beside {needs}, which is not given. Write both")
        if self.memory is not None and self.utilisation is not None:
            raise ValueError("utilisation is not read beside memory, which is what it would be derived from")
        if self.source and self.memory is None and self.tokens is None and self.num_blocks is None:
            raise ValueError("source says what tokens or memory are from, and neither is given")
        if self.tokens is not None and self.tokens < self.block_size:
            raise ValueError(f"tokens {self.tokens} must hold at least one block of block_size {self.block_size}")

    def _check_groups(self) -> None:
        """ValueError where another key says what each group does, or none says how many blocks there are."""
        layout = KvLayout(self.groups, self.block_bytes)
        stated = {
            "tokens": self.tokens,
            "log": self.log,
            "utilisation": self.utilisation,
            "swap_space": self.swap_space,
            "per_token": self.per_token,
        }
        for name, value in stated.items():
            if value:
                raise ValueError(f"{name} is not read beside groups, which share num_blocks blocks. Leave it out")
        if self.block_size != 16:
            raise ValueError(f"block_size {self.block_size} is not read beside groups, each of which has its own")
        if (self.num_blocks is None) == (self.memory is None):
            raise ValueError("groups share a pool. Write its num_blocks, or memory and block_bytes")
        if self.memory is not None and layout.block_bytes is None:
            raise ValueError("memory of groups is in blocks of block_bytes bytes. Write block_bytes, or num_blocks")
        if self.pool_blocks < 1:
            raise ValueError("one block is never handed out, and the pool has no more. State more")

    @property
    def pool_blocks(self) -> int:
        """Blocks that `groups` can be given: all but the null block, which stands for blocks that are not there."""
        blocks = (self.memory or 0) // (self.block_bytes or 1) if self.num_blocks is None else self.num_blocks
        return blocks - 1
