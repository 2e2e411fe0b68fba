"""Prints how far profiles of models of many kinds of layers are from direct queries of the installed kernel tables.

    python -m tools.table_errors [--markdown] [MODEL ...]            (needs pip install 'batchsim[gpus]')

Twelve models of eight families on two GPUs under two engines, each made anew and asked 50 steps that it was not made
of: 17 of decodes, 17 of prompts with and without a prefix, 16 of both. A deployment that the tables cannot time is a
line with the reason. Exits with 1 where a median is above 2 % or an error above 6 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.tables.build import build_profile
from batchsim.tables.compare import errors_of
from batchsim.tables.handle import Tables, holes_told
from batchsim.tables.models import model_spec
from batchsim.tables.modes import NoTablesError, has_experts

QUERIES = 50
MEDIAN, WORST = 0.02, 0.06


class Model(NamedTuple):
    """A model of the tables, of how many GPUs, the type of its KV cache ("": the checkpoint's), and its family."""

    name: str
    tp: int
    kv: str
    family: str


MODELS = (
    Model("Qwen/Qwen3.5-27B", 2, "", "gated delta net"),
    Model("Qwen/Qwen3.5-35B-A3B", 1, "", "gated delta net, experts"),
    Model("Qwen/Qwen3.5-397B-A17B", 8, "", "gated delta net, experts"),
    Model("moonshotai/Kimi-K3", 8, "", "KDA and latent attention"),
    Model("deepseek-ai/DeepSeek-V3.2", 8, "fp8", "sparse latent attention"),
    Model("zai-org/GLM-5.2-FP8", 8, "fp8", "sparse latent attention"),
    Model("sgl-project/DeepSeek-V4-Flash-FP8", 8, "fp8", "compressed attention"),
    Model("MiniMaxAI/MiniMax-M3", 8, "", "block-sparse attention"),
    Model("google/gemma-4-26B-A4B", 1, "", "windows of 1,024"),
    Model("openai/gpt-oss-120b", 1, "", "windows of 128"),
    Model("XiaomiMiMo/MiMo-V2-Flash", 8, "fp8", "windows of 128, other heads"),
    Model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 1, "", "Mamba2"),
)
"""Of the models that the tables can time under both engines."""


class Row(NamedTuple):
    """Errors of one deployment by kind of step, absolute; `reason`: why there are none."""

    model: Model
    gpu: str
    engine: str
    version: str
    errors: dict[str, list[float]]
    reason: str

    def quantiles(self) -> list[tuple[float, float]]:
        """(Median, worst) of decodes, prompts, both, and all together."""
        kinds = [*self.errors.values(), [error for of_kind in self.errors.values() for error in of_kind]]
        return [(float(np.median(np.abs(each))), float(np.max(np.abs(each)))) for each in kinds]

    @property
    def is_within(self) -> bool:
        return bool(self.reason) or all(median <= MEDIAN and worst <= WORST for median, worst in self.quantiles()[-1:])


def rows(models: list[Model]) -> Iterator[Row]:
    """One row for each deployment of the models, asked now."""
    for model in models:
        spec = model_spec(model.name)
        for gpu in ("h200", "b200_sxm"):
            for engine in ("vllm", "sglang"):
                ep = model.tp if has_experts(spec) else 1
                deployment = Deployment(spec, GPUS[gpu], engine=engine, tp=model.tp, ep=ep, kv_dtype=model.kv)
                try:
                    tables = Tables(deployment)
                    with holes_told(tables):
                        errors = errors_of(build_profile(tables), tables, queries=QUERIES)
                except NoTablesError as error:
                    yield Row(model, gpu, engine, "", {}, error.reason)
                    continue
                yield Row(model, gpu, engine, tables.backend, errors, "")


def line(row: Row, *, markdown: bool) -> str:
    """The row as a line of a table."""
    name = row.model.name.rpartition("/")[2]
    words = [name, row.model.family, f"{row.gpu} × {row.model.tp}", f"{row.engine} {row.version}".strip()]
    if row.reason:
        words += [f"not timed: {row.reason}", "", "", ""][: 4 if markdown else 1]
    else:
        words += [f"{100 * median:.1f} / {100 * worst:.1f}" for median, worst in row.quantiles()]
    if markdown:
        return "| " + " | ".join(words) + " |"
    widths = (40, 30, 14, 16)
    return "".join(word.ljust(width) for word, width in zip(words, widths, strict=False)) + "".join(
        f"{word:>13}" for word in words[4:]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help="names to look for in the models'; all, if none is given")
    parser.add_argument("--markdown", action="store_true", help="print a table of Markdown")
    args = parser.parse_args()
    chosen = [model for model in MODELS if not args.model or any(name in model.name for name in args.model)]
    head = ["model", "layers", "GPUs", "engine", "decodes", "prompts", "both", "all"]
    if args.markdown:
        print("| " + " | ".join(head) + " |\n" + "|---" * 4 + "|--:" * 4 + "|")
    else:
        print("errors in % of direct queries, median / worst of 17 decodes, 17 prompts, 16 of both")
    failed = 0
    for row in rows(chosen):
        print(line(row, markdown=args.markdown), flush=True)
        failed += not row.is_within
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
