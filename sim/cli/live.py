"""`batchsim live`: a scenario's requests in real time on the real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.base.files import writing
from batchsim.base.ranges import INT32_MAX
from batchsim.cli import complete, option
from batchsim.cli.common import (
    check_out,
    one_line_errors,
    print_json,
    read_scenario,
    require_torch,
)

if TYPE_CHECKING:
    from batchsim.calibrate.engine.prompts import Prompts
    from batchsim.calibrate.engine.runner import ModelRunner
    from batchsim.deployment.model import ModelSpec
    from batchsim.results.read import Results
    from batchsim.scenario import Scenario
    from batchsim.scenario.setup import Setup

INTERRUPTED_EXIT = 130


@one_line_errors
def live(
    scenario: option.Scenario,
    policy: Annotated[
        str,
        typer.Option(
            help="A policy's label; with best_of, one variant's whole name.", autocompletion=complete.policies
        ),
    ],
    device: Annotated[str, typer.Option(help="cpu or cuda.")],
    load: Annotated[
        float | None, typer.Option(help="A value on the load axis; needed where there are several.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=INT32_MAX, help="Which repetition's requests.")] = 0,
    set_: option.Set = None,
    weights: Annotated[Path | None, typer.Option(help="Hugging Face folder with weights; else random ones.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 takes the likeliest token.")] = 0.0,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file with a prompt on each line; else random tokens.")
    ] = None,
    out: option.Out = Path("results"),
    attempts: Annotated[int, typer.Option(min=1, max=1000, help="Runs at most, while the load source was late.")] = 1,
    graphs: Annotated[
        bool | None,
        typer.Option("--graphs/--no-graphs", help="CUDA graphs for decode steps; by default as in the profile."),
    ] = None,
    traces: option.Traces = None,
    allow_code: option.AllowCode = False,
    as_json: option.Json = False,
) -> None:
    """Replay one point of a scenario in real time on the real model, with the very scheduler of the simulation.

    Exit code 1 if the run was cut or does not count. Example: batchsim live my.yaml --policy continuous --device cpu
    """
    require_torch("live")
    loaded = read_scenario(scenario, set_, traces, "live", allow_code=allow_code)
    from batchsim.calibrate.engine.sampling import Sampling
    from batchsim.calibrate.engine.session import run_live, step_limits
    from batchsim.drive.live import lag_verdict
    from batchsim.results.live_results import keep_live
    from batchsim.scenario import Point
    from batchsim.scenario.setup import Setup
    from batchsim.study.curves.run import check_inputs

    setup = Setup.of(loaded)
    setup.check_can_be_real()
    check_inputs(setup)
    graphs = prepare_machine(setup, device, graphs)
    check_kv_stated(setup)
    chosen = loaded.find(policy)
    point = Point(chosen, _load(loaded, load), seed)
    sampling = Sampling(temperature=temperature, seed=seed)
    if weights is not None:
        check_weights(weights, setup.model)
    check_out(out)
    texts = _prompts(prompts, weights or Path(loaded.model_path), setup.model.vocab_size)
    limits = [step_limits(setup, (chosen,), point.load, seed)]
    runner = load_runner(setup, limits, device=device, weights=weights, graphs=graphs)
    window_s = setup.workload(point.load, seed).window_ns[1] / 1e9
    arrive = f"requests arrive for {window_s:.0f} s ..." if window_s else "..."  # a closed loop: not known yet
    typer.echo(f"{chosen.name} at load {point.load:g}: {arrive}", err=True)
    for attempt in range(attempts):
        played = run_live(
            setup, chosen, point.load, seed, runner, estimator=setup.cost, sampling=sampling, prompts=texts
        )
        late = not played.reason and lag_verdict(played.records)
        if not late or attempt + 1 == attempts:
            break
        typer.echo(f"attempt {attempt + 1} of {attempts} does not count: {late}", err=True)
    try:
        results = keep_live(setup, point, played, out)
    except ScenarioError as error:
        if played.error is None:
            raise
        raise ScenarioError(f"{error} The run was cut: {played.reason}: {played.error}") from played.error
    if played.error is not None and not isinstance(played.error, BatchsimError):
        typer.echo(f"{results.path}/  holds the run up to this error, which is a bug:", err=True)
        raise played.error
    _say(results, as_json)


def _say(results: Results, as_json: bool) -> None:
    """Prints the run's table; exits with 1 where the run was cut or does not count, with 130 after Ctrl-C."""
    from batchsim.drive.live import INTERRUPTED
    from batchsim.report.layout import fit
    from batchsim.report.pictures.plots import write_pictures
    from batchsim.report.text.summary_text import report
    from batchsim.results.live_results import live_lines

    run = results.manifest["live"]
    lines = [fit(line) for line in live_lines(results)]
    if as_json:
        print_json(results.as_json() | {"live": run})
    else:
        with writing(results.path):
            pictures = write_pictures(results)
        typer.echo("\n".join([report(results), *lines]))
        typer.echo(fit(f"{results.path}/  " + "  ".join(["summary.csv", *(p.name for p in pictures)])))
    if run["reason"] or run["void"]:
        if as_json:
            typer.echo("\n".join(lines), err=True)
        raise typer.Exit(INTERRUPTED_EXIT if run["reason"] == INTERRUPTED else 1)


