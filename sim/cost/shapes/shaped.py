"""A cost whose steps take what the compiled program takes that they run in, whatever of it is used.

`pad` writes a step's padding into its batch, so that records, costs and metrics see it: rows of a decode program
without a sequence are `pad_decode_rows`, and what its rows read beyond their own context is `pad_context_tokens`; whole
rows of a prompt program are `pad_prefill_rows`, and tokens beyond the real ones `pad_prefill_tokens`. A program of
tokens in one row after another ("flat") pads with decodes without context, which go through the layers and are sampled.

Simplified: flat padding is sampled, where engines pad the rows of their sampler by a list of its own.
"""

from __future__ import annotations

from batchsim.base.errors import ScenarioError
from batchsim.base.later import np
from batchsim.cost.base import Cost
from batchsim.cost.shapes.programs import Bucket, Programs, Shapes
from batchsim.cost.work import Columns, Terms
from batchsim.cost.wrapped import Wrapped
from batchsim.kernel.batch import Batch
from batchsim.kernel.types import DecodeGroup, Sequence

_OF_DECODES = ("num_decode", "num_decode_tokens", "context_tokens", "pad_decode_rows", "pad_context_tokens")
_OF_PROMPTS = ("num_prefill_tokens", "num_chunks", "prefill_pairs", "pad_prefill_tokens", "pad_prefill_rows")
_PASSES = ("num_passes", "num_wide_passes")
_MIX = (
    "Use a policy that never mixes them, like vllm_neuron or continuous with order: prefill_first, or shapes that do."
)


