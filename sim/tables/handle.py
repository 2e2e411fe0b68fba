"""The kernel tables of `aiconfigurator-core` for one deployment: the only file that imports the package.

A context op of theirs is one of a step with chunks, a generation op one of a step of decodes alone. Times are ms as
the tables have them; tokens, rows and contexts are of all `dp_attention` groups together, among which they are
divided evenly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from batchsim.base.errors import nearest
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import GpuSpec
from batchsim.tables.models import model_folder
from batchsim.tables.modes import PACKAGE, WAYS_OUT, Modes, NoTablesError, gemm_dtype, has_experts, modes_of

ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}
"""The tables' names of engines by ours."""
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "a100": "a100_sxm"}
"""The tables' names of GPUs by ours, where they differ."""
_ATTENTION = frozenset({"context_attention", "generation_attention"})
"""Ops that are attention and nothing else. Others that depend on the context are whole blocks, projections included."""


class Size(NamedTuple):
    """`rows` decodes with `context` tokens each, or one prompt of `tokens` new tokens after `context`."""

    rows: int
    context: int
    tokens: int

    def __str__(self) -> str:
        if self.rows:
            return f"{self.rows} decode{'s' if self.rows > 1 else ''} with {self.context:,} tokens"
        return f"{self.tokens:,} prompt tokens" + (f" after {self.context:,}" if self.context else "")


Times = dict[Size, dict[str, float]]
"""ms of each operation at each size."""


