"""What is said of packers beside each other: the table, and sentences where there is something to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchsim.report.text.training_text import training_sentences, training_text
from batchsim.training.load import run_training
from tests.support.training import run, scenario

SEQUENTIAL = {"kind": "transformers.padded", "sampler": "sequential"}
SMALL = {"params": 1e9, "layers": 2, "hidden": 64, "peak": "1TFLOP/s", "efficiency": "50%"}


def said(folder: Path, lengths: list[int], packer: dict[str, Any], **keys: Any) -> list[str]:
    return training_sentences([run(folder, lengths, packer, **keys)])


def test_nothing_is_said_of_what_is_even_and_fits(tmp_path: Path) -> None:
    """One packer, rows alike, nothing lost: no sentence."""
    assert said(tmp_path, [4, 4], {"kind": "torchtune.packed"}, capacity=4) == []


def test_the_fastest_packer_is_named_unless_all_are_as_fast(tmp_path: Path) -> None:
    """Padded 1,000 and 500 tokens take as long as 2,000, packed as 1,500; with 999 there is no padding to speak of."""
    packers = {"padded": SEQUENTIAL, "packed": {"kind": "torchtune.packed"}}
    for short, expected in ((500, ["Most tokens a second: packed, 1.33 times as many as padded."]), (999, [])):
        both = scenario(tmp_path, [1000, short], SEQUENTIAL, samples=2, capacity=1000 + short, packers=packers)
        assert training_sentences(run_training(both)) == expected


def test_full_rows_that_are_uneven_are_named(tmp_path: Path) -> None:
    """A row of one document beside one of four: 1.6 times the mean in squares."""
    assert said(tmp_path, [4, 1, 1, 1, 1], {"kind": "torchtune.packed"}, capacity=4) == [
        "Full rows are not even ones: of rows 100.0% full and more, one has 1.6 times the mean in squares of documents."
    ]


def test_what_is_left_out_truncated_and_lost_is_named(tmp_path: Path) -> None:
    """With the packer's label and the share of examples."""
    assert "p leaves out 50.0% of the examples." in said(tmp_path, [9, 4], {"kind": "axolotl.multipack"}, capacity=4)
    assert "p truncates 50.0% of the examples." in said(tmp_path, [9, 4], {"kind": "trl.bfd"}, capacity=4)
    assert "p loses in the last step 25.0% of the examples." in said(tmp_path, [4] * 4, SEQUENTIAL, accumulate=3)


def test_what_does_not_fit_is_named_with_its_size(tmp_path: Path) -> None:
    """16 GB of weights, gradients and optimizer in a GPU of 10; in one of 20 nothing is said."""
    cost = SMALL | {"memory": "10GB"}
    (line,) = said(tmp_path, [4], SEQUENTIAL, cost=cost)
    assert line.startswith(
        "! p: 100.0% of the micro-batches do not fit: up to 16 GB of 10 GB. Shard, recompute or lower"
    )
    assert said(tmp_path, [4], SEQUENTIAL, cost=SMALL | {"memory": "20GB"}) == []


def test_a_stream_that_is_too_fast_is_named(tmp_path: Path) -> None:
    """Half of the examples wait when the last one arrives."""
    cost = {"kind": "linear", "base": "0s", "per_token": "20us"}
    stream = {"rate": "1000/s", "windows": [10]}
    lines = said(tmp_path, [100] * 400, {"kind": "torchtune.packed"}, capacity=100, cost=cost, stream=stream)
    assert any(line.startswith("! p, 10: the stream outruns the trainer: ") for line in lines)


def test_the_table_has_the_columns_that_are_filled(tmp_path: Path) -> None:
    """No fill without rows, no MFU of a cost that is stated in time; the heading says what was simulated."""
    loaded = scenario(tmp_path, [4, 2], SEQUENTIAL, samples=2)
    lines = training_text("mine", run_training(loaded)).split("\n")
    assert lines[0].startswith("mine · 2 examples, mean 3, longest 4 tokens · 1 GPU (1 data), ddp")
    heads = next(line for line in lines if line.startswith("packer")).split()
    assert heads == ["packer", "steps", "padding", "squares", "imbalance", "attn", "step", "tok/s/GPU", "ex./step"]
    assert "No MFU: the cost is stated in time." in lines
