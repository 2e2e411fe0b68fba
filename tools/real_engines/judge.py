"""Judges whether `batchsim calibrate` foretells a real engine on this machine: calibrates it, predicts loads that the
calibration was not shown, measures them, and compares.

    python -m tools.real_engines.judge ENGINE -o FOLDER

ENGINE is llama_cpp (`pip install '.[engines]'`) or vllm (`make real-engines`), on this CPU, with a tiny model of random
weights. Exits with 0 where all bounds are met, 1 where one is not, 3 where nothing could be judged.

What is predicted: two rates of one mix of lengths, shares of the most that the engine answers of it, and another mix.
Each is measured several times with the same requests at the same times. Bounds: mean TPOT and mean E2E within LATENCY
or twice the spread of the repeats (`spread` of `validate --against`, half their range), whichever is more, throughput
within THROUGHPUT; TTFT is said. A sentinel, the engine's own decoding of one request after another while it has nothing
else to do, is read before and after the calibration, and after each load: where the mean of the readings
beside the loads differs from that of those beside the calibration by more than MOVED, the machine was another one
than that calibrated, and nothing is judged; nor where the calibrator's own sentinel moved by more; nor where the
client, which has a core to itself on a quiet machine, sent a load late.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from batchsim.base.errors import MeasuredError
from batchsim.base.files import read_text, write_text
from batchsim.check.measured.read import read_measured
from batchsim.check.validation.against import compare
from batchsim.check.validation.comparison import SPREADS, Comparison, MetricError
from batchsim.check.validation.verdicts import Verdict
from batchsim.cli.common import one_line_errors
from batchsim.report.markdown import markdown_table
from batchsim.results.provenance import provenance
from batchsim.scenario.load import load_scenario
from batchsim.scenario.parse import changed
from batchsim.scenario.setup import Setup
from tools.real_engines.engines import Engine, engine_of, serving
from tools.real_engines.experiment import IDLE, Asker, calibrate

LATENCY, THROUGHPUT, MOVED = 0.10, 0.05, 0.05
AT_CALIBRATION = 6  # readings of the sentinel, half of them before the calibration and half after it
WARM_UP_S = 60.0  # of work before the first reading: a machine that has rested is quicker than it will be
MIX, OTHER_MIX = ((64, 256), (16, 64)), ((300, 600), (8, 32))
"""Lengths in tokens of prompts and answers, each drawn evenly."""
RATES = {"light": (MIX, 0.4), "heavy": (MIX, 0.65), "other-mix": (OTHER_MIX, 0.5)}
"""Loads not shown: their mix, and their rate as a share of what the engine completes of that mix at most."""


@dataclass(frozen=True)
class Judgement:
    """What was found: the comparison of each load by name, and what one idle decode step took, in seconds, each time
    that it was asked: AT_CALIBRATION times beside the calibration, then beside the loads. `late`: what was sent late.
    `meanwhile`: by which share the calibrator found a lone answer's time per token changed from the first half of its
    experiment to the second."""

    engine: str
    comparisons: dict[str, Comparison]
    sentinel_s: tuple[float, ...]
    late: tuple[str, ...] = ()
    meanwhile: float = 0.0

    @property
    def moved(self) -> float:
        """The share by which the sentinel's mean beside the loads and that beside the calibration differ."""
        calibrated, measured = (statistics.mean(part) for part in self._readings)
        return max(calibrated, measured) / min(calibrated, measured) - 1

    @property
    def _readings(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.sentinel_s[:AT_CALIBRATION], self.sentinel_s[AT_CALIBRATION:]

    @property
    def unfit(self) -> str:
        """Why nothing can be judged, "" where it can."""
        if self.moved > MOVED:
            return f"the machine moved by {self.moved:.1%}, more than {MOVED:.0%}, by its idle decode step"
        if abs(self.meanwhile) > MOVED:
            return f"the machine moved by {self.meanwhile:+.1%}, more than {MOVED:.0%}, while it was calibrated"
        return f"this machine sent {', '.join(self.late)} late" if self.late else ""

    @property
    def verdicts(self) -> list[Verdict]:
        """A verdict on each bound at each load; none is met or missed where the machine moved."""
        found = [one for name, comparison in self.comparisons.items() for one in verdicts(name, comparison)]
        return [replace(one, met=None) for one in found] if self.unfit else found

    @property
    def word(self) -> str:
        """`met`, `NOT MET`, or `not judged` with the reason."""
        if self.unfit:
            return f"not judged: {self.unfit}"
        return "NOT MET" if any(one.met is False for one in self.verdicts) else "met"

    def lines(self) -> list[str]:
        """The judgement in Markdown."""
        calibrated, measured = (", ".join(f"{1e3 * one:.3f}" for one in part) for part in self._readings)
        idle = f"Idle decode step, ms: {calibrated} beside the calibration, {measured} beside the loads"
        rows = [[one.what, one.bound, one.found, one.word] for one in self.verdicts]
        table = markdown_table(("what", "bound", "found", ""), (False,) * 4, rows)
        return [f"{self.engine}: {self.word}", "", idle, "", table]


def verdicts(load: str, comparison: Comparison) -> list[Verdict]:
    """The verdicts on one load: TPOT, E2E, throughput, and TTFT without a bound."""
    found: list[Verdict] = []
    judged = {"tpot_mean_s": ("mean TPOT", LATENCY), "e2e_mean_s": ("mean E2E", LATENCY)}
    judged |= {"throughput_rps": ("requests/s", THROUGHPUT), "ttft_mean_s": ("mean TTFT", None)}
    for name, (label, least) in judged.items():
        error = comparison.error(name)
        bound = None if least is None else max(least, SPREADS * (error.spread or 0.0) * (least == LATENCY))
        met = None if bound is None else error.error is not None and abs(error.error) <= bound
        found.append(Verdict(f"{load}, {label}", "none" if bound is None else f"{bound:.1%}", _found(error), met))
    return found


def _found(error: MetricError) -> str:
    if error.error is None:
        return "not known on both sides"
    spread = "" if error.spread is None else f", ± {error.spread:.1%}"
    return f"{error.error:+.1%} ({error.simulated:.4g} simulated, {error.live:.4g} measured{spread})"


def judge(
    engine: Engine, out: Path, *, minutes: float, seconds: float, repeats: int, say: Callable[[str], None]
) -> Judgement:
    """Starts the engine, calibrates it for `minutes`, and judges what is then predicted of loads of `seconds` each.

    Half of the `repeats` are measured before the calibration and half after it, so that a machine that slows down does
    not make all loads slower than what was calibrated. `out` gets all that was measured, `mine.json`, and
    `judgement.json` and `.md`. BatchsimError where one of it fails, or where `out` holds something already: what an
    earlier run measured is not this engine's.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise MeasuredError(f"{out}: holds files already. Remove them, or name another folder.")
    scenario = out / "engine.yaml"
    write_text(scenario, engine.scenario())
    with serving(engine, out) as server:
        say(f"{engine.version()} on {server.url}")
        ask = Asker(engine, server, out / "measured")
        ask.measure(replace(IDLE, name="warm-up"))
        warm_up = ask.load_at("heavy", *RATES["heavy"], WARM_UP_S, seed=11)
        ask.measure(replace(warm_up, name="warm-up-heavy"))
        loads = [ask.load_at(name, mix, share, seconds, seed=11) for name, (mix, share) in RATES.items()]
        say("to be predicted: " + ", ".join(f"{load.name} {load.rate_rps:.3g}/s" for load in loads))
        shown, loaded = list[float](), list[float]()
        files: dict[str, list[Path]] = {load.name: [] for load in loads}

        def measure(numbers: range) -> None:
            for number in numbers:
                for load in loads:
                    files[load.name].append(ask.measure(load, f"-{number + 1}"))
                    loaded.append(ask.idle_step_s(f"-loads-{len(loaded) + 1}"))
                say(f"measured {number + 1} of {repeats}, idle decode step {1e3 * loaded[-1]:.3f} ms")

        measure(range(repeats // 2))
        for number in range(AT_CALIBRATION):
            if number == AT_CALIBRATION // 2:
                calibrate(server, engine.slots, scenario, out, minutes)
            shown.append(ask.idle_step_s(f"-calibration-{number + 1}"))
        say(f"calibrated: {out / 'mine.json'}, idle decode step {1e3 * statistics.mean(shown):.3f} ms")
        measure(range(repeats // 2, repeats))
    sentinel_s = (*shown, *loaded)
    comparisons = predict(scenario, str((out / "mine.json").resolve()), files)
    meanwhile = json.loads(read_text(out / "mine" / "experiment.json"))["moved"]
    found = Judgement(engine.version(), comparisons, sentinel_s, tuple(ask.late), meanwhile)
    made = provenance() | {"minutes": minutes, "seconds": seconds, "repeats": repeats}
    whole = {"engine": found.engine, "verdict": found.word, "sentinel_s": sentinel_s, "late": ask.late}
    whole |= {"meanwhile": meanwhile, "rows": [asdict(one) for one in found.verdicts], "made": made}
    write_text(out / "judgement.json", json.dumps(whole, indent=1) + "\n")
    write_text(out / "judgement.md", "\n".join(found.lines()) + "\n")
    return found


def predict(scenario: Path, cost: str, files: dict[str, list[Path]]) -> dict[str, Comparison]:
    """The measured files of each load, repeats of one, beside their simulation with `cost`, as --set has it."""
    loaded = changed(load_scenario(str(scenario)), [f"cost={cost}"])
    setup, (spec,) = Setup.of(loaded), loaded.specs
    return {
        name: compare(setup, spec, [run for file in repeats for run in read_measured(file)], shift=False)
        for name, repeats in files.items()
    }


@one_line_errors
def main(
    engine: str,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for what is measured, and the judgement.")],
    minutes: Annotated[float, typer.Option(help="Time that calibrate is given.")] = 5.0,
    seconds: Annotated[float, typer.Option(help="How long requests of each load are sent.")] = 30.0,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each load.")] = 3,
) -> None:
    """Calibrates an engine, predicts loads that it was not shown, and measures them."""
    found = judge(engine_of(engine), out, minutes=minutes, seconds=seconds, repeats=repeats, say=typer.echo)
    typer.echo("\n".join(found.lines()))
    if found.word != "met":
        raise typer.Exit(1 if found.word == "NOT MET" else 3)


if __name__ == "__main__":
    typer.run(main)
