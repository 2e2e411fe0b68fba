"""What a scenario says of the time that the host takes beside a step's kernels: `host:` of a cost."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Literal

from batchsim.base.ranges import Config
from batchsim.base.units import HostDuration, PartDuration, format_duration

if TYPE_CHECKING:
    from batchsim.cost.profile import HostTerm


@dataclass(frozen=True, slots=True)
class HostCost(Config):
    """Time that a step spends outside large kernels, serial with them: base + per sequence + per prompt token.

    The defaults are assumed, not measured: launches, small kernels and sampling are expected to add 0.4-0.8 ms to the
    sum of a step's large kernels, and bookkeeping some microseconds a sequence. A calibrated profile replaces them.
    """

    base: HostDuration = 600_000
    """Time of each step."""
    per_sequence: PartDuration = 2_000
    """Time for each sequence of a step."""
    per_token: PartDuration = 0
    """Time for each prompt token of a step."""

    @property
    def is_assumed(self) -> bool:
        """Whether these are the defaults, which are not measured."""
        return astuple(self) == astuple(HostCost())

    def __str__(self) -> str:
        parts = f"{format_duration(self.base)} + {format_duration(self.per_sequence)} a sequence"
        return parts + (f" + {format_duration(self.per_token)} a prompt token" if self.per_token else "")


@dataclass(frozen=True, slots=True)
class StatedHost(Config):
    """Host time as a scenario states it, in place of the profile's."""

    base: HostDuration
    """Time of each step."""
    per_sequence: PartDuration = 0
    """Time for each sequence of a step."""
    per_token: PartDuration = 0
    """Time for each token of a step."""
    mode: Literal["serial", "overlapped"] = "serial"
    """Whether the engine's loop waits for results or schedules ahead of them."""

    def term(self) -> HostTerm:
        """The same as a profile has it."""
        from batchsim.cost.profile import HostTerm

        return HostTerm(self.base, self.per_sequence, self.per_token, self.mode, assumed=False)
