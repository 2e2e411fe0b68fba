"""A scenario without YAML, checks and catalog: all that a run needs, as one JSON file.

What `batchsim resolve` writes where scenarios can be read, a machine with little more than a GPU runs from. Model,
policies, workload and the rows of a trace are inside; only the source of a user's own policy has to travel beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from batchsim.base.errors import ScenarioError
from batchsim.base.files import json_kind, parse_json
from batchsim.base.plain import LEFT_OUT, from_plain, to_plain
from batchsim.deployment.model import ModelSpec
from batchsim.drive.resolved_policy import ResolvedPolicy
from batchsim.kernel.acceptance import DrawnLuck
from batchsim.kernel.core import EngineCore
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.policy_config import Speculation
from batchsim.kernel.protocols import Executor, LengthPredictor, PolicyContext, Scheduler, StepEstimator
from batchsim.kernel.record import Recorder
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.kernel.types import Request
from batchsim.policies.named_policy import find_policy
from batchsim.workload.build import BuiltWorkload, build_workload, known_requests
from batchsim.workload.predictors import build_predictor
from batchsim.workload.traces.trace_rows import HashIds, TraceRows
from batchsim.workload.workload_config import WorkloadConfig

if TYPE_CHECKING:
    from batchsim.cost.base import Cost

FORMAT = "batchsim-resolved"
VERSION = 3
KIND = json_kind(FORMAT)

_ATTRIBUTES = ("kv", "events", "streams", "num_waiting", "num_running")


@dataclass(frozen=True)
class _Table:
    """The rows of a trace as JSON holds them: `TraceRows` with lists for arrays."""

    arrival_ns: list[int] | None
    prompt_tokens: list[int]
    output_tokens: list[int]
    source: str
    format: str
    notes: tuple[str, ...]
    hash_block_tokens: int | None
    hash_ids: list[list[int]] | None
    acceptance: list[float] | None = field(default=None, metadata=LEFT_OUT)
    labels: dict[str, list[int]] | None = field(default=None, metadata=LEFT_OUT)
    texts: dict[str, list[str]] | None = field(default=None, metadata=LEFT_OUT)

    @classmethod
    def of(cls, rows: TraceRows) -> _Table:
        times = None if rows.arrival_ns is None else rows.arrival_ns.tolist()
        size, ids = None, None
        if rows.hash_ids is not None:
            size, ids = rows.hash_ids.block_tokens, [rows.hash_ids.row(i) for i in range(len(rows))]
        lengths = (rows.prompt_tokens.tolist(), rows.output_tokens.tolist())
        acceptance = None if rows.acceptance is None else rows.acceptance.tolist()
        labels = {role: column.tolist() for role, column in rows.labels.items()} or None
        texts = {role: list(texts) for role, texts in rows.texts.items()} or None
        return cls(times, *lengths, rows.source, rows.format, rows.notes, size, ids, acceptance, labels, texts)

    def rows(self) -> TraceRows:
        """The `TraceRows` of this table; ValueError if its columns differ in length."""
        columns = (self.arrival_ns or self.prompt_tokens, self.prompt_tokens, self.output_tokens)
        times, prompt, output = (np.array(column, np.int64) for column in columns)
        lists, size = self.hash_ids, self.hash_block_tokens
        labels, texts = self.labels or {}, self.texts or {}
        others = [column for column in (lists, self.acceptance, *labels.values()) if column is not None]
        if len({len(column) for column in (times, prompt, output, *others)}) > 1:
            raise ValueError(f"rows of {self.source}: the columns differ in length")
        hash_ids = None
        if lists is not None and size is not None:
            ends = np.cumsum([0, *map(len, lists)], dtype=np.int64)
            hash_ids = HashIds.of(size, np.array(list(chain.from_iterable(lists)), np.int64), ends)
        times = None if self.arrival_ns is None else times
        acceptance = None if self.acceptance is None else np.array(self.acceptance, np.float64)
        return TraceRows(
            times,
            prompt,
            output,
            self.source,
            self.format,
            self.notes,
            hash_ids,
            acceptance,
            labels={role: np.array(column, np.int64) for role, column in labels.items()},
            texts={role: tuple(names) for role, names in texts.items()},
        )


class _AsTables:
    """Marks the rows of a trace by seed, which JSON holds as tables."""

    def __get_pydantic_core_schema__(self, source: object, handler: Any) -> dict[str, Any]:
        tables = handler.generate_schema(dict[int, _Table])
        return {"type": "function-after", "function": {"type": "no-info", "function": self.read}, "schema": tables}

    def read(self, tables: dict[int, _Table]) -> dict[int, TraceRows]:
        return {seed: table.rows() for seed, table in tables.items()}


@dataclass(frozen=True)
class Resolved:
    """A scenario ready to run. `num_blocks` None: no KV memory is stated; a profile or the machine decides.

    `rows` are the usable rows of its trace by seed, under 0 alone where no jitter moves arrivals; {} without a trace.
    `load_name` is the axis of `loads`, "" without. `profile` is the JSON object of the profile from which the
    scenario's cost is; None for another cost.
    """

    name: str
    model: ModelSpec
    model_path: str
    block_size: int
    num_blocks: int | None
    num_swap_blocks: int
    max_model_len: int
    max_waiting: int | None
    workload: WorkloadConfig
    rows: Annotated[Mapping[int, TraceRows], _AsTables()]
    policies: tuple[ResolvedPolicy, ...]
    load_name: str
    loads: tuple[float, ...]
    seeds: int
    slo: str
    profile: dict[str, Any] | None

    def built_workload(self, load: float, seed: int) -> BuiltWorkload:
        """The requests of a load and seed: the same for every policy.

        ScenarioError if blocks of the KV cache would not fit into those by which the trace describes shared prompts.
        """
        change = {} if not self.load_name else {self.load_name: int(load) if self.load_name == "users" else load}
        workload = build_workload(
            self.workload,
            load=change,
            seed=seed,
            max_model_len=self.max_model_len,
            base=Path(),
            rows=self._trace_rows(seed),
        )
        listed = known_requests(workload)
        if listed is not None and listed.hash_ids is not None:
            self._check_hash_ids(listed.hash_ids.block_tokens)
        return workload

    def _check_hash_ids(self, block_tokens: int) -> None:
        caching = [policy.name for policy in self.policies if policy.config.traits.prefix_cache]
        if caching and block_tokens % self.block_size:
            raise ScenarioError(
                f"{self.name}: kv.block_size {self.block_size} does not divide the {block_tokens} tokens of the trace's"
                f" hash_ids, by which {', '.join(caching)} would share. Set another, or write trace.prefix: ignore."
            )

    def trace_seed(self, seed: int) -> int:
        """The key of `rows` for a run's `seed`: that seed where jitter moves the arrivals, else 0."""
        trace = self.workload.trace
        return seed if trace is not None and trace.jitter else 0

    def _trace_rows(self, seed: int) -> TraceRows | None:
        if self.workload.trace is None:
            return None
        try:
            return self.rows[self.trace_seed(seed)]
        except KeyError:
            raise ScenarioError(
                f"{self.name}: holds the trace for seeds 0 to {self.seeds - 1}, not for seed {seed}. Resolve the"
                " scenario with more seeds."
            ) from None

    def scheduler(
        self,
        policy: ResolvedPolicy,
        kv: KVBlockManager,
        workload: BuiltWorkload | None,
        estimator: StepEstimator | None,
        stages: int = 1,
    ) -> Scheduler:
        """A new scheduler of `policy`, for an engine of `stages` stages. Without a workload one that predicts lengths
        can be built but not run. ScenarioError where the policy cannot have a batch in each stage."""
        predictor: LengthPredictor | None = None
        if policy.predictor is not None:
            predictor = _Unasked() if workload is None else build_predictor(policy.predictor, workload)
        loop = policy.config.traits.loop.over(stages)
        if stages > 1 and not policy.config.traits.pipelines:
            raise ScenarioError(
                f"{policy.kind} runs one batch at a time, which leaves {stages - 1} of {stages} stages idle and is not"
                " simulated. Set pp to 1, or use vllm, orca, sarathi or vllm_v0."
            )
        make = find_policy(policy.kind, allow_code=True)[1]  # whoever made this object was asked
        try:
            scheduler = make(policy.config, PolicyContext(kv, self.max_model_len, predictor, estimator, loop))
        except SystemExit as error:
            raise ScenarioError(f"{policy.kind} ends the program (SystemExit {error}). Correct it.") from None
        missing = [name for name in _ATTRIBUTES if not hasattr(scheduler, name)]
        if missing:
            raise ScenarioError(
                f"{policy.kind} has no {', '.join(missing)}. See the Scheduler protocol in batchsim.kernel.protocols."
            )
        return scheduler

    def engine(
        self,
        policy: ResolvedPolicy,
        workload: BuiltWorkload,
        kv: KVBlockManager,
        executor: Executor,
        estimator: StepEstimator | None,
        stages: int = 1,
    ) -> EngineCore:
        """A new engine of `stages` stages for one run of `workload` on `executor`, whose KV memory is `kv`."""
        drain_ns = self.workload.drain
        speculation = policy.config.traits.speculation
        if speculation is not None:
            self._let_luck(policy, speculation, executor, workload)
        return EngineCore(
            self.scheduler(policy, kv, workload, estimator, stages),
            executor,
            Recorder(),
            max_model_len=self.max_model_len,
            max_waiting=self.max_waiting,
            per_chunk_ns=workload.frontend.per_chunk,
            per_stream_ns=workload.frontend.per_stream,
            stop_ns=None if drain_ns is None else workload.window_ns[1] + drain_ns,
            loop=policy.config.traits.loop.over(stages),
        )

    def simulator(
        self,
        policy: ResolvedPolicy,
        workload: BuiltWorkload,
        kv: KVBlockManager,
        cost: Cost,
    ) -> EngineCore:
        """A new engine for one simulation of `workload`, its steps as long as `cost` says."""
        loop = policy.config.traits.loop.over(cost.stages)
        executor = SimExecutor(cost, self.max_model_len, loop)
        return self.engine(policy, workload, kv, executor, cost, cost.stages)

    def _let_luck(
        self, policy: ResolvedPolicy, speculation: Speculation, executor: Executor, workload: BuiltWorkload
    ) -> None:
        """Gives a simulation's `executor` the acceptance of drafts; a model finds it. ScenarioError for drafts that no
        other makes, or where that is not said of a class, or of requests by their trace."""
        if not isinstance(executor, SimExecutor):
            policy.check_can_be_real()
        if not speculation.positions:
            if not workload.source.tells_acceptance:
                raise ScenarioError(
                    f"{policy.name}: acceptance is to be the trace's, and no trace tells it of all requests. Write"
                    " columns.acceptance in trace, and take all lengths from it."
                )
            own, found = workload.acceptance, speculation.found
            if isinstance(executor, SimExecutor):
                executor.luck = DrawnLuck.of_requests(workload.seed, speculation.num_drafts, own, found)
            return
        classes, of = set(self.workload.classes), set(speculation.positions)
        if unknown := sorted(of - classes - {""}):
            known = ", ".join(sorted(classes)) or "no classes"
            raise ScenarioError(
                f"{policy.name}: acceptance of class {unknown[0]}; the workload has {known}. Correct it."
            )
        if "" not in of and (missing := sorted((classes or {""}) - of)):
            raise ScenarioError(
                f'{policy.name}: no acceptance of class {missing[0]!r}. Add it, or one under "" for all others.'
            )
        if isinstance(executor, SimExecutor):
            executor.luck = DrawnLuck(workload.seed, speculation.positions, speculation.found)

    def find(self, policy: str) -> ResolvedPolicy:
        """The policy of that name, or of that label if it has one variant. ScenarioError lists the names."""
        found = [p for p in self.policies if p.name == policy] or [p for p in self.policies if p.label == policy]
        if len(found) != 1:
            names = ", ".join(p.name for p in self.policies)
            what = f"has no policy {policy}" if not found else f"has {len(found)} variants of {policy}"
            raise ScenarioError(f"{self.name}: {what}. Write one of {names}.")
        return found[0]

    def to_json(self) -> str:
        """This object as JSON; `from_json` gives an equal one. ScenarioError if a policy's knobs have no plain form."""
        seeds = range(self.seeds) if self.workload.trace is not None else range(0)
        rows = {self.trace_seed(seed): self._trace_rows(seed) for seed in seeds}
        try:
            plain = {field.name: to_plain(getattr(self, field.name)) for field in fields(self) if field.name != "rows"}
        except TypeError as error:
            raise ScenarioError(f"{self.name}: cannot be written as JSON: {error}. Use plain knobs.") from None
        plain["rows"] = to_plain({seed: _Table.of(table) for seed, table in rows.items() if table is not None})
        return json.dumps({"format": FORMAT, "version": VERSION} | plain, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str, *, allow_code: bool = False) -> Resolved:
        """The object that `to_json` wrote. ScenarioError, headed by `source`, for anything else.

        Users' own policies, `module:Class`, are imported with `allow_code` alone.
        """
        try:
            plain = parse_json(text)
            if not isinstance(plain, dict) or plain.pop("format", None) != FORMAT:
                raise ValueError("not a resolved scenario")
            if (version := plain.pop("version", None)) != VERSION:
                raise ValueError(f"version {version!r}, this batchsim reads {VERSION}")
            found: Resolved = from_plain(cls, plain)
            return replace(found, policies=tuple(_with_config(policy, allow_code) for policy in found.policies))
        except (ValueError, RecursionError) as error:  # RecursionError: deep in what has the right shape
            raise ScenarioError(f"{source}: {str(error).rstrip('.')}. Write it anew with batchsim resolve.") from None


class _Unasked:
    """Stands for a predictor while a policy's knobs are only being checked."""

    name = "unasked"

    def predict(self, request: Request) -> int:
        raise AssertionError("a scheduler must not predict before a request arrives")


def _with_config(policy: ResolvedPolicy, allow_code: bool) -> ResolvedPolicy:
    """`policy`, whose `config` is a plain value, with the `PolicyConfig` of its kind made of that."""
    config = find_policy(policy.kind, allow_code=allow_code)[0]
    return replace(policy, config=from_plain(config, policy.config, f"{policy.label}.config"))