def prepare_machine(setup: Setup, device: str, graphs: bool | None = None) -> bool | None:
    """The argument `graphs` of `build_runner` that suits `setup`; sets torch's threads to the profile's number.

    CalibrationError for a device that is not there, a profile of another machine, or `graphs` unlike the profile's.
    """
    from batchsim.calibrate.engine.identity import check_device, set_cpu_threads
    from batchsim.calibrate.profile.this_machine import check_machine, graphs_of

    check_device(device)
    profile = setup.cost.profile
    if profile is None:
        set_cpu_threads(1)
        return False if graphs is False else None
    check_machine(profile, device)
    set_cpu_threads(int(profile.hardware.get("torch_threads", 1)))
    return graphs_of(profile, device, graphs)


def check_kv_stated(setup: Setup) -> None:
    """ScenarioError unless the number of KV blocks is stated in the scenario, or measured in its profile: an estimate
    may not fit into the GPU."""
    measured = None if setup.cost.profile is None else setup.cost.profile.num_blocks
    if setup.scenario.file.kv.tokens is None and setup.kv.num_blocks != measured:
        raise ScenarioError(
            f"{setup.scenario.source}: says not how much KV memory to allocate. Add kv: {{tokens: N}}, or a measured"
            " profile as cost."
        )


def _load(scenario: Scenario, load: float | None) -> float:
    """The load to run: `load`, which may be any value on the axis, or the scenario's only one."""
    tested = ", ".join(f"{x:g}" for x in scenario.loads) or "auto, which only batchsim run finds"
    if load is None and len(scenario.loads) == 1:
        return scenario.loads[0]
    if load is None:
        raise ScenarioError(f"--load: is missing and the scenario has {tested}. Write one of them, or another.")
    if load <= 0 or not (scenario.load_name or load in scenario.loads):
        raise ScenarioError(f"--load {load:g}: is not on the load axis of the scenario, which has {tested}.")
    return load


def check_weights(folder: Path, model: ModelSpec) -> None:
    """ScenarioError unless the Hugging Face `folder` is of a model of the same shape as `model`."""
    from batchsim.deployment.catalog import load_model

    if not folder.is_dir():
        raise ScenarioError(f"--weights {folder}: no such folder. Give the folder of a Hugging Face model.")
    loaded = load_model(str(folder))
    for name in (field.name for field in fields(model) if field.name != "name"):
        ours, theirs = getattr(model, name), getattr(loaded, name)
        if ours != theirs:
            raise ScenarioError(
                f"--weights {folder}: {name} is {theirs}, of the scenario's model {model.name} {ours}. Give weights of"
                f" that model, or --set model={folder}."
            )


def _prompts(texts: Path | None, folder: Path, vocab_size: int) -> Prompts | None:
    """Prompts from the lines of `texts`, by the tokenizer in `folder`; None without `texts`: random tokens."""
    from batchsim.calibrate.engine.prompts import TextPrompts

    if texts is None:
        return None
    prompts = TextPrompts(texts, folder)
    prompts.check(vocab_size)
    return prompts


def load_runner(
    setup: Setup, limits: Sequence[tuple[int, int]], *, device: str, weights: Path | None, graphs: bool | None
) -> ModelRunner:
    """The scenario's model on `device`, with room for steps of all `limits`: (sequences, tokens)."""
    from batchsim.calibrate.engine.runner import build_runner

    return build_runner(
        setup.scenario.model_path if weights is None else str(weights),
        device=device,
        num_blocks=setup.kv.num_blocks,
        block_size=setup.kv.block_size,
        num_swap_blocks=setup.num_swap_blocks,
        max_num_seqs=max(sequences for sequences, _ in limits),
        max_num_batched_tokens=max(tokens for _, tokens in limits),
        max_model_len=setup.max_model_len,
        graphs=graphs,
    )
