"""A process of its own for a campaign's stages: if it crashes, hangs or loses the device, the campaign goes on.

Only a new process regains a device that one has lost, and memory is surely free when its owner is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchsim.base.errors import BatchsimError, ExecutorError
from tools.campaign.plan import Known, Plan, Stage

if TYPE_CHECKING:
    from tools.campaign.stages import Stages

DONE, FAILED, CUT = "done", "failed", "cut"

_GRACE_S = 10.0
"""Seconds from asking a stage to stop to ending its process."""


@dataclass(frozen=True)
class Reply:
    """How a stage ended: DONE with its result as JSON, FAILED or CUT with the reason. `lost`: the process too."""

    state: str
    result: dict[str, Any]
    reason: str = ""
    lost: bool = False


class Worker:
    """A process that runs stages one by one. `ready` is the identity of its machine, or why it did not start."""

    def __init__(self, plan: Path, out: Path, device: str, most_s: float, *, allow_code: bool = False) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process has no CUDA
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, plan, out, device, allow_code), daemon=True)
        self._process.start()
        theirs.close()
        self.ready = self._reply(most_s)

    def run(self, stage: Stage, minutes: float, known: Known, most_s: float) -> Reply:
        """Runs one stage, stopped after `most_s` seconds. On KeyboardInterrupt the stage runs on until `stop`."""
        with contextlib.suppress(OSError):  # the process is gone, as the reply will say
            self._pipe.send((stage, minutes, known))
        return self._reply(most_s)

    def stop(self, why: str) -> Reply:
        """Interrupts the stage that runs, as Ctrl-C does, and ends the process. A stage that has just ended is DONE."""
        reply = Reply(CUT, {}, why, lost=True)
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)
            if self._pipe.poll(_GRACE_S):
                last = self._received()
                reply = replace(last, lost=True) if last.state == DONE else reply
        self._process.kill()
        self._process.join(_GRACE_S)
        self._pipe.close()
        return reply

    def _reply(self, most_s: float) -> Reply:
        return self._received() if self._pipe.poll(most_s) else self.stop(f"stopped after {most_s:.0f} s")

    def _received(self) -> Reply:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_GRACE_S)
            code = self._process.exitcode
            how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
            return Reply(FAILED, {}, f"its process {how}", lost=True)


def _serve(pipe: Connection, plan: Path, out: Path, device: str, allow_code: bool) -> None:
    """The process's main function: reports that it is ready, then runs the stages it is sent until the pipe ends."""
    with contextlib.suppress(OSError):
        os.setsid()  # Ctrl-C in a terminal goes to the campaign, which passes it on
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        from tools.campaign.stages import Stages

        stages = Stages(Plan.read(plan, allow_code=allow_code), out, device)
        pipe.send(Reply(DONE, stages.identity))
        while True:
            pipe.send(_run(stages, *pipe.recv()))
    except (EOFError, OSError, KeyboardInterrupt):
        return
    except Exception as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends anyway
        pipe.send(_failure(error))
    finally:
        pipe.close()


def _run(stages: Stages, stage: Stage, minutes: float, known: Known) -> Reply:
    try:
        return Reply(DONE, json.loads(json.dumps(stages.run(stage, minutes, known))))
    except KeyboardInterrupt:
        return Reply(CUT, {}, "interrupted", lost=True)
    except Exception as error:  # whatever fails, the next stage is worth trying
        return _failure(error)


def _failure(error: Exception) -> Reply:
    """The reply for `error`: one line for our own, else also where it was raised. A failed device loses the process."""
    if isinstance(error, BatchsimError):
        return Reply(FAILED, {}, " ".join(str(error).split()), lost=isinstance(error, ExecutorError))
    traceback.print_exception(error, file=sys.stderr)
    *_, last = traceback.extract_tb(error.__traceback__)
    where = f"{Path(last.filename).name}:{last.lineno}"
    return Reply(FAILED, {}, f"{where}: {type(error).__name__}: {' '.join(str(error).split())}", lost=True)


def _end_with_parent() -> None:
    """Makes this process end when the campaign's does, so that nothing keeps the device."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process of a campaign"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
