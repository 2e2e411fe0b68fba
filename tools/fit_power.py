"""Fits the power laws of GPUs to published runs and prints by how much they miss the runs held out.

    python -m tools.fit_power [FILE]

FILE has a row a run, by default the rows that the tests hold: those of Llama 3, Qwen3 and DeepSeek-V3.1 models under
lm-arena-chat of the ML.ENERGY Benchmark v3 (github.com/ml-energy/leaderboard @ 0ea52b6, public/data/tasks; the data set
is under Apache-2.0), rounded to five digits. A row states the mean power of all GPUs, the mean batch and the output
tokens a second in steady state, so that a mean step takes batch / tokens a second. Prompts are not stated: taken to
have 120 tokens, and a decoding request to have read its prompt and three quarters of a mean answer.

A deployment is `model|gpu|gpus|weights`, and GIVEN where its SHA-256 is even; the others are held out. Least squares of
the relative error, deployments weighted alike, coefficients not negative; rows at 94 % of the board's limit or above,
which the limit holds, are left out of the fit and counted in the errors.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from batchsim.base.files import read_text
from batchsim.cost.power import POWER_LAWS, PowerLaw, scaled, step_power_w
from batchsim.cost.work import even_columns, useful_flops_bytes
from batchsim.deployment.catalog import load_gpu, read_model
from batchsim.deployment.deployment import Deployment

ROWS = Path(__file__).parents[1] / "tests/data/power/ml_energy_v3.csv"
PROMPT_TOKENS = 120
ANSWER_SHARE = 0.75
AT_LIMIT = 0.94
_SAME_SHAPE = {
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "Qwen/Qwen3-235B-A22B-FP8",
    "meta-llama/Llama-3.1-405B-Instruct-FP8": "meta-llama/Llama-3.1-405B-Instruct",
}


class Run(NamedTuple):
    """A published run: W of each GPU, and of a mean step the FLOPs, the bytes and the ns, on all GPUs together."""

    key: str
    given: bool
    watts: float
    deployment: Deployment
    flops: float
    moved: float
    step_ns: float

    def predicted(self, law: PowerLaw) -> float:
        """W of each GPU by `law`."""
        work = (np.array([value]) for value in (self.flops, self.moved, self.step_ns))
        return float(step_power_w(law, self.deployment, *work)[0]) / self.deployment.num_gpus


def read_runs(path: Path = ROWS) -> list[Run]:
    """The runs of a file, in its order."""
    return [_run(row) for row in csv.DictReader(read_text(path).splitlines())]


def _run(row: dict[str, str]) -> Run:
    model, gpus = row["model"], int(row["gpus"])
    batch, answer, watts, rate = (
        float(row[name]) for name in ("batch", "output_tokens", "power_w", "output_tokens_per_s")
    )
    shape = read_model(_SAME_SHAPE.get(model, model))
    stated = row["weights"] if row["weights"] == "fp8" and "Llama" in model else ""
    tp, groups = (gpus, 1) if all(kind.mlp.kind == "dense" for kind in shape.kinds) else (1, gpus)
    deployment = Deployment(shape, load_gpu(row["gpu"]), tp=tp, dp_attention=groups, ep=groups, weight_dtype=stated)
    prompts = batch / answer  # that end in a mean step: as many as answers do
    columns = even_columns(batch, PROMPT_TOKENS + ANSWER_SHARE * answer, prompts, PROMPT_TOKENS)
    flops, moved = useful_flops_bytes(deployment, columns)
    key = "|".join(row[name] for name in ("model", "gpu", "gpus", "weights"))
    given = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2 == 0
    return Run(key, given, watts / gpus, deployment, float(flops[0]), float(moved[0]), 1e9 * batch / rate)


def fit(runs: list[Run], limit_w: float) -> tuple[float, float, float]:
    """`active_w`, `compute_w` and `memory_w` of the law of least relative squares over `runs`, of one GPU."""
    parts = [PowerLaw(0, a, c, m, 1e9, "") for a, c, m in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    below = [run for run in runs if run.watts < AT_LIMIT * limit_w]
    of = [run.key for run in runs]
    weights = np.array([1 / run.watts / of.count(run.key) ** 0.5 for run in below])
    features = np.array([[run.predicted(part) for part in parts] for run in below])
    active, compute, memory = nnls(features * weights[:, None], np.array([run.watts for run in below]) * weights)[0]
    return float(active), float(compute), float(memory)


def errors(runs: list[Run], law: PowerLaw) -> tuple[float, float]:
    """The median and the 90th percentile of the size of the relative error of `law` over `runs`."""
    off = [abs(run.predicted(law) / run.watts - 1) for run in runs]
    return float(np.median(off)), float(np.quantile(off, 0.9))


def main(arguments: list[str]) -> None:
    """Prints of each GPU the fit to the given runs, and the errors of the law in the catalog."""
    runs = read_runs(Path(arguments[0]) if arguments else ROWS)
    for gpu in dict.fromkeys(run.key.split("|")[1] for run in runs):
        law, own = POWER_LAWS[gpu], [run for run in runs if run.key.split("|")[1] == gpu]
        given, held_out = ([run for run in own if run.given is part] for part in (True, False))
        fitted = ", ".join(f"{watts:.0f}" for watts in fit(given, law.limit_w))
        print(f"{gpu}: fitted to {len(given)} runs: active, compute, memory {fitted} W")
        for name, part in (("given", given), ("held out", held_out)):
            median, most = errors(part, law)
            print(f"  the catalog's law on {len(part)} runs {name}: off by {median:.3f} (median), {most:.3f} (p90)")
    median, most = errors([run for run in runs if "|b200_sxm|" in run.key], scaled(1000, "h100"))
    print(f"h100's shares of its limit on all runs of b200_sxm: off by {median:.3f} (median), {most:.3f} (p90)")


if __name__ == "__main__":
    main(sys.argv[1:])
