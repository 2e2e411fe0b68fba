"""Prints how far profiles of models of many kinds of layers are from direct queries of the installed kernel tables.

    python -m tools.table_errors [MODEL ...]            (needs pip install 'batchsim[gpus]')

Sixteen models of eleven families on two GPUs under two engines, each made anew and asked 50 steps that it was not made
of: 17 of decodes, 17 of prompts with and without a prefix, 16 of both, as a table in Markdown. A deployment that the
tables cannot time is a row with the reason. A sentence below names the models of which every deployment is timed within
2 % in the median and 6 % at worst. Exits with 1 where a median is above 1 % or an error above 6 %; of sparse latent
attention, of which the tables jump between prefixes, above 35 %.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
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
JUMPS = "sparse latent attention"
MEDIAN, WORST, WORST_OF_JUMPS = 0.01, 0.06, 0.35
NARROW_MEDIAN, NARROW_WORST = 0.02, 0.06
"""What the models of `narrow` keep to in each of their deployments."""
HEAD = "| model | layers | GPUs | engine | decodes | prompts | both | all |\n" + "|---" * 4 + "|--:" * 4 + "|"
MODELS = (
    ("Qwen/Qwen3.5-27B", 2, "", "gated delta net"),
    ("Qwen/Qwen3.5-35B-A3B", 1, "", "gated delta net, experts"),
    ("Qwen/Qwen3.5-122B-A10B", 4, "", "gated delta net, experts"),
    ("Qwen/Qwen3.5-397B-A17B", 8, "", "gated delta net, experts"),
    ("moonshotai/Kimi-K3", 8, "", "KDA and latent attention"),
    ("deepseek-ai/DeepSeek-V3.2", 8, "fp8", JUMPS),
    ("zai-org/GLM-5.2-FP8", 8, "fp8", JUMPS),
    ("sgl-project/DeepSeek-V4-Flash-FP8", 8, "fp8", "compressed attention"),
    ("sgl-project/DeepSeek-V4-Pro-FP8", 8, "fp8", "compressed attention"),
    ("MiniMaxAI/MiniMax-M3", 8, "", "block-sparse attention"),
    ("google/gemma-4-26B-A4B", 1, "", "windows of 1,024"),
    ("openai/gpt-oss-120b", 1, "", "windows of 128"),
    ("XiaomiMiMo/MiMo-V2-Flash", 8, "fp8", "windows of 128, other heads"),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 1, "", "Mamba2"),
    ("nvidia/Nemotron-H-56B-Base-8K", 4, "", "Mamba2"),
    ("Qwen/Qwen3-VL-8B-Instruct", 1, "", "full attention"),
)
"""Of the models that the tables can time under both engines: of how many GPUs, the type of the KV cache ("": the
checkpoint's), and the layers."""
FAMILIES = (
    *("Qwen3.5", "Kimi-K3", "DeepSeek-V3.2", "GLM-5", "DeepSeek-V4", "MiniMax-M3", "gemma-4", "gpt-oss", "MiMo-V2"),
    *("Nemotron", "Qwen3-VL"),
)
"""Parts of the names of models that say which family each is of."""


class Row(NamedTuple):
    """One deployment in words, and (median, worst) of its absolute errors: of decodes, prompts, both, and all together;
    `reason`: why there are none."""

    words: tuple[str, ...]
    errors: tuple[tuple[float, float], ...] = ()
    reason: str = ""

    @property
    def is_within(self) -> bool:
        """Whether all errors together are no more than they may be of this family; also where there are none."""
        most = WORST_OF_JUMPS if JUMPS in self.words else WORST
        return all(median <= MEDIAN and worst <= most for median, worst in self.errors[-1:])

    @property
    def is_narrow(self) -> bool:
        """Whether the deployment is timed, and all errors together are within the narrow bounds."""
        return any(median <= NARROW_MEDIAN and worst <= NARROW_WORST for median, worst in self.errors[-1:])

    def line(self) -> str:
        """The row in Markdown, errors in percent."""
        cells = [f"{100 * median:.1f} / {100 * worst:.1f}" for median, worst in self.errors]
        return f"| {' | '.join((*self.words, *(cells or (f'not timed: {self.reason}', '', '', ''))))} |"


def quantiles(errors: Mapping[str, list[float]]) -> tuple[tuple[float, float], ...]:
    """(Median, worst) of the sizes of the errors of each kind of step, and of all."""
    kinds = [*errors.values(), [error for of_kind in errors.values() for error in of_kind]]
    return tuple((float(np.median(np.abs(each))), float(np.max(np.abs(each)))) for each in kinds)


def rows(names: list[str]) -> Iterator[Row]:
    """One row for each deployment of the models that have one of the names in theirs, asked now; of all for none."""
    for name, tp, kv, family in MODELS:
        if names and not any(part in name for part in names):
            continue
        spec = model_spec(name)
        for gpu, engine in ((gpu, engine) for gpu in ("h200", "b200_sxm") for engine in ("vllm", "sglang")):
            ep = tp if has_experts(spec) else 1
            words = (name.rpartition("/")[2], family, f"{gpu} × {tp}")
            try:
                tables = Tables(Deployment(spec, GPUS[gpu], engine=engine, tp=tp, ep=ep, kv_dtype=kv))
                with holes_told(tables):
                    errors = errors_of(build_profile(tables), tables, queries=QUERIES)
            except NoTablesError as error:
                yield Row((*words, engine), reason=error.reason)
                continue
            yield Row((*words, f"{engine} {tables.backend}"), quantiles(errors))


def narrow(table: Iterable[Row]) -> str:
    """A sentence that names the models in all of whose rows errors are within the narrow bounds, and counts them."""
    rows_of: dict[str, list[Row]] = {}
    for row in table:
        rows_of.setdefault(row.words[0], []).append(row)
    models = [model for model, each in rows_of.items() if all(row.is_narrow for row in each)]
    families = {family for model in models for family in FAMILIES if family in model}
    return (
        f"Within {NARROW_MEDIAN:.0%} in the median and {NARROW_WORST:.0%} at worst wherever they run here are"
        f" {len(models)} models of {len(families)} families: {', '.join(models)}."
    )


def main(names: list[str]) -> int:
    """Prints the table; 1 if a row is beyond what it may be."""
    print(HEAD)
    made: list[Row] = []
    for row in rows(names):
        print(row.line(), flush=True)
        made.append(row)
    print(f"\n{narrow(made)}")
    return 0 if all(row.is_within for row in made) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
