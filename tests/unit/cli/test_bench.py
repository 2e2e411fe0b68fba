"""`batchsim calibrate --bench`: an engine's step costs from files of its benchmarks, and what is no such file."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from batchsim.check.measured.read import read_measured
from batchsim.check.validation.against import compare
from batchsim.cli.bench import chosen
from batchsim.results.heading import heading
from batchsim.scenario.load import load_scenario
from batchsim.scenario.setup import Setup
from tests.support.engine_truth import Load, measured, scenario_text, tidy, vllm_bench, write_runs
from tests.support.paths import ROOT
from tests.support.tiny_scenario import batchsim

LINEAR = "cost: {kind: linear, base: 8ms, per_token: 60us, per_sequence: 40us, per_context_token: 60ns}"
LOADS = (Load(0.5), Load(6, 200, 60), Load(2, 1000, 40), Load(12))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a linear engine at four loads in `runs`, and `free.yaml`, that engine without a cost."""
    found = tmp_path_factory.mktemp("bench")
    (found / "runs").mkdir()
    write_runs(found / "runs", LINEAR, LOADS, requests=60, way="12ms")
    write_runs(found, LINEAR, LOADS[3:], "json", requests=60, way="12ms")
    (found / "free.yaml").write_text(scenario_text("cost: {kind: free}"))
    return found


def test_the_fit_of_a_folder_is_a_cost(folder: Path, tmp_path: Path) -> None:
    """Terms, what cannot be told apart and errors are printed; a scenario takes the file as its cost,
    with its way from the client, and its heading names the file, its runs and its error."""
    mine = tmp_path / "mine.json"
    done = batchsim("calibrate", "--bench", folder / "runs", "--scenario", folder / "free.yaml", "-o", mine)
    assert done.exit_code == 0, done.stderr
    assert "base" in done.stdout and "identified" in done.stdout and "condition number" in done.stdout
    assert "KV was never full" in done.stdout and "held out" in done.stdout
    assert "- pair is small beside its interval: a run of prompts of many thousands of tokens" in done.stdout
    written = json.loads(mine.read_text())
    assert written["frontend"]["request"] == pytest.approx(12e6, rel=0.05)
    assert written["frontend"].keys() == {"request", "per_prompt_token", "per_chunk", "per_stream"}
    assert len(written["files"]) == 4 and written["claims"]["tpot_mean_s"] >= 0.015
    use = tmp_path / "use.yaml"
    use.write_text(scenario_text("cost: mine.json"))
    setup = Setup.of(load_scenario(str(use)))
    text = heading(setup)
    assert "fitted to 3 runs of" in text and "(mine.json), ±1.5 % claimed" in text
    assert "measured at: client, front end modelled" in text
    found = compare(setup, setup.scenario.specs[0], read_measured(folder / "runs" / f"{LOADS[1]}.csv"), shift=False)
    errors = [found.error(name).error for name in ("tpot_mean_s", "ttft_mean_s")]
    assert errors == pytest.approx([0, 0], abs=0.015)


def test_a_fit_that_errs_by_more_than_it_claims_is_not_written(folder: Path, tmp_path: Path) -> None:
    """A load of another engine, three times as slow, is held out: one line, exit 1 and no file."""
    mine = tmp_path / "mine.json"
    done = batchsim(*_against_another(folder, tmp_path, mine))
    assert done.exit_code == 1 and not mine.exists()
    assert "not written" in done.stderr.splitlines()[-1] and "tpot_mean_s -" in done.stderr


