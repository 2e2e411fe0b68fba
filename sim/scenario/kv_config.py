"""What a scenario says of KV memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from batchsim.base.ranges import Config, PositiveInt, Range, check_ranges
from batchsim.base.units import Share, Size, percent


@dataclass(frozen=True)
class KvConfig(Config):
    """The KV memory. `tokens` overrides the derived budget, and `log`, an engine's start-up log, says it in its place.

    `utilisation` None: the engine's own share, 90 % where no engine is named; what it is a share of is the engine's
    rule (`sim/deployment/memory.py`). `swap_space` is host memory for swapped sequences.

    >>> batchsim.Kv(utilisation="92%").utilisation
    0.92
    """

    tokens: PositiveInt | None = None
    log: str = ""
    block_size: PositiveInt = 16
    utilisation: Annotated[Share, Range(0, 1, above=True, show=percent)] | None = None
    swap_space: Size = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.tokens is not None and self.tokens < self.block_size:
            raise ValueError(f"tokens {self.tokens} must hold at least one block of block_size {self.block_size}")
