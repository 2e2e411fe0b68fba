"""Lines under a rollout's table: what trainer and engines waited for, what was made in vain, and each training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from batchsim.base.units import counted
from batchsim.metrics.rollouts import TRAINING_COLUMNS
from batchsim.metrics.table import METRICS
from batchsim.report.layout import aligned
from batchsim.report.reading import PolicyCurve, column, rows_of
from batchsim.report.text.run_lines import percent_words, time_words
from batchsim.results.read import Results

TRAININGS_SHOWN = 12
_WASTE = {"aborted": "aborted", "filtered": "filtered", "stale": "too old", "left": "left over", "failed": "failed"}
_SHARES = ("generation_bound", "trainer_idle", "loading", "waste", "mixed_version")
_SHARES += ("slowest_has_longest", "slowest_has_most")


def rollout_lines(results: Results, shown: Sequence[tuple[PolicyCurve, int]]) -> list[str]:
    """Lines for each (curve, index of a load) in `shown`, means over seeds: what trainer and engines waited for, what
    was made in vain, how old answers were; then the trainings of the first curve and seed. [] without rollouts."""
    table = results.trainings()
    if table is None:
        return []
    lines = []
    for sweep, i in shown:
        if sweep.failed[i]:
            continue
        of = {name: float(sweep.values(name)[i]) for name in METRICS if name in results.summary}
        share = {name: percent_words(of[f"{name}_share"]) for name in (*_SHARES, *_WASTE)}
        loading = f", {share['loading']} as they load weights" if of["loading_share"] else ""
        time = {name: time_words(of[f"{name}_mean_s"]) for name in ("training_cycle", "generation", "tail")}
        lines.append(
            f"{sweep.labels[i]}:  {counted(round(of['trainings']), 'training')}, one in {time['training_cycle']};"
            f" generation {time['generation']} ({share['generation_bound']} of it at least), its tail {time['tail']};"
            f" trainer idle {share['trainer_idle']}, engines {percent_words(1 - of['engine_busy_share'])}{loading}"
        )
        lost = ", ".join(f"{words} {share[name]}" for name, words in _WASTE.items() if of[f"{name}_share"])
        mixed = f", {share['mixed_version']} by several" if of["mixed_version_share"] else ""
        lines.append(
            f"  {of['generated_tokens']:,.0f} tokens made, {share['waste']} in vain{f' ({lost})' if lost else ''};"
            f" {of['useful_answers_per_s']:.3g} useful answers/s; staleness {of['staleness_mean']:.2g} versions, p99"
            f" {of['staleness_p99']:.3g}, at most {of['staleness_max']:.3g}{mixed}"
        )
        if not math.isnan(of["slowest_has_longest_share"]):
            lines.append(
                f"  the slowest replica had the longest answer in {share['slowest_has_longest']} of the trainings, most"
                f" tokens in {share['slowest_has_most']}"
            )
    return lines + _trainings(table, shown)


def _trainings(table: pd.DataFrame, shown: Sequence[tuple[PolicyCurve, int]]) -> list[str]:
    """The first trainings of the first curve shown, at its load, with its first seed."""
    sweep, i = next(((sweep, i) for sweep, i in shown if not sweep.failed[i]), (None, 0))
    if sweep is None:
        return []
    own = rows_of(table, sweep, i)
    own = own.take(np.flatnonzero(column(own, "seed") == column(table, "seed").min()))
    values = {name: column(own, name) for name in TRAINING_COLUMNS}
    heads = ["training", "waited", "generation", "at least", "tail", "trained", "drain", "tokens", "longest", "stale"]
    replicas = ("slowest", "with_longest", "with_most") if not np.isnan(values["slowest"]).any() else ()
    grid = [[*heads, *(name.replace("with_", "") + " at" * name.startswith("with") for name in replicas)]]
    for row in range(min(len(own), TRAININGS_SHOWN)):
        times = ("wait", "generation", "bound", "tail", "training", "drain")
        cells = [f"{values['training'][row]:.0f}", *(time_words(float(values[f"{name}_s"][row])) for name in times)]
        cells += [f"{values[name][row]:,.0f}" for name in ("output_tokens", "longest")]
        cells += [f"{values['staleness_mean'][row]:.2g}", *(f"{values[name][row]:.0f}" for name in replicas)]
        grid.append(cells)
    more = len(own) - TRAININGS_SHOWN
    rest = [f"and {counted(more, 'training')} more, in trainings.csv"] if more > 0 else []
    return [f"trainings of {sweep.labels[i]}, first seed:", *aligned(grid, left=()), *rest]
