"""What the chunks of prompts in a step do to the counters of their sequences, once no engine could refuse them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchsim.kernel.types import Batch, Sequence

if TYPE_CHECKING:
    from batchsim.kernel.core import EngineCore


def advance_chunks(core: EngineCore, batch: Batch) -> tuple[int, int]:
    """Counts the chunks of `batch` as computed, and a new token for each that ends its sequence's known ones; returns
    (query-key pairs of the chunks, new tokens).

    PolicyError for chunks no engine could run: a policy may be a user's own, and what it got wrong must not become
    a result.
    """
    pairs = tokens = 0
    sampled: list[Sequence] = []
    chunks, kv = batch.chunks, core.scheduler.kv
    for seq, n in chunks:
        computed = seq.settled_computed_tokens
        known = seq.request.prompt_tokens + seq.settled_output_tokens
        pairs += n * computed + n * (n + 1) // 2
        tokens += n
        done = computed + n
        if n < 1 or done > known or seq.group is not None:
            raise core.policy_error(f"schedules {n} tokens of {seq!r}")
        if kv.held(seq) * kv.block_size < done:
            raise core.policy_error(f"schedules up to token {done} in {kv.held(seq)} KV blocks: {seq!r}")
        core.journal.computed(seq, done)
        seq.settled_computed_tokens = done
        if done == known:
            seq.settled_output_tokens += 1
            sampled.append(seq)
    if tokens != batch.num_prefill_tokens:
        raise core.policy_error(f"says num_prefill_tokens {batch.num_prefill_tokens} for chunks of {tokens}")
    if len(chunks) > 1 and len({seq for seq, _ in chunks}) != len(chunks):
        raise core.policy_error("schedules a sequence twice in one step")
    batch.sampled = sampled
    return pairs, len(sampled)
