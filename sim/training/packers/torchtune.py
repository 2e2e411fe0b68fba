"""torchtune 0.6.1 `PackedDataset`: rows of `max_seq_len` tokens in the order of the data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from batchsim.base.ranges import PositiveInt
from batchsim.training.packers.bins import PackerConfig, Piece, cut_stream, next_fit, tokens


@dataclass(frozen=True)
class TorchtunePacked(PackerConfig):
    """Next fit, or with `split_across_pack` one stream that is cut; rows are padded to `max_seq_len`.

    Without it torchtune fails at an example longer than a row.
    """

    max_seq_len: PositiveInt | None = None
    """Tokens of a row. Null: the scenario's capacity."""
    split_across_pack: bool = False
    """Whether an example may go on in the next row."""
    max_packs: PositiveInt | None = None
    """Rows at most: what comes after is left out. Null: all."""
    kind: Literal["torchtune.packed"] = "torchtune.packed"
    follows: ClassVar = "torchtune 0.6.1"
    rule: ClassVar = "next fit in the order given, or a stream that is cut"
    makes: ClassVar = "pieces"
    pads: ClassVar = "capacity"
    capacity_option: ClassVar = "max_seq_len"
    shuffled: ClassVar = True

    @property
    def takes_longer(self) -> bool:  # type: ignore[override]
        return self.split_across_pack

    def pack(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[Piece]]:
        capacity = tokens(self.max_seq_len)
        if self.split_across_pack:
            return cut_stream(lengths, order, capacity)[: self.max_packs]
        self.refuse_longer(lengths, order, capacity)
        rows = next_fit((i for i in order if lengths[i]), lengths, capacity)
        return [[(i, 0, lengths[i]) for i in row] for row in rows[: self.max_packs]]
