"""Prints how far derived KV memory is from what engines said at their start, and from AIConfigurator's own estimates.

    python -m tools.kv_memory             # start-ups, of results/reference/kv/startups.csv
    python -m tools.kv_memory --estimates # `estimate_kv_cache` of aiconfigurator-core, which must be installed

Both are of one GPU, in bytes of weights and of KV. An estimate keeps other reserves than batchsim does, 3.5 GiB for the
engine among them, so that its KV is compared twice: as either derives it, and with the estimate's reserves in both.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from batchsim.base.files import read_bytes, read_json, read_text, write_bytes
from batchsim.deployment.catalog import GPUS, MODELS, read_model
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.memory import Reserve
from batchsim.deployment.model import GpuSpec, ModelSpec

REFERENCE = Path(__file__).resolve().parent.parent / "results" / "reference" / "kv"
GIB = 2**30
SYSTEMS = {"h100_sxm": 80 * GIB, "h200_sxm": 141 * GIB, "b200_sxm": 180 * GIB, "l40s": 46_068 * 2**20}
"""Memory of the systems of aiconfigurator-core 0.12.0 by their names, as it counts it."""
RELEASES = {"vllm": "0.24.0", "sglang": "0.5.14", "tensorrt_llm": "1.3.0rc20"}
BACKENDS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}
_QUANTS = {"bfloat16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
_MOE = {"bfloat16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "mxfp4": "w4a16_mxfp4"}
STEP = {"step_tokens": 8192, "step_requests": 256}


def gpu_of(name: str, memory_bytes: int) -> GpuSpec:
    """A GPU of so much memory; nothing else of it counts here."""
    return replace(GPUS["h100"], name=name, memory_bytes=memory_bytes)


def room_of(deployment: Deployment, share: float | None, *, kept: int | None = None, **step: int) -> int:
    """Bytes for KV on one GPU, negative where none are left; `kept` in the place of the derived reserves."""
    gpu, rule = deployment.gpu, deployment.rule
    assert gpu is not None
    reserve = rule.reserve(deployment.version, deployment.model, deployment.split, *step.values())
    if kept is not None:
        reserve = Reserve.stated(kept)
    used = rule.default_share(deployment.version, gpu.memory_bytes, deployment.num_gpus) if share is None else share
    return rule.room(gpu.memory_bytes, used, deployment.weight_bytes, reserve)


# ---- start-ups


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


# ---- estimates


@dataclass(frozen=True)
class Estimate:
    """One deployment with AIConfigurator's weights, KV bytes of a token and room for KV, in bytes of one GPU."""

    name: str
    deployment: Deployment
    weight_bytes: int
    token_bytes: int
    room: int
    kept: int
    tokens: int


def estimates(scratch: str) -> Iterator[Estimate | str]:
    """An estimate of each deployment; where there is none, in words why. `scratch`: an empty folder."""
    from aiconfigurator_core.sdk.memory import (  # pyright: ignore[reportMissingImports]
        estimate_kv_cache,  # pyright: ignore[reportUnknownVariableType]
    )

    for engine, system, name, tp, ep, types in _deployments():
        title = f"{engine} {system} {name} tp {tp}" + (f" ep {ep}" if ep > 1 else "")
        weights, experts, kv = types
        its = Deployment(
            _model(name),
            gpu_of(system, SYSTEMS[system]),
            engine,
            RELEASES[engine],
            tp=tp,
            ep=ep,
            weight_dtype=weights,
            moe_dtype=experts,
            kv_dtype=kv,
        )
        used, folder = its.types, Path(scratch) / name.replace("/", "--")
        folder.mkdir(exist_ok=True)
        write_bytes(folder / "config.json", read_bytes(_config_of(name)))
        try:
            found: dict[str, Any] = estimate_kv_cache(
                str(folder),
                system,
                BACKENDS[engine],
                RELEASES[engine],
                max_num_tokens=STEP["step_tokens"],
                max_batch_size=STEP["step_requests"],
                memory_fraction_kind="of_free" if its.rule.of_free else "of_total",
                memory_fraction_value=0.9,
                tp_size=tp,
                moe_tp_size=its.split.moe_tp,
                moe_ep_size=ep,
                gemm_quant_mode=_QUANTS[used.mlp],
                moe_quant_mode=_MOE[used.experts],
                kvcache_quant_mode=_QUANTS[used.kv],
            )
        except Exception as error:  # whatever it lacks is a row of the table
            yield f"{title}: {str(error).splitlines()[0][-160:]}"
            continue
        parts = found["memory_breakdown"]
        kept = sum(size for part, size in parts.items() if part != "weights_bytes")
        yield Estimate(
            title,
            its,
            parts["weights_bytes"],
            found["kv_size_per_token_bytes"],
            found["total_kv_size_bytes"],
            kept,
            found["total_kv_size_tokens"],
        )


