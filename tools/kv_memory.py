"""Prints how far derived KV memory is from what engines said at their start, and from AIConfigurator's own estimates.

    python -m tools.kv_memory                 # start-ups, of results/reference/kv/startups.csv
    python -m tools.kv_memory --logged FILE   # start-ups of vLLM with every term of their logs, a row each, as CSV
    python -m tools.kv_memory --estimates     # `estimate_kv_cache` of aiconfigurator-core, which must be installed

The rows of `--logged` have the columns of results/reference/kv/vllm-0.19.csv. A model is read from `--models`, a folder
of config.json files by their ids with -- for /, else from the catalog.

Both are of one GPU, in bytes of weights and of KV. An estimate keeps other reserves than batchsim does, 3.5 GiB for the
engine among them, so that its KV is compared twice: as either derives it, and with the estimate's reserves in both.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from batchsim.base.files import read_bytes, read_json, read_text, write_bytes
from batchsim.deployment.catalog import GPUS, MODELS, checkpoint_names, read_model
from batchsim.deployment.config_json import SIZED
from batchsim.deployment.deployment import Deployment, Stage
from batchsim.deployment.memory import Reserve
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.report.markdown import markdown_table

REFERENCE = Path(__file__).resolve().parent.parent / "results" / "reference" / "kv"
GIB = 2**30
SYSTEMS = {"h100_sxm": 80 * GIB, "h200_sxm": 141 * GIB, "b200_sxm": 180 * GIB, "l40s": 46_068 * 2**20}
"""Memory of the systems of aiconfigurator-core 0.12.0 by their names, as it counts it."""
RELEASES = {"vllm": "0.24.0", "sglang": "0.5.14", "tensorrt_llm": "1.3.0rc20"}
BACKENDS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}
_MOE = {"mxfp4": "w4a16_mxfp4"}
"""Types that AIConfigurator calls otherwise."""
STEP = {"step_tokens": 8192, "step_requests": 256}


def gpu_of(name: str, memory_bytes: int) -> GpuSpec:
    """A GPU of so much memory; nothing else of it counts here."""
    return replace(GPUS["h100"], name=name, memory_bytes=memory_bytes, cuda_bytes=None)


def room_of(
    deployment: Deployment, share: float | None, *, kept: int | None = None, weights: int | None = None, **step: int
) -> int:
    """Bytes for KV on one GPU, negative where none are left; `kept` in the place of the derived reserves, `weights`
    of the derived ones."""
    gpu, rule = deployment.gpu, deployment.rule
    assert gpu is not None
    memory_bytes, version = rule.memory_bytes(gpu, deployment.version), deployment.version
    used = rule.default_share(version, memory_bytes, deployment.num_gpus) if share is None else share

    def room(stage: Stage) -> int:
        reserve = deployment.reserve(stage, *step.values()) if kept is None else Reserve.stated(kept)
        own = rule.loaded_bytes(stage.weight_bytes, deployment.model, version) if weights is None else weights
        return rule.room(memory_bytes, used, own, reserve)

    return min(room(stage) for stage in deployment.stages())


def startups() -> Iterator[tuple[str, ...]]:
    """A row of text for each start-up: what was said, what is derived, the error."""
    for row in csv.DictReader(read_text(REFERENCE / "startups.csv").splitlines()):
        name = row["model"]
        spec = MODELS[name] if name in MODELS else read_model(str(REFERENCE / "models" / f"{name}.json"))
        gpu = gpu_of(row["gpu"], int(row["memory_mib"]) * 2**20)
        its = Deployment(spec, gpu, row["engine"], row["version"], tp=int(row["tp"]))
        yield (f"{row['engine']} {row['version']}", name, f"{row['gpus']} × {row['gpu']}", *_compared(row, its))


def _compared(row: Mapping[str, str], its: Deployment) -> tuple[str, ...]:
    weights = its.weight_bytes
    said = float(row["weights_gib"]) * GIB if row["weights_gib"] else 0
    texts = [f"{said / GIB:.2f}" if said else "–", f"{weights / GIB:.2f}", _percent(weights, said)]
    if not row["utilisation"]:
        return (*texts, "–", "–", "–")
    share, step = float(row["utilisation"]), (int(row["step_tokens"]), int(row["step_requests"]))
    room = room_of(its, share, step_tokens=step[0], step_requests=step[1])
    kv = float(row["kv_tokens"]) * its.kv_bytes_per_token if row["kv_tokens"] else float(row["kv_gib"]) * GIB
    error = _percent(room, kv) if kv > 0 else f"{(room - kv) / GIB:+.1f} GiB"
    return (*texts, f"{kv / GIB:.2f}", f"{room / GIB:.2f}", error)


class Logged(NamedTuple):
    """One start-up: KV bytes of a GPU that its log says, and those derived from its logged weights and from the
    model's; None where the model's weights are not known in full, or its config.json lacks."""

    row: Mapping[str, str]
    said: float
    from_logged: float | None
    from_model: float | None


def logged_startups(path: Path, models: Path) -> Iterator[Logged]:
    """What is derived of each start-up of vLLM in the CSV file at `path`."""
    for row in csv.DictReader(read_text(path).splitlines()):
        said, spec = float(row["kv_GiB"]) * GIB, _known_model(row["model"], models)
        if spec is None:
            yield Logged(row, said, None, None)
            continue
        gpu = replace(GPUS["h100"], cuda_bytes=int(float(row["physical_GiB"]) * GIB))
        stated = {"fp8": "fp8", "compressed-tensors": "int8" if "w8a8" in row["model"].lower() else "fp8"}
        own = "" if spec.quantised.weights else stated.get(row["quantization"], "")
        its = Deployment(spec, gpu, "vllm", row["version"], tp=int(row["tp"]), pp=int(row["pp"]), weight_dtype=own)
        its = replace(its, kv_dtype="fp8" if row["kv_dtype"] == "fp8" else "")
        step = {"step_tokens": int(row["max_num_batched_tokens"]), "step_requests": int(row["max_num_seqs"])}
        share, weights = float(row["utilisation"]), int(float(row["weights_GiB"]) * GIB)
        derived = room_of(its, share, **step) if spec.model_type in SIZED else None
        yield Logged(row, said, room_of(its, share, weights=weights, **step), derived)


def _known_model(name: str, models: Path) -> ModelSpec | None:
    path = models / f"{name.replace('/', '--')}.json"
    if path.is_file():
        return read_model(str(path))
    return read_model(name) if name in checkpoint_names() else None


def _print_logged(path: Path, models: Path) -> None:
    """A table of the start-ups at `path`, and the median and largest error."""
    found = list(logged_startups(path, models))
    rows = [
        (
            each.row["model"],
            f"{each.row['tp']} × {each.row['pp']}",
            f"{each.said / GIB:.2f}",
            *("–" if it is None else _percent(it, each.said, 3) for it in (each.from_logged, each.from_model)),
        )
        for each in found
    ]
    head = ("model", "tp × pp", "KV said, GiB", "from logged weights", "from the model's")
    print(markdown_table(head, (False,) * len(head), rows))
    columns = {
        "logged weights": [(each.from_logged, each.said) for each in found],
        "the model's weights": [(each.from_model, each.said) for each in found],
    }
    for what, pairs in columns.items():
        errors = sorted(abs(value / said - 1) for value, said in pairs if value is not None)
        if errors:
            shares = f"median {statistics.median(errors):.3%}, largest {errors[-1]:.3%}"
            print(f"from {what}: {shares}, of {len(errors)} start-ups")


@dataclass(frozen=True)
class Estimate:
    """One deployment with AIConfigurator's weights, KV bytes of a token and room for KV, in bytes of one GPU."""

    name: str
    deployment: Deployment
    weight_bytes: int
    token_bytes: int
    room: int
    kept: int


