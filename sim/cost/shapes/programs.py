"""The programs of a device with compiled shapes, and which of them a step runs in.

A *program* is compiled for a bucket: a size for each dimension of its phase (prompts, decodes, or both mixed). A step
runs in the first bucket that holds its real sizes, in the order of tuples. One that fits none is an error, runs without
a program, or has one compiled while it waits, as the engine's rule is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.units import format_duration
from batchsim.cost.shapes.lists import Bucket, above, first_fit

Dimension = Literal["requests", "tokens", "query", "longest", "blocks"]
"""What is padded: sequences; tokens of the step; tokens of the longest chunk; tokens of the longest sequence, those of
this step included; KV blocks of the context."""
Beyond = Literal["error", "exact", "compile"]
"""How a step that fits no bucket is treated: it cannot be run, runs as it is, or waits for a program of its own."""


@dataclass(frozen=True)
class Phase:
    """The programs of steps of one kind: sorted `buckets` of sizes for `dims`.

    `above`: of `longest` the next bucket above is meant, but for the largest. `read_tokens`: context that each row of a
    decode program reads, whatever its own; 0: its own, or that of `longest` where it is a dimension. `rounded`: the
    bucket that is compiled for sizes beyond all; None: just these sizes.
    """

    dims: tuple[Dimension, ...]
    buckets: tuple[Bucket, ...]
    beyond: Beyond = "error"
    above: bool = False
    read_tokens: int = 0
    rounded: Callable[..., Bucket] | None = None

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def largest(self) -> Bucket:
        """The largest size of each dimension, which need not be of one bucket."""
        return tuple(max(sizes) for sizes in zip(*self.buckets, strict=True))


@dataclass(frozen=True)
class Shapes:
    """All programs of an engine: of steps of prompts, of decodes, and of both `mixed`, None where these share none.

    `prompts_apart`: 0, or the prompts of one program at most, where a mixed step runs its decodes and its prompts in
    programs of their own, one behind the other. `compile_ns`: the compilation of a program; `is_warm`: all were
    compiled before the first request. `warmup_ns` is what that took, `memory_bytes` what the programs keep of a
    device's memory; `eager_ns`: what a step without a program takes longer. `source` is for reports.
    """

    name: str
    prefill: Phase
    decode: Phase
    mixed: Phase | None
    prompts_apart: int = 0
    compile_ns: int = 0
    is_warm: bool = True
    warmup_ns: int = 0
    memory_bytes: int = 0
    eager_ns: int = 0
    source: str = ""

    @property
    def num_programs(self) -> int:
        """Programs compiled before the first request: each phase's, the ones of several phases once."""
        phases = {id(phase): phase for phase in (self.prefill, self.decode, self.mixed) if phase is not None}
        return sum(map(len, phases.values()))

    def __str__(self) -> str:
        """The shapes in words, for a line of a report."""
        every = {"prompts": self.prefill, "decodes": self.decode, "mixed": self.mixed}
        phases = {"steps": self.prefill} if self.prefill is self.decode is self.mixed else every
        counts = ", ".join(f"{len(phase)} of {name}" for name, phase in phases.items() if phase)
        warm = f", warm-up {format_duration(self.warmup_ns)}" if self.warmup_ns else ""
        held = f", {self.memory_bytes / 1e9:.1f} GB kept" if self.memory_bytes else ""
        return f"shapes: {self.name}, {counts}{warm}{held}"


@dataclass(slots=True)
class Programs:
    """The programs of one phase as one engine has them: those compiled by now.

    `ready`: the buckets that are compiled; None: all of the list are.
    """

    phase: Phase
    what: str
    buckets: list[Bucket]
    ready: set[Bucket] | None
    found: dict[Bucket, Bucket | None] = field(default_factory=dict[Bucket, "Bucket | None"])

    @classmethod
    def of(cls, phase: Phase, what: str, *, is_warm: bool) -> Programs:
        """Those of a new engine, which calls a step of this phase `what`."""
        return cls(phase, what, list(phase.buckets), None if is_warm else set())

    def find(self, sizes: Bucket, name: str) -> tuple[Bucket | None, bool]:
        """(The bucket in which a step of real `sizes` runs, None without one; whether it has to be compiled first).

        ScenarioError if there is none, and the rule is an error."""
        phase = self.phase
        if sizes in self.found:
            bucket = self.found[sizes]
        else:
            asked = sizes
            if phase.above:
                last = len(sizes) - 1
                asked = (*sizes[:last], above(sizes[last], phase.largest[last]))
            bucket = self.found[sizes] = first_fit(self.buckets, asked)
        if bucket is not None:
            if self.ready is None or bucket in self.ready:
                return bucket, False
            self.ready.add(bucket)
            return bucket, True
        if phase.beyond == "exact":
            return None, False
        if phase.beyond == "error":
            raise ScenarioError(self._refusal(sizes, name))
        bucket = sizes if phase.rounded is None else phase.rounded(*sizes)
        self.buckets.insert(bisect_left(self.buckets, bucket), bucket)
        if self.ready is not None:
            self.ready.add(bucket)
        self.found.clear()
        return bucket, True

    def _refusal(self, sizes: Bucket, name: str) -> str:
        phase = self.phase
        largest = phase.largest
        real = ", ".join(f"{dim} {size}" for dim, size in zip(phase.dims, sizes, strict=True))
        most = ", ".join(f"{dim} {size}" for dim, size in zip(phase.dims, largest, strict=True))
        return (
            f"shapes {name}: {self.what} of {real} fits no compiled program, whose largest are {most}. Add buckets, or"
            " hold the policy to them."
        )