def _deployments() -> Iterator[tuple[str, str, str, int, int, tuple[str, str, str]]]:
    """(engine, system, model, tp, ep, types of weights, experts and KV, "" for the checkpoint's)."""
    own = ("", "", "")
    rows = [
        ("meta-llama/Meta-Llama-3.1-8B", (1, 2), (1,), (own, ("fp8", "", "fp8")), ("h100_sxm", "l40s")),
        ("meta-llama/Meta-Llama-3.1-70B", (4, 8), (1,), (own, ("fp8", "", "fp8")), ("h100_sxm", "h200_sxm")),
        ("meta-llama/Meta-Llama-3.1-405B", (8,), (1,), (("fp8", "", "fp8"),), ("h200_sxm", "b200_sxm")),
        ("Qwen/Qwen3-32B", (2, 4), (1,), (own,), ("h100_sxm", "l40s", "b200_sxm")),
        ("Qwen/Qwen3-32B-FP8", (1, 2), (1,), (own,), ("h100_sxm",)),
        ("mistralai/Mixtral-8x7B-v0.1", (2, 4), (1,), (own,), ("h100_sxm", "h200_sxm")),
        ("openai/gpt-oss-120b", (1, 2, 4), (1,), (own,), ("h100_sxm", "b200_sxm")),
        ("Qwen/Qwen3-235B-A22B-FP8", (4,), (1, 4), (own,), ("h100_sxm", "h200_sxm")),
        ("Qwen/Qwen3-235B-A22B-FP8", (8,), (4, 8), (own,), ("h200_sxm",)),
        ("Qwen/Qwen3-30B-A3B", (1, 2), (1,), (own,), ("h100_sxm",)),
        ("deepseek-ai/DeepSeek-V3", (8,), (1, 8), (own,), ("h200_sxm", "b200_sxm")),
        ("deepseek-ai/DeepSeek-V3.2", (8,), (8,), (own,), ("h200_sxm", "b200_sxm")),
        ("zai-org/GLM-5-FP8", (8,), (8,), (own,), ("h200_sxm",)),
        ("MiniMaxAI/MiniMax-M2.5", (4,), (1,), (own,), ("h200_sxm",)),
        ("moonshotai/Kimi-K2-Instruct", (8,), (8,), (own,), ("b200_sxm",)),
    ]
    for engine in RELEASES:
        for name, tps, eps, types, systems in rows:
            for system in systems:
                for tp in tps:
                    for ep in eps:
                        for each in types:
                            if ep <= tp:
                                yield engine, system, name, tp, ep, each


def _config_of(name: str) -> Path:
    """The config.json that aiconfigurator-core has of the model of that Hugging Face id."""
    import aiconfigurator_core  # pyright: ignore[reportMissingImports]

    folder = Path(str(aiconfigurator_core.__file__)).parent / "model_configs"
    return folder / f"{name.replace('/', '--')}_config.json"


def _model(name: str) -> ModelSpec:
    return ModelSpec.from_config(read_json(_config_of(name)), name)


# ---- tables


def _percent(value: float, against: float) -> str:
    return f"{100 * (value / against - 1):+.1f} %" if against else "–"


def _print(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, tuple("-" * width for width in widths), *rows):
        print("| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |")


def main() -> None:
    """Prints one of the two tables."""
    parser = argparse.ArgumentParser(prog="python -m tools.kv_memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--estimates", action="store_true", help="against aiconfigurator-core's estimates")
    if not parser.parse_args().estimates:
        head = ("engine", "model", "GPUs", "weights said, GiB", "derived", "off", "KV said, GiB", "derived", "off")
        _print(head, list(startups()))
        return
    with TemporaryDirectory() as scratch:
        found = list(estimates(scratch))
    known = [each for each in found if isinstance(each, Estimate)]
    rows: list[tuple[str, ...]] = []
    errors: dict[str, list[float]] = {"weights": [], "token": [], "KV": [], "KV, same reserves": []}
    for each in known:
        its = each.deployment
        same = room_of(its, 0.9, kept=each.kept, **STEP)
        pairs = (
            (its.weight_bytes, each.weight_bytes),
            (its.kv_bytes_per_token, each.token_bytes),
            (room_of(its, 0.9, **STEP), each.room),
            (same, each.room),
        )
        for name, (mine, other) in zip(errors, pairs, strict=True):
            errors[name].append(mine / other - 1)
        types = "/".join(dict.fromkeys((its.types.mlp, its.types.experts, its.types.kv)))
        rows.append((each.name, types, f"{each.weight_bytes / 1e9:.1f}", *(_percent(*pair) for pair in pairs)))
    _print(("deployment", "types", "weights, GB", *errors), rows)
    print()
    for name, shares in errors.items():
        sizes = sorted(abs(share) for share in shares)
        high = sizes[int(0.95 * (len(sizes) - 1))]
        print(
            f"{name}: median |error| {100 * statistics.median(sizes):.2f} %, p95 {100 * high:.2f} %, mean"
            f" {100 * statistics.fmean(shares):+.2f} %, of {len(shares)} deployments"
        )
    for each in found:
        if isinstance(each, str):
            print(f"no estimate: {each}")


if __name__ == "__main__":
    main()
