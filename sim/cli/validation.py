"""What the ways of `batchsim validate` share: the scenario that they read, the files and the report they end in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from batchsim.base.errors import ScenarioError
from batchsim.base.files import Kind, check_replaceable, write_text, writing
from batchsim.cli.common import check_out, check_output, read_scenario

if TYPE_CHECKING:
    from batchsim.report.validation_report import Validation
    from batchsim.scenario import Scenario

_OTHER_FOLDER = "Give another folder with --out."


@dataclass(frozen=True)
class Asked:
    """The options that every way of `validate` has: a scenario with its changes, labels of policies, where files go."""

    scenario: str
    set_: list[str] | None
    traces: Path | None
    allow_code: bool
    policies: Sequence[str]
    name: str | None
    out: Path
    json_file: Path | None

    def __post_init__(self) -> None:
        if self.name and "/" in self.name:
            raise ScenarioError(f"--name {self.name}: is the name of files in --out, not a path. Write it without /.")

    def load(self) -> Scenario:
        """The scenario. ScenarioError where it cannot be read, or varies a key."""
        return read_scenario(self.scenario, self.set_, self.traces, "validate", allow_code=self.allow_code)

    def path(self, way: str, otherwise: str) -> Path:
        """WAY-NAME in --out, NAME being `otherwise` where none was given; its suffix is yet to be added."""
        return self.out / f"{way}-{self.name or otherwise}"

    def check_files(self, stem: Path, kinds: Mapping[str, Kind]) -> None:
        """ScenarioError where a file to be written, `stem` with an end of `kinds`, or --json, a copy of the first,
        would replace what is of another kind: asked before the work."""
        check_out(self.out)
        for end, kind in kinds.items():
            with writing(f"{stem}{end}", "Give another --name, or another folder with --out."):
                check_replaceable(f"{stem}{end}", kind)
        if self.json_file is not None:
            check_output(self.json_file, next(iter(kinds.values())), "Give another path with --json.")

    def check_validation(self, stem: Path, *, steps: bool = False) -> None:
        """`check_files` for what `write` writes; `steps`: a picture of step times too."""
        from batchsim.report.pictures.validation_plots import KIND
        from batchsim.report.text.validation_text import JSON, PAGE

        self.check_files(stem, {".json": JSON, ".md": PAGE, ".png": KIND} | ({"-steps.png": KIND} if steps else {}))

    def write(self, validation: Validation, stem: Path) -> None:
        """Writes a validation as JSON, a page and pictures, names the files on stderr and prints the report."""
        from batchsim.report.pictures.validation_plots import write_pictures
        from batchsim.report.text.validation_text import JSON, PAGE, markdown, report
        from batchsim.report.validation_report import to_json

        text, files = to_json(validation), [Path(f"{stem}.json"), Path(f"{stem}.md")]
        with writing(self.out, _OTHER_FOLDER):
            self.out.mkdir(parents=True, exist_ok=True)
            pictures = write_pictures(validation, stem)
            write_text(files[0], text, JSON)
            write_text(files[1], markdown(validation, [picture.name for picture in pictures]), PAGE)
        if self.json_file is not None and self.json_file.resolve() != files[0].resolve():
            with writing(self.json_file, "Give another path with --json."):
                write_text(self.json_file, text, JSON)
        typer.echo("  ".join(map(str, files + pictures)), err=True)
        typer.echo(report(validation))


def made_of(scenario: Scenario, **facts: Any) -> dict[str, Any]:
    """What results were made with: code, packages, machine, these facts and the scenario."""
    from batchsim.results.provenance import provenance

    return provenance() | facts | {"scenario": scenario.plain}
