"""A fit to measured runs, as text: what `batchsim calibrate --bench` prints."""

from __future__ import annotations

import math

from batchsim.base.units import format_duration, two_digits
from batchsim.fit.engine_fit import EngineFit
from batchsim.fit.identify import LARGER, Term
from batchsim.fit.measured_loads import LoadError
from batchsim.report.layout import Grid, aligned, fit
from batchsim.report.numbers import DASH

_TERM_WORDS = {
    "kernel": "the kernel's time, times",
    "base": "each step, or pass",
    "sequence": "a sequence in a step",
    "prompt_token": "a prompt token computed",
    "context_token": "a context token that a decode reads",
    "beside_token": "such a token beside a chunk, more",
    "pair": "a query-key pair of a chunk",
    "rows_2": "a step, or pass, of 2 tokens or more",
    "rows_4": "a step of 4 or more, besides",
    "rows_8": "a step of 8 or more, besides",
    "frontend": "from the client to the engine",
}
_FIGURES = {
    "ttft_mean_s": "TTFT",
    "tpot_mean_s": "TPOT",
    "e2e_mean_s": "E2E",
    "throughput_rps": "requests/s",
    "load": "load",
}
LEGEND = (
    "errors in %: simulated / measured − 1 of means · load: beyond the knee, the share by which the load would have to"
    " change for the simulation to have the measured TTFT"
)


def report(engine_fit: EngineFit) -> str:
    """The terms with their intervals, the pairs that the runs cannot separate, the errors at each load, the claims."""
    claimed = ", ".join(f"{_FIGURES[name]} ±{two_digits(100 * share)} %" for name, share in engine_fit.claims.items())
    parts = [
        *terms_lines(engine_fit, "a latency"),
        "",
        fit(LEGEND),
        *aligned(errors(engine_fit), left=(0, 1), close=True),
        fit(f"claimed of other loads: {claimed}"),
    ]
    return "\n".join(parts)


def terms_lines(engine_fit: EngineFit, of: str) -> list[str]:
    """The heading, the notes, and the terms with their intervals and shares `of` the measured time; the pairs of terms
    that cannot be separated."""
    policies = ", ".join(spec.name for spec in engine_fit.specs)
    heading = f"{engine_fit.setup.scenario.name} · {policies} · {engine_fit.fitted.cost.describe()}"
    lines = [heading, *(f"! {note}" for note in engine_fit.notes), ""]
    terms = [["term", "", "value", "95 % interval", f"share of {of}", ""], *map(_row, engine_fit.known.terms)]
    condition = f"condition number {engine_fit.known.condition:.3g}"
    apart = [
        f"- {pair.one} and {pair.other} cannot be told apart (correlation {pair.correlation:+.3f}). It would be settled"
        f" by {pair.settles}"
        for pair in engine_fit.known.confused
    ]
    paired = {name for pair in engine_fit.known.confused for name in (pair.one, pair.other)}
    apart += [
        f"- {term.name} is small beside its interval: a run of {LARGER[term.name]} would say more"
        for term in engine_fit.known.terms
        if not term.identified and term.name not in paired
    ]
    return [
        "\n".join(map(fit, lines)),
        *aligned(terms, left=(0, 1, -1), close=True),
        fit(condition + ("" if engine_fit.known.confused else "; all terms can be told apart")),
        *map(fit, apart),
    ]


def _row(term: Term) -> list[str]:
    if term.name == "kernel":
        value, half = f"{term.value:.3f}", f"{term.half:.3f}"
    else:
        value, half = (_duration(ns) for ns in (term.value, term.half))
    interval = f"± {half}" if math.isfinite(term.half) else "unbounded"
    known = "identified" if term.identified else "not identified"
    return [term.name, _TERM_WORDS[term.name], value, interval, f"up to {100 * term.share:.0f} %", known]


def _duration(ns: float) -> str:
    if not math.isfinite(ns):
        return DASH
    return format_duration(ns) if ns >= 10 or not ns else f"{ns:.2g} ns"


def errors(engine_fit: EngineFit) -> Grid:
    """A row for each load, given ones first."""
    rows = [[one.name, kind, *_cells(one)] for kind, ones in _kinds(engine_fit) for one in ones]
    return [["run", "", *_FIGURES.values()], *rows]


def _kinds(engine_fit: EngineFit) -> tuple[tuple[str, tuple[LoadError, ...]], ...]:
    return ("given", engine_fit.given), ("held out", engine_fit.held_out)


def _cells(one: LoadError) -> list[str]:
    return [_cell(one.errors[name]) if name in one.errors else DASH for name in _FIGURES]


def _cell(error: float | None) -> str:
    """An error in percent; None is one beyond any load within reach."""
    return ">20" if error is None else f"{100 * error:+.1f}"
