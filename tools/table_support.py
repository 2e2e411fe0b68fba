"""Writes sim/tables/timed.json anew: of which models the installed kernel tables time steps, by engine and GPU.

    python -m tools.table_support                              (needs pip install 'batchsim[gpus]')

The package says it of itself (systems/support_matrix/*.csv): a row a model, system, engine, version and mode. Kept are
those of one engine for prompts and answers (`agg`) that passed in any version, but for `NOT_HERE`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from importlib import metadata, resources
from pathlib import Path

from batchsim.base.files import read_text, write_text

FILE = Path(__file__).parents[1] / "sim" / "tables" / "timed.json"
NOT_HERE = frozenset(
    {
        ("nvidia/MiniMax-M3-NVFP4", "vllm"),
        ("nvidia/MiniMax-M3-NVFP4", "trtllm"),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "vllm"),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "sglang"),
    }
)
"""Models and engines that passed there with other types than their checkpoints say: matrices in MXFP8, or in NVFP4
beside activations of 16 bits, of which the tables have no times on any GPU."""
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}


def timed(rows: Iterable[dict[str, str]]) -> dict[str, dict[str, list[str]]]:
    """The GPUs by model and engine of rows that passed."""
    systems: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        if row["Mode"] != "agg" or row["Backend"] not in _ENGINES:
            continue
        engines = systems.setdefault(row["HuggingFaceID"], {})
        if (row["HuggingFaceID"], row["Backend"]) in NOT_HERE:
            continue
        if row["Status"] in ("PASS", "HYBRID_PASS"):
            engines.setdefault(_ENGINES[row["Backend"]], set()).add(row["System"])
    return {
        model: {engine: sorted(systems[model][engine]) for engine in _ENGINES.values() if engine in systems[model]}
        for model in sorted(systems, key=str.lower)
    }


def text() -> str:
    """The file's text."""
    folder = Path(str(resources.files("aiconfigurator_core"))) / "systems" / "support_matrix"
    rows = [row for path in sorted(folder.glob("*.csv")) for row in csv.DictReader(read_text(path).splitlines())]
    source = f"aiconfigurator-core {metadata.version('aiconfigurator-core')}, systems/support_matrix/*.csv"
    lines = [f" {json.dumps(model)}: {json.dumps(engines)}" for model, engines in timed(rows).items()]
    return f'{{"source": {json.dumps(source)},\n"timed": {{\n' + ",\n".join(lines) + "\n}}\n"


def main() -> None:
    """Writes the file."""
    write_text(FILE, text())


if __name__ == "__main__":
    main()
