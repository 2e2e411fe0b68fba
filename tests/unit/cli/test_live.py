"""`batchsim live` on a tiny model: what it prints, what it leaves, what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import typer

from batchsim.cli.live import _say
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.constant import Linear
from batchsim.drive.live import INTERRUPTED
from batchsim.kernel.record import UNFINISHED
from batchsim.report.reading import FREE_DRAFTS
from batchsim.results.live_results import keep_live
from batchsim.results.read import load_results
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tests.support.predicted import predict
from tests.support.tiny_scenario import TINY, batchsim, changed

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
LIVE = TINY.replace("model: llama-3.1-8b", "model: tiny.json").replace("requests: 40", "requests: 12")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """The tiny scenario with a model that any machine holds, at rates that take a tenth of a second."""
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    (tmp_path / "s.yaml").write_text(changed(LIVE, "[10/s, 20/s]", "[100/s, 200/s]"))
    return tmp_path / "s.yaml"


@pytest.fixture
def one_thread() -> None:
    """Skips where the executor cannot run."""
    torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")
    torch.set_num_threads(1)


# ---- live


@pytest.mark.slow
def test_live_prints_and_keeps_results_like_a_run(scenario: Path, one_thread: None) -> None:
    """The table of a run under a heading that says live, the lag, and a folder that everything else reads."""
    done = batchsim(
        "live", scenario, "--policy", "continuous", "--device", "cpu", "--load", 200, "--out", scenario.parent / "out"
    )
    assert done.exit_code in (0, 1)  # 1: this machine was too busy to send in time, and says so
    text = " ".join(done.stdout.split())
    assert "live on cpu" in text and "weights random (seed 0)" in text and "load source: lag mean" in text
    assert ("! VOID" in text) == (done.exit_code == 1)
    results = load_results(scenario.parent / "out" / "s-live")
    requests = results.requests("continuous", 200.0, 0)
    assert len(requests) == 12 and set(requests["outcome"]) == {"finished"} and (requests["lag_ns"] > 0).all()
    live = results.manifest["live"]
    assert (live["device"], live["reason"], live["policy"], live["load"]) == ("cpu", "", "continuous", 200)
    assert (scenario.parent / "out" / "s-live" / live["raw"]).is_file()
    explained = batchsim("explain", scenario.parent / "out" / "s-live", "--json")
    assert explained.exit_code == 0 and len(json.loads(explained.stdout)[0]["slowest"]) == 5


def test_live_speaks_json(scenario: Path, one_thread: None) -> None:
    """--json has the metrics of `run --json` and how the run went; a load beyond the tested ones is one, too."""
    done = batchsim(
        "live", scenario, "--policy", "static", "--device", "cpu", "--load", 150, "--json", "--out", scenario.parent
    )
    said = json.loads(done.stdout)
    assert said["policies"]["static"]["finished"] == 12 and said["policies"]["static"]["loads"][0]["load"] == 150
    assert said["live"]["lag_ns"]["requests"] == 12


def test_a_late_run_is_run_again_as_often_as_asked(
    scenario: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt that was late is told of, the last one is kept, void as it is."""
    monkeypatch.setattr("batchsim.drive.live.MAX_LAG_SHARE", -1e9)  # so that any lag is too much
    done = batchsim(
        *("live", scenario, "--policy", "static", "--device", "cpu", "--load", 150, "--attempts", 2),
        *("--out", scenario.parent),
    )
    assert done.exit_code == 1 and "! VOID: the load source was late" in done.stdout
    assert [line.split(":")[0] for line in done.stderr.splitlines() if "attempt" in line] == [
        "attempt 1 of 2 does not count"
    ]


def with_drafts(method: str) -> list[str]:
    """The options that add a policy of that name, which verifies such drafts."""
    config = f"speculative_config: {{method: {method}, num_speculative_tokens: 2, acceptance: 0.5}}"
    return ["--set", f"policies.{method}={{kind: vllm, max_num_seqs: 8, max_num_batched_tokens: 512, {config}}}"]


