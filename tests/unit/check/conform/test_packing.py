"""Recorded results of packers: what is compared, where two part, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.check.conform import conform

BFD: dict[str, Any] = {
    "packer": "trl.bfd",
    "version": "trl 1.16.0",
    "options": {"seq_length": 7, "map_batch_size": 1000},
    "seed": None,
    "note": "",
    "lengths": [5, 3, 4],
    "packs": [[[0, 0, 5]], [[2, 0, 4], [1, 0, 3]]],
}
PADDED: dict[str, Any] = {
    "packer": "transformers.length_grouped",
    "version": "x",
    "options": {"batch_size": 1, "mega_batch_mult": 2, "seed": 7},
    "lengths": [1, 2, 3, 4],
    "permutation": [0, 1, 2, 3],
    "order": [3, 0, 1, 2],
}


def written(folder: Path, data: Any) -> Path:
    path = folder / "packed.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_equal_results_are_said_to_be(tmp_path: Path) -> None:
    """Bins are counted; a file may be packed."""
    assert str(conform(written(tmp_path, BFD))) == "packed.json: equal, 2 bins (trl.bfd)"
    path = tmp_path / "packed.json.gz"
    path.write_bytes(gzip.compress(json.dumps(PADDED).encode()))
    assert conform(path).difference == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"packs": [[[0, 0, 5]], [[2, 0, 4], [1, 0, 2]]]}, "pack 2 (packs[1]) differs"),
        ({"packs": [[[0, 0, 5]]]}, "packs ends after 2, the recording has 1"),
    ],
)
def test_bins_that_part_are_shown(change: Any, expected: str, tmp_path: Path) -> None:
    """The first bin that differs, with both sides."""
    verdict = conform(written(tmp_path, BFD | change))
    assert verdict.difference.startswith(expected)
    assert "    here      " in str(verdict) and "    recorded  " in str(verdict)


def test_what_stands_beside_the_bins_is_compared_too(tmp_path: Path) -> None:
    """Lengths of a row with its padding, in torchtune's order; metadata and efficiency likewise."""
    packed = {"packer": "torchtune.packed", "version": "x", "options": {"max_seq_len": 5}, "lengths": [3, 4]}
    packed |= {"packs": [[[0, 0, 3]], [[1, 0, 4]]], "seq_lens": [[3, 2], [4, 1]]}
    assert conform(written(tmp_path, packed)).difference == ""
    assert conform(written(tmp_path, packed | {"seq_lens": [[3, 2], [4]]})).difference == "seq_lens[1] differs"


def test_areals_groups_are_compared_by_length(tmp_path: Path) -> None:
    """Its sort is not stable: of equal lengths another example may stand in a group."""
    groups = {
        "packer": "areal.ffd",
        "version": "x",
        "options": {"capacity": 7},
        "lengths": [5, 5],
        "groups": [[1], [0]],
    }
    assert str(conform(written(tmp_path, groups))).endswith("equal, 2 bins (areal.ffd), the lengths of each group")


@pytest.mark.parametrize(
    ("base", "change", "expected"),
    [
        (BFD, {"packer": "trl.bdf"}, "packer trl.bdf is not known. Did you mean trl.bfd?"),
        (BFD, {"options": {"seq_len": 7}}, "options.seq_len is no option of trl.bfd. Did you mean seq_length?"),
        (BFD, {"options": {"seq_length": 0}}, "options.seq_length is 0. It must be from 1 to"),
        (BFD, {"options": {}}, "options has no seq_length. Write down what trl.bfd ran with."),
        (BFD, {"options": {"seq_length": None}}, "options.seq_length is null. Write down what trl.bfd ran with."),
        (BFD, {"efficiency": 0.5}, "has efficiency, which trl.bfd does not report. Leave it out."),
        (
            {"packer": "areal.ffd", "version": "x", "options": {"capacity": 7}, "lengths": [5]},
            {"groups": [[1]]},
            "groups[0][0] is 1, not a whole number from 0 to 0",
        ),
        (BFD, {"lengths": []}, "has no lengths. Record it again."),
        (BFD, {"lengths": [5, 3, -4]}, "lengths[2] is -4, not a whole number from 0"),
        (BFD, {"bins": [[0]]}, "has both bins and packs. It needs one of"),
        (BFD, {"cargo": 1}, "has cargo, which is not known and so cannot be compared. Leave it out."),
        (PADDED, {"permutation": [0, 1, 2, 2]}, "permutation is no order of 4 examples. Record it again."),
        (PADDED, {"permutation": [0, 1, 2, 9]}, "permutation is no order of 4 examples. Record it again."),
        (
            {"packer": "megatron_bridge.first_fit_shuffle", "version": "x", "options": {"pack_size": 9}},
            {"lengths": [1, 2], "shuffled": [2, 3], "bins": [[2]]},
            "shuffled[1] is 3, of which no example is left. Record it again.",
        ),
        (
            {"packer": "verl.group_balanced", "version": "x", "options": {"k_partitions": 2}},
            {"lengths": [1, 2, 3], "uids": ["a", "a", "b"], "partitions": [[0]]},
            "the answers of a prompt do not stand side by side, equally many of each. Sort them.",
        ),
    ],
)
def test_what_is_no_recording_is_refused(base: Any, change: Any, expected: str, tmp_path: Path) -> None:
    """In one line with the file, the field and what to do."""
    path = written(tmp_path, base | change)
    with pytest.raises(ScenarioError) as error:
        conform(path)
    assert expected in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_permutation_that_is_missing_is_named(tmp_path: Path) -> None:
    """What chance chose cannot be guessed."""
    data = {name: value for name, value in PADDED.items() if name != "permutation"}
    with pytest.raises(ScenarioError, match="has no permutation or sampler_indices or shuffled, which"):
        conform(written(tmp_path, data))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [(lambda data: data[:-9], "gzip data"), (lambda data: data[:20] + b"xx" + data[22:], "gzip data")],
)
def test_damaged_packing_is_refused(damage: Any, expected: str, tmp_path: Path) -> None:
    """A file that is cut off, or changed, is not compared."""
    path = tmp_path / "packed.json.gz"
    path.write_bytes(damage(gzip.compress(json.dumps(BFD).encode() * 50)))
    with pytest.raises(ScenarioError, match=expected):
        conform(path)


def test_groups_of_answers_are_told_by_their_prompts(tmp_path: Path) -> None:
    """verl's whole groups: equal neighbours in the list of prompts are one."""
    data = {"packer": "verl.group_balanced", "version": "x", "options": {"k_partitions": 2}, "lengths": [1, 1, 5, 5]}
    data |= {"partitions": [[2, 3], [0, 1]]}
    assert conform(written(tmp_path, data | {"uids": ["a", "a", "b", "b"]})).difference == ""
    assert conform(written(tmp_path, data | {"options": {"k_partitions": 2, "n": 2}})).difference == ""
