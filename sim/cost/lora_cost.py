"""What a scenario says of the time that LoRA adapters take: `lora_cost:`."""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import Config
from batchsim.base.units import Bandwidth, HostDuration, Share, format_duration


@dataclass(frozen=True)
class LoraCost(Config):
    """What LoRA adapters cost. Without `load_gpu` and `load_disk` an adapter's bytes go over the GPU's host link, and
    come from a `disk` as fast as stated."""

    step: Share = 0.0
    """By how much a step with any adapter takes longer."""
    per_adapter: Share = 0.0
    """By how much more for each adapter that has tokens in it."""
    load_gpu: HostDuration | None = None
    """Time to copy an adapter from host memory into a slot of the GPU's; by its bytes unless given."""
    load_disk: HostDuration | None = None
    """Time to read an adapter from disk; by its bytes and `disk` unless given."""
    disk: Bandwidth | None = None
    """How fast adapters are read from disk, in the place of `load_disk`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_disk is not None and self.disk is not None:
            raise ValueError("load_disk and disk both say how long reading takes. Drop one of them")
        if self.load_disk is None and self.disk is None:
            raise ValueError("how long an adapter takes to be read from disk is not said. Write load_disk, or disk")

    def __str__(self) -> str:
        disk = f"{self.disk / 1e9:g} GB/s" if self.disk is not None else format_duration(self.load_disk or 0)
        gpu = "by its bytes" if self.load_gpu is None else format_duration(self.load_gpu)
        each = f"{100 * self.step:g} % a step and {100 * self.per_adapter:g} % an adapter"
        return f"{each}; loaded from disk {disk}, onto the GPU {gpu}"
