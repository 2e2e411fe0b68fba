"""What comes with batchsim of the installed kernel tables, made anew of these, and how far profiles are from them.

    python -m tools.kernel_tables ship [SCENARIO ...] [--only TEXT ...]   # all need pip install 'batchsim[gpus]'
    python -m tools.kernel_tables support
    python -m tools.kernel_tables errors [MODEL ...]

`ship` makes the profiles of deployments for the newest version of their engines in the tables, in the place of older
ones, and prints how far each is from 200 direct queries: those of SCENARIOs, or with `--only` the shipped ones whose
names hold a TEXT. `support` writes sim/tables/timed.json: of which models the tables time steps, by engine and GPU.

`errors` makes profiles of sixteen models of eleven families on two GPUs under two engines and asks each 50 steps that
it was not made of: decodes, prompts with and without a prefix, both; as Markdown, with the reason where the tables time
none. It exits with 1 where a median is above 1 % or an error above 6 %, of sparse latent attention above 35 %.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata, resources
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from batchsim.base.errors import BatchsimError
from batchsim.base.files import read_text, write_text
from batchsim.cli.common import one_line_errors
from batchsim.cost.profile import load_profile
from batchsim.deployment.catalog import GPUS, read_model
from batchsim.deployment.deployment import Deployment
from batchsim.scenario import load_scenario
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.tables import compare
from batchsim.tables.build import build_profile
from batchsim.tables.find import build
from batchsim.tables.handle import Tables, holes_told
from batchsim.tables.models import model_spec
from batchsim.tables.modes import NoTablesError, has_experts

TABLES = Path(__file__).parents[1] / "sim" / "tables"
TIMED = TABLES / "timed.json"
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}  # by their names in the tables
QUERIES = 50
JUMPS = "sparse latent attention"
MEDIAN, WORST, WORST_OF_JUMPS = 0.01, 0.06, 0.35
NARROW_MEDIAN, NARROW_WORST = 0.02, 0.06  # of all deployments of the models that `narrow` names
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


def rows(names: Sequence[str]) -> Iterator[Row]:
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
                    errors = compare.errors_of(build_profile(tables), tables, queries=QUERIES)
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


MINIMAX, QWEN = "nvidia/MiniMax-M3-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4"
NOT_HERE = {(MINIMAX, "vllm"), (MINIMAX, "trtllm"), (QWEN, "vllm"), (QWEN, "sglang")}
"""What passed there with other types than its checkpoint's, which the tables time on no GPU."""


def timed(rows: Iterable[Mapping[str, str]]) -> dict[str, dict[str, list[str]]]:
    """The GPUs by model and engine of the rows for prompts and answers of one engine (`agg`) that passed here, too."""
    systems: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        if row["Mode"] != "agg" or row["Backend"] not in ENGINES:
            continue
        engines = systems.setdefault(row["HuggingFaceID"], {})
        here = (row["HuggingFaceID"], row["Backend"]) not in NOT_HERE
        if here and row["Status"] in ("PASS", "HYBRID_PASS"):
            engines.setdefault(ENGINES[row["Backend"]], set()).add(row["System"])
    return {
        model: {engine: sorted(systems[model][engine]) for engine in ENGINES.values() if engine in systems[model]}
        for model in sorted(systems, key=str.lower)
    }


def timed_text() -> str:
    """The text of timed.json, by what the tables' package says of itself: a row a model, system, engine, version and
    mode."""
    folder = Path(str(resources.files("aiconfigurator_core"))) / "systems" / "support_matrix"
    rows = [row for path in sorted(folder.glob("*.csv")) for row in csv.DictReader(read_text(path).splitlines())]
    source = f"aiconfigurator-core {metadata.version('aiconfigurator-core')}, systems/support_matrix/*.csv"
    lines = [f" {json.dumps(model)}: {json.dumps(engines)}" for model, engines in timed(rows).items()]
    return f'{{"source": {json.dumps(source)},\n"timed": {{\n' + ",\n".join(lines) + "\n}}\n"


def shipped(only: Sequence[str]) -> list[Deployment]:
    """The deployments of the shipped profiles whose names hold one of the texts, or of all."""
    names = sorted(path.stem for path in (TABLES / "profiles").glob("*.json"))
    chosen = [name for name in names if not only or any(text in name for text in only)]
    return [replace(load_profile(name).deployment, version="") for name in chosen]


def of_scenarios(scenarios: Sequence[str]) -> list[Deployment]:
    """The deployments that the scenarios name."""
    loaded = [(scenario.cost, scenario.model_path) for scenario in map(load_scenario, scenarios)]
    return [cost.deployment(read_model(model)) for cost, model in loaded if isinstance(cost, DeploymentConfig)]


app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
@one_line_errors
def ship(
    scenarios: Annotated[list[str] | None, typer.Argument(metavar="[SCENARIO ...]")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="TEXT")] = None,
) -> None:
    """Writes profiles and prints a line of each; exits with 1 if one is refused or further off than it may be."""
    asked = [*of_scenarios(scenarios or ()), *(shipped(only or ()) if only or not scenarios else ())]
    written, failed = set[str](), False
    print(compare.HEAD)
    for deployment in asked:
        try:
            profile = build(deployment)
        except BatchsimError as error:
            typer.echo(str(error), err=True)
            failed = True
            continue
        write_text(TABLES / "profiles" / f"{profile.name}.json", profile.to_json())
        written.add(profile.name)
        failed |= not compare.within(profile)
        print(compare.line(profile), flush=True)
    if failed:
        raise typer.Exit(1)
    for path in () if scenarios or only else (TABLES / "profiles").glob("*.json"):
        if path.stem not in written:
            path.unlink()


@app.command()
@one_line_errors
def support() -> None:
    """Writes which models the tables time."""
    write_text(TIMED, timed_text())


@app.command()
@one_line_errors
def errors(models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL ...]")] = None) -> None:
    """Prints the table of models whose names hold one of those given, or of all."""
    print(HEAD)
    made: list[Row] = []
    for row in rows(models or ()):
        print(row.line(), flush=True)
        made.append(row)
    print(f"\n{narrow(made)}")
    if not all(row.is_within for row in made):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
