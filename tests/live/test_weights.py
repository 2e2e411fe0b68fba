"""Checkpoints are loaded whole or refused with the tensor's name and both shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

pytest.importorskip("safetensors", reason="weights are read from safetensors files")

from safetensors.torch import load_file, save_file

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.architecture import load_architecture
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.runner import ModelRunner, build_runner
from batchsim.calibrate.engine.weights import tensor_shapes
from batchsim.deployment.catalog import MODELS
from tests.live.checkpoints import SHAPE, checkpoint

SIZES = {"num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
STEP = StepInputs.synthetic([], [(0, 20)], block_size=16, num_blocks=8, vocab_size=SHAPE["vocab_size"], seed=0)


def runner_of(model: Any) -> ModelRunner:
    return build_runner(str(model), device="cpu", **SIZES)


def edited(folder: Path, **changes: Any) -> None:
    """Sets tensors of the folder's one weight file, or takes those out that are None."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    """A checkpoint in many files with an index gives the logits of the same in one."""
    checkpoint("llama", tmp_path / "one")
    checkpoint("llama", tmp_path / "many", shard="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = runner_of(tmp_path / "one"), runner_of(tmp_path / "many")
    assert torch.equal(one.logits(STEP), many.logits(STEP))
    assert many.weights == str(tmp_path / "many")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """A file that the index names and the folder has not is the error, not its tensors one by one."""
    checkpoint("llama", tmp_path, shard="200KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CalibrationError, match=f"{shard.name}: named in model.safetensors.index.json but missing"):
        runner_of(tmp_path)


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    """With tied embeddings the file holds no lm_head, and one that is there all the same is left alone."""
    checkpoint("qwen2", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    plain = runner_of(tmp_path).logits(STEP)
    edited(tmp_path, **{"lm_head.weight": torch.zeros(SHAPE["vocab_size"], 112)})
    assert torch.equal(runner_of(tmp_path).logits(STEP), plain)


NORM = "model.layers.1.self_attn.k_norm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({NORM: None}, r"k_norm.weight \[32\] is missing, 1 of 25 tensors"),
    "misshapen": ({DOWN: torch.zeros(96, 100)}, r"down_proj.weight is \[96, 100\], its config.json says \[96, 160\]"),
    "quantised": ({DOWN: torch.zeros(96, 160, dtype=torch.int8)}, "down_proj.weight is I8; known are BF16, F16, F32"),
    "left over": ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}, r"q_proj.bias \[128\] is no tensor of"),
}


@pytest.mark.parametrize(("changes", "complaint"), WRONG.values(), ids=WRONG)
def test_weights_that_do_not_fit_are_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """One line with the folder, the tensor and its shapes."""
    checkpoint("qwen3", tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(CalibrationError, match=complaint) as error:
        runner_of(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    """A cut or foreign file is named."""
    checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(CalibrationError, match=r"model.safetensors: cannot be read"):
        runner_of(tmp_path)


def test_weights_that_are_not_read_are_not_passed_over(tmp_path: Path) -> None:
    """A folder of *.bin files, and one whose index cannot be read, are refused: random weights were not asked for."""
    checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CalibrationError, match=r"\*.bin files, only \*.safetensors are read"):
        runner_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CalibrationError, match=r"index.json: holds no weight_map"):
        runner_of(tmp_path)


def test_without_weights_a_shape_runs_on_random_ones(tmp_path: Path) -> None:
    """A config alone, by file or folder, has weights of the seed: normal, deviation 0.02, norms 1."""
    checkpoint("qwen2", tmp_path, tie_word_embeddings=False)
    (tmp_path / "model.safetensors").unlink()
    first, second = runner_of(tmp_path), runner_of(tmp_path / "config.json")
    assert first.weights == "random (seed 0)"
    assert torch.equal(first.logits(STEP), second.logits(STEP))
    other = build_runner(str(tmp_path), device="cpu", seed=1, **SIZES)
    assert not torch.equal(first.logits(STEP), other.logits(STEP))


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_of_the_catalog_are_all_its_parameters(name: str) -> None:
    """The shapes by name add up to the parameter count that the cost models use."""
    shapes = tensor_shapes(load_architecture(name))
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == MODELS[name].num_parameters


def test_the_index_and_the_config_are_read_as_written(tmp_path: Path) -> None:
    """The checkpoints of these tests are written as transformers writes them, with an index that lists each tensor."""
    checkpoint("llama", tmp_path, shard="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"]) == set(tensor_shapes(load_architecture(str(tmp_path))))
