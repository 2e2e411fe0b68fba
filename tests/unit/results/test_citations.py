"""What a run rests on: every shipped rule says where it comes from, and papers are named in full."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from batchsim.drive.fleet.routing import ROUTERS
from batchsim.policies.registry import POLICIES
from batchsim.results.citations import _SAME, PAPERS, Citation, papers_in, source_of
from tests.support.tiny_scenario import REPLAY, TINY, batchsim

WITHOUT = {"hf_static"}  # its head says what it follows, and no file
SOURCES = {kind: source_of(policy) for kind, (_, policy) in POLICIES.items()}
SOURCES |= {kind: source_of(config) for kind, config in ROUTERS.items()}
OURS = {"round_robin", "random", "shortest_queue", "least_tokens", "prefix_affinity"}  # the five of `routing.py`


def test_every_shipped_policy_and_router_has_its_source() -> None:
    """But for rules that need none."""
    assert {kind for kind, source in SOURCES.items() if not source} == WITHOUT | OURS


def test_papers_are_named_in_full_and_none_that_no_source_names() -> None:
    """Of a source that names a conference and a year, or a number of arXiv."""
    all_of_them = " ".join(SOURCES.values())
    assert [words for words in [*PAPERS, *_SAME] if words not in all_of_them] == []
    assert set(_SAME.values()) <= set(PAPERS)
    named = re.compile(r"(?:OSDI|SOSP|NSDI) \d{4}|arXiv \d")
    assert [kind for kind, source in SOURCES.items() if named.search(source) and not [*papers_in(source)]] == []


def test_an_entry_of_bibtex_is_escaped() -> None:
    """Signs that TeX reads otherwise."""
    entry = Citation("key", "data", "", "misc", {"title": "100 % of a_b & {c} #1 $2"}).bibtex()
    assert entry == "@misc{key,\n  title = {100 \\% of a\\_b \\& \\{c\\} \\#1 \\$2},\n}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cited(folder: Path, scenario: str, *changes: str) -> dict[str, str]:
    """The text of everything that a run of `scenario` is said to rest on, by its part in the run."""
    (folder / "tiny.yaml").write_text(scenario, encoding="utf-8")
    sets = [word for change in changes for word in ("--set", change)]
    assert batchsim("run", "tiny.yaml", "--no-pictures", *sets).exit_code == 0
    result = batchsim("cite", "results/tiny", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len({row["key"] for row in rows}) == len(rows)
    return {row["of"]: row["text"] for row in rows if row["of"] != "paper"} | {
        row["key"]: row["text"] for row in rows if row["of"] == "paper"
    }


def test_policies_routers_costs_and_papers_are_cited(here: Path) -> None:
    policies = "policies={sarathi: {batch_size_cap: 4}, two: {kind: sarathi}, static: {batch_size: 4, max_wait: 1s}}"
    texts = cited(here, TINY, policies, "replicas={count: 2, router: power_of_two}", "seeds=1")
    assert texts["policy sarathi (recorded)"].startswith("Vidur 7d47513a: vidur/scheduler/replica_scheduler/sarathi")
    assert texts["policy static (family)"].startswith("batchsim's own rule static: request-level batching")
    assert "power_of_two.rs" in texts["router power_of_two"] and "as stated" in texts["step costs"]
    assert {key for key in texts if " " not in key} >= {"yu2022orca", "agrawal2024sarathi", "mitzenmacher2001power"}
    assert texts["simulator"].startswith("batchsim 0.1.0, commit ") and "numpy" in texts["packages"]


def test_data_is_cited_with_where_it_is_to_be_had(here: Path) -> None:
    (here / "my.csv").write_text("ts,in,out\n0,10,2\n5,20,3\n", encoding="utf-8")
    texts = cited(here, REPLAY, "workload.trace.fetch=some/place")
    assert texts["data"] == "Trace my.csv: some/place"
    text, bibtex = (batchsim("cite", "results/tiny", *more).stdout for more in ((), ("--bibtex",)))
    assert "data\n  Trace my.csv: some/place\n" in text
    assert "@misc{trace,\n  title = {Trace my.csv},\n  note = {some/place},\n}" in bibtex
    assert bibtex.count("{") == bibtex.count("}") and bibtex.count("@software{batchsim,") == 1


def test_a_folder_without_results_is_one_line(here: Path) -> None:
    result = batchsim("cite", here)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
