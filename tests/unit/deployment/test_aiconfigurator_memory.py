"""Weights and KV of a token on each GPU, beside those that aiconfigurator-core derives of the same deployments.

Its room for KV is no reference: it keeps 3.5 GiB for the engine (SGLang 4.2) and fewer activations, by assumption. What
engines said at their start is compared in `test_memory.py`.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from itertools import product
from pathlib import Path

import pytest

from batchsim.base.files import read_json, read_text
from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import ModelSpec
from tests.support.paths import ROOT

NAMES = {"vllm": ("vllm", "0.24.0"), "sglang": ("sglang", "0.5.14"), "tensorrt_llm": ("trtllm", "1.3.0rc20")}
"""What aiconfigurator-core 0.12.0 calls an engine, and its newest version there."""
UNLIKE = ("gpt-oss", "DeepSeek", "Kimi", "GLM")
"""Models whose weights differ: it has experts in the dense first layers of DeepSeek, Kimi-K2 and GLM-5 too and their
embedding whole on every GPU, and MXFP4 at half a byte, without its scales (17/32 with them) or vLLM's padding."""


def _deployments(configs: Path) -> Iterator[tuple[str, str, Deployment]]:
    """(Model, system, deployment) of each row of the file under each engine."""
    rows = csv.DictReader(read_text(ROOT / "tests/data/aiconfigurator_deployments.csv").splitlines())
    for row, engine in product(rows, NAMES):
        spec = ModelSpec.from_config(read_json(_config(configs, row["model"])), row["model"])
        for system, tp, ep in product(*(row[name].split() for name in ("systems", "tp", "ep"))):
            if int(ep) <= int(tp):
                its = Deployment(
                    spec, replace(GPUS["h100"], name=system), engine, NAMES[engine][1], int(tp), ep=int(ep)
                )
                yield row["model"], system, replace(its, weight_dtype=row["weights"], kv_dtype=row["kv"])


def _config(folder: Path, model: str) -> Path:
    return folder / f"{model.replace('/', '--')}_config.json"


@pytest.mark.slow
def test_weights_and_kv_of_a_token_are_those_of_aiconfigurator(tmp_path: Path) -> None:
    """Of 159 deployments every token's KV, and weights within 1.2 %, but for those of four families."""
    memory = pytest.importorskip("aiconfigurator_core.sdk.memory", reason="aiconfigurator-core (gpus) is not installed")
    configs = Path(str(resources.files("aiconfigurator_core"))) / "model_configs"
    count = 0
    for model, system, its in _deployments(configs):
        folder, types = tmp_path / model.replace("/", "--"), its.types
        folder.mkdir(exist_ok=True)
        shutil.copy(_config(configs, model), folder / "config.json")
        estimate = memory.estimate_kv_cache(
            str(folder), system, NAMES[its.engine][0], its.version, max_num_tokens=8192, max_batch_size=256,
            memory_fraction_kind="of_free" if its.rule.of_free else "of_total", memory_fraction_value=0.9,
            tp_size=its.tp, moe_tp_size=its.split.moe_tp, moe_ep_size=its.ep, gemm_quant_mode=types.mlp,
            moe_quant_mode={"mxfp4": "w4a16_mxfp4"}.get(types.experts, types.experts), kvcache_quant_mode=types.kv,
        )  # fmt: skip
        what = f"{its.engine} {system} {model} tp {its.tp} ep {its.ep}"
        assert its.kv_bytes_per_token == estimate["kv_size_per_token_bytes"], what
        near = 0.16 if any(name in model for name in UNLIKE) else 0.012
        assert its.weight_bytes == pytest.approx(estimate["memory_breakdown"]["weights_bytes"], rel=near), what
        count += 1
    assert count == 159
