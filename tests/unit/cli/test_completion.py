"""What a shell is told when it asks for the end of a word, as by the script that --install-completion writes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from batchsim.cli import app


def offered(*words: str) -> list[str]:
    """The lines that bash is given for the last of the words."""
    line = " ".join(("batchsim", *words))
    asked = {"_BATCHSIM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    done = CliRunner().invoke(app, [], prog_name="batchsim", env=asked)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("run", "bu"), ["bursty"]),
        (("plan", "plan-"), ["plan-azure-conv"]),
        (("capacity", "bursty", "--policy", "c"), ["continuous"]),
        (("serve", "no-such", "--policy", ""), []),
        (("init", "--gpu", "h200"), ["h200", "h200_sxm"]),
        (("init", "--engine", ""), ["vllm", "sglang", "tensorrt_llm"]),
        (("init", "--model", "llama-3.1-8"), ["llama-3.1-8b"]),
        (("calibrate", "show", "llama-3.1-8b-a100"), ["llama-3.1-8b-a100-vllm-0.14.0"]),
        (("run", "./bu"), []),  # so that the shell offers files
    ],
)
def test_a_shell_is_offered_the_names_that_batchsim_knows(words: tuple[str, ...], names: list[str]) -> None:
    assert offered(*words) == names
