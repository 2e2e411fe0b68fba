"""Policies that a scenario names by import path: code that runs only where it is allowed, and breaks in one line."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from batchsim.policies.families.continuous import ContinuousConfig
from batchsim.policies.named_policy import find_policy
from batchsim.results.read import load_results
from batchsim.scenario import load_scenario
from tests.support.tiny_scenario import TINY, batchsim, changed, listing

OWN = TINY.replace("  continuous: {max_num", '  mine: {kind: "mine:Mine", max_num')
MINE = """\
print("hello")
from batchsim.policies.families.continuous import Continuous, ContinuousConfig

class Mine(Continuous):
    def __init__(self, config: ContinuousConfig, context):
        super().__init__(config, context)
"""
PLAIN = "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Knobs:\n    max_num_seqs: int\n"
ENDING = MINE + "    def schedule(self, now_ns, drain):\n        raise SystemExit(0)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a scenario names a policy of a module beside it, which is not imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "s.yaml").write_text(OWN)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


COMMANDS: dict[str, list[str]] = {
    "run": ["run", "s.yaml"],
    "set": ["run", "tiny.yaml", "--set", 'policies={mine: {kind: "mine:Mine", max_num_seqs: 8}}'],
    "vary": ["run", "tiny.yaml", "--set", 'vary={policies.continuous.kind: [continuous, "mine:Mine"]}'],
    "plan": ["plan", "s.yaml"],
    "capacity": ["capacity", "s.yaml"],
    "validate": ["validate", "s.yaml"],
}


@pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS)
def test_code_is_not_run_unless_allowed(folder: Path, args: list[str]) -> None:
    """By no command and wherever the name stands: one line says what to add, and the module was not imported."""
    (folder / "tiny.yaml").write_text(TINY)
    before = listing(folder)
    result = batchsim(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert (
        "mine:Mine is code of its own" in result.stderr
        and "Add --allow-code (in Python allow_code=True)" in result.stderr
    )
    assert "mine" not in sys.modules and listing(folder) == before


def test_allowed_code_runs_and_its_results_are_explained(folder: Path) -> None:
    """What it prints is no data; reading needs no code, and a simulation of it anew is asked for again."""
    result = batchsim("run", "s.yaml", "--jobs", 1, "--no-pictures", "--json", "--allow-code")
    assert result.exit_code == 0, result.output
    assert "mine" in json.loads(result.stdout)["policies"] and result.stderr == "hello\n"
    sys.modules.pop("mine")
    explained = batchsim("explain", "results/s", "--policy", "mine", "--json")
    assert explained.exit_code == 0 and "mine" not in sys.modules
    what_if = ["explain", "results/s", "--policy", "mine", "--counterfactual", "kv.tokens=+20%"]
    assert "Add --allow-code" in batchsim(*what_if).stderr
    assert batchsim(*what_if, "--allow-code").exit_code == 0
    traced = batchsim("timeline", "results/s", "--policy", "mine", "-o", "t.json")
    assert traced.exit_code == 0 and "other_us" in Path("t.json").read_text()  # the cost's terms are known all the same


@pytest.mark.slow
def test_processes_of_a_sweep_may_what_the_command_may(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers leave what one process does."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    )
    for jobs in (1, 2):
        assert batchsim("run", "s.yaml", "--jobs", jobs, "--no-pictures", "--allow-code", "--out", jobs).exit_code == 0
    assert load_results("1/s").summary.equals(load_results("2/s").summary)


def test_a_changed_scenario_keeps_its_permission(folder: Path) -> None:
    """And one that was not allowed gets none."""
    from batchsim.scenario import changed as with_overrides

    allowed = load_scenario("s.yaml", allow_code=True)
    assert with_overrides(allowed, ["seeds=1"]).specs[1].kind == "mine:Mine"


MODULES = {
    "exits": ("raise SystemExit(0)", "SystemExit: 0"),
    "exits_without_a_word": ("import sys; sys.exit()", "SystemExit"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "own_base_exception": ("class Odd(BaseException): pass\nraise Odd('x')", "Odd: x"),
    "unspeakable": (
        "class Odd(Exception):\n def __str__(self): raise ValueError\nraise Odd",
        "<exception str() failed>",
    ),
    "prints_and_fails": (
        "print('usage: ' * 900)\nimport sys\nprint('usage', file=sys.stderr)\n1 / 0",
        "ZeroDivisionError",
    ),
    "says_much": ("raise ValueError('x' * 5000)", "ValueError: xxx"),
    "no_python": ("def (", "SyntaxError"),
    "imports_what_is_not_there": (
        "import no_such_module",
        "No module named 'no_such_module'. Is its folder on PYTHONPATH?",
    ),
    "has_no_such_class": ("", "module 'mine' has no attribute 'Mine'"),
    "is_no_policy": ("Mine = int", "mine:Mine has no add, cancel, schedule"),
    "refuses_to_be_asked": (
        "class Meta(type):\n def __getattr__(cls, name): raise SystemExit(0)\nclass Mine(metaclass=Meta): pass",
        "SystemExit: 0",
    ),
    "ends_when_made": (
        f"{MINE}        raise SystemExit(0)\n".removeprefix('print("hello")'),
        "mine:Mine ends the program (SystemExit 0)",
    ),
}


@pytest.mark.parametrize(("text", "said"), MODULES.values(), ids=MODULES)
def test_whatever_allowed_code_does_as_it_is_imported_is_one_line(folder: Path, text: str, said: str) -> None:
    """It ends nothing, prints nothing, and is told in a line: exit code 2."""
    (folder / "mine.py").write_text(text)
    result = batchsim("run", "s.yaml", "--jobs", 1, "--allow-code")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert "s.yaml:13: " in result.stderr and said in result.stderr and len(result.stderr) < 500


@pytest.mark.parametrize(
    "kind", ["no_such_module:Mine", "json:Mine", "json:JSONDecoder", ":", "a:b:c", "venv.__main__:Mine"]
)
def test_names_of_no_policy_are_one_line(folder: Path, kind: str) -> None:
    """Modules of Python's own among them, which may be programs."""
    (folder / "s.yaml").write_text(changed(OWN, "mine:Mine", kind))
    result = batchsim("run", "s.yaml", "--jobs", 1, "--allow-code")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert (
        f"s.yaml:13: policy {kind} cannot be imported: " in result.stderr
        or "s.yaml:13: json:JSONDecoder has no" in result.stderr
    )


