"""The pictures of docs/pictures: small, shown, and with the words beside them that stand in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="Pillow is not installed")

import pandas as pd

from batchsim.report.numbers import percent_text
from batchsim.results.read import Results
from batchsim.scenario import load_scenario
from batchsim.study.curves.run import run_scenario
from batchsim.training.load import load_training, run_training
from tests.docs.page_pictures import (
    FOLDER,
    MOST_BYTES,
    alt_texts,
    said_by_adapters,
    said_by_drafting,
    said_by_energy,
    said_by_plan,
    said_by_reuse,
    said_by_training,
    said_by_view,
)
from tests.docs.pools_picture import compared, said_by_pools
from tests.support.tiny_scenario import batchsim

PAGES = (
    "index.md",
    "view.md",
    "shapes.md",
    "energy.md",
    "adapters.md",
    "multimodal.md",
    "training.md",
    "rollouts.md",
    "tiers.md",
    "pools.md",
)
REFERENCE = FOLDER.parents[1] / "results/reference/bursty"
ALT = {page: alt_texts(page) for page in PAGES}


def test_each_picture_is_shown_and_small() -> None:
    """By the first page or those of `view`, shapes, energy, adapters, images, training, rollouts, tiers, pools; none is
    left over."""
    shown = {name for texts in ALT.values() for name in texts}
    assert {path.stem for path in FOLDER.iterdir()} == shown and len(ALT["index.md"]) == 3
    assert [path.name for path in FOLDER.iterdir() if path.stat().st_size >= MOST_BYTES] == []


@pytest.fixture(scope="module")
def bursty(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_scenario(load_scenario("bursty"), out=tmp_path_factory.mktemp("bursty"))


@pytest.mark.slow
def test_the_words_beside_the_pictures_of_view_are_those_of_the_run(bursty: Results) -> None:
    """The decision of `bursty` as it is shipped, and the life of the request that waited longest."""
    said = said_by_view(bursty)
    assert {name: ALT["view.md"][name] for name in said} == said and ALT["index.md"]["view"] == said["view"]


@pytest.mark.slow
def test_the_picture_that_the_readme_begins_with_is_of_todays_run(bursty: Results) -> None:
    """The numbers kept beside it are those of `bursty` as it is shipped, every one that was known when it was drawn."""
    kept, today = (pd.read_csv(folder / "summary.csv") for folder in (REFERENCE, bursty.path))
    assert len(kept.columns) > 200
    pd.testing.assert_frame_equal(kept, today.reindex(columns=kept.columns), rtol=1e-9)


@pytest.mark.slow
def test_the_words_beside_the_picture_of_a_plan_are_its_recommendation(tmp_path: Path) -> None:
    """Of `plan` as it is shipped."""
    done = batchsim("plan", "plan", "--out", tmp_path, "-o", tmp_path / "report")
    assert done.exit_code == 0, done.stderr
    assert said_by_plan(tmp_path / "report/report.md") == {"plan": ALT["index.md"]["plan"]}


@pytest.mark.slow
def test_the_words_beside_the_picture_of_drafts_are_those_of_the_run(tmp_path: Path) -> None:
    """Up to which load each number of drafts pays, of `speculative` as it is shipped."""
    said = said_by_drafting(run_scenario(load_scenario("speculative"), out=tmp_path))
    assert said == {"drafting": ALT["index.md"]["drafting"]}


@pytest.mark.slow
def test_the_words_beside_the_picture_of_shapes_are_those_of_the_search() -> None:
    """What four buckets of tokens waste, and powers of two, of `trainium` as it is shipped."""
    done = batchsim("shapes", "trainium", "--load", 1, "--buckets", 4, "--json")
    tokens = json.loads(done.stdout)["lists"]["tokens"]
    waste = [percent_text(1 - tokens[name]["real"] / tokens[name]["padded"]) for name in ("best", "powers")]
    said = f"4 buckets of tokens waste {waste[0]}, powers of two {waste[1]}"
    assert ALT["shapes.md"]["shapes"] == f"Sizes of steps, and what they are padded to: {said}"


@pytest.mark.slow
def test_the_words_beside_the_picture_of_adapters_are_those_of_the_run(tmp_path: Path) -> None:
    """Which policy has most requests overtaken and which fewest, of `adapters` as it is shipped."""
    assert said_by_adapters(run_scenario(load_scenario("adapters"), out=tmp_path)) == ALT["adapters.md"]


@pytest.mark.slow
def test_the_words_beside_the_picture_of_energy_are_those_of_the_run(tmp_path: Path) -> None:
    """Which policy takes least energy a token and which most, of `energy` as it is shipped."""
    assert said_by_energy(run_scenario(load_scenario("energy"), out=tmp_path)) == ALT["energy.md"]


@pytest.mark.slow
def test_the_words_beside_the_picture_of_pools_are_its_title(tmp_path: Path) -> None:
    """For which answers pools have more within the SLO than mixed engines and for which fewer, the intervals apart."""
    assert said_by_pools(compared(tmp_path)) == ALT["pools.md"]["pools"]


@pytest.mark.slow
def test_the_words_beside_the_picture_of_packers_are_its_title() -> None:
    """Which packer of `packing` as it is shipped trains most tokens."""
    assert said_by_training(run_training(load_training("packing"))) == ALT["training.md"]


@pytest.mark.slow
def test_the_words_beside_the_picture_of_a_trace_are_what_it_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What caches of three sizes find of the conversations that the page's command reads."""
    if "BATCHSIM_TRACES" not in os.environ:
        pytest.skip("BATCHSIM_TRACES names no folder of traces")
    page = (FOLDER.parent / "tiers.md").read_text(encoding="utf-8")
    command = page[page.index("$ batchsim trace reuse") :].partition("\n")[0].split()[2:]
    monkeypatch.chdir(tmp_path)
    Path(command[2]).symlink_to(Path(os.environ["BATCHSIM_TRACES"]) / "mooncake" / command[2])
    done = batchsim(*command, "--json")
    assert done.exit_code == 0, done.stderr
    assert said_by_reuse(json.loads(done.stdout)) == ALT["tiers.md"]
