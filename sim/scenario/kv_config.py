"""What a scenario says of KV memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from batchsim.base.ranges import Config, PositiveInt, Range, check_ranges
from batchsim.base.units import Share, Size, percent


@dataclass(frozen=True)
class KvConfig(Config):
    """The KV memory. `tokens` overrides the derived budget; `swap_space` is host memory for swapped sequences."""

    tokens: PositiveInt | None = None
    block_size: PositiveInt = 16
    utilisation: Annotated[Share, Range(0, 1, above=True, show=percent)] = 0.9
    swap_space: Size = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.tokens is not None and self.tokens < self.block_size:
            raise ValueError(f"tokens {self.tokens} must hold at least one block of block_size {self.block_size}")
