"""The knobs of llama.cpp's server; see `llama_cpp.py`."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import PositiveInt
from batchsim.kernel.policy_config import PolicyConfig, Traits


@dataclass(frozen=True)
class LlamaCppConfig(PolicyConfig):
    """Knobs by llama.cpp's names."""

    n_parallel: PositiveInt = 4
    """Slots (`--parallel`); 4 is what the server takes where it is left to choose."""
    n_batch: PositiveInt = 2048
    """The most tokens of a step (`--batch-size`)."""
    n_ubatch: PositiveInt = 512
    """The most tokens of a pass (`--ubatch-size`), no more than `n_batch`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_batch < self.n_parallel:
            raise ValueError(
                f"n_batch {self.n_batch} must be >= n_parallel {self.n_parallel}: all slots decode in one step"
            )

    @property
    def traits(self) -> Traits:
        return Traits(
            max_num_seqs=self.n_parallel,
            max_num_batched_tokens=self.n_batch,
            knobs=("n_parallel", "n_batch"),
            splits_steps=True,
        )
