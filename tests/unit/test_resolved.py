"""A resolved scenario: the same engine and requests as the scenario it came from, on a machine with next to nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.plain import from_plain, to_plain
from batchsim.calibrate.engine.session import predict
from batchsim.drive.resolved import Resolved
from batchsim.kernel.record import Records
from batchsim.scenario import Point, Scenario, load_scenario
from batchsim.scenario.load import shipped_scenarios
from batchsim.scenario.point import Setup, resolve, simulate_point
from batchsim.workload.tagged import ByKind

ROOT = Path(__file__).parents[2]
TRACES = os.environ.get("BATCHSIM_TRACES")

SHORT = {  # what makes a shipped scenario a matter of a second
    "azure-code": ["workload.requests=200"],
    "azure-conv": ["workload.requests=200"],
    "offline": ["workload.requests=60"],
    "claims": ["workload.requests=60"],
    "live-demo": [],
    "deployment": ["workload.duration=20s", "workload.warmup=1s"],
    "mooncake-prefix": ["workload.requests=30"],
    "long-context": ["workload.duration=90s", "workload.warmup=1s"],
    "speculative": ["workload.duration=3s", "workload.warmup=1s", "load={users: [1, 16]}"],
}

EVERYTHING = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us, per_context_token: 30ns, per_swapped_block: 50us}
kv: {tokens: 4096, swap_space: 1GB}
max_waiting: 40
workload:
  arrivals: {kind: gamma, mean_rate: 20/s, cv: 3}
  lengths: {kind: trace}
  trace: {path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms, jitter: 5ms}
  classes:
    chat: {share: 70%, priority: 0, deadline: 3s, slo: ttft<1s @ 90%, shared_prefix: {groups: 3, added_tokens: 40}}
    batch: {share: 30%, priority: 1, patience: {mean: 2s, kind: exponential},
            lengths: {prompt: {kind: uniform, min: 10, max: 900}, output: {kind: empirical, values: [5, 50]}}}
  output_cap: 256
  frontend: {request: 2ms, per_prompt_token: 1us, per_chunk: 1ms}
  requests: 60
  drain: 30s
policies:
  static: {batch_size: {best_of: [2, 4]}, max_wait: 100ms}
  shortest: {kind: preemptive, max_num_seqs: 8, max_num_batched_tokens: 512, waiting_order: sjf, by: auto,
             predictor: {kind: noisy, sigma: 0.5}}
  guess: {kind: preemptive, max_num_seqs: 8, max_num_batched_tokens: null, victim: most_remaining, by: swap,
          predictor: {kind: class_mean}}
  gated: {max_num_seqs: 8, max_num_batched_tokens: 512}
  vllm: {async_scheduling: false, max_num_seqs: 8, max_num_batched_tokens: 512}
  mine: {kind: "tests.unit.own_policy:Own", max_num_seqs: 3, spread: [1, 2]}
slo: ttft<1s & tpot<50ms @ 90%
load: {mean_rate: [10/s, 40/s]}
seeds: 2
"""

REPLAY = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: trace}
  trace: {path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms,
          rate_scale: {factor: 1, by: thin}}
  output_cap: exact
policies:
  vllm: {enable_prefix_caching: false, async_scheduling: false}
load: {rate_scale: [0.5, 1]}
slo: e2e<10s @ 90%
seeds: 2
"""


def same(one: Records, other: Records) -> None:
    for table in ("requests", "steps", "states"):
        assert getattr(one, table).tobytes() == getattr(other, table).tobytes(), f"{table} differ"
    assert (one.texts, one.details) == (other.texts, other.details)


def check_round_trip(scenario: Scenario) -> None:
    """Every policy at the lowest and highest load: simulated, and predicted from the JSON alone."""
    setup = Setup.of(scenario)
    text = setup.resolved.to_json()
    resolved = Resolved.from_json(text, "here", allow_code=scenario.allow_code)
    assert resolved.to_json() == text and resolved.policies == setup.resolved.policies
    last = scenario.file.seeds - 1
    for load, seed in {(scenario.loads[0], 0), (scenario.loads[-1], last)}:
        for spec, policy in zip(scenario.specs, resolved.policies, strict=True):
            run = simulate_point(setup, Point(spec, load, seed))
            cost = setup.cost_under(policy.config)
            predicted = predict(resolved, policy, load, seed, cost, num_blocks=setup.kv.num_blocks)
            same(run.records, predicted.records)
            assert (run.end_ns, run.window_ns, run.streams) == (
                predicted.end_ns,
                predicted.window_ns,
                predicted.streams,
            )
            assert predicted.policy == spec.name and predicted.num_offered == run.workload.num_offered


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*shipped_scenarios()} - {"day", "replicas"}))  # those of one engine
def test_shipped_scenarios_run_from_their_json_as_in_simulation(name: str) -> None:
    """resolve, JSON and live in virtual time leave the records of simulate, bit for bit, for every policy."""
    if ("azure" in name or "mooncake" in name) and TRACES is None:
        pytest.skip("BATCHSIM_TRACES names no folder of traces")
    overrides = SHORT.get(name, ["workload.duration=12s", "workload.warmup=1s"])
    folders = [Path(TRACES)] if TRACES else []
    check_round_trip(load_scenario(name, overrides=overrides, trace_folders=folders))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small trace."""
    rows = [f"{40 * i + i % 7},{20 + 37 * i % 400},{1 + 13 * i % 90}" for i in range(60)]
    (tmp_path / "my.csv").write_text("\n".join(["ts,in,out", *rows]) + "\n")
    return tmp_path


