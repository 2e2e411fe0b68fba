"""Groups of replicas simulated on the busiest window, and what each showed; many searches go on side by side."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.metrics.intervals import Interval
from batchsim.metrics.slo import parse_slo
from batchsim.results.failed import Failed
from batchsim.scenario import Point, PolicySpec, Scenario, changed
from batchsim.scenario.setup import Setup
from batchsim.study.planning.batches import BATCHES, batch_attainments
from batchsim.study.planning.demand import ONE_COPY, Demand, Variation
from batchsim.study.planning.money import Bought, memory_per_hour
from batchsim.study.planning.split import DEPLOYED, MIXED, POOLS, Side, split_of, split_text
from batchsim.study.sweep.points import Sweep
from batchsim.study.sweep.search import side_by_side

T = TypeVar("T")
OVERLOADED = "overloaded"
PLANNED = Variation()
TIERS = "kv.tiers"
"""Of a plan's `free`, all tiers, and the key of which their own are parts: `kv.tiers.0.size`."""


@dataclass(frozen=True)
class GpuGroup:
    """A number of replicas of one kind of GPU under one policy (`policy` is the name with its variant). Where prefill
    and decode are apart, a replica is a set of engines of both kinds.

    `knobs` are what a search chose of the plan's `free`, but GPU and policy: pairs of name and value as JSON.
    """

    gpu: str
    policy: str
    replicas: int
    knobs: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The policy with the knobs that were chosen, as tables show it."""
        chosen = ", ".join(f"{name} {_brief(json.loads(text))}" for name, text in self.knobs)
        return f"{self.policy}: {chosen}" if chosen else self.policy

    @property
    def is_apart(self) -> bool:
        """Whether prefill and decode are on engines of their own."""
        return json.loads(dict(self.knobs).get(POOLS, f'"{MIXED}"')) != MIXED


@dataclass(frozen=True)
class Ask:
    """What to simulate: a group on the busiest window, or on what a change makes of it."""

    group: GpuGroup
    change: Variation = PLANNED


@dataclass(frozen=True)
class Observed:
    """The shares of requests, or tasks, within the SLO in one seed, or one stretch of the window: of all, by class.

    `margin` is the least share beyond what its objective asks for, over all objectives. `requests` is what counts it
    more or less than others: how many a stretch has; 1 for each seed.
    """

    attainment: float
    margin: float
    by_class: dict[str, float | None]
    requests: float = 1.0


@dataclass(frozen=True)
class GroupProbe:
    """What simulations of an Ask showed: a result for every seed that was run; `complete` if no other seed decides.

    `failed` says why the group could not be simulated, where that is so: it is then not shown to hold. `growing`: for
    each result, whether its queue grew as long as requests came, at one rate; empty where that rate changes.
    `counted`: `tasks` where any objective bounds these, else `requests`.
    """

    ask: Ask
    results: tuple[dict[str, Any], ...]
    observed: tuple[Observed, ...]
    complete: bool
    failed: str = ""
    growing: tuple[bool, ...] = ()
    counted: str = "requests"

    @cached_property
    def attainment(self) -> Interval:
        """The share of judged requests or tasks within the SLO. The interval may reach beyond 100 %."""
        return self._interval([one.attainment for one in self.observed])

    @cached_property
    def margin(self) -> Interval:
        return self._interval([one.margin for one in self.observed])

    def _interval(self, values: list[float]) -> Interval:
        return Interval.of(values, [one.requests for one in self.observed], self.num_judged)

    @property
    def num_judged(self) -> float:
        """The requests that were measured, over all seeds; where any objective bounds tasks the tasks, of which no more
        are judged than there are: a class whose requests are judged has at least one in each."""
        column = "tasks" if self.counted == "tasks" else "cohort"
        return sum(result["values"][column] for result in self.results)

    @property
    def is_overloaded(self) -> bool:
        """Whether the queue grows as long as requests come, in most of the seeds that were run: a window that is short
        may end before they miss their objectives, but the traffic does not."""
        return 2 * sum(self.growing) > len(self.results)

    @property
    def met(self) -> bool:
        """Whether the lower end of the interval meets every objective, and the queue does not grow."""
        return self.complete and self.margin.low is not None and self.margin.low >= 0 and not self.is_overloaded

    @property
    def missed(self) -> bool:
        """Whether an objective was missed on the mean, not just not shown to be met; or the queue grows; or nothing
        could be simulated."""
        return bool(self.failed) or self.is_overloaded or (self.margin.mean is not None and self.margin.mean < 0)

    @property
    def verdict(self) -> bool | None:
        """Whether the group holds; None where only the first seed was looked at, and met every objective."""
        if self.ask.change.window < 1:
            return None
        undecided = not self.complete and not any(one.margin < 0 for one in self.observed)
        return None if undecided else self.met

    @property
    def shown(self) -> str:
        """What was shown of the group, in words: a mean that meets every objective does not yet show that it holds."""
        if self.failed:
            return "not simulated"
        if self.verdict is None:
            return "undecided"
        if self.met:
            return "holds"
        if self.margin.mean is not None and self.margin.mean < 0:
            return "fails"
        return OVERLOADED if self.is_overloaded else "not shown to hold"

    def of_class(self, name: str) -> Interval | None:
        """The share of a class's requests within the SLO; None where a seed has no request of that class."""
        values = [one.by_class[name] for one in self.observed]
        known = [value for value in values if value is not None]
        return Interval.of(known) if known and len(known) == len(values) else None

    def mean(self, metric: str) -> float | None:
        """The mean of a metric over seeds; None where a seed has no value."""
        values = [result["values"].get(metric) for result in self.results]
        return None if None in values or not values else float(np.mean(values))

    @property
    def seeds(self) -> int:
        return len(self.results)

    @property
    def is_alone(self) -> bool:
        """Whether one seed alone was run, and no interval is known; one recording's has stretches."""
        return self.seeds == 1 and self.attainment.low is None


