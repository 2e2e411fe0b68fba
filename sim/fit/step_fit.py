"""The fit of an engine's step times to steps that it recorded itself, without simulation: each step is an equation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import MeasuredError
from batchsim.check.steps.recorded import RecordedSteps, StepLog, least_and_most
from batchsim.check.validation.recorded_steps import OPEN, pairs_of
from batchsim.check.validation.step_error import RegionError
from batchsim.cost.base import Cost
from batchsim.cost.fitted import TERMS, Fitted, StepTerms
from batchsim.fit.engine_fit import BETTER, FREE, MISSED, OVER_KERNEL, STAIRS, EngineFit, check_fits, start_of
from batchsim.fit.identify import Identified, identified
from batchsim.fit.measured_loads import FLOORS, SIGMAS, LoadError
from batchsim.fit.solve import CUT, least
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.setup import Setup

Floats = NDArray[np.float64]

FEWEST = 20
"""Recorded steps that a fit needs, those held out counted too."""
STRETCHES = 10
HELD = (1, 4, 7)
"""The stretches that are held out, counted from 0, of the STRETCHES equal ones that the steps of each core are cut into
in their order."""
TIGHT = 0.2
"""Largest distance of the bounds of what a term multiplies in a step, as a share of their middle, at which the step
determines it. Once the terms are known nearly, the steps fitted to are those whose predicted time moves by no more than
OPEN within the bounds."""
MOSTLY = 0.5
"""Share of the steps with any of it that must determine what a term multiplies, for the term to be fitted."""
ROUNDS = 20
SETTLED = 1e-6
STALLED = 5.0
"""Times its predicted time that a stalled step takes."""
_OF_OPEN = {
    "context_token": "the contexts of decodes are not told: what they cost is within `sequence`, as in these logs",
    "pair": "where chunks of prompts begin is not told: what it costs is within `prompt_token`, as in these logs",
    "beside_token": "contexts beside chunks are not told: what they cost is within the other terms, as in these logs",
}
_LACKING = {
    "prompt_token": "no step with a prompt is timed: in this fit prompts would cost nothing",
    "sequence": "no step of decodes is timed: in this fit they would cost what prompts do",
}


@dataclass(frozen=True)
class StepFit(EngineFit):
    """A fit to recorded steps of the files `logs`. `given` and `held_out` are the stretches, whose error is the bias of
    their time; `regions` the errors by kind of step, of each part; `lacking`, why it is no model of the engine."""

    logs: tuple[str, ...]
    regions: tuple[tuple[str, list[RegionError]], ...]
    lacking: tuple[str, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """The logs."""
        return self.logs

    @property
    def violations(self) -> list[str]:
        """What makes it no model of the engine, then the violations of claims."""
        return [*self.lacking, *super().violations]


def fit_steps(setup: Setup, spec: PolicySpec, logs: Sequence[StepLog], held: Sequence[StepLog]) -> StepFit:
    """The step times of the engine of `setup` from the steps of `logs`, judged by those of `held`, or without any by
    stretches of `logs` that play no part in the fit: of each core's steps in order, the second of ten and every third
    after it.

    MeasuredError where the steps are too few, or leave open what the terms ask for; ScenarioError where the scenario
    can take no fit.
    """
    check_fits(setup)
    kernel, stated = start_of(setup, spec.config)
    every = [*logs, *held]
    steps = RecordedSteps.join([log.steps for log in every])
    apart = np.repeat([False] * len(logs) + [True] * len(held), [len(log.steps) for log in every])
    low, high, asked = least_and_most(steps, Fitted(kernel, StepTerms(kernel=1.0)).features)
    steps = steps.picked(asked)
    design = _Design(low, high, steps.ns, stated)
    active, open_terms = design.determined_terms(FREE[:-1] if kernel is None else OVER_KERNEL[:-1])

    def parted(rows: NDArray[np.bool_]) -> _Parted:
        parts = _Parted.of(steps.core, rows, apart[asked] if held else None)
        if rows.sum() < max(FEWEST, MOSTLY * len(asked)) or not parts.given.any() or not parts.held_out.any():
            raise MeasuredError(
                f"{logs[0].source}: {int(rows.sum()):,} of {len(asked):,} recorded steps tell what the fit needs, and"
                f" {FEWEST} are needed, half of all, and some of them to be held out. {_advice(every, kernel)}"
            )
        return parts

    parts = parted(design.nearly_determined(design.solve(active, parted(design.determined(active)).given)))
    active, values = design.best(active, parts.given, stairs=kernel is None)
    predicted = design.mid @ _vector(values)
    given, held_out = (parts.biases(steps.ns, predicted, part) for part in (parts.given, parts.held_out))
    mean = float(np.sqrt(np.mean([(one.errors["step_time"] or 0.0) ** 2 for one in given])))
    there = design.mid[parts.given].max(axis=0) > 0
    return StepFit(
        setup=setup,
        specs=(spec,),
        kernel=kernel,
        terms=StepTerms(**values),
        frontend_ns=float(setup.traffic.frontend.request),
        known=design.identify(active, values, parts.given, predicted),
        given=given,
        held_out=held_out,
        claims={"step_time": max(FLOORS["tpot_mean_s"], SIGMAS * mean)},
        words=_words(logs, int(parts.given.sum())),
        notes=(
            *_notes(every),
            *(_OF_OPEN[name] for name in open_terms),
            *_left_aside(len(asked) - int(parts.rows.sum()), len(asked)),
            *_stalls(steps.ns[parts.rows], predicted[parts.rows]),
        ),
        runs=(),
        logs=tuple(dict.fromkeys(log.source for log in every)),
        regions=tuple(
            (name, pairs_of(steps.picked(part), predicted[part]).errors())
            for name, part in (("given", parts.given), ("held out", parts.held_out))
        ),
        lacking=(
            *(f"{Path(log.source).name}: {log.doubt}" for log in every if log.doubt),
            *(
                why
                for name, why in _LACKING.items()
                if kernel is None and not there[TERMS.index(name)] and not values[name]
            ),
        ),
    )


@dataclass(frozen=True)
class _Parted:
    """Of all steps those fitted to, `given`, and those `held_out`; the core of each, and which stretch of it."""

    core: NDArray[np.int64]
    stretch: NDArray[np.int64]
    given: NDArray[np.bool_]
    held_out: NDArray[np.bool_]

    @classmethod
    def of(cls, core: NDArray[np.int64], rows: NDArray[np.bool_], apart: NDArray[np.bool_] | None) -> _Parted:
        """The parts of the steps `rows`: those `apart` are held out, or where None is said, HELD of the stretches."""
        stretch = np.full(len(core), -1)
        for one in np.unique(core[rows]):
            at = np.flatnonzero(rows & (core == one))
            stretch[at] = np.arange(len(at)) * STRETCHES // len(at)
        apart = np.isin(stretch, HELD) if apart is None else apart
        return cls(core, stretch, rows & ~apart, rows & apart)

    @property
    def rows(self) -> NDArray[np.bool_]:
        """The steps of both."""
        return self.given | self.held_out

    def biases(self, ns: Floats, predicted: Floats, part: NDArray[np.bool_]) -> tuple[LoadError, ...]:
        """The bias of the time of each stretch of the steps `part`."""
        errors: list[LoadError] = []
        for core, number in sorted({*zip(self.core[part].tolist(), self.stretch[part].tolist(), strict=True)}):
            rows = part & (self.core == core) & (self.stretch == number)
            bias = float(predicted[rows].sum() / ns[rows].sum() - 1)
            name = f"stretch {number + 1} of {STRETCHES} of core {core + 1}"
            errors.append(LoadError(name, {"step_time": bias}, knee=False))
        return tuple(errors)


class _Design:
    """What the terms multiply in each step, the least and the most of it, and what each step took."""

    def __init__(self, low: Floats, high: Floats, ns: Floats, stated: Mapping[str, float]) -> None:
        self.low, self.high, self.ns, self.stated = low, high, ns, stated
        self.mid = (low + high) / 2

    def determined_terms(self, terms: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(determined, open): of `terms` those to fit, and those to leave out, since most steps with any of it bound
        loosely what the term multiplies."""
        left_open: list[str] = []
        for name in terms:
            j = TERMS.index(name)
            there = self.high[:, j] > 0
            is_tight = self.high[:, j] - self.low[:, j] <= TIGHT * self.mid[:, j]
            if name in _OF_OPEN and there.any() and is_tight[there].mean() < MOSTLY:
                left_open.append(name)
        return tuple(name for name in terms if name not in left_open), tuple(left_open)

    def determined(self, active: Sequence[str]) -> NDArray[np.bool_]:
        """The steps whose log bounds tightly what each of the `active` terms multiplies."""
        of = [TERMS.index(name) for name in active]
        return np.all(self.high[:, of] - self.low[:, of] <= TIGHT * self.mid[:, of], axis=1)

    def nearly_determined(self, values: Mapping[str, float]) -> NDArray[np.bool_]:
        """The steps whose time under the terms `values` all that the log leaves open moves by no more than OPEN."""
        terms = _vector(values)
        return np.asarray((self.high - self.low) @ terms <= OPEN * (self.mid @ terms))

    def _weights(self, off: Floats) -> Floats:
        return np.sqrt(CUT / np.maximum(np.abs(off), CUT))

    def off(self, values: Mapping[str, float], rows: NDArray[np.bool_]) -> Floats:
        """Relative error of each of the steps `rows`: (predicted - recorded) / recorded."""
        return self.mid[rows] @ _vector(values) / self.ns[rows] - 1

    def error(self, values: Mapping[str, float], rows: NDArray[np.bool_]) -> float:
        """Root mean square of the errors of steps, as shares; beyond CUT, of their product."""
        off = np.abs(self.off(values, rows))
        return float(np.sqrt((off * np.minimum(off, CUT)).mean()))

    def best(
        self, active: Sequence[str], rows: NDArray[np.bool_], *, stairs: bool
    ) -> tuple[Sequence[str], dict[str, float]]:
        """The terms fitted to the steps `rows`, and their values; with `stairs` those of a step's number of tokens too,
        where the others miss by more than MISSED and these miss far less."""
        values = self.solve(active, rows)
        error = self.error(values, rows)
        if stairs and error > MISSED:
            more = (*active, *(name for name in STAIRS if name in TERMS and name not in FREE))
            other = self.solve(more, rows)
            if self.error(other, rows) < BETTER * error:
                return more, other
        return active, values

    def solve(self, active: Sequence[str], rows: NDArray[np.bool_]) -> dict[str, float]:
        """The terms that come nearest to the steps `rows`, by relative error; beyond CUT a step counts by its error,
        not by its square."""
        of = [TERMS.index(name) for name in active]
        a = self.mid[rows][:, of] / self.ns[rows, None]
        defaults = np.array([self.stated.get(name, 0.0) for name in active])
        values, weights = dict.fromkeys(TERMS, 0.0), np.ones(len(a))
        for _ in range(ROUNDS):
            terms = least(a * weights[:, None], weights, defaults)
            before, values = values, values | dict(zip(active, terms.tolist(), strict=True))
            weights = self._weights(a @ terms - 1)
            if max(abs(values[name] - before[name]) * float(a[:, j].max()) for j, name in enumerate(active)) < SETTLED:
                break
        return values

    def identify(
        self, active: Sequence[str], values: Mapping[str, float], rows: NDArray[np.bool_], predicted: Floats
    ) -> Identified:
        """How well the terms are known. Errors of steps that follow each other are alike: by how much the errors of
        neighbours correlate, fewer steps count."""
        off = self.off(values, rows)
        weights = self._weights(off)
        of = [TERMS.index(name) for name in active]
        cut = off * weights
        alike = float(np.clip((cut[1:] * cut[:-1]).mean() / max((cut**2).mean(), 1e-300), 0.0, 0.99))
        spare = max(len(cut) - len(active), 1)
        sigma = float(np.sqrt((cut**2).sum() / spare * (1 + alike) / (1 - alike)))
        parts = self.mid[rows][:, of] * np.array([values[name] for name in active]) / predicted[rows, None]
        shares = dict(zip(active, parts.max(axis=0).tolist(), strict=True))
        return identified(self.mid[rows][:, of] * (weights / self.ns[rows])[:, None], active, values, sigma, shares)