@pytest.mark.slow
def test_live_tells_what_drafts_were_worth(scenario: Path, one_thread: None) -> None:
    """By position and how often there were any, to be stated in a scenario; nothing is said to be supposed."""
    done = batchsim(
        *("live", scenario, "--policy", "ngram", "--device", "cpu", "--load", 200, "--out", scenario.parent),
        *with_drafts("ngram"),
    )
    assert done.exit_code in (0, 1), done.stderr  # 1: this machine was too busy to send in time
    text = " ".join(done.stdout.split())
    assert re.search(r"drafts: [\d.]+ tokens a decode; as measured here, acceptance: \[.*, .*\], found: [\d.]+", text)
    assert FREE_DRAFTS not in text


@pytest.mark.slow
def test_a_closed_loop_runs_live(scenario: Path, one_thread: None) -> None:
    """Its window ends with the last request that the run sent, and the results hold all of them."""
    loop = ("workload.arrivals={kind: closed_loop, users: 2, think_time: 10ms}", "load={users: [2]}")
    done = batchsim(
        *("live", scenario, "--policy", "continuous", "--device", "cpu", "--out", scenario.parent),
        *(word for change in loop for word in ("--set", change)),
    )
    assert done.exit_code in (0, 1), done.stderr  # 1: this machine was too busy to send in time
    assert "nobody arrives" not in done.stderr
    (row,) = load_results(scenario.parent / "s-live").points.to_dict("records")
    assert row["cohort"] == row["finished"] == 12 and row["throughput_rps"] > 0


