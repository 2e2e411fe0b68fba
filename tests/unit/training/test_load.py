"""Training scenarios that are wrong: one line each, with the place, what is wrong, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.training.load import load_training, run_training, shipped_training
from tests.support.training import run, scenario

GOOD = """training:
  lengths: {kind: law, law: {kind: fixed, tokens: 10}, examples: 8}
  packers:
    a: {kind: trl.bfd}
  capacity: 20
  cost: {kind: linear, base: 1ms, per_token: 1us}
"""
STATED = "{params: 8e9, layers: 32, hidden: 4096, peak: 989TFLOP/s, efficiency: 40%}"

WRONG: list[tuple[str, str, str]] = [
    ("kind: trl.bfd}", "kind: trl.bdf}", "mine.yaml:4: training.packers.a.kind is trl.bdf. Did you mean trl.bfd?"),
    ("kind: trl.bfd}", "kind: trl.bfd, seq_len: 3}", "training.packers.a.seq_len is not a field of training.packers.a"),
    ("kind: trl.bfd}", "kind: trl.bfd, seq_length: 0}", "training.packers.a: seq_length is 0. It must be from 1 to"),
    ("    a: {kind: trl.bfd}", "    {}", "packers is empty. Name at least one"),
    ("  capacity: 20\n", "", "packers.a has no seq_length. State it, or training.capacity."),
    ("capacity: 20", "capacity: twenty", 'training.capacity is "twenty". Write a whole number.'),
    ("capacity: 20", "capacity: 20\n  micro_batch: 0", "training: micro_batch is 0. It must be from 1 to"),
    ("capacity: 20", "capacity: 20\n  acumulate: 2", "training.acumulate is not a field of training. Did you mean acc"),
    ("capacity: 20", "capacity: 20\n  mask: padded", "mask padded is for packers of samples, and packers.a packs rows"),
    (
        "kind: trl.bfd}",
        "kind: fairseq.batch_by_size}\n  mask: cross",
        "mask cross is for packers of rows, and packers.a",
    ),
    (
        "kind: trl.bfd}",
        "kind: transformers.padded}\n  pads: none",
        "pads none lays the samples of packers.a end to end",
    ),
    (
        "kind: trl.bfd}",
        "kind: transformers.padded}\n  pads: capacity",
        "pads capacity needs one, and packers.a has none",
    ),
    (
        "capacity: 20",
        "capacity: 20\n  sharding: fsdp\n  ranks: {pipeline: 2}",
        "sharding fsdp with 2 pipeline stages is not simulated. Use ddp, or one stage.",
    ),
    (
        "kind: trl.bfd}",
        "kind: megatron_core.balanced_cp}\n  ranks: {pipeline: 2}",
        "packers.a runs without a pipeline, and ranks.pipeline is 2.",
    ),
    ("capacity: 20", "capacity: 20\n  stream: {rate: 5/s}", "stream has neither windows nor timeouts. Write windows"),
    ("capacity: 20", "capacity: 20\n  stream: {rate: 5, windows: [3]}", "training.stream.rate"),
    ("capacity: 20", "capacity: 20\n  stream: {rate: 5/s, windows: [3, 3]}", "stream.windows has one value twice"),
    (
        "kind: trl.bfd}",
        "kind: verl.karmarkar_karp}\n  stream: {rate: 5/s, windows: [3]}",
        "stream is for packers of windows, and packers.a packs steps or whole epochs.",
    ),
    ("capacity: 20", "capacity: 20\n  send: 1ms", "send is of a pipeline, and ranks.pipeline is 1. Drop it."),
    ("capacity: 20", "capacity: 20\n  variable_lengths: true", "variable_lengths is of a pipeline, and ranks.pipel"),
    ("capacity: 20", "capacity: 20\n  samples: 2", "samples is given, and no packer here takes samples by count."),
    ("capacity: 20", "capacity: 20\n  global_batch: 2", "global_batch is given, and no packer here packs each step's"),
    (
        "kind: trl.bfd}",
        "kind: trl.bfd, seq_length: 9}",
        "capacity is given, and every packer here has its own or none.",
    ),
    (
        "kind: trl.bfd}\n  capacity: 20",
        "kind: transformers.padded}\n  longer: drop",
        "longer drop needs a capacity, and no packer here has one.",
    ),
    (
        "kind: trl.bfd}\n  capacity: 20",
        "kind: transformers.padded}\n  shuffle_rows: true",
        "shuffle_rows is given, and no packer here makes rows of an epoch.",
    ),
    (
        "kind: trl.bfd}\n  capacity: 20",
        "kind: verl.karmarkar_karp, k_partitions: 3}",
        "packers.a.k_partitions is 3, not the 1 ranks. Leave it out.",
    ),
    (
        "kind: trl.bfd}",
        "kind: skyrl.balanced, bin_count_multiple: 3}\n  ranks: {data: 2}",
        "packers.a.bin_count_multiple is 3, no multiple of the 2 ranks.",
    ),
    (
        "kind: trl.bfd}\n  capacity: 20",
        "kind: transformers.batch_rebalance, grad_accum: 2}",
        "packers.a.grad_accum is 2, accumulate is 1. Leave it out.",
    ),
    (
        "kind: trl.bfd}\n  capacity: 20",
        "kind: verl.karmarkar_karp}\n  drop_last: false",
        "packers.a packs whole steps, so that drop_last: false cannot be.",
    ),
    (
        "capacity: 20",
        "capacity: 20\n  staleness_bound: 2",
        "staleness_bound is of sharding async, and sharding is ddp.",
    ),
    (
        "capacity: 20",
        "capacity: 20\n  sharding: async\n  ranks: {pipeline: 2}",
        "sharding async with 2 pipeline stages is not simulated. Use ddp.",
    ),
    (
        "kind: trl.bfd}",
        "kind: megatron_core.balanced_cp}\n  sharding: async",
        "packers.a has ranks share documents, and under sharding async none meet.",
    ),
    ("a: {kind", '" ": {kind', "packers has the label ' '. Write one of 1 to 40 letters."),
    ("{kind: linear, base: 1ms, per_token: 1us}", "{model: llama-3.1-8b}", "neither gpu nor peak is given. Name a GPU"),
    ("{kind: linear, base: 1ms, per_token: 1us}", "{params: 8e9, gpu: h100}", "without a model layers is needed"),
    (
        "{kind: linear, base: 1ms, per_token: 1us}",
        "{model: llama-3.1-8b, params: 8e9, gpu: h100}",
        "model llama-3.1-8b and params are given. Keep one of them.",
    ),
    (
        "{kind: linear, base: 1ms, per_token: 1us}",
        "{model: llama-3.1-8b, gpu: h100, peak: 1PFLOP/s}",
        "gpu h100 and peak are given. Keep one of them.",
    ),
    (
        "{kind: linear, base: 1ms, per_token: 1us}",
        STATED.replace(", efficiency: 40%", ""),
        "peak needs an efficiency, like 45%",
    ),
    ("{kind: linear, base: 1ms, per_token: 1us}", STATED.replace("40%", "0%"), "efficiency is 0%. Nothing would ever"),
    (
        "{kind: linear, base: 1ms, per_token: 1us}",
        STATED.replace("}", ", flash: false, memory: 80GB}"),
        "flash false keeps scores by head, and heads is not given. State heads.",
    ),
    ("{kind: linear, base: 1ms", "{kind: linear, base: 1", "training.cost.base"),
    (
        "per_token: 1us",
        "per_token: 1",
        "training.cost.per_token: 1 is not a time. Write a number with a unit, like 50ms.",
    ),
    ("kind: fixed", "kind: fixd", "training.lengths.law.kind is fixd. Did you mean fixed?"),
    ("training:", "model: llama-3.1-8b\ntraining:", "model is not a field of a scenario"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[2][:60])
def test_a_wrong_key_is_one_line_with_its_place(case: tuple[str, str, str], tmp_path: Path) -> None:
    """The file and the line, the key with its value, and the way out."""
    old, new, expected = case
    path = tmp_path / "mine.yaml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ScenarioError) as error:
        load_training(str(path))
    assert len(error.value.lines) == 1 and str(error.value).startswith(f"{path}:") and expected in str(error.value)


RUNS: list[tuple[list[int], dict[str, Any], dict[str, Any], str]] = [
    ([3, 9], {"kind": "torchtune.packed"}, {"capacity": 5}, "example 1 has 9 tokens, more than max_seq_len 5. Write"),
    ([3, 9], {"kind": "swift.binpack"}, {"capacity": 5}, "swift.binpack: example 1 has 9 tokens, more than packing_l"),
    (
        [3],
        {"kind": "trl.bfd"},
        {"capacity": 5, "accumulate": 2},
        "no whole step of 2 micro-batches on 1 rank can be made of 1 example. Give",
    ),
    (
        [3, 3, 3],
        {"kind": "verl.karmarkar_karp"},
        {"ranks": {"data": 2}, "global_batch": 3},
        "verl.karmarkar_karp: 3 sequences are no multiple of 2 parts",
    ),
    (
        [100, 100, 1, 1],
        {"kind": "nemo_rl.dynamic_batching"},
        {"ranks": {"data": 2}, "global_batch": 4, "capacity": 128, "sharding": "fsdp"},
        "step 0 has 1 to 2 micro-batches a rank, and ranks under fsdp meet at each. Write sharding: ddp",
    ),
    ([3], {"kind": "trl.bfd"}, {"capacity": 5, "cost": {"model": "lama", "gpu": "h100"}}, "model: lama is neither in"),
    ([3], {"kind": "trl.bfd"}, {"capacity": 5, "cost": {"model": "llama-3.1-8b", "gpu": "h10"}}, "h10"),
    (
        [3],
        {"kind": "trl.bfd"},
        {"capacity": 5, "lengths": {"kind": "file", "path": "nowhere.txt"}},
        "nowhere.txt: cannot be read: No such file or directory. Give a file of lengths.",
    ),
    (
        [3],
        {"kind": "trl.bfd"},
        {"capacity": 5, "lengths": {"kind": "file", "path": "lengths.json", "examples": 2}},
        "training.lengths.examples is 2 and lengths.json has 1. Take fewer",
    ),
    (
        [3],
        {"kind": "trl.bfd"},
        {"capacity": 5, "lengths": {"kind": "trace", "trace": {"path": "nowhere.csv"}}},
        "nowhere.csv",
    ),
]


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case[3][:60])
def test_what_cannot_be_run_is_one_line_with_its_place(case: Any, tmp_path: Path) -> None:
    """What only shows once lengths and packers meet is said with its place too."""
    lengths, packer, keys, expected = case
    with pytest.raises(BatchsimError) as error:
        run(tmp_path, lengths, packer, **keys)
    assert "\n" not in str(error.value) and expected in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'mine.yaml'}:")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3\nx\n", "line 2 is 'x'. A length is a whole number of tokens from 1."),
        ("3\n0\n", "line 2 is 0. A length is a whole number of tokens from 1."),
        ("[3, 1.5]", "lengths[1] is 1.5. A length is"),
        ("[3, true]", "lengths[1] is true. A length is"),
        ('{"tokens": [3]}', 'has no list of lengths. Write [12, 34] or {"lengths": [12, 34]}.'),
        ("[3", "cannot be read: not JSON"),
        ("\n", "has no lengths. Write a number a line."),
    ],
)
def test_a_file_without_lengths_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    """The file and the line, or the place in the list."""
    loaded = scenario(tmp_path, [1], {"kind": "trl.bfd"}, capacity=5)
    (tmp_path / "lengths.json").write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError) as error:
        run_training(loaded)
    assert str(tmp_path / "lengths.json") in str(error.value) and expected in str(error.value)


def test_lengths_of_files_and_traces(tmp_path: Path) -> None:
    """A number a line, an object, and rows of a trace, of prompts, answers or both, as many as asked."""
    (tmp_path / "a.txt").write_text("3\n\n5\n", encoding="utf-8")
    (tmp_path / "b.json").write_text('{"lengths": [7, 8]}', encoding="utf-8")
    (tmp_path / "c.csv").write_text("prompt,output\n4,2\n5,1\n", encoding="utf-8")
    trace = {"path": "c.csv", "columns": {"prompt": "prompt", "output": "output"}}
    for lengths, expected in (
        ({"kind": "file", "path": "a.txt"}, [3, 5]),
        ({"kind": "file", "path": "b.json", "examples": 1}, [7]),
        ({"kind": "trace", "trace": trace, "of": "prompt"}, [4, 5]),
        ({"kind": "trace", "trace": trace, "of": "output", "examples": 1}, [2]),
        ({"kind": "trace", "trace": trace}, [6, 6]),
    ):
        assert list(run(tmp_path, [1], {"kind": "trl.bfd"}, capacity=9, lengths=lengths).epoch.lengths) == expected


def test_scenarios_are_found_and_overridden(tmp_path: Path) -> None:
    """By name or path; --set changes a key, and its errors name the option."""
    assert "packing" in shipped_training()
    assert load_training("packing", ["training.accumulate=7"]).config.accumulate == 7
    with pytest.raises(ScenarioError, match=r"--set training\.accumulate=0: training: accumulate is 0"):
        load_training("packing", ["training.accumulate=0"])
    with pytest.raises(ScenarioError, match=r"packng: no such training scenario\. Did you mean packing\?"):
        load_training("packng")
    serving = tmp_path / "s.yaml"
    serving.write_text("model: llama-3.1-8b\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"has no training block\. batchsim run takes scenarios of serving"):
        load_training(str(serving))


def test_the_same_seed_makes_the_same_epoch() -> None:
    """Lengths, permutations and the order of rows hang on the seed alone."""
    few = ["training.lengths.examples=400", "training.global_batch=32"]
    first, again, other = (run_training(load_training("packing", [*few, f"training.seed={s}"])) for s in (0, 0, 1))
    assert [each.figures for each in first] == [each.figures for each in again] != [each.figures for each in other]
