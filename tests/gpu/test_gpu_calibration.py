"""Calibrating on CUDA: memory, graphs, launches, and steps that took no part in the fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="calibration runs on torch: pip install 'batchsim[live]'")
pytest.importorskip("triton", reason="the kernels are written in Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from batchsim.calibrate.engine.runner import build_runner
from batchsim.calibrate.profile import memory
from batchsim.calibrate.profile.calibration import Options, calibrate
from batchsim.calibrate.profile.point_plan import StepRange

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
}
LIMITS = StepRange(max_seqs=32, max_tokens=1024, max_context=2048, kv_tokens=0)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A middling model's config.json."""
    path = tmp_path / "middling.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def test_the_measured_blocks_fit_beside_the_largest_step(model: str) -> None:
    """With as many blocks as measured, the largest steps and a full pool run, and the share asked for is kept to."""
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "max_model_len": 2048}
    small = build_runner(model, device="cuda", num_blocks=memory.blocks_of_largest_steps(LIMITS, 16), **sizes)
    num_blocks, terms = memory.measured_blocks(small, LIMITS)
    assert "outside torch" in terms
    del small
    memory.give_back()
    full = build_runner(model, device="cuda", num_blocks=num_blocks, **sizes)
    memory.run_full(full, LIMITS)
    free, total = torch.cuda.mem_get_info()
    assert 0.87 * total < total - free < 0.93 * total


def test_a_calibration_on_cuda_predicts_steps_it_has_not_seen(model: str, tmp_path: Path) -> None:
    """Two minutes on a middling model: graphs and swap are in the profile, whole steps within 5 % in the
    median, bias below 3 %."""
    hull = {"max_seqs": 32, "max_batched_tokens": 1024, "max_model_len": 2048, "kv_tokens": 32 * 2048}
    profile = calibrate(Options(model, "cuda", minutes=2.5, **hull), tmp_path / "profile.json")
    assert profile.costs.decode is not None
    assert profile.costs.decode.x[-1] == 32
    assert profile.costs.swap is not None
    assert not [what for what in profile.missing if what.startswith("block")]
    assert profile.held_out is not None
    assert profile.held_out["p50"] < 0.05
    assert abs(profile.held_out["bias"]) < 0.03