@pytest.mark.slow
def test_it_is_written_where_it_is_forced(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    forced = batchsim(*_against_another(folder, tmp_path, mine), "--force")
    assert forced.exit_code == 0 and json.loads(mine.read_text())["held_out"][0]["errors"]["tpot_mean_s"] < -0.3


def _against_another(folder: Path, tmp_path: Path, mine: Path) -> list[object]:
    """The call that fits all loads but one, and holds out that one of another engine."""
    slow = tmp_path / "slow"
    slow.mkdir()
    (other,) = write_runs(slow, LINEAR.replace("8ms", "24ms"), [Load(6, 200, 60)], requests=60)
    given = [folder / "runs" / f"{load}.csv" for load in LOADS[:3]]
    return ["calibrate", "--bench", *given, "--hold-out", other, "--scenario", folder / "free.yaml", "-o", mine]


def changed_rows(text: str, **columns: object) -> str:
    """A table with the columns set to one value each."""
    rows = list(csv.DictReader(io.StringIO(text)))
    out = io.StringIO()
    writer = csv.DictWriter(out, [*rows[0]])
    writer.writeheader()
    writer.writerows([{**row, **columns} for row in rows])
    return out.getvalue()


def test_what_aiperf_writes_beside_its_records_is_no_run_of_its_own() -> None:
    """A folder of its artifacts has one run, by name the records of its requests."""
    data = ROOT / "tests" / "data" / "measured"
    given, held = chosen([data / "aiperf_rate", data / "aiperf_concurrency"], [], ["aiperf_concurrency"], "tiny")
    assert [Path(run.source).name for run in (*given, *held)] == ["profile_export.jsonl"] * 2


FEW = tidy(measured(scenario_text(LINEAR, load=Load(4), requests=5)))
HEAD = "requests,requested_rps,completed_rps,prompt_tokens,output_tokens,ttft_mean_s,e2e_mean_s\n"
ROWS = [f"60,{rate},{rate},100,10,0.1,0.2" for rate in (1, 2, 4)]

FILES = {
    "of a vanished file": (None, "cannot be read: No such file"),
    "empty": ("", "is empty"),
    "a header alone": (FEW.splitlines()[0], "has a header and no rows"),
    "no table": ("hello\nworld\n", "are of no form that is known"),
    "half a JSON": ('{"backend": "vllm", "requ', "not JSON"),
    "zero outputs": (changed_rows(FEW, output_tokens=0), "0 output tokens of a request that did not fail"),
    "zero prompts": (changed_rows(FEW, prompt_tokens=0), "0 prompt tokens"),
    "negative times": (changed_rows(FEW, ttft_s=-1), "-1 is negative"),
    "an answer before its first token": (changed_rows(FEW, ttft_s=9, e2e_s=1), "before its first token"),
    "not finite": (changed_rows(FEW, e2e_s="inf"), "is no number"),
    "no times": (FEW.replace("ttft_s", "a").replace("e2e_s", "b"), "has no column of a measured time"),
    "no lengths": (FEW.replace("output_tokens", "a"), "has no column output_tokens"),
    "all failed": (HEAD.replace("requests,", "status,").replace("_mean_s", "_s") and
                   FEW.replace("e2e_s", "e2e_s,status", 1).replace("\n", ",error\n").replace("status,error", "status"),
                   "requests ended well"),
    "years apart": (FEW.replace(FEW.splitlines()[5].split(",")[0] + ",", "1e9,"), "years apart"),
    "beyond 64 bits": (FEW.replace(FEW.splitlines()[5].split(",")[0] + ",", "1e10,"), "is above 4e+09"),
    "another model": (
        (vllm_bench(measured(scenario_text(LINEAR, load=Load(4), requests=5)), 4)).replace('"m"', '"other"'),
        "rows of 2 models, other (5), m (60): none is the scenario's llama-3.1-8b. Pick one by --part",
    ),
    "a prompt beyond the model": (changed_rows(FEW, prompt_tokens=9000), "beyond max_model_len 8,192"),
    "aggregates without lengths": ("requests,ttft_mean_s\n60,0.1\n60,0.2\n60,0.3\n", "has no column of prompt_tokens"),
    "aggregates without numbers": (
        "prompt_tokens,output_tokens,ttft_mean_s,completed_rps\n100,10,0.1,1\n100,10,0.1,2\n100,10,0.1,4\n",
        "does not say its requests",
    ),
    "aggregates without rates": (
        "requests,prompt_tokens,output_tokens,ttft_mean_s\n9,100,10,0.1\n9,200,10,0.1\n9,300,10,0.1\n",
        "at which rate",
    ),
    "percentiles alone": (
        HEAD.replace("_mean", "_p50") + "\n".join(ROWS),
        "has no mean TTFT, TPOT or E2E to fit to",
    ),
    "zero bytes": ("a\0b", "holds zero bytes"),
    "rows of other lengths": (FEW + "1,2\n", "fields where the header has"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    """Beside three good ones: where, what, what to do; exit 2, nothing written."""
    text, message = FILES[name]
    bad = tmp_path / "bad.csv"
    if text is not None:
        bad.write_text(text)
    mine = tmp_path / "mine.json"
    good = [folder / "runs" / f"{load}.csv" for load in LOADS[:3]]
    bench = folder / f"{LOADS[3]}.json"
    done = batchsim("calibrate", "--bench", bad, *good, bench, "--scenario", folder / "free.yaml", "-o", mine)
    assert done.exit_code == 2 and not mine.exists()
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("round", "errors"))]
    assert len(lines) == 1 and message in lines[0] and "bad.csv" in lines[0], done.stderr


CALLS = {
    "no scenario": (["{runs}", "-o", "{out}"], "--scenario is missing"),
    "no output": (["{runs}", "--scenario", "{free}"], "-o is missing"),
    "an output of another kind": (["{runs}", "--scenario", "{free}", "-o", "x.yaml"], "does not end in .json"),
    "no such scenario": (["{runs}", "--scenario", "gone.yaml", "-o", "{out}"], "gone.yaml: no such scenario"),
    "one load": (["{one}", "--scenario", "{free}", "-o", "{out}"], "one load in 1 runs"),
    "two loads": (["{one}", "{two}", "--scenario", "{free}", "-o", "{out}"], "2 loads in 2 runs"),
    "a file twice": (["{one}", "{runs}", "--scenario", "{free}", "-o", "{out}"], "is given twice"),
    "an empty folder": (["{empty}", "--scenario", "{free}", "-o", "{out}"], "holds no .json, .jsonl, .csv file"),
    "a part of no run": (["{runs}", "--part", "x9", "--scenario", "{free}", "-o", "{out}"], "--part x9: no run"),
    "nothing to hold out": (["{runs}", "--hold-out", "x9", "--scenario", "{free}", "-o", "{out}"], "--hold-out x9"),
    "all held out": (["{runs}", "--hold-out", "{runs}", "--scenario", "{free}", "-o", "{out}"], "no run is left"),
    "a device beside": (["{runs}", "--device", "cpu", "-o", "{out}"], "--device: nothing is measured"),
    "minutes beside": (["{runs}", "--minutes", "8", "-o", "{out}"], "--minutes: is of --url, not of --bench"),
    "another policy": (["{runs}", "--policy", "sjf", "--scenario", "{free}", "-o", "{out}"], "the scenario has vllm"),
    "a cost factor": (["{runs}", "--set", "cost_factor=2", "--scenario", "{free}", "-o", "{out}"], "cost_factor and"),
    "replicas": (
        ["{runs}", "--set", "replicas={count: 2, router: random}", "--scenario", "{free}", "-o", "{out}"],
        "replicas cannot be fitted",
    ),
    "a cost of one's own": (
        ["{runs}", "--allow-code", "--set", "cost={kind: 'own_cost:Throttled', base: 8ms, per_token: 1us, above: 9}",
         "--scenario", "{free}", "-o", "{out}"],
        "cost Throttled is code of its own",
    ),
    "two policies": (
        ["{runs}", "--set", "policies.static={batch_size: 4}", "--scenario", "{free}", "-o", "{out}"],
        "has 2 policies (vllm, static)",
    ),
    "too little KV": (
        ["{runs}", "--set", "kv.tokens=512", "--scenario", "{free}", "-o", "{out}"],
        "did not finish in simulation",
    ),
}  # fmt: skip


def test_options_of_bench_need_its_files(tmp_path: Path) -> None:
    """They would be ignored."""
    done = batchsim("calibrate", "--model", "llama-3.1-8b", "--device", "cpu", "-o", tmp_path / "x.json", "--force")
    assert done.exit_code == 2 and "--force: is of --bench, --steps and --url. Add files" in done.stderr


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Exit 2, and nothing written."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    words, message = CALLS[name]
    (tmp_path / "empty").mkdir()
    places = {"runs": folder / "runs", "free": folder / "free.yaml", "out": tmp_path / "mine.json"}
    places |= {"one": folder / "runs" / f"{LOADS[0]}.csv", "two": folder / "runs" / f"{LOADS[1]}.csv"}
    places |= {"empty": tmp_path / "empty"}
    for key, path in places.items():
        words = [word.replace(f"{{{key}}}", str(path)) for word in words]
    done = batchsim("calibrate", "--bench", *words)
    assert done.exit_code == 2 and not (tmp_path / "mine.json").exists()
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("round", "errors"))]
    assert len(lines) == 1 and message in lines[0], done.stderr


def test_a_measured_run_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    """By the fit to it: one line, before anything is fitted."""
    (tmp_path / "a.json").write_bytes(next(folder.glob("*.json")).read_bytes())
    before = (tmp_path / "a.json").read_bytes()
    asked = ["--scenario", folder / "free.yaml", "-o", tmp_path / "a.json"]
    result = batchsim("calibrate", "--bench", tmp_path / "a.json", *asked)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert "a.json: is there, and no fit. Give -o another path." in result.stderr
    assert (tmp_path / "a.json").read_bytes() == before
