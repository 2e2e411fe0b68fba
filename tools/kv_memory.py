"""Prints how far derived KV memory is from what engines said at their start.

    python -m tools.kv_memory                 # start-ups, of results/reference/kv/startups.csv
    python -m tools.kv_memory --logged FILE   # start-ups of vLLM, in a file with the columns of vllm-0.19.csv there

All is of one GPU. A model is read from `--models`, a folder of config.json files by their ids with -- for /, else from
the catalog.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from batchsim.base.files import read_text
from batchsim.cli.common import one_line_errors
from batchsim.deployment.catalog import GPUS, read_model
from batchsim.deployment.config_json import SIZED
from batchsim.deployment.deployment import Deployment, Stage
from batchsim.deployment.model import ModelSpec
from batchsim.report.markdown import markdown_table

REFERENCE = Path(__file__).resolve().parent.parent / "results" / "reference" / "kv"
GIB = 2**30


class Startup(NamedTuple):
    """A start-up of an engine: `words` say of which one, of what and on what; bytes of weights and of KV as its log
    `said` and as they are derived, `kv_of_said` with the weights that it said. None: not said, or not known in full."""

    words: tuple[str, str, str]
    weights_said: float | None
    weights: int | None
    kv_said: float | None = None
    kv: int | None = None
    kv_of_said: int | None = None

    def cells(self) -> tuple[str, ...]:
        """The words, what was said in GiB, and by how much what is derived is off."""
        said = ("–" if size is None else f"{size / GIB:.2f}" for size in (self.weights_said, self.kv_said))
        pairs = ((self.weights, self.weights_said), (self.kv, self.kv_said), (self.kv_of_said, self.kv_said))
        weights, kv, kv_of_said = ("–" if None in pair else _off(*pair) for pair in pairs)
        return *self.words, next(said), weights, next(said), kv, kv_of_said


def _off(size: float | None, said: float | None) -> str:
    """The error in percent; in GiB where the log says that nothing is left."""
    assert size is not None and said is not None, "both are known"
    return f"{size / said - 1:+.3%}" if said > 0 else f"{(size - said) / GIB:+.1f} GiB"


def startups(path: Path = REFERENCE / "startups.csv", models: Path = REFERENCE / "models") -> Iterator[Startup]:
    """The start-ups in the CSV file at `path`, with what is derived of each; models of the folder `models`."""
    for row in csv.DictReader(read_text(path).splitlines()):
        file = models / f"{row['model'].replace('/', '--')}.json"
        spec = read_model(str(file) if file.is_file() else row["model"])
        yield _logged(row, spec) if "physical_GiB" in row else _published(row, spec)


def _published(row: Mapping[str, str], spec: ModelSpec) -> Startup:
    """A start-up of which its user published some of the terms."""
    gpu = replace(GPUS["h100"], name=row["gpu"], memory_bytes=int(row["memory_mib"]) * 2**20, cuda_bytes=None)
    its = Deployment(spec, gpu, row["engine"], row["version"], tp=int(row["tp"]))
    words = (f"{row['engine']} {row['version']}", row["model"], f"{row['gpus']} × {row['gpu']}")
    said = float(row["weights_gib"]) * GIB if row["weights_gib"] else None
    if not row["utilisation"]:
        return Startup(words, said, its.weight_bytes)
    kv = float(row["kv_tokens"]) * its.kv_bytes_per_token if row["kv_tokens"] else float(row["kv_gib"]) * GIB
    room = room_of(its, float(row["utilisation"]), (int(row["step_tokens"]), int(row["step_requests"])))
    return Startup(words, said, its.weight_bytes, kv, room)


def _logged(row: Mapping[str, str], spec: ModelSpec) -> Startup:
    """A start-up of vLLM of which the whole log is known."""
    gpu = replace(GPUS["h100"], cuda_bytes=int(float(row["physical_GiB"]) * GIB))
    stated = {"fp8": "fp8", "compressed-tensors": "int8" if "w8a8" in row["model"].lower() else "fp8"}
    own = "" if spec.quantised.weights else stated.get(row["quantization"], "")
    its = Deployment(spec, gpu, "vllm", row["version"], tp=int(row["tp"]), pp=int(row["pp"]), weight_dtype=own)
    its = replace(its, kv_dtype="fp8" if row["kv_dtype"] == "fp8" else "")
    words = (f"vllm {row['version']}", row["model"], f"tp {its.tp} pp {its.pp}")
    share, step = float(row["utilisation"]), (int(row["max_num_batched_tokens"]), int(row["max_num_seqs"]))
    said, sized = float(row["weights_GiB"]) * GIB, spec.model_type in SIZED
    derived = (its.weight_bytes, room_of(its, share, step)) if sized else (None, None)
    kv_of_said = room_of(its, share, step, weights=int(said))
    return Startup(words, said, derived[0], float(row["kv_GiB"]) * GIB, derived[1], kv_of_said)


def room_of(its: Deployment, share: float, step: tuple[int, int], weights: int | None = None) -> int:
    """Bytes for KV on one GPU, negative where none are left, beside a largest `step` of so many tokens and requests;
    `weights` in the place of the derived ones."""
    rule, version = its.rule, its.version
    assert its.gpu is not None, "a start-up is on a GPU"
    memory_bytes = rule.memory_bytes(its.gpu, version)

    def room(stage: Stage) -> int:
        own = rule.loaded_bytes(stage.weight_bytes, its.model, version) if weights is None else weights
        return rule.room(memory_bytes, share, own, its.reserve(stage, *step))

    return min(map(room, its.stages()))


@one_line_errors
def main(
    logged: Annotated[Path, typer.Option(help="A CSV file of start-ups.")] = REFERENCE / "startups.csv",
    models: Annotated[Path, typer.Option(help="A folder of config.json files.")] = REFERENCE / "models",
) -> None:
    """Prints a table of start-ups, and how large the errors are."""
    found = list(startups(logged, models))
    head = ("engine", "model", "GPUs", "weights said, GiB", "off", "KV said, GiB", "off", "off, weights as said")
    print(markdown_table(head, (False,) * len(head), [each.cells() for each in found]) + "\n")
    columns = {
        "KV": [(each.kv, each.kv_said) for each in found],
        "KV, weights as said": [(each.kv_of_said, each.kv_said) for each in found],
    }
    for name, pairs in columns.items():
        sizes = [abs(size / said - 1) for size, said in pairs if size is not None and said is not None]
        if sizes:
            print(f"{name}: median {statistics.median(sizes):.3%}, largest {max(sizes):.3%}, of {len(sizes)} start-ups")


if __name__ == "__main__":
    typer.run(main)
