"""A server as a process of this machine's own: started, awaited, and ended however the block ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from batchsim.base.errors import CalibrationError, cut

HOST = "127.0.0.1"
_POLL_S = 0.2
_END_S = 15.0  # from being asked to end to being killed
_LAST_LINES = 3


@dataclass(frozen=True)
class Server:
    """A server that answers on `port` of HOST, its process and its log file."""

    port: int
    pid: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@contextmanager
def running(
    command: Sequence[str], port: int, log: Path, *, environment: Mapping[str, str], start_s: float
) -> Iterator[Server]:
    """The server that `command` starts, once it answers GET /health with 200.

    All it prints is in `log`. CalibrationError where its process ends by itself or `start_s` seconds pass before. When
    the block ends, so do the process and its children.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment,
            start_new_session=True,  # a group of its own, which ends as one
        )  # fmt: skip
    deadline_s = time.monotonic() + start_s
    try:
        while not _healthy(port):
            if (code := process.poll()) is not None:
                raise CalibrationError(f"{log}: the server ended by itself, exit code {code}: {_last_words(log)}")
            if time.monotonic() > deadline_s:
                why = f"the server did not answer within {start_s:g} s: {_last_words(log)}"
                raise CalibrationError(f"{log}: {why}. Try again when the machine is quieter.")
            time.sleep(_POLL_S)
        yield Server(port, process.pid, log)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # by force what is left of the group
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(_END_S)


def free_port() -> int:
    """A port of HOST that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    connection = HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return cut(" / ".join(lines[-_LAST_LINES:]), 300) or "it printed nothing"
