"""Training scenarios in a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchsim.training.kpis import Run
from batchsim.training.load import TrainingScenario, load_training, run_training

LINEAR = {"kind": "linear", "base": "0s", "per_token": "1us", "tokens_per_square": 1e12}
"""A microsecond a token, and next to nothing for squares."""


def scenario(folder: Path, examples: Sequence[int], packer: dict[str, Any], /, **keys: Any) -> TrainingScenario:
    """A scenario of examples of these lengths with one packer, called `p`, and `keys` of the block."""
    (folder / "lengths.json").write_text(json.dumps(list(examples)), encoding="utf-8")
    block = {"lengths": {"kind": "file", "path": "lengths.json"}, "packers": {"p": packer}, "cost": LINEAR, **keys}
    path = folder / "mine.yaml"
    path.write_text(json.dumps({"training": block}), encoding="utf-8")
    return load_training(str(path))


def run(folder: Path, examples: Sequence[int], packer: dict[str, Any], /, **keys: Any) -> Run:
    """The epoch of `scenario`."""
    return run_training(scenario(folder, examples, packer, **keys))[0]
