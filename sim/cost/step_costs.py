"""The parts of a step's time in a profile: curves and grids of kernels, the host's part and swaps. All times are ns.

The formula that adds them up heads `batchsim.cost.profile`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from batchsim.base.later import np
from batchsim.base.plain import LEFT_OUT
from batchsim.base.ranges import INT32_MAX, PositiveInt, Range, check_ranges
from batchsim.cost.interpolation import Curve, Grid, Ns

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class ChunkCost:
    """ns of the attention of prefill chunks: for each chunk, for each of its tokens, and for each query-key pair."""

    per_chunk: Ns
    per_token: Ns
    per_pair: Ns

    __post_init__ = check_ranges

    def ns(self, chunks: Any, tokens: Any, pairs: Any) -> Any:
        """ns of `chunks` with `tokens` and query-key `pairs` in total; of numbers, or of arrays of one a step."""
        return self.per_chunk * chunks + self.per_token * tokens + self.per_pair * pairs


@dataclass(frozen=True)
class HostTerm:
    """ns that a step spends on the host, outside its kernels; `per_token` is for each prefill token.

    `serial`: after the kernels. `overlapped`: beside them, so that the longer of the two counts. `assumed`: not
    measured.
    """

    base: Ns
    per_sequence: Ns
    per_token: Ns
    mode: Literal["serial", "overlapped"]
    assumed: bool

    __post_init__ = check_ranges

    def with_kernels(self, kernel_ns: float, sequences: int, prefill_tokens: int) -> float:
        """ns of a step of `sequences` whose kernels take `kernel_ns`, with the host's time."""
        host = self.base + self.per_sequence * sequences + self.per_token * prefill_tokens
        return kernel_ns + host if self.mode == "serial" else max(kernel_ns, host)


@dataclass(frozen=True)
class SwapCost:
    """ns that swapping adds to a step: once, and for every block that crosses the host link, either way."""

    base: Ns
    per_block: Ns
    assumed: bool

    __post_init__ = check_ranges


@dataclass(frozen=True)
class ChunkGrid:
    """The attention of steps with that number of `chunks`, over their tokens in all and the mean number of keys that a
    token reads."""

    chunks: Annotated[int, Range(2, INT32_MAX)]
    grid: Grid

    __post_init__ = check_ranges


@dataclass(frozen=True)
class WindowedAttention:
    """The attention of all layers with a sliding window of `window` tokens: of decodes over sequences and the mean of
    min(context, window), of all chunks of a step over their tokens and the mean of min(keys, window) of each."""

    window: PositiveInt
    decode: Grid
    chunks: Grid

    def __post_init__(self) -> None:
        check_ranges(self)
        for name, grid in (("decode", self.decode), ("chunks", self.chunks)):
            if grid.context[-1] > self.window:
                raise ValueError(f"{name} has a knot at {grid.context[-1]:g} tokens beyond the window of {self.window}")


@dataclass(frozen=True)
class Recurrence:
    """Layers that keep a state of a fixed size in place of keys (linear attention), in a step launched op by op:
    `scan` over its chunks and their tokens, `update` over its decodes, which read and write a state each. The scan of
    more chunks than its last knot takes what that takes."""

    scan: Grid
    update: Curve

    def __post_init__(self) -> None:
        self.update.check_end("update")

    def ns(self, chunks: int, tokens: int, rows: int) -> float:
        """ns of `tokens` of `chunks` and `rows` of decodes."""
        return float(self.of(np.array([chunks]), np.array([tokens]), np.array([rows]))[0])

    def of(self, chunks: NDArray[Any], tokens: NDArray[Any], rows: NDArray[Any]) -> NDArray[np.float64]:
        """`ns` of arrays of one a step."""
        scan = self.scan.at(np.minimum(chunks, self.scan.sequences[-1]), tokens) * (tokens > 0)
        return scan + self.update.at(rows) * (rows > 0)


