"""The campaign of a GPU machine: which commands it runs in which order, what it skips, and how it stops."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from batchsim.base.errors import CalibrationError
from tools.campaign import Campaign, Stage, Visit, main, stages

ROOT = Path(__file__).parents[2]
campaign_app = typer.Typer()
campaign_app.command()(main)


def visit(out: Path, **changes: Any) -> Visit:
    """A campaign on a CPU in `out`."""
    asked = {"device": "cpu", "scenario": "live-demo", "model": "m.json", "policies": ("vllm",), "at": ("80%", "50%")}
    return Visit(**{"out": out, **asked, "changes": (), **changes})


def writes(path: Path, *, code: int = 0, says: str = "") -> tuple[str, ...]:
    """A command that adds a line to `path`, prints a line and ends with `code`."""
    script = f"open({str(path)!r}, 'a').write('x\\n'); print('first'); print({says!r}); raise SystemExit({code})"
    return (sys.executable, "-c", script)


def test_stages_stand_in_order_of_value(tmp_path: Path) -> None:
    """Tests on a GPU alone, the profile, live runs as listed, what the profile lacks, the judgement of all runs."""
    names = [stage.name for stage in stages(visit(tmp_path, device="cuda"), 5.5, 3)]
    assert names == ["tests", "profile", "live-1-80", "live-2-50", "rest-of-profile", "judged"]
    on_cpu = stages(visit(tmp_path, changes=("seeds=1",)), 5.5, 3)
    assert [stage.name for stage in on_cpu] == names[1:]
    profile, live, *_, rest, judged = on_cpu
    assert profile.command == rest.command
    given = ["--set", f"cost={tmp_path}/profile.json", "--set", "seeds=1", "--policy", "vllm"]
    at = ["--device", "cpu", "--at", "80%", "--repeats", "1"]
    assert list(live.command[3:]) == [
        "validate",
        "live-demo",
        *at,
        *given,
        "--name",
        "live-1-80",
        "--out",
        str(tmp_path),
    ]
    assert list(judged.command[3:-4]) == ["validate", "live-demo", "--from", f"{tmp_path}/runs", *given]


@pytest.mark.parametrize(
    ("missing", "first"),
    [
        (["rounds: 2 of 3 done", "energy: not measured"], "live-1-80"),
        (["block held out: 1 of 6 engine runs not made"], "profile"),
    ],
)
def test_a_profile_that_lacks_only_rounds_is_completed_after_the_live_runs(
    tmp_path: Path, missing: list[str], first: str
) -> None:
    """One with a block missing goes on before them; without raw measurements beside it it is whole."""
    (tmp_path / "profile.json").write_text(json.dumps({"missing": missing}))
    (tmp_path / "profile.partial.json").write_text("{}")
    assert next(stage.name for stage in stages(visit(tmp_path), 5.5, 3) if not stage.is_done) == first
    (tmp_path / "profile.partial.json").unlink()
    assert [stage.name for stage in stages(visit(tmp_path), 5.5, 3) if stage.is_done] == ["profile", "rest-of-profile"]


def test_a_stage_whose_result_is_there_is_not_run_again(tmp_path: Path) -> None:
    """What was run, and what it printed, is kept; another call runs only what is left."""
    one, two = tmp_path / "one", tmp_path / "two"
    planned = [Stage("a", writes(one), one, 1), Stage("b", writes(two, says="hello"), two, 1)]
    two.write_text("there\n")
    assert Campaign(visit(tmp_path), 1).run(planned) == ""
    assert (one.read_text(), two.read_text()) == ("x\n", "there\n")
    two.unlink()
    assert Campaign(visit(tmp_path), 1).run(planned) == ""
    assert (one.read_text(), two.read_text()) == ("x\n", "x\n")
    assert (tmp_path / "b.log").read_text() == "first\nhello\n"
    runs = json.loads((tmp_path / "campaign.json").read_text())["runs"]
    assert [(run["stage"], run["command"], run["exit_code"]) for run in runs] == [
        ("a", list(writes(one)), 0),
        ("b", list(writes(two, says="hello")), 0),
    ]


def test_a_stage_that_fails_ends_the_call_in_one_line(tmp_path: Path) -> None:
    """The line ends with its last one; nothing follows; so does a stage that leaves no result."""
    one, two = tmp_path / "one", tmp_path / "two"
    planned = [Stage("a", writes(one, code=2, says="m.json: no such file."), two, 1), Stage("b", writes(two), two, 1)]
    why = Campaign(visit(tmp_path), 1).run(planned)
    assert why == f"a failed with exit code 2: m.json: no such file. (all of it in {tmp_path}/a.failed.log)"
    assert not two.exists()
    none = Campaign(visit(tmp_path), 1).run([Stage("a", (sys.executable, "-c", ""), two, 1)])
    assert none == f"a failed with exit code 0: it printed nothing (all of it in {tmp_path}/a.log)"


def test_the_time_given_is_kept(tmp_path: Path) -> None:
    """A stage that needs more than is left does not begin; one that takes more is stopped, which is noted."""
    endless = (sys.executable, "-c", "import threading; print('at work', flush=True); threading.Event().wait()")
    campaign = Campaign(visit(tmp_path), 2 / 60)
    assert campaign.run([Stage("a", endless, tmp_path / "a", 3)]).startswith("a needs 3 s, ")
    assert not (tmp_path / "campaign.json").exists()
    why = campaign.run([Stage("a", endless, tmp_path / "a", 0)])
    assert why.startswith("a was stopped after ") and why.endswith(" s: the time was up.")
    (run,) = json.loads((tmp_path / "campaign.json").read_text())["runs"]
    assert run["exit_code"] is None
    assert (tmp_path / "a.failed.log").read_text() == "at work\n"


def test_a_calibration_is_told_its_time(tmp_path: Path) -> None:
    """What it is given, or what is left less the time in which its process ends."""
    out = tmp_path / "out"
    command = (sys.executable, "-c", f"import sys; open({str(out)!r}, 'a').write(sys.argv[-2] + sys.argv[-1] + ' ')")
    for given in (0.25, 5.5):
        Campaign(visit(tmp_path), 1).run([Stage("profile", command, tmp_path / "none", 1, minutes=given)])
    first, second = out.read_text().split()
    assert first == "--minutes0.25"
    assert second.startswith("--minutes0.8")


def test_live_runs_are_gathered_to_be_judged(tmp_path: Path) -> None:
    """Of each stage under its name, since all stages number theirs alike."""
    for name in ("live-1-80", "live-2-80"):
        folder = tmp_path / f"validation-{name}-runs"
        folder.mkdir()
        (folder / "00-0.npz").write_bytes(name.encode())
        Campaign(visit(tmp_path), 1).run([Stage(name, writes(tmp_path / name), tmp_path / name, 1)])
    found = {path.name: path.read_text() for path in (tmp_path / "runs").iterdir()}
    assert found == {"live-1-80-00-0.npz": "live-1-80", "live-2-80-00-0.npz": "live-2-80"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "cannot be read"),
        ('{"stages": []}', "cannot be read"),
        ('{"format": "batchsim-campaign 2", "runs": {}, "asked": {}}', "cannot be read"),
        ('{"format": "batchsim-campaign 2", "runs": [], "asked": {"device": "cuda"}}', "begun with device cuda, now"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, state: str, message: str) -> None:
    """A state that is none, or of another campaign, is left as it is."""
    (tmp_path / "campaign.json").write_text(state)
    with pytest.raises(CalibrationError, match=message):
        Campaign(visit(tmp_path), 1)
    assert (tmp_path / "campaign.json").read_text() == state


def test_a_call_ends_in_one_line(tmp_path: Path) -> None:
    """Exit code 2 for a folder that cannot be written, 1 where something is left."""
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(campaign_app, ["--out", str(tmp_path / "file" / "out"), "--device", "cpu"])
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "cannot be written" in refused.stderr
    short = CliRunner().invoke(campaign_app, ["--out", str(tmp_path), "--device", "cpu", "--minutes", "0.5"])
    assert (short.exit_code, short.stderr) == (1, "")
    assert short.stdout.startswith("0 of 7 stages done. profile needs 60 s, ")
    assert short.stdout.endswith(" s are left. The same command goes on.\n")


@pytest.mark.slow
def test_a_campaign_on_a_cpu_comes_to_its_end(tmp_path: Path) -> None:
    """A tiny model is calibrated, run live at half of saturation and judged; the second call has nothing to do."""
    pytest.importorskip("torch", reason="a campaign runs on torch: pip install 'batchsim[live]'")
    words = ["--out", tmp_path, "--device", "cpu", "--model", "scenarios/tiny-llama.json", "--scenario", "live-demo"]
    words += ["--policy", "continuous", "--at", "50%", "--minutes", 20, "--profile-minutes", 0.5, "--live-minutes", 0.5]
    command = [sys.executable, "-m", "tools.campaign", *map(str, words)]
    first, second = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, "4 of 4 stages done.\n"), first.stdout
    assert (second.returncode, second.stdout, second.stderr) == (0, "4 of 4 stages done.\n", "")
    judged = json.loads((tmp_path / "validation-all.json").read_text())
    assert [point["policy"] for point in judged["points"]] == ["continuous"]
