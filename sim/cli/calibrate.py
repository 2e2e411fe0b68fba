"""`batchsim calibrate`: measures a model on a device, fits step costs to what others measured, or shows a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsim.base.errors import CalibrationError
from batchsim.base.files import writing
from batchsim.base.ranges import INT32_MAX
from batchsim.cli import complete, option
from batchsim.cli.bench import FitOptions, calibrate_bench
from batchsim.cli.common import OneLineGroup, check_output, one_line_errors, require_torch
from batchsim.cli.steps import calibrate_steps
from batchsim.cli.url import calibrate_url

_ANOTHER = "Give -o another path."

_LISTS = ("--bench", "--steps", "--hold-out")
"""Options that take all the values up to the next option, so that a shell's *.json can follow them."""

_OF_FIT = ("scenario", "policy", "set_", "force", "allow_code")
_OF = {
    "--bench": ("bench", "hold_out", "part", *_OF_FIT),
    "--steps": ("steps", "hold_out", *_OF_FIT),
    "--url": ("url", "model", "minutes", "max_concurrency", "max_requests", "log", "api_key", "yes", *_OF_FIT),
    "": ("model", "device", "minutes", "max_seqs", "max_batched_tokens", "max_model_len", "kv_tokens", "block_size",
         "graphs", "seed", "name"),
}  # fmt: skip
"""Options by the one that says what is done; without it a model is measured here."""

_GIVEN = {"--bench": "files of measured runs", "--steps": "an engine's logs", "--url": "the address of a server"}
"""What each of them is given."""


