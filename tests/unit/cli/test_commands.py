"""The commands at their work: what they print, what they write, and that the same input gives the same bytes."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
import yaml

from batchsim.cli import COMMANDS as REGISTERED
from batchsim.cli import app, registered
from batchsim.cli.common import one_line_errors, progress_lines
from batchsim.results.read import load_results
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import run_scenario
from tests.support.tiny_scenario import REPLAY, TINY, batchsim, changed, listing

WIDTH = 100


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the tiny scenario."""
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(TINY)
    return tmp_path


def done(*args: object) -> str:
    """What a call that must succeed printed; nothing goes to stderr but how many points were there already."""
    result = batchsim(*args)
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"(\d+ points were there already; --force simulates them again\n)?", result.stderr)
    return result.stdout


def table(*args: object) -> str:
    """What `run` printed in one process, without the time to draw."""
    return done("run", *args, "--jobs", 1, "--no-pictures")


def parquet(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}


def test_same_seed_same_bytes(here: Path) -> None:
    """Two folders, one with two processes: the three tables of all 8 points are the same byte for byte."""
    run_scenario(load_scenario("s.yaml"), out=here / "a", jobs=1)
    run_scenario(load_scenario("s.yaml"), out=here / "b", jobs=2)
    assert len(parquet(here / "a")) == 8 * 3
    assert parquet(here / "a") == parquet(here / "b")


def test_run_prints_a_narrow_table_and_writes_whole_results(here: Path) -> None:
    """At most 100 columns, the folder last; it holds the tables and five pictures, and no unfinished file."""
    lines = done("run", "s.yaml", "--jobs", 1).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any(line.startswith("at 20 req/s offered") for line in lines)
    assert sum(line.startswith(("static", "continuous")) for line in lines) == 2
    (folder,) = [path.parent for path in Path("results/s").glob("*/manifest.json")]
    assert str(folder) in "".join(lines[-2:])
    assert {path.name for path in folder.iterdir()} >= {"summary.csv", "points.csv", "scenario.yaml", "p99_vs_qps.png"}
    assert len(list(folder.glob("*.png"))) == 5
    assert [name for name in listing(here) if "/." in name] == ["results/s/.lock"]


def test_json_counts_every_request(here: Path) -> None:
    """Per policy, submitted = finished + rejected + cancelled + unfinished, each of the last three by reason."""
    data = json.loads(table("s.yaml", "--json", "--set", "workload.patience={mean: 60ms}"))
    assert set(data["policies"]) == {"static", "continuous"}
    for policy in data["policies"].values():
        assert policy["submitted"] == 40 * 2 * 2
        ended = {name: policy[name] for name in ("rejected", "cancelled", "unfinished")}
        assert policy["submitted"] == policy["finished"] + sum(ended.values())
        assert {name: sum(policy[f"{name}_by_reason"].values()) for name in ended} == ended
        assert [entry["load"] for entry in policy["loads"]] == [10, 20]
    assert data["policies"]["static"]["cancelled"] > 0


def test_set_changes_what_runs(here: Path) -> None:
    """--set adds, replaces and nests; the manifest holds what was run."""
    table(
        "s.yaml", "--set", "seeds=1", "--set", "policies={mine: {kind: static, batch_size: 2}}",
        "--set", "workload.lengths.prompt.tokens=50", "--set", "load.mean_rate=[5/s]",
    )  # fmt: skip
    results = load_results("results/s")
    assert results.points[["policy", "load", "seed"]].to_numpy().tolist() == [["mine", 5.0, 0]]
    assert set(results.requests("mine", 5, 0)["prompt_tokens"]) == {50}
    assert results.scenario["workload"]["lengths"]["prompt"]["tokens"] == 50