@pytest.mark.parametrize("text", [EVERYTHING, REPLAY], ids=["everything", "replay"])
def test_what_a_scenario_can_say_survives_the_json(text: str, folder: Path) -> None:
    """Classes, a trace with jitter, predictors, best_of, swap, a front end and a user's own policy, bit for bit."""
    (folder / "s.yaml").write_text(text)
    check_round_trip(load_scenario(str(folder / "s.yaml"), allow_code=True))


def test_a_closed_loop_survives_the_json(folder: Path) -> None:
    """Users who think and ask again send the same requests from the JSON."""
    arrivals = "{kind: closed_loop, users: 6, think_time: 50ms, think_kind: exponential}"
    text = REPLAY.replace(
        "arrivals: {kind: trace}", f"arrivals: {arrivals}\n  lengths: {{kind: trace}}\n  requests: 30"
    )
    text = text.replace(",\n          rate_scale: {factor: 1, by: thin}", "").replace(
        "{rate_scale: [0.5, 1]}", "{users: [2, 6]}"
    )
    (folder / "s.yaml").write_text(text)
    check_round_trip(load_scenario(str(folder / "s.yaml")))


@pytest.mark.parametrize(
    ("arrivals", "sessions"),
    [
        ("{kind: closed_loop, users: 5, think_time: 50ms}", "{turns: {kind: uniform, min: 1, max: 9}}"),
        ("{kind: poisson, mean_rate: 20/s}", "{turns: {kind: uniform, min: 1, max: 9}, think_time: 50ms}"),
    ],
)
def test_sessions_survive_the_json(arrivals: str, sessions: str, folder: Path) -> None:
    """Growing prompts with shared beginnings are the same from the JSON, and so are the hits of a prefix cache."""
    text = (
        REPLAY[: REPLAY.index("workload:")]
        + f"""\
workload:
  arrivals: {arrivals}
  sessions: {sessions}
  shared_prefix: {{groups: 2, added_tokens: 64, zipf: 1}}
  lengths: {{prompt: {{kind: uniform, min: 1, max: 90}}, output: {{kind: uniform, min: 1, max: 30}}}}
  output_cap: 64
  duration: 3s
policies:
  vllm: {{async_scheduling: false}}
slo: e2e<10s @ 90%
seeds: 2
"""
    )
    (folder / "s.yaml").write_text(text.replace("tokens: 16000", "tokens: 4000"))
    scenario = load_scenario(str(folder / "s.yaml"))
    check_round_trip(scenario)
    records = simulate_point(Setup.of(scenario), Point(scenario.specs[0], 1.0, 0)).records
    assert records.requests["cached_tokens"].max() > 64


BARE = """\
import hashlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "yaml", "pandas", "simpy", "scipy", "matplotlib", "pyarrow", "torch"
        }:
            raise ModuleNotFoundError(f"{name} is not on this machine", name=name)
sys.meta_path.insert(0, Blocked())
from batchsim.calibrate.engine.session import predict
from batchsim.cost.constant import Constant
from batchsim.drive.resolved import Resolved
resolved = Resolved.from_json(open(sys.argv[1]).read(), sys.argv[1])
run = predict(resolved, resolved.find("vllm"), 1.0, 0, Constant(10_000_000), num_blocks=1000)
print(hashlib.sha256(run.records.steps.tobytes() + run.records.requests.tobytes()).hexdigest())
"""


def test_a_bare_machine_reads_and_predicts(folder: Path) -> None:
    """Without yaml, pandas, simpy, scipy, pyarrow and torch the JSON gives the simulated records."""
    (folder / "s.yaml").write_text(REPLAY)
    scenario = load_scenario(str(folder / "s.yaml"))
    (folder / "r.json").write_text(resolve(scenario).to_json())
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(folder / "r.json")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    records = simulate_point(Setup.of(scenario), Point(scenario.specs[0], 1.0, 0)).records
    expected = hashlib.sha256(records.steps.tobytes() + records.requests.tobytes()).hexdigest()
    assert (done.stdout.strip(), done.stderr) == (expected, "")


# ---- bad files


@pytest.fixture
def plain(folder: Path) -> dict[str, Any]:
    """The JSON object of a resolved scenario."""
    (folder / "s.yaml").write_text(REPLAY)
    return json.loads(resolve(load_scenario(str(folder / "s.yaml"))).to_json())