def test_a_config_that_does_not_tell_what_others_ask_is_refused(folder: Path) -> None:
    """A dataclass of knobs alone: the line says what to derive it from, with the place in the scenario."""
    (folder / "mine.py").write_text(
        MINE.replace("\nclass Mine", PLAIN + "\nclass Mine").replace(": ContinuousConfig", ": Knobs")
    )
    result = batchsim("run", "s.yaml", "--allow-code")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert "s.yaml:13: mine:Mine: its config is no PolicyConfig" in result.stderr
    assert "Write class Knobs(PolicyConfig), from batchsim.kernel.policy_config." in result.stderr


def test_one_that_is_built_as_ours_has_the_config_of_ours(folder: Path) -> None:
    """A class without an `__init__`, whose module need not know the config's name."""
    (folder / "mine.py").write_text(
        "from batchsim.policies.families.continuous import Continuous\nclass Mine(Continuous): pass\n"
    )
    assert find_policy("mine:Mine", allow_code=True)[0] is ContinuousConfig


def test_ctrl_c_during_an_import_is_ctrl_c(folder: Path) -> None:
    """The real one, which is no error of the module; a process in the background of a script ignores it by default."""
    (folder / "mine.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            find_policy("mine:Mine", allow_code=True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_policy_that_ends_the_program_fails_its_points(folder: Path) -> None:
    """In the middle of a run: the other policy's points are kept, and the exit code says that some failed."""
    (folder / "mine.py").write_text(ENDING)
    result = batchsim("run", "s.yaml", "--jobs", 1, "--no-pictures", "--allow-code")
    assert result.exit_code == 1 and "SystemExit: 0 (mine.py:8)" in result.stderr


AUTO = changed(OWN, "[10/s, 20/s]", "auto")
BEFORE_POINTS = {"capacity": (OWN, ["capacity"]), "auto": (AUTO, ["run"])}


@pytest.mark.parametrize(("text", "command"), BEFORE_POINTS.values(), ids=BEFORE_POINTS)
def test_a_policy_that_ends_the_program_before_there_are_points_is_one_line(
    folder: Path, text: str, command: list[str]
) -> None:
    """Where its overloaded run looks for loads: exit code 2, not the policy's own 0."""
    (folder / "s.yaml").write_text(text)
    (folder / "mine.py").write_text(ENDING.removeprefix('print("hello")'))
    result = batchsim(*command, "s.yaml", "--jobs", 1, "--allow-code")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "ended the program (SystemExit 0). Correct it." in result.stderr


def test_a_policy_that_ends_the_program_on_the_longest_prompt_fails_its_points(folder: Path) -> None:
    """The profile is asked before the first point; what else is wrong with a policy is told there."""
    text = changed(OWN, "{kind: constant, step: 10ms}", "{kind: profile, profile: llama-3.1-8b-h100-vllm-0.24.0}")
    text = changed(text, "tokens: 100", "tokens: 40000")
    text = changed(text, "tokens: 16000", "tokens: 64000")
    (folder / "s.yaml").write_text(changed(text, "  static: {batch_size: 4, max_wait: 100ms}\n", ""))
    (folder / "mine.py").write_text(ENDING)
    result = batchsim("run", "s.yaml", "--jobs", 1, "--no-pictures", "--allow-code")
    assert result.exit_code == 1 and "SystemExit: 0 (mine.py:8)" in result.stderr
