"""What the chunks of prompts in a step do to the counters of their sequences, once no engine could refuse them."""

from __future__ import annotations

from collections.abc import Callable

from batchsim.base.errors import PolicyError
from batchsim.kernel.batch import Batch
from batchsim.kernel.journal import Journal
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.types import Sequence


def advance_chunks(
    batch: Batch, kv: KVBlockManager, journal: Journal, error: Callable[[str], PolicyError]
) -> tuple[int, int]:
    """Counts the chunks of `batch` as computed, and a new token for each that ends its sequence's known ones; returns
    (query-key pairs of the chunks, new tokens).

    `error` makes a PolicyError of what a policy did, for chunks no engine could run: a policy may be a user's own, and
    what it got wrong must not become a result.
    """
    pairs = tokens = 0
    sampled: list[Sequence] = []
    chunks = batch.chunks
    for seq, n in chunks:
        computed = seq.settled_computed_tokens
        known = seq.request.prompt_tokens + seq.settled_output_tokens
        pairs += n * computed + n * (n + 1) // 2
        tokens += n
        done = computed + n
        if n < 1 or done > known or seq.group is not None:
            raise error(f"schedules {n} tokens of {seq!r}")
        if kv.room(seq) < done:
            raise error(f"schedules up to token {done} in {kv.held(seq)} KV blocks: {seq!r}")
        journal.computed(seq, done)
        seq.settled_computed_tokens = done
        if done == known and seq.max_output_tokens:
            seq.settled_output_tokens += 1
            sampled.append(seq)
    if tokens != batch.num_prefill_tokens:
        raise error(f"says num_prefill_tokens {batch.num_prefill_tokens} for chunks of {tokens}")
    if len(chunks) > 1 and len({seq for seq, _ in chunks}) != len(chunks):
        raise error("schedules a sequence twice in one step")
    batch.sampled = sampled
    return pairs, len(sampled)
