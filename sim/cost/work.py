"""How much a step has to do, of one batch or of columns of recorded steps; the same arithmetic for both."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from batchsim.base.later import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from batchsim.deployment.deployment import Deployment
    from batchsim.kernel.batch import Batch

Columns: TypeAlias = "Mapping[str, NDArray[Any]]"
Terms: TypeAlias = "dict[str, NDArray[np.float64]]"


class StepWork(NamedTuple):
    """The work of one step, as its record has it: decoding sequences and their tokens, drafts included; tokens of
    prompts and how many sequences they are of; context tokens that decodes read; query-key pairs of prompts; padding;
    blocks swapped; passes, where a step is split into several, and those of them that are wide; of context tokens and
    pairs what layers with a sliding window read, 0 where that was not counted."""

    num_decode: int = 0
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_chunks: int = 0
    context_tokens: int = 0
    prefill_pairs: int = 0
    pad_prefill_tokens: int = 0
    pad_prefill_rows: int = 0
    pad_decode_rows: int = 0
    pad_context_tokens: int = 0
    swap_blocks: int = 0
    num_passes: int = 0
    num_wide_passes: int = 0
    window_tokens: int = 0
    window_pairs: int = 0


WORK_COLUMNS = StepWork._fields
"""The columns of a step record that say how much work the step had: the keys of `Columns`."""

TIME_TERMS = ("weights", "kv_reads", "matmul", "attention", "host", "swap", "other", "draft")
"""The ns terms of `explain`, which sum to the step's duration; `draft` is of the drafter that follows it, if any."""


def work_columns(steps: NDArray[np.void] | Columns) -> Columns:
    """The work columns of recorded steps, as int64: products of two columns of 32 bits would not fit."""
    return {name: steps[name].astype(np.int64, copy=False) for name in WORK_COLUMNS}


class Work(NamedTuple):
    """Work of steps, an element a step: tokens through the layers, rows sampled, context tokens that decodes read,
    query-key pairs of the chunks and of draft tokens, sequences."""

    tokens: NDArray[Any]
    rows: NDArray[Any]
    context: NDArray[Any]
    pairs: NDArray[Any]
    sequences: NDArray[Any]


def prefill_pairs(batch: Batch) -> int:
    """Query-key pairs of the chunks: a chunk of n tokens after c computed ones has n·c + n(n+1)/2. No padding.

    `settled_computed_tokens` is c, since a sequence with a chunk is in no decode group.
    """
    pairs = 0
    for seq, n in batch.chunks:
        pairs += n * seq.settled_computed_tokens + n * (n + 1) // 2
    return pairs


def draft_pairs(num_decode: Any, num_decode_tokens: Any, context_tokens: Any) -> Any:
    """Query-key pairs of draft tokens, of numbers or columns: the j-th draft after c computed tokens has c + j.

    Supposes as many drafts for all decodes of a step. The keys that drafts share with their sequence's own token are
    read once, so that pairs are all that they add to attention.
    """
    drafts = num_decode_tokens - num_decode
    decodes = num_decode + (num_decode == 0)
    return (2 * drafts * context_tokens + drafts * (drafts + decodes)) // (2 * decodes)


def swap_blocks(batch: Batch) -> int:
    """Blocks that cross the host link in this step, both ways together."""
    return sum(n for _, n in batch.swap_out) + sum(n for _, n in batch.swap_in)


