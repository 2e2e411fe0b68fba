"""`batchsim trace reuse`: its table, its picture, its JSON, and what it says of mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.tiny_scenario import batchsim, listing

ROW = '{"timestamp": %d, "input_length": 1100, "output_length": 5, "hash_ids": [%d, %d, %d]}'
LOG = "\n".join(ROW % (1000 * i, 0, i % 2 + 1, i % 2 + 3) for i in range(4))


def printed(*args: object) -> str:
    """What a call that must succeed prints."""
    result = batchsim("trace", "reuse", "my.jsonl", *args)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return str(result.stdout)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a log in which the third and fourth prompts are the first and second."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text(LOG)
    return tmp_path


def test_sizes_are_told_in_tokens_and_bytes_and_drawn(here: Path) -> None:
    """Of 4,400 tokens 5 units of 512 are found: 1 by any cache, the other 4 by one of 3 units or more."""
    out = printed("--model", "llama-3.1-8b", "--cache", "small=512", "--cache", "host=1GB")
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert "58.2 % of the prompt tokens" in out  # 5 x 512 / 4,400
    assert rows["small"][-2:] == ["34.9", "%"] and rows["host"][-2:] == ["58.2", "%"]
    assert rows["host"][1] == "7,629" and rows["all of it"][-6:] == ["it", "1,536", "0.201", "GB", "58.2", "%"]
    assert (here / "my.reuse.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_the_same_figures_and_draws_nothing(here: Path) -> None:
    """The curve's points too."""
    plain = json.loads(printed("--cache", "small=512", "--json"))
    assert plain["caches"]["small"]["hit_rate"] == pytest.approx(3 * 512 / 4400)
    assert plain["hit_rate_without_limit"] == plain["curve"]["hit_rate"][-1] == pytest.approx(5 * 512 / 4400)
    assert [path.name for path in here.iterdir()] == ["my.jsonl"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--cache", "gpu=50GB"], "depends on the model. Add --model"),
        (["--cache", "gpu"], "--cache gpu: '' is not a size"),
        (["--cache", "=4"], "write a name and a size above 0"),
        (["--cache", "gpu=0"], "write a name and a size above 0"),
        (["--cache", "a=1B", "--model", "llama-3.1-8b"], "less than one token's 131,072 B"),
        (["--cache", "a=512", "--cache", "a=600"], "--cache a=600: a is named twice"),
        (["--cache", "50 % of that=500"], "write a name and a size above 0"),
        (["--model", "Qwen/Qwen3.5-27B"], "its layers keep unlike numbers of tokens"),
        (["--model", "openai/gpt-oss-20b"], "state caches in tokens"),
        (["--sample", "0"], "write a share above 0 and up to 100%"),
        (["--sample", "120%"], "--sample 120%"),
        (["--sample", "50%"], "different units, and below 160 its figures mean nothing. Follow a larger share"),
        (["--cache", "gpu=\u00b2"], "--cache gpu=\u00b2: '\u00b2' is not a size"),
        (["--sample", "some"], "'some' is not a share"),
        (["--kv", "fp8"], "--kv fp8: is a model's, and none is named"),
        (["--model", "llama-3.1-8b", "--kv", "fp7"], "fp7 is not a known type"),
        (["--model", "no-model"], "no-model is neither in the catalog nor a file"),
        (["--set", "prefix=ignore"], "has no hash_ids"),
        (["--out", "."], "."),
    ],
)
def test_a_mistake_is_one_line(here: Path, args: list[str], said: str) -> None:
    """It says what is wrong and what to write."""
    before = listing(here)
    result = batchsim("trace", "reuse", "my.jsonl", *args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert said in result.stderr and listing(here) == before


def test_one_of_each_is_told_in_the_singular(here: Path) -> None:
    """A trace of one request with one unit."""
    row = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    (here / "my.jsonl").write_text(json.dumps(row))
    assert " · 1 request · 600 prompt tokens in units of 512, 1 different unit\n" in printed()


def test_a_sample_says_nothing_of_caches_that_it_cannot_see(here: Path) -> None:
    """Of 10 % of the units the nearest one followed is ten units away, on average."""
    (here / "my.jsonl").write_text("\n".join(ROW % (1000 * i, 0, 2 * i + 1, 2 * i + 2) for i in range(3000)))
    result = batchsim("trace", "reuse", "my.jsonl", "--sample", "10%", "--cache", "small=600")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert "says nothing of caches below 5,120. Raise --sample" in result.stderr


@pytest.mark.slow
def test_the_page_shows_what_a_public_trace_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/scenarios.md, whose trace is downloaded: line for line."""
    if "BATCHSIM_TRACES" not in os.environ:
        pytest.skip("BATCHSIM_TRACES names no folder of traces")
    page = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text(encoding="utf-8")
    shown = page[page.index("$ batchsim trace reuse") :].partition("\n```")[0]
    command, _, expected = shown.partition("\n")
    monkeypatch.chdir(tmp_path)
    name = "conversation_trace.jsonl.gz"
    (tmp_path / name).symlink_to(Path(os.environ["BATCHSIM_TRACES"]) / "mooncake" / name)
    result = batchsim(*command.split()[2:])
    assert (result.exit_code, result.stdout.rstrip()) == (0, expected)
