"""Fits the constants of an engine's preset to its measured points: `python -m tests.silicon.fit --engine vllm`.

Prints the lines of the table in `batchsim.cost.in_engine`, and with `--way` fits the way between client and engine too,
all to the GIVEN half. Each point is simulated as the tables have it, with steps of decodes changed, and with steps
with prompts changed; in between, the means of TPOT and TTFT are taken for straight lines. `--left-out` fits as often
as there are deployments, each time without one, and prints what is then missed of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import BatchsimError
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.in_engine import Measured, in_engine
from batchsim.cost.presets import Preset, preset_of
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from tests.silicon.__main__ import simulated
from tests.silicon.rows import CHECKPOINTS, Row, given_rows, scenario_text

_STEP, _SHIFT_NS = 0.1, -1e6  # by how much steps are changed to see what that does
_PROMPTS = np.arange(0.5, 1.81, 0.02)
_WAYS = list(product(np.arange(0, 26, 2.5), np.arange(0, 9, 1.5), np.arange(0.2, 1.01, 0.1)))  # ms, us a token, ms
_MOST = 0.6  # of a point's error counts: some runs stalled
_AGREE = 0.15  # points that a fit leaves further off in the median disagree among themselves: it is not used
_STALLED = 0.4  # nor is a factor on prompts that leaves TTFT further off: it is not prompts that take the time
_OTHERWISE = 0.4  # nor is one that changes steps by more than this: such points are of an engine that drafts, say

Key = tuple[str, str, str, int, str]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Lines:
    """The means of one point in ms: as the tables have it, and what a step's change adds; (TTFT, TPOT) each."""

    row: Row
    key: Key
    base: tuple[float, float]
    decode: tuple[float, float]
    prompts: tuple[float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "sglang", "tensorrt_llm"), required=True)
    parser.add_argument("--way", action="store_true", help="fits the way there too, on a grid")
    parser.add_argument("--left-out", action="store_true", help="judges the fit at deployments left out of it")
    args = parser.parse_args()
    preset = preset_of(args.engine, ahead=True)
    assert preset is not None
    points = list(_points([row for row in given_rows() if row.engine == args.engine and not row.gap], preset))
    way = (preset.request_ns / 1e6, preset.per_prompt_token_ns / 1e3, preset.per_stream_ns / 1e6)
    for _ in range(2 if args.way else 0):
        way = _way(points, _fitted(points, preset, way))
    found = _fitted(points, preset, way)
    print(f"way: {way[0]:g} ms + {way[1]:g} us a prompt token + {way[2]:g} ms a stream")
    for key in sorted(found):
        measured = _measured(key, found[key], [each for each in points if each.key == key], preset, way)
        print(_line(measured))
    print(f"all: {_said(points, found, way)}")
    if args.left_out:
        print(f"left out: {_left_out(points, preset, way)}")
    return 0


# ---- simulations


def _points(rows: Sequence[Row], preset: Preset) -> Iterator[Lines]:
    lacking: set[str] = set()  # deployments without tables
    for number, row in enumerate(rows, 1):
        if row.deployment in lacking:
            continue
        try:
            setup = _bare(row)
        except BatchsimError:
            lacking.add(row.deployment)
            continue
        cost = setup.cost
        assert isinstance(cost, Calibrated) and cost.profile.setup is not None
        host = replace(preset.host or cost.host, assumed=False)  # as if stated, so that nothing fitted comes on top
        changed = {"shift_ns": _SHIFT_NS} if preset.form == "shift" else {"decode": 1 + _STEP}
        base, decode, prompts = (
            simulated(
                replace(setup, cost=cost.of(replace(cost.profile, costs=in_engine(cost.profile.costs, **how)), host))
            )
            for how in ({}, changed, {"prompts": 1 + _STEP})
        )
        its = cost.profile.setup
        key = (str(cost.profile.gpu), its.weight_dtype, its.moe_dtype, its.ep, CHECKPOINTS[row.model])
        yield Lines(row, key, base, _less(decode, base), _less(prompts, base))
        print(f"{number} of {len(rows)}: {row.id}", file=sys.stderr, flush=True)


def _bare(row: Row) -> Setup:
    """The scenario of a point without the way to its engine, its KV cache in 16 bits where kernels are of no other."""
    for kv in (row.kv, ""):
        text = scenario_text(row, kv=kv).replace(f"  frontend: {row.engine}\n", "")
        try:
            return Setup.of(parse_scenario(text, row.id, Path(), ()))
        except BatchsimError as error:
            caught = error
    raise caught


def _less(found: tuple[float, float], base: tuple[float, float]) -> tuple[float, float]:
    return found[0] - base[0], found[1] - base[1]


# ---- the fit


