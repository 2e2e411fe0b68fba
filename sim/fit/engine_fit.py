"""The fit of an engine's step times to measured runs of it, and the file that a scenario's `cost` names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from batchsim.base.errors import MeasuredError, ScenarioError
from batchsim.base.files import file_hash
from batchsim.base.units import NS_PER_S
from batchsim.check.measured.run import LATENCIES, MeasuredRun
from batchsim.check.validation.impossible import possible
from batchsim.check.validation.replay import Replay, replay
from batchsim.cost.base import Cost
from batchsim.cost.constant import Constant, Linear
from batchsim.cost.fitted import TERMS, Fitted, Free, StepTerms
from batchsim.cost.own_cost import OwnCost
from batchsim.cost.scaled import Scaled
from batchsim.fit.identify import Identified, identify
from batchsim.fit.measured_loads import (
    MOST_REQUESTS,
    LoadError,
    claims_of,
    first_of_each,
    load_error,
    mean_lengths,
    short_names,
    thinned,
)
from batchsim.fit.solve import Case, Solved, error_of, simulate_all, solve, with_fit
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.fit_file import FORMAT
from batchsim.scenario.setup import Setup

FREE = ("base", "sequence", "prompt_token", "context_token", "pair", "frontend")
"""What is fitted without a kernel."""
SPLIT = (*FREE[:-1], "rows_2", "frontend")
"""And of an engine that splits steps into passes: kernels for one row and for several differ."""
STAIRS = (*FREE[:-1], "rows_2", "rows_4", "rows_8", "frontend")
"""And where FREE misses the given runs by more than MISSED."""
MISSED, BETTER = 0.02, 0.8
"""Root mean square of the errors of the given runs, as a share of step time; to what share of it more terms must bring
it to be kept."""
OVER_KERNEL = ("kernel", "base", "sequence", "prompt_token", "beside_token", "frontend")
"""What is fitted over one."""
FIRST_GUESS = 0.5
"""Share of the median mean TPOT, and of TTFT for each prompt token, that a free form begins with."""
_LEFT_OUT = (
    "left out of the fit: which slots so few users had is not known, and passes hang on it. One user at a time tells,"
    " or as many as there are slots"
)
MOST_CLAIMED = 0.5
"""The largest error, as a share, that is a claim."""


@dataclass(frozen=True)
class EngineFit:
    """What was learned from runs: the `terms` with their way from the client in ns, how well each is `known`, the
    errors at the `given` loads and those `held_out`, and what is claimed of others (`claims`, shares by figure).

    `words` say in short what it was fitted to; `notes` what is to be known of runs and fit, a line each.
    """

    setup: Setup
    specs: tuple[PolicySpec, ...]
    kernel: Cost | None
    terms: StepTerms
    frontend_ns: float
    known: Identified
    given: tuple[LoadError, ...]
    held_out: tuple[LoadError, ...]
    claims: dict[str, float]
    words: str
    notes: tuple[str, ...]
    runs: tuple[MeasuredRun, ...]

    @property
    def fitted(self) -> Setup:
        """The scenario's setup with the fitted step times, and the way from the client."""
        cost = Fitted(self.kernel, self.terms, self.words, self.claims.get("tpot_mean_s", self.claims.get("step_time")))
        return with_fit(self.setup, cost, self.frontend_ns)

    @property
    def sources(self) -> tuple[str, ...]:
        """The files that it was fitted to and judged by."""
        return tuple(dict.fromkeys(run.source for run in self.runs))

    @property
    def violations(self) -> list[str]:
        """A sentence for each claim that is too large to be one, for each given load that no load within reach equals,
        and for each error of a held-out load above what is claimed; empty where all claims hold."""
        sentences = [
            f"{name}: ±{100 * claim:.3g} % would be claimed, and more than ±{100 * MOST_CLAIMED:g} % is no claim: the"
            " terms do not explain what was given"
            for name, claim in self.claims.items()
            if claim > MOST_CLAIMED
        ]
        sentences += [
            f"{one.name}: {name} off by more than any load within reach, at a given load"
            for one in self.given
            for name, error in one.errors.items()
            if error is None
        ]
        for one in self.held_out:
            for name in one.exceeded(self.claims):
                error = one.errors[name]
                by = "off by more than any load within reach" if error is None else f"{100 * error:+.1f} %"
                sentences.append(f"{one.name}: {name} {by}, ±{100 * self.claims[name]:.1f} % claimed")
        return sentences

    def to_json(self, made: dict[str, Any]) -> str:
        """The file's text; `made` says by what it was made. OSError where a measured file is gone."""
        plain = self.setup.scenario.plain["cost"]
        whole = {
            "format": FORMAT,
            "words": self.words,
            "kernel": None if self.kernel is None else plain,
            "kernel_source": "" if self.kernel is None else self.setup.cost.sources()[0],
            "terms": asdict(self.terms),
            "frontend": asdict(self.fitted.traffic.frontend),
            "claims": self.claims,
            "known": [
                asdict(term) | {"half": _finite(term.half), "identified": term.identified} for term in self.known.terms
            ],
            "condition": _finite(self.known.condition),
            "not_told_apart": [asdict(pair) for pair in self.known.confused],
            "given": [{"run": one.name, "beyond_knee": one.knee, "errors": one.errors} for one in self.given],
            "held_out": [{"run": one.name, "beyond_knee": one.knee, "errors": one.errors} for one in self.held_out],
            "files": {source: file_hash(source) for source in self.sources},
            "engine_versions": sorted({run.version for run in self.runs if run.version}),
            "policies": {spec.name: {"kind": spec.kind} | spec.knobs | spec.by_device for spec in self.specs},
            "notes": list(self.notes),
            "made": made,
        }
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def fit_engine(
    setup: Setup,
    spec: PolicySpec | Callable[[MeasuredRun], PolicySpec],
    runs: Sequence[MeasuredRun],
    held_out: Sequence[MeasuredRun],
    say: Callable[[str], None] = lambda _: None,
    most: int = MOST_REQUESTS,
) -> EngineFit:
    """The step times of the engine of `setup` under `spec` from `runs`, judged by those `held_out`, which play no part
    in the fit. `spec` may be a function of the run, for engines that differ in their policy alone. `say` is called with
    lines of progress. Of more than `most` requests in all given runs the first ones of each are fitted and judged.

    The kernel is the scenario's cost without its host; with a constant, linear or free cost there is none, and the
    free form begins with its numbers. MeasuredError or ScenarioError where runs or scenario do not fit each other.
    """
    runs, nothing = _possible(setup, runs)
    held_out, more = _possible(setup, held_out)
    _check(setup, [*runs, *held_out])
    spec_of = spec if callable(spec) else lambda _: spec
    runs, left_out = _of_known_slots(runs, spec_of)
    if not runs:
        raise MeasuredError(f"{left_out[0].name}: {_LEFT_OUT}. Give other loads.")
    first = first_of_each(runs, most)
    runs, held_out = ([thinned(run, first, most) for run in each] for each in (runs, held_out))
    case = _case(setup, spec_of, runs)
    replays = [replay(setup, run) for run in runs]
    solved = solve(case, replays, say)
    if case.active == FREE and error_of(solved.equations) > MISSED:
        say("the free form misses these runs: with steps by the number of rows")
        stairs = replace(case, active=STAIRS)
        other = solve(stairs, replays, say, solved.values)
        if error_of(other.equations) < BETTER * error_of(solved.equations):
            case, solved = stairs, other
    ahead = any(spec_of(run).config.traits.loop.is_ahead for run in runs)
    known = identify(case, solved, ahead=ahead)
    fitted = with_fit(setup, case.cost(solved.values), solved.values["frontend"])
    steep = {one.run: one.steep for one in solved.equations if one.rows.latency != "tpot"}
    say("errors of the given loads")
    given = [load_error(fitted, spec_of(run), run, steep.get(number, 1.0)) for number, run in enumerate(runs)]
    claims = claims_of(given, solved.equations, len(case.active))
    say("errors of the loads held out")
    held = [replay(setup, run) for run in held_out]
    apart = [_held_out_error(case, fitted, solved, one) for one in held]
    terms = StepTerms(**{name: solved.values[name] for name in TERMS})
    words = _words(runs)
    every = (*runs, *held_out)
    short = short_names((*every, *left_out))
    given, apart = ([replace(one, name=short[one.name]) for one in ones] for ones in (given, apart))
    way = solved.values["frontend"]
    specs = tuple({each.name: each for each in map(spec_of, every)}.values())
    notes = (*nothing, *more, *(f"{short[run.name]}: {_LEFT_OUT}" for run in left_out))
    notes = (*notes, *_notes(case, solved, [*replays, *held], short))
    return EngineFit(
        setup, specs, case.kernel, terms, way, known, tuple(given), tuple(apart), claims, words, notes, every
    )


