"""`batchsim doctor`: what is installed, and what is missing for what."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import typer

from batchsim.cli import option
from batchsim.cli.common import one_line_errors, print_json

PURPOSES = {
    "": "run, capacity, plan, explain, trace",
    "serve": "serve",
    "server": "calibrate --url",
    "live": "calibrate, live, validate on a model",
    "gpus": "deployments without a shipped profile",
    "ray": "run --executor ray",
}
"""What each extra is for, in the words of the commands; "": the package itself."""


@dataclass(frozen=True)
class Part:
    """The packages that one purpose needs: `found`, their versions by name, of `missing` ones what is asked for."""

    extra: str
    purpose: str
    versions: dict[str, str]
    missing: tuple[str, ...]

    @property
    def install(self) -> str:
        """The command that installs what is missing; "" where nothing is."""
        return f"pip install 'batchsim{f'[{self.extra}]' if self.extra else ''}'" if self.missing else ""


def parts() -> list[Part]:
    """What is found and what is missing, for each of PURPOSES, by the requirements of the installed package.

    A package older or newer than is asked for is missing.
    """
    from packaging.requirements import Requirement

    asked = [Requirement(line) for line in requires("batchsim") or []]
    rows: list[Part] = []
    for extra, purpose in PURPOSES.items():
        versions, missing = dict[str, str](), list[str]()
        for one in asked:
            holds, without = (one.marker is None or one.marker.evaluate({"extra": name}) for name in (extra, ""))
            if one.name == "batchsim" or not holds or (extra and without):
                continue
            here = _version(one.name)
            if here is not None and one.specifier.contains(here, prereleases=True):
                versions[one.name] = here
            else:
                missing.append(f"{one.name}{one.specifier}" + (f" (here is {here})" if here is not None else ""))
        rows.append(Part(extra, purpose, versions, tuple(missing)))
    return rows


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def gpu() -> str:
    """The GPUs that torch sees, in words."""
    if _version("torch") is None:
        return "unknown: torch, which looks for it, is not installed"
    from batchsim.calibrate.engine.footprint import gpus_seen

    return ", ".join(gpus_seen()) or "none that torch can use; calibrate and live run on the CPU"


@one_line_errors
def doctor(as_json: option.Json = False) -> None:
    """Say what is installed, and what is missing for what. Example: batchsim doctor"""
    from batchsim.base.version import VERSION
    from batchsim.report.layout import filled
    from batchsim.results.provenance import provenance

    machine, rows, device = provenance()["machine"], parts(), gpu()
    if as_json:
        report: dict[str, Any] = {"batchsim": VERSION, "python": platform.python_version(), "machine": machine}
        report |= {"gpu": device}
        for part in rows:
            report[part.extra or "simulation"] = {
                "purpose": part.purpose,
                "found": part.versions,
                "missing": list(part.missing),
                "install": part.install,
            }
        print_json(report)
        return
    typer.echo(f"batchsim {VERSION}, Python {platform.python_version()}, {machine}\nGPU: {device}")
    indent = " " * 4
    for part in rows:
        typer.echo(f"{part.purpose}: {'missing' if part.missing else 'ready'}")
        if part.missing:
            lines = filled(f"lacks {', '.join(part.missing)}. Install: {part.install}", indent, indent)
        else:
            lines = filled(", ".join(f"{name} {here}" for name, here in part.versions.items()), indent, indent)
        typer.echo("\n".join(lines))
