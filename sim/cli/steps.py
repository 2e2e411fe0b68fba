"""`calibrate --steps` and `validate --steps`: steps that an engine recorded itself, fitted to or predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import json_kind, write_text, writing
from batchsim.cli.bench import FitOptions, files_of
from batchsim.cli.common import check_output, chosen_policies
from batchsim.cli.validation import Asked, made_of

if TYPE_CHECKING:
    from batchsim.check.steps.recorded import StepLog
    from batchsim.scenario.config import PolicySpec
    from batchsim.scenario.setup import Setup

_KINDS = {"vLLM's iterations": "vllm", "SGLang's batches": "sglang"}
"""Of a log's form the policy that is its engine's."""
_FORMAT = "batchsim steps 1"
_KIND = json_kind(_FORMAT)
SUFFIXES = (".log", ".txt", ".jsonl", ".json", ".gz")
"""Of the logs that are read of a folder."""


def calibrate_steps(options: FitOptions, files: Sequence[Path], hold_out: Sequence[str]) -> None:
    """Fits the engine of the scenario to the steps of the logs `files`, prints the fit and writes it."""
    from batchsim.fit.step_fit import fit_steps
    from batchsim.report.text.step_text import fit_report
    from batchsim.scenario.setup import Setup

    loaded, path = options.load("--steps"), options.path("--steps")
    setup = Setup.of(loaded)
    specs = chosen_policies(loaded, [options.policy] if options.policy else [])
    if len(specs) > 1:
        names = ", ".join(spec.name for spec in specs)
        raise ScenarioError(f"{loaded.source}: has {len(specs)} policies ({names}). Say which with --policy.")
    apart = [Path(text) for text in hold_out]
    held = files_of(apart, SUFFIXES)
    own = [file for file in files_of(files, SUFFIXES) if file.resolve() not in {one.resolve() for one in held}]
    if not own:
        raise ScenarioError(f"--hold-out {hold_out[0]}: no log is left to fit to. Hold out fewer, or give more logs.")
    given, judged = ([_read(file, setup, specs) for file in some] for some in (own, held))
    engine_fit = fit_steps(setup, specs[0], given, judged)
    options.write(engine_fit, fit_report(engine_fit), path, "--steps")


def validate_steps(asked: Asked, files: Sequence[Path]) -> None:
    """Predicts the steps of the logs `files` under the scenario's policies, prints the errors and writes
    steps-NAME.json, or --json in its place."""
    from batchsim.check.steps.recorded import RecordedSteps
    from batchsim.check.validation.recorded_steps import compare_steps
    from batchsim.report.text.step_text import compared_report
    from batchsim.results.heading import heading
    from batchsim.scenario.setup import Setup

    scenario = asked.load()
    setup = Setup.of(scenario)
    if setup.shapes is not None:
        raise ScenarioError(
            f"{scenario.places['cost']}: shapes: recorded steps say their real sizes, and not the programs that they"
            " ran in. Leave shapes out."
        )
    specs = chosen_policies(scenario, asked.policies)
    stem = asked.path("steps", f"{scenario.name}-{files[0].stem}")
    path = asked.json_file or Path(f"{stem}.json")
    if asked.json_file is None:
        asked.check_files(stem, {".json": _KIND})
    else:
        check_output(path, _KIND, "Give another path with --json.")
    logs = [_read(file, setup, specs) for file in files_of(files, SUFFIXES)]
    steps = RecordedSteps.join([log.steps for log in logs])
    comparisons = [
        compare_steps(spec.name, setup.cost_under(spec.config), steps, ahead=spec.config.traits.loop.is_ahead)
        for spec in specs
    ]
    notes = [f"{Path(log.source).name}: {note}" for log in logs for note in log.notes]
    made = made_of(scenario, cost=setup.cost.sources(), files=[log.source for log in logs])
    whole = {"format": _FORMAT, "notes": notes, "policies": [asdict(one) for one in comparisons], "made": made}
    with writing(path, "Give another path with --json or another folder with --out."):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(whole, indent=1, allow_nan=False) + "\n", _KIND)
    typer.echo(str(path), err=True)
    title = f"{heading(setup)} · beside {', '.join(Path(log.source).name for log in logs)}"
    typer.echo(compared_report(title, notes, comparisons))


def _read(file: Path, setup: Setup, specs: Sequence[PolicySpec]) -> StepLog:
    """The log `file` of the scenario's engine. ScenarioError where it is of another one than all `specs`."""
    from batchsim.check.steps.read import read_steps
    from batchsim.check.steps.recorded import Engine

    alike = len(setup.model.kinds) == 1
    engine = Engine(
        kv_tokens=setup.kv.tokens if alike else None,
        block_size=setup.kv.block_size,
        shares=any(bool(spec.config.traits.prefix_cache) for spec in specs),
        max_model_len=setup.max_model_len,
        ahead=any(spec.config.traits.loop.is_ahead for spec in specs),
    )
    log = read_steps(file, engine)
    kind, kinds = _KINDS.get(log.form), {spec.kind for spec in specs}
    if kind and not kinds & {kind} and kinds & {*_KINDS.values()}:
        raise ScenarioError(
            f"{file}: has {log.form}, and the scenario's policy is {', '.join(sorted(kinds))}. Give one of {kind}."
        )
    return log