def _fitted(points: Sequence[Lines], preset: Preset, way: tuple[float, float, float]) -> dict[Key, tuple[float, float]]:
    """By key the change of decodes, in steps of what was simulated, that meets TPOT in the median, and the factor on
    prompts of `_PROMPTS` with the least mean error of TTFT; none where points disagree, or are of another engine."""
    found = {}
    for key in {each.key for each in points}:
        mine = [each for each in points if each.key == key]
        prompts = decode = 0.0
        for _ in range(3):
            decode = float(
                np.median([(e.row.tpot_ms - e.base[1] - prompts * e.prompts[1]) / e.decode[1] for e in mine])
            )
            errors = [_size(_errors(mine, dict.fromkeys((key,), (decode, p)), way)[0]) for p in (_PROMPTS - 1) / _STEP]
            prompts = float((_PROMPTS[int(np.argmin(errors))] - 1) / _STEP)
        agree = np.median(np.abs(_errors(mine, {key: (decode, prompts)}, way)[1])) <= _AGREE
        agree = agree and np.median([abs(decode * e.decode[1] / e.base[1]) for e in mine]) <= _OTHERWISE
        stalled = np.median(np.abs(_errors(mine, {key: (decode, prompts)}, way)[0])) > _STALLED
        found[key] = (decode, 0.0 if stalled else prompts) if agree else (0.0, 0.0)
    return found


def _way(points: Sequence[Lines], found: dict[Key, tuple[float, float]]) -> tuple[float, float, float]:
    """Of `_WAYS` the one with the least mean error of TTFT."""
    errors = [_size(_errors(points, found, way)[0]) for way in _WAYS]
    return tuple(float(x) for x in _WAYS[int(np.argmin(errors))])  # pyright: ignore[reportReturnType]


def _errors(
    points: Sequence[Lines], found: dict[Key, tuple[float, float]], way: Sequence[float]
) -> tuple[Array, Array]:
    """Simulated over measured, less 1, of TTFT and TPOT; as the tables have it where nothing was found."""
    both: list[list[float]] = [[], []]
    for e in points:
        decode, prompts = found.get(e.key, (0.0, 0.0))
        there = way[0] + way[1] * 0.9 * e.row.isl / 1e3 + way[2] * e.row.concurrency
        for which, measured in enumerate((e.row.ttft_ms - there, e.row.tpot_ms)):
            ms = e.base[which] + decode * e.decode[which] + prompts * e.prompts[which]
            both[which].append((ms - measured) / (e.row.ttft_ms, e.row.tpot_ms)[which])
    return np.array(both[0]), np.array(both[1])


def _size(errors: Array) -> float:
    return float(np.minimum(np.abs(errors), _MOST).mean())


def _measured(
    key: Key, found: tuple[float, float], points: Sequence[Lines], preset: Preset, way: Sequence[float]
) -> Measured:
    ttft, tpot = (np.abs(errors) for errors in _errors(points, {key: found}, way))
    decode, shift_us = 1 + _STEP * found[0], 0.0
    if preset.form == "shift":
        decode, shift_us = 1.0, _SHIFT_NS / 1e3 * found[0]
    named = sorted(
        {e.row.version.removeprefix("v").partition(".post")[0] for e in points if e.row.version[:1].isdigit()}
    )
    versions = " to ".join(dict.fromkeys((named[0], named[-1]))) if named else ""
    spread = [(round(float(np.median(size)), 3), round(float(np.quantile(size, 0.9)), 3)) for size in (tpot, ttft)]
    factors = round(decode, 3), float(round(shift_us, -1)) + 0.0, round(1 + _STEP * found[1], 2)
    return Measured(preset.engine, *key, *factors, len(points), versions, *spread)


def _line(its: Measured) -> str:
    """A line of the table in `batchsim.cost.in_engine`."""
    facts = its.engine, its.gpu, its.weights, its.experts or "-", its.ep, its.model
    numbers = (f"{x:g}" for x in (its.decode, its.shift_us, its.prompts, its.points))
    versions = its.versions.replace(" to ", "..") or "-"
    return " ".join(map(str, (*facts, *numbers, versions, *(f"{x:g}" for x in (*its.tpot, *its.ttft)))))


def _said(points: Sequence[Lines], found: dict[Key, tuple[float, float]], way: Sequence[float]) -> str:
    texts = []
    for name, errors in zip(("TTFT", "TPOT"), _errors(points, found, way), strict=True):
        size = 100 * np.abs(errors)
        texts.append(f"{name} median {np.median(size):.1f} p90 {np.quantile(size, 0.9):.1f} mean {size.mean():.1f} %")
    return f"{len(points)} points, " + ", ".join(texts)


def _left_out(points: Sequence[Lines], preset: Preset, way: tuple[float, float, float]) -> str:
    """What is missed of each deployment by a fit to the others; as the tables have it where no other is of its key."""
    both: list[list[float]] = [[], []]
    for name in {e.row.deployment for e in points}:
        found = _fitted([e for e in points if e.row.deployment != name], preset, way)
        for errors, some in zip(
            both, _errors([e for e in points if e.row.deployment == name], found, way), strict=True
        ):
            errors += some.tolist()
    said = []
    for what, errors in zip(("TTFT", "TPOT"), both, strict=True):
        size = 100 * np.abs(errors)
        said.append(f"{what} median {np.median(size):.1f} p90 {np.quantile(size, 0.9):.1f} mean {size.mean():.1f} %")
    return ", ".join(said)


if __name__ == "__main__":
    sys.exit(main())