def estimates(scratch: str) -> Iterator[Estimate | str]:
    """An estimate of each deployment; where there is none, in words why. `scratch`: an empty folder."""
    from aiconfigurator_core.sdk.memory import (  # pyright: ignore[reportMissingImports]
        estimate_kv_cache,  # pyright: ignore[reportUnknownVariableType]
    )

    for system, name, rest in _deployments():
        its = Deployment(_model(name), gpu_of(system, SYSTEMS[system]), **rest)
        title = f"{its.engine} {system} {name} tp {its.tp}" + (f" ep {its.ep}" if its.ep > 1 else "")
        used, folder = its.types, Path(scratch) / name.replace("/", "--")
        folder.mkdir(exist_ok=True)
        write_bytes(folder / "config.json", read_bytes(_config_of(name)))
        try:
            found: dict[str, Any] = estimate_kv_cache(
                str(folder),
                system,
                BACKENDS[its.engine],
                its.version,
                max_num_tokens=STEP["step_tokens"],
                max_batch_size=STEP["step_requests"],
                memory_fraction_kind="of_free" if its.rule.of_free else "of_total",
                memory_fraction_value=0.9,
                tp_size=its.tp,
                moe_tp_size=its.split.moe_tp,
                moe_ep_size=its.ep,
                gemm_quant_mode=used.mlp,
                moe_quant_mode=_MOE.get(used.experts, used.experts),
                kvcache_quant_mode=used.kv,
            )
        except Exception as error:  # whatever it lacks is a row of the table
            yield f"{title}: {str(error).splitlines()[0][-160:]}"
            continue
        parts = found["memory_breakdown"]
        kept = sum(size for part, size in parts.items() if part != "weights_bytes")
        sizes = parts["weights_bytes"], found["kv_size_per_token_bytes"], found["total_kv_size_bytes"]
        yield Estimate(title, its, *sizes, kept)