def test_the_heading_is_printed_before_the_first_point(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the run is stopped at its first point it is there; where it goes on it is there once, then the table."""
    whole = table("s.yaml")
    monkeypatch.setattr("batchsim.study.sweep.points.Sweep.attempt", _stopped)
    stopped = batchsim("run", "s.yaml", "--jobs", 1)
    assert (stopped.exit_code, stopped.stderr.count("\n")) == (130, 1)
    assert stopped.stdout.splitlines() == whole.splitlines()[:3] and whole.startswith("s · cost: constant")
    points = len(load_results("results/s").points)
    assert f"\n{points} points to simulate: some 1 s to " in whole
    assert whole.count("KV 16,000 tokens") == 1
    assert batchsim("run", "s.yaml", "--jobs", 1, "--json").stdout == ""


def _stopped(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_says_how_many_points_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """The last count that was reported; before the first of them, that what was written is kept."""

    def command(*counts: int) -> None:
        with progress_lines() as progress:
            for done in counts:
                progress(done, 2400, "static at 2, seed 0")
            raise KeyboardInterrupt

    for counts, line in (
        ((17, 1800), "interrupted. 1,800 of 2,400 points asked for are kept; the same command goes on from there.\n"),
        ((), "interrupted. What was written by then is kept. Run the same command again.\n"),
    ):
        with pytest.raises(typer.Exit) as ended:
            one_line_errors(command)(*counts)
        assert (ended.value.exit_code, capsys.readouterr().err) == (130, line)


def test_points_are_reused_until_forced(here: Path) -> None:
    """The same run again simulates nothing, another seed only what is new, --force everything."""

    def counts(*overrides: str) -> tuple[int, int]:
        manifest = run_scenario(load_scenario("s.yaml", overrides=overrides)).manifest
        return manifest["points_run"], manifest["points_reused"]

    assert counts() == (8, 0)
    first = {path.name: path.read_bytes() for path in Path("results/s").glob("*/*.csv")}
    assert counts() == (0, 8)
    assert {path.name: path.read_bytes() for path in Path("results/s").glob("*/*.csv")} == first
    again = batchsim("run", "s.yaml", "--jobs", 1, "--no-pictures")
    assert again.stderr == "8 points were there already; --force simulates them again\n"
    assert counts("seeds=3") == (4, 8)
    assert batchsim("run", "s.yaml", "--jobs", 1, "--no-pictures", "--force").stderr == ""
    manifest = load_results("results/s").manifest
    assert (manifest["points_run"], manifest["points_reused"]) == (8, 0)


def test_a_link_to_a_run_s_folder_has_its_points(here: Path) -> None:
    """Which lie beside the folder itself."""
    results = run_scenario(load_scenario("s.yaml"))
    Path("latest").symlink_to(results.path.resolve())
    assert load_results("latest").requests("static", 10.0, 0).equals(results.requests("static", 10.0, 0))


def test_load_chooses_the_table(here: Path) -> None:
    """--load shows another of the tested loads than the highest within the SLO."""
    assert "at 10 req/s offered" in table("s.yaml", "--load", 10)


def test_best_of_names_the_best(here: Path) -> None:
    """Of the listed batch sizes one is reported, by name."""
    out = table("s.yaml", "--set", "policies.static.batch_size={best_of: [2, 4]}")
    assert ("static (bs 2)" in out) != ("static (bs 4)" in out)


def test_shipped_scenario_is_found_by_name(here: Path) -> None:
    """`batchsim run bursty` works in any folder; its results are named after it."""
    small = [
        "--set",
        "load.mean_rate=[1/s]",
        "--set",
        "seeds=1",
        "--set",
        "workload.duration=40s",
        "--set",
        "workload.warmup=0s",
    ]
    table("bursty", *small, "--set", "policies={continuous: {max_num_seqs: 8,"
         " max_num_batched_tokens: 512}}")  # fmt: skip
    assert load_results("results/bursty").manifest["scenario_name"] == "bursty"


def test_some_rejections_are_a_warning_or_with_strict_an_error(here: Path) -> None:
    """A request that can never fit is counted and warned of; --strict makes it exit 2 with the reason."""
    Path("r.yaml").write_text(REPLAY)
    Path("my.csv").write_text("ts,in,out\n0,5,5\n9,15990,50\n20,5,5\n")
    assert "rejected" in table("r.yaml")
    result = batchsim("run", "r.yaml", "--jobs", 1, "--strict")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 2)
    assert result.stdout.splitlines()[-2].startswith("KV 16,000 tokens"), "the heading alone"
    assert "1 of 3 requests rejected" in result.stderr


@pytest.mark.parametrize(("rows", "said"), [(3, ["n = 3"]), (19, ["n = 19"]), (20, [])])
def test_few_requests_are_a_warning(here: Path, rows: int, said: list[str]) -> None:
    """A log of three rows has no percentiles, and a run of it says so; one of twenty is not spoken of."""
    Path("r.yaml").write_text(REPLAY)
    Path("my.csv").write_text("ts,in,out\n" + "".join(f"{9 * n},50,5\n" for n in range(rows)))
    out = table("r.yaml", "--no-pictures")
    assert re.findall(r"^! (n = \d+): a simulation of fewer than 20 requests says little\.", out, re.M) == said


def test_the_example_log_can_be_looked_at_and_run(here: Path) -> None:
    """The same bytes each time, another log of another seed; the commands that are named next take it as it is."""
    first, second = done("trace", "example", "-o", "log.csv").splitlines()
    log = Path("log.csv").read_bytes()
    assert first == "log.csv  1,099 requests in half an hour, all of it invented; next:"
    assert (hashlib.sha256(log).hexdigest()[:16], log.count(b"\n")) == ("2e6b2531d6858dee", 1100)
    done("trace", "example", "-o", "log.csv")
    assert Path("log.csv").read_bytes() == log
    done("trace", "example", "-o", "other.csv", "--seed", 1)
    assert Path("other.csv").read_bytes() != log
    assert second.startswith("batchsim trace inspect log.csv --columns ")
    inspected = done(*second.split()[1:], "--json")
    assert set(json.loads(inspected)["classes"]) == {"chat", "batch"}
    done("init", "--trace", *second.split()[3:], "-o", "n.yaml")
    text = table("n.yaml", "--no-pictures", "--set", "load={rate_scale: [1]}", "--set", "policies={vllm: {}}")
    assert "605 of 605 that have one" in " ".join(text.split())
    Path("log.csv").write_text("mine")
    refused = batchsim("trace", "example")
    assert refused.exit_code == 2 and Path("log.csv").read_text() == "mine"


def test_unsorted_duplicate_and_zero_rows_are_noted(here: Path) -> None:
    """What a trace's reading changed stands in the output: sorted rows, equal times, dropped rows."""
    Path("r.yaml").write_text(REPLAY)
    Path("my.csv").write_text("ts,in,out\n50,5,5\n0,5,5\n50,6,6\n70,0,5\n")
    out = table("r.yaml")
    for note in ("not in time order (1 steps back)", "1 of 3 rows arrive at the same time", "1 of 4 rows dropped"):
        assert note in out


# ---- trace inspect and init

MY_CSV = "when,in_tok,out_tok\n0,100,10\n500,200,20\n1500,300,30\n1500,400,90\n2500,50,0\n"
COLUMNS = ("--columns", "arrival=when,prompt=in_tok,output=out_tok", "--time-unit", "ms")


def test_inspect_prints_and_draws(here: Path) -> None:
    """Rate, CV, dispersion, quantiles and notes on stdout; the picture is named after the trace, its bytes fixed."""
    Path("my.csv").write_text(MY_CSV)
    out = done("trace", "inspect", "my.csv", *COLUMNS)
    for text in ("4 requests", "rate 2 requests/s", "at 60 s", "p99", "1 of 5 rows dropped", "my.trace.png"):
        assert text in out
    assert max(map(len, out.splitlines())) <= WIDTH
    first = Path("my.trace.png").read_bytes()
    done("trace", "inspect", "my.csv", *COLUMNS, "--out", "again.png")
    assert first.startswith(b"\x89PNG") and first == Path("again.png").read_bytes()


def test_inspect_json_is_the_same_figures_and_draws_nothing(here: Path) -> None:
    """--json prints the figures as data; without --out no file is written."""
    Path("my.csv").write_text(MY_CSV)
    before = listing(here)
    data = json.loads(done("trace", "inspect", "my.csv", *COLUMNS, "--json"))
    assert (data["rows"], data["arrivals"]["rate_rps"], data["output_tokens"]["max"]) == (4, 2.0, 90)
    assert listing(here) == before


@pytest.mark.parametrize(
    "rows",
    [
        "0,5,5\n",
        *(pytest.param(rows, marks=pytest.mark.slow) for rows in ("0,5,5\n0,5,5\n", "0,5,5\n9,5,5\n")),
        "0,1,1\n1,1,1\n1,2,1\n",
    ],
)
def test_inspect_draws_the_smallest_traces(here: Path, rows: str) -> None:
    """One row, equal times, equal lengths: drawn without a warning."""
    Path("my.csv").write_text("when,in_tok,out_tok\n" + rows)
    done("trace", "inspect", "my.csv", *COLUMNS)
    assert Path("my.trace.png").stat().st_size > 10_000


def test_metrics_are_asked_onto_the_screen_before_anything_runs(here: Path) -> None:
    """In the place of the table's own; a name that there is not is refused before the first simulation."""
    Path("s.yaml").write_text(TINY)
    out = done("run", "s.yaml", "--no-pictures", "--columns", "makespan,preemptions,num_steps")
    head = next(line for line in out.splitlines() if "makespan" in line)
    assert head.split() == ["makespan", "preemptions", "num", "steps"] and "ttft p50" not in out
    before = listing(here)
    refused = batchsim("run", "s.yaml", "--columns", "makespn", "--out", "other")
    assert refused.exit_code == 2 and "Write one of makespan_s" in refused.stderr and listing(here) == before


def test_what_a_scenario_says_of_a_trace_can_be_set(here: Path) -> None:
    """Rows kept that have no output, a slice of them, another rate; in what init writes too."""
    Path("my.csv").write_text(MY_CSV)
    sets = ("--set", "zero_lengths=prefill_only", "--set", "trace.rows=[1, 5]", "--set", "jitter=1ms")
    kept = json.loads(done("trace", "inspect", "my.csv", *COLUMNS, *sets, "--json"))
    assert kept["rows"] == 4 and any("given 1 (prefill only)" in note for note in kept["notes"])
    faster = ("--set", "rate_scale.factor=2", "--set", "rate_scale.by=compress")
    found = json.loads(done("trace", "inspect", "my.csv", *COLUMNS, *faster, "--json"))
    assert found["arrivals"]["rate_rps"] == 4.0
    done("init", "--trace", "my.csv", *COLUMNS, *sets, "-o", "n.yaml")
    trace = yaml.safe_load(Path("n.yaml").read_text())["workload"]["trace"]
    assert (trace["zero_lengths"], trace["rows"], trace["jitter"]) == ("prefill_only", [1, 5], "1ms")


def test_init_from_a_trace_of_one_time(here: Path) -> None:
    """It replays the rows all at once, without a load axis that they do not have."""
    Path("my.csv").write_text("when,in_tok,out_tok\n" + "7,5,5\n" * 30)
    done("init", "--trace", "my.csv", *COLUMNS, "-o", "n.yaml", "--no-schema")
    text = Path("n.yaml").read_text()
    assert "30 requests, all of one time" in text and "load" not in yaml.safe_load(text)
    assert "30 requests at once" in table("n.yaml")


def test_inspect_of_lengths_only(here: Path) -> None:
    """A trace without times is drawn without arrivals and says so."""
    Path("my.csv").write_text("a,b\n5,6\n7,8\n")
    assert "no arrival times" in done("trace", "inspect", "my.csv", "--columns", "prompt=a,output=b")


OTHERS = pytest.param(["--model", "qwen3-8b", "--gpu", "l40s"], marks=pytest.mark.slow)


@pytest.mark.parametrize("args", [[], OTHERS, ["--model", "llama-3.1-70b"]])
def test_init_writes_what_runs(here: Path, args: list[str]) -> None:
    """The scenario has its header and is accepted; a model larger than one GPU gets as many as it needs."""
    done("init", "-o", "n.yaml", *args)
    text = Path("n.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=batchsim.schema.json\n# Question: ")
    assert Path("batchsim.schema.json").read_text() == done("schema")
    assert "\n# Source: " in text and "\n# Expect: " in text
    assert ("tp: 2" in text) == ("llama-3.1-70b" in args)
    Setup.of(load_scenario("n.yaml"))
    if not args:
        table("n.yaml", "--set", "load.mean_rate=[1/s]", "--set", "seeds=1")


def test_init_keeps_what_is_no_schema(here: Path) -> None:
    """A file of its name that is another stays, one of another version is written anew; --no-schema writes none."""
    done("init", "-o", "n.yaml", "--no-schema", "--engine", "vllm")
    assert not Path("batchsim.schema.json").exists() and Path("n.yaml").read_text().startswith("# Question: ")
    Path("batchsim.schema.json").write_text("mine")
    refused = batchsim("init", "-o", "m.yaml")
    assert refused.exit_code == 2 and "no schema of a scenario" in refused.stderr and not Path("m.yaml").exists()
    assert Path("batchsim.schema.json").read_text() == "mine"
    Path("batchsim.schema.json").write_text(done("schema").partition(',\n "$defs"')[0] + ',\n "old": 1\n}\n')
    done("init", "-o", "m.yaml", "--engine", "vllm")
    assert Path("batchsim.schema.json").read_text() == done("schema")


def test_init_from_a_trace(here: Path) -> None:
    """Path relative to the scenario, columns, unit, the measured rate, and a cap that cuts no output; and it runs."""
    Path("data").mkdir()
    Path("data/my trace.csv").write_text(MY_CSV)
    Path("sub").mkdir()
    done("init", "--trace", "data/my trace.csv", *COLUMNS, "-o", "sub/n.yaml")
    text = Path("sub/n.yaml").read_text()
    workload = yaml.safe_load(text)["workload"]
    assert workload["trace"]["path"] == "../data/my trace.csv"
    assert workload["trace"]["columns"] == {"arrival": "when", "prompt": "in_tok", "output": "out_tok"}
    assert workload["trace"]["time_unit"] == "ms"
    assert workload["output_cap"] == 128
    assert "longest output of the trace is 90" in text and "4 requests, 2/s" in text
    os.chdir("data")  # the path starts from the scenario, not from here
    assert "trace arrivals" in table("../sub/n.yaml")


def test_init_from_lengths_only(here: Path) -> None:
    """A trace without times gives its lengths to Poisson arrivals."""
    Path("my.csv").write_text("a,b\n5,6\n7,8\n")
    done("init", "--trace", "my.csv", "--columns", "prompt=a,output=b", "-o", "n.yaml")
    workload = yaml.safe_load(Path("n.yaml").read_text())["workload"]
    assert workload["arrivals"]["kind"] == "poisson" and workload["lengths"] == {"kind": "trace"}
    table("n.yaml", "--set", "load.mean_rate=[2/s]", "--set", "seeds=1")


def test_show_writes_times_with_their_units(here: Path) -> None:
    """Knobs are words, none where nothing is set; JSON has nanoseconds. A time of more digits is exact."""
    shown = " ".join(done("show", "bursty", "--set", "policies.dynamic.max_queue_time=1234567ns").split())
    assert "max_wait 10 s, " in shown and "max_queue_delay 50 ms, preferred_batch_sizes none, " in shown
    assert "max_queue_time 1,234,567 ns, " in shown and "reserve_tokens none" in shown and "null" not in shown
    assert json.loads(done("show", "bursty", "--json"))["policies"]["static"]["max_wait"] == 10_000_000_000
    nested = done("show", "systems")
    assert "default_queue_policy {timeout_action REJECT, " in " ".join(nested.split())


def test_init_writes_the_deployment_of_a_command_line(here: Path) -> None:
    """Of a model whose profile is shipped: it runs, what was left untold is told, and `show` prints the line back."""
    line = "vllm serve meta-llama/Llama-3.1-70B -tp 4 --quantization fp8 --max-num-seqs 64 --port 80"
    result = batchsim("init", "--from-vllm", f"{line} --attention-backend X", "--gpu", "h100_sxm", "-o", "n.yaml")
    assert (result.exit_code, result.stdout) == (0, "n.yaml   next: batchsim run n.yaml\n")
    assert "- without effect on timing: --port\n" in result.stderr
    assert "! chooses among kernels that the tables do not tell apart: --attention-backend\n" in result.stderr
    found = yaml.safe_load(Path("n.yaml").read_text())
    assert found["deployment"] == {"engine": "vllm", "gpu": "h100_sxm", "tp": 4, "weights": "fp8"}
    assert found["policies"] == {"vllm": {"max_num_seqs": 64}}
    shown = done("show", "n.yaml")
    own = "vllm serve meta-llama/Llama-3.1-70B --tensor-parallel-size 4 --quantization fp8 --max-num-seqs 64"
    assert shown.splitlines()[-1] == own
    assert "cost: kernel tables of vllm" in shown and "policy vllm: " in shown
    assert json.loads(done("show", "n.yaml", "--json"))["command"]["line"] == own
    assert "vllm serve" not in done("show", "s.yaml")  # of which the cost is stated
    table("n.yaml", "--set", "load.mean_rate=[1/s]", "--set", "seeds=1", "--set", "workload.duration=30s")


def test_init_of_a_command_line_tells_what_the_line_did_not_say(here: Path) -> None:
    """A GPU that is assumed, and a model in the place of the line's own."""
    told = batchsim("init", "--from-vllm", "vllm serve /models/mine", "--model", "llama-3.1-8b", "-o", "n.yaml").stderr
    assert "! no command names the GPU: h200. Name yours with --gpu.\n" in told
    assert "! --model llama-3.1-8b in the place of the command's /models/mine\n" in told


def test_init_writes_a_deployment_where_asked_for_its_gpus(here: Path) -> None:
    """By the model, the GPU and their number; vllm's unless another engine is named."""
    done("init", "--model", "llama-3.1-70b", "--gpu", "h100", "--tp", "8", "-o", "n.yaml")
    found = yaml.safe_load(Path("n.yaml").read_text())
    assert found["deployment"] == {"engine": "vllm", "gpu": "h100", "tp": 8}
    Setup.of(load_scenario("n.yaml"))
    done("init", "--engine", "sglang", "-o", "m.yaml")
    assert yaml.safe_load(Path("m.yaml").read_text())["deployment"] == {"engine": "sglang", "gpu": "h200"}


def test_init_replaces_only_when_forced(here: Path) -> None:
    """An existing file stays unless --force is given."""
    assert batchsim("init", "-o", "s.yaml").exit_code == 2
    assert Path("s.yaml").read_text() == TINY
    done("init", "-o", "s.yaml", "--engine", "vllm", "--force")
    assert Path("s.yaml").read_text() != TINY


# ---- lists


def test_policies_lists_evidence_and_knobs() -> None:
    """Every registered policy with where it comes from, as text and as JSON."""
    rows = {row["policy"]: row for row in json.loads(done("policies", "--json"))}
    assert set(rows) >= {"static", "dynamic", "continuous", "preemptive", "vllm"}
    assert rows.pop("engine")["knobs"]["engine"] == "vllm"
    assert {row["evidence"] for row in rows.values()} <= {"recorded", "hand-derived", "family"}
    assert rows["continuous"]["knobs"]["max_num_seqs"] == "required"
    assert all(f"{name} " in done("policies") for name in (*rows, "engine"))
    assert max(map(len, [*done("policies").splitlines(), *done("catalog").splitlines()])) <= 100


def test_policies_that_are_recorded_say_how_many_schedules_are_equal() -> None:
    """Each with the engine and its version; hand-derived ones name what they follow, and count nothing."""
    rows = {row["policy"]: row for row in json.loads(done("policies", "--json")) if row["policy"] != "engine"}
    for row in rows.values():
        assert ("equal_schedules" in row) is (row["evidence"] == "recorded"), row
        assert ("engine_version" in row) is (row["evidence"] != "family"), row
    counted = f"equal in every step to {rows['vllm']['equal_schedules']} schedules recorded from vLLM 0.33.0"
    assert counted in done("policies")
    waits = {name: row["equal_schedules_with"] for name, row in rows.items() if "equal_schedules_with" in row}
    assert waits == {"tensorrt_llm": {"backend": "tensorrt"}}
    assert "cf6abc45, all with backend=tensorrt" in " ".join(done("policies").split())


def test_catalog_gives_sources() -> None:
    """Every model and GPU has a source."""
    data = json.loads(done("catalog", "--json"))
    assert {"h200", "h100", "a100", "l40s", "rtx4090"} <= set(data["gpus"])
    assert all(item["source"] for kind in ("models", "gpus") for item in data[kind].values())
    power = {name: data["gpus"][name]["power"] for name in ("h100", "a100", "b300_sxm")}
    assert power["h100"]["limit_w"] == 700 and power["h100"]["error_p50"] and not power["a100"]["error_p50"]
    assert power["b300_sxm"] is None
    text = done("catalog")
    assert all(name in text for kind in data.values() for name in kind)
    assert {"deepseek-ai/DeepSeek-V3", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-14B"} <= set(data["checkpoints"])


def test_catalog_says_of_each_model_what_works() -> None:
    """Engines and GPUs with step costs of its own; one that is refused stands apart, with its type and kind."""
    data = json.loads(done("catalog", "--json"))
    assert data["checkpoints"]["openai/gpt-oss-20b"] == ["vllm on h100, h200"]
    assert data["checkpoints"]["Qwen/Qwen3-VL-8B-Instruct"] == []
    works = data["works"]
    nano, v4 = works["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"], works["deepseek-ai/DeepSeek-V4-Flash"]
    assert (nano["kv"], nano["kv_bytes_per_token"], "h200_sxm" in nano["tables"]["vllm"]) == ("groups", 6144, True)
    assert (v4["kv"], "kv_bytes_per_token" in v4, v4["tables"]["vllm"][0]) == ("stated", False, "b200_sxm")
    assert (works["zai-org/GLM-5.2"]["kv"], works["stepfun-ai/Step-3.7-Flash"]["tables"]) == ("derived", {})
    assert works.keys() == data["checkpoints"].keys()
    nas = "nvidia/Llama-3_3-Nemotron-Super-49B-v1"
    assert list(data["not_simulated"]) == [nas]
    assert "'nemotron-nas': layers of kind blocks of shapes of their own are not known" in data["not_simulated"][nas]


@pytest.mark.parametrize("command", ["policies", "catalog"])
def test_lists_are_at_most_100_columns(command: str) -> None:
    """Long lists of knobs and sources go on below, broken between words."""
    text = done(command)
    assert max(map(len, text.splitlines())) <= 100
    assert "priority_scheduling_preemption_threshold=10," in text or "datasheet" in text


def test_schema_covers_scenario_and_policies() -> None:
    """The JSON schema names the top keys and the knobs of each policy, and forbids others."""
    schema = json.loads(done("schema"))
    assert {"model", "workload", "slo"} == set(schema["required"])
    assert {"required": ["deployment"]} in schema["oneOf"]
    assert schema["additionalProperties"] is False
    assert "max_num_seqs" in schema["$defs"]["policy_continuous"]["properties"]


def test_conform_says_which_recording_differs(here: Path) -> None:
    """An equal recording is exit 0; one with a changed step is exit 1 and named."""
    folder = os.environ.get("BATCHSIM_GOLDEN")
    if folder is None:
        pytest.skip("BATCHSIM_GOLDEN names no folder of recordings")
    for path in sorted(Path(folder, "vllm-v1").glob("*.json")):
        recording = json.loads(path.read_text())
        if "steps" in recording and not recording["meta"].get("enable_prefix_caching", True):
            break
    else:
        pytest.skip("no recording without prefix caching")
    done("conform", path, "--policy", "vllm")
    recording["steps"][0]["num_waiting"] += 1
    Path("changed.json").write_text(json.dumps(recording))
    result = batchsim("conform", path, "changed.json", "--policy", "vllm")
    assert result.exit_code == 1
    assert "changed.json" in result.stdout and "waiting" in result.stdout


def _commands(group: Any, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        path = (*prefix, name)
        found |= _commands(command, path) if hasattr(command, "commands") else {path: command}
    return found


COMMANDS = _commands(typer.main.get_command(app))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(path: tuple[str, ...]) -> None:
    """--help shows an example that begins with the command itself, and every option is explained."""
    text = " ".join(done(*path, "--help").split())
    assert "Example" in text
    assert f"batchsim {' '.join(path)}" in text.partition("Example")[2]
    assert all(param.help for param in COMMANDS[path].params if param.name != "help")


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        ("run", {"Output": "--html", "Precision": "--max-seeds", "Limits": "--max-points", "Ray": "--address"}),
        (
            "capacity",
            {"Options": "--only-rates", "Output": "--json", "Precision": "--max-probes", "Limits": "--max-memory"},
        ),
        ("plan", {"Options": "--set", "Output": "--json", "Limits": "--allow-code", "Ray": "--executor"}),
    ],
)
def test_help_lists_options_in_sections(command: str, sections: dict[str, str]) -> None:
    """Each section of --help has its heading once, and its options below it, before the next one."""
    parts = {part.partition(":")[0].split()[0]: part for part in done(command, "--help").split("\n\n") if part.strip()}
    assert {name: option for name, option in sections.items() if f"  {option} " not in parts[name]} == {}
    assert all(sum(f"  {option} " in part for part in parts.values()) == 1 for option in sections.values())


def test_summary_is_plain_csv(ran: Path) -> None:
    """summary.csv has a row a policy and load, readable by anything."""
    (folder,) = [path.parent for path in ran.glob("*/manifest.json")]
    with (folder / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], float(row["load"])) for row in rows] == [
        ("static", 10), ("static", 20), ("continuous", 10), ("continuous", 20),
    ]  # fmt: skip


