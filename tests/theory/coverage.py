"""How often the printed 95 % intervals contain the truth, by experiment: `python -m tests.theory.coverage [--engine]`.

A trial is what a scenario does by default: three seeds, the first tenth of each left out as warm-up, the mean and the
P99 of the wait of each, and the t-interval over the seeds, all by the code that measures a run. The waits come from
Lindley's recursion, which the engine follows to the nanosecond, or with --engine from the engine (minutes).

Runs must be long for three seeds to be honest. The first requests find the station empty, P99 of a short run is most
often too low and now and then far too high, and a t-interval knows nothing of either. REQUESTS are at least 650 times
the relaxation time, 1/(1-√load)² services in M/M/1; a tenth of that misses (`test_coverage`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool

import numpy as np

from batchsim.metrics.measure import Measured, combine, measure, percentile
from batchsim.metrics.point_inputs import PointInputs
from tests.theory.stations import BLOCK_SIZE, NUM_BLOCKS
from tests.theory.waits import NS_PER_S, SingleServer

REQUESTS = {
    SingleServer(0.5, equal=False): 11_000,
    SingleServer(0.8, equal=False): 66_000,
    SingleServer(0.9, equal=False): 330_000,
    SingleServer(0.5, equal=True): 11_000,
    SingleServer(0.8, equal=True): 44_000,
    SingleServer(0.9, equal=True): 110_000,
}
METRICS = ("queue_time_mean_s", "queue_time_p99_s")
SEEDS = 3  # of a scenario that does not say
WARMUP = 0.1  # of the time in which requests arrive
TRIALS = 400

Measure = Callable[[SingleServer, int, int], Measured]


@dataclass(frozen=True)
class Coverage:
    """Of `trials` intervals the share that contains the truth, and by how much the mean of all runs misses it."""

    covered: float
    bias: float
    trials: int


def by_recursion(queue: SingleServer, seed: int, count: int) -> Measured:
    """Mean and P99 of the waits of a run's cohort."""
    arrivals_ns, waits_ns = queue.waits_ns(seed, count)
    waits_s = waits_ns[arrivals_ns >= _warmup_ns(queue, count)] / NS_PER_S
    values = dict(zip(METRICS, (float(waits_s.mean()), percentile(waits_s, 99)[0]), strict=True))
    return Measured(values, frozenset(), {}, False, "")


def by_engine(queue: SingleServer, seed: int, count: int) -> Measured:
    """All metrics of a run of the engine."""
    records = queue.station.run(seed, count)
    window_ns = (_warmup_ns(queue, count), int(records.requests["sent_ns"].max()))
    return measure(PointInputs(records, window_ns, NUM_BLOCKS, BLOCK_SIZE, streams=True))


def _warmup_ns(queue: SingleServer, count: int) -> int:
    return int(WARMUP * count / queue.station.rate_per_ns)


def coverage(
    queue: SingleServer, count: int, *, trials: int = TRIALS, how: Measure = by_recursion, jobs: int = 1
) -> dict[str, Coverage]:
    """By metric, of trials with `count` requests a seed; trial k has the seeds 3k, 3k + 1 and 3k + 2."""
    run = partial(how, queue, count=count)
    if jobs == 1:
        runs = [run(seed) for seed in range(SEEDS * trials)]
    else:
        with Pool(jobs) as pool:
            runs = pool.map(run, range(SEEDS * trials), chunksize=SEEDS)
    intervals = [combine(runs[first : first + SEEDS]) for first in range(0, len(runs), SEEDS)]
    found = {}
    for metric, truth in queue.truth_s().items():
        pairs = [(each.mean[metric], each.half_width[metric]) for each in intervals]
        hits = [mean is not None and half is not None and abs(mean - truth) <= half for mean, half in pairs]
        bias = np.mean([mean for mean, _ in pairs if mean is not None]) / truth - 1
        found[metric] = Coverage(sum(hits) / trials, float(bias), trials)
    return found


def main() -> None:
    """Prints a line a queue and metric."""
    parser = argparse.ArgumentParser(description="Coverage of 95 % intervals over three seeds.")
    parser.add_argument("--engine", action="store_true", help="run the engine, not the recursion")
    parser.add_argument("--loads", default="0.5,0.8,0.9", help="of the queues to try")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    loads = {float(load) for load in options.loads.split(",")}
    how = by_engine if options.engine else by_recursion
    print(f"{options.trials} trials of {SEEDS} seeds, {how.__name__.replace('_', ' ')}")
    print(f"{'queue':<14}{'requests a seed':>16}  {'metric':<18}{'truth':>9}{'bias':>9}{'covered':>9}")
    for queue, count in REQUESTS.items():
        if queue.load not in loads:
            continue
        found = coverage(queue, count, trials=options.trials, how=how, jobs=options.jobs)
        for metric, truth_s in queue.truth_s().items():
            each = found[metric]
            truth = f"{1e3 * truth_s:.1f} ms"
            print(
                f"{queue!s:<14}{count:>16,}  {metric:<18}{truth:>9}{each.bias:>+9.2%}{each.covered:>9.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
