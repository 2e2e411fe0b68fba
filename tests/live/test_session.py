"""One point on a tiny real model, in real time: the records are those of the scenario, and a file keeps all of it."""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.calibrate.engine.identity import identity
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.calibrate.engine.session import LiveResult, load_result, run_live, step_limits
from batchsim.calibrate.profile.bench import Bench
from batchsim.calibrate.profile.point_plan import StepShape
from batchsim.calibrate.profile.this_machine import Sentinel, check_machine, graphs_of
from batchsim.cost.constant import Constant
from batchsim.cost.profile import load_profile, profile_names
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.kernel.record import FINISHED, Records
from batchsim.metrics.attribution import attribute
from batchsim.policies.systems.vllm.speculative_config import SpeculativeConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tests.support.predicted import predict

SCENARIO = """\
model: {model}
cost: {{kind: constant, step: 2ms}}
kv: {{tokens: 1024, swap_space: 1MB}}
max_model_len: 256
workload:
  arrivals: {{kind: poisson, mean_rate: 200/s}}
  lengths:
    prompt: {{kind: uniform, min: 4, max: 40}}
    output: {{kind: uniform, min: 1, max: 12}}
  output_cap: 16
  requests: 24
policies:
  static: {{batch_size: 4, max_wait: 20ms, respond: row_end}}
  continuous: {{max_num_seqs: 8, max_num_batched_tokens: 32}}
  preemptive: {{max_num_seqs: 8, max_num_batched_tokens: 64, by: auto}}
  vllm: {{enable_prefix_caching: false, async_scheduling: true, max_num_seqs: 8, max_num_batched_tokens: 32}}
  drafts:
    kind: vllm
    async_scheduling: {{best_of: [false, true]}}
    max_num_seqs: 8
    max_num_batched_tokens: 32
    speculative_config: {{method: ngram, num_speculative_tokens: 2, acceptance: 0.5, prompt_lookup_min: 1}}
  uncapped: {{kind: preemptive, max_num_seqs: 3, max_num_batched_tokens: null}}
slo: ttft<1s @ 90%
seeds: 1
"""

CONFIG = """\
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 64, "vocab_size": 97, "max_position_embeddings": 512, "torch_dtype": "float32"}
"""


