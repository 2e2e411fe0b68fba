"""A real engine's scheduler in a process of its own, which `vllm_worker.py` is, asked in lines of JSON."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError, cut

PROGRAM = Path(__file__).with_name("vllm_worker.py")
INSTALL = (
    "Install it beside batchsim (pip install vllm), or run with another interpreter that has it: --python PATH, in a"
    " policy python: PATH"
)


class Worker:
    """A process that serves any number of schedulers. ScenarioError where it cannot be started, or its interpreter has
    no vLLM. `version` is the engine's."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._numbers = itertools.count()
        self._dropped: list[int] = []
        command = [python, str(PROGRAM)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            raise ScenarioError(f"engine vllm: {cut(python)} cannot be run: {error.strerror}. {INSTALL}.") from None
        atexit.register(self.stop)
        said = self.ask({"hello": True})
        if "error" in said:
            raise ScenarioError(f"engine vllm: {cut(python)} cannot import it ({cut(said['error'])}). {INSTALL}.")
        self.version: str = said["version"]

    def new(self) -> int:
        """A number for one more scheduler."""
        return next(self._numbers)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to `question`, as the head of `vllm_worker.py` has it. ScenarioError if the process has ended."""
        dropped, self._dropped = self._dropped, []
        question = question | {"drop": dropped} if dropped else question
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None and answers is not None
        try:
            to.write(json.dumps(question) + "\n")
            to.flush()
            line = answers.readline()
        except OSError:
            line = ""
        if not line:
            code = self._process.wait()
            raise ScenarioError(f"engine vllm: {cut(self.python)} has ended with exit code {code}. {INSTALL}.")
        return json.loads(line)

    def drop(self, number: int) -> None:
        """Notes that a scheduler is needed no more, for the next question to say: this may be called in one."""
        self._dropped.append(number)

    def stop(self) -> None:
        """Ends the process."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def worker_of(python: str | None) -> Worker:
    """The worker of this process for an interpreter; None: the one that runs batchsim. Started once: the import of an
    engine takes longer than most simulations."""
    return _worker(python or sys.executable, os.getpid())


@cache
def _worker(python: str, process: int) -> Worker:
    return Worker(python)
