"""The unattended campaign on the CPU: interrupted, killed, gone on with, with stages that fail, in bare processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="a campaign runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import BatchsimError
from batchsim.calibrate.engine.session import load_result
from batchsim.cli import app
from batchsim.cost.profile import load_profile
from batchsim.scenario import load_scenario
from batchsim.scenario.point import resolve
from tools.campaign import selfcheck
from tools.campaign.__main__ import Campaign, main
from tools.campaign.plan import SHIPPED, Known, Plan
from tools.campaign.worker import CUT, DONE, Reply, Worker

ROOT = Path(__file__).parents[2]
campaign_app = typer.Typer()
campaign_app.command()(main)
BARE = Path(__file__).parent / "bare"
LIMITS = {"max_seqs": 4, "max_batched_tokens": 32, "max_model_len": 64, "kv_tokens": 256}
TINY = ROOT / "scenarios" / "tiny-llama.json"
SCENARIO = """\
model: TINY
cost: {kind: constant, step: 10ms}
kv: {tokens: 256}
max_model_len: LONGEST
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths:
    prompt: {kind: uniform, min: 8, max: 24}
    output: {kind: uniform, min: 4, max: 16}
  output_cap: 16
  requests: 20
policies:
  continuous: {max_num_seqs: 4, max_num_batched_tokens: 32}
  crashing: {kind: "crashing:Crashing", max_num_seqs: 4, max_num_batched_tokens: 32}
load: {mean_rate: [20/s]}
slo: ttft<1s @ 90%
seeds: 1
"""
CRASHING = """\
import os
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.kernel.protocols import PolicyContext

class Crashing(Continuous):
    def __init__(self, config: ContinuousConfig, context: PolicyContext) -> None:
        super().__init__(config, context)

    def schedule(self, now_ns, drain):
        os._exit(3)
