"""CUDA graphs of decode steps: one for each of a few numbers of rows, the buckets, to which steps are padded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.transformer import DeviceInputs

LARGEST_BUCKET = 512


def buckets_for(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes of graphs in rows: 1, 2, 4, 8, 16, by 8 to 256, by 32 to 512; as far as `max_num_seqs` needs, and one more.

    The one more has spare rows for the padding that decoding rows read: see `filled`.
    """
    all_buckets = [1, 2, 4, 8, 16, *range(24, 257, 8), *range(288, LARGEST_BUCKET + 1, 32)]
    enough = sum(bucket < max_num_seqs for bucket in all_buckets) + 2
    return tuple(all_buckets[:enough])


def bucket_of(inputs: StepInputs, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds a decode-only step and its padding reads; None if it must run without a graph."""
    if len(inputs.chunk_lens) or not inputs.num_decode:
        return None
    return next((bucket for bucket in buckets if bucket >= inputs.num_decode + len(inputs.pad_reads)), None)


def filled(inputs: StepInputs, bucket: int) -> StepInputs:
    """The decode-only step `inputs` with `bucket` rows, the added ones padding that stores nothing.

    Reads that `inputs` has for attention alone become contexts of such rows; the other rows read one token of zeros.
    """
    rows = inputs.num_decode
    spare = bucket - rows
    seq_lens = np.ones(bucket, dtype=np.int32)
    seq_lens[:rows] = inputs.seq_lens
    seq_lens[rows : rows + len(inputs.pad_reads)] = inputs.pad_reads
    tables = np.zeros((bucket, inputs.block_tables.shape[1]), dtype=np.int32)
    tables[:rows] = inputs.block_tables
    return StepInputs(
        ids=np.pad(inputs.ids, (0, spare)),
        positions=np.pad(inputs.positions, (0, spare)),
        slots=np.pad(inputs.slots, (0, spare), constant_values=-1),
        num_decode=bucket,
        chunk_lens=inputs.chunk_lens,
        seq_lens=seq_lens,
        block_tables=tables,
    )


class DecodeGraphs:
    """A CUDA graph for each bucket, all in one memory pool.

    `place(bucket)` puts a step of padding where later steps of that bucket will lie, `run` enqueues its kernels there.
    The largest is captured first: the smaller ones then find their memory in what it left.
    """

    def __init__(
        self,
        place: Callable[[int], DeviceInputs],
        run: Callable[[DeviceInputs], None],
        buckets: tuple[int, ...],
    ) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        for bucket in sorted(buckets, reverse=True):
            inputs = place(bucket)
            run(inputs)  # compiles kernels and allocates scratch, which a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run(inputs)
            pool = graph.pool()
            self._graphs[bucket] = graph

    def replay(self, bucket: int) -> None:
        """Runs, on the current stream, the step that was put in place."""
        self._graphs[bucket].replay()
