"""Loads for a running engine, kept as files, and its calibration as a user makes it. Requests are sent by the client of
`batchsim calibrate --url`, which `tests.support.over_http` holds to servers whose times are known."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from batchsim.base.errors import CalibrationError
from batchsim.base.files import write_text
from batchsim.check.measured.read import read_measured
from batchsim.check.measured.run import MeasuredRun
from batchsim.fit.server.client import Client, Dialect, Loaded
from batchsim.fit.server.experiment import tidy
from batchsim.fit.server.loads import Lengths, Load
from batchsim.fit.server.prompts import Prompts
from batchsim.fit.server.refusals import refused
from tools.real_engines.engines import MODEL, Engine
from tools.real_engines.server import Server

AMPLE_S = 600.0
"""The time of a load that ends by its number of requests."""
IDLE = Load("sentinel", (16, 16), (100, 100), AMPLE_S, most=40)
MOST, TRIES = 256, 2
"""Requests in flight at most, and how often a load is tried that this machine sends late."""
_FULL_S = 10.0  # in which every slot has requests, by which the most is found


@dataclass(frozen=True)
class Asker:
    """Sends loads to one server and keeps the answers in `folder`, and in `late` the files of those that this machine
    sent late, again and again."""

    engine: Engine
    server: Server
    folder: Path
    late: list[str] = field(default_factory=list[str])

    def measure(self, load: Load, suffix: str = "") -> Path:
        """The file of the answers to a load. MeasuredError where one is refused, cut, or of another length."""
        loaded = Loaded(load)
        for _ in range(TRIES):
            loaded = asyncio.run(self._sent(load))
            if loaded.failure is not None:
                raise refused(load.name, loaded.failure)
            if not loaded.void:
                break
        path = self.folder / f"{load.name}{suffix}.csv"
        self.late.extend([path.name] if loaded.void else [])
        self.folder.mkdir(exist_ok=True)
        write_text(path, tidy(loaded, MOST))
        return path

    async def _sent(self, load: Load) -> Loaded:
        words, loaded = self.engine.shape.words, Loaded(load)
        async with Client(self.server.url, MOST) as client:
            await client.send(load, Dialect(MODEL, Prompts(words.start, words.stop - 1), token_ids=False), loaded)
        return loaded

    def idle_step_s(self, suffix: str) -> float:
        """The median over requests sent one after another of the mean time of a decode step."""
        run = self._run(IDLE, suffix)
        assert run.requests is not None, "the file has them one by one"
        return statistics.median(run.requests.latency_s("tpot").tolist())

    def load_at(self, name: str, mix: tuple[Lengths, Lengths], share: float, seconds: float, seed: int) -> Load:
        """The load of so many `seconds` at that `share` of the rate at which requests of the mix are answered while
        there is one for each slot."""
        slots = self.engine.slots
        full = self._run(Load(f"full-{name}", *mix, _FULL_S, users=slots, seed=7))
        return Load(name, *mix, seconds, rate_rps=share * slots / full.figures["e2e_mean_s"], seed=seed)

    def _run(self, load: Load, suffix: str = "") -> MeasuredRun:
        (run,) = read_measured(self.measure(load, suffix))
        return run


def calibrate(server: Server, slots: int, scenario: Path, out: Path, minutes: float) -> None:
    """Writes `out`/mine.json by `batchsim calibrate --url` as a user would; what that prints is in calibrate.txt.

    It is written whatever it claims: what is foretold is judged here, by other loads. CalibrationError where it fails.
    """
    command = [sys.executable, "-m", "batchsim", "calibrate", "--url", server.url, "--scenario", str(scenario)]
    command += ["--minutes", f"{minutes:g}", "--max-concurrency", str(2 * slots), "-o", str(out / "mine.json")]
    done = subprocess.run([*command, "--force"], capture_output=True, text=True)
    write_text(out / "calibrate.txt", done.stdout + done.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise CalibrationError(f"{out / 'calibrate.txt'}: exit code {done.returncode}: {last}")