Search = Generator[list[tuple[Ask, tuple[int, ...]]], None, T]
"""A search: yields the asks and seeds that it wants run, goes on when they were, returns what it found."""


@dataclass
class Book:
    """Runs groups on the traffic and keeps what they showed, in the order in which it was asked for."""

    demand: Demand
    sweep: Sweep
    results: dict[Ask, dict[int, dict[str, Any]]] = field(default_factory=dict)
    failed: dict[Ask, Failed] = field(default_factory=dict)
    asked: dict[Ask, None] = field(default_factory=dict)
    first_seed: int = 0
    _setups: dict[tuple[str, ...], Setup] = field(default_factory=dict)
    _observed: dict[tuple[Ask, int], list[Observed]] = field(default_factory=dict)
    _host_bytes: dict[tuple[str, ...], int] = field(default_factory=dict)

    def setup(self, ask: Ask) -> Setup:
        """The setup that simulates an Ask. ScenarioError where its GPU, policy and memory do not go together."""
        group, written = ask.group, self.demand.scenario.plain["plan"]
        offer = self.demand.plan.gpus[group.gpu]
        chosen = {name: json.loads(text) for name, text in group.knobs}
        stated = {name: chosen.pop(name) for name in DEPLOYED if name in chosen}
        tiers = {name: chosen.pop(name) for name in [*chosen] if is_of_tiers(name)}
        router = chosen.pop("router", written["router"])
        split, cost = split_of(chosen.pop(POOLS, MIXED)), written["gpus"][group.gpu]["cost"] | stated
        texts = [f"cost={_flow(cost)}", *self.demand.overrides(ask.change)]
        texts += [f"{name}={_flow(value)}" for name, value in tiers.items()]
        if split is not None:
            pools: dict[str, Any] = {side: each.pool(cost, group.replicas) for side, each in split.items()}
            texts += ["plan=null", f"pools={_flow(pools | {'transfer': written['transfer']})}"]
        elif group.replicas > 1:
            texts.append(f"replicas={{count: {group.replicas}, router: {_flow(router)}}}")
        if self.demand.plan.free is not None:  # alone: KV memory is left beside the largest step of its own policy
            texts.append(f"policies={_flow(policy_alone(self.demand.scenario, group.policy, chosen))}")
        if offer.kv_tokens is not None:
            texts += [f"kv.tokens={offer.kv_tokens}", "plan=null"]  # of this GPU alone, and not of the plan's others
        key = tuple(texts)
        if key not in self._setups:
            self._setups[key] = self._new_setup(group.gpu, key)
        return self._setups[key]

    def _new_setup(self, gpu: str, texts: Sequence[str]) -> Setup:
        scenario = self.demand.scenario
        try:
            return Setup.of(changed(scenario, texts))
        except (ScenarioError, CalibrationError) as error:
            message = str(error)
            for text in texts:  # not written by the user
                message = message.removeprefix(f"--set {text}: ")
            hint = " Here that is kv_tokens of that GPU." if "kv: tokens" in message else ""
            where = scenario.places.get("plan", scenario.source)
            raise type(error)(f"{where}: plan.gpus.{gpu}: {message}{hint}") from None

    def offer(self, group: GpuGroup) -> Bought:
        """What a group's replicas are bought as: the plan's offer with what the group's knobs make of it."""
        plan, knobs = self.demand.plan, dict(group.knobs)
        offer = plan.gpus[group.gpu]
        stated = {name: json.loads(text) for name, text in knobs.items() if name in DEPLOYED}
        split = split_of(json.loads(knobs.get(POOLS, f'"{MIXED}"')))
        sides = [Side(1)] if split is None else split.values()
        costs = [(side.count, replace(offer.cost, **{**stated, **side.stated})) for side in sides]
        price = plan.host_memory_price
        memory = 0.0 if price is None else memory_per_hour(self.host_bytes(group), price)
        return Bought(offer.price, sum(count * cost.num_gpus for count, cost in costs), memory)

    def host_bytes(self, group: GpuGroup) -> int:
        """Bytes of its host's memory that a replica of a group takes for KV."""
        texts = tuple(f"{name}={text}" for name, text in group.knobs if is_of_tiers(name))
        if texts not in self._host_bytes:
            kv = changed(self.demand.scenario, texts).file.kv if texts else self.demand.scenario.file.kv
            sizes = [tier.size for tier in kv.tiers or ()]
            if None in sizes:
                raise ScenarioError("plan: host_memory_price needs the size of kv.tiers. Write size: 64GB, say.")
            self._host_bytes[texts] = sum(filter(None, sizes))
        return self._host_bytes[texts]

    def seeds(self, change: Variation) -> tuple[int, ...]:
        """The seeds that decide: all of the scenario, or one where copies of a trace are too few to differ by seed."""
        count = 1 if self.by_batches(change) else self.demand.scenario.file.seeds
        return tuple(range(self.first_seed, self.first_seed + count))

    def by_batches(self, change: Variation) -> bool:
        """Whether the interval is over stretches of one window instead of over seeds."""
        copies = self.demand.copies(change)
        return copies is not None and copies < ONE_COPY

    def run(self, wanted: Iterable[tuple[Ask, tuple[int, ...]]]) -> None:
        """Simulates what is not there yet, all of it at once."""
        wishes = {(ask, seed): None for ask, seeds in wanted for seed in seeds if ask not in self.failed}
        missing = [(ask, seed) for ask, seed in wishes if seed not in self.results.get(ask, {})]
        self.asked |= {ask: None for ask, _ in missing}
        points = []
        for ask, seed in missing:
            setup = self.setup(ask)
            points.append((setup, Point(spec_of(setup, ask.group), setup.scenario.loads[0], seed)))
        for (ask, seed), result in zip(missing, self.sweep.attempt(points), strict=True):
            if isinstance(result, Failed):
                self.failed[ask] = result
            else:
                self.results.setdefault(ask, {})[seed] = result

    def probe(self, ask: Ask) -> GroupProbe:
        """What the simulations of an Ask have shown by now."""
        counted = "tasks" if self.demand.judges_tasks else "requests"
        if ask in self.failed:
            return GroupProbe(ask, (), (), complete=True, failed=self.failed[ask].reason, counted=counted)
        by_seed = self.results[ask]
        observed = []
        for seed in sorted(by_seed):
            if (ask, seed) not in self._observed:
                self._observed[ask, seed] = self._observe(ask, by_seed[seed])
            observed += self._observed[ask, seed]
        results = tuple(by_seed[seed] for seed in sorted(by_seed))
        growing = tuple(result["unstable"] for result in results) if self.demand.is_steady else ()
        complete = set(self.seeds(ask.change)) <= set(by_seed)
        return GroupProbe(ask, results, tuple(observed), complete=complete, growing=growing, counted=counted)

    def probes(self) -> list[GroupProbe]:
        """The probes of all Asks, in the order in which they were asked for."""
        return [self.probe(ask) for ask in self.asked]

    def _observe(self, ask: Ask, result: dict[str, Any]) -> list[Observed]:
        values = result["values"]
        file = self.demand.scenario.file
        names = tuple(file.workload.classes)
        if not self.by_batches(ask.change):
            by_class = {name: values.get(f"in_slo[{name}]") for name in names}
            return [Observed(values["in_slo"], values["slo_margin"], by_class)]
        slos = {name: parse_slo(each.slo or file.slo) for name, each in file.workload.classes.items()}
        folder = self.sweep.home / "points" / result["point"]
        streams = values["tpot_mean_s"] is not None
        window_ns = (file.workload.warmup, result["end_ns"])
        rows = batch_attainments(folder, slos or {"": parse_slo(file.slo)}, window_ns, streams, BATCHES)
        return [Observed(*row) for row in rows]


