"""Finds the loads of a run whose load axis is `auto`: first how much each policy can serve, then where its curve bends.

Half of a policy's points lie evenly from a fifth of its saturation to a tenth above it. The others cut gaps between
tested loads, two at a time: first the gap in which the SLO is crossed, then those beside the knee and the one where the
queue begins to grow, the widest of equals. Loads have three digits. Where it costs no precision a policy gets a load
that another one has, so that both can be compared at it. Nothing here depends on the number of processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.base.files import write_text
from batchsim.base.units import NS_PER_S
from batchsim.results.checksums import read_sealed, sealed
from batchsim.results.failed import Failed
from batchsim.results.keep import objective_of_all, summary_rows
from batchsim.results.landmarks import Tested, crossing, curve, knee, unstable_from
from batchsim.results.provenance import as_json, identity, short_hash, spec_identity
from batchsim.scenario import Scenario
from batchsim.scenario.setup import Setup
from batchsim.study.curves.lines import Line
from batchsim.study.sweep import overload
from batchsim.study.sweep.points import Sweep, keeping
from batchsim.study.sweep.search import side_by_side
from batchsim.workload.workload_config import ClosedLoop

SATURATION = "saturation"
"""The folder beside the points that keeps the completion rate of every policy's overloaded run."""

COARSE_FROM, COARSE_TO = 0.2, 1.1  # of saturation, evenly
USERS_FROM, USERS_TO = 0.25, 2.0  # of the users at which a closed loop saturates: beyond it nothing breaks at once
BATCH = 2  # points a policy gets before its curve is looked at again
SHARED = 0.08  # how far from the wanted load another policy's may lie to be taken instead, of the load
NARROWEST = 0.015  # gaps below it, of their load, are not halved
LOWEST = 1 / 15  # of saturation: where the SLO is not met there, it is met nowhere
BEYOND = 1.5  # how far it is looked above the highest load where nothing ends there
WORTH_OF_CROSSING, WORTH_OF_KNEE, WORTH_OF_EDGE, WORTH_OF_GROWING = 8.0, 3.0, 2.0, 0.1
"""Weights of gaps between loads: with the SLO crossing in it, beside the knee, below a growing queue, above; else 1."""


@dataclass
class LineSearch:
    """One curve's loads so far. `scale` is its saturation on the load axis, `saturation_rps` the same in requests/s."""

    line: Line
    saturation_rps: float
    scale: float
    results: dict[float, list[dict[str, Any] | Failed]] = field(default_factory=dict)

    def tested(self) -> list[Tested]:
        """The loads simulated so far, from the lowest up."""
        rows = summary_rows(self.line.setup.scenario, [r for results in self.results.values() for r in results])
        return curve(rows, objective_of_all(self.line.setup.scenario))


def find_loads(lines: Sequence[Line], sweep: Sweep) -> tuple[list[dict[str, Any] | Failed], dict[str, float]]:
    """Simulates every line over loads of its own; the results of all points, and saturation in requests/s by line.

    ScenarioError where saturation is undefined, as under sessions.
    """
    rates = saturations(lines, sweep.home, jobs=sweep.jobs, force=sweep.force)
    searches = [LineSearch(line, rates[line.policy], 0.0) for line in lines]
    config = lines[0].setup.scenario.file.load
    assert config is not None, "auto is a load axis"
    known: set[float] = set()
    side_by_side(
        [_looked_for(search, config.num_points, known) for search in searches],
        lambda wanted: _test(sweep, [(searches[i], loads) for i, loads in wanted]),
    )
    results = [result for search in searches for load in sorted(search.results) for result in search.results[load]]
    return results, rates


