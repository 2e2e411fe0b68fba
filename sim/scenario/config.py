"""The dataclasses of a scenario: the file as written, and what follows from it, checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from batchsim.base.errors import CalibrationError, ScenarioError, bounded, nearest
from batchsim.base.plain import LEFT_OUT, texts_in, to_plain
from batchsim.base.ranges import MAX_CHOICES, Config, Factor, PositiveInt, Range, check_ranges
from batchsim.base.reading import later
from batchsim.base.units import Rate
from batchsim.cost.lora_cost import LoraCost
from batchsim.cost.structured_cost import StructuredCost
from batchsim.scenario.kv_config import KvConfig
from batchsim.scenario.scenario_cost import ScenarioCost
from batchsim.workload.offline_config import Users
from batchsim.workload.structured import is_structured
from batchsim.workload.tagged import ByKind, OrWord
from batchsim.workload.workload_config import ClosedLoop, WorkloadConfig

if TYPE_CHECKING:
    from batchsim.drive.fleet.admission import AdmissionConfig
    from batchsim.kernel.policy_config import Device
    from batchsim.scenario.plan_config import PlanConfig
    from batchsim.scenario.replicas_config import ReplicasConfig
    from batchsim.workload.predictors import OwnPredictor, PredictorConfig
else:
    PlanConfig = later("batchsim.scenario.plan_config:PlanConfig")
    ReplicasConfig = later("batchsim.scenario.replicas_config:ReplicasConfig")

CostFactor = Annotated[float, Range(0.01, 100)]
"""Multiplies every step's time. Beyond these bounds it is another machine: state its cost."""
Keep = Literal["all", "requests", "minutes"]
"""What is kept of each point: every step, state and request; requests alone; or histograms and series by minute."""
Seeds = Annotated[int, Range(1, 1_000_000)]
"""Repetitions of every point."""


AUTO = "auto"
AUTO_POINTS = 10
AutoPoints = Annotated[int, Range(4, 100)]
"""Loads a policy where the load axis is `auto`."""


@dataclass(frozen=True)
class LoadConfig(Config):
    """The load axis: one of mean rates, numbers of users, or factors on a trace's rate.

    `auto` in the place of the list finds loads: from far below a policy's saturation to above it, most of them around
    the knee and where the SLO is crossed.

    >>> batchsim.Load(mean_rate=["4/s", "8/s"]).mean_rate
    (4.0, 8.0)
    """

    mean_rate: Annotated[tuple[Rate, ...] | Literal["auto"], OrWord(AUTO)] | None = None
    """Mean rates of the arrivals, in requests a second, or auto."""
    users: Annotated[tuple[Users, ...] | Literal["auto"], OrWord(AUTO)] | None = None
    """Numbers of users of a closed loop, or auto."""
    rate_scale: Annotated[tuple[Factor, ...] | Literal["auto"], OrWord(AUTO)] | None = None
    """Factors on the trace's rate, or auto."""
    points: AutoPoints | None = None
    """Loads a policy that `auto` finds."""

    def __post_init__(self) -> None:
        check_ranges(self)
        given = [values for values in (self.mean_rate, self.users, self.rate_scale) if values is not None]
        if len(given) != 1 or not given[0]:
            raise ValueError("give one list with at least one value, or auto: mean_rate, users or rate_scale")
        if self.points is not None and not self.is_auto:
            raise ValueError("points is for an axis that is auto. The list has as many as it has")
        values = () if self.is_auto else tuple(map(float, given[0]))
        if list(values) != sorted(set(values)):
            raise ValueError("the values must increase")

    @property
    def is_auto(self) -> bool:
        """Whether the load axis is `auto`, so that the loads are yet to be found."""
        return AUTO in (self.mean_rate, self.users, self.rate_scale)

    @property
    def num_points(self) -> int:
        """How many loads a policy gets where the axis is `auto`."""
        return AUTO_POINTS if self.points is None else self.points

    @property
    def axis(self) -> tuple[str, tuple[float, ...]]:
        """The name of the axis and its values; no values where it is `auto`."""
        for name in ("mean_rate", "users", "rate_scale"):
            values = getattr(self, name)
            if values is not None:
                return name, () if values == AUTO else values
        raise AssertionError("checked in __post_init__")


