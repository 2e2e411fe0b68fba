"""What a scenario says of LoRA adapters: how many there are, how evenly they are asked for, and of what rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from batchsim.base.later import np
from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import Config, Range, check_ranges
from batchsim.base.units import Share
from batchsim.workload.popularity import FirstPopularity, Popularity, SharePopularity, ZipfPopularity, shares_of
from batchsim.workload.sharing import zipf_drawn

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ADAPTERS = 100_000
"""Adapters of a workload; reports have a row for each that was asked for."""
MAX_RANK = 512
"""The largest rank that engines serve: `MaxLoRARanks` of vllm/config/lora.py of the 0.33.0 wheel."""
Count = Annotated[int, Range(1, MAX_ADAPTERS)]
Rank = Annotated[int, Range(1, MAX_RANK)]


@dataclass(frozen=True)
class Loras(Config):
    """LoRA adapters of one base model, one of which may answer a request.

    Where the rows of a trace say which (`trace.columns.lora`), there is nothing to draw: only `rank` may be stated.
    """

    count: Count | None = None
    """How many adapters there are."""
    popularity: Popularity | None = field(default=None, metadata=LEFT_OUT)
    """How evenly they are asked for; alike unless given."""
    share_of_requests: Share | None = field(default=None, metadata=LEFT_OUT)
    """Part of the requests that ask for an adapter, the others for the base model; all unless given."""
    rank: Rank = 16
    """The rank of every adapter."""

    def __post_init__(self) -> None:
        check_ranges(self)
        shares = self.popularity.shares if isinstance(self.popularity, SharePopularity) else None
        if shares is not None and self.count is not None and len(shares) != self.count:
            raise ValueError(f"loras: popularity.shares has {len(shares)} shares, and count is {self.count}.")
        if isinstance(self.popularity, FirstPopularity) and self.count == 1:
            raise ValueError("loras: popularity first has others beside the first, and count is 1. Drop it.")

    @property
    def stated(self) -> list[str]:
        """The keys beside `rank` that are given."""
        return [key for key in ("count", "popularity", "share_of_requests") if getattr(self, key) is not None]

    def drawn(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """The adapter, from 0, that each of `uniform` asks for, random numbers in [0, 1); -1: the base model."""
        assert self.count is not None, "checked by the workload"
        share = 1.0 if self.share_of_requests is None else self.share_of_requests
        asks = uniform < share
        chance = np.where(asks, uniform / share if share else 0.0, 0.0)
        if isinstance(self.popularity, SharePopularity | FirstPopularity):
            shares = shares_of(self.popularity, self.count)
            adapter = np.searchsorted(np.cumsum(shares)[:-1], chance, side="right")
        else:
            alpha = self.popularity.alpha if isinstance(self.popularity, ZipfPopularity) else 0.0
            adapter = zipf_drawn(chance, self.count, alpha)
        return np.where(asks, adapter, -1)


def check_loras(places: Mapping[str, Loras | None], *, by_rows: bool) -> None:
    """ValueError where it is not said which adapter a request asks for, or said twice: in one of the `places` of a
    workload, by their keys, and `by_rows` of its trace."""
    for key, loras in places.items():
        if loras is None:
            continue
        if by_rows and loras.stated:
            raise ValueError(
                f"{key}.{loras.stated[0]}: the rows of the trace say which adapter each request asks for. Drop it,"
                " or drop trace.columns.lora."
            )
        if not by_rows and loras.count is None:
            raise ValueError(f"{key}: how many adapters there are is not said. Write count: 32, say.")