def _possible(setup: Setup, runs: Sequence[MeasuredRun]) -> tuple[list[MeasuredRun], list[str]]:
    """`runs` without the figures that the sheet of the GPUs does not allow, and a line on each run left out since none
    of its latencies remains. MeasuredError, with the reason, where no run is left."""
    cleaned = [possible(setup, run) for run in runs]
    means = {f"{latency}_mean_s" for latency in LATENCIES}
    kept = [run for run in cleaned if means & run.figures.keys() or not means & run.impossible.keys()]
    notes = [f"{run.name}: {run.notes[-1]}" for run in cleaned if not any(run is one for one in kept)]
    if runs and not kept:
        raise MeasuredError(f"{notes[0]}, and no run is left to fit to. Give runs that were measured without.")
    return kept, notes


def _of_known_slots(
    runs: Sequence[MeasuredRun], spec_of: Callable[[MeasuredRun], PolicySpec]
) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """The runs to fit to, and those to leave out: closed loops with more users than one and fewer than slots, of an
    engine that splits steps. Which slots such users have depends on earlier requests, which are not recorded."""
    parts: tuple[list[MeasuredRun], list[MeasuredRun]] = [], []
    for run in runs:
        traits, users = spec_of(run).config.traits, run.client.max_concurrency or 0
        few = run.client.arrivals == "closed" and traits.splits_steps and 1 < users < (traits.max_num_seqs or 0)
        parts[few].append(run)
    return parts