"""


@dataclass(frozen=True)
class Place:
    """A folder with a plan: a live run whose process dies, one that works, and one of a scenario that does not fit."""

    folder: Path

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def stages(self) -> dict[str, Any]:
        return json.loads((self.out / "campaign.json").read_text(encoding="utf-8"))["stages"]

    def command(self, minutes: float) -> list[str]:
        options = {"--out": self.out, "--minutes": minutes, "--device": "cpu", "--plan": self.plan}
        words = [str(word) for pair in options.items() for word in pair]
        return [sys.executable, "-m", "tools.campaign", "--allow-code", *words]

    def environment(self) -> dict[str, str]:
        paths = os.pathsep.join(map(str, (BARE, ROOT, self.folder)))
        return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def call(self, minutes: float) -> subprocess.CompletedProcess[str]:
        """One call to its end."""
        return subprocess.run(
            self.command(minutes), env=self.environment(), capture_output=True, text=True, timeout=120
        )

    def stopped(self, by: signal.Signals) -> tuple[int, str]:
        """One call that gets a signal while at the profile; exit code and stdout, when its last process is gone."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(self.command(2), env=self.environment(), stdout=pipe, stderr=pipe, text=True)
        assert process.stderr is not None
        assert any("loading the model" in line for line in process.stderr)
        process.send_signal(by)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The plan and its files; the user's policy can be imported by the tests too."""
    folder = tmp_path_factory.mktemp("campaign")
    (folder / "crashing.py").write_text(CRASHING, encoding="utf-8")
    plan = {
        "model": str(TINY),
        "second_model": None,
        "profile_minutes": 0.25,
        "options": LIMITS,
        "scenarios": {"small": "small.json", "longer": "longer.json"},
        "points": [["small", "crashing", 0.5, 0], ["small", "continuous", 0.5, 0], ["longer", "continuous", 0.5, 0]],
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name, longest in (("small", 64), ("longer", 128)):
            (folder / f"{name}.yaml").write_text(
                SCENARIO.replace("TINY", str(TINY)).replace("LONGEST", str(longest)), encoding="utf-8"
            )
            text = resolve(load_scenario(str(folder / f"{name}.yaml"), allow_code=True)).to_json()
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        yield Place(folder)


@dataclass(frozen=True)
class History:
    """What four calls with one folder left: stopped by Ctrl-C, killed, run to its end, and with too little time."""

    place: Place
    interrupted: tuple[int, str]
    after_interrupt: dict[str, Any]
    after_kill: dict[str, Any]
    third: subprocess.CompletedProcess[str]
    after_third: dict[str, Any]
    files: dict[Path, int]
    fourth: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def history(place: Place) -> History:
    """About 30 s, shared by the tests that look at one call each."""
    interrupted = place.stopped(signal.SIGINT)
    after_interrupt = place.stages
    place.stopped(signal.SIGKILL)
    after_kill = place.stages
    third = place.call(minutes=2.5)
    after_third = place.stages
    files = {path: path.stat().st_mtime_ns for path in place.out.rglob("*") if path.suffix in (".npz", ".json")}
    return History(place, interrupted, after_interrupt, after_kill, third, after_third, files, place.call(minutes=0.5))


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_says_what_is_left(history: History) -> None:
    """Exit code 130, a table with every stage in it, and the profile's stage is cut."""
    code, table = history.interrupted
    assert code == 130
    assert history.after_interrupt["selfcheck"]["state"] == "done"
    assert history.after_interrupt["profile-tiny-llama"]["reason"] == "interrupted"
    assert [line.split()[0] for line in table.splitlines()[:-1]] == [
        "probe",
        "selfcheck",
        "profile-tiny-llama",
        "live-small-crashing-50-0",
        "live-small-continuous-50-0",
        "live-longer-continuous-50-0",
    ]
    assert table.splitlines()[-1].startswith("2 of 6 stages done.")


@pytest.mark.slow
def test_a_killed_campaign_leaves_a_state_and_goes_on(history: History) -> None:
    """After kill -9 the state can be read and says what was cut; the next call does not check the executor again."""
    assert history.after_kill["profile-tiny-llama"] | {"seconds": 0} == {
        "state": "cut",
        "call": 2,
        "seconds": 0,
        "reason": "killed",
    }
    assert history.after_third["selfcheck"]["call"] == 1
    assert history.after_third["profile-tiny-llama"]["call"] == 3
    assert history.after_third["profile-tiny-llama"]["state"] in ("done", "partial")


@pytest.mark.slow
def test_a_stage_that_fails_is_noted_and_the_next_is_run(history: History) -> None:
    """A process that dies and a scenario that does not fit stop nothing, in a process that has only torch and little
    more."""
    stages = history.after_third
    assert stages["live-small-crashing-50-0"]["reason"] == "its process ended with code 3"
    assert stages["live-small-continuous-50-0"]["state"] in ("done", "void"), history.third.stderr
    assert "max_model_len is 128, the loaded model has 64" in stages["live-longer-continuous-50-0"]["reason"]
    assert history.third.returncode == 1


@pytest.mark.slow
def test_without_time_nothing_is_begun_and_nothing_lost(history: History) -> None:
    """A call too short for any stage changes neither files nor what earlier calls found."""
    assert history.place.stages == history.after_third
    now = {path: path.stat().st_mtime_ns for path in history.files if path.name != "campaign.json"}
    assert now == {path: ns for path, ns in history.files.items() if path.name != "campaign.json"}
    assert "live-small-crashing-50-0" in history.fourth.stdout


@pytest.mark.slow
def test_the_files_are_what_other_commands_read(history: History, tmp_path: Path) -> None:
    """The live run is of the point, and `batchsim validate --from` judges it with the new profile as cost."""
    place = history.place
    played = load_result(place.out / "small" / "live-small-continuous-50-0.npz")
    found = history.after_third["live-small-continuous-50-0"]["result"]
    assert (played.policy, played.load, played.num_blocks) == ("continuous", found["load_rps"], 16)
    assert len(played.kernel_ns) == found["steps"]
    profile = place.out / "profile-tiny-llama.json"
    load_profile(str(profile))
    arguments = [
        "validate",
        str(place.folder / "small.yaml"),
        "--allow-code",
        "--set",
        f"cost={profile}",
        "--policy",
        "continuous",
    ]
    done = CliRunner().invoke(app, [*arguments, "--from", str(place.out / "small"), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert list(tmp_path.glob("validation-*.json"))


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_stopped(place: Place, tmp_path: Path) -> None:
    """It ends as cut, its process is gone, and what it had measured lies in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", place.environment()["PYTHONPATH"])
        worker = Worker(place.plan, tmp_path, "cpu", 60, allow_code=True)
    assert worker.ready.state == DONE, worker.ready.reason
    profile = Plan.read(place.plan, allow_code=True).stages()[2]
    reply = worker.run(profile, 1.0, Known(None, None), 3)
    assert (reply.state, reply.reason, reply.lost) == (CUT, "stopped after 3 s", True)
    assert (tmp_path / "profile-tiny-llama.partial.json").is_file()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_processes_of_these_tests_are_bare(place: Place) -> None:
    """What a GPU machine lacks cannot be imported in them; else the tests above would show nothing."""
    names = ["pandas", "scipy", "simpy", "matplotlib", "pyarrow", "transformers", "safetensors", "tokenizers"]
    tries = (
        f"import importlib\nfor name in {names}:\n try: importlib.import_module(name)\n except ImportError: print(name)"
    )
    done = subprocess.run([sys.executable, "-c", tries], env=place.environment(), capture_output=True, text=True)
    assert done.stdout.split() == names
    own = "exec(compile('import pydantic', 'x', 'exec'), {'__name__': 'batchsim.x'})"  # which typer itself may need
    assert subprocess.run([sys.executable, "-c", own], env=place.environment(), capture_output=True).returncode == 1


def refused(place: Place, out: Path, device: str = "cpu") -> str:
    """The line of a call that stops at once, with exit code 2."""
    words = [
        "-m",
        "tools.campaign",
        "--allow-code",
        "--out",
        str(out),
        "--plan",
        str(place.plan),
        "--device",
        device,
    ]
    done = subprocess.run([sys.executable, *words], env=place.environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    return done.stderr


STATE = {"format": "batchsim-campaign 1", "plan": "0", "device": "cpu", "model": str(TINY), "stages": {}}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "cannot be read"),
        pytest.param('{"stages": []}', "cannot be read", marks=pytest.mark.slow),
        pytest.param(json.dumps(STATE | {"stages": {"probe": {}}}), "cannot be read", marks=pytest.mark.slow),
        (json.dumps(STATE), "was begun with plan 0, now it is"),
        pytest.param(json.dumps(STATE | {"model": "other"}), "was begun with model other", marks=pytest.mark.slow),
        pytest.param(json.dumps(STATE | {"device": "cuda"}), "was begun with device cuda", marks=pytest.mark.slow),
    ],
)
def test_a_folder_of_something_else_is_refused_in_one_line(
    place: Place, tmp_path: Path, state: str, message: str
) -> None:
    """A broken state and one of another plan, model or device: exit code 2, one line, the file left as it is."""
    (tmp_path / "campaign.json").write_text(state, encoding="utf-8")
    assert message in refused(place, tmp_path)
    assert (tmp_path / "campaign.json").read_text(encoding="utf-8") == state


def test_a_device_that_is_not_there_is_refused_in_one_line(place: Place, tmp_path: Path) -> None:
    """No state is left that would claim the folder."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    assert "sees no CUDA device" in refused(place, tmp_path, "cuda")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu", "--minutes", "0.5"], "--device tpu"),
        (["--minutes", "nan"], "--minutes nan"),
        (["--minutes", "inf"], "--minutes inf"),
        (["--plan", "{empty}"], "'scenarios' is missing"),
        (["--out", "{empty}/out"], "cannot be written"),
    ],
)
def test_a_call_that_cannot_work_is_refused_in_one_line(
    place: Place, tmp_path: Path, words: list[str], message: str
) -> None:
    """At the start, with exit code 2, however little time there is, and no folder is begun."""
    empty = tmp_path / "empty.json"
    empty.write_text("{}", encoding="utf-8")
    given = [word.format(empty=empty) for word in words]
    usual = ["--allow-code", "--out", str(tmp_path / "out"), "--plan", str(place.plan), "--device", "cpu"]
    done = CliRunner().invoke(campaign_app, [*usual, *given])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": [["small", "continuous", 0.5, 0]] * 2}, "live-small-continuous-50-0 is there twice"),
        ({"points": [["other", "continuous", 0.5, 0]]}, "names no scenario of the plan"),
        ({"points": [["small", "sjf", 0.5, 0]]}, "has no policy sjf"),
        ({"points": [["small"]]}, "cannot be read as a plan"),
        ({"second_model": str(TINY)}, "profile-tiny-llama is there twice"),
        ({"scenarios": {"small": "nowhere.json"}}, r"scenario small: \S*nowhere.json cannot be read: No such file"),
        ({"points": [["small", "continuous", -0.5, 0]]}, "has the share -0.5"),
        ({"points": [["small", "continuous", float("nan"), 0]]}, "has the share NaN"),
        ({"points": [["small", "continuous", "half", 0]]}, 'has the share "half"'),
        ({"second_model": "no-such-model"}, "no-such-model is neither in the catalog nor a file"),
        ({"options": {"max_seq": 4}}, "max_seq is not known"),
        ({"profile_minutes": float("inf")}, "profile_minutes is inf"),
        ({"scenarios": {"small": "plan.json"}}, "not a resolved scenario"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(place: Place, change: dict[str, Any], message: str) -> None:
    """Before anything is begun, in words that say what is wrong."""
    wrong = place.folder / "wrong.json"
    wrong.write_text(json.dumps(json.loads(place.plan.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(BatchsimError, match=message):
        Plan.read(wrong, allow_code=True)


def test_a_plan_that_says_one_thing_twice_is_refused(place: Place) -> None:
    """Which of both is meant nobody can tell."""
    wrong = place.folder / "twice.json"
    wrong.write_text('{"model": "x", ' + place.plan.read_text(encoding="utf-8")[1:], encoding="utf-8")
    with pytest.raises(BatchsimError, match="'model' is given twice"):
        Plan.read(wrong)


def test_the_shipped_plan_does_the_most_valuable_first() -> None:
    """The order in which a short visit should be spent, and a live run is begun only if its arrivals can end."""
    stages = Plan.read(SHIPPED / "gpu.json").stages()
    assert [stage.name for stage in stages] == [
        "probe",
        "selfcheck",
        "profile-llama-3.1-8b",
        "live-bursty-vllm-80-0",
        "live-bursty-continuous-80-0",
        "live-bursty-vllm-50-0",
        "live-bursty-vllm-80-1",
        "live-bursty-continuous-50-0",
        "live-bursty-continuous-80-1",
        "live-poisson-vllm-80-0",
        "live-bursty-static-80-0",
        "live-bursty-continuous-110-0",
        "profile-qwen2.5-7b",
    ]
    assert all(30 < stage.needs_s < stage.most_s for stage in stages if stage.point is not None)


@pytest.mark.parametrize(
    ("missing", "waits"),
    [
        (["rounds: 2 of 3 done", "energy: not measured"], True),
        (["rounds: 1 of 3 done"], False),
        (["rounds: 2 of 3 done", "block held out: 1 of 6 engine runs not made"], False),
    ],
)
def test_a_profile_that_lacks_only_rounds_waits(tmp_path: Path, missing: list[str], waits: bool) -> None:
    """Two rounds will do for live runs; one, or a block that was not measured, will not."""
    plan = Plan.read(SHIPPED / "gpu.json")
    name = plan.stages()[2].name
    stages = {name: {"state": "partial", "call": 1, "seconds": 1.0, "result": {"missing": missing}}}
    state = STATE | {"plan": plan.digest, "model": plan.model, "device": "cuda", "stages": stages}
    (tmp_path / "campaign.json").write_text(json.dumps(state), encoding="utf-8")
    names = [stage.name for stage in Campaign(SHIPPED / "gpu.json", tmp_path, "cuda", 1.0).stages()]
    planned = [stage.name for stage in plan.stages()]
    assert names == ([*planned[:2], *planned[3:-1], name, planned[-1]] if waits else planned)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_report_says_which_speeds_are_as_they_should_be(tmp_path: Path, device: str) -> None:
    """From the profile and the ceilings of the probe, kept with the state; nothing of a CPU."""
    plan = Plan.read(SHIPPED / "gpu.json")
    profile = plan.stages()[2]
    text = load_profile("h200-llama-3.1-8b-aiconfigurator").to_json()
    (tmp_path / f"{profile.name}.json").write_text(text, encoding="utf-8")
    probed = {"state": "done", "call": 1, "seconds": 1.0, "result": {"matmul_flops": 2000e12}}
    state = STATE | {"plan": plan.digest, "model": plan.model, "device": device, "stages": {"probe": probed}}
    (tmp_path / "campaign.json").write_text(json.dumps(state | {"calls": 1}), encoding="utf-8")
    campaign = Campaign(SHIPPED / "gpu.json", tmp_path, device, 1.0)
    campaign._note(profile, Reply(DONE, {"missing": []}), 0.0)
    *lines, last = campaign.report().splitlines()
    missed = [line for line in lines if line.endswith("%: NOT MET") and line.startswith("matmul ceiling in a prefill")]
    assert len(missed) == (device == "cuda") and last.startswith("2 of 13 stages done.")
    kept = json.loads((tmp_path / "campaign.json").read_text(encoding="utf-8"))
    assert ("targets" in kept) == (device == "cuda")


@pytest.mark.parametrize(
    ("file", "changes"), [("bursty", []), ("poisson", ["workload.arrivals={kind: poisson, mean_rate: 8/s}"])]
)
def test_the_shipped_scenarios_are_what_resolve_writes(tmp_path: Path, file: str, changes: list[str]) -> None:
    """The files beside the plan are those of the shipped YAML, byte for byte."""
    words = [word for change in changes for word in ("--set", change)]
    done = CliRunner().invoke(app, ["resolve", "live-gpu", "-o", str(tmp_path / "new.json"), *words])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "new.json").read_bytes() == (SHIPPED / f"{file}.json").read_bytes()


def test_the_selfcheck_excuses_a_tie_and_nothing_else() -> None:
    """Another token in the middle of an answer is a mistake unless the reference finds both equally likely."""
    reference = selfcheck._runner("cpu", "sdpa")
    answers, _ = selfcheck._answers(reference, {"by": "recompute"}, selfcheck._ROOMY, one_by_one=True)
    right = answers[3]
    wrong = [*right[:4], (right[4] + 1) % selfcheck.SMALL.vocab_size, *right[5:]]
    assert not selfcheck._is_tie(reference, 3, right, wrong)
    assert not selfcheck._is_tie(reference, 3, right, right[:-1])
    with torch.inference_mode():
        reference._head[wrong[4]] = reference._head[right[4]]
    assert selfcheck._is_tie(reference, 3, right, wrong)
