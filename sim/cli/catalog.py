"""The command that lists models and GPUs known by name."""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from batchsim.cli import option
from batchsim.cli.common import one_line_errors, print_json

if TYPE_CHECKING:
    from batchsim.deployment.model import ModelSpec

OTHERS = "a model of the same shape and types above, else from kernel tables (pip install 'batchsim[gpus]')"
"""Where step costs are from of a model for which no profile of its own comes with batchsim."""
KV = {
    "derived": "KV memory derived",
    "groups": "KV memory derived in groups of layers, under vllm, or read from its log",
    "stated": "KV memory to be stated: kv: {memory, per_token, per_request}",
}
"""How the KV memory of a model is known, by its word in JSON."""


def _works(model: ModelSpec, tables: dict[str, list[str]] | None) -> dict[str, Any]:
    """How the KV memory of a model is known, and the GPUs by engine on which the kernel tables time its steps; null
    where the tables do not say."""
    from batchsim.deployment.deployment import Deployment
    from batchsim.deployment.kv_groups import has_layout, may_have_layout

    stated = any(each.attention.kind == "compressed" for each in model.kinds)
    kv = "stated" if stated else "groups" if has_layout(model) or may_have_layout(model) else "derived"
    token = {} if stated else {"kv_bytes_per_token": Deployment(model).kv_bytes_per_token}
    return {"parameters": model.num_parameters, "kv": kv, **token, "tables": tables}


def _timed(tables: dict[str, list[str]] | None) -> str:
    """On what the kernel tables time a model, in words."""
    if tables is None:
        return "not among the models that the kernel tables list"
    if not tables:
        return "timed on no GPU, by the tables' own account"
    return f"timed for {', '.join(tables)}"


@cache
def timed() -> dict[str, dict[str, list[str]]]:
    """The GPUs on which the kernel tables time each model, by its Hugging Face id and by engine; {} of a model that is
    timed on none. By the tables' own account, which `python -m tools.kernel_tables support` writes."""
    from batchsim.base.files import read_json

    kept = read_json(Path(str(resources.files("batchsim.tables"))) / "timed.json")
    return kept["timed"]


def _checkpoints() -> tuple[dict[str, list[str]], dict[str, str]]:
    """By Hugging Face id, of each that can be simulated the engines and GPUs for which profiles of its steps come with
    batchsim, and of each other one why it cannot."""
    from batchsim.base.errors import ScenarioError
    from batchsim.cost.profile import profile_names
    from batchsim.deployment.catalog import GPUS, checkpoint_names, hugging_face_id, read_model

    shipped: dict[str, dict[str, list[str]]] = {}
    for profile in profile_names():
        gpu = next((gpu for gpu in GPUS if f"-{gpu}-" in profile), "")
        model, _, rest = profile.partition(f"-{gpu}-")
        engine_gpus = shipped.setdefault(model, {}).setdefault(rest.partition("-")[0], [])
        engine_gpus += [gpu] if gpu not in engine_gpus else []
    known: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    names = {hugging_face_id(name): name for name in shipped}
    for name in sorted(checkpoint_names(), key=str.lower):
        try:
            read_model(name)
        except ScenarioError as error:
            refused[name] = str(error).removeprefix(f"{name}: ").partition(". ")[0]
            continue
        short = names.get(name, name.lower().rpartition("/")[2].removeprefix("meta-"))
        known[name] = [f"{engine} on {', '.join(gpus)}" for engine, gpus in shipped.get(short, {}).items()]
    return known, refused


@one_line_errors
def catalog(as_json: option.Json = False) -> None:
    """List the models and GPUs known by name, with their sources. Example: batchsim catalog"""
    from dataclasses import asdict

    from batchsim.cost.power import POWER_LAWS
    from batchsim.deployment.catalog import GPUS, MODEL_SOURCES, MODELS, read_model

    checkpoints, refused = _checkpoints()
    works = {name: _works(read_model(name), timed().get(name)) for name in checkpoints}
    models = {
        name: {
            "parameters": m.num_parameters,
            "weight_bytes": m.weight_bytes,
            "kv_bytes_per_token": m.kv_bytes_per_token,
            "max_position_embeddings": m.max_position_embeddings,
            "source": MODEL_SOURCES[name],
        }
        for name, m in MODELS.items()
    }
    gpus = {
        g.name: {
            "names": [name for name, other in GPUS.items() if other is g],
            "memory_bytes": g.memory_bytes,
            "memory_bandwidth": g.memory_bandwidth,
            "peak_flops": g.peak_flops,
            "source": g.source,
            "power": asdict(POWER_LAWS[g.name]) if g.name in POWER_LAWS else None,
        }
        for g in GPUS.values()
    }
    if as_json:
        by_id = {"checkpoints": checkpoints, "works": works, "not_simulated": refused}
        print_json({"models": models, "gpus": gpus, **by_id})
        return
    from batchsim.report.layout import filled

    lines: list[str] = []
    indent = " " * 15
    for name, m in models.items():
        lines += filled(
            f"{name:<14} {m['parameters'] / 1e9:5.2f} B parameters  {m['weight_bytes'] / 1e9:6.1f} GB weights"
            f"  {m['kv_bytes_per_token']:>7,} B KV/token  {m['source']}",
            indent,
        )
    for name, g in gpus.items():
        law = POWER_LAWS.get(name)
        known = "fitted" if law and law.error_p50 else "not fitted"
        power = f"{law.limit_w:.0f} W, power law {known}" if law else "no power law"
        lines += filled(
            f"{', '.join(g['names']):<19} {g['memory_bytes'] / 1e9:5.1f} GB  {g['memory_bandwidth'] / 1e12:.2f} TB/s"
            f"  {g['peak_flops'] / 1e12:.0f} TFLOP/s bf16  {power}  {g['source']}",
            indent,
        )
    for name, where in checkpoints.items():
        if where:
            lines += filled(f"{name}: step costs of {'; '.join(where)}", indent, f"{'by id':<14} ")
    alike: dict[tuple[str, str], list[str]] = {}
    for name, how in works.items():
        alike.setdefault((KV[how["kv"]], _timed(how["tables"])), []).append(name)
    for (memory, steps), names in sorted(alike.items()):
        lines += filled(f"{', '.join(names)}: {memory}; {steps}", indent, f"{'by id':<14} ")
    lines += filled(f"step costs of {OTHERS}; source: config.json of each on huggingface.co", indent, " " * 15)
    by_kind: dict[str, list[str]] = {}
    for name, why in refused.items():
        by_kind.setdefault(why, []).append(name)
    for why, names in by_kind.items():
        lines += filled(f"{', '.join(names)}: {why}", indent, f"{'not simulated':<14} ")
    typer.echo("\n".join(lines))