def _held_out_error(case: Case, fitted: Setup, solved: Solved, one: Replay) -> LoadError:
    first = [each.steep for each in simulate_all(case, [one], solved.values) if each.rows.latency != "tpot"]
    return load_error(fitted, case.spec_of(one.run), one.run, first[0] if first else 1.0)


def check_fits(setup: Setup) -> None:
    """ScenarioError where no step times can be fitted for the engine of `setup`."""
    scenario = setup.scenario
    if setup.groups:
        raise ScenarioError(
            f"{scenario.places['replicas']}: replicas cannot be fitted, one engine can. Remove the key."
        )
    if isinstance(setup.cost, Scaled) or getattr(scenario.cost, "anchor", None) is not None:
        raise ScenarioError(
            f"{scenario.source}: cost_factor and anchor stretch steps, and the fit finds by how much. Remove them."
        )
    if scenario.cost.kind == "fitted":
        raise ScenarioError(f"{scenario.places['cost']}: cost is a fit already. Name the kernel, or {{kind: free}}.")
    if isinstance(scenario.cost, OwnCost):
        raise ScenarioError(
            f"{scenario.places['cost']}: cost {scenario.cost.kind} is code of its own, which no fit's file could hold."
            " Name a kernel of batchsim's, or {kind: free}."
        )
    if setup.shapes is not None:
        raise ScenarioError(
            f"{scenario.places['cost']}: shapes: a fit of step costs in compiled shapes is not made. Leave shapes out,"
            " or state what a program takes."
        )
    if setup.power_cap is not None:
        raise ScenarioError(
            f"{scenario.places['cost']}: power_cap slows steps, and measured ones ran under a cap of their own. Leave"
            " it out."
        )
    if scenario.cost.draft is not None:
        raise ScenarioError(f"{scenario.places['cost']}: cost.draft: drafting is not fitted. Leave it out.")


