"""What a claim is, under which conditions it is tested, and what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchsim.base.errors import ScenarioError
from batchsim.results.read import Results
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import Progress, run_scenario
from batchsim.study.sweep.size import Limits
from tools.claims.measures import Values

Measure = Callable[[Results, str, Sequence[str], float], Values]
Verdict = Literal["yes", "no: less", "no: more", "seeds differ", "undefined"]


@dataclass(frozen=True)
class Condition:
    """One test of a claim: of `policy`, against the best of the policies `against` where it compares, at one load.

    It is the scenario `claims` with `overrides`, in the form that `batchsim run claims --set` takes.
    """

    text: str
    measure: Measure
    overrides: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    load: float = 1.0
    policy: str = "vllm"


@dataclass(frozen=True)
class Claim:
    """A saying. It holds where the measured value lies from `low` to `high`; None is without bound.

    `unit`: `×` for ratios, `%` for shares, which are kept as fractions.
    """

    name: str
    said: str
    source: str
    reading: str
    unit: Literal["×", "%"]
    low: float
    high: float | None
    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class Finding:
    """What a condition gave: a value a seed, or none and why; `note` is what else to know."""

    claim: Claim
    condition: Condition
    values: tuple[float, ...]
    note: str

    @property
    def verdict(self) -> Verdict:
        """Whether the claim holds here: what all seeds say, where they agree."""
        low, high = self.claim.low, self.claim.high
        sides = {-1 if v < low else 1 if high is not None and v > high else 0 for v in self.values}
        if not sides:
            return "undefined"
        if len(sides) > 1:
            return "seeds differ"
        verdicts: dict[int, Verdict] = {-1: "no: less", 0: "yes", 1: "no: more"}
        return verdicts[sides.pop()]


def check_claims(
    claims: Sequence[Claim],
    scenario: str,
    *,
    out: Path,
    overrides: tuple[str, ...] = (),
    jobs: int = 1,
    progress: Progress | None = None,
    limits: Limits | None = None,
    allow_code: bool = False,
) -> tuple[list[Finding], str]:
    """The findings of all conditions, in order, and the heading of the runs; points that are there are reused.

    `overrides` are set in all of them, before the condition's own. ScenarioError where they leave nothing to compare,
    or a condition is beyond `limits`. `allow_code`: policies that `overrides` name as `module:Class` are imported.
    """
    runs: dict[tuple[str, ...], Results] = {}
    findings = []
    for claim in claims:
        for condition in claim.conditions:
            key = overrides + condition.overrides
            if key not in runs:
                loaded = load_scenario(scenario, overrides=key, allow_code=allow_code)
                runs[key] = run_scenario(loaded, out=out, jobs=jobs, progress=progress, limits=limits)
            _check_there(runs[key], claim, condition)
            values = condition.measure(runs[key], condition.policy, condition.against, condition.load)
            findings.append(Finding(claim, condition, values.by_seed, values.note))
    heading = str(next(iter(runs.values())).manifest["heading"]) if runs else ""
    return findings, heading


def _check_there(results: Results, claim: Claim, condition: Condition) -> None:
    """ScenarioError if a policy of the condition was not run at its load."""
    table = results.summary
    at_load = set(table["policy"][table["load"] == condition.load])
    missing = [policy for policy in (condition.policy, *condition.against) if policy not in at_load]
    if missing:
        raise ScenarioError(
            f"{results.path}: claim {claim.name} under '{condition.text}' needs {missing[0]} at load"
            f" {condition.load:g}. Leave the policies and loads of the scenario as they are."
        )
