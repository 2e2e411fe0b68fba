"""`batchsim explain`: why requests were slow or missed, what would have helped, who was delayed for whom."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchsim.results.read import load_results
from tests.support.resealed import reseal
from tests.support.tiny_scenario import TINY, batchsim, changed

WIDTH = 100
MISSING = changed(TINY, "ttft<1s & tpot<50ms @ 99%", "ttft<80ms & tpot<50ms @ 99%")
TIGHT = "max_num_seqs: 8, max_num_batched_tokens: 512, by: recompute, victim: newest, watermark: 0%"


def done(*args: object) -> str:
    """What a call that must succeed printed; nothing goes to stderr."""
    result = batchsim(*args)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def explained(*args: object) -> list[Any]:
    """The same as JSON."""
    return json.loads(done(*args, "--json"))


@pytest.fixture(scope="module")
def missed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the tiny scenario with a TTFT that not everyone keeps, of two classes. To be read, not changed."""
    folder = tmp_path_factory.mktemp("missed")
    (folder / "s.yaml").write_text(MISSING)
    classes = (
        "workload.classes={chat: {share: 60%, priority: 0}, batch: {share: 40%, priority: 1, slo: e2e<90ms @ 90%}}"
    )
    done("run", folder / "s.yaml", "--out", folder, "--jobs", 1, "--no-pictures", "--set", classes)
    return folder / "s"


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with so little KV memory that requests are preempted."""
    folder = tmp_path_factory.mktemp("tight")
    (folder / "s.yaml").write_text(TINY)
    done(
        "run", folder / "s.yaml", "--out", folder, "--jobs", 1, "--no-pictures",
        "--set", f"policies={{preemptive: {{{TIGHT}}}}}",
        "--set", "kv.tokens=256", "--set", "workload.output_cap=64",
        "--set", "workload.lengths.output={kind: uniform, min: 20, max: 60}",
    )  # fmt: skip
    return folder / "s"


# ---- the slowest


def test_the_slowest_of_every_policy(ran: Path) -> None:
    """A mean and the slowest for each policy, in 100 columns, each as a sum of parts."""
    out = done("explain", ran, "--slowest", 2)
    assert max(map(len, out.splitlines())) <= WIDTH
    assert out.count("  mean of 40: ") == 2 and out.count("  request ") == 4
    assert "queued:batch" in out.partition("continuous at")[0]


def test_the_slowest_by_a_latency_of_ones_choice(ran: Path) -> None:
    """Those with the largest TTFT first, which is told in the text and in --json."""
    (found,) = explained("explain", ran, "--policy", "continuous", "--load", 10, "--slowest", 40, "--by", "ttft")
    requests = load_results(ran).requests("continuous", 10, 0).set_index("request_id")
    ttfts = [one["ttft_ns"] for one in found["slowest"]]
    ids = [one["request_id"] for one in found["slowest"]]
    assert ttfts == sorted(ttfts, reverse=True) == list((requests["first_delivery_ns"] - requests["sent_ns"])[ids])
    assert "tokens, TTFT " in done("explain", ran, "--policy", "continuous", "--slowest", 2, "--by", "ttft")


def test_parts_sum_to_the_latency_in_the_table(ran: Path) -> None:
    """In --json the parts add up to the request's E2E to the ns, and the slowest come first."""
    (found,) = explained("explain", ran, "--policy", "static", "--load", 10, "--slowest", 40)
    requests = load_results(ran).requests("static", 10, 0).set_index("request_id")
    lives = [one["life_ns"] for one in found["slowest"]]
    assert lives == sorted(lives, reverse=True) and len(lives) == 40
    for one in found["slowest"]:
        row: Any = requests.loc[one["request_id"]]
        assert sum(part["ns"] for part in one["parts"]) == one["life_ns"] == row["delivered_ns"] - row["sent_ns"]
    assert found["mean_ns"] == pytest.approx(sum(lives) / 40)