def _vector(values: Mapping[str, float]) -> Floats:
    return np.array([values[name] for name in TERMS])


def _left_aside(count: int, recorded: int) -> list[str]:
    if not count:
        return []
    return [f"{count:,} of {recorded:,} steps are not fitted to: their logs leave open what the terms ask for"]


def _stalls(ns: Floats, predicted: Floats) -> list[str]:
    """A line on steps that took far longer than is predicted, where there are any."""
    stalled = ns > STALLED * predicted
    if not stalled.any():
        return []
    return [
        f"{int(stalled.sum()):,} steps took more than {STALLED:g} times what is predicted,"
        f" {ns[stalled].sum() / ns.sum():.1%} of all time: they hardly count in the fit, and wholly in the errors"
    ]


def _notes(logs: Sequence[StepLog]) -> list[str]:
    """What is to be known of the logs, a line each, those of several in one."""
    of: dict[str, list[str]] = {}
    for log in logs:
        for note in log.notes:
            of.setdefault(note, []).append(Path(log.source).name)
    return [f"{'all logs' if len(names) == len(logs) > 1 else ', '.join(names)}: {note}" for note, names in of.items()]


def _advice(logs: Sequence[StepLog], kernel: Cost | None) -> str:
    if kernel is None:
        return "Give longer logs."
    forms = " and ".join(dict.fromkeys(log.form for log in logs))
    return (
        f"The kernel asks for contexts of decodes and places of chunks, which {forms} may not tell: give longer logs,"
        " forward-pass metrics, or write cost: {kind: free}."
    )


def _words(logs: Sequence[StepLog], steps: int) -> str:
    names = list(dict.fromkeys(Path(log.source).name for log in logs))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{steps:,} recorded steps of {shown}"