def version() -> str | None:
    """The installed version of the package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    try:
        return of(PACKAGE)
    except PackageNotFoundError:
        return None


class Tables:
    """The tables' answers for one deployment. NoTablesError if they have none, naming what they lack.

    `backend` is the version of the engine's kernels that is asked: the deployment's where the tables have it, else the
    nearest; `modes` the types as the tables name them, `model_id` the model whose graph of ops is used. Where modes are
    given there are no others.
    """

    def __init__(self, deployment: Deployment, modes: Modes | None = None) -> None:
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it warns of tables that are not used
        self.deployment = deployment
        self.system = _system(deployment)
        self.engine = _engine(deployment)
        self.backend = _nearest(deployment.version, _versions(self.system, self.engine), deployment)
        problems: list[str] = []
        with model_folder(deployment.model, gemm_dtype(deployment)) as (self.model_id, folder):
            for self.modes in [modes] if modes else modes_of(deployment):
                try:
                    self._open(folder)
                    break
                except _errors() as error:
                    problems.append(_short(str(error)))
            else:
                raise NoTablesError(_lacking(deployment, self.backend, problems))

    def _open(self, folder: str) -> None:
        """Compiles the deployment under `modes` and asks once for everything, so that what has no data says so."""
        deployment = self.deployment
        self._handle = self._compile(folder, 1)
        self._ops = {"context": self._count("context"), "generation": self._count("generation")}
        near, far = self._context(1, 256, 0), self._context(1, 256, 8_192)
        of_keys = {name for name, ms in near.items() if ms != far[name]}
        near, far = self._generation(8, 64), self._generation(8, 8_192)
        of_keys |= {name for name, ms in near.items() if ms != far[name]}
        self._of_keys = frozenset(of_keys)
        self.compound = not self._of_keys <= _ATTENTION
        self._piped = self._compile(folder, deployment.pp) if deployment.pp > 1 else None

    def _compile(self, folder: str, pp: int) -> Any:
        from aiconfigurator_core.sdk.engine import EngineHandle  # pyright: ignore[reportMissingImports]

        deployment, modes = self.deployment, self.modes
        experts = has_experts(deployment.model)
        return EngineHandle.compile(
            folder,
            self.system,
            self.engine,
            backend_version=self.backend,
            tp_size=deployment.tp,
            pp_size=pp,
            attention_dp_size=deployment.dp_attention,
            moe_ep_size=deployment.ep if experts else 1,
            moe_tp_size=deployment.tp * deployment.dp_attention // deployment.ep if experts else 1,
            gemm_quant_mode=modes.gemm,
            moe_quant_mode=modes.moe,
            kvcache_quant_mode=modes.kv,
            fmha_quant_mode=modes.fmha,
        )

    def _count(self, phase: str) -> int:
        """The number of ops in one of the handle's lists: the index beyond the last is refused."""
        count = 0
        while True:
            try:
                getattr(self._handle, f"evaluate_{phase}_ops")([count], batch_size=1, s=128)
            except ValueError as error:
                if "out of range" not in str(error):
                    raise
                return count
            count += 1

    # ---- ops

    def _context(self, chunks: int, tokens: int, prefix: int) -> dict[str, float]:
        """ms of each context op, on each group, of `chunks` prompts of `tokens` new tokens each after `prefix`."""
        ops = list(range(self._ops["context"]))
        operations = self._handle.evaluate_context_ops(ops, batch_size=chunks, s=tokens, prefix=prefix)
        return {name: ms for name, ms, _, _ in operations}

    def _generation(self, rows: int, context: int) -> dict[str, float]:
        """ms of each generation op, on each group, of `rows` decodes with `context` tokens each."""
        ops = list(range(self._ops["generation"]))
        operations = self._handle.evaluate_generation_ops(ops, batch_size=rows, s=context)
        return {name: ms for name, ms, _, _ in operations}

    def operations(self, sizes: Iterable[Size]) -> Times:
        """ms of every operation, on each group, at those of the sizes for which the tables have data."""
        times: Times = {}
        for size in sizes:
            try:
                ms = self._generation(*size[:2]) if size.rows else self._context(1, size.tokens, size.context)
            except _holes():
                continue
            times[size] = {name.partition("_")[2]: each for name, each in ms.items()}
        return times

    @property
    def blocks(self) -> frozenset[str]:
        """The operations, as `operations` names them, that depend on the keys."""
        return frozenset(name.partition("_")[2] for name in self._of_keys)

    def _share(self, count: int) -> int:
        """What each group has of `count`, where they have the same, rounded up."""
        return -(-count // self.deployment.dp_attention)

    def _block(self, operations: dict[str, float]) -> float:
        return sum(ms for name, ms in operations.items() if name in self._of_keys)

    def _rest(self, operations: dict[str, float]) -> float:
        return sum(ms for name, ms in operations.items() if name not in self._of_keys and "logits" not in name)

    # ---- parts of a step, ms

    def layers(self, tokens: int) -> float:
        """Layers over `tokens` of a step with chunks, less what grows with the keys that the tokens read."""
        share = self._share(tokens)
        rest = self._rest(self._context(1, share, 0))
        return rest + self._projections(share) if self.compound else rest

    def head(self, rows: int) -> float:
        """The output matmul of `rows`."""
        return sum(ms for name, ms in self._generation(self._share(rows), 64).items() if "logits" in name)

    def decode(self, rows: int) -> float:
        """Layers and output matmul of `rows` decodes, less what grows with their contexts."""
        operations = self._generation(self._share(rows), _SHORT)
        return sum(operations.values()) if self.compound else sum(operations.values()) - self._block(operations)

    def decode_attention(self, rows: int, context: int) -> float:
        """Attention of `rows` decodes with `context` tokens each."""
        share = self._share(rows)
        ms = self._block(self._generation(share, context))
        return max(ms - self._block(self._generation(share, _SHORT)), 0.0) if self.compound else ms

    def chunk_attention(self, tokens: int, keys: float) -> float:
        """Attention of chunks with `tokens` in all, each of which reads `keys` on average: of one chunk after a prefix,
        or where that would be too long for so few keys, of as many equal prompts as are needed."""
        share = self._share(tokens)
        prefix = keys - (share + 1) / 2
        ms = (
            self._prompts(share, round(2 * keys - 1))
            if prefix < 0
            else self._block(self._context(1, share, round(prefix)))
        )
        return max(ms - self._projections(share), 0.0) if self.compound else ms

    def transfer(self, tokens: int) -> float:
        """Sending the hidden states of `tokens` from one stage of the pipeline to the next."""
        if self._piped is None:
            return 0.0
        ops = list(range(self._ops["context"]))
        operations = self._piped.evaluate_context_ops(ops, batch_size=1, s=self._share(tokens))
        return sum(ms for name, ms, _, _ in operations if "p2p" in name) / (self.deployment.pp - 1)

    def _projections(self, tokens: int) -> float:
        """What a block that is attention and projections takes of `tokens` that read next to no keys."""
        return self._prompts(tokens, min(tokens, _SHORT))

    def _prompts(self, tokens: int, length: int) -> float:
        """Blocks of `tokens` in prompts of `length`: linear between whole numbers of prompts."""
        length = max(1, min(length, tokens))
        whole, over = divmod(tokens, length)
        ms = self._block(self._context(whole, length, 0))
        if not over:
            return ms
        return ms + (self._block(self._context(whole + 1, length, 0)) - ms) * over / length

    # ---- whole steps, as the tables sum them, ms

    def decode_step(self, rows: int, context: int) -> float:
        """A step of `rows` decodes with `context` tokens each."""
        return float(self._handle.decode_step_latency(self._share(rows), context - 2, 2))

    def prefill_step(self, chunks: int, tokens: int, prefix: int) -> float:
        """A step of `chunks` prompts of `tokens` new tokens each after `prefix`; on each group."""
        return float(self._handle.predict_prefill_latency(chunks, tokens + prefix, prefix))

    def mixed_step(self, chunks: int, tokens: int, prefix: int, rows: int, context: int) -> float:
        """A step of both; `context` is at least `tokens` + `prefix`. Chunks are of each group, rows of all.

        Blocks of attention and projections the tables would take for one prompt of all tokens, decodes too; they are
        summed op by op here: the chunks' own, projections of the decodes beside them, and what these read.
        """
        whole, share = tokens + prefix, self._share(rows)
        if not self.compound:
            return float(self._handle.mixed_step_latency(chunks * whole, share, whole, 2 * (context - whole), prefix))
        all_tokens, computed = chunks * tokens + share, chunks * tokens
        ms = self._rest(self._context(1, all_tokens, 0)) + self.head(rows + chunks)
        ms += self._block(self._context(chunks, tokens, prefix))
        ms += self._projections(all_tokens) - self._projections(computed)
        return ms + self.decode_attention(rows, context)

    def provenance(self) -> dict[str, float]:
        """Shares of the time of a decode and of a prefill step by where the tables have it from: `silicon` measured at
        or between points, `empirical` scaled from a roofline, `mixed` both; `power` is the share with known power."""
        steps = [
            *self._handle.decode_step_per_op(self._share(64), 2_046, 2),
            *self._handle.run_static_per_op(batch_size=1, isl=2_048, osl=2, mode="static_ctx")[0],
        ]
        whole = sum(ms for _, ms, _, _ in steps)
        shares = {
            source: sum(ms for _, ms, _, from_table in steps if from_table == source) / whole
            for *_, source in sorted(steps)
        }
        return shares | {"power": sum(ms for _, ms, energy, _ in steps if energy > 0) / whole}


_SHORT = 64  # tokens of a context or prompt short enough that hardly any of the time is attention


# ---- names


def _system(deployment: Deployment) -> str:
    gpu = deployment.gpu
    if gpu is None:
        raise NoTablesError("deployment: its GPU is not in the catalog, and there are no kernel tables of it.")
    return SYSTEMS.get(gpu.name, gpu.name)


def _engine(deployment: Deployment) -> str:
    if deployment.engine not in ENGINES:
        advice = nearest(deployment.engine.lower(), ENGINES, f"Known are {', '.join(ENGINES)}.")
        raise NoTablesError(f"deployment.engine: there are no kernel tables of {deployment.engine!r}. {advice}")
    return ENGINES[deployment.engine]


def has_tables(gpu: GpuSpec, engine: str) -> bool:
    """Whether kernels of the engine were timed on the GPU."""
    return bool(_versions(SYSTEMS.get(gpu.name, gpu.name), ENGINES[engine]))


def _versions(system: str, engine: str) -> list[str]:
    """The versions of the engine whose kernels were timed on the system, the tables' own choice first."""
    from aiconfigurator_core.sdk.perf_database import get_version_slots  # pyright: ignore[reportMissingImports]

    slots = get_version_slots(system, engine) or {}
    return list(dict.fromkeys(slots[slot] for slot in ("current", "previous", "next") if slots.get(slot)))


def _nearest(asked: str, known: list[str], deployment: Deployment) -> str:
    """The version of `known` that is nearest to the one asked for; the first, if none is."""
    if not known:
        assert deployment.gpu is not None
        raise NoTablesError(
            f"deployment: {PACKAGE} has no kernel tables of {deployment.engine} on {deployment.gpu.name}. {WAYS_OUT}"
        )
    return nearest_version(asked, known)


def nearest_version(asked: str, known: list[str]) -> str:
    """Of the versions `known` the one that begins as `asked` does, else the nearest by number; "": the first."""
    if not asked or asked in known:
        return asked or known[0]
    for each in known:
        if each.startswith(f"{asked}."):
            return each
    return min(known, key=lambda each: abs(number_of(each) - number_of(asked)))


def number_of(version: str) -> int:
    """A number that grows with the version: its first three parts, zeros where there are none."""
    parts = [int("".join(filter(str.isdigit, part.partition("rc")[0])) or 0) for part in version.split(".")]
    first, second, third = (*parts, 0, 0, 0)[:3]
    return (first * 1_000 + second) * 1_000 + third


def _lacking(deployment: Deployment, backend: str, problems: list[str]) -> str:
    assert deployment.gpu is not None
    first = "; ".join(dict.fromkeys(problems))
    return (
        f"deployment: the kernel tables of {deployment.engine} {backend} on {deployment.gpu.name} cannot time"
        f" {deployment.model.name}: {first[:400]}. Try other types or another GPU. {WAYS_OUT}"
    )


def _short(problem: str) -> str:
    """An error of the tables without the paths of the machine, in one line."""
    return " ".join(problem.partition(" at /")[0].split()).removeprefix("perf database error: ")


@contextmanager
def holes_told(tables: Tables) -> Iterator[None]:
    """A context in which sizes that the tables have no data for are a NoTablesError that says so in one line."""
    try:
        yield
    except _holes() as error:
        raise NoTablesError(_lacking(tables.deployment, tables.backend, [_short(str(error))])) from None


def _holes() -> tuple[type[Exception], ...]:
    """What the package raises for a size that it has no data for."""
    from aiconfigurator_core.sdk import errors  # pyright: ignore[reportMissingImports]

    return (
        errors.PerfDataNotAvailableError,
        errors.InterpolationDataNotAvailableError,
        errors.EmpiricalNotImplementedError,
    )


def _errors() -> tuple[type[Exception], ...]:
    """What the package raises for a deployment that it has no answer for."""
    return (ValueError, KeyError, AssertionError, NotImplementedError, RuntimeError, OSError)