class Shaped(Wrapped):
    """The times of `cost` for steps padded to the `shapes`, of one engine: it knows which programs are compiled by now.

    `step_ns` is of a batch that `pad` has padded.
    """

    def __init__(self, cost: Cost, shapes: Shapes, block_size: int = 16) -> None:
        self.cost, self.shapes = cost, shapes
        self._block_size = block_size
        warm = shapes.is_warm
        self._prefill = Programs.of(shapes.prefill, "a step of prompts", is_warm=warm)
        self._decode = Programs.of(shapes.decode, "a step of decodes", is_warm=warm)
        self._mixed = None if shapes.mixed is None else Programs.of(shapes.mixed, "a mixed step", is_warm=warm)
        if shapes.decode is shapes.prefill:
            self._decode = self._prefill
        if shapes.mixed is shapes.prefill:
            self._mixed = self._prefill
        self._added: tuple[Batch, int, int, int, int] | None = None
        self._farthest: tuple[DecodeGroup | None, int, int] = (None, 0, 0)

    # ---- padding

    def pad(self, batch: Batch) -> int:
        """Writes the padding of its program into `batch`, about to be run, beside what its policy padded; returns the
        ns that the step has to wait for a compilation, or is longer since it has no program.

        ScenarioError where it fits none, or mixes what no program does.
        """
        self.unpad(batch)
        rows = has_decodes = batch.num_decode_tokens + batch.pad_decode_rows
        has_prompts = bool(batch.chunks or batch.pad_prefill_tokens)
        before = batch.pad_decode_rows, batch.pad_context_tokens, batch.pad_prefill_tokens, batch.pad_prefill_rows
        if self.shapes.prompts_apart and any(before):
            raise ScenarioError(
                f"shapes {self.shapes.name}: the policy pads its batches itself, which programs of one prompt each do"
                " not take. Take a policy that does not pad."
            )
        extra_ns = 0
        if rows and has_prompts and not self.shapes.prompts_apart:
            if self._mixed is None:
                raise ScenarioError(
                    f"shapes {self.shapes.name}: a step of {batch.num_decode:,} decodes and {len(batch.chunks):,}"
                    f" prompts has no program: prompts and decodes run in programs of their own. {_MIX}"
                )
            extra_ns = self._pad_flat(batch, self._mixed, rows)
        elif rows and has_prompts:
            extra_ns = self._pad_decodes(batch, rows) + self._pad_prompts(batch)
        elif has_prompts:
            is_flat = self.shapes.mixed is self.shapes.prefill
            extra_ns = self._pad_flat(batch, self._prefill, 0) if is_flat else self._pad_prompts(batch)
        elif rows:
            extra_ns = self._pad_decodes(batch, rows)
        after = batch.pad_decode_rows, batch.pad_context_tokens, batch.pad_prefill_tokens, batch.pad_prefill_rows
        rows, context, tokens, whole = (now - then for now, then in zip(after, before, strict=True))
        self._added = (batch, rows, context, tokens, whole)
        if self.shapes.prompts_apart and has_prompts:
            prompts = len(self._together(batch))
            batch.num_passes = prompts + (has_decodes > 0)
            batch.num_wide_passes = prompts + (has_decodes > 1)
        return extra_ns

    def unpad(self, batch: Batch) -> None:
        """Takes back what `pad` wrote into `batch`, if that was the latest, for its policy to go on with it."""
        if self._added is None or self._added[0] is not batch:
            return
        _, rows, context, tokens, whole = self._added
        batch.pad_decode_rows -= rows
        batch.pad_context_tokens -= context
        batch.pad_prefill_tokens -= tokens
        batch.pad_prefill_rows -= whole
        if self.shapes.prompts_apart:
            batch.num_passes = batch.num_wide_passes = 0
        self._added = None

    def _find(self, programs: Programs, sizes: Bucket) -> tuple[Bucket | None, int]:
        bucket, compiles = programs.find(sizes, self.shapes.name)
        if bucket is None:
            return None, self.shapes.eager_ns if programs.buckets else 0
        return bucket, self.shapes.compile_ns if compiles else 0

    def _pad_flat(self, batch: Batch, programs: Programs, rows: int) -> int:
        """Pads a program of tokens one after another, whatever they are of."""
        tokens = rows + batch.num_prefill_tokens + batch.pad_prefill_tokens
        bucket, extra_ns = self._find(programs, (tokens,))
        if bucket is not None:
            batch.pad_decode_rows += bucket[0] - tokens
        return extra_ns

    def _pad_decodes(self, batch: Batch, rows: int) -> int:
        phase = self.shapes.decode
        context = batch.context_tokens + batch.pad_context_tokens
        sizes = tuple(self._decode_size(dim, batch, rows) for dim in phase.dims)
        bucket, extra_ns = self._find(self._decode, sizes)
        if bucket is None:
            return extra_ns
        by_dim = dict(zip(phase.dims, bucket, strict=True))
        all_rows = by_dim.get("requests") or by_dim.get("tokens") or rows
        batch.pad_decode_rows += all_rows - rows
        if each := phase.read_tokens or by_dim.get("longest", 0):
            batch.pad_context_tokens += max(all_rows * each - context, 0)
        return extra_ns

    def _decode_size(self, dim: str, batch: Batch, rows: int) -> int:
        if dim in ("requests", "tokens"):
            return rows
        group = batch.decodes
        if group is None:
            return 1
        if dim == "longest":
            return self._longest(group, batch) + 1
        assert dim == "blocks", dim
        size = self._block_size
        spare = sum(count * ((i - 1) % size) for i, count in enumerate(group.blocks_due_in_turn()))
        return (batch.context_tokens + batch.num_decode + spare) // size

    def _longest(self, group: DecodeGroup, batch: Batch) -> int:
        """The context of the longest decode, found anew where the group has changed."""
        of, members, farthest = self._farthest
        if of is not group or members != len(group.members) or batch.joined or batch.left:
            farthest = max((seq.settled_computed_tokens - seq.joined_step for seq in group.members), default=0)
            self._farthest = (group, len(group.members), farthest)
        return farthest + group.step

    def _together(self, batch: Batch) -> list[list[tuple[Sequence, int]]]:
        """The chunks of `batch` by the programs in which they run: alone those with context, others up to the most."""
        most = self.shapes.prompts_apart
        if not most:
            return [batch.chunks]
        programs: list[list[tuple[Sequence, int]]] = []
        fresh: list[tuple[Sequence, int]] | None = None
        for seq, n in batch.chunks:
            if seq.settled_computed_tokens:
                programs.append([(seq, n)])
            elif fresh is None or len(fresh) >= most or not self._fits([*fresh, (seq, n)]):
                fresh = [(seq, n)]
                programs.append(fresh)
            else:
                fresh.append((seq, n))
        return programs

    def _fits(self, chunks: list[tuple[Sequence, int]]) -> bool:
        """Whether prompts without context fit into one program of the list."""
        query, phase = max(n for _, n in chunks), self.shapes.prefill
        sizes = {"requests": len(chunks), "query": query, "blocks": 0, "tokens": query * len(chunks), "longest": query}
        return any(
            all(have >= sizes[dim] for dim, have in zip(phase.dims, bucket, strict=True)) for bucket in phase.buckets
        )

    def _pad_prompts(self, batch: Batch) -> int:
        extra_ns = 0
        own = batch.pad_prefill_rows, batch.pad_prefill_tokens
        for chunks in self._together(batch):
            tokens, whole, more_ns = self._prompt_padding(chunks, *own)
            batch.pad_prefill_tokens += tokens
            batch.pad_prefill_rows += whole
            extra_ns += more_ns
        return extra_ns

    def _prompt_padding(self, chunks: list[tuple[Sequence, int]], rows: int, pad_tokens: int) -> tuple[int, int, int]:
        """(Tokens of padding, whole rows among it, extra ns) of the program of `chunks`, beside which the policy has
        padded `rows` whole rows and `pad_tokens` tokens in all."""
        phase = self.shapes.prefill
        count, real = len(chunks) + rows, sum(n for _, n in chunks) + pad_tokens
        query = max(n for _, n in chunks) if not pad_tokens else -(-real // count)
        computed = max(seq.settled_computed_tokens for seq, _ in chunks) if chunks else 0
        sizes = {
            "requests": count,
            "tokens": real,
            "query": query,
            "longest": max((seq.settled_computed_tokens + n for seq, n in chunks), default=query),
            "blocks": -(-computed // self._block_size),
        }
        bucket, extra_ns = self._find(self._prefill, tuple(sizes[dim] for dim in phase.dims))
        if bucket is None:
            return 0, 0, extra_ns
        by_dim = dict(zip(phase.dims, bucket, strict=True))
        all_rows = by_dim.get("requests", count)
        length = by_dim.get("query") or by_dim.get("longest") or 0
        whole = by_dim["tokens"] if "tokens" in by_dim else all_rows * length
        return whole - real, all_rows - count, extra_ns

    # ---- times

    def step_ns(self, batch: Batch) -> int:
        """The ns of the step's program, or of its programs one behind the other."""
        if not batch.num_passes or not self.shapes.prompts_apart:
            return self.cost.step_ns(batch)
        decodes, total_ns = Batch(None, [], 0), 0
        if batch.num_decode_tokens + batch.pad_decode_rows:
            for name in _OF_DECODES:
                setattr(decodes, name, getattr(batch, name))
            total_ns += self.cost.step_ns(decodes)
        for chunks in self._together(batch):
            tokens, whole, _ = self._prompt_padding(chunks, 0, 0)
            prompts = Batch(None, chunks, sum(n for _, n in chunks), pad_prefill_tokens=tokens, pad_prefill_rows=whole)
            total_ns += self.cost.step_ns(prompts)
        if batch.swap_out or batch.swap_in:
            swaps = Batch(None, [], 0, swap_out=batch.swap_out, swap_in=batch.swap_in)
            total_ns += self.cost.step_ns(swaps)
        return total_ns

    def explain(self, columns: Columns) -> Terms:
        """The terms of the padded work. Of a step in several programs its prompts count as if they were alike.

        Compilations are not in it: recorded durations that are longer have waited for one.
        """
        return explain_apart(self.cost, columns) if self.shapes.prompts_apart else self.cost.explain(columns)

    # ---- what it is

    def describe(self) -> str:
        text, mark, doubts = self.cost.describe().partition(" · ! ")
        return f"{text} · {self.shapes}{mark}{doubts}"

    def sources(self) -> list[str]:
        return [*self.cost.sources(), f"{self.shapes}: {self.shapes.source}"]

    def without_host(self) -> Shaped:
        """This cost without the host's part, of an engine of its own."""
        return Shaped(self.cost.without_host(), self.shapes, self._block_size)


def explain_apart(cost: Cost, columns: Columns) -> Terms:
    """The terms of recorded steps that ran their decodes and prompts in programs of their own, each as `cost` has it:
    a step of several passes is of one program of decodes, if any, and of prompts, which count as if they were alike."""
    passes = columns["num_passes"]
    none = np.zeros_like(passes)
    programs = np.maximum(passes - (columns["num_decode_tokens"] + columns["pad_decode_rows"] > 0), 1)
    one = {name: np.where(passes > 0, 0, column) for name, column in columns.items()}
    several = {name: np.where(passes > 0, column, 0) for name, column in columns.items()}
    decodes = several | dict.fromkeys((*_OF_PROMPTS, *_PASSES), none)
    prompts = {name: column // programs for name, column in several.items()}
    prompts |= dict.fromkeys((*_OF_DECODES, "swap_blocks", *_PASSES), none)
    has_decodes = decodes["num_decode_tokens"] + decodes["pad_decode_rows"] > 0
    parts = ((one, passes == 0), (decodes, has_decodes), (prompts, programs * (passes > 0)))
    explained = [(cost.explain(part), weight) for part, weight in parts]
    terms = explained[0][0]
    return {name: sum((each[name] * weight for each, weight in explained), np.zeros(len(passes))) for name in terms}