def test_a_cut_run_counts_all_that_was_offered(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the requests came before Ctrl-C: the other half did not complete, and no objective is met or missed."""
    setup = Setup.of(load_scenario(str(scenario)))
    policy = setup.scenario.find("continuous")
    cost = Linear(base=1_000_000, per_token=0, per_sequence=0, per_context_token=0)
    played = predict(setup, policy, 100.0, 0, cost)
    requests = played.records.requests.copy()
    cut_ns = int(np.sort(requests["sent_ns"])[5])
    late = requests["sent_ns"] > cut_ns
    requests["outcome"][late] = UNFINISHED
    records = replace(played.records, requests=requests)
    made = {"hardware": {"cpu": "some"}, "software": {"torch": "2"}, "weights": "none", "device": "cpu"}
    played = replace(played, records=records, end_ns=cut_ns, reason=INTERRUPTED, made=made)
    point = next(p for p in setup.scenario.points() if p.spec.name == "continuous")
    results = keep_live(setup, point, played, scenario.parent)
    (row,) = results.points.to_dict("records")
    assert row["cohort"] == 12 and row["uncompleted_share"] == row["in_slo"] == 0.5
    assert np.isnan(row["slo_met"])
    with pytest.raises(typer.Exit):
        _say(results, as_json=False)
    said = capsys.readouterr().out
    assert "SLO: not judged" in said and "tested that meets" not in said and "6 unfinished" in said


OWN = """\
from batchsim.base.errors import PolicyError
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.kernel.protocols import PolicyContext

class Own(Continuous):
    def __init__(self, config: ContinuousConfig, context: PolicyContext) -> None:
        super().__init__(config, context)
        self.left = 9

    def schedule(self, now_ns, drain):
        self.left -= 1
        if not self.left:
            raise ERROR("lost my way")
        return super().schedule(now_ns, drain)
"""


@pytest.mark.parametrize("error", ["PolicyError", "KeyError"])
def test_live_keeps_a_run_that_a_policy_breaks(
    scenario: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """All requests are in the results with the reason. An error of ours is said there; any other shows as it is."""
    monkeypatch.syspath_prepend(scenario.parent)
    (scenario.parent / f"own_{error}.py").write_text(OWN.replace("ERROR", error))
    scenario.write_text(
        changed(
            scenario.read_text(),
            "policies:\n",
            f'policies:\n  mine: {{kind: "own_{error}:Own", max_num_seqs: 8, max_num_batched_tokens: 512}}\n',
        )
    )
    options = ["--device", "cpu", "--load", 200, "--out", scenario.parent, "--allow-code"]
    done = batchsim("live", scenario, "--policy", "mine", *options)
    assert done.exit_code == 1, done.stderr
    requests = load_results(scenario.parent / "s-live").requests("mine", 200.0, 0)
    assert len(requests) == 12 and "policy_failed" in set(requests["reason"])
    if error == "KeyError":
        assert isinstance(done.exception, KeyError) and "holds the run" in done.stderr
    else:
        assert "policy_failed: lost my way" in " ".join(done.stdout.split())


@pytest.mark.parametrize("origin", ["measured", "imported"])
def test_only_a_measured_cost_explains_a_live_run(tmp_path: Path, origin: Literal["measured", "imported"]) -> None:
    """The terms of another executor's profile would say what these steps were not made of."""
    (tmp_path / "s.yaml").write_text(
        changed(TINY, "{kind: constant, step: 10ms}", "{kind: profile, profile: llama-3.1-8b-h200-vllm-0.24.0}")
    )
    setup = Setup.of(load_scenario(str(tmp_path / "s.yaml")))
    assert isinstance(setup.cost, Calibrated)
    setup = replace(setup, cost=Calibrated(replace(setup.cost.profile, origin=origin), extrapolate=True))
    policy = setup.scenario.find("continuous")
    made = {"hardware": {"cpu": "some"}, "software": {"torch": "2"}, "weights": "none", "device": "cpu"}
    played = replace(predict(setup, policy, 10.0, 0, setup.cost), made=made)
    point = next(p for p in setup.scenario.points() if p.spec.name == "continuous")
    (row,) = keep_live(setup, point, played, tmp_path).points.to_dict("records")
    assert (row["mfu"] > 0) == (origin == "measured")


def test_live_refuses_before_it_loads_a_model(scenario: Path, one_thread: None) -> None:
    """Device, policy, load, missing KV memory and a foreign profile: one line each, exit code 2."""
    (scenario.parent / "half.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
    text = changed(scenario.read_text(), "kv: {tokens: 16000}\n", "").replace("tiny.json", "half.json")
    (scenario.parent / "unstated.yaml").write_text(changed(text, "{kind: constant, step: 10ms}", "h200"))
    common = ("--policy", "continuous", "--device", "cpu")
    other = scenario.parent / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64}))
    for args, complaint in [
        ((scenario, "--policy", "continuous", "--device", "tpu"), "--device tpu"),
        ((scenario, "--policy", "continous", "--device", "cpu", "--load", 100), "has no policy continous"),
        ((scenario, *common), "--load: is missing and the scenario has 100, 200"),
        ((scenario, *common, "--load", -1), "--load -1"),
        ((scenario.parent / "unstated.yaml", *common, "--load", 100), "Add kv: {tokens: N}"),
        ((scenario, *common, "--load", 100, "--temperature", -1), "--temperature"),
        ((scenario, *common, "--load", 100, "--prompts", "no.txt"), "tokenizer.json"),
        ((scenario, *common, "--load", 100, "--weights", "nowhere"), "nowhere"),
        ((scenario, *common, "--load", 100, "--weights", other), f"--weights {other}: hidden_size is 64"),
        ((scenario, *common, "--load", 100, "--out", scenario / "out"), f"{scenario / 'out'}: cannot be written"),
        (
            (scenario, "--policy", "mtp", *common[2:], "--load", 100, *with_drafts("mtp")),
            "mtp: no draft model runs here",
        ),
    ]:
        done = batchsim("live", *args)
        assert done.exit_code == 2 and complaint in done.stderr, (args, done.stderr, done.exception)
        assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_without_torch_it_says_what_to_install(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the command that installs it, before anything else is looked at."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = batchsim("live", scenario, "--policy", "continuous", "--device", "cpu")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == ("batchsim live: needs torch, which is not installed. pip install 'batchsim[live]'\n")
