"""Fits vLLM as others measured it, and predicts what it was not shown.

    python -m tools.measured_engines FOLDER [h100] [rtx4090] [-o NAME]     writes NAME.json and NAME.md

FOLDER holds `kubecon_na_2025_h100.csv` and `rtx4090_llama-3.1-8b/`: kubernetes-sigs/inference-perf @ 7de5ef2,
demos/kubecon-na-2025 (Apache-2.0), and casys-kaist/LLMServingSim @ 5daddb2, bench/examples/RTX4090/Llama-3.1-8B (MIT).

h100: six configurations of Llama-3.1-8B on one H100 at seven loads each. Three of them are vLLM V1 0.11.0, synchronous,
without drafts: they differ in `max_num_seqs` and in prefix caching. GIVEN loads of two of them are fitted; all 21
points are predicted. Stages 4 to 6 are closed loops in fact. The third configuration is never shown.

rtx4090: one run of 300 requests under vLLM 0.19.0, asynchronous, with too little KV for them. All requests are
replayed; the latencies of the first third, in the order of sending, are fitted, those of the others predicted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchsim.base.errors import BatchsimError, CalibrationError
from batchsim.base.files import write_text
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import MISSING, MeasuredRun
from batchsim.check.validation.against import compare
from batchsim.check.validation.replay import replay, simulated_requests
from batchsim.fit.engine_fit import EngineFit, fit_engine
from batchsim.results.provenance import provenance
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup

GIVEN = {"vllm": (1, 2, 5), "vllm+chunking_and_prefix_caching": (1, 3, 5)}
"""Stages that are fitted, by configuration: below, near and above saturation."""
_WORKLOAD = """
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths: {prompt: {kind: fixed, tokens: 1}, output: {kind: fixed, tokens: 1}}
  output_cap: exact
  requests: 1
"""
H100 = f"""
model: llama-3.1-8b
cost: {{kind: profile, profile: llama-3.1-8b-h100-vllm-0.24.0}}
max_model_len: 512
policies:
  vllm: {{kind: vllm, max_num_seqs: 128, max_num_batched_tokens: 8192, enable_chunked_prefill: false,
         enable_prefix_caching: false, async_scheduling: false}}
  vllm+batch_size: {{kind: vllm, max_num_seqs: 192, max_num_batched_tokens: 8192, enable_chunked_prefill: false,
         enable_prefix_caching: false, async_scheduling: false}}
  vllm+chunking_and_prefix_caching: {{kind: vllm, max_num_seqs: 128, max_num_batched_tokens: 8192,
         async_scheduling: false}}
{_WORKLOAD}
  shared_prefix: {{groups: 100, added_tokens: 192}}
load: {{mean_rate: [1/s]}}
slo: ttft<1s @ 99%
seeds: 1
"""
"""100 prompts are sent again and again: of each all but the last block of 16 is found where prefixes are cached."""
RTX4090 = f"""
model: llama-3.1-8b
cost: rtx4090
kv: {{tokens: 41408}}
max_model_len: 32768
policies:
  vllm: {{max_num_seqs: 256, max_num_batched_tokens: 2048, enable_prefix_caching: true, async_scheduling: true}}
{_WORKLOAD}
load: {{mean_rate: [1/s]}}
slo: ttft<1s @ 99%
seeds: 1
"""
MEANS = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "throughput_rps")


def fit_h100(folder: Path) -> tuple[EngineFit, list[dict[str, Any]]]:
    """The fit, and a row for each of the 21 points: configuration, stage, whether it was given, whether its load lies
    within the fit's error of saturation (`knee`), errors of means, of which TTFT and E2E have two ends there."""
    setup = Setup.of(parse_scenario(H100, "h100.yaml", Path()))
    specs = {spec.label: spec for spec in setup.scenario.specs}
    runs = {
        (config, int(stage)): run
        for run in read_measured(folder / "kubecon_na_2025_h100.csv")
        for config, _, stage in [run.part.partition(", stage ")]
        if config in specs
    }
    given = [runs[config, stage] for config, stages in GIVEN.items() for stage in stages]

    def spec_of(run: MeasuredRun) -> PolicySpec:
        return specs[run.part.partition(",")[0]]

    found = fit_engine(setup, spec_of, given, [], _say)
    rows: list[dict[str, Any]] = []
    for (config, stage), run in runs.items():
        _say(f"{config}, stage {stage}")
        its = compare(found.fitted, spec_of(run), [run], shift=False)
        errors = {name: its.error(name).error_ends or its.error(name).error for name in MEANS}
        given_ = stage in GIVEN.get(config, ())
        rows.append({"config": config, "stage": stage, "given": given_, "knee": its.is_within_error} | errors)
    return found, rows


