"""Timing of single steps: each point is visited in several rounds of random order; a sentinel step shows drift.

A visit puts a step's inputs on the device, runs it once to warm up and then several times; its result is the median.
The sentinel is one step visited again and again: where its time drifts, everything measured meanwhile drifted with it.
Its mean is kept too: interruptions now and then are in the mean of a run, and in no median.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from batchsim.calibrate.engine.runner import ModelRunner
from batchsim.calibrate.profile.point_plan import StepShape

T = TypeVar("T")

_VISIT_S = {"cuda": 0.1, "cpu": 0.04}  # seconds of replays in a visit, about
_REPLAYS = (3, 40)  # replays in a visit, at least and at most
_HEAT_S = 0.5  # seconds that a compute-bound step runs before it is timed, so that the card's clock has settled
_STAYS_HOT_S = 0.3
_HEAT_TOKENS = 256  # tokens from which on a step is compute-bound
_SENTINEL_S = {"cuda": 10.0, "cpu": 1.0}
_FEWEST_READINGS = 4  # readings of the sentinel before its drift is judged
_CALM_SHARE = 0.97  # of the clock's time that this process had the processor, on a CPU that is its own
_QUIET_SHARE, _ATTEMPTS = 0.9, 2  # below that share a visit on a CPU is tried again, and the quieter one counts
_CORRECTED, _FLAGGED = 0.01, 0.05  # drift above which times are corrected, and above which a note says so


@dataclass
class MeasuredStep:
    """A measured point: the median time of each visit in ns."""

    point: StepShape
    rounds: list[float] = field(default_factory=list)

    @property
    def ns(self) -> float:
        """Median of the visits, ns."""
        return statistics.median(self.rounds)

    @property
    def mad(self) -> float:
        """Median distance of the visits from their median, ns."""
        return statistics.median(abs(x - self.ns) for x in self.rounds)

    def to_row(self) -> dict[str, Any]:
        """The sample as JSON values, a row of a profile's `samples`."""
        numbers = {"ns": round(self.ns), "mad": round(self.mad), "rounds": [round(x) for x in self.rounds]}
        return self.point.to_row() | numbers

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> MeasuredStep:
        """The sample that `to_row` wrote."""
        return cls(StepShape.from_row(row), [float(x) for x in row["rounds"]])