DRAFTS = ["drafts (as False)", "drafts (as True)"]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """The tiny scenario."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "tiny.json").write_text(CONFIG)
    (folder / "s.yaml").write_text(SCENARIO.format(model="tiny.json"))
    return Setup.of(load_scenario(str(folder / "s.yaml")))


@pytest.fixture(scope="module")
def runner(setup: Setup) -> ModelRunner:
    """The tiny model with room for every policy of the scenario."""
    max_num_seqs, max_tokens = step_limits(setup, setup.scenario.specs, 1.0, 0)
    return build_runner(
        setup.scenario.model_path,
        device="cpu",
        num_blocks=64,
        num_swap_blocks=setup.num_swap_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_model_len=setup.max_model_len,
    )


@pytest.fixture(scope="module")
def played(setup: Setup, runner: ModelRunner) -> LiveResult:
    """One live run."""
    return run_live(setup, setup.scenario.find("continuous"), 1.0, 0, runner)


@pytest.mark.parametrize("policy", ["static", "continuous", "preemptive", "vllm", "uncapped", *DRAFTS])
def test_a_live_run_serves_every_request_of_the_scenario(policy: str, setup: Setup, runner: ModelRunner) -> None:
    """Every request ends with its true length, at its intended arrival, and each ns of its life is explained."""
    result = run_live(setup, setup.scenario.find(policy), 1.0, 0, runner, estimator=Constant(2_000_000))
    requests, steps = result.records.requests, result.records.steps
    workload = setup.workload(1.0, 0)
    offered = workload.columns()
    assert result.reason == "" and set(requests["outcome"]) == {FINISHED}
    for name in ("request_id", "arrival_ns", "prompt_tokens", "output_tokens"):
        assert requests[name].tolist() == offered[name].tolist()
    assert len(result.kernel_ns) == len(result.host_ns) == len(steps)
    assert len(result.records.lanes) == (len(steps) if policy in ("vllm", DRAFTS[1]) else 0)
    counts = result.made.get("drafts", {})
    assert (policy in DRAFTS) == bool(counts) and sum(counts.get("right", ())) == steps["num_accepted_tokens"].sum()
    assert (steps["duration_ns"] >= result.kernel_ns).all() and (result.kernel_ns > 0).all()
    assert (steps["start_ns"][1:] >= (steps["start_ns"] + steps["duration_ns"])[:-1]).all()
    total = attribute(result.records).groupby("request_id", observed=True)["ns"].sum()
    assert total.tolist() == (requests["delivered_ns"] - requests["sent_ns"]).tolist()


def test_a_live_run_and_a_prediction_are_alike_in_form(setup: Setup, played: LiveResult) -> None:
    """What is true of a point whoever times its steps is equal: window, offered, policy, streaming, KV blocks."""
    predicted = predict(setup, setup.scenario.find("continuous"), 1.0, 0, Constant(2_000_000))
    for name in ("policy", "load", "seed", "window_ns", "num_offered", "streams", "num_blocks"):
        assert getattr(played, name) == getattr(predicted, name)
    assert len(predicted.kernel_ns) == 0 and (predicted.records.requests["lag_ns"] == 0).all()
    assert (played.records.requests["lag_ns"] > 0).all() and played.made["weights"] == "random (seed 0)"


def test_a_result_comes_back_from_its_file(played: LiveResult, tmp_path: Path) -> None:
    """Saving and loading give an equal result, and leave nothing else behind."""
    played.save(tmp_path / "run.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["run.npz"]
    again = load_result(tmp_path / "run.npz")
    for field in fields(LiveResult):
        ours, its = getattr(played, field.name), getattr(again, field.name)
        if isinstance(ours, Records):
            assert (ours.texts, ours.details) == (its.texts, its.details)
            pairs = [(getattr(ours, name), getattr(its, name)) for name in ("requests", "steps", "states", "lanes")]
        elif isinstance(ours, np.ndarray):
            pairs = [(ours, its)]
        else:
            assert ours == its
            pairs = []
        assert all(one.dtype == other.dtype and one.tobytes() == other.tobytes() for one, other in pairs)


def test_what_is_no_result_is_one_line(played: LiveResult, tmp_path: Path) -> None:
    """A missing, a foreign and a cut file, one that is none, and one that says it is vast, are no results."""
    played.save(tmp_path / "run.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "run.npz").read_bytes()[:200])
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    os.mkfifo(tmp_path / "fifo.npz")
    (tmp_path / "zero.npz").symlink_to("/dev/zero")
    with zipfile.ZipFile(tmp_path / "vast.npz", "w") as archive:
        entry = io.BytesIO()
        np.lib.format.write_array_header_2_0(entry, {"descr": "<U1", "fortran_order": False, "shape": (1 << 50,)})
        archive.writestr("head.npy", entry.getvalue())
    for name, complaint in [
        ("none.npz", "no such file"),
        ("cut.npz", "cannot be read as a live result"),
        ("text.npz", "cannot be read as a live result"),
        ("other.npz", "cannot be read as a live result"),
        ("fifo.npz", "cannot be read as a live result: is a FIFO, not a regular file"),
        ("zero.npz", "cannot be read as a live result: is a character device"),
        ("vast.npz", "cannot be read as a live result"),
    ]:
        with pytest.raises(ScenarioError, match=f"{name}: {complaint}") as caught:
            load_result(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ScenarioError, match="cannot be written"):
        played.save(tmp_path / "nowhere" / "run.npz")


def test_step_limits_hold_what_a_policy_can_ask_for(setup: Setup) -> None:
    """A token budget bounds a step; without one, as many of the longest requests as there are slots."""
    requests = setup.workload(1.0, 0).requests
    longest = int((requests.prompt_tokens + requests.max_output_tokens).max())
    assert step_limits(setup, (setup.scenario.find("continuous"),), 1.0, 0) == (8, 32)
    assert step_limits(setup, (setup.scenario.find("uncapped"),), 1.0, 0) == (3, 3 * longest)
    assert step_limits(setup, (setup.scenario.find("static"),), 1.0, 0) == (4, 4 * longest)
    assert step_limits(setup, (setup.scenario.find(DRAFTS[0]),), 1.0, 0) == (24, 32), "a row for each draft too"
    nameless = replace(setup.scenario.find("static"), config=PolicyConfig())
    with pytest.raises(ScenarioError, match="no max_num_seqs"):
        step_limits(setup, (nameless,), 1.0, 0)
    modelled = VllmConfig(speculative_config=SpeculativeConfig("eagle", 3, 0.5))
    with pytest.raises(ScenarioError, match="static: no draft model runs here"):
        step_limits(setup, (replace(setup.scenario.find("static"), config=modelled),), 1.0, 0)


def test_a_runner_of_another_model_or_memory_is_refused(setup: Setup, runner: ModelRunner) -> None:
    """The first thing that differs is named with both values."""
    policy = setup.scenario.find("continuous")
    wider = replace(setup.model, intermediate_size=128)
    for changed, complaint in [
        (replace(setup, model=wider), "intermediate_size of the model is 128, of the loaded one 64"),
        (replace(setup, kv=replace(setup.kv, num_blocks=65)), "num_blocks is 65, the loaded model has 64"),
        (replace(setup, kv=replace(setup.kv, block_size=32)), "KV blocks hold 32 tokens, those of the loaded model 16"),
    ]:
        with pytest.raises(ScenarioError, match=complaint):
            run_live(changed, policy, 1.0, 0, runner)


def test_the_sentinel_tells_the_drift_by_median_and_by_mean(
    setup: Setup, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replay of a visit is interrupted: the mean is a fifth longer, the median is not; before and after a run."""

    def replay(n: int) -> list[int]:
        return [1000] * n if n == 1 else [1000] * (n - 1) + [1000 + 200 * n]

    monkeypatch.setattr(runner, "replay", replay)
    sentinel = Sentinel(StepShape("A", (3,)), 1000.0, 1100.0)
    made = run_live(setup, setup.scenario.find("continuous"), 1.0, 0, runner, sentinel=sentinel).made
    assert made["drift"] == [0.0, 0.0] and made["drift_of_means"] == pytest.approx([1200 / 1100 - 1] * 2)
    bench = Bench(runner, sentinel.point, seed=0)
    bench.watch(now=True)
    assert (bench.usual_ns(), bench.mean_ns()) == (1000, 1200)
    too_long = Sentinel(StepShape("A", (10**6,)), 1000.0, 1000.0)
    assert too_long.drift(runner) is None


