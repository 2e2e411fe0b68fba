"""`batchsim doctor`: what is installed, and what is missing for what."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from typer.testing import CliRunner

from batchsim.base.version import VERSION
from batchsim.cli import app


def asked(*options: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_what_runs_here_is_told_with_its_versions() -> None:
    """The package's own requirements are there, since this test runs; each extra says what it is for."""
    found = json.loads(asked("--json"))
    assert found["batchsim"] == VERSION
    simulation = found["simulation"]
    assert simulation["missing"] == [] and simulation["install"] == ""
    assert simulation["found"]["simpy"] == version("simpy") and "torch" not in simulation["found"]
    assert {"serve", "server", "live", "gpus", "ray"} < found.keys()
    assert next(iter(found["serve"]["found"] or found["serve"]["missing"])).startswith("h11")


def test_what_is_missing_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One package gone and one too old: a line of their purpose, and the others are as they were."""

    def without(name: str) -> str:
        if name == "torch":
            raise PackageNotFoundError(name)
        return {"h11": "0.1", "aiohttp": "3.14.5"}.get(name) or version(name)

    monkeypatch.setattr(sys.modules["batchsim.cli.doctor"], "version", without)
    text = " ".join(asked().split())
    assert "GPU: unknown: torch, which looks for it, is not installed" in text
    assert "serve: missing lacks h11>=0.16 (here is 0.1). Install: pip install 'batchsim[serve]'" in text
    assert "calibrate, live, validate on a model: missing lacks torch>=2.11" in text
    assert "Install: pip install 'batchsim[live]'" in text
    assert "calibrate --url: ready aiohttp 3.14.5" in text


def test_a_shell_completes_commands_and_options() -> None:
    """As bash asks: with the words so far, and the number of the one at hand."""
    for words, at, found in (
        ("batchsim expl", "1", "explain"),
        ("batchsim plan --wha", "2", ""),
        ("batchsim run --se", "2", "--set"),
    ):
        asked = {"_BATCHSIM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": at}
        assert CliRunner().invoke(app, [], env=asked, prog_name="batchsim").output.split() == found.split()