def _looked_for(search: LineSearch, num_points: int, known: set[float]) -> Generator[list[float], None, None]:
    """Yields the loads that one line wants tested next; `known` are those of all lines."""
    if _axis(search) == "users":
        fewest = [float(_fewest_users(search.line))]
        known.update(fewest)
        yield fewest
    search.scale = _scale(search)
    yield _coarse(search, (num_points + 1) // 2, known)
    while (left := num_points - len(search.results)) > 0:
        loads = _refined(search, min(BATCH, left), known)
        known.update(loads)
        yield loads


def _test(sweep: Sweep, wanted: Sequence[tuple[LineSearch, list[float]]]) -> None:
    """Simulates the loads of every search, the heaviest first so that parallel runs end together."""
    asked = [(search, load) for search, loads in wanted for load in loads]
    asked.sort(key=lambda pair: -pair[1])
    points = [(search, load, point) for search, load in asked for point in search.line.points(load)]
    for (search, load, _), result in zip(points, sweep.attempt([point for _, _, point in points]), strict=True):
        search.results.setdefault(load, []).append(search.line.named(result))


# ---- which loads


def _coarse(search: LineSearch, count: int, known: set[float]) -> list[float]:
    """Evenly spaced loads around the saturation, those of other lines where they lie near."""
    users = _axis(search) == "users"
    low, high = (USERS_FROM, USERS_TO) if users else (COARSE_FROM, COARSE_TO)
    loads: list[float] = []
    for i in range(count):
        wanted = search.scale * (low + (high - low) * i / (count - 1))
        load = _near(wanted, wanted * (1 - SHARED), wanted * (1 + SHARED), known, users)
        if load > 0 and load not in loads and load not in search.results:
            loads.append(load)
    known.update(loads)
    return loads


def _refined(search: LineSearch, count: int, known: set[float]) -> list[float]:
    """The next loads of a search, at most `count`; none where every gap is narrow."""
    users = _axis(search) == "users"
    loads: list[float] = []
    for low, high, parts in _gaps(search.tested(), search.scale, count, not users):
        width = (high - low) / parts
        for i in range(1, parts):
            wanted = low + i * width
            load = _near(wanted, wanted - width / 4, wanted + width / 4, known, users)
            if low < load < high and load not in search.results and load not in loads:
                loads.append(load)
    return loads


def _gaps(tested: list[Tested], scale: float, count: int, can_grow: bool) -> list[tuple[float, float, int]]:
    """The intervals of loads most worth `count` further points, and into how many parts these cut each."""
    parts: dict[tuple[float, float], int] = {}
    weighed = _weighed(tested, scale, can_grow)
    for _ in range(count):
        worth = {
            gap: weight * (gap[1] - gap[0]) / parts.get(gap, 1)
            for gap, weight in weighed.items()
            if gap[1] - gap[0] > NARROWEST * gap[1] * parts.get(gap, 1)
        }
        if not worth:
            break
        best = max(worth, key=lambda gap: (worth[gap], -gap[0]))
        parts[best] = parts.get(best, 1) + 1
    return [(low, high, number) for (low, high), number in sorted(parts.items())]


def _weighed(tested: list[Tested], scale: float, can_grow: bool) -> dict[tuple[float, float], float]:
    """{(low, high): priority} of the intervals in which the next load may be placed: between neighbouring loads, and
    beyond an end where the SLO is not crossed yet, or the queue grows nowhere."""
    loads = [point.load for point in tested]
    if not loads:
        return {}  # every point failed
    slo, bend, grows = crossing(tested), knee(tested), unstable_from(tested)
    weighed: dict[tuple[float, float], float] = {}
    for low, high in itertools.pairwise(loads):
        weight = WORTH_OF_GROWING if grows is not None and low >= grows else 1.0
        if slo.low == low and slo.high == high:
            weight = WORTH_OF_CROSSING
        elif bend is not None and bend.load in (low, high):
            weight = WORTH_OF_KNEE
        elif grows == high:
            weight = WORTH_OF_EDGE
        weighed[low, high] = weight
    if slo.low == loads[-1] and grows is None:  # met at the highest load
        weighed[loads[-1], loads[-1] * BEYOND] = WORTH_OF_CROSSING
    elif grows is None and can_grow:
        weighed[loads[-1], loads[-1] * BEYOND] = 1.0
    if slo.low is None and loads[0] > scale * LOWEST:  # not even met at the lowest
        weighed[0.0, loads[0]] = WORTH_OF_KNEE
    return weighed


def _near(wanted: float, low: float, high: float, known: set[float], whole: bool) -> float:
    """The load of another line nearest to `wanted` between `low` and `high`; else `wanted` with three digits."""
    others = [load for load in known if low <= load <= high]
    if others:
        return min(others, key=lambda load: (abs(load - wanted), load))
    return float(max(1, round(float(f"{wanted:.3g}")))) if whole else float(f"{wanted:.3g}")


# ---- how much a line can serve


def _axis(search: LineSearch) -> str:
    return search.line.setup.scenario.load_name


def _scale(search: LineSearch) -> float:
    """The saturation on the load axis: requests/s; factors of the trace's own rate; or, of a closed loop, the users at
    which it would saturate if no request waited for another (Denning and Buzen, 1978): rate × (E2E alone + thinking).
    """
    line, rate_rps = search.line, search.saturation_rps
    if _axis(search) == "mean_rate":
        return rate_rps
    setup = line.setup
    if _axis(search) == "rate_scale":
        sent = [arrival.request.arrival_ns for arrival in setup.workload(1.0, 0).arrivals()]
        span_s = (sent[-1] - sent[0]) / NS_PER_S
        if not span_s:
            raise _cannot(setup.scenario, "its trace has no time between requests")
        return rate_rps * span_s / len(sent)
    lowest = next(iter(search.tested()), None)
    arrivals = setup.traffic.arrivals
    assert isinstance(arrivals, ClosedLoop), "users are those of a closed loop"
    if lowest is None or lowest.e2e_mean_s is None:
        raise _cannot(setup.scenario, f"{line.policy} completed nothing with {_fewest_users(line)} users")
    return max(rate_rps * (lowest.e2e_mean_s + arrivals.think_time / NS_PER_S), lowest.load)


def _fewest_users(line: Line) -> int:
    """The users of the lowest load: one, or as many as the policy waits for, since no batch fills with fewer."""
    return max(spec.config.traits.waits_for or 1 for spec in line.specs)


def saturations(lines: Sequence[Line], home: Path, *, jobs: int = 1, force: bool = False) -> dict[str, float]:
    """Requests/s that each line completes under overload, the best variant of its `best_of`; kept below `home`.

    ScenarioError where it is undefined.
    """
    runs = [(line, spec) for line in lines for spec in line.specs]
    files = []
    for line, spec in runs:
        _check_auto(line.setup)
        files.append(home / SATURATION / f"{short_hash([identity(line.setup), spec_identity(spec)])}.json")
    rates = {} if force else {i: rate for i, file in enumerate(files) if (rate := _kept(file)) is not None}
    todo = [i for i in range(len(runs)) if i not in rates]
    for number, rate in overload.saturations([(runs[i][0].setup, runs[i][1]) for i in todo], jobs):
        i = todo[number]
        line, spec = runs[i]
        if isinstance(rate, str):
            raise _cannot(line.setup.scenario, f"{spec.name}: {rate}")
        rates[i] = rate
        with keeping(home):
            files[i].parent.mkdir(parents=True, exist_ok=True)
            write_text(files[i], as_json(sealed({"policy": spec.name, "saturation_rps": rate})) + "\n")
    best: dict[str, float] = {}
    for i, (line, _) in enumerate(runs):
        best[line.policy] = max(rates[i], best.get(line.policy, 0.0))
    return best


def _check_auto(setup: Setup) -> None:
    """ScenarioError unless the requests can be piled up at the start, and any load can be asked for."""
    workload = setup.traffic
    if workload.sessions is not None:
        raise _cannot(setup.scenario, "sessions cannot be piled up: a turn needs the answer before it")
    if workload.tasks is not None:
        raise _cannot(setup.scenario, "tasks cannot be piled up: a stage needs the answers before it")
    if name := workload.offline_class:
        raise _cannot(setup.scenario, f"the offline job classes.{name} fills what others leave, whatever their rate")
    scale = None if workload.trace is None else workload.trace.rate_scale
    if setup.scenario.load_name == "rate_scale" and scale is not None and scale.by not in ("compress", "copies"):
        raise _cannot(setup.scenario, f"a trace scaled by {scale.by} cannot take every factor")


def _cannot(scenario: Scenario, why: str) -> ScenarioError:
    name = scenario.load_name
    return ScenarioError(f"{scenario.places.get('load', scenario.source)}: load.{name} auto: {why}. Write a list.")


def _kept(file: Path) -> float | None:
    try:
        return float(read_sealed(file)["saturation_rps"])
    except (OSError, ValueError):
        return None