def _check(setup: Setup, runs: Sequence[MeasuredRun]) -> None:
    check_fits(setup)
    for run in runs:
        if not {"ttft_mean_s", "tpot_mean_s", "e2e_mean_s"} & run.figures.keys():
            raise MeasuredError(f"{run.name}: has no mean TTFT, TPOT or E2E to fit to. Give a file with one.")


def _case(setup: Setup, spec_of: Callable[[MeasuredRun], PolicySpec], runs: Sequence[MeasuredRun]) -> Case:
    """The kernel and the defaults: those of the scenario's cost under the policy."""
    config, way = spec_of(runs[0]).config, float(setup.traffic.frontend.request)
    kernel, stated = start_of(setup, config)
    defaults = {**(stated or _first_guess(runs)), "frontend": way}
    free = SPLIT if config.traits.splits_steps else FREE
    return Case(setup, spec_of, kernel, free if kernel is None else OVER_KERNEL, defaults)


def start_of(setup: Setup, config: PolicyConfig) -> tuple[Cost | None, Mapping[str, float]]:
    """What a fit begins with: the kernel, None where the scenario's cost has none, and the terms that it states."""
    cost = setup.cost_under(config)
    if isinstance(cost, Linear):
        each = cost.per_token + cost.per_sequence
        stated = {"base": cost.base, "sequence": each, "prompt_token": cost.per_token}
        return None, stated | {"context_token": cost.per_context_token}
    if isinstance(cost, Constant):
        return None, {"base": float(cost.step)}
    if isinstance(cost, Free):
        return None, {}
    host = cost.host_part
    stated = {"kernel": 1.0, "base": host.base, "sequence": host.per_sequence, "prompt_token": host.per_token}
    return setup.cost.without_host(), stated


def _first_guess(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Where a free form begins: shares of the median run's mean TPOT, and of its mean TTFT for each prompt token."""

    def middle(latency: str, tokens: int | None) -> float:
        known = [(run, mean_s) for run in runs if (mean_s := run.figures.get(f"{latency}_mean_s"))]
        each = [mean_s / (1 if tokens is None else mean_lengths(run)[tokens]) for run, mean_s in known]
        return FIRST_GUESS * NS_PER_S * median(each) if each else 0.0

    prompt = middle("ttft", 0)
    return {"base": middle("tpot", None) or middle("e2e", 1) or prompt, "prompt_token": prompt}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _words(runs: Sequence[MeasuredRun]) -> str:
    files = list(dict.fromkeys(Path(run.source).name for run in runs))
    shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} of {shown}"


def _notes(case: Case, solved: Solved, replays: Sequence[Replay], short: Mapping[str, str]) -> tuple[str, ...]:
    of: dict[str, list[str]] = {}
    for one in replays:
        for note in (*one.run.notes, *one.notes):
            of.setdefault(note, []).append(short[one.run.name])
    notes = [
        f"{'all runs' if len(names) == len(replays) > 1 else ', '.join(names)}: {note}" for note, names in of.items()
    ]
    least = min(one.kv_free for one in solved.equations)
    if least:
        notes.append(
            f"KV was never full: at least {least:,} of {case.setup.kv.num_blocks:,} blocks were free, so that their"
            " number is not tested. A run of more or longer requests at a time would"
        )
    if not solved.settled:
        notes.append(f"after {solved.rounds} rounds the terms still moved: the data hold them loosely")
    return tuple(notes)
