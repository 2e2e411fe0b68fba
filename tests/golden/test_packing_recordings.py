"""What frameworks' own code made of given lengths, against the packers here: bin by bin, in order."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchsim.check.conform import conform
from batchsim.training.packers.registry import PACKERS, RECORDED

FOLDER = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "packing"
RESULTS = ("bins", "packs", "batches", "microbatches", "partitions", "groups", "ranks", "order")


def recordings(packer: str) -> list[Path]:
    files = sorted(FOLDER.glob(f"{packer}__*.json.gz"))
    if "BATCHSIM_GOLDEN" not in os.environ or not files:
        pytest.skip("BATCHSIM_GOLDEN names no folder with results of packers")
    return files


@pytest.mark.parametrize("packer", [packer for packer, count in RECORDED.items() if count])
def test_every_bin_equals_the_recorded_one(packer: str) -> None:
    """Bins and their order, and what is recorded beside them, are those of the framework; as many files as stated."""
    verdicts = [conform(path) for path in recordings(packer)]
    assert [str(verdict) for verdict in verdicts if verdict.difference] == []
    assert len(verdicts) >= RECORDED[packer]


@pytest.mark.parametrize("packer", [packer for packer, count in RECORDED.items() if count])
def test_a_planted_error_is_found_in_its_bin(packer: str, tmp_path: Path) -> None:
    """One number changed in the middle of a result is a difference, shown on both sides."""
    data: Any = json.loads(gzip.decompress(recordings(packer)[0].read_bytes()))
    name = next(name for name in RESULTS if name in data and not (name == "order" and "microbatches" in data))
    bins = list(innermost(data[name]))
    planted = bins[len(bins) // 2]
    planted[0] += 1
    path = tmp_path / "planted.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    verdict = conform(path)
    assert verdict.difference.startswith((name, NAMES.get(name, name))) and "differs" in verdict.difference
    if packer != "areal.ffd":  # of which lengths are compared
        assert str(planted[0]) in verdict.recorded  # type: ignore[union-attr]


@pytest.mark.parametrize("packer", [packer for packer, count in RECORDED.items() if count])
def test_a_bin_too_few_is_a_difference(packer: str, tmp_path: Path) -> None:
    """A result whose last bin is missing differs."""
    data: Any = json.loads(gzip.decompress(recordings(packer)[0].read_bytes()))
    name = next(name for name in RESULTS if name in data and not (name == "order" and "microbatches" in data))
    del data[name][-1]
    path = tmp_path / "short.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert f"{name} ends after {len(data[name]) + 1}, the recording has {len(data[name])}" in conform(path).difference


def lengths_of(distribution: str) -> list[int]:
    path = next(path for path in recordings("trl.wrapped") if f"__{distribution}__" in path.name)
    return json.loads(gzip.decompress(path.read_bytes()))["lengths"]


@pytest.mark.parametrize(
    ("distribution", "packer", "bins", "fill", "balance"),
    [
        ("uniform", "axolotl.multipack", 78, 99.2, 1.3),
        ("uniform", "nemo_rl.concatenative", 84, 92.1, 1.3),
        ("uniform", "nemo_rl.first_fit_decreasing", 78, 99.2, 1.5),
        ("lognormal", "axolotl.multipack", 567, 99.0, 2.3),
        ("lognormal", "nemo_rl.concatenative", 685, 82.0, 2.8),
        ("lognormal", "nemo_rl.first_fit_decreasing", 562, 99.9, 2.3),
        ("lognormal", "trl.bfd", 564, 99.5, 2.3),
        ("lognormal", "trl.wrapped", 563, 99.7, 2.9),
        ("ties", "nemo_rl.concatenative", 105, 81.9, 2.6),
        ("ties", "nemo_rl.first_fit_decreasing", 87, 98.9, 2.1),
    ],
)
def test_full_rows_say_nothing_of_balance(
    distribution: str, packer: str, bins: int, fill: float, balance: float
) -> None:
    """Bins of 2,048, their fill, and the largest sum of squares of a bin's documents over the mean."""
    lengths = lengths_of(distribution)
    config = replace(PACKERS[packer](), **{PACKERS[packer].capacity_option: 2048})
    packed = config.pack(lengths, range(len(lengths)))
    if packer == "axolotl.multipack":
        packed = [row for batch in packed for row in batch]
    sizes = [[part[2] if isinstance(part, tuple) else lengths[part] for part in row] for row in packed]
    squares = [sum(size**2 for size in row) for row in sizes]
    assert len(packed) == bins
    assert round(100 * sum(map(sum, sizes)) / bins / 2048, 1) == fill
    assert round(max(squares) * bins / sum(squares), 1) == balance


NAMES = {"bins": "bin", "packs": "pack", "batches": "batch", "microbatches": "micro-batch", "order": "place"}


def innermost(value: list[Any]) -> Iterator[list[Any]]:
    """The lists of numbers in a nested list."""
    if value and not isinstance(value[0], list):
        yield value
    for each in value:
        if isinstance(each, list):
            yield from innermost(each)