class _Group(OneLineGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes `--bench A B` as `--bench A --bench B`."""
        spread: list[str] = []
        of = ""
        for word in args:
            if of and not word.startswith("-") and spread[-1] != of:
                spread.append(of)
            elif word.startswith("-"):
                of = word if word in _LISTS else ""
            spread.append(word)
        return super().parse_args(ctx, spread)


calibrate_app = typer.Typer(
    cls=_Group,
    help="Measure what steps cost, here or on a server, or fit it to benchmarks; show profiles.",
    add_completion=False,
    invoke_without_command=True,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@calibrate_app.callback()
@one_line_errors
def calibrate(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Catalog name, config.json or Hugging Face folder.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The profile to write.")] = None,
    minutes: Annotated[float, typer.Option(help="Time for this call; the same call again goes on.")] = 8.0,
    max_seqs: Annotated[int | None, typer.Option(min=1, max=INT32_MAX, help="Most sequences of a step.")] = None,
    max_batched_tokens: Annotated[int | None, typer.Option(min=1, max=INT32_MAX, help="Most tokens of a step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, max=INT32_MAX, help="Most tokens of a sequence.")] = None,
    kv_tokens: Annotated[int | None, typer.Option(min=1, max=INT32_MAX, help="KV pool, not measured.")] = None,
    block_size: Annotated[int, typer.Option(min=1, max=INT32_MAX, help="Tokens of a KV block.")] = 16,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="CUDA graphs for decode steps.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=INT32_MAX, help="Of weights, inputs and order.")] = 0,
    name: Annotated[str | None, typer.Option(help="Name in the profile; default: device and model.")] = None,
    bench: Annotated[
        list[Path] | None, typer.Option(metavar="FILES", help="Fit to measured runs of your engine; measures nothing.")
    ] = None,
    steps: Annotated[
        list[Path] | None,
        typer.Option(metavar="LOGS", help="Fit to steps in logs of vLLM, SGLang or Dynamo; measures nothing."),
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help="Of --bench, --steps and --url: engine, model, cost and KV.")
    ] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILES", help="Of --bench: runs to judge by alone, files or pieces of names; of --steps: logs."
        ),
    ] = None,
    part: Annotated[list[str] | None, typer.Option(help="Of --bench: the runs whose name holds this.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Of --bench and --steps: the policy, where the scenario has more.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Measure your running OpenAI-compatible server: http://127.0.0.1:8000.")
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Of --url: most requests in flight; default twice max_num_seqs, or 64."),
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, max=INT32_MAX, help="Of --url: most requests in all.")] = 20_000,
    log: Annotated[Path | None, typer.Option(help="Of --url: the engine's start-up log, which says its KV.")] = None,
    api_key: Annotated[str, typer.Option(envvar="BATCHSIM_API_KEY", help="Of --url: the server's key.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Of --url: the server may be at a public address.")] = False,
    set_: option.Set = None,
    force: Annotated[bool, typer.Option("--force", help="Write a fit that errs by more than it claims.")] = False,
    allow_code: option.AllowCode = False,
) -> None:
    """Measure what steps of a model cost on this machine and write a profile; or fit them to benchmarks of an engine.

    Examples: batchsim calibrate --model llama-3.1-8b --device cuda -o h200.json; batchsim calibrate show h200.json;
    batchsim calibrate --bench results/*.json --scenario mine.yaml -o mine.json;
    batchsim calibrate --steps vllm.log --scenario mine.yaml -o mine.json;
    batchsim calibrate --url http://127.0.0.1:8000 --scenario mine.yaml -o mine.json
    """
    if context.invoked_subcommand is not None:
        return
    ways = [way for way, value in (("--url", url is not None), ("--bench", bench), ("--steps", steps)) if value]
    _check_given(context, ways[0] if ways else "")
    options = FitOptions(scenario, out, policy, set_, force, allow_code)
    if url is not None:
        calibrate_url(
            options,
            url,
            model=model,
            minutes=minutes,
            max_concurrency=max_concurrency,
            max_requests=max_requests,
            log=log,
            api_key=api_key,
            yes=yes,
        )
        return
    if bench:
        calibrate_bench(options, bench, part or [], hold_out or [])
        return
    if steps:
        calibrate_steps(options, steps, hold_out or [])
        return
    for given, value in (("--model", model), ("--device", device), ("-o", out)):
        if value is None:
            raise CalibrationError(f"calibrate: {given} is missing. Give --model, --device and -o PROFILE.")
    assert model is not None and device is not None and out is not None
    if not math.isfinite(minutes):
        raise CalibrationError(f"--minutes {minutes:g}: is not a time. Give a number of minutes.")
    require_torch("calibrate")
    from batchsim.calibrate.profile.calibration import Options
    from batchsim.calibrate.profile.calibration import calibrate as measure
    from batchsim.report.text.profile_text import summary

    options = Options(
        model=model,
        device=device,
        minutes=minutes,
        max_seqs=max_seqs,
        max_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        block_size=block_size,
        graphs=graphs,
        seed=seed,
        name=name,
    )
    with _progress_bar() as progress:
        profile = measure(options, out, progress)
    typer.echo(summary(profile))
    typer.echo(f"{out}: use it with cost: {out}, look at it with batchsim calibrate show {out}")


def _check_given(context: typer.Context, way: str) -> None:
    """CalibrationError for an option that is not one of `way` of _OF."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name == "out" or name in _OF[way]:
            continue
        given, ways = f"--{name.strip('_').replace('_', '-')}", [one for one in _OF if one and name in _OF[one]]
        if way and not ways:
            raise CalibrationError(f"{given}: nothing is measured here with {way}. Drop one of them.")
        of = _listed(ways, "and")
        if way:
            raise CalibrationError(f"{given}: is of {of}, not of {way}. Drop one of them.")
        raise CalibrationError(f"{given}: is of {of}. Add {_listed([_GIVEN[one] for one in ways], 'or')}, or drop it.")


def _listed(words: Sequence[str], last: str) -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


@calibrate_app.command()
@one_line_errors
def show(
    profile: Annotated[
        str, typer.Argument(help="A profile's file, or the name of a shipped one.", autocompletion=complete.profiles)
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where to draw it, a .png.")] = None,
) -> None:
    """Print a profile, and draw it with -o: measured against fitted, what is left over, the curves.

    Example: batchsim calibrate show llama-3.1-8b-h200-vllm-0.24.0 -o profile.png
    """
    from batchsim.cost.profile import load_profile
    from batchsim.report.text.profile_text import table

    if out is not None and out.suffix.lower() != ".png":
        raise CalibrationError(f"-o {out}: does not end in .png, which is what is drawn. Give a name that does.")
    if out is not None:
        from batchsim.report.pictures.profile_picture import KIND

        check_output(out, KIND, _ANOTHER)
    loaded = load_profile(profile)
    typer.echo(table(loaded))
    if out is not None:
        from batchsim.report.pictures.profile_picture import draw_profile

        with writing(out, _ANOTHER):
            draw_profile(loaded, out)
        typer.echo(str(out))


@calibrate_app.command()
@one_line_errors
def compare(
    profiles: Annotated[
        list[str] | None, typer.Argument(help="Profiles of deployments; default: all that come with batchsim.")
    ] = None,
) -> None:
    """Hold profiles of deployments against the installed kernel tables: 200 random steps, as the tables sum them.

    Example: batchsim calibrate compare llama-3.1-70b-h100-vllm-0.24.0-tp4-fp8
    """
    from batchsim.cost.profile import load_profile, profile_names
    from batchsim.tables.compare import HEAD, compared, line, within

    beyond = 0
    for number, name in enumerate(profiles or profile_names()):
        profile = compared(load_profile(name))
        typer.echo(line(profile) if number else f"{HEAD}\n{line(profile)}")
        beyond += not within(profile)
    if beyond:
        raise typer.Exit(1)


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr; where stderr is no terminal, a line whenever the work changes."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console, message = Console(stderr=True), [""]

    def say(what: str, share: float) -> None:
        stage = what.partition(":")[0]
        if stage != message[-1]:
            message.append(stage)
            typer.echo(f"{share:>4.0%} {stage}", err=True)

    if not console.is_terminal:
        yield say
        return
    columns = (TextColumn("{task.description:<44}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