def test_changing_text_must_match_once() -> None:
    """The helper of these tests refuses a replacement that would do nothing."""
    with pytest.raises(AssertionError):
        changed(TINY, "no such text", "")


CLASSES = """\
  classes:
    short: {share: 50%, slo: "p99(e2e)<1s"}
    long: {share: 50%, priority: 1}
"""


def test_classes_with_objectives_of_both_forms(here: Path) -> None:
    """A class judged by a percentile has no share in SLO; the line of the highest rate names every objective."""
    Path("s.yaml").write_text(changed(TINY, "  requests: 40\n", "  requests: 40\n" + CLASSES))
    text = table("s.yaml")
    assert "short, in SLO:  static –   continuous –" in text
    assert "every class's objective (short p99(e2e)<1s; ttft<1s & tpot<50ms @ 99%)" in " ".join(text.split())


def test_without_a_load_axis_the_verdict_is_yes_or_no(here: Path) -> None:
    """A single nameless load is no number to be met."""
    text = table("s.yaml", "--set", "load=null", "--set", "slo=e2e<9s @ 99%")
    assert "meets e2e<9s @ 99%:  static yes   continuous yes" in text


def test_seeds_of_a_replay_are_said_to_be_one_run(here: Path) -> None:
    """Where nothing is random an interval of 0 says nothing."""
    Path("my.csv").write_text("ts,in,out\n0,10,3\n50,20,4\n90,30,5\n")
    Path("r.yaml").write_text(changed(REPLAY, "seeds: 1", "seeds: 2"))
    assert "nothing here is random: the 2 seeds are one run" in table("r.yaml")