class Bench:
    """Times points on one runner. `sentinel` is the step that shows drift; `first_ns` its usual time in the first call,
    to whose speed the times of this call are converted, None in the first.
    """

    def __init__(self, runner: ModelRunner, sentinel: StepShape, seed: int, first_ns: float | None = None) -> None:
        self.runner = runner
        self.sentinel = sentinel
        self.device = runner.device.type
        self.seed = seed
        self.first_ns = first_ns
        self.drift: list[tuple[float, float]] = []  # time of each visit of the sentinel (s), its median (ns)
        self.means: list[float] = []  # means of the same visits, ns
        self._hot_s = -math.inf  # when the last compute-bound step ended
        self._wall_s = self._process_s = 0.0  # of replays: by the clock, and as this process had the processor

    def visit(self, point: StepShape) -> float:
        """Median kernel time of the step `point`, ns."""
        return self.look(point)[0]

    def look(self, point: StepShape) -> tuple[float, float]:
        """Median kernel time of the step `point`, and the mean over all its replays, disturbances included; ns."""
        runner = self.runner
        self.seed += 1
        runner.load(runner.synthetic(point.decode, point.chunks, self.seed))
        once = max(runner.replay(1)[0], 1)
        hot = self.device == "cuda" and point.tokens >= _HEAT_TOKENS
        if hot:
            heat_s = _HEAT_S if time.monotonic() - self._hot_s > _STAYS_HOT_S else _HEAT_S / 4
            runner.replay(math.ceil(heat_s * 1e9 / once))
        least, most = _REPLAYS
        replays = min(max(math.ceil(_VISIT_S[self.device] * 1e9 / once), least), most)
        every: list[int] = []

        def replay() -> list[int]:
            times = runner.replay(replays)
            every.extend(times)
            return times

        _, times = self.calmest(replay)
        if hot:
            self._hot_s = time.monotonic()
        return statistics.median(times), statistics.fmean(every)

    def calmest(self, measure: Callable[[], T], rest_s: Callable[[T], float] = lambda _: 0.0) -> tuple[float, T]:
        """(middle of the time it took, in seconds of the monotonic clock; what `measure` returned). On a CPU that other
        programs used meanwhile `measure` is tried again, and the calmer attempt counts.

        `rest_s` gives the seconds in which `measure` itself had nothing to do.
        """
        attempts: list[tuple[float, float, T]] = []
        while not attempts or (self.device == "cpu" and len(attempts) < _ATTEMPTS and attempts[-1][0] < _QUIET_SHARE):
            began_s, process_s = time.monotonic(), time.process_time()
            result = measure()
            wall_s, process_s = time.monotonic() - began_s, time.process_time() - process_s
            busy_s = max(wall_s - rest_s(result), process_s)
            self._wall_s += busy_s
            self._process_s += process_s
            attempts.append((process_s / busy_s, began_s + wall_s / 2, result))
        _, seconds, result = max(attempts, key=lambda attempt: attempt[0])
        return seconds, result

    def watch(self, *, now: bool = False) -> None:
        """Visits the sentinel if the last visit is long enough ago, or `now`."""
        seconds = time.monotonic()
        if now or not self.drift or seconds - self.drift[-1][0] >= _SENTINEL_S[self.device]:
            median, mean = self.look(self.sentinel)
            self.drift.append((seconds, median))
            self.means.append(mean)

    def factor(self, seconds: float) -> float:
        """By which factor steps were slower at the time `seconds` than usual in the first call; 1 with few readings.

        Of the sentinel's deviation, its usual scatter between visits is not counted; within the scatter the factor is
        `level`.
        """
        if len(self.drift) < _FEWEST_READINGS:
            return 1.0
        ns = np.array([value for _, value in self.drift])
        smooth = np.array([np.median(ns[max(0, i - 1) : i + 2]) for i in range(len(ns))])
        middle = np.median(smooth)
        scatter = float(np.median(np.abs(np.diff(ns)))) / middle
        moved = float(np.interp(seconds, [s for s, _ in self.drift], smooth / middle)) - 1.0
        if abs(moved) <= max(_CORRECTED, scatter):
            return self.level()
        return (1.0 + moved - math.copysign(scatter, moved)) * self.level()

    def level(self) -> float:
        """The sentinel's usual time in this call over that in the first call; 1 in the first, and with few readings."""
        usual_ns = self.usual_ns()
        if self.first_ns is None or usual_ns is None or len(self.drift) < _FEWEST_READINGS:
            return 1.0
        return usual_ns / self.first_ns

    def usual_ns(self) -> float | None:
        """The sentinel's usual time in this call, ns: a median of smoothed readings; None without a reading."""
        if not self.drift:
            return None
        ns = [value for _, value in self.drift]
        smooth = [statistics.median(ns[max(0, i - 1) : i + 2]) for i in range(len(ns))]
        return statistics.median(smooth)

    def mean_ns(self) -> float | None:
        """The sentinel's mean time in this call, ns, interruptions included; None without a reading."""
        return statistics.fmean(self.means) if self.means else None

    def notes(self) -> list[str]:
        """Sentences on drift and on a busy machine; [] where all was calm."""
        notes = []
        middle = statistics.median(ns for _, ns in self.drift) if self.drift else math.nan
        worst = max((abs(ns / middle - 1) for _, ns in self.drift), default=0.0)
        if worst >= _FLAGGED:
            moved = any(self.factor(seconds) != self.level() for seconds, _ in self.drift)
            done = "corrected for" if moved else "no drift but scatter, not corrected"
            notes.append(f"drift: the sentinel step was off by up to {100 * worst:.1f} % ({done})")
        if abs(self.level() - 1) >= _FLAGGED:
            notes.append(
                f"drift: the machine was {100 * abs(self.level() - 1):.1f} %"
                f" {'slower' if self.level() > 1 else 'faster'} than in the first call (corrected for)"
            )
        share = self._process_s / self._wall_s if self._wall_s else 1.0
        if self.device == "cpu" and share < _CALM_SHARE:
            notes.append(
                f"busy machine: other programs took {100 * (1 - share):.0f} % of the time in which steps were measured;"
                " the errors hold their noise"
            )
        return notes
