"""NeMo 3.0.0 and Megatron-Bridge 0.3.1 (`data/datasets/packing_utils.py`): rows packed offline, from a histogram."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import Bins, PackerConfig, first_fit, tokens


@dataclass(frozen=True)
class _Bridge(PackerConfig):
    pack_size: PositiveInt | None = None
    """Tokens of a row, `packed_sequence_size`. Null: the scenario's capacity."""
    follows: ClassVar = "Megatron-Bridge 0.3.1"
    makes: ClassVar = "rows"
    pads: ClassVar = "longest"
    rounded: ClassVar = 16
    capacity_option: ClassVar = "pack_size"
    shuffled: ClassVar = True


@dataclass(frozen=True)
class BridgeDecreasing(_Bridge):
    """First fit from the longest example on."""

    kind: Literal["megatron_bridge.first_fit_decreasing"] = "megatron_bridge.first_fit_decreasing"
    rule: ClassVar = "first fit decreasing of all examples"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        capacity = tokens(self.pack_size)
        self.refuse_longer(lengths, order, capacity)
        return _filled(first_fit(sorted(order, key=lambda i: -lengths[i]), lengths, capacity), lengths, order)


@dataclass(frozen=True)
class BridgeShuffle(_Bridge):
    """First fit in random order, the default."""

    kind: Literal["megatron_bridge.first_fit_shuffle"] = "megatron_bridge.first_fit_shuffle"
    rule: ClassVar = "first fit in random order of all examples"
    reads: ClassVar = "random"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> Bins:
        capacity = tokens(self.pack_size)
        self.refuse_longer(lengths, order, capacity)
        return _filled(first_fit(order, lengths, capacity), lengths, order)


def _filled(bins: Bins, lengths: Sequence[int], order: Sequence[int]) -> Bins:
    """`bins`, whose lengths alone were packed, filled with examples: of each length the last of `order` first."""
    of_length: defaultdict[int, list[int]] = defaultdict(list)
    for i in order:
        of_length[lengths[i]].append(i)
    return [[of_length[lengths[i]].pop() for i in row] for row in bins]
