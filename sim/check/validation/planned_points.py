"""The points of a validation: those it is to run, or those of saved live runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.base.plain import to_plain
from batchsim.check.validation.live_runs import Played, ValidationSetup, served
from batchsim.cost.base import Cost
from batchsim.deployment.memory import KvBudget
from batchsim.scenario.config import PolicySpec

DEFAULT_SHARES = (0.5, 0.8)


@dataclass(frozen=True)
class PlannedPoint:
    """A policy at a load; `share` is the load over the policy's saturation, None where the load axis is not a rate."""

    policy: PolicySpec
    load: float
    share: float | None


def parse_shares(text: str) -> list[float]:
    """`50%,110%,0.8` as 0.5, 1.1 and 0.8. ScenarioError on anything else, on shares not above 0 and on bare ones from 1
    on."""
    try:
        parts = [part.strip() for part in text.split(",")]
        shares = [float(part.removesuffix("%")) / (100 if part.endswith("%") else 1) for part in parts]
        for part, share in zip(parts, shares, strict=True):
            if not 0 < share < (100 if part.endswith("%") else 1):
                raise ValueError
    except ValueError:
        raise ScenarioError(f"--at {text}: not shares of saturation. Write percentages, like 50%,110%.") from None
    return shares


def parse_loads(text: str) -> list[float]:
    """`2,4.5` as numbers. ScenarioError on anything else, and on loads not above 0."""
    try:
        loads = [float(part) for part in text.split(",")]
        if not all(0 < load < float("inf") for load in loads):
            raise ValueError
    except ValueError:
        raise ScenarioError(f"--loads {text}: not loads. Write numbers above 0, like 2,4.") from None
    return loads


def check_profile(cost: Cost) -> None:
    """ScenarioError for a profile of another executor than batchsim's: its error would not be the simulator's."""
    if cost.profile is not None and cost.profile.origin != "measured":
        raise ScenarioError(
            f"profile {cost.profile.name} is of {cost.profile.executor}, live runs are of our own executor: the error"
            " would not be the simulator's. Give a profile of batchsim calibrate, with --set cost=PROFILE.json."
        )


def saturations(
    case: ValidationSetup, policies: Sequence[PolicySpec], unknown: Callable[[ScenarioError], None] | None = None
) -> dict[str, float]:
    """The saturation of each policy by name, in requests/s; {} where the load axis is not a rate.

    A policy without one is given to `unknown` as the error that says why, and left out; without that the error is
    raised.
    """
    rates: dict[str, float] = {}
    for policy in policies if case.setup.load_name == "mean_rate" else ():
        try:
            rates[policy.name] = case.saturation_rps(policy)
        except ScenarioError as error:
            if unknown is None:
                raise
            unknown(error)
    return rates


def plan(
    case: ValidationSetup,
    policies: Sequence[PolicySpec],
    saturation_rps: Mapping[str, float],
    *,
    shares: Sequence[float] | None,
    loads: Sequence[float] | None,
) -> list[PlannedPoint]:
    """The points to run: each policy at `shares` of its saturation, or at `loads`.

    By default at DEFAULT_SHARES, and where the load axis is not a rate at the scenario's own loads; `shares` there
    raise ScenarioError.
    """
    if shares is not None and loads is not None:
        raise ScenarioError("--at and --loads: both are given. Keep one.")
    name, of = case.setup.load_name, case.setup.scenario.name
    if shares is not None and name != "mean_rate":
        axis = f"its load axis is {name}" if name else "it has no load axis"
        raise ScenarioError(f"--at: {of} has no saturation rate, {axis}. Use --loads, or neither.")
    if loads is None and name == "mean_rate":
        chosen = DEFAULT_SHARES if shares is None else shares
        return [
            PlannedPoint(policy, share * saturation_rps[policy.name], share) for policy in policies for share in chosen
        ]
    chosen = case.setup.loads if loads is None else loads
    return [planned(policy, load, saturation_rps) for policy in policies for load in chosen]


def planned(policy: PolicySpec, load: float, saturation_rps: Mapping[str, float]) -> PlannedPoint:
    """`policy` at `load`, with the share of its saturation where that is known."""
    share = load / saturation_rps[policy.name] if policy.name in saturation_rps else None
    return PlannedPoint(policy, load, share)