def _deployments() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(system, model, what else a Deployment is made with) of deployments.csv, for every engine."""
    rows = list(csv.DictReader(read_text(REFERENCE / "deployments.csv").splitlines()))
    for engine, row in product(RELEASES, rows):
        types = {"weight_dtype": row["weights"], "kv_dtype": row["kv"]}
        for system, tp, ep in product(*(row[name].split() for name in ("systems", "tp", "ep"))):
            if int(ep) <= int(tp):
                degrees = {"tp": int(tp), "ep": int(ep)}
                yield system, row["model"], {"engine": engine, "version": RELEASES[engine]} | degrees | types


def _config_of(name: str) -> Path:
    """The config.json that aiconfigurator-core has of the model of that Hugging Face id."""
    import aiconfigurator_core  # pyright: ignore[reportMissingImports]

    folder = Path(str(aiconfigurator_core.__file__)).parent / "model_configs"
    return folder / f"{name.replace('/', '--')}_config.json"


def _model(name: str) -> ModelSpec:
    return ModelSpec.from_config(read_json(_config_of(name)), name)


def _percent(value: float, against: float, digits: int = 1) -> str:
    return f"{100 * (value / against - 1):+.{digits}f} %" if against else "–"


def main() -> None:
    """Prints one of the two tables."""
    parser = argparse.ArgumentParser(prog="python -m tools.kv_memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--estimates", action="store_true", help="against aiconfigurator-core's estimates")
    parser.add_argument("--logged", type=Path, help="a CSV file of start-ups of vLLM")
    parser.add_argument("--models", type=Path, default=REFERENCE / "models", help="a folder of config.json files")
    arguments = parser.parse_args()
    if arguments.logged is not None:
        _print_logged(arguments.logged, arguments.models)
        return
    if not arguments.estimates:
        head = ("engine", "model", "GPUs", "weights said, GiB", "derived", "off", "KV said, GiB", "derived", "off")
        print(markdown_table(head, (False,) * len(head), list(startups())))
        return
    with TemporaryDirectory() as scratch:
        found = list(estimates(scratch))
    rows, errors = list[tuple[str, ...]](), list[tuple[float, ...]]()
    for each in (one for one in found if isinstance(one, Estimate)):
        its = each.deployment
        ours = (its.weight_bytes, its.kv_bytes_per_token, room_of(its, 0.9, **STEP))
        ours, theirs = (*ours, room_of(its, 0.9, kept=each.kept, **STEP)), (each.weight_bytes, each.token_bytes)
        errors.append(tuple(a / b - 1 for a, b in zip(ours, (*theirs, each.room, each.room), strict=True)))
        types = "/".join(dict.fromkeys((its.types.mlp, its.types.experts, its.types.kv)))
        rows.append((each.name, types, f"{each.weight_bytes / 1e9:.1f}", *(f"{100 * x:+.1f} %" for x in errors[-1])))
    names = ("weights", "token", "KV", "KV, same reserves")
    print(markdown_table(("deployment", "types", "weights, GB", *names), (False,) * 7, rows) + "\n")
    for name, shares in zip(names, zip(*errors, strict=True), strict=True):
        sizes = sorted(map(abs, shares))
        p50, high, mean = statistics.median(sizes), sizes[int(0.95 * (len(sizes) - 1))], statistics.fmean(shares)
        print(f"{name}: median |error| {p50:.2%}, p95 {high:.2%}, mean {mean:+.2%}, of {len(shares)} deployments")
    for each in found:
        if isinstance(each, str):
            print(f"no estimate: {each}")


if __name__ == "__main__":
    main()