def fit_rtx4090(folder: Path) -> tuple[EngineFit, list[dict[str, Any]]]:
    """The fit to the first third, and the errors of the means of that third and of the rest."""
    (run,) = read_measured(folder / "rtx4090_llama-3.1-8b" / "requests.csv")
    assert run.requests is not None, "its requests are known"
    setup = Setup.of(parse_scenario(RTX4090, "rtx4090.yaml", Path()))
    (spec,) = setup.scenario.specs
    shown = np.arange(len(run.requests)) < len(run.requests) // 3
    times = {name: np.where(shown, getattr(run.requests, name), MISSING) for name in ("ttft_ns", "e2e_ns")}
    part = replace(run.requests, **times)
    found = fit_engine(setup, spec, [replace(run, requests=part, figures=part.figures())], [], _say)
    one = replay(found.fitted, run)
    simulated = simulated_requests(one.simulate(spec))
    rows = [
        {"part": name, "requests": int(which.sum())} | _errors(simulated.latency_s, run.requests.latency_s, which)
        for name, which in (("given", shown), ("held out", ~shown))
    ]
    return found, rows


def _errors(mine: Any, theirs: Any, which: Any) -> dict[str, float]:
    return {
        f"{name}_mean_s": float(np.nanmean(mine(name)[which]) / np.nanmean(theirs(name)[which]) - 1)
        for name in ("ttft", "tpot", "e2e")
    }


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the points: the median error without its sign. Those at the knee have no error of TTFT and E2E, but an
    interval: they are left out there."""
    kept = {name: [abs(error) for row in rows if isinstance(error := row[name], float)] for name in MEANS}
    return {name: float(np.median(errors)) for name, errors in kept.items()}


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def table(name: str, found: EngineFit, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: the terms, and a row for each point with its errors in percent."""
    head = [*rows[0]]
    cells = [[_cell(x) for x in row.values()] for row in rows]
    lines = [f"## {name}", "", f"{found.terms}; way from the client {found.frontend_ns / 1e6:.2f} ms", ""]
    lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]
    if name == "h100":
        its = ", ".join(f"{key} {100 * x:.1f} %" for key, x in medians(rows).items())
        at = [f"{row['config']} stage {row['stage']}" for row in rows if row["knee"]]
        lines += ["", f"Median error without its sign: {its}", ""]
        lines += [
            "Left out of TTFT and E2E, since there the load lies within the fit's error of saturation"
            f" ({found.fitted.cost.error} in step time), whose ends make an interval of them: {', '.join(at) or 'none'}"
        ]
    return [*lines, ""]


def _cell(value: Any) -> str:
    """An error in percent; of an interval both ends."""
    if isinstance(value, tuple):
        return " to ".join(map(_cell, value))
    return f"{100 * value:+.1f}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str]) -> None:
    """Prints both fits and their errors in percent, and with -o writes them."""
    words = list(arguments)
    out = Path(words.pop(words.index("-o") + 1)) if "-o" in words[:-1] else None
    folder, *which = [word for word in words if word != "-o"] or [""]
    if not Path(folder).is_dir():
        raise CalibrationError(f"{folder or 'FOLDER'}: no such folder. Give that of the measured engines.")
    made = provenance()
    wholes: dict[str, Any] = {"made": made}
    lines = [f"# vLLM as others measured it, fitted and predicted (commit {made['commit']})", ""]
    lines += [
        "Errors of means in percent, simulated / measured − 1. `python -m tools.measured_engines` says the rest.",
        "",
    ]
    for name, fit in (("h100", fit_h100), ("rtx4090", fit_rtx4090)):
        if which and name not in which:
            continue
        found, rows = fit(Path(folder))
        lines += table(name, found, rows)
        wholes[name] = {"terms": asdict(found.terms), "frontend_ns": found.frontend_ns, "points": rows}
    print("\n".join(lines))
    if out is not None:
        write_text(out.with_suffix(".json"), json.dumps(wholes, indent=1) + "\n")
        write_text(out.with_suffix(".md"), "\n".join(lines))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BatchsimError as error:
        sys.exit(str(error))
