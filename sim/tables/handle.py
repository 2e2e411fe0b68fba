"""The kernel tables of `aiconfigurator-core` for one deployment: the times of its steps, part by part.

A context op of theirs is one of a step with chunks, a generation op one of a step of decodes alone. Times are ms as
the tables have them; tokens, rows and contexts are of all `dp_attention` groups together, among which they are
divided evenly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from batchsim.base.units import counted
from batchsim.deployment.deployment import Deployment
from batchsim.kernel.window_sum import keys_in_window
from batchsim.tables.graph import ATTENTION, REACHED, Operation, Phase, operations_of, window_of
from batchsim.tables.models import model_folder
from batchsim.tables.modes import WAYS_OUT, Modes, NoTablesError, gemm_dtype, modes_of
from batchsim.tables.refusals import reason_of
from batchsim.tables.versions import engine_of, system_of, versions_for


class Size(NamedTuple):
    """`rows` decodes with `context` tokens each, or one prompt of `tokens` new tokens after `context`."""

    rows: int
    context: int
    tokens: int

    def __str__(self) -> str:
        if self.rows:
            return f"{counted(self.rows, 'decode')} with {counted(self.context, 'token')}"
        return f"{self.tokens:,} prompt tokens" + (f" after {self.context:,}" if self.context else "")


Times = dict[Size, dict[str, float]]
"""ms of each operation at each size."""


class Tables:
    """The tables' answers for one deployment. NoTablesError if they have none, naming what they lack.

    `backend` is the version of the engine's kernels that is asked: the deployment's where the tables have it, else the
    nearest, or a newer one where that has no such kernels; `modes` the types as the tables name them, `model_id` the
    model whose graph of ops is used. Where modes are given there are no others. `window`: of the layers that have one.
    """

    def __init__(self, deployment: Deployment, modes: Modes | None = None) -> None:
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it warns of tables that are not used
        self.deployment = deployment
        self.system = system_of(deployment)
        self.engine = engine_of(deployment)
        versions = versions_for(deployment)
        problems: list[str] = []
        with model_folder(deployment.model, gemm_dtype(deployment)) as (self.model_id, folder):
            for self.backend in versions:
                for self.modes in [modes] if modes else modes_of(deployment):
                    try:
                        self._open(folder)
                        return
                    except errors_of_tables() as error:
                        problems.append(reason_of(str(error)))
        raise _lacking(deployment, versions[0], problems)

    def _open(self, folder: str) -> None:
        """Compiles the deployment under `modes` and asks once for everything, so that what has no data says so."""
        deployment = self.deployment
        self._handle = self._compile(folder, 1)
        context, generation = (operations_of(specs) for specs in self._graph(folder))
        near = [self._context([each.index], 1, 256, 0) for each in context]
        far = [self._context([each.index], 1, 256, 8_192) for each in context]
        of_keys = frozenset(i for i, ms in enumerate(near) if ms != far[i])
        short = [self._generation([each.index], 8, _SHORT) for each in generation]
        long = [self._generation([each.index], 8, 8_192) for each in generation]
        of_context = frozenset(i for i, ms in enumerate(short) if ms != long[i])
        whole = any(short[i] > long[i] / 2 for i in of_context if generation[i].kind not in ATTENTION)
        context = [each if self._is_bounded(each) else replace(each, window=None) for each in context]
        self._prompts_of = Phase.of(context, of_keys, whole=whole)
        self._decodes_of = Phase.of(generation, of_context, whole=whole)
        self._names = {"context": context, "generation": generation}
        self.window = window_of([*context, *generation])
        self._state_bytes = sum(each.state_bytes for each in generation if self._is_estimate(each)) / deployment.tp
        self._piped = self._compile(folder, deployment.pp) if deployment.pp > 1 else None

    def _compile(self, folder: str, pp: int) -> Any:
        from aiconfigurator_core.sdk.engine import EngineHandle  # pyright: ignore[reportMissingImports]

        return EngineHandle.compile(
            folder, self.system, self.engine, backend_version=self.backend, pp_size=pp, **self._config
        )

    def _graph(self, folder: str) -> tuple[list[str], list[str]]:
        """The descriptions of the context and of the generation ops, in the order of their indices."""
        from aiconfigurator_core.sdk.config_builders import (  # pyright: ignore[reportMissingImports]
            build_model_config,
        )
        from aiconfigurator_core.sdk.models import get_model  # pyright: ignore[reportMissingImports]

        model = get_model(folder, build_model_config(pp_size=1, **self._config), self.engine)
        context, generation = ([op._spec_json() for op in ops] for ops in (model.context_ops, model.generation_ops))
        return context, generation

    @property
    def _config(self) -> dict[str, Any]:
        """Degrees and types as the tables name them."""
        deployment, modes = self.deployment, self.modes
        # Of a model without experts some graphs ask for these degrees all the same.
        return {
            "tp_size": deployment.tp,
            "attention_dp_size": deployment.dp_attention,
            "moe_ep_size": deployment.ep,
            "moe_tp_size": deployment.tp * deployment.dp_attention // deployment.ep,
            "gemm_quant_mode": modes.gemm,
            "moe_quant_mode": modes.moe,
            "kvcache_quant_mode": modes.kv,
            "fmha_quant_mode": modes.fmha,
        }

    def _is_bounded(self, operation: Operation) -> bool:
        """Whether the kernel of a context op with a window skips the keys before it: SGLang's of some versions reads
        them all."""
        if operation.window is None:
            return True
        full, far = (
            self._context([operation.index], 1, _PREFIX, prefix)
            for prefix in (max(operation.window, _PREFIX), 16 * max(operation.window, _PREFIX))
        )
        return far < _UNBOUNDED * full

    def _is_estimate(self, operation: Operation) -> bool:
        """Whether a generation op is a roofline of the tables, without a measurement."""
        if not operation.state_bytes:
            return False
        asked = self._handle.evaluate_generation_ops([operation.index], batch_size=64, s=_SHORT)
        return all(source == "sol" for *_, source in asked)

    # ---- ops, ms on each group

    def _context(self, ops: Collection[int], chunks: int, tokens: int, prefix: int) -> float:
        """Context ops of `chunks` prompts of `tokens` new tokens each after `prefix`."""
        if not ops:
            return 0.0
        asked = self._handle.evaluate_context_ops(list(ops), batch_size=chunks, s=tokens, prefix=prefix)
        return sum(ms for _, ms, _, _ in asked)

    def _generation(self, ops: Collection[int], rows: int, context: int) -> float:
        """Generation ops of `rows` decodes with `context` tokens each."""
        if not ops:
            return 0.0
        return sum(ms for _, ms, _, _ in self._handle.evaluate_generation_ops(list(ops), batch_size=rows, s=context))

    def operations(self, sizes: Iterable[Size]) -> Times:
        """ms of every operation, on each group, at those of the sizes for which the tables have data."""
        times: Times = {}
        context, generation = (range(len(self._names[phase])) for phase in ("context", "generation"))
        for size in sizes:
            try:
                if size.rows:
                    asked = self._handle.evaluate_generation_ops(list(generation), batch_size=size.rows, s=size.context)
                else:
                    asked = self._handle.evaluate_context_ops(
                        list(context), batch_size=1, s=size.tokens, prefix=size.context
                    )
            except _holes():
                continue
            times[size] = {name.partition("_")[2]: ms for name, ms, _, _ in asked}
        return times

    @property
    def blocks(self) -> frozenset[str]:
        """The operations, as `operations` names them, that depend on the keys."""
        keyed = {"context": self._prompts_of.keyed, "generation": self._decodes_of.keyed}
        return frozenset(
            each.name.partition("_")[2]
            for phase, operations in self._names.items()
            for each in operations
            if each.index in keyed[phase]
        )

    @property
    def compound(self) -> bool:
        """Whether attention is timed as one block with its projections."""
        return bool(self._decodes_of.blocks or self._prompts_of.blocks)

    @property
    def recurrent(self) -> bool:
        """Whether there are layers that keep a state of a fixed size in place of keys."""
        return bool(self._decodes_of.recurrent)

    @property
    def law_of_experts(self) -> str:
        """How unequal the loads of experts are taken, by the tables' name for it: power_law_1.2, for example."""
        return next((each.law for each in self._names["generation"] if each.law), "")

    @property
    def adds_states(self) -> bool:
        """Whether reading and writing the recurrent states is added, which the tables leave out."""
        return self._state_bytes > 0

    def _share(self, count: int) -> int:
        """What each group has of `count`, where they have the same, rounded up."""
        return -(-count // self.deployment.dp_attention)

    # ---- parts of a step, ms

    def layers(self, tokens: int) -> float:
        """Layers over `tokens` of a step with chunks, less what grows with the keys that the tokens read, and less what
        recurrent layers scan."""
        share = self._share(tokens)
        return self._context(self._prompts_of.rest, 1, share, 0) + self._projections(share)

    def experts(self, tokens: int) -> float:
        """Experts and the dispatch to them, of `layers`."""
        return self._context(self._prompts_of.experts, 1, self._share(tokens), 0)

    def decode_experts(self, rows: int) -> float:
        """Experts and the dispatch to them, of `decode`."""
        return self._generation(self._decodes_of.experts, self._share(rows), _SHORT)

    def scan(self, tokens: int, chunks: int = 1) -> float:
        """The scan of recurrent layers over `tokens` in equal `chunks`."""
        share = self._share(tokens)
        return self._context(self._prompts_of.recurrent, min(chunks, share), round(max(share / chunks, 1)), 0)

    def update(self, rows: int) -> float:
        """One step of the recurrence for each of `rows`."""
        share = self._share(rows)
        return self._generation(self._decodes_of.recurrent, share, _SHORT) + self._states(share)

    def head(self, rows: int) -> float:
        """The output matmul of `rows`."""
        return self._generation(self._decodes_of.head, self._share(rows), _SHORT)

    def decode(self, rows: int) -> float:
        """Layers and output matmul of `rows` decodes, less what grows with their contexts."""
        ops, share = self._decodes_of, self._share(rows)
        every = (*ops.rest, *ops.head, *ops.recurrent)
        return self._generation(every, share, _SHORT) + self._states(share) + self._least(share)

    def _least(self, rows: int) -> float:
        """What blocks of attention and projections take of `rows` on each group at the contexts that take least."""
        blocks = self._decodes_of.blocks
        return min(self._generation(blocks, rows, context) for context in _LENGTHS) if blocks else 0.0

    def decode_attention(self, rows: int, context: int) -> float:
        """Attention of `rows` decodes with `context` tokens each, in layers without a window."""
        ops, share = self._decodes_of, self._share(rows)
        grown = self._generation(ops.blocks, share, context) - self._least(share)
        return self._generation(ops.attention, share, context) + max(grown, 0.0)

    def window_attention(self, rows: int, context: int) -> float:
        """Attention of `rows` decodes with `context` tokens each, in layers with a window."""
        return self._generation(self._decodes_of.windowed, self._share(rows), context)

    def chunk_attention(self, tokens: int, keys: float, chunks: int = 1) -> float:
        """Attention of `chunks` with `tokens` in all, each of which reads `keys` on average, in layers without a
        window: of equal chunks after a prefix, or where they would be too long for so few keys, of as many equal
        prompts as are needed."""
        ops, share = self._prompts_of, self._share(tokens)
        attention, blocks = (self._reading(each, share, keys, chunks) for each in (ops.attention, ops.blocks))
        return attention + (max(blocks - self._projections(share), 0.0) if ops.blocks else 0.0)

    def _reading(self, ops: Collection[int], tokens: int, keys: float, chunks: int) -> float:
        each = max(tokens / chunks, 1.0)
        prefix = keys - (each + 1) / 2
        if prefix < 0:
            return self._prompts(ops, tokens, round(2 * keys - 1))
        return self._context(ops, min(chunks, tokens), round(each), round(prefix))

    def chunk_window_attention(self, tokens: int, keys: float) -> float:
        """`chunk_attention` in layers with a window, within which the tokens read `keys` on average."""
        window, share, ops = self.window, self._share(tokens), self._prompts_of.windowed
        if window is None:
            return 0.0
        read = round(share * keys)
        if read < keys_in_window(share, 0, window):
            length = _first(share, lambda n: keys_in_window(n, 0, window) >= n * keys)
            return self._prompts(ops, share, length)
        prefix = _first(window, lambda n: keys_in_window(share, n, window) >= read)
        return self._context(ops, 1, share, prefix if keys < window else max(window, _PREFIX))

    def transfer(self, tokens: int) -> float:
        """Sending the hidden states of `tokens` from one stage of the pipeline to the next."""
        if self._piped is None:
            return 0.0
        ops = list(range(len(self._names["context"])))
        operations = self._piped.evaluate_context_ops(ops, batch_size=1, s=self._share(tokens))
        return sum(ms for name, ms, _, _ in operations if "p2p" in name) / (self.deployment.pp - 1)

    def _projections(self, tokens: int) -> float:
        """What blocks of attention and projections take of `tokens` in prompts of a length that takes least."""
        blocks = self._prompts_of.blocks
        return min(self._prompts(blocks, tokens, min(tokens, length)) for length in _LENGTHS) if blocks else 0.0

    def _prompts(self, ops: Collection[int], tokens: int, length: int) -> float:
        """`ops` over `tokens` in prompts of `length`: linear between whole numbers of prompts."""
        length = max(1, min(length, tokens))
        whole, over = divmod(tokens, length)
        ms = self._context(ops, whole, length, 0)
        if not over:
            return ms
        return ms + (self._context(ops, whole + 1, length, 0) - ms) * over / length

    def _states(self, rows: int) -> float:
        """Reading and writing the states of `rows` on each group, where the tables' roofline leaves that out."""
        gpu = self.deployment.gpu
        assert gpu is not None, "tables are of a GPU"
        return 1e3 * 2 * rows * self._state_bytes / (REACHED * gpu.memory_bandwidth)

    # ---- whole steps, summed op by op, ms

    def decode_step(self, rows: int, context: int) -> float:
        """A step of `rows` decodes with `context` tokens each."""
        share = self._share(rows)
        return self._generation(range(len(self._names["generation"])), share, context) + self._states(share)

    def prefill_step(self, chunks: int, tokens: int, prefix: int) -> float:
        """A step of `chunks` prompts of `tokens` new tokens each after `prefix`; on each group."""
        return self._context(range(len(self._names["context"])), chunks, tokens, prefix)

    def mixed_step(self, chunks: int, tokens: int, prefix: int, rows: int, context: int) -> float:
        """A step of both; `context` is at least `tokens` + `prefix`. Chunks are of each group, rows of all.

        The tables' own sum knows attention by its name, and so leaves out decodes whose attention is called otherwise,
        takes blocks for one prompt of all tokens, and the tokens of decodes for a scan of recurrent layers. There it is
        summed here, op by op: matrices over all tokens; attention and recurrence of chunks and of decodes, each by its
        own kernels; of blocks the projections of the decodes beside the chunks' own, and what the decodes read."""
        ops, share = self._prompts_of, self._share(rows)
        if not self.compound and not self.recurrent:
            whole = tokens + prefix
            return float(self._handle.mixed_step_latency(chunks * whole, share, whole, 2 * (context - whole), prefix))
        all_tokens, computed = chunks * tokens + share, chunks * tokens
        ms = self._context(ops.rest, 1, all_tokens, 0) + self.head(rows + chunks)
        ms += self._context((*ops.attention, *ops.windowed, *ops.blocks, *ops.recurrent), chunks, tokens, prefix)
        ms += self._projections(all_tokens) - self._projections(computed)
        return ms + self.update(rows) + self.decode_attention(rows, context) + self.window_attention(rows, context)

    def provenance(self) -> dict[str, float]:
        """Shares of the time of a decode and of a prefill step by where it is from: `silicon` measured at or between
        points, `empirical` scaled from a roofline, `mixed` both, `sol` a roofline, `estimated` of kernels like it,
        `states` added to it here; `power` is the share with known power."""
        rows = self._share(64)
        steps: list[tuple[float, float, str]] = [(self._states(rows), 0.0, "states")] if self.adds_states else []
        for each in self._names["generation"]:
            asked = self._handle.evaluate_generation_ops([each.index], batch_size=rows, s=2_048)
            steps += [(ms, energy, source) for _, ms, energy, source in asked]
        for each in self._names["context"]:
            asked = self._handle.evaluate_context_ops([each.index], batch_size=1, s=2_048, prefix=0)
            steps += [(ms, energy, source) for _, ms, energy, source in asked]
        whole = sum(ms for ms, _, _ in steps)
        sources = sorted({source for ms, _, source in steps if ms > 0})
        shares = {of: sum(ms for ms, _, source in steps if source == of) / whole for of in sources}
        return shares | {"power": sum(ms for ms, energy, _ in steps if energy > 0) / whole}


_PREFIX = 1_024  # tokens before a chunk, where they fill the window of each of its tokens
_UNBOUNDED = 2.0  # times what the window's own keys take, at 16 times as many
_SHORT = 64  # tokens of a context or prompt short enough that hardly any of the time is attention
_LENGTHS = (_SHORT, 256, 1_024)  # of which blocks may take least: kernels change with the length


def _first(most: int, holds: Callable[[int], bool]) -> int:
    """The least number from 1 to `most` that `holds`, which holds of all beyond it; `most` where none below does."""
    least = 1
    while least < most:
        middle = (least + most) // 2
        if holds(middle):
            most = middle
        else:
            least = middle + 1
    return least


def _lacking(deployment: Deployment, backend: str, problems: list[str]) -> NoTablesError:
    """The error of a deployment that tables of the version `backend`, and newer ones, lack kernels for."""
    assert deployment.gpu is not None
    reason = "; ".join(dict.fromkeys(problems[:_REASONS]))
    return NoTablesError(
        f"deployment: the kernel tables of {deployment.engine} {backend} on {deployment.gpu.name} cannot time"
        f" {deployment.model.name}: {reason}. Try other types or another GPU. {WAYS_OUT}",
        reason,
    )


_REASONS = 2  # of the likeliest kernels: those of less likely ones say the same of other types


@contextmanager
def holes_told(tables: Tables) -> Iterator[None]:
    """A context in which sizes that the tables have no data for are a NoTablesError that says so in one line."""
    try:
        yield
    except _holes() as error:
        raise _lacking(tables.deployment, tables.backend, [reason_of(str(error))]) from None


def _holes() -> tuple[type[Exception], ...]:
    """What the package raises for a size that it has no data for."""
    from aiconfigurator_core.sdk import errors  # pyright: ignore[reportMissingImports]

    return (
        errors.PerfDataNotAvailableError,
        errors.InterpolationDataNotAvailableError,
        errors.EmpiricalNotImplementedError,
    )


def errors_of_tables() -> tuple[type[Exception], ...]:
    """What the package raises for a deployment that it has no answer for."""
    return (ValueError, KeyError, AssertionError, NotImplementedError, RuntimeError, OSError)
