"""Routers, autoscalers and arrivals of the user's own, as the files of examples/ have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchsim.base.errors import ScenarioError, TraceError
from batchsim.results.heading import heading
from batchsim.results.provenance import identity, spec_identity
from batchsim.scenario import Scenario, load_scenario
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.predictors import build_predictor
from batchsim.workload.traces.own_reader import own_records
from tests.support.paths import ROOT
from tests.unit.scenario.test_replicas import SCENARIO

EXAMPLES = ROOT / "examples"
ROUTER = '{kind: "own_router:TenantRouterConfig", most: 8}'
SCALER = '{kind: "own_autoscaler:InFlightConfig", each: 4, every: 1s, min: 1, max: 3, cold_start: 2s}'


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def loaded(folder: Path, replicas: str, *, allow_code: bool = True) -> Scenario:
    path = folder / "some.yaml"
    path.write_text(f"{SCENARIO}replicas: {replicas}\n", encoding="utf-8")
    return load_scenario(str(path), overrides=["workload.duration=6s"], allow_code=allow_code)


@pytest.mark.parametrize(
    "name",
    [f"own_{what}.py" for what in ("router", "autoscaler", "arrivals", "policy", "reader", "predictor", "cost")],
)
def test_an_example_is_at_most_40_lines(name: str) -> None:
    """To be read at a glance."""
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 40


def test_a_router_of_one_s_own_routes(tmp_path: Path) -> None:
    """Nobody has a tenant here: all go to one replica until it holds more than 8 more than the emptiest."""
    setup = Setup.of(loaded(tmp_path, f"{{count: 3, router: {ROUTER}}}"))
    records = simulate_point(setup, setup.scenario.points()[0]).records
    assert records.replicas is not None and records.replicas.requests[0] == 0
    first = records.replicas.requests.tolist()
    assert len(set(first[:9])) == 1 and len(set(first)) > 1
    assert "router TenantRouterConfig" in heading(setup)


def test_an_autoscaler_of_one_s_own_scales(tmp_path: Path) -> None:
    """A replica for every 4 requests, the first look at 1 s, from its min to its max."""
    setup = Setup.of(loaded(tmp_path, f"{{count: 1, router: random, autoscaler: {SCALER}}}"))
    spans = simulate_point(setup, setup.scenario.points()[0]).spans
    assert {span.replica for span in spans} == {0, 1, 2}
    assert min(span.start_ns for span in spans if span.state == "starting") % 10**9 == 0


def test_results_know_the_file_of_own_code(tmp_path: Path) -> None:
    """So that no point of an older version of it is reused; where all is ours the list is empty."""
    alone = identity(Setup.of(loaded(tmp_path, "{count: 1}")))
    own = identity(Setup.of(loaded(tmp_path, f"{{count: 1, router: {ROUTER}}}")))
    assert alone["own"] == [] and len(own["own"]) == 1


def arrivals_of(folder: Path, arrivals: str) -> Scenario:
    path = folder / "some.yaml"
    path.write_text(SCENARIO.replace("{kind: poisson, mean_rate: 8/s}", arrivals), encoding="utf-8")
    return load_scenario(str(path), allow_code=True)


BATCHES = '{kind: "own_arrivals:BatchArrivals", mean_rate: 8/s, size: 4}'


def test_arrivals_of_one_s_own_arrive(tmp_path: Path) -> None:
    """Four at a time, before the end, at the mean rate and at another load, and they are drawn anew by every seed."""
    setup = Setup.of(arrivals_of(tmp_path, BATCHES))
    one, other = (list(setup.workload(8.0, seed).arrivals()) for seed in (0, 1))
    times = [each.request.arrival_ns for each in one]
    assert times[::4] == times[3::4] and times[3] < times[4] and times[-1] < 20 * 10**9
    assert 80 < len(times) < 240 and times != [each.request.arrival_ns for each in other]
    assert len(identity(setup)["own"]) == 1 and setup.workload(8.0, 0).describe["kind"] == "BatchArrivals"
    records = simulate_point(setup, setup.scenario.points()[0]).records
    assert len(records.requests) == len(times)


def test_what_does_not_fit_arrivals_of_one_s_own_names_their_class(tmp_path: Path) -> None:
    """As it names a kind of ours."""
    path = tmp_path / "some.yaml"
    path.write_text(SCENARIO.replace("{kind: poisson, mean_rate: 8/s}", BATCHES), encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"workload: BatchArrivals arrivals have no end\."):
        load_scenario(str(path), overrides=["workload.duration=null"], allow_code=True)


LOG = """2024-05-01T10:00:00Z POST /v1/chat 200 in=812 out=97
2024-05-01T10:00:01Z GET /health 200
2024-05-01T10:00:03Z POST /v1/chat 200 in=5 out=2
2024-05-01T10:00:04Z POST /v1/chat 503 in=9 out=1
"""
TRACE = (
    "workload.trace={path: access.log, time_unit: iso, reader: READER, columns:"
    " {arrival: at, prompt: in, output: out, status: status}}"
)


def read_by(folder: Path, reader: str, *, allow_code: bool = True) -> Scenario:
    (folder / "access.log").write_text(LOG, encoding="utf-8")
    path = folder / "some.yaml"
    path.write_text(SCENARIO.replace("mean_rate: 8/s", "").replace("poisson, ", "trace"), encoding="utf-8")
    changes = [TRACE.replace("READER", reader), "workload.lengths=null", "workload.duration=null", "workload.warmup=0s"]
    return load_scenario(str(path), overrides=changes, allow_code=allow_code)


def test_a_trace_reader_of_one_s_own_reads(tmp_path: Path) -> None:
    """Requests of a log that no format has; its failed row is left out, and results know the reader's file."""
    setup = Setup.of(read_by(tmp_path, "own_reader:AccessLog"))
    found = [each.request for each in setup.workload(1.0, 0).arrivals()]
    assert [(each.arrival_ns, each.prompt_tokens) for each in found] == [(0, 812), (3 * 10**9, 5)]
    assert len(identity(setup)["own"]) == 1
    with pytest.raises(ScenarioError, match="is code of its own"):
        read_by(tmp_path, "own_reader:AccessLog", allow_code=False)


