"""What vLLM 0.33 does otherwise on a model whose layers keep KV in several groups.

Rule: the same; windows give blocks back before each growth of their sequence, by the tokens that no step in flight
computes, so that a blocked head may come in with any step. Where states are kept for the prefix cache, chunks of a
prompt end where a state is to be kept: at ends of blocks, or where a block is longer than any chunk at the first one
that is reached; at the last end of a block in the prompt, unless the engine can keep a state within a step; and at a
junction, where one kind of group found more of the prompt than all did. A chunk may be cut to nothing, and then its
sequence sits out the step, or is not admitted.
Source: vllm/v1/core/sched/scheduler.py of the 0.33.0 wheel (`_mamba_block_aligned_split`).
"""

from __future__ import annotations

from collections.abc import Mapping

from batchsim.kernel.batch import Batch
from batchsim.kernel.draft_group import DraftGroup
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.types import DecodeGroup, Sequence
from batchsim.kv.group_tables import keeps_within
from batchsim.kv.grouped import GroupedBlocks, Growth
from batchsim.kv.grouped_cache import GroupedHashKV
from batchsim.policies.systems.vllm.cohorts import Cohorts
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

Chunks = list[tuple[Sequence, int]]


class LayerGroups:
    """The groups of one engine: what its steps take of them, and what is in flight.

    `ahead`: whether steps are scheduled ahead of results, of which in a pipeline `cohorts` knows the batches.
    """

    def __init__(self, kv: GroupedBlocks, config: VllmConfig, cohorts: Cohorts | None, *, ahead: bool) -> None:
        self.kv, self._cohorts, self._ahead = kv, cohorts, ahead
        self.left: Mapping[Sequence, int] = {}  # tokens in flight of sequences that left a group that verifies drafts
        self._prompts: Batch | None = None  # the last batch, where it has prompts and its results are to come
        kv.in_flight = self.in_flight
        kv.lag = int(ahead) if cohorts is None else None
        self._cache = kv if isinstance(kv, GroupedHashKV) else None
        states = [group for group in kv.layout.groups if group.kind == "state"] if self._cache is not None else []
        self._state = states[0] if states else None
        self._keeps_within = all(group.checkpoint is not None for group in states)
        self._longest_chunk = min(config.step_tokens, config.long_prefill_token_threshold or config.step_tokens)

    @classmethod
    def of(cls, kv: KVBlockManager, config: VllmConfig, cohorts: Cohorts | None, *, ahead: bool) -> LayerGroups | None:
        """The groups of `kv`; None where it has one of full attention."""
        return cls(kv, config, cohorts, ahead=ahead) if isinstance(kv, GroupedBlocks) else None

    # ---- from step to step

    def begin_step(self) -> None:
        """Takes note that a step is about to be scheduled."""
        if self._cache is not None:
            self._cache.begin_step()

    def launched(self, batch: Batch) -> None:
        """Takes note that `batch` is in flight from now on."""
        self._prompts = batch if batch.chunks else None

    def landed(self, batch: Batch) -> None:
        """Takes note that the results of `batch` are there."""
        if batch is self._prompts:
            self._prompts = None

    def in_flight(self, seq: Sequence) -> int:
        """How many tokens of `seq` the steps in flight compute as the next one is scheduled."""
        if self._cohorts is not None:
            return self._cohorts.in_flight(seq)
        if not self._ahead:
            return 0
        group, prompts = seq.group, self._prompts
        for other, n in () if prompts is None else prompts.chunks:
            if other is seq:
                padding = None if prompts is None or prompts.drafting is None else prompts.drafting.padding
                return n + (padding.get(seq, 0) if padding else 0)
        if isinstance(group, DraftGroup):
            return int(group.unknown[seq.phase])
        return self.left.get(seq, 0) if group is None else int(group.gained(seq) > 0)

    # ---- blocks

    def take(self, group: DecodeGroup, chunks: Chunks) -> bool:
        """Takes the blocks of a step of `group` and `chunks`; False, and nothing changed, if they might be short."""
        kv, growths = self.kv, list[Growth]()
        for seq, n in chunks:
            tokens = seq.settled_computed_tokens + n
            growths.append((seq, tokens, min(tokens + kv.draft_room, kv.max_model_len)))
        return kv.extend(group, growths)

    def may_let_in(self, blocked: tuple[Sequence, str] | None) -> bool:
        """Whether one more step of decodes could let in the head that is `blocked`: not where it waits for a slot."""
        return blocked is not None and blocked[1] != "no_slot"

    # ---- chunks

    def clip(self, seq: Sequence, start: int, n: int) -> int:
        """How many of the `n` tokens of `seq` from `start` on are computed in one step; 0: it has to wait."""
        state, prefill_end = self._state, max(seq.request.prompt_tokens, seq.num_tokens - 1)
        if state is None or start >= prefill_end:
            return n
        size, end = state.block_size, start + n
        kept = (prefill_end - 1) // size * size
        within = end >= prefill_end and self._keeps_within and keeps_within(state, start, end, kept)
        if end < prefill_end:
            floor = end // size * size
            if floor > start or size <= self._longest_chunk:
                end = floor
        stops = [0 if within else (seq.num_tokens - 1) // size * size]
        if start % size and not within:
            stops.append((start // size + 1) * size)
        assert self._cache is not None, "states are kept for it"
        junction = self._cache.junction(seq)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)
