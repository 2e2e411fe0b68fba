"""Bucket lists and choices of accelerators with compiled shapes, against those that the engines' own code made."""

from __future__ import annotations

import copy
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import conform

FILE = Path(os.environ.get("BATCHSIM_GOLDEN", "")) / "buckets" / "buckets.json.gz"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    if "BATCHSIM_GOLDEN" not in os.environ or not FILE.exists():
        pytest.skip("BATCHSIM_GOLDEN names no folder with buckets")
    return json.loads(gzip.decompress(FILE.read_bytes()))


def test_every_list_and_choice_is_the_engines(recorded: dict[str, Any]) -> None:
    """NxD Inference, tpu-inference and vllm-gaudi: all lists, both tables of each manager, and every look-up."""
    rows = recorded["cases"].values()
    lookups = sum(len(row.get("lookups", [])) for row in recorded["cases"]["gaudi.manager"])
    managers = len(recorded["cases"]["gaudi.manager"])
    assert (
        str(conform(FILE))
        == f"buckets.json.gz: equal, {sum(map(len, rows)) + managers + lookups} bucket lists and choices"
    )


PLANTED = {
    "a size": (("nxdi.generate_buckets", 5, "result", 5), "cases.nxdi.generate_buckets[5] differs in result of"),
    "a pair": (("nxdi.2d_prefix", 1, "result", 2, 1), "cases.nxdi.2d_prefix[1] differs in result of"),
    "an end": (("tpu.build_token_paddings", 3, "result", 6), "place 7 is 1008 here, 1009 in the recording"),
    "a row": (("gaudi.manager", 0, "decode", 7, 2), "cases.gaudi.manager[0] differs in decode: place 8 is"),
    "a count": (("gaudi.manager", 5, "prompt_count"), "cases.gaudi.manager[5] differs in prompt_count: 8383 here"),
    "a choice": (("gaudi.manager", 4, "lookups", 6, "bucket", 2), "differs in the bucket of decode [17, 300]: "),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error: str, recorded: dict[str, Any], tmp_path: Path) -> None:
    """One number changed anywhere is a difference, named with its place."""
    keys, expected = PLANTED[error]
    data = copy.deepcopy(recorded)
    place: Any = data["cases"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] += 1
    path = tmp_path / "buckets.json"
    path.write_text(json.dumps(data))
    assert expected in str(conform(path))


def test_what_is_no_bucket_list_is_refused_in_one_line(tmp_path: Path) -> None:
    """A function that is not known, arguments that make nothing, a policy asked for, half a file."""
    path = tmp_path / "buckets.json"
    for cases, expected in (
        ({"tpu.paddings": []}, "cases.tpu.paddings is no function of buckets. Known: nxdi.generate_buckets, "),
        ({"gaudi.exp_range": [{"args": [1], "result": []}]}, "cases.gaudi.exp_range[0] cannot be made: "),
        ({"gaudi.manager": [{"strategy": "exp", "colour": 3}]}, "cases.gaudi.manager[0] cannot be made: colour is not"),
        ({"gaudi.lin_range": [{"args": [1, 1, 10**9], "result": []}]}, "cannot be made: a number is above 16,777,216"),
    ):
        path.write_text(json.dumps({"versions": {}, "cases": cases}))
        with pytest.raises(ScenarioError) as refused:
            conform(path)
        assert expected in str(refused.value) and str(refused.value).startswith(f"{path}: cases."), refused.value
    with pytest.raises(ScenarioError, match="has bucket lists, of no policy and with one order"):
        conform(path, "vllm")
    path.write_bytes(gzip.compress(path.read_bytes())[:40])
    with pytest.raises(ScenarioError, match="gzip data cut off"):
        conform(path)
