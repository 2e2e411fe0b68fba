"""Continuous batching: sequences join and leave at every step; admission reserves all the KV they can ever need.

Rule: a strict first-come queue. The head comes in when a slot, KV blocks for its prompt and output cap (or the fixed
`reserve_tokens`) and tokens of the step's budget are there; a blocked head is never overtaken. What is reserved is kept
to the end, so nothing is ever preempted. `decode_first`: every step decodes all, prompts share the rest of the budget.
`prefill_first`: while a prompt can be computed the step holds prompts only and the decodes stand still. Source:
iteration-level scheduling and reservation from Orca (Yu et al., OSDI 2022; `reserve_tokens`, no token cap), chunks
beside decodes from Sarathi-Serve (Agrawal et al., OSDI 2024), reservation by cap as in HF TGI.
Rejected: what fits neither the pool nor `reserve_tokens` (`never_fits`); without chunked prefill a prompt longer than
the budget (`over_token_budget`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import PositiveInt
from batchsim.kernel.batch import IDLE, Batch, Idle
from batchsim.kernel.policy_config import Traits
from batchsim.kernel.protocols import PolicyContext
from batchsim.kernel.types import Event, Sequence
from batchsim.policies.families.budget import BudgetConfig
from batchsim.policies.families.first_come import FirstCome


@dataclass(frozen=True)
class ContinuousConfig(BudgetConfig):
    """Knobs."""

    reserve_tokens: PositiveInt | None = None
    """Tokens of KV that every request reserves; null: its prompt and output cap, less the last token, which is never
    computed."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, kv_groups=True)


class Continuous(FirstCome):
    """The scheduler. A step costs O(prompts in it), whatever the number of sequences that decode."""

    evidence = "family"

    def __init__(self, config: ContinuousConfig, context: PolicyContext) -> None:
        kv = context.kv
        if config.reserve_tokens is not None and kv.blocks_for(config.reserve_tokens) > kv.num_blocks:
            raise ScenarioError(
                f"continuous: reserve_tokens {config.reserve_tokens} takes {kv.blocks_for(config.reserve_tokens)} KV"
                f" blocks, {kv.num_blocks} are in the pool. Lower it or give the engine more KV."
            )
        super().__init__(context)
        self.config = config
        self._budget = config.budget
        self._prefill_first = config.order == "prefill_first"

    def schedule(self, now_ns: int, drain: bool) -> Batch | Idle:
        group = self.group
        left = self._budget - (0 if self._prefill_first else len(group.members))
        chunks: list[tuple[Sequence, int]] = []
        for seq in self.partial:  # one at most: the next prompt starts only when this one leaves tokens over
            left -= self._compute(seq, left, chunks)
        if self.waiting:
            reason = self._admit(left, chunks)
            self.note_blocked(reason, chunks[-1][0].request.id if reason == "token_budget" and chunks else None)
        if not (chunks or group.members):
            return IDLE
        decodes = None if self._prefill_first and chunks else group
        return Batch(decodes, chunks, sum([n for _, n in chunks]))

    def repeat(self, batch: Batch, now_ns: int) -> bool:
        # Slots, blocks and budget stay as they are until a sequence ends, so a blocked head stays blocked.
        batch.again()
        return True

    def foreseen(self, batch: Batch) -> list[int]:
        return [0]  # all their blocks are reserved

    def repeat_by(self, batch: Batch, num_steps: int, due: list[Sequence]) -> None:
        batch.again_by(num_steps)

    def refusal(self, seq: Sequence) -> Event | None:
        """The rejection of a sequence that cannot fit, or that no step could start; None if some step could."""
        if unfit := super().refusal(seq):
            return unfit
        reserve, prompt = self.config.reserve_tokens, seq.request.prompt_tokens
        if reserve is not None and self.most_tokens(seq) > reserve:
            detail = f"{self.most_tokens(seq)} tokens need KV, reserve_tokens {reserve}"
            return Event("rejected", seq, "never_fits", detail=detail)
        if not self.config.chunked_prefill and prompt > self._budget:
            detail = f"prompt of {prompt} tokens in one step, max_num_batched_tokens {self._budget}"
            return Event("rejected", seq, "over_token_budget", detail=detail)
        return None

    def _admit(self, left: int, chunks: list[tuple[Sequence, int]]) -> str:
        """Admits from the head of the queue, into `chunks`, within `left` tokens; returns why the next one does not
        fit, "" if the queue is empty."""
        kv, config, waiting = self.kv, self.config, self.waiting
        while waiting:
            if len(self.running) >= config.max_num_seqs:
                return "no_slot"
            seq = waiting[0]
            lacking = seq.num_tokens - seq.num_computed_tokens
            if left < (1 if config.chunked_prefill else lacking):
                return "token_budget"
            if not kv.allocate(seq, config.reserve_tokens or self.most_tokens(seq)):
                return "kv_blocks"
            waiting.popleft()
            self.start_running(seq, lacking)
            left -= self._compute(seq, left, chunks)
        return ""

    def _compute(self, seq: Sequence, left: int, chunks: list[tuple[Sequence, int]]) -> int:
        """Adds to `chunks` what `left` tokens allow of the prompt of `seq`; returns the tokens taken."""
        n = min(self.partial[seq], left)
        self.partial[seq] -= n
        chunks.append((seq, n))
        return n
