"""Loads for a running engine, kept as files that `batchsim calibrate --bench` is given."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchsim.base.errors import CalibrationError
from batchsim.base.files import write_text
from batchsim.check.measured.read import read_measured
from tools.real_engines.client import Load, send, tidy
from tools.real_engines.engines import MODEL, Engine
from tools.real_engines.server import Server

IDLE = Load("sentinel", 5, (16, 16), (100, 100))
STALLED, TRIES = 0.05, 2
"""The share of a load's time from which on a client without a core is told, and how often a load is tried."""
_SINGLES = (16, 64, 256, 700)  # tokens of prompts that come one at a time
_MIXES = {"short-prompts": ((32, 128), (32, 96)), "long-prompts": ((150, 350), (8, 40))}
_SHARES = {"short-prompts": (0.3, 0.75), "long-prompts": (0.5, 1.5)}  # the last is an overload
_HELD_OUT = "short-prompts-30"  # the rule of calibrate, blind to what loads are for, may take all that come at random
_FULL_ROUNDS = 4  # requests of each slot by which the most is found
_LEAST_S = 5.0

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

    def idle_step_s(self, number: int) -> float:
        """The median over requests sent one after another of the mean time of a decode step."""
        (run,) = read_measured(self.measure(IDLE, f"-{number}"))
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


def measure_given(ask: Asker, seconds: float) -> list[Path]:
    """The files of an experiment that takes about `seconds`: prompts one at a time, users who decode, long contexts,
    and two mixes of lengths below and above saturation."""
    start_s = time.monotonic()
    slots = ask.engine.slots
    loads = [Load(f"single-{prompt}", 4, (prompt, prompt), (24, 24)) for prompt in _SINGLES]
    loads += [Load(f"users-{users}", 3 * users, (16, 48), (60, 100), users=users) for users in _ladder(slots)]
    loads.append(Load("long-contexts", 2 * slots, (400, 700), (30, 60), users=slots // 2))
    files = [ask.measure(load) for load in loads]
    full_rps = {name: ask.full_rps(name, mix) for name, mix in _MIXES.items()}
    rates = [(name, share) for name, shares in _SHARES.items() for share in shares]
    left_s = max((seconds - (time.monotonic() - start_s)) / len(rates), _LEAST_S)
    for number, (name, share) in enumerate(rates):
        rate = share * full_rps[name]
        load = Load(f"{name}-{share:.0%}".rstrip("%"), round(rate * left_s) + 2, *_MIXES[name], rate, seed=number)
        files.append(ask.measure(load))
    return files


def _ladder(slots: int) -> list[int]:
    """2, 4, 8, ... users, up to `slots`."""
    return [2**power for power in range(1, slots.bit_length()) if 2**power <= slots]


def calibrate(ask: Asker, scenario: Path, out: Path, seconds: float) -> None:
    """Writes `out`/mine.json by an experiment and `batchsim calibrate --bench`; what that prints is in calibrate.txt.

    It is written whatever it claims: what is foretold is judged here, by other loads. CalibrationError where it fails.
    """
    files = measure_given(ask, seconds)
    fit(files, scenario, out)


def fit(files: Sequence[Path], scenario: Path, out: Path) -> None:
    """Runs `batchsim calibrate --bench` on the files as a user would, one load of them held out."""
    command = [sys.executable, "-m", "batchsim", "calibrate", "--scenario", str(scenario), "--force"]
    command += [
        "--hold-out",
        _HELD_OUT,
        "-o",
        str(out / "mine.json"),
        *(word for file in files for word in ("--bench", str(file))),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    write_text(out / "calibrate.txt", done.stdout + done.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise CalibrationError(f"{out / 'calibrate.txt'}: exit code {done.returncode}: {last}")