@dataclass(frozen=True)
class ScenarioFile(Config):
    """A scenario file key by key."""

    model: str
    """The model: a name of `batchsim catalog`, a Hugging Face id (`{hub: ID, revision: R}` pins one), or the path of a
    config.json."""
    cost: Annotated[ScenarioCost, ByKind()]
    """What steps cost: a profile, a fit, a GPU for its roofline, or a mapping with a `kind`."""
    workload: WorkloadConfig
    """Which requests come, when, and how patient their clients are."""
    policies: dict[str, dict[str, Any] | None]
    """The policies by label, each with its knobs; its kind is the label unless given."""
    slo: str
    """One requirement, as in `ttft<1s & tpot<50ms @ 99%`."""
    load: LoadConfig | None = None
    """The loads to simulate: the axis of every curve."""
    seeds: Seeds = 3
    """Repetitions of every point, each with random draws of its own."""
    kv: KvConfig = field(default_factory=KvConfig)
    """The KV memory: its blocks, and how many tokens it holds."""
    replicas: ReplicasConfig | None = None
    """Several engines behind a router; else one."""
    max_model_len: PositiveInt | None = None
    """The most tokens of a request, prompt and answer together; the model's own unless given."""
    max_waiting: PositiveInt | None = None
    """Requests in every engine's queue at most: arrivals beyond it are rejected."""
    cost_factor: CostFactor = 1.0
    """How many times as long every step takes."""
    lora_cost: LoraCost | None = field(default=None, metadata=LEFT_OUT)
    """What LoRA adapters cost; needed where the workload has some."""
    structured_cost: StructuredCost | None = field(default=None, metadata=LEFT_OUT)
    """Host time of masks for constrained answers; needed where the workload has some."""
    plan: PlanConfig | None = None
    """What `batchsim plan` is to buy GPUs for; for that command alone."""
    vary: dict[str, list[Any]] | None = None
    """One key, dotted as for --set, and its values: all is run once with each."""
    keep: Keep = "all"
    """What is kept of each point, at the same figures: `all` steps, states and requests; `requests` alone; or
    `minutes`, histograms and series by minute, for runs of many requests."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.policies:
            raise ValueError("policies is empty. Name at least one; `batchsim policies` lists them.")
        if self.load is not None:
            self._check_load(self.load.axis[0])
        if self.lora_cost is None and self.workload.lora_rank is not None:
            raise ValueError(
                "lora_cost is missing: the workload has LoRA adapters. Write lora_cost: {step: 5%, per_adapter: 1%,"
                " load_gpu: 10ms, load_disk: 200ms}, say."
            )
        if self.lora_cost is not None and self.workload.lora_rank is None:
            raise ValueError("lora_cost: the workload has no LoRA adapters. Write workload.loras, or drop lora_cost.")
        if self.structured_cost is None and is_structured(self.workload):
            raise ValueError(
                "structured_cost is missing: the workload has constrained answers. Write structured_cost: {step: 100us,"
                " per_request: 20us}, say."
            )
        if self.structured_cost is not None and not is_structured(self.workload):
            raise ValueError(
                "structured_cost: no answer is constrained. Write workload.structured: 30%, say, or drop"
                " structured_cost."
            )
        if self.vary is not None:
            self._check_vary(self.vary)
        if self.plan is not None:
            self._check_plan(self.plan)
        if self.replicas is not None and self.replicas.admission is not None:
            self._check_admission(self.replicas.admission)

    def _check_admission(self, admission: AdmissionConfig) -> None:
        for name in admission.shed:
            if name not in self.workload.classes:
                advice = nearest(name, self.workload.classes, "The workload has none.")
                raise ValueError(f"replicas.admission.shed names {name}, and there is no such class. {advice}")

    def _check_plan(self, plan: PlanConfig) -> None:
        plan.check(self.workload)
        if self.replicas is not None and self.replicas.transfer is not None:
            raise ValueError("plan: GPUs are not planned for prefill and decode apart. Leave out plan, or pools.")
        if self.replicas is not None and self.replicas.lockstep is not None:
            raise ValueError(
                "plan: GPUs are not planned for ranks that step together. Leave out plan, or dp_attention."
            )
        if self.replicas is not None and self.replicas.are_models:
            key, how = ("share", "are") if self.replicas.sleep is None else ("sleep", "take turns")
            raise ValueError(f"plan: GPUs are not planned for models that {how} on one. Leave out plan, or {key}.")
        stated = next((name for name in ("tokens", "memory") if getattr(self.kv, name) is not None), "")
        if stated and any(offer.kv_tokens is None for offer in plan.gpus.values()):
            raise ValueError(
                f"plan: kv.{stated} {getattr(self.kv, stated)} is the memory of one kind of GPU. Write"
                " plan.gpus.NAME.kv_tokens for each instead."
            )

    def _check_load(self, axis: str) -> None:
        arrivals = self.workload.arrivals
        fits = {
            "mean_rate": hasattr(arrivals, "mean_rate"),
            "users": isinstance(arrivals, ClosedLoop),
            "rate_scale": arrivals.kind == "trace",
        }
        if not fits[axis]:
            right = next((name for name, fit in fits.items() if fit), None)
            advice = f"Write load: {{{right}: [...]}}." if right else "Drop load."
            raise ValueError(f"load.{axis} does not fit arrivals of kind {arrivals.kind}. {advice}")
        if axis == "rate_scale" and (self.workload.trace is None or self.workload.trace.rate_scale is None):
            raise ValueError(
                "load.rate_scale needs to know how: write workload.trace.rate_scale {factor: 1, by: compress},"
                " or overlay, thin or copies"
            )

    def _check_vary(self, vary: dict[str, list[Any]]) -> None:
        if len(vary) != 1:
            raise ValueError(f"vary names {len(vary)} keys. It takes one, like vary: {{kv.tokens: [100000, 200000]}}.")
        ((key, values),) = vary.items()
        path = key.split(".")
        if not all(path):
            raise ValueError(f"vary names '{key}', which is no key. Write one like kv.tokens.")
        if path[0] in ("load", "seeds", "slo", "vary", "plan", "keep"):
            why = "the load axis is the first one" if path[0] == "load" else "it is not what a point is made of"
            raise ValueError(f"vary names {key}, which cannot be varied: {why}. Name another key.")
        if path[0] == "policies" and len(path) < 3:
            raise ValueError(f"vary names {key}, which is no knob. Write policies.LABEL.KNOB.")
        if path[0] == "policies" and path[1] not in self.policies:
            raise ValueError(
                f"vary names {key}, and there is no policy {path[1]}. There are {', '.join(self.policies)}."
            )
        if not values:
            raise ValueError(f"vary names {key} without values. Give at least one.")
        if len(values) > MAX_CHOICES:
            raise ValueError(f"vary names {key} with {len(values):,} values. Give at most {MAX_CHOICES:,}.")
        for i, value in enumerate(values):
            if value is None or isinstance(value, dict | list):
                shown = "null" if value is None else value
                raise ValueError(f"vary names {key} with {shown}, which is no single value. Write numbers or words.")
            if value in values[:i]:
                raise ValueError(f"vary names {key} with {value} twice. Keep one.")


@dataclass(frozen=True)
class PolicySpec:
    """One policy to run: a label with one set of knobs, held by `config`, the policy's own `PolicyConfig`.

    `variant` names the choice where `best_of` listed several. `policy` is its class, `knobs` its settings as the
    scenario writes them, for reports; `by_device` the defaults that it has in further knobs because of the GPU.
    """

    label: str
    kind: str
    config: Any
    variant: str = ""
    predictor: PredictorConfig | OwnPredictor | None = None
    _: KW_ONLY
    policy: Any
    knobs: dict[str, Any]
    by_device: dict[str, Any]

    @property
    def name(self) -> str:
        """The label with the chosen variant, and the predictor that knows more of the lengths than an engine does."""
        additions = [self.variant, "" if self.predictor is None else f"{self.predictor.kind} lengths"]
        return f"{self.label} ({', '.join(filter(None, additions))})" if any(additions) else self.label

    @property
    def plain(self) -> dict[str, Any]:
        """Label, kind, all knobs, variant and predictor as JSON values. TypeError for a knob that JSON cannot hold."""
        return {name: to_plain(getattr(self, name)) for name in ("label", "kind", "config", "variant", "predictor")}

    def check_can_be_real(self) -> None:
        """ScenarioError if only a simulation could run the policy: it verifies drafts of another model, or is an
        engine's own scheduler, which keeps blocks of its own."""
        if self.kind == "engine":
            raise ScenarioError(f"{self.name}: an engine's own scheduler runs in simulated time alone. Use vllm.")
        speculation = self.config.traits.speculation
        if speculation is not None and speculation.lookup is None:
            raise ScenarioError(
                f"{self.name}: no draft model runs here, and no search but vllm's, so that its drafts can only be"
                " simulated. Use method ngram of vllm, or no drafts."
            )


