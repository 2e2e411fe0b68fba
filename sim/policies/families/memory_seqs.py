"""As many sequences as the KV memory is expected to hold, by what the running ones hold now.

Rule: whenever requests wait and others run, `max_num_seqs` becomes the KV blocks of the pool x `factor` by the blocks
that a running sequence holds on average, rounded down; not below the number that run, then between `min_num_seqs` and
the stated `max_num_seqs`. It stays until the next such step.
Source: memory-constrained dynamic batching (arXiv 2503.05248), as the README of KevinLee1110/dynamic-batching has it;
neither the paper's proofs nor its SLA mode were read.
Simplifies: blocks are those of the preemptive family, which a prompt holds whole from its admission on, and a cached
prefix there is none. The rest: see `controlled.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsim.base.ranges import PositiveInt
from batchsim.base.units import Share
from batchsim.kernel.protocols import PolicyContext
from batchsim.policies.families.controlled import Controlled, ControlledConfig


@dataclass(frozen=True)
class MemorySeqsConfig(ControlledConfig):
    """Knobs beside those of the preemptive family."""

    factor: Share = 0.95
    """Part of the KV blocks that is to be used."""
    min_num_seqs: PositiveInt = 1
    """The least number of sequences that may run at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_num_seqs > self.max_num_seqs:
            raise ValueError(f"min_num_seqs {self.min_num_seqs} must be at most max_num_seqs {self.max_num_seqs}")
        if not self.factor:
            raise ValueError("factor 0 uses no KV memory. Write a share above 0")


class MemorySeqs(Controlled):
    """The scheduler."""

    def __init__(self, config: MemorySeqsConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self._least, self._most, self._factor = config.min_num_seqs, config.max_num_seqs, config.factor

    def steer(self, now_ns: int) -> None:
        running, used = len(self.running), self.kv.num_blocks - self.kv.num_free
        if not running or not used or not (self.waiting or self.swapped):
            return
        expected = int(self.kv.num_blocks * self._factor * running / used)
        self.slots = min(max(expected, running, self._least), self._most)