def drive(book: Book, searches: Sequence[Search[T]]) -> list[T]:
    """What the searches return, in order. What all want is run together, so that no process waits for another."""
    answers = side_by_side(searches, lambda wanted: book.run(wish for _, wishes in wanted for wish in wishes))
    return [answers[number] for number in range(len(searches))]


def spec_of(setup: Setup, group: GpuGroup) -> PolicySpec:
    """The policy of a group in a setup of it: the only one there, or the one of its name."""
    specs = setup.scenario.specs
    return specs[0] if len(specs) == 1 else next(spec for spec in specs if spec.name == group.policy)


def policy_alone(scenario: Scenario, policy: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The `policies` of a scenario with the one of that name alone, with some knobs changed."""
    spec = next(spec for spec in scenario.specs if spec.name == policy)
    return {spec.label: {**(scenario.plain["policies"][spec.label] or {}), **spec.knobs, **knobs}}


def is_of_tiers(name: str) -> bool:
    """Whether `name`, of a plan's `free`, is `kv.tiers` or a key of them."""
    return name == TIERS or name.startswith(f"{TIERS}.")


def with_replicas(group: GpuGroup, replicas: int) -> GpuGroup:
    return replace(group, replicas=replicas)


def _brief(value: Any) -> str:
    """A knob's value in a name: a mapping of a kind alone, as routers are, by its kind."""
    if isinstance(value, dict) and "prefill" in value:
        return split_text(value)
    return str(value["kind"]) if isinstance(value, dict) and [*value] == ["kind"] else _flow(value).strip('"')


def _flow(value: Any) -> str:
    """A plain value as the text of an override."""
    return json.dumps(value, ensure_ascii=False)