def test_a_profile_without_the_sentinels_mean_has_no_sentinel() -> None:
    """Older profiles kept its median alone, which does not say what interrupted them then."""
    profile = load_profile(profile_names()[0])
    point, known = StepShape("A", (3,)), {"sentinel": {"step": StepShape("A", (3,)).to_row(), "ns": 5}}
    assert Sentinel.of(profile) is None and Sentinel.of(replace(profile, made=known)) is None
    whole = {"sentinel": known["sentinel"] | {"mean_ns": 6}}
    assert Sentinel.of(replace(profile, made=whole)) == Sentinel(point, 5, 6)


def test_a_profile_of_another_machine_is_refused() -> None:
    """One measured here fits; one of another processor or GPU names both and says what to do."""
    names = profile_names()
    if not names:
        pytest.skip("no profile is shipped")
    shipped = load_profile(names[0])
    here = replace(shipped, origin="measured", gpu=None, hardware=identity("cpu")["hardware"])
    check_machine(here, "cpu")
    other = replace(here, hardware=here.hardware | {"cpu": "Abacus 9"})
    for profile, name in ((other, "Abacus 9"), (shipped, str(shipped.gpu))):
        with pytest.raises(CalibrationError, match=f"is of {name}, this is .*batchsim calibrate --model"):
            check_machine(profile, "cpu")


def test_graphs_are_those_that_the_profile_was_measured_with() -> None:
    """On CUDA a profile decides unless it says nothing, and what is asked against it is refused; a CPU has none."""
    shipped = load_profile("llama-3.1-8b-h200-vllm-0.24.0")
    for had in (True, False):
        measured = replace(shipped, origin="measured", made={"options": {"graphs": had}})
        assert graphs_of(measured, "cuda") is had and graphs_of(measured, "cuda", had) is had
        assert graphs_of(measured, "cpu", not had) in (None, False)
        words = "with CUDA graphs. Run with --graphs" if had else "without CUDA graphs. Run with --no-graphs"
        with pytest.raises(CalibrationError, match=f"was measured {words}"):
            graphs_of(measured, "cuda", not had)
    assert graphs_of(shipped, "cuda") is None and graphs_of(shipped, "cuda", False) is False


class FailingRunner:
    """Says all that the real one does, and fails its third step."""

    def __init__(self, runner: ModelRunner, error: Exception) -> None:
        self._runner, self._error, self._left = runner, error, 9

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, *args: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise self._error
        return self._runner.step(*args)


def test_a_run_that_a_bug_cuts_comes_back_whole(setup: Setup, runner: ModelRunner, tmp_path: Path) -> None:
    """Every request is on record, the error is handed back, and the file holds all but it."""
    bug = AssertionError("ours")
    failing: Any = FailingRunner(runner, bug)
    result = run_live(setup, setup.scenario.find("continuous"), 1.0, 0, failing)
    assert result.error is bug and result.reason == "step_failed"
    assert len(result.records.requests) == result.num_offered
    assert len(result.kernel_ns) == len(result.records.steps) == 2
    result.save(tmp_path / "cut.npz")
    again = load_result(tmp_path / "cut.npz")
    assert (again.reason, again.error) == ("step_failed", None) and again.records.details["step_failed"] == "ours"