def test_what_is_wrong_with_a_reader_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such class, no records, an error amid the file, a row without its keys."""
    lines = "class Nothing: pass", "class Bad:", "    def records(self, path): yield {}; raise KeyError('x')"
    (tmp_path / "some_reader.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, said in (("Gone", "cannot be imported"), ("Nothing", "has no records. Write def records(self, path)")):
        with pytest.raises(ScenarioError, match=re.escape(said)):
            read_by(tmp_path, f"some_reader:{name}")
    with pytest.raises(TraceError, match="row 1: 'in' is missing"):
        Setup.of(read_by(tmp_path, "some_reader:Bad")).workload(1.0, 0)
    with pytest.raises(TraceError, match=r"its reader some_reader:Bad fails after 1 rows: KeyError: 'x'"):
        list(own_records("some_reader:Bad", tmp_path / "access.log"))
    with pytest.raises(ScenarioError, match="name a class as module:Class"):
        read_by(tmp_path, "some_reader")


OWN = """
from batchsim.workload.processes import OwnArrivals
from dataclasses import dataclass
@dataclass(frozen=True)
class Mine(OwnArrivals):
    def times_s(self, random):
        {body}
@dataclass(frozen=True)
class Nothing(OwnArrivals):
    pass
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("yield from (1.0, 2.0)", "Mine.times_s ends after 2 arrivals, at 2 s, before the arrivals do"),
        ("yield from (1.0, 0.5)", "Mine.times_s gives 0.5 s after 1 s, as arrival 1. Times are finite"),
        ("yield float('nan')", "Mine.times_s gives nan s after 0 s"),
        ("yield -1.0", "Mine.times_s gives -1 s after 0 s"),
    ],
)
def test_own_arrivals_that_break_the_protocol_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    """Not sorted, no numbers, or an end."""
    name = f"mine_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(OWN.format(body=body), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    setup = Setup.of(arrivals_of(tmp_path, f'{{kind: "{name}:Mine", mean_rate: 8/s}}'))
    with pytest.raises(ScenarioError, match=re.escape(said)):
        setup.workload(8.0, 0)
    with pytest.raises(ScenarioError, match="has no times_s"):
        arrivals_of(tmp_path, f'{{kind: "{name}:Nothing", mean_rate: 8/s}}')


GUESSER = """
from batchsim.workload.predictors import OwnPredictor
from dataclasses import dataclass
@dataclass(frozen=True)
class Mine(OwnPredictor):
    def predicted_tokens(self, request, true_tokens, random):
        {body}
@dataclass(frozen=True)
class Nothing(OwnPredictor):
    pass
"""