@dataclass(frozen=True)
class Saved:
    """Saved live runs of one scenario: their case, the runs by (policy, load), and how many were of other scenarios."""

    case: ValidationSetup
    points: dict[tuple[str, float], list[Played]]
    num_others: int


def sort_saved(case: ValidationSetup, runs: Sequence[Played], policies: Sequence[str]) -> Saved:
    """Those of `runs` that served the scenario's requests under its policies, by point; the others are counted.

    The case gets the seed and the KV blocks of the runs. ScenarioError if no run fits; if runs differ in these or in
    the machine; and if a run had another model, other knobs, or another machine than the profile in the case.
    """
    names = {policy.name for policy in case.setup.scenario.specs if not policies or policy.name in policies}
    fitting = [
        run for run in runs if run.policy in names and served(case.setup.workload(run.load, run.seed), run.records)
    ]
    if not fitting:
        raise ScenarioError(
            f"{len(runs)} live runs, none of which served the requests of {case.setup.scenario.name} under"
            f" {', '.join(sorted(names))}. Give the scenario, and the --set, that they were made with."
        )
    for run in fitting:
        _check(case, run)
    kinds = {(run.seed, run.num_blocks, _name(run.made.get("hardware", {}))) for run in fitting}
    if len(kinds) > 1:
        kinds_text = ", ".join(
            f"seed {seed} with {blocks} KV blocks on {machine}" for seed, blocks, machine in sorted(kinds)
        )
        raise ScenarioError(f"the live runs differ: {kinds_text}. Keep those of one kind in the folder.")
    ((seed, num_blocks, _),) = kinds
    points: dict[tuple[str, float], list[Played]] = {}
    for run in sorted(fitting, key=lambda run: (run.load, run.repeat)):
        points.setdefault((run.policy, run.load), []).append(run)
    order = [policy.name for policy in case.setup.scenario.specs]
    ordered = dict(sorted(points.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))
    kv = KvBudget(num_blocks, case.setup.kv.block_size, "as the live runs had them")
    return Saved(replace(case, setup=replace(case.setup, kv=kv), seed=seed), ordered, len(runs) - len(fitting))


def _name(hardware: Mapping[str, Any]) -> str:
    """The name of the GPU, or CPU, that a live run was on."""
    return str(hardware.get("gpu") or hardware.get("cpu"))


def _check(case: ValidationSetup, run: Played) -> None:
    """ScenarioError unless the run had the scenario's model, memory and knobs, on the machine of the cost profile."""
    setup, made = case.setup, run.made
    subject = f"the live run of {run.policy} at load {run.load:.4g}, repeat {run.repeat},"
    asked = {
        "model": to_plain(replace(setup.model, name="")),
        "block_size": setup.kv.block_size,
        "num_swap_blocks": setup.num_swap_blocks,
        "max_model_len": setup.max_model_len,
        "knobs": setup.scenario.find(run.policy).plain,
    }
    had = made | {"model": made.get("model", {}) | {"name": ""}}
    for name, ours in asked.items():
        if differs := _difference(name, ours, had.get(name)):
            raise ScenarioError(f"{subject} had {differs}. Give the scenario, and the --set, that it was made with.")
    profile = case.setup.cost.profile
    if profile is None or profile.origin != "measured":
        return
    key, hardware = "gpu" if made.get("device") == "cuda" else "cpu", made.get("hardware", {})
    if made.get("device") != profile.hardware.get("device") or hardware.get(key) != profile.hardware.get(key):
        raise ScenarioError(
            f"{subject} ran on {_name(hardware)}, profile {profile.name} is of {_name(profile.hardware)}. Give the"
            " profile of the machine that it ran on."
        )


def _difference(path: str, ours: object, theirs: object) -> str:
    """The first value in which two plain objects differ, in words that begin with its `path`; "" if none does."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = dict.fromkeys([*ours, *theirs])
        differences = (_difference(f"{path}.{name}", ours.get(name), theirs.get(name)) for name in names)
        return next(filter(None, differences), "")
    return "" if ours == theirs else f"{path} {theirs}, the scenario {ours}"
