"""Axolotl 0.19.0 (`utils/samplers/multipack.py`): first fit in the sampler's order, not decreasing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import Bins, PackerConfig, chunks, first_fit, next_fit, tokens


@dataclass(frozen=True)
class Multipack(PackerConfig):
    """First fit within groups of `group_size` examples, `batch_size` bins a batch. Examples longer than a bin were
    dropped before."""

    batch_max_len: PositiveInt | None = None
    """Tokens of a bin: micro_batch_size x sequence_len with one bin a batch. Null: the scenario's capacity."""
    batch_size: PositiveInt | None = None
    """Bins a batch; more than one with `multipack_real_batches`. Null: the scenario's micro_batch."""
    group_size: PositiveInt = 100_000
    """Examples that are packed together, `sample_packing_group_size`."""
    bin_size: PositiveInt = 200
    """Examples of a bin at most, `sample_packing_bin_size`."""
    sequential: bool = False
    """Next fit in the place of first fit, `sample_packing_sequentially`."""
    drop_last: bool = True
    """Whether the last batch is dropped where it has fewer bins."""
    sampler: Literal["perm", "seq"] = "perm"
    """A random permutation, or the order given with `curriculum_sampling`."""
    kind: Literal["axolotl.multipack"] = "axolotl.multipack"
    follows: ClassVar = "Axolotl 0.19.0"
    rule: ClassVar = "first fit in the sampler's order, longer examples dropped"
    makes: ClassVar = "row_batches"
    pads: ClassVar = "capacity"
    capacity_option: ClassVar = "batch_max_len"
    takes_longer: ClassVar = True

    @property
    def reads(self) -> Literal["given", "random"]:  # type: ignore[override]
        return "random" if self.sampler == "perm" else "given"

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[Bins]:
        capacity, size = tokens(self.batch_max_len), self.batch_size or 1
        kept = [i for i in order if lengths[i] <= capacity]
        if self.sequential:
            bins = next_fit(kept, lengths, capacity)
        else:
            groups = chunks(kept, self.group_size)
            bins = [row for group in groups for row in first_fit(group, lengths, capacity, self.bin_size)]
        batches = chunks(bins, size)
        return batches[:-1] if self.drop_last and batches and len(batches[-1]) < size else batches