def predicting(folder: Path, predictor: str, *, allow_code: bool = True) -> Setup:
    path = folder / "some.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    policy = "policies={sjf: {kind: preemptive, waiting_order: sjf, max_num_seqs: 4, by: recompute,"
    changes = [f"{policy} max_num_batched_tokens: 512, predictor: {predictor}}}}}", "workload.duration=6s"]
    return Setup.of(load_scenario(str(path), overrides=changes, allow_code=allow_code))


def test_a_predictor_of_one_s_own_predicts(tmp_path: Path) -> None:
    """The end of the range that holds the true output where it is always right, that of the range beside it where it
    never is; the same when asked again, and results know its file."""
    for right, expected in ((1.0, 64), (0.0, 256)):
        setup = predicting(tmp_path, f'{{kind: "own_predictor:Classifier", right: {right}}}')
        spec, workload = setup.scenario.points()[0].spec, setup.workload(8.0, 0)
        assert spec.predictor is not None
        predictor = build_predictor(spec.predictor, workload)
        request = next(each.request for each in workload.arrivals() if workload.true_output_tokens(each.request) <= 64)
        assert predictor.predict(request) == predictor.predict(request) == expected
        assert spec.name == "sjf (Classifier lengths)"
        assert spec_identity(spec)[3][2] is not None
        assert len(simulate_point(setup, setup.scenario.points()[0]).records.requests)
    with pytest.raises(ScenarioError, match="is code of its own"):
        predicting(tmp_path, '{kind: "own_predictor:Classifier", right: 1}', allow_code=False)
    with pytest.raises(ScenarioError, match=re.escape("right is 1.5")):
        predicting(tmp_path, '{kind: "own_predictor:Classifier", right: 1.5}')


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return float('nan')", "Mine.predicted_tokens gives nan for request "),
        ("return 0", "Mine.predicted_tokens gives 0 for request "),
        ("return -3", "Mine.predicted_tokens gives -3 for request "),
        ("return None", "Mine.predicted_tokens gives None for request "),
        ("return True", "Mine.predicted_tokens gives True for request "),
        ("return 1 / 0", "Mine.predicted_tokens fails for request "),
        ("raise SystemExit(3)", "Mine.predicted_tokens fails for request "),
    ],
)
def test_a_predictor_that_breaks_the_protocol_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    """No whole number, none of tokens, or an error; and a class that predicts nothing."""
    name = f"guesser_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(GUESSER.format(body=body), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    setup = predicting(tmp_path, f'{{kind: "{name}:Mine"}}')
    with pytest.raises(ScenarioError, match=re.escape(said)) as raised:
        simulate_point(setup, setup.scenario.points()[0])
    assert "\n" not in str(raised.value)
    with pytest.raises(ScenarioError, match=re.escape("has no predicted_tokens. Write def predicted_tokens(self, ")):
        predicting(tmp_path, f'{{kind: "{name}:Nothing"}}')


WRONG = {
    "router": ("{count: 1, router: {kind: own_router:TenantRouterConfig}}", "replicas.router.most is missing. Add it."),
    "range": (f"{{count: 1, autoscaler: {SCALER.replace('each: 4', 'each: 0')}}}", "each is 0. It must be from 1"),
    "field": (f"{{count: 1, router: {ROUTER.replace('most', 'mots')}}}", "mots is not a field of replicas.router"),
    "start": (f"{{count: 9, router: random, autoscaler: {SCALER}}}", "count 9, the replicas at the start, must be"),
    "module": ('{count: 1, router: {kind: "no_such:Thing"}}', "router no_such:Thing cannot be imported"),
    "class": ('{count: 1, router: {kind: "own_router:TenantRouter"}}', "is no dataclass that derives from Config"),
    "base": ('{count: 1, autoscaler: {kind: "own_router:TenantRouterConfig"}}', "that derives from AutoscalerConfig"),
}


@pytest.mark.parametrize(("replicas", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_own_code_is_one_line(tmp_path: Path, replicas: str, said: str) -> None:
    """With the place in the scenario."""
    with pytest.raises(ScenarioError, match=re.escape(said)) as raised:
        loaded(tmp_path, replicas)
    assert str(raised.value).startswith(f"{tmp_path / 'some.yaml'}:17") and "\n" not in str(raised.value)


def test_own_code_runs_only_where_it_is_allowed(tmp_path: Path) -> None:
    """To import a module is to run it."""
    with pytest.raises(ScenarioError, match="is code of its own, which a scenario runs only where it is allowed to"):
        loaded(tmp_path, f"{{count: 1, router: {ROUTER}}}", allow_code=False)


NONSENSE = """
from dataclasses import dataclass
from batchsim.base.ranges import Config
from batchsim.drive.fleet.scaling.autoscaler import AutoscalerConfig

class Nowhere:
    def route(self, request, stage, up):
        return 99
    def answered(self, request, stage, replica): ...

class Half:
    def desired(self, fleet, now_ns):
        return 1.5

@dataclass(frozen=True)
class NowhereConfig(Config):
    def build(self, seed):
        return Nowhere()

@dataclass(frozen=True, kw_only=True)
class HalfConfig(AutoscalerConfig):
    def build(self):
        return Half()
"""
ANSWERS = {
    "router": ('{count: 2, router: {kind: "nonsense:NowhereConfig"}}', "router: Nowhere.route gives 99 for request 0."),
    "autoscaler": (
        '{count: 1, router: random, autoscaler: {kind: "nonsense:HalfConfig", every: 1s, min: 1, max: 3,'
        " cold_start: 2s}}",
        "autoscaler: Half.desired gives 1.5 at 1 s. Return a whole number of replicas.",
    ),
}


@pytest.mark.parametrize(("replicas", "said"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: str, said: str
) -> None:
    """A replica that is not there, and a part of one."""
    (tmp_path / "nonsense.py").write_text(NONSENSE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    setup = Setup.of(loaded(tmp_path, replicas))
    with pytest.raises(ScenarioError, match=re.escape(said)) as raised:
        simulate_point(setup, setup.scenario.points()[0])
    assert "\n" not in str(raised.value)
