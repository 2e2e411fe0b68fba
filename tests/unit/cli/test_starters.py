"""What `batchsim init` promises: every starter is run, and its comment is held to the results."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.cli.starter import starter_text
from batchsim.deployment.catalog import MODELS
from batchsim.metrics.slo import parse_slo
from batchsim.results.keep import measured_point, summary_rows
from batchsim.results.landmarks import curve
from batchsim.scenario.load import load_scenario
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.planning.demand import demand_of
from batchsim.workload.traces.inspect import inspect_trace
from batchsim.workload.traces.trace_config import Columns, TraceConfig
from tests.support.tiny_scenario import batchsim

FITS_NONE = {
    ("llama-3.1-70b", gpu): "Use --gpu h200 or h100 or a100, or a smaller --model." for gpu in ("l40s", "rtx4090")
}
BOARDS = ("h200", "h100", "a100", "l40s", "rtx4090")
PAIRS = [pair for pair in product(MODELS, BOARDS) if pair not in FITS_NONE]


def kept(text: str, folder: Path) -> dict[str, list[bool]]:
    """Whether each policy of the scenario keeps the SLO at each of its rates, as a run of it says."""
    scenario = parse_scenario(text, "starter.yaml", folder)
    setup = Setup.of(scenario)
    results = [measured_point(setup, simulate_point(setup, point), "").result for point in scenario.points()]
    rows, slo = summary_rows(scenario, results), parse_slo(scenario.file.slo)
    return {
        spec.label: [tested.meets_slo for tested in curve([r for r in rows if r["policy"] == spec.label], slo)]
        for spec in scenario.specs
    }


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_a_starter_shows_what_its_comment_expects(model: str, gpu: str, tmp_path: Path) -> None:
    """On each of some GPUs, for every model of the catalog, on as many GPUs as that takes."""
    text = starter_text(model, gpu, tmp_path, None, None)
    expected = "# Expect:   continuous batching keeps the SLO at each of these rates\n"
    assert expected in text
    assert kept(text, tmp_path) == {"static": [False] * 3, "continuous": [True] * 3}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu", "advice"), [(*pair, advice) for pair, advice in FITS_NONE.items()])
def test_a_gpu_that_serves_no_load_is_refused(model: str, gpu: str, advice: str, tmp_path: Path) -> None:
    """One line says so and which GPUs of the catalog do."""
    with pytest.raises(ScenarioError, match="not even at 1 request/s") as caught:
        starter_text(model, gpu, tmp_path, None, None)
    assert str(caught.value).endswith(advice)


def test_a_model_that_8_gpus_cannot_hold_is_refused(tmp_path: Path) -> None:
    """What is short is said of the memory, before anything is simulated."""
    huge = tmp_path / "config.json"
    shape = {"hidden_size": 32768, "num_hidden_layers": 200, "num_attention_heads": 64, "num_key_value_heads": 8}
    rest = {"intermediate_size": 131072, "vocab_size": 128256, "max_position_embeddings": 8192}
    huge.write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", **shape, **rest}))
    with pytest.raises(ScenarioError, match=r"on h200: .* GB short of one KV block: .* Use a smaller model"):
        starter_text(str(huge), "h200", tmp_path, None, None)


@pytest.mark.parametrize(("output", "tp"), [(100, 2), (30_000, 4)])
def test_a_trace_gets_the_gpus_that_hold_its_longest_request(output: int, tp: int, tmp_path: Path) -> None:
    """Two H100 leave Llama-3.1-70B memory for 23,280 tokens; and of a trace's load nothing is promised."""
    (tmp_path / "my.csv").write_text(f"a,b,c\n0,5,{output}\n1,7,8\n")
    columns = {"arrival": "a", "prompt": "b", "output": "c"}
    trace = TraceConfig(str(tmp_path / "my.csv"), columns=Columns(**columns), time_unit="s")
    text = starter_text("llama-3.1-70b", "h100", tmp_path, trace, inspect_trace(trace, tmp_path))
    assert f"tp: {tp}}}  # the fewest GPUs that hold the model and the longest request\n" in text
    assert "# Expect:   not known before it is run\n" in text


def test_a_trace_whose_longest_request_fits_nowhere_is_refused(tmp_path: Path) -> None:
    """The line has both numbers of tokens."""
    (tmp_path / "my.csv").write_text("a,b\n5,2_000_000\n".replace("_", ""))
    trace = TraceConfig(str(tmp_path / "my.csv"), columns=Columns("a", "b"))
    with pytest.raises(ScenarioError, match=r"takes 2,000,005 tokens of KV memory, and up to 8 GPUs have 1,384,960\."):
        starter_text("llama-3.1-70b", "h100", tmp_path, trace, inspect_trace(trace, tmp_path))


@pytest.mark.parametrize(
    ("options", "peak"),
    [
        ([], 40 * 1.05**3),
        (["--engine", "vllm", "--gpu", "h100_sxm", "--model", "meta-llama/Llama-3.1-70B", "--tp", "4"], 20 * 1.05**3),
        (["--trace", "my.csv", "--columns", "arrival=a,prompt=b,output=c", "--time-unit", "s"], 4 * 1.05**3),
    ],
    ids=["drawn", "deployed", "replayed"],
)
def test_a_starter_with_a_plan_has_one(
    options: list[str], peak: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own GPU, for more than one of these carries, and with a window that is there in a trace's traffic."""
    monkeypatch.chdir(tmp_path)
    Path("my.csv").write_text("a,b,c\n" + "".join(f"{2 * n},50,10\n" for n in range(40)))
    result = batchsim("init", "--plan", *options, "-o", "p.yaml")
    assert result.stdout == "p.yaml   next: batchsim plan p.yaml\n", result.stderr
    scenario = load_scenario("p.yaml")
    demand = demand_of(scenario)
    assert demand.peak == pytest.approx(peak)
    assert scenario.file.plan is not None
    assert {name: offer.cost for name, offer in scenario.file.plan.gpus.items()} == {gpu_of(options): scenario.cost}


def gpu_of(options: list[str]) -> str:
    return options[options.index("--gpu") + 1] if "--gpu" in options else "h200"
