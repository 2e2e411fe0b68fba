"""Step times from a profile: measured curves instead of a GPU's sheet. The formula heads `batchsim.cost.profile`.

All terms are functions of the recorded step columns, so `explain` gives what `step_ns` gave, to a nanosecond.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

from batchsim.base.errors import CalibrationError
from batchsim.base.later import np
from batchsim.base.units import NS_PER_S, format_duration
from batchsim.cost.base import Cost, HostPart
from batchsim.cost.cost_error import CostError, Unknown, error_of
from batchsim.cost.interpolation import GridReader
from batchsim.cost.profile import HostTerm, Hull, Profile, StepCosts, check_reach
from batchsim.cost.roofline import HOST_LINK_SHARE
from batchsim.cost.segments import Rows, Segment, Segments
from batchsim.cost.windows import Windows
from batchsim.cost.work import (
    Columns,
    Terms,
    Work,
    attention_rows,
    chunk_rows,
    draft_pairs,
    padded_pairs,
    padded_work,
    swap_blocks,
    useful_flops_bytes,
)
from batchsim.deployment.deployment import Deployment
from batchsim.kernel.batch import Batch
from batchsim.kernel.protocols import DecodeLine
from batchsim.kernel.window_sum import keys_in_window

if TYPE_CHECKING:
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"


class Calibrated(Cost):
    """The durations of steps on the executor, model and GPU that `profile` was measured on.

    ExtrapolationError from `step_ns` and `recompute_ns` outside the profile's hull, unless `extrapolate`: then the last
    segments go on. `host` replaces the profile's host term. `block_size` and `max_model_len` are those of the run, the
    profile's by default; the latter decides how many rows read padding (`batchsim.cost.work.attention_rows`), of which
    profiles of other executors know nothing.
    """

    __slots__ = (
        "_chunk_grid",
        "_head",
        "_latest",
        "_layers",
        "_most",
        "_recurrence",
        "_segments",
        "_windows",
        "block_bytes",
        "block_size",
        "deployment",
        "extrapolate",
        "host",
        "max_model_len",
        "profile",
    )
    profile: Profile
    deployment: Deployment

    def __init__(
        self,
        profile: Profile,
        *,
        extrapolate: bool = False,
        host: HostTerm | None = None,
        block_size: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.profile = profile
        self.deployment = profile.deployment
        self.extrapolate = extrapolate
        self.host = profile.costs.host if host is None else host
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.block_bytes = (block_size or profile.block_size) * self.deployment.kv_bytes_per_token
        self._layers: dict[int, float] = {}
        self._head: dict[int, float] = {}
        grid = profile.costs.chunk_grid
        self._chunk_grid = None if grid is None else GridReader(grid)
        windowed, self._recurrence = profile.costs.windowed, profile.costs.recurrence
        self._windows = None if windowed is None else Windows(windowed, profile.costs.in_situ)
        longest = max_model_len or int(profile.hull.max_context) + 1
        self._most = max(longest - 1, 1) if profile.origin == "measured" else None
        most_context = inf if extrapolate else profile.hull.max_context
        on_cpu = profile.hardware.get("device") == "cpu"
        self._segments = Segments(profile.costs, self.host, most_context, self._launched, on_cpu=on_cpu)
        self._latest = self._segments.latest

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is pickled: to be made anew, without what it has looked up so far. Bound methods that compiled code
        holds cannot be pickled."""
        stated = {name: getattr(self, name) for name in ("extrapolate", "host", "block_size", "max_model_len")}
        return partial(type(self), self.profile, **stated), ()

    # ---- one step

    def step_ns(self, batch: Batch) -> int:
        """The step's duration in ns, at least 1. A decode-only step is O(1), any other O(chunks + swaps)."""
        rows = batch.num_decode_tokens + batch.pad_decode_rows
        if rows:
            context = batch.context_tokens + batch.pad_context_tokens
            drafts = batch.num_decode_tokens - batch.num_decode
            key = self._with_reads(batch, rows) if batch.pad_context_tokens or drafts else rows
            segment = self._latest.get(key)
            if segment is None or context > segment[1] or context < segment[0]:
                segment = self._find(key, context)
            _, _, alone, per_token, _, attention = segment
            if self._windows is not None:
                within = self._windows.line(batch, key if isinstance(key, int) else key[1])
                alone, attention, per_token = alone + within[0], attention + within[0], per_token + within[1]
            added = per_token * context
            verified = self._drafts_ns(batch) if drafts else 0.0
            if batch.chunks:
                beside = (attention + added) * self.profile.costs.beside
                ns = self._chunks_ns(batch, rows, beside + verified)
            else:
                ns = alone + (added + verified)
                if ns < segment[4]:
                    ns = segment[4]
        elif batch.chunks:
            ns = self._chunks_ns(batch, 0, 0.0)
        else:
            ns = self.host.base
        if batch.swap_out or batch.swap_in:
            ns += self.swap_ns(swap_blocks(batch))
        return int(ns) or 1

    def decode_line(self, batch: Batch) -> DecodeLine | None:
        rows, context = batch.num_decode, batch.context_tokens
        segment = self._latest.get(rows)
        if segment is None or context > segment[1] or context < segment[0]:
            if not self.extrapolate and context > self.profile.hull.max_context * rows:
                return None
            segment = self._find(rows, context)
        _, last, alone, per_token, least, _ = segment
        if self._windows is not None:
            within = self._windows.lasting_line(batch)
            if within is None:
                return None
            alone, per_token, last = alone + within[0], per_token + within[1], min(last, within[2])
        ns = alone + per_token * context
        if ns < 1 or per_token < 0 or last < context:
            return None
        if ns >= least:
            return alone, per_token, last
        below = context + (least - ns) / per_token - 1 if per_token else last  # that floor, for sure
        return least, 0.0, min(last, max(below, context))

    def recompute_ns(self, num_tokens: int) -> int:
        """ns of computing the first `num_tokens` of one sequence and nothing else, in as many steps as that takes with
        at most the tokens measured in one, and with warm caches."""
        hull, costs = self.profile.hull, self.profile.costs
        if not self.extrapolate:
            check_reach(self.profile, num_tokens, hull.max_chunk_context, "chunk")
        ns, done = 0.0, 0
        while done < num_tokens:
            n = num_tokens - done if self.extrapolate else min(hull.max_tokens, num_tokens - done)
            kernel = costs.in_situ * self._chunk_attention(1, n, n * done + n * (n + 1) // 2) + self._matmuls(n, 1)
            if self._windows is not None:
                kernel += self._windows.prompts_ns(n, keys_in_window(n, done, self._windows.window))
            if self._recurrence is not None:
                kernel += costs.in_situ * self._recurrence.ns(1, n, 0)
            ns += self.host.with_kernels(max(kernel, costs.launch_ns), 1, n)
            done += n
        return int(ns)

    def swap_ns(self, num_blocks: int) -> int:
        """ns of moving `num_blocks` over the host link; CalibrationError if neither measured nor known of the GPU."""
        base, per_block = self._swap_parts()
        return int(base + per_block * num_blocks) if num_blocks else 0

    def _chunks_ns(self, batch: Batch, rows: int, attention: float) -> float:
        """ns of a step with chunks beside `rows` decodes whose attention takes `attention` ns; without its swaps.

        A row of padding is a chunk of its own.
        """
        pairs = longest = 0
        for seq, n in batch.chunks:
            end = seq.settled_computed_tokens + n
            pairs += n * end - n * (n - 1) // 2
            if end > longest:
                longest = end
        chunks, prefill = len(batch.chunks) + batch.pad_prefill_rows, batch.num_prefill_tokens
        pad = batch.pad_prefill_tokens
        tokens, costs = prefill + pad, self.profile.costs
        if not self.extrapolate:
            longest = max(longest, tokens // chunks) if pad else longest
            hull = self.profile.hull
            if (
                rows + chunks > hull.max_sequences
                or rows + tokens > hull.max_tokens
                or longest > hull.max_chunk_context
            ):
                check_reach(self.profile, rows + chunks, hull.max_sequences, "sequences")
                check_reach(self.profile, rows + tokens, hull.max_tokens, "tokens")
                check_reach(self.profile, longest, hull.max_chunk_context, "chunk")
        chunk = self._chunk_attention(chunks, tokens, padded_pairs(pairs, chunks, prefill, pad))
        kernel = costs.in_situ * chunk + attention + self._matmuls(rows + tokens, rows + chunks)
        if self._windows is not None:
            kernel += self._windows.chunks_ns(batch)
        if self._recurrence is not None:
            kernel += costs.in_situ * self._recurrence.ns(chunks, tokens, rows)
        alone = 0.0 if rows else costs.prefill_ns
        sequences = rows + batch.num_decode - batch.num_decode_tokens + chunks
        return self.host.with_kernels(max(kernel, costs.launch_ns) + alone, sequences, prefill)

    def _chunk_attention(self, chunks: int, tokens: int, pairs: int) -> float:
        """ns of the attention of `chunks` with `tokens` and `pairs` in all, back to back: as `StepCosts.chunks_ns`."""
        costs = self.profile.costs
        if costs.more_chunks:
            return float(costs.chunks_ns(np.array([chunks]), np.array([tokens]), np.array([pairs]))[0])
        if self._chunk_grid is not None:
            return self._chunk_grid.at(tokens, pairs / tokens) if tokens else 0.0
        return float(costs.chunk_attention.ns(chunks, tokens, pairs))

    def _drafts_ns(self, batch: Batch) -> float:
        """ns that the attention of draft tokens adds to that of the decodes they belong to."""
        costs = self.profile.costs
        pairs = draft_pairs(batch.num_decode, batch.num_decode_tokens, batch.context_tokens)
        return float(costs.in_situ * costs.chunk_attention.per_pair * pairs)

    def _matmuls(self, tokens: int, rows: int) -> float:
        """ns of the layers on `tokens` and the head on `rows`, in a step launched op by op."""
        costs = self.profile.costs
        if tokens not in self._layers:
            self._layers[tokens] = costs.in_situ * costs.layers.at_one(tokens)
        if rows not in self._head:
            self._head[rows] = costs.in_situ * costs.head.at_one(rows)
        return self._layers[tokens] + self._head[rows]

    def _launched(self, rows: int) -> float:
        """ns of a step of `rows` decodes launched op by op, but for what grows with contexts."""
        update = 0.0 if self._recurrence is None else self.profile.costs.in_situ * self._recurrence.ns(1, 0, rows)
        return self._matmuls(rows, rows) + update

    def _with_reads(self, batch: Batch, rows: int) -> Rows:
        """`rows`; with the rows of attention, where padding reads more context than its own rows could."""
        pad, most = batch.pad_context_tokens, self._most
        if batch.num_decode_tokens > batch.num_decode:
            return rows, batch.num_decode + batch.pad_decode_rows
        if most is None or pad <= most * batch.pad_decode_rows:
            return rows
        return rows, batch.num_decode - (-pad // most)

    def _find(self, key: Rows, context: int) -> Segment:
        """The segment for `key` decodes that holds a total `context` in tokens. ExtrapolationError outside the hull."""
        rows, reads = (key, key) if isinstance(key, int) else key
        if not self.extrapolate:
            hull = self.profile.hull
            if rows > hull.max_sequences or rows > hull.max_tokens or context > hull.max_context * reads:
                check_reach(self.profile, rows, hull.max_sequences, "decodes")
                check_reach(self.profile, rows, hull.max_tokens, "tokens")
                check_reach(self.profile, context / reads, hull.max_context, "context")
        return self._segments.find(key, context)

    def _swap_parts(self) -> tuple[float, float]:
        """(ns of a step that swaps at all, ns of each block that it moves)."""
        swap = self.profile.costs.swap
        if swap is not None:
            return swap.base, swap.per_block * self.block_bytes / (
                self.profile.block_size * self.deployment.kv_bytes_per_token
            )
        gpu = self.deployment.gpu
        if gpu is None:
            raise CalibrationError(
                f"profile {self.profile.name}: swaps were not measured, and its GPU is not in the catalog. Calibrate"
                " again with swap blocks, or preempt by recompute."
            )
        return 0.0, self.block_bytes * NS_PER_S / (gpu.host_link * HOST_LINK_SHARE)

    @property
    def stages(self) -> int:
        return self.deployment.pp

    def head_ns(self, rows: int) -> float:
        return self.profile.costs.in_situ * self.profile.costs.head.at_one(rows)

    def transfer_ns(self, tokens: int) -> float:
        transfer = self.profile.costs.transfer
        return 0.0 if transfer is None else transfer.at_one(tokens)

    def experts_ns(self, tokens: int, *, decodes: bool) -> float:
        return self.profile.costs.experts_ns(tokens, decodes=decodes)

    @property
    def host_part(self) -> HostPart:
        return _part(self._ahead.host)

    @property
    def _ahead(self) -> StepCosts:
        """The costs where the engine schedules ahead of results: as measured so, unless the host's time is stated."""
        measured, costs = self.profile.ahead, self.profile.costs
        return measured if measured is not None and self.host == costs.host else replace(costs, host=self.host)

    @property
    def overlap_known(self) -> bool:
        stated = self.host.mode == "overlapped" and not self.host.assumed
        return stated or self._ahead is self.profile.ahead or super().overlap_known

    def without_host(self) -> Calibrated:
        host = HostTerm(0, 0, 0, "serial", self.host.assumed)
        return self.of(replace(self.profile, costs=replace(self._ahead, host=host), ahead=None), host)

    def of(self, profile: Profile, host: HostTerm | None = None) -> Calibrated:
        """This cost with another profile of the same deployment, and with `host`, that profile's unless given."""
        return Calibrated(
            profile,
            extrapolate=self.extrapolate,
            host=host,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
        )

    # ---- recorded steps

    def explain(self, columns: Columns) -> Terms:
        """What each step's time is made of: ns arrays `weights, kv_reads, matmul, attention, host, swap, other,
        draft`, which sum to `step_ns`, and `flops` and `bytes` of the useful work.

        `weights` is the matmuls' time at one token, `matmul` what more tokens add; `kv_reads` and `attention` are the
        attention of decodes and of chunks; `other` is what a step waits for its launches, and what a step of chunks
        alone takes besides. With an overlapped host, `host` is the part of its time that the kernels do not hide.
        """
        terms = self._kernels(columns, padded_work(columns))
        kernel, host = sum(terms.values(), np.zeros(1)), _part(self.host).of(columns)
        swapped = columns["swap_blocks"]
        base, per_block = self._swap_parts() if swapped.any() else (0.0, 0.0)
        terms["host"] = host if self.host.mode == "serial" else np.maximum(host - kernel, 0.0)
        terms["swap"] = base * (swapped > 0) + per_block * swapped
        terms["draft"] = np.zeros(len(swapped))
        terms["flops"], terms["bytes"] = useful_flops_bytes(self.deployment, columns)
        return terms

    def kernel_ns(self, columns: Columns) -> Floats:
        """ns of each step's kernels; outside the hull too."""
        return sum(self._kernels(columns, padded_work(columns)).values(), np.zeros(len(columns["num_decode"])))

    def host_ns(self, columns: Columns) -> Floats:
        """ns of each step's host time, hidden behind kernels or not."""
        return _part(self.host).of(columns)

    def _kernels(self, columns: Columns, work: Work) -> Terms:
        """The kernels' terms of `explain`; `work` is `padded_work(columns)`."""
        costs = self.profile.costs
        decodes, chunks = columns["num_decode_tokens"] + columns["pad_decode_rows"], chunk_rows(columns)
        reads = attention_rows(columns, self._most)
        held = self._segments.held(decodes, reads)
        one, graph = np.array([1]), np.zeros(len(decodes), dtype=bool)
        weights = costs.layers.at(one) + costs.head.at(one)
        matmul = costs.layers.at(work.tokens) + costs.head.at(work.rows)
        prefill = columns["num_prefill_tokens"] + columns["pad_prefill_tokens"]
        if costs.recurrence is not None:
            matmul = matmul + costs.recurrence.of(chunks, prefill, decodes)
        if costs.decode is not None:
            graph = (chunks == 0) & (decodes > 0) & (held <= costs.decode.x[-1])
            matmul[graph] = costs.decode.holding(held[graph])
            weights = np.where(graph, costs.decode.holding(one), weights)
        busy = costs.in_situ * (work.tokens > 0)
        weights = np.minimum(weights, matmul)
        mean = work.context / np.maximum(reads, 1)
        drafts = draft_pairs(columns["num_decode"], columns["num_decode_tokens"], columns["context_tokens"])
        attention = costs.chunks_ns(chunks, prefill, work.pairs - drafts) + costs.chunk_attention.per_pair * drafts
        beside = np.where(chunks > 0, costs.beside, 1.0)
        terms = {
            "weights": weights * busy,
            "kv_reads": costs.decode_attention.at(reads, mean) * (decodes > 0) * beside * costs.in_situ,
            "matmul": (matmul - weights) * busy,
            "attention": attention * costs.in_situ,
        }
        if self._windows is not None:
            terms["kv_reads"] = terms["kv_reads"] + self._windows.decodes_of(columns) * beside
            terms["attention"] = terms["attention"] + self._windows.chunks_of(columns)
        wait = costs.launch_ns - sum(terms.values(), np.zeros(1))
        other = np.where((work.tokens > 0) & ~graph, np.maximum(wait, 0.0), 0.0)
        return terms | {"other": other + costs.prefill_ns * ((chunks > 0) & (decodes == 0))}

    # ---- words

    def describe(self) -> str:
        """One line for the head of a report."""
        p = self.profile
        host = "; host assumed" if self.host.assumed else "; host stated" if self.host != p.costs.host else ""
        host += "; extrapolates" if self.extrapolate else ""
        host += f"; {p.made['anchor']}" if "anchor" in p.made else ""
        if p.setup is not None:
            errors = p.held_out or {}
            near = f"; follows them to ±{100 * errors['p50']:.1f} % (median of {errors['n']:,} steps)" if errors else ""
            doubts = "".join(f" · ! {doubt}" for doubt in p.cautions)
            return f"cost: kernel tables of {p.setup} ({p.made.get('from', 'unnamed')}{near}{host}){doubts}"
        where = [f"measured on {p.machine}", f"torch {p.software.get('torch')}", f"commit {p.software.get('commit')}"]
        error = "no held-out steps"
        if p.held_out is not None:
            error = f"±{100 * p.held_out['p50']:.1f} % (median of {p.held_out['n']:,} held-out steps)"
            error += f", bias {100 * p.held_out['bias']:+.1f} %"
        if "live_runs_fitted" in p.made:
            where.append(f"fitted to {len(p.made['live_runs_fitted'])} live runs too")
        if self.host != p.costs.host:
            error = f"error unknown: {self.error.source}"
        if any(what.startswith(("block", "rounds")) for what in p.missing):
            error = f"PARTIAL, {len(p.missing)} things missing; {error}"
        return f"cost: profile {p.name} ({', '.join(where)}; {error}{host})"

    @property
    def reach(self) -> Hull | None:
        return None if self.extrapolate else self.profile.hull

    @property
    def error(self) -> CostError | Unknown:
        """The error that the profile's file states, as far as the host term is the profile's own."""
        host = "" if self.host == self.profile.costs.host else "stated"
        return error_of(self.profile, host=host, beyond=self.extrapolate)

    def sources(self) -> list[str]:
        """Lines on where the numbers come from and what they are not. The first has a digest of the profile."""
        p, host, hull = self.profile, self.host, self.profile.hull
        digest = hashlib.sha256(p.to_json().encode()).hexdigest()[:12]
        beyond = "; extrapolated beyond" if self.extrapolate else ""
        parts = f"{format_duration(host.base)} + {format_duration(host.per_sequence)} a sequence"
        parts += f" + {format_duration(host.per_token)} a prompt token" if host.per_token else ""
        swap = "as measured" if p.costs.swap is not None and not p.costs.swap.assumed else "assumed from the host link"
        reached = "measured" if p.setup is None else "asked of the tables"
        return [
            f"profile {p.name} ({digest}): {p.origin}, executor {p.executor}",
            f"{reached} up to {hull.max_sequences} decodes with {hull.max_context:,.0f} mean context tokens,"
            f" {hull.max_tokens:,} tokens a step, prompts of {hull.max_chunk_context:,}{beyond}",
            f"host: {parts}, {host.mode}" + (" (assumed)" if host.assumed else ""),
            f"swap: {swap}" if p.costs.swap is not None or self.deployment.gpu is not None else "swap: not known",
            *(f"missing: {line}" for line in p.missing),
            *p.notes,
        ]


def _part(host: HostTerm) -> HostPart:
    return HostPart(host.base, host.per_sequence, host.per_token)