def padded_pairs(pairs: int, num_rows: int, num_tokens: int, pad_tokens: int) -> int:
    """Query-key pairs with padding: of `num_rows` chunks and rows of padding, taken as whole prompts of one length.

    At least `pairs`, those of the chunks without padding.
    """
    if not pad_tokens:
        return pairs
    length = (num_tokens + pad_tokens) // num_rows
    return max(pairs, num_rows * (length * (length + 1) // 2))


def attention_rows(columns: Columns, most: int | None) -> NDArray[np.int64]:
    """How many rows the attention of decodes has in each step: decodes, rows of padding, rows that read padding only.

    The rule of batchsim's executor: the rows of padding read all of `pad_context_tokens`, evenly; where that is above
    `most` tokens a row (the longest sequence less one), as few further rows as possible help. Those see attention only,
    unless the step replays a graph, which then is one that holds them too. `most` None: there are no further rows.
    """
    rows, context = columns["pad_decode_rows"], columns["pad_context_tokens"]
    return columns["num_decode"] + (rows if most is None else np.maximum(rows, -(-context // most)))


def chunk_rows(columns: Columns) -> NDArray[np.int64]:
    """How many rows the attention of chunks has in each step: chunks, and whole rows of padding."""
    return columns["num_chunks"] + columns["pad_prefill_rows"]


def work_of_step(batch: Batch) -> StepWork:
    """The work of the step `batch`. O(its chunks and swaps)."""
    return StepWork(
        num_decode=batch.num_decode,
        num_decode_tokens=batch.num_decode_tokens,
        num_prefill_tokens=batch.num_prefill_tokens,
        num_chunks=len(batch.chunks),
        context_tokens=batch.context_tokens,
        prefill_pairs=prefill_pairs(batch),
        pad_prefill_tokens=batch.pad_prefill_tokens,
        pad_prefill_rows=batch.pad_prefill_rows,
        pad_decode_rows=batch.pad_decode_rows,
        pad_context_tokens=batch.pad_context_tokens,
        swap_blocks=swap_blocks(batch),
        num_passes=batch.num_passes,
        num_wide_passes=batch.num_wide_passes,
        window_tokens=batch.window_tokens,
        window_pairs=batch.window_pairs,
    )


def columns_of(batch: Batch) -> Columns:
    """The row a recorder would write of `batch`, as columns of length 1."""
    return {name: np.array([value], dtype=np.int64) for name, value in work_of_step(batch)._asdict().items()}


def even_columns(
    decodes: Any, context: Any, chunks: Any = 0, chunk: Any = 0, prefix: Any = 0
) -> dict[str, NDArray[Any]]:
    """The columns of steps of `decodes` sequences that read `context` tokens each and of `chunks` of `chunk` tokens
    after `prefix` computed ones: numbers, or arrays with an element a step."""
    work = dict.fromkeys(WORK_COLUMNS, 0) | {
        "num_decode": decodes,
        "num_decode_tokens": decodes,
        "num_prefill_tokens": chunks * chunk,
        "num_chunks": chunks,
        "context_tokens": decodes * context,
        "prefill_pairs": chunks * (chunk * prefix + chunk * (chunk + 1) // 2),
    }
    return dict(zip(work, np.broadcast_arrays(*map(np.atleast_1d, work.values())), strict=True))


def all_terms(columns: Columns, known: Terms) -> Terms:
    """Every term that `Cost.explain` promises, an element a step, zero where not in `known`."""
    zeros = np.zeros(len(columns["num_decode"]))
    return {name: known.get(name, zeros) for name in (*TIME_TERMS, "flops", "bytes")}


def useful_work(columns: Columns) -> Work:
    """The work without its padding. Every sequence of a step has one sampled row, and one for each draft.

    Source: vLLM V1 computes logits for the last token of each scheduled sequence, of partial chunks too.
    """
    c = columns
    return Work(
        tokens=c["num_decode_tokens"] + c["num_prefill_tokens"],
        rows=c["num_decode_tokens"] + c["num_chunks"],
        context=c["context_tokens"],
        pairs=c["prefill_pairs"] + draft_pairs(c["num_decode"], c["num_decode_tokens"], c["context_tokens"]),
        sequences=c["num_decode"] + c["num_chunks"],
    )


def padded_work(columns: Columns) -> Work:
    """The work with its padding: what the step's time is made of. A row of padding is sampled too."""
    c, useful = columns, useful_work(columns)
    pad, pairs = c["pad_prefill_tokens"], useful.pairs
    if (padded := pad > 0).any():
        chunks = chunk_rows(columns)
        length = (c["num_prefill_tokens"] + pad) // np.maximum(chunks, 1)
        rectangle = chunks * (length * (length + 1) // 2)
        pairs = np.where(padded, np.maximum(pairs, rectangle), pairs)
    return Work(
        tokens=useful.tokens + c["pad_decode_rows"] + pad,
        rows=useful.rows + c["pad_prefill_rows"] + c["pad_decode_rows"],
        context=useful.context + c["pad_context_tokens"],
        pairs=pairs,
        sequences=useful.sequences + c["pad_prefill_rows"] + c["pad_decode_rows"],
    )


def useful_flops_bytes(deployment: Deployment, columns: Columns) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(FLOPs of each step's useful work, bytes of weights and KV that it reads), on all GPUs together.

    A step of padding alone reads the weights too. Of routed experts those are read that its tokens go through if each
    token's are drawn alike, and KV as if no layer had a window.
    """
    from batchsim.deployment.quantisation import ELEMENT_BYTES  # no reader of a scenario needs it

    model, useful = deployment.model, useful_work(columns)
    busy = useful.tokens + columns["pad_decode_rows"] + columns["pad_prefill_tokens"] > 0
    flops = model.matmul_flops_per_token * useful.tokens + 2 * model.head_parameters * useful.rows
    flops = flops + model.attention_flops_per_pair * (useful.pairs + useful.context)
    every, routed, share = deployment.step_bytes()
    read = every * busy + routed * (1 - (1 - share) ** useful.tokens) if routed else every * busy
    kv = ceil(sum(each.count * each.attention.kv_bytes(1, ELEMENT_BYTES[deployment.types.kv]) for each in model.kinds))
    return flops * 1.0, read + kv * useful.context * 1.0