@dataclass(frozen=True)
class SharedExperts:
    """What routed experts and the dispatch to them take over the tokens of all attention groups that share them: in a
    step launched op by op, `layers`, and in one of decodes that replays a graph, `decode`."""

    layers: Curve
    decode: Curve

    def __post_init__(self) -> None:
        self.layers.check_end("layers")
        self.decode.check_end("decode")


@dataclass(frozen=True)
class StepCosts:
    """The parts of a step's time, in ns.

    `layers` is over the tokens of the step, `head` over its rows of logits. `decode`, if any, holds layers and head of
    decode-only steps by size of the captured graph: a step takes the time of the smallest that holds its rows, and one
    with more rows than the largest is launched op by op. `decode_attention` comes on top of these. `launch_ns` is the
    least that the kernels of a step launched op by op take. `prefill_ns` is what a step of chunks alone takes besides:
    as a rule such a step follows a rest, with cold caches, the host's too. `in_situ` is the time of kernels inside an
    engine over their time back to back.

    `chunk_grid`, if any, is the attention of all chunks of a step, over their tokens and the mean number of keys that a
    token reads; `chunk_attention` then counts for draft tokens alone. `more_chunks`, if any, are such grids of steps
    with that many chunks, `chunk_grid` then being of one; between them the time is linear in the number. `beside` is
    the attention of decodes beside chunks over the same attention in a step of decodes alone. `transfer`, if any, is
    the time of the hidden states from one stage of a pipeline to the next, over tokens. `windowed` and `recurrence`, if
    any, come on top of the grids and of `layers`; `decode` holds the recurrence of its rows.
    `experts`, where several attention groups share them, are a part of `layers` and `decode`.
    """

    layers: Curve
    head: Curve
    decode: Curve | None
    decode_attention: Grid
    chunk_attention: ChunkCost
    launch_ns: Ns
    prefill_ns: Ns
    in_situ: Annotated[float, Range(0.01, 100)]
    host: HostTerm
    swap: SwapCost | None
    chunk_grid: Grid | None = field(default=None, metadata=LEFT_OUT)
    beside: Annotated[float, Range(0.01, 100)] = field(default=1.0, metadata=LEFT_OUT)
    transfer: Curve | None = field(default=None, metadata=LEFT_OUT)
    more_chunks: tuple[ChunkGrid, ...] = field(default=(), metadata=LEFT_OUT)
    windowed: WindowedAttention | None = field(default=None, metadata=LEFT_OUT)
    recurrence: Recurrence | None = field(default=None, metadata=LEFT_OUT)
    experts: SharedExperts | None = field(default=None, metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        check_ranges(self)
        self.layers.check_end("layers")
        self.head.check_end("head")
        if self.transfer is not None:
            self.transfer.check_end("transfer")
        numbers = [more.chunks for more in self.more_chunks]
        if numbers != sorted(set(numbers)) or (numbers and self.chunk_grid is None):
            raise ValueError(f"more_chunks are of {numbers} chunks, which do not increase from chunk_grid's one")

    def experts_ns(self, tokens: int, *, decodes: bool) -> float:
        """ns of the experts that attention groups share, as of `Cost.experts_ns`; 0 where none are apart."""
        if self.experts is None:
            return 0.0
        return self.in_situ * (self.experts.decode if decodes else self.experts.layers).at_one(tokens)

    def chunks_ns(self, chunks: NDArray[Any], tokens: NDArray[Any], pairs: NDArray[Any]) -> NDArray[np.float64]:
        """ns of the attention of a step's chunks, of arrays of one a step."""
        if self.chunk_grid is None:
            return np.asarray(self.chunk_attention.ns(chunks, tokens, pairs), float)
        mean = pairs / np.maximum(tokens, 1)
        ns = self.chunk_grid.at(tokens, mean)
        before = 1
        for more in self.more_chunks:
            share = np.clip((chunks - before) / (more.chunks - before), 0.0, 1.0)
            ns, before = ns + share * (more.grid.at(tokens, mean) - ns), more.chunks
        return ns * (tokens > 0)