def test_a_point_that_lost_a_table_is_made_again(here: Path) -> None:
    """A results folder from which a file was deleted is repaired by the next run."""
    table("s.yaml")
    lost = next(Path("results/s/points").glob("*/steps.parquet"))
    lost.unlink()
    table("s.yaml")
    assert lost.exists()
    assert load_results("results/s").manifest["points_run"] == 1


def test_one_policy_that_takes_nothing_does_not_hide_the_others(here: Path) -> None:
    """A policy that rejects all is a warning beside the table; an error only if there is no other."""
    hopeless = "d: {kind: dynamic, max_batch_size: 2, priority_levels: 1}"
    text = changed(TINY, "  requests: 40\n", "  requests: 40\n  classes: {a: {share: 100%, priority: 3}}\n")
    Path("s.yaml").write_text(changed(text, "  static: {batch_size: 4, max_wait: 100ms}\n", f"  {hopeless}\n"))
    assert "! d: 100 % of requests not completed" in table("s.yaml")
    result = batchsim("run", "s.yaml", "--jobs", 1, "--no-pictures", "--set", f"policies={{{hopeless}}}")
    assert result.exit_code == 2
    assert "requests rejected: unknown_priority" in result.stderr


FAILING = "tests.support.failing_policies"


def test_a_failed_point_is_told_and_the_run_ends_with_1(here: Path) -> None:
    """The table and JSON are there with all that ran, the failed load says so; stderr says which points and why."""
    mine = f'policies.mine={{kind: "{FAILING}:Forgets", limit: 3, max_num_seqs: 1}}'
    result = batchsim("run", "s.yaml", "--jobs", 1, "--no-pictures", "--set", mine, "--allow-code")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
    assert re.match(
        r"\d+ of 12 points failed, the others are kept: mine: .* failed at load .*again\.\n$", result.stderr
    )
    assert any(line.startswith("! mine: ") and "failed at load" in line for line in result.stdout.splitlines())
    again = batchsim("run", "s.yaml", "--jobs", 1, "--no-pictures", "--set", mine, "--allow-code", "--json")
    assert again.exit_code == 1
    found = json.loads(again.stdout)
    assert {entry["policy"] for entry in found["failed"]} == {"mine"}
    assert [row["failed"] for row in found["policies"]["static"]["loads"]] == [0, 0]


def _bounded() -> Iterator[tuple[str, Any]]:
    """The options of all commands that state an end of their range."""
    made = [registered(name) for name in REGISTERED]
    groups = [group.registered_callback for group in made if group.registered_callback is not None]
    for command in [*(command for group in made for command in group.registered_commands), *groups]:
        hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
        for name, hint in hints.items():
            for mark in getattr(hint, "__metadata__", ()):
                if getattr(mark, "min", None) is not None or getattr(mark, "max", None) is not None:
                    yield f"{command.callback.__name__} {name}", mark


BOUNDED = dict(_bounded())


@pytest.mark.parametrize("option", BOUNDED)
def test_an_option_that_has_a_least_value_has_a_greatest(option: str) -> None:
    """No number of a call may be any number: the help of an option states both ends of its range."""
    mark = BOUNDED[option]
    assert mark.min is not None and mark.max is not None and mark.min < mark.max <= 2**31


def test_the_bounded_options_are_found() -> None:
    """The walk sees options that commands share, and those of their own."""
    assert {"run jobs", "plan max_points", "capacity max_seeds", "live attempts", "validate seed"} <= set(BOUNDED)