def dig(value: Any, path: str) -> tuple[Any, Any]:
    """The container at all but the last key of `path`, and that key."""
    *outer, last = path.split(".")
    for key in outer:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value, last


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("version", 0, "version 0, this batchsim reads 3"),
        ("format", "other", "not a resolved scenario"),
        ("seeds", "2", "seeds is '2', expected a whole number"),
        ("seeds", True, "seeds is True, expected a whole number"),
        ("model.hidden_size", None, "model.hidden_size is None, expected a whole number"),
        ("workload.arrivals.kind", "posson", "workload.arrivals.kind is 'posson', expected one of"),
        ("workload.output_cap", 0, "workload.output_cap is 0. It must be from 1 to 2147483647. Write it anew"),
        ("policies.0.config.max_num_seqs", 0, "vllm.config.max_num_seqs is 0. It must be"),
        ("policies.0.kind", "vlm", "policy vlm cannot be imported"),
        ("policies.0.config.surprise", 1, "vllm.config.surprise is not a field of vllm.config."),
        ("rows.0.prompt_tokens", [1], "the columns differ in length"),
        ("loads", [1, "x"], "loads[1] is 'x', expected a number"),
        ("rows.x", {}, "rows.x is 'x', expected a whole number"),
    ],
)
def test_what_does_not_fit_is_one_line(plain: dict[str, Any], path: str, value: Any, complaint: str) -> None:
    """A wrong value names its file, its path and what was expected."""
    at, key = dig(plain, path)
    at[key] = value
    with pytest.raises(ScenarioError) as caught:
        Resolved.from_json(json.dumps(plain), "r.json")
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_missing_keys_broken_json_and_absent_seeds_are_one_line(plain: dict[str, Any]) -> None:
    """A key that is not there is named; text that is no JSON is said; a trace that was jittered has its seeds."""
    del plain["workload"]["trace"]["path"]
    with pytest.raises(ScenarioError, match=r"r\.json: workload\.trace\.path is missing\. Write it anew"):
        Resolved.from_json(json.dumps(plain), "r.json")
    for text in ("{", "[]", "[" * 10_000):
        with pytest.raises(ScenarioError, match=r"r\.json: "):
            Resolved.from_json(text, "r.json")
    with pytest.raises(ScenarioError, match=r"r\.json: .*'format' is given twice"):
        Resolved.from_json('{"format": 1, ' + json.dumps(plain)[1:], "r.json")


def test_a_seed_whose_jittered_trace_is_not_there_is_refused(folder: Path) -> None:
    """Rows moved at random are those of the resolved seeds only; find() names the variants."""
    (folder / "s.yaml").write_text(EVERYTHING)
    text = resolve(load_scenario(str(folder / "s.yaml"), allow_code=True)).to_json()
    resolved = Resolved.from_json(text, "r.json", allow_code=True)
    with pytest.raises(ScenarioError, match="seeds 0 to 1, not for seed 2"):
        resolved.built_workload(10.0, 2)
    with pytest.raises(ScenarioError, match=r"has 2 variants of static. Write one of static \(bs 2\)"):
        resolved.find("static")
    assert resolved.find("static (bs 4)").config.batch_size == 4


# ---- plain values


@dataclass(frozen=True)
class Square:
    side: float
    kind: Literal["square"] = "square"


@dataclass(frozen=True)
class Circle:
    radius: float
    kind: Literal["circle"] = "circle"


@dataclass(frozen=True)
class Drawing:
    shapes: tuple[Annotated[Square | Circle, ByKind()], ...]
    size: tuple[int, int]
    names: dict[int, str]
    scale: int | Literal["auto"] | None = None
    extra: Any = None


DRAWINGS = [
    Drawing((Square(1.5), Circle(2)), (3, 4), {7: "seven"}, "auto", [1, {"a": None}]),
    Drawing((), (0, 0), {}, 5),
]


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_plain_values_come_back_equal(drawing: Drawing) -> None:
    """Unions by kind, fixed tuples, integer keys and literals survive JSON."""
    assert from_plain(Drawing, json.loads(json.dumps(to_plain(drawing)))) == drawing


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"size": [1]}, "size[1] is missing"),
        ({"size": 1}, "size is 1, expected a list"),
        ({"names": {"x": "y"}}, "names.x is 'x', expected a whole number"),
        ({"shapes": [{"side": 1.0, "kind": "oval"}]}, "shapes[0].kind is 'oval', expected one of 'square', 'circle'"),
        ({"shapes": [{"side": 1.0, "kind": "circle"}]}, "shapes[0].radius is missing"),
        ({"scale": 1.5}, "scale is 1.5, expected a whole number"),
        ({"scale": True}, "scale is True, expected a whole number"),
    ],
)
def test_plain_values_that_do_not_fit_are_named(change: dict[str, Any], complaint: str) -> None:
    """The first wrong value is told with its path."""
    plain = {"shapes": [], "size": [0, 0], "names": {}, "scale": None, "extra": None} | change
    with pytest.raises(ValueError) as caught:
        from_plain(Drawing, plain)
    assert complaint in str(caught.value)


def test_what_json_cannot_hold_is_refused() -> None:
    """A set, or a knob of a class of its own, has no plain form."""
    with pytest.raises(TypeError, match="set has no plain form"):
        to_plain({"a": [{1}]})