@dataclass(frozen=True)
class Point:
    """One simulation: a policy at a load, a value on the scenario's load axis, with a seed."""

    spec: PolicySpec
    load: float
    seed: int


@dataclass(frozen=True)
class Scenario:
    """A checked scenario: `file` is its content, `text` the YAML as written, `plain` its values with --set applied.

    `base` is the folder that relative trace paths start from, `model_path` the catalog name or file of the model.
    `places` says where top keys and policies stand: `file:line`, or the option that set them. `overrides` are the texts
    of --set, `trace_folders` where else a trace was looked for. `loads` is empty where the axis is `auto`.
    `variants` are the scenarios with each value of the key that it varies; empty if it varies none. `allow_code`:
    whether it may name policies by import path. `device`: its GPU; None where none is known.
    """

    name: str
    source: str
    base: Path
    model_path: str
    file: ScenarioFile
    text: str
    plain: dict[str, Any]
    specs: tuple[PolicySpec, ...]
    load_name: Literal["mean_rate", "users", "rate_scale", ""]
    loads: tuple[float, ...]
    places: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    trace_folders: tuple[Path, ...] = ()
    variants: tuple[Scenario, ...] = ()
    allow_code: bool = False
    device: Device | None = None

    def __repr__(self) -> str:
        policies = ", ".join(self.file.policies)
        loads = ", ".join(f"{load:g}" for load in self.loads) or "found"
        return f"<Scenario {self.name}: {policies}; {self.load_name or 'load'} {loads}; {self.file.slo}>"

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """A context whose errors begin with the place, `file:line`, of `key`, a top key or `policies.LABEL`."""
        try:
            yield
        except (ScenarioError, CalibrationError) as error:
            message = f"{self.places.get(key, self.source)}: {error}"
            raise type(error)(bounded(message, texts_in([self.plain, self.overrides]))) from None

    @property
    def cost(self) -> ScenarioCost:
        return self.file.cost

    @property
    def vary_key(self) -> str:
        """The key that is varied, "" if none is."""
        return next(iter(self.file.vary), "") if self.file.vary else ""

    @property
    def auto(self) -> bool:
        """Whether the load axis is `auto`, so that the loads are yet to be found."""
        return self.file.load is not None and self.file.load.is_auto

    def find(self, policy: str) -> PolicySpec:
        """The policy of that name, or of that label if it has one variant. ScenarioError lists the names."""
        specs = [p for p in self.specs if p.name == policy] or [p for p in self.specs if p.label == policy]
        if len(specs) != 1:
            names = ", ".join(p.name for p in self.specs)
            what = f"has no policy {policy}" if not specs else f"has {len(specs)} variants of {policy}"
            raise ScenarioError(f"{self.name}: {what}. Write one of {names}.")
        return specs[0]

    def points(self) -> list[Point]:
        """Every simulation of the scenario's own loads, the heaviest first so that parallel runs end together."""
        return [
            Point(spec, load, seed)
            for load in sorted(self.loads, reverse=True)
            for seed in range(self.file.seeds)
            for spec in self.specs
        ]
