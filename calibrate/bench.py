"""Timing single steps: visits of points, several rounds in random order, with a sentinel that shows drift.

A visit puts a step's inputs on the device, runs it once to warm up and then several times; its result is the median.
The sentinel is one step visited again and again: where it drifts, what was measured meanwhile drifted with it. Of its
visits the mean is kept too: what interrupts a step now and then is in the mean of a run, and in no median.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from batchsim.calibrate.inputs import StepInputs
from batchsim.calibrate.point_plan import Point
from batchsim.calibrate.runner import ModelRunner

T = TypeVar("T")

_VISIT_S = {"cuda": 0.1, "cpu": 0.04}  # time of the replays of a visit, about
_REPLAYS = (3, 40)  # at least and at most
_HEAT_S = 0.5  # of running a step bound by arithmetic before it is timed, so that the card's clock has settled
_STAYS_HOT_S = 0.3
_HEAT_TOKENS = 256  # from which on a step is bound by arithmetic
_SENTINEL_S = {"cuda": 10.0, "cpu": 1.0}
_FEWEST_READINGS = 4  # of the sentinel, before its drift is judged
_CALM_SHARE = 0.97  # of the clock's time that this process had the processor, on a CPU that is its own
_QUIET_SHARE, _ATTEMPTS = 0.9, 2  # below that share a visit on a CPU is tried again, and the quieter one counts
_CORRECTED, _FLAGGED = 0.01, 0.05  # drift above which times are corrected, and above which a note says so


@dataclass
class Sample:
    """A point with the median of every visit in ns, and when each was, in seconds since the start of its run."""

    point: Point
    rounds: list[float] = field(default_factory=list)

    @property
    def ns(self) -> float:
        """The median of the visits."""
        return statistics.median(self.rounds)

    @property
    def mad(self) -> float:
        """The median distance of the visits from their median."""
        return statistics.median(abs(x - self.ns) for x in self.rounds)

    def to_row(self) -> dict[str, Any]:
        """As a profile's `samples` hold it."""
        numbers = {"ns": round(self.ns), "mad": round(self.mad), "rounds": [round(x) for x in self.rounds]}
        return self.point.to_row() | numbers

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Sample:
        """The sample that `to_row` wrote."""
        return cls(Point.from_row(row), [float(x) for x in row["rounds"]])


class Bench:
    """Visits points on one runner; `sentinel` is the step that shows drift, `first_ns` its usual time in an earlier
    call, to which this one's times are brought."""

    def __init__(self, runner: ModelRunner, sentinel: Point, seed: int, first_ns: float | None = None) -> None:
        self.runner = runner
        self.sentinel = sentinel
        self.device = runner.device.type
        self.seed = seed
        self.first_ns = first_ns
        self.drift: list[tuple[float, float]] = []  # seconds, ns of the sentinel
        self.means: list[float] = []  # of the same visits, ns
        self._hot_s = -math.inf  # when the last step bound by arithmetic ended
        self._wall_s = self._process_s = 0.0  # of replays: by the clock, and as this process had the processor

    def visit(self, point: Point) -> float:
        """The median time of the step in ns, kernels only."""
        return self.look(point)[0]

    def look(self, point: Point) -> tuple[float, float]:
        """The median time of the step in ns, kernels only, and the mean, which no disturbance is left out of."""
        runner = self.runner
        self.seed += 1
        inputs = StepInputs.synthetic(
            point.decode,
            point.chunks,
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            vocab_size=runner.spec.vocab_size,
            seed=self.seed,
        )
        runner.load(inputs)
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
        """What `measure` returns, and the middle of the time it took; on a CPU of the calmer of two attempts, where
        other programs had much of the first.

        `rest_s` is how many of its seconds `measure` itself had nothing to do.
        """
        found: list[tuple[float, float, T]] = []
        while not found or (self.device == "cpu" and len(found) < _ATTEMPTS and found[-1][0] < _QUIET_SHARE):
            began_s, process_s = time.monotonic(), time.process_time()
            result = measure()
            wall_s, process_s = time.monotonic() - began_s, time.process_time() - process_s
            busy_s = max(wall_s - rest_s(result), process_s)
            self._wall_s += busy_s
            self._process_s += process_s
            found.append((process_s / busy_s, began_s + wall_s / 2, result))
        _, seconds, result = max(found, key=lambda attempt: attempt[0])
        return seconds, result

    def watch(self, *, now: bool = False) -> None:
        """Visits the sentinel if it is time to, or `now`."""
        seconds = time.monotonic()
        if now or not self.drift or seconds - self.drift[-1][0] >= _SENTINEL_S[self.device]:
            median, mean = self.look(self.sentinel)
            self.drift.append((seconds, median))
            self.means.append(mean)

    def factor(self, seconds: float) -> float:
        """By how much steps were slower at that time than usual in the first call; 1 where that cannot be told from
        scatter.

        Of what the sentinel moved, the part that it moves from one visit to the next anyway is not counted.
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
        """By how much this call's usual time is above that of the first call; 1 in the first, and with few readings."""
        usual_ns = self.usual_ns()
        if self.first_ns is None or usual_ns is None or len(self.drift) < _FEWEST_READINGS:
            return 1.0
        return usual_ns / self.first_ns

    def usual_ns(self) -> float | None:
        """The sentinel's usual time in this call; None without a reading."""
        if not self.drift:
            return None
        ns = [value for _, value in self.drift]
        smooth = [statistics.median(ns[max(0, i - 1) : i + 2]) for i in range(len(ns))]
        return statistics.median(smooth)

    def mean_ns(self) -> float | None:
        """The mean time of the sentinel in this call, interruptions included; None without a reading."""
        return statistics.fmean(self.means) if self.means else None

    def notes(self) -> list[str]:
        """What is to be said of drift and of a busy machine; nothing where all was calm."""
        found = []
        middle = statistics.median(ns for _, ns in self.drift) if self.drift else math.nan
        worst = max((abs(ns / middle - 1) for _, ns in self.drift), default=0.0)
        if worst >= _FLAGGED:
            moved = any(self.factor(seconds) != self.level() for seconds, _ in self.drift)
            done = "corrected for" if moved else "no drift but scatter, not corrected"
            found.append(f"drift: the sentinel step was off by up to {100 * worst:.1f} % ({done})")
        if abs(self.level() - 1) >= _FLAGGED:
            found.append(
                f"drift: the machine was {100 * abs(self.level() - 1):.1f} %"
                f" {'slower' if self.level() > 1 else 'faster'} than in the first call (corrected for)"
            )
        share = self._process_s / self._wall_s if self._wall_s else 1.0
        if self.device == "cpu" and share < _CALM_SHARE:
            found.append(
                f"busy machine: other programs took {100 * (1 - share):.0f} % of the time in which steps were measured;"
                " the errors hold their noise"
            )
        return found