@pytest.mark.parametrize("command", ["explain", "timeline"])
def test_results_of_another_version_are_one_line(ran: Path, tmp_path: Path, command: str) -> None:
    """A table without one of today's columns is named with what to do, exit 2."""
    home = tmp_path / "s"
    shutil.copytree(ran, home)
    for path in home.glob("points/*/steps.parquet"):
        pq.write_table(pq.read_table(path).drop_columns(["free_blocks"]), path)
    reseal(home)
    point = ["--policy", "static", "--load", 10, "--seed", 0]
    written = [*point, "-o", tmp_path / "t.json"] if command == "timeline" else point
    refused = batchsim(command, home, *written)
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert "have no column free_blocks: another version of batchsim wrote them. Run" in refused.stderr


def test_who_took_the_place_is_named(tight: Path) -> None:
    """A preempted request's part names the request that took its KV."""
    (found,) = explained("explain", tight, "--slowest", 40, "--load", 20)
    parts = [part for one in found["slowest"] for part in one["parts"] if part["part"].startswith("preempted")]
    assert parts and any(part["blocker"] is not None for part in parts)
    assert " by request " in done("explain", tight, "--slowest", 40, "--load", 20)


# ---- one request


def test_one_request_under_every_policy(ran: Path) -> None:
    """The same request of every policy; its parts sum to E2E, which is that of the table, and are printed so."""
    found = explained("explain", ran, "--request", 7, "--load", 20)
    assert [(one["policy"], one["request_id"]) for one in found] == [("static", 7), ("continuous", 7)]
    out = done("explain", ran, "--request", 7, "--load", 20)
    assert max(map(len, out.splitlines())) <= WIDTH
    for one in found:
        row: Any = load_results(ran).requests(one["policy"], 20, 0).set_index("request_id").loc[7]
        assert one["e2e_ns"] == row["delivered_ns"] - row["sent_ns"] == sum(part["ns"] for part in one["parts"])
        chapters = one["chapters"]
        assert chapters[0]["start_ns"] == row["sent_ns"] and chapters[-1]["end_ns"] == row["delivered_ns"]
        assert f"{one['e2e_ns']:,} ns  = E2E, {one['e2e_ns']:,} ns" in out


def test_a_preempted_request_says_for_whom_and_what_was_computed_again(tight: Path) -> None:
    """The sentence has the preemption, its blocker and the tokens of the recompute; the line of time its letters."""
    requests = load_results(tight).requests("preemptive", 20, 0)
    row = requests[requests["num_preemptions"] == 1].iloc[0]
    (one,) = explained("explain", tight, "--request", row["request_id"], "--load", 20)
    assert "preempted once for " in one["sentence"]
    assert f"recompute of {row['recomputed_tokens']:,} tokens" in one["sentence"]
    assert {"x", "R"} <= set(one["line"]) and len(one["line"]) == WIDTH - 4


# ---- misses


def test_misses_have_causes_by_policy_and_class(missed: Path) -> None:
    """As many as the shares in the results leave out, of each policy and class, with a picture."""
    found = explained("explain", missed, "--slo", "--load", 20)
    points = load_results(missed).points
    assert [(one["policy"], one["request_class"]) for one in found] == [
        (policy, request_class) for policy in ("static", "continuous") for request_class in ("chat", "batch")
    ]
    for one in found:
        assert sum(row["misses"] for row in one["causes"]) == one["missed"]
    for policy in ("static", "continuous"):
        rows = points[(points["policy"] == policy) & (points["load"] == 20)]
        mine = [one for one in found if one["policy"] == policy]
        assert sum(one["offered"] for one in mine) == rows["cohort"].sum() == 80
        assert sum(one["missed"] for one in mine) == round(((1 - rows["in_slo"]) * rows["cohort"]).sum())
    assert any(one["causes"] for one in found)
    picture = next(missed.glob("*/slo_causes.png"))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_misses_of_one_seed_as_text(missed: Path, tmp_path: Path) -> None:
    """One seed's counts, in 100 columns, and the picture where it is asked for."""
    path = tmp_path / "causes.png"
    out = done("explain", missed, "--slo", "--load", 20, "--seed", 1, "--policy", "static", "-o", path)
    assert "(1 seed)" in out and out.count(" of 40 requests missed") == 0 and "class chat" in out
    assert max(map(len, out.splitlines()[:-1])) <= WIDTH and path.is_file()


