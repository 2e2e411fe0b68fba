"""What all commands share: errors on one line, and checks made before any work."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperGroup

from batchsim.base.errors import BatchsimError, CalibrationError, PointsFailed, ScenarioError, bounded, shown
from batchsim.base.files import Kind, check_folder, check_writable, keeping_what_is_read, writing
from batchsim.base.units import NS_PER_S, clock_text

if TYPE_CHECKING:
    from batchsim.results.read import Results
    from batchsim.scenario import Scenario
    from batchsim.scenario.config import PolicySpec
    from batchsim.study.sweep.size import Limits

P = ParamSpec("P")
T = TypeVar("T")

# The base of all errors in how a command was called. Typer brings its own or uses Click's, by version.
UsageError: Any = typer.BadParameter.__bases__[0]


def _give_up_stdout() -> None:
    """Points stdout at the null device, so that Python does not flush again, at exit, what stdout refused."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class OneLineGroup(TyperGroup):
    """Typer's command group, but an error in how a command was called is one line, not Typer's usage text."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the command and exits: 0, 1 (a comparison or a point failed), 2 (bad input, or output that cannot be
        written) or 130 (Ctrl-C).
        """
        _check_surroundings()
        try:
            _check_options(extra.get("args", args[0] if args else None) or sys.argv[1:])
            code = super().main(*args, **extra | {"standalone_mode": False})
        except typer.Abort:  # Ctrl-C before or after the command itself
            raise KeyboardInterrupt from None
        except UsageError as error:
            texts: list[str] = (args[0] if args else extra.get("args")) or sys.argv[1:]
            message, command = error.format_message(), error.ctx.command_path if error.ctx else "batchsim"
            if "\n" in message:  # the help text of a group that was called without a command
                typer.echo(message, err=True)
            else:
                message = bounded(message, texts)
                end = "" if message.endswith(("?", ".")) else "."
                typer.echo(f"{command}: {message}{end} See {command} --help.", err=True)
            sys.exit(2)
        except OSError as error:
            if not any(frame.f_code is typer.echo.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
                raise  # the error did not come from printing
            _give_up_stdout()
            with suppress(OSError):  # stderr may be on the same full disk
                typer.echo(f"stdout: cannot be written: {error.strerror}. Send it elsewhere, or make room.", err=True)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


def _check_surroundings() -> None:
    """Ends the program with one line where nothing could come of any command: what it prints into is closed, or the
    folder that paths start from is gone."""
    if sys.stdout is None:  # >&-
        typer.echo("stdout: is closed. Send it somewhere, /dev/null if nothing is to be seen.", err=True)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may hold bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except OSError as error:
        typer.echo(f"the current folder: {error.strerror}. Change to one that is there.", err=True)
        sys.exit(2)


def _check_options(given: Sequence[str]) -> None:
    """Raises UsageError for an option with an empty value, which as a path would mean the current folder, and for bytes
    that are no text, which no table could name."""
    for word in given:
        if any("\udc80" <= letter <= "\udcff" for letter in word):  # as Python reads such a byte
            raise UsageError(f"{shown(word)} is not UTF-8 text. Rename the file")
    for option, value in pairwise((*given, "-")):
        name, equals, text = option.partition("=")
        if name.startswith("-") and ((equals and not text) or (not equals and not value)):
            raise UsageError(f"{name} has an empty value. Write one, or leave the option out")


def one_line_errors(command: Callable[P, T]) -> Callable[P, T]:
    """`command`, with batchsim's own errors and the SystemExit of a user's policy turned into one line on stderr and
    exit code 2 (1 where points failed), Ctrl-C into 130.

    Any other exception is a bug, and shows.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with keeping_what_is_read():
                return command(*args, **kwargs)
        except BatchsimError as error:
            for trace in getattr(error, "__notes__", ()):  # the traceback of a bug inside a worker
                typer.echo(trace, err=True)
            typer.echo("\n".join(bounded(line, _texts(kwargs)) for line in error.lines), err=True)
            raise typer.Exit(1 if isinstance(error, PointsFailed) else 2) from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            line = f"{error.filename}: {error.strerror}. Give the name of a file or a folder."
            typer.echo(bounded(line, _texts(kwargs)), err=True)
            raise typer.Exit(2) from None
        except SystemExit as error:
            line = f"a policy's own code ended the program (SystemExit {shown(error.code)}). Correct it."
            typer.echo(line, err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt as error:
            kept = str(error) or "What was written by then is kept. Run the same command again."
            typer.echo(f"interrupted. {kept}", err=True)
            raise typer.Exit(130) from None

    return wrapped


def _texts(options: dict[str, Any]) -> list[str]:
    """The values given for a command's options, as text."""
    return [str(text) for given in options.values() for text in (given if isinstance(given, list) else [given])]


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr while points run, nothing where that is no terminal; Ctrl-C says how many are kept."""
    counts = (0, 0)
    with _bar() if sys.stderr.isatty() else nullcontext(None) as draw:

        def progress(done: int, total: int, what: str) -> None:
            nonlocal counts
            counts = done, total
            if draw is not None:
                draw(done, total, what)

        try:
            yield progress
        except KeyboardInterrupt:
            kept = "{:,} of {:,} points asked for are kept; the same command goes on from there.".format(*counts)
            raise KeyboardInterrupt(kept if counts[1] else "") from None


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """The bar itself. Its library takes a twentieth of a short command, so that it is imported where it is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("points, ETA"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


EVERY_S = 30.0
"""Seconds between lines of progress where stderr is no terminal."""


@contextmanager
def progress_lines() -> Iterator[Callable[[int, int, str], None]]:
    """As `progress_bar`; where stderr is no terminal, as in CI, a line every EVERY_S seconds."""
    line = line_now_and_then(lambda text: typer.echo(text, err=True), time.monotonic)
    with progress_bar() as bar:

        def progress(done: int, total: int, what: str) -> None:
            bar(done, total, what)
            if not sys.stderr.isatty():
                line(done, total, what)

        yield progress


def line_now_and_then(say: Callable[[str], None], clock_s: Callable[[], float]) -> Callable[[int, int, str], None]:
    """A progress that says how far the points now asked for are, EVERY_S after it began or said so last at the
    earliest."""
    begun_s = said_s = clock_s()

    def progress(done: int, total: int, what: str) -> None:
        nonlocal said_s
        if (now_s := clock_s()) - said_s >= EVERY_S:
            said_s = now_s
            after = clock_text(int((now_s - begun_s) * NS_PER_S))
            say(f"after {after}: {done:,} of the {total:,} points now asked for, {what}")

    return progress


def where_points_run(jobs: int | None, executor: str, address: str | None) -> dict[str, Any]:
    """The arguments `jobs` and `ray` of a Sweep. ScenarioError for options that do not go together."""
    if executor == "ray":
        if jobs is not None:
            raise ScenarioError("--jobs: is for --executor local. On Ray a point takes a CPU of the cluster; drop it.")
        return {"jobs": os.cpu_count() or 1, "ray": address or "auto"}
    if address is not None:
        raise ScenarioError("--address: is for --executor ray. Add that, or drop it.")
    return {"jobs": jobs or os.cpu_count() or 1, "ray": None}


def limits_of(max_points: int, max_memory: str | None) -> Limits:
    """Limits of a sweep: points, and bytes of memory, by default the machine's. ScenarioError if that is no size."""
    from batchsim.base.units import parse_bytes
    from batchsim.study.sweep.size import Limits

    if max_memory is None:
        return Limits(max_points, _machine_bytes())
    try:
        return Limits(max_points, parse_bytes(max_memory))
    except ValueError as error:
        raise ScenarioError(f"--max-memory: {error}") from None


def _machine_bytes() -> int | None:
    """The memory of this machine in bytes; None where the operating system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def read_results(path: Path) -> Results:
    """`load_results`, with its warnings as lines on stderr."""
    from batchsim.results.read import load_results

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        results = load_results(path)
    for each in caught:
        typer.echo(f"! {each.message}", err=True)
    return results


def check_loads(scenario: Scenario) -> None:
    """ScenarioError where the loads are `auto`: `batchsim run` has yet to find them."""
    if scenario.auto:
        where, axis = scenario.places.get("load", scenario.source), scenario.load_name
        raise ScenarioError(f"{where}: load.{axis} is auto, which only batchsim run finds. Write a list of loads.")


def read_scenario(
    name: str, set_: list[str] | None, traces: Path | None, command: str, *, allow_code: bool
) -> Scenario:
    """`load_scenario` for a command that takes one value of every key. ScenarioError where a key is varied."""
    from batchsim.scenario import load_scenario

    folders = [traces] if traces else []
    scenario = load_scenario(name, overrides=set_ or [], trace_folders=folders, allow_code=allow_code)
    if scenario.vary_key:
        raise ScenarioError(
            f"{scenario.places['vary']}: {scenario.vary_key} is varied, and batchsim {command} takes one value."
            " Drop vary, or --set vary=null."
        )
    return scenario


def chosen_policies(scenario: Scenario, labels: Sequence[str]) -> list[PolicySpec]:
    """The policies of these names or labels, all where none is given. ScenarioError where there is none of a label."""
    known = {text for spec in scenario.specs for text in (spec.name, spec.label)}
    if unknown := sorted(set(labels) - known):
        names = ", ".join(spec.name for spec in scenario.specs)
        raise ScenarioError(f"--policy {unknown[0]}: the scenario has {names}. Write one of them.")
    return [spec for spec in scenario.specs if not labels or {spec.name, spec.label} & set(labels)]


def require_torch(command: str) -> None:
    """CalibrationError, saying what to install, where torch is not there."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise CalibrationError(f"batchsim {command}: needs torch, which is not installed. pip install 'batchsim[live]'")


def check_output(path: Path, kind: Kind, advice: str = "Give another path with -o.") -> None:
    """ScenarioError unless a file of `kind` can be written at `path`: asked before the work whose result it is for."""
    with writing(path, advice):
        check_writable(path, kind)


def check_out(folder: Path, advice: str = "Give another folder with --out.") -> None:
    """ScenarioError unless files can be written in `folder`, or it can be made: asked before the work."""
    with writing(folder, advice):
        check_folder(folder)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
