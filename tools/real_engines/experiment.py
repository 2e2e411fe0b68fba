"""Loads for a running engine, kept as files, and its calibration as a user makes it."""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from batchsim.base.errors import CalibrationError
from batchsim.base.files import write_text
from batchsim.check.measured.read import read_measured
from tools.real_engines.client import Load, send, tidy
from tools.real_engines.engines import MODEL, Engine
from tools.real_engines.server import Server

IDLE = Load("sentinel", 40, (16, 16), (100, 100))
STALLED, TRIES = 0.05, 2
"""The share of a load's time from which on a client without a core is told, and how often a load is tried."""
_FULL_ROUNDS = 4  # requests of each slot by which the most is found

Lengths = tuple[int, int]


@dataclass(frozen=True)
class Asker:
    """Sends loads to one server and keeps the answers in `folder`, and in `stalled` the share of each load's time in
    which the client got no core."""

    engine: Engine
    server: Server
    folder: Path
    stalled: list[float] = field(default_factory=list[float])

    def measure(self, load: Load, suffix: str = "") -> Path:
        """The file of the answers to a load, sent again, up to TRIES times in all, where the client was STALLED."""
        for _ in range(TRIES):
            sent = send(self.server.port, MODEL, load, self.engine.shape.words)
            if sent.stalled <= STALLED:
                break
        self.stalled.append(sent.stalled)
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{load.name}{suffix}.csv"
        write_text(path, tidy(load, sent.answers))
        return path

    def idle_step_s(self, suffix: str) -> float:
        """The median over requests sent one after another of the mean time of a decode step."""
        (run,) = read_measured(self.measure(IDLE, suffix))
        assert run.requests is not None, "the file has them one by one"
        return statistics.median(run.requests.latency_s("tpot").tolist())

    def full_rps(self, name: str, mix: tuple[Lengths, Lengths]) -> float:
        """The rate at which requests of the mix are answered while there is one for each slot."""
        slots = self.engine.slots
        (run,) = read_measured(self.measure(Load(f"full-{name}", _FULL_ROUNDS * slots, *mix, users=slots, seed=7)))
        return run.figures["throughput_rps"]

    def load_at(self, name: str, mix: tuple[Lengths, Lengths], share: float, seconds: float, seed: int) -> Load:
        """The load of so many `seconds` at that `share` of `full_rps`."""
        rate = share * self.full_rps(name, mix)
        return Load(name, max(round(rate * seconds), 2), *mix, rate_rps=rate, seed=seed)


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
