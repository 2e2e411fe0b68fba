"""The command line `batchsim`: a thin skin. Stdout is data, stderr is talk; heavy imports are inside the commands."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from sim.errors import BatchsimError

if TYPE_CHECKING:
    from sim.results import Results

app = typer.Typer(
    name="batchsim",
    help="Simulates how batching policies serve LLM requests. Start with: batchsim run bursty",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
trace_app = typer.Typer(help="Looks at request traces.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(trace_app, name="trace")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


P = ParamSpec("P")
T = TypeVar("T")


def one_line_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Turns our own errors into one line on stderr and exit code 2, Ctrl-C into 130. All else is a bug and shows."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except BatchsimError as error:
            typer.echo(" ".join(str(error).split()), err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("interrupted. Points that were done are kept: run the same command again to go on.", err=True)
            raise typer.Exit(130) from None

    return wrapped


@app.command()
@one_line_errors
def run(
    scenario: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped scenario.")],
    jobs: Annotated[int, typer.Option(min=1, help="Simulations at a time.")] = os.cpu_count() or 1,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results"),
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY.KEY=VALUE", help="Change a key.")] = None,
    load: Annotated[float | None, typer.Option(help="The load that the table shows.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run points again that are there already.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="A rejected request is an error.")] = False,
    traces: Annotated[
        Path | None,
        typer.Option(envvar="BATCHSIM_TRACES", help="Folder where relative trace paths are looked for too."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario and compare its policies.

    Examples: batchsim run bursty; batchsim run my.yaml --jobs 2 --set seeds=5 --set 'policies={continuous:
    {max_num_seqs: 64, max_num_batched_tokens: 4096}}'
    """
    from sim.report.plots import write_pictures
    from sim.report.tables import report
    from sim.run import run_scenario
    from sim.scenario import load_scenario

    loaded = load_scenario(scenario, overrides=set_ or [], trace_folders=[traces] if traces else [])
    with _progress() as progress:
        results = run_scenario(loaded, out=out, jobs=jobs, force=force, progress=progress)
    _check_rejections(results, strict)
    pictures = write_pictures(results, load)
    if as_json:
        typer.echo(json.dumps(results.as_json(), indent=1, ensure_ascii=False))
    else:
        typer.echo(report(results, load))
        typer.echo(f"{results.path}/  " + "  ".join(["summary.csv", *(p.name for p in pictures)]))


def _check_rejections(results: Results, strict: bool) -> None:
    """Warns of requests that could never run; an error if a policy took none at all, or with --strict any."""
    for row in results.summary.itertuples():
        if row.rejected and (strict or row.rejected == row.submitted):
            raise BatchsimError(
                f"{row.label} at load {row.load:g} rejected {row.rejected:,.0f} of {row.submitted:,.0f} requests:"
                f" {'; '.join(f'{k} ({v})' for k, v in results.manifest['details'].items())}."
                " Give more KV memory, shorter requests or a larger queue."
            )


class _progress:  # noqa: N801
    """A bar on stderr while points run; nothing where stderr is no terminal."""

    def __enter__(self) -> Callable[[int, int, str], None]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("points, ETA"), TimeRemainingColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
        self._bar.disable = not console.is_terminal
        self._task = self._bar.add_task("starting", total=None)
        self._bar.start()
        return self._update

    def _update(self, done: int, total: int, last: str) -> None:
        self._bar.update(self._task, completed=done, total=total, description=last)

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


@app.command()
@one_line_errors
def policies(as_json: JsonOption = False) -> None:
    """List the policies, where each comes from, and its knobs. Example: batchsim policies --json"""
    from dataclasses import MISSING, fields

    from sim.policies import POLICIES

    rows: list[dict[str, Any]] = []
    for name, (config, policy) in POLICIES.items():
        doc = (sys.modules[policy.__module__].__doc__ or "").strip().splitlines()[0]
        knobs = {
            f.name: "required" if f.default is MISSING and f.default_factory is MISSING else f.default
            for f in fields(config)
        }
        rows.append({"policy": name, "evidence": policy.evidence, "what": doc, "knobs": knobs})
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for row in rows:
        typer.echo(f"{row['policy']:<12} {row['evidence']:<13} {row['what']}")
        typer.echo("             " + ", ".join(f"{k}={v}" if v != "required" else k for k, v in row["knobs"].items()))


@app.command()
@one_line_errors
def catalog(as_json: JsonOption = False) -> None:
    """List the models and GPUs known by name, with their sources. Example: batchsim catalog"""
    from sim.catalog import GPUS, MODEL_SOURCES, MODELS

    models = {
        name: {
            "parameters": m.num_parameters,
            "weight_bytes": m.weight_bytes,
            "kv_bytes_per_token": m.kv_bytes_per_token,
            "max_position_embeddings": m.max_position_embeddings,
            "source": MODEL_SOURCES[name],
        }
        for name, m in MODELS.items()
    }
    gpus = {
        name: {
            "memory_bytes": g.memory_bytes,
            "memory_bandwidth": g.memory_bandwidth,
            "peak_flops": g.peak_flops,
            "source": g.source,
        }
        for name, g in GPUS.items()
    }
    if as_json:
        typer.echo(json.dumps({"models": models, "gpus": gpus}, indent=1, ensure_ascii=False))
        return
    for name, m in models.items():
        typer.echo(
            f"{name:<14} {m['parameters'] / 1e9:5.2f} B parameters  {m['weight_bytes'] / 1e9:6.1f} GB weights"
            f"  {m['kv_bytes_per_token']:>7,} B KV/token  {m['source']}"
        )
    for name, g in gpus.items():
        typer.echo(
            f"{name:<14} {g['memory_bytes'] / 1e9:5.1f} GB  {g['memory_bandwidth'] / 1e12:.2f} TB/s"
            f"  {g['peak_flops'] / 1e12:.0f} TFLOP/s bf16  {g['source']}"
        )


@app.command()
@one_line_errors
def schema() -> None:
    """Print the JSON schema of a scenario file. Example: batchsim schema > scenario.schema.json"""
    from sim.scenario import scenario_schema

    typer.echo(json.dumps(scenario_schema(), indent=1, ensure_ascii=False))


@app.command()
@one_line_errors
def conform(
    files: Annotated[list[Path], typer.Argument(help="Recorded schedules, JSON.")],
    policy: Annotated[str, typer.Option(help="The policy that must make the same schedule.")],
) -> None:
    """Compare a policy with schedules recorded from the real engine, step by step; exit code 1 if any differs.

    Example: batchsim conform recordings/*.json --policy vllm
    """
    from sim.conform import conform as compare

    verdicts = [compare(path, policy) for path in files]
    for verdict in verdicts:
        typer.echo(str(verdict))
    if any(verdict.difference for verdict in verdicts):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
