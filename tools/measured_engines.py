"""Fits vLLM as others measured it, and predicts what it was not shown.

    python -m tools.measured_engines FOLDER [h100] [rtx4090]

FOLDER holds `kubecon_na_2025_h100.csv` and `rtx4090_llama-3.1-8b/`: kubernetes-sigs/inference-perf @ 7de5ef2,
demos/kubecon-na-2025 (Apache-2.0), and casys-kaist/LLMServingSim @ 5daddb2, bench/examples/RTX4090/Llama-3.1-8B (MIT).

h100: six configurations of Llama-3.1-8B on one H100 at seven loads each. Three of them are vLLM V1 0.11.0, synchronous,
without drafts: they differ in `max_num_seqs` and in prefix caching. GIVEN loads of two of them are fitted; all 21
points are predicted. Stages 4 to 6 are closed loops in fact. The third configuration is never shown.

rtx4090: one run of 300 requests under vLLM 0.19.0, asynchronous, with too little KV for them. All requests are
replayed; the latencies of the first third, in the order of sending, are fitted, those of the others predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import LATENCIES, MISSING
from batchsim.check.validation.against import compare
from batchsim.check.validation.replay import replay, simulated_requests
from batchsim.cli.common import one_line_errors
from batchsim.fit.engine_fit import EngineFit, fit_engine
from batchsim.report.markdown import markdown_table
from batchsim.results.provenance import provenance
from batchsim.scenario import Scenario, load_scenario
from batchsim.scenario.setup import Setup

GIVEN = {"vllm": (1, 2, 5), "vllm+chunking_and_prefix_caching": (1, 3, 5)}
"""Stages that are fitted, by configuration: below, near and above saturation."""
MEANS = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "throughput_rps")


def fit_h100(folder: Path) -> tuple[EngineFit, list[dict[str, Any]]]:
    """The fit, and a row for each of the 21 points: configuration, stage, whether it was given, whether its load lies
    within the fit's error of saturation (`knee`), errors of means, of which TTFT and E2E have two ends there."""
    setup = Setup.of(_scenario("h100"))
    specs = {spec.label: spec for spec in setup.scenario.specs}
    runs = {
        (config, int(stage)): run
        for run in read_measured(folder / "kubecon_na_2025_h100.csv")
        for config, _, stage in [run.part.partition(", stage ")]
        if config in specs
    }
    given = [runs[config, stage] for config, stages in GIVEN.items() for stage in stages]
    found = fit_engine(setup, lambda run: specs[run.part.partition(",")[0]], given, [], _say)
    rows: list[dict[str, Any]] = []
    for (config, stage), run in runs.items():
        _say(f"{config}, stage {stage}")
        its = compare(found.fitted, specs[config], [run], shift=False)
        errors = {name: its.error(name).error_ends or its.error(name).error for name in MEANS}
        given_ = stage in GIVEN.get(config, ())
        rows.append({"config": config, "stage": stage, "given": given_, "knee": its.is_within_error} | errors)
    return found, rows


def fit_rtx4090(folder: Path) -> tuple[EngineFit, list[dict[str, Any]]]:
    """The fit to the first third, and the errors of the means of that third and of the rest."""
    (run,) = read_measured(folder / "rtx4090_llama-3.1-8b" / "requests.csv")
    assert run.requests is not None, "its requests are known"
    setup = Setup.of(_scenario("rtx4090"))
    (spec,) = setup.scenario.specs
    shown = np.arange(len(run.requests)) < len(run.requests) // 3
    times = {name: np.where(shown, getattr(run.requests, name), MISSING) for name in ("ttft_ns", "e2e_ns")}
    part = replace(run.requests, **times)
    found = fit_engine(setup, spec, [replace(run, requests=part, figures=part.figures())], [], _say)
    one = replay(found.fitted, run)
    simulated, measured = simulated_requests(one.simulate(spec)), run.requests
    rows: list[dict[str, Any]] = []
    for name, which in (("given", shown), ("held out", ~shown)):
        sides = {each: (simulated.latency_s(each)[which], measured.latency_s(each)[which]) for each in LATENCIES}
        errors = {f"{each}_mean_s": float(np.nanmean(a) / np.nanmean(b) - 1) for each, (a, b) in sides.items()}
        rows.append({"part": name, "requests": int(which.sum())} | errors)
    return found, rows


def _scenario(name: str) -> Scenario:
    return load_scenario(str(Path(__file__).with_name(f"measured_{name}.yaml")))


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the points: the median error without its sign. Those at the knee have no error of TTFT and E2E, but an
    interval: they are left out there."""
    kept = {name: [abs(error) for row in rows if isinstance(error := row[name], float)] for name in MEANS}
    return {name: float(np.median(errors)) for name, errors in kept.items()}


_say = partial(print, file=sys.stderr)


def table(name: str, found: EngineFit, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: the terms, and a row for each point with its errors in percent."""
    head = [*rows[0]]
    cells = [[_cell(x) for x in row.values()] for row in rows]
    lines = [f"## {name}", "", f"{found.terms}; way from the client {found.frontend_ns / 1e6:.2f} ms", ""]
    lines += [markdown_table(head, [False] * len(head), cells)]
    if name == "h100":
        its = ", ".join(f"{key} {100 * x:.1f} %" for key, x in medians(rows).items())
        at = [f"{row['config']} stage {row['stage']}" for row in rows if row["knee"]]
        lines += ["", f"Median error without its sign: {its}", ""]
        lines += [
            "Left out of TTFT and E2E, since there the load lies within the fit's error of saturation"
            f" ({found.fitted.cost.error} in step time), whose ends make an interval of them: {', '.join(at) or 'none'}"
        ]
    return lines


_FITS = {"h100": fit_h100, "rtx4090": fit_rtx4090}


def _cell(value: Any) -> str:
    """An error in percent; of an interval both ends."""
    if isinstance(value, tuple):
        return " to ".join(map(_cell, value))
    return f"{100 * value:+.1f}" if isinstance(value, float) else str(value)


@one_line_errors
def main(folder: Path, which: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Prints the fits and their errors in percent, as Markdown."""
    print(f"# vLLM as others measured it, fitted and predicted (commit {provenance()['commit']})\n")
    print("Errors of means in percent, simulated / measured − 1. `python -m tools.measured_engines` says the rest.")
    for name in which or _FITS:
        print("\n".join(["", *table(name, *_FITS[name](folder))]))


if __name__ == "__main__":
    typer.run(main)