# ---- counterfactual and audit


def test_a_counterfactual_of_every_policy_and_of_the_one_it_names(ran: Path) -> None:
    """A change of the scenario is tried on all policies, one of a policy's knob on that policy."""
    both = explained("explain", ran, "--load", 20, "--counterfactual", "kv.tokens=+20%")
    assert [one["policy"] for one in both] == ["static", "continuous"]
    assert both[0]["changes"] == [{"key": "kv.tokens", "before": 16000, "after": 19200}]
    (one,) = explained("explain", ran, "--load", 20, "--counterfactual", "policies.static.batch_size=2")
    assert one["policy"] == "static" and not one["rerun"] and not one["no_effect"]
    out = done("explain", ran, "--load", 20, "--counterfactual", "policies.static.batch_size=2")
    assert "policies.static.batch_size 4 → 2" in out and max(map(len, out.splitlines())) <= WIDTH


def test_the_audit_log_is_json_lines(tight: Path, tmp_path: Path) -> None:
    """A header, then events; those of preemptions are as many as the table counts."""
    path = tmp_path / "audit.jsonl"
    done("explain", tight, "--load", 10, "--audit", path)
    out = done("explain", tight, "--load", 20, "--audit", path)  # over the other log
    header, *events = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["schema"] == "batchsim-audit" and header["policy"] == "preemptive" and not header["live"]
    assert f"{len(events)} events" in out
    lost = [event for event in events if event["kind"] == "preempted"]
    assert len(lost) == load_results(tight).requests("preemptive", 20, 0)["num_preemptions"].sum() > 0
    assert all(event["in_favour_of"] for event in lost)


REFUSED = {
    "nothing_there": (["nowhere"], "holds no results"),
    "policy": (["--policy", "nobody"], "has no policy nobody"),
    "load": (["--load", 3], "load 3 was not tested"),
    "seed": (["--seed", 9], "with seed 9"),
    "request": (["--request", 4000], "no request 4000"),
    "two_at_once": (["--request", 1, "--slo"], "--request and --slo: each tells something else"),
    "picture_of_nothing": (["-o", "a.png"], "--output: is for the picture of --slo alone"),
    "no_change": (["--counterfactual", "kv.tokens"], "not of the form KEY=VALUE"),
    "axis": (["--counterfactual", "seeds=9"], "Use batchsim run --set seeds=9"),
    "no_such_policy": (["--counterfactual", "policies.nobody.x=9"], "has no policy nobody"),
    "unknown_key": (["--counterfactual", "kv.token=9"], "Did you mean tokens"),
    "audit_over_another_file": (["--audit", __file__], "is there, and no audit log"),
    "picture_over_another_file": (
        ["--slo", "-o", __file__],
        "is there, and no picture of the causes of misses by batchsim",
    ),
    "slowest_of_one": (["--request", 1, "--slowest", 2], "--slowest and --request: each tells something else"),
    "no_latency": (["--by", "itl"], "--by itl: is no latency of a request. Write one of ttft"),
    "audit_as_json": (["--audit", "a.jsonl", "--json"], "is JSON lines already"),
    "other_policy": (["--policy", "static", "--counterfactual", "policies.continuous.max_num_seqs=9"], "of continuous"),
    "audit_folder": (["--audit", "no/such/folder/a.jsonl"], "cannot be written"),
}


@pytest.mark.parametrize(("args", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_calls_are_one_line_and_exit_2(ran: Path, args: list[object], said: str) -> None:
    """What is wrong and what to do, on stderr alone."""
    result = batchsim("explain", *(args if args == ["nowhere"] else [ran, *args]))
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert said in result.stderr and result.stderr.count("\n") == 1
