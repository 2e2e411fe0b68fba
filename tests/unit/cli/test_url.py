"""What `batchsim calibrate --url` refuses before it asks a server for anything, one line each."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("aiohttp", reason="pip install 'batchsim[server]'")

from batchsim.cli import app

HERE = "http://127.0.0.1:9"
CALLS = {
    "no file": (["--url", HERE], "-o is missing"),
    "no json": (["--url", HERE, "-o", "{out}.txt"], "does not end in .json"),
    "no time": (["--url", HERE, "-o", "{out}.json", "--minutes", "nan"], "--minutes nan: an experiment takes"),
    "too little time": (["--url", HERE, "-o", "{out}.json", "--minutes", "0.1"], "--minutes 0.1: an experiment takes"),
    "a public address": (["--url", "http://1.1.1.1", "-o", "{out}.json"], "no loopback or private address"),
    "no address": (["--url", "127.0.0.1", "-o", "{out}.json"], "no http or https URL"),
    "nobody there": (["--url", HERE, "-o", "{out}.json"], "cannot be reached"),
    "a log alone": (["--url", HERE, "-o", "{out}.json", "--log", "x.log"], "--log: is read with the scenario"),
    "a device": (
        ["--url", HERE, "-o", "{out}.json", "--device", "cpu"],
        "--device: nothing is measured here",
    ),
    "files": (["--url", HERE, "-o", "{out}.json", "--hold-out", "x"], "--hold-out: is of --bench and --steps, not of"),
    "no url": (["--max-concurrency", "3", "-o", "{out}.json"], "--max-concurrency: is of --url. Add the address"),
    "many policies": (["--url", HERE, "-o", "{out}.json", "--scenario", "systems"], "a server has one policy, of"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_cannot_be_is_one_line(case: str, tmp_path: Path) -> None:
    arguments, message = CALLS[case]
    done = CliRunner().invoke(app, ["calibrate", *(word.format(out=tmp_path / "mine") for word in arguments)])
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())
