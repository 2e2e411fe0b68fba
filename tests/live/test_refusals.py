"""What a model, a device or a runner cannot do is said in one line, before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import BatchsimError, CalibrationError, ExecutorError, ScenarioError
from batchsim.calibrate.engine.architecture import Llama3Scaling, load_architecture
from batchsim.calibrate.engine.backend import SdpaBackend
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.runner import ModelRunner, StepLimits, build_runner
from batchsim.calibrate.engine.sampling import Sampling, sample
from batchsim.calibrate.engine.transformer import Transformer
from batchsim.calibrate.engine.weights import random_weights

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
SIZES: dict[str, Any] = {
    "device": "cpu",
    "num_blocks": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}


def written(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in (CONFIG | changes).items() if v is not None}), encoding="utf-8")
    return str(path)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "model type": ({"model_type": "gpt2"}, "model_type 'gpt2' is none whose layers are known"),
    "rope type": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', known are default"),
    "old rope type": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
    "new rope type": ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type is 'longrope'"),
    "many ropes": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "not one set"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "llama3 without factor": (
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "factor"} | {"rope_type": "llama3"}},
        "factor is None",
    ),
    "frequencies": ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4.0}}, "is not below"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only silu"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps is 0. Write a number above 0"),
    "theta": ({"rope_theta": "10000"}, "rope_theta is '10000'"),
    "end of text": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "window": ({"sliding_window": 64}, "sliding_window is 64: write layer_types"),
}


@pytest.mark.parametrize(("changes", "complaint"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_is_not_understood_is_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """Each with the file's name and what was found there."""
    path = written(tmp_path, **changes)
    with pytest.raises(ScenarioError, match=complaint) as error:
        load_architecture(path)
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
    """`rope_theta` beside `rope_scaling`, and `rope_parameters`, say the same."""
    old = load_architecture(written(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3 | {"rope_type": "llama3"}))
    new = load_architecture(
        written(tmp_path, rope_parameters=LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}, rope_theta=None)
    )
    assert old == new
    assert old.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 128)
    assert old.rope_theta == 5e5
    assert load_architecture(written(tmp_path, rope_scaling=None)).rope_scaling is None


def test_ends_of_text_come_from_the_generation_config_first(tmp_path: Path) -> None:
    """A list there beats the number in the config; without either there is none."""
    assert load_architecture(written(tmp_path)).eos_token_ids == ()
    path = written(tmp_path, eos_token_id=7)
    assert load_architecture(path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}', encoding="utf-8")
    assert load_architecture(path).eos_token_ids == (7, 9)


RUNNERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such device": ({}, {"device": "tpu"}, "device tpu: only cpu and cuda are known"),
    "other device": ({}, {"device": "meta"}, "device meta: only cpu and cuda are known"),
    "dtype": ({"torch_dtype": "float16"}, {}, "float16 is not run on cpu. Use bfloat16 or float32"),
    "triton on cpu": ({}, {"backend": "triton"}, "backend triton needs --device cuda. Use sdpa"),
    "backend": ({}, {"backend": "flash"}, "backend flash is not known. Use sdpa or triton"),
    "graphs on cpu": ({}, {"graphs": True}, "CUDA graphs need --device cuda and the triton backend"),
    "length": ({}, {"max_model_len": 300}, "max_model_len 300 is beyond the 256 positions"),
    "no blocks": ({}, {"num_blocks": 0}, "num_blocks 0 must be at least 1"),
    "no room for KV": ({}, {"num_blocks": 10**10}, r"GB short: .* KV blocks would fit"),
    "no room for weights": ({"vocab_size": 2**31 - 1}, {}, "No KV block would fit: use a smaller model"),
}


@pytest.mark.parametrize(("changes", "sizes", "complaint"), RUNNERS.values(), ids=RUNNERS)
def test_a_runner_that_cannot_be_had_is_refused(
    changes: dict[str, Any], sizes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    """One line, before a tensor is made."""
    with pytest.raises(BatchsimError, match=complaint) as error:
        build_runner(written(tmp_path, **changes), **(SIZES | sizes))
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without CUDA")
def test_cuda_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The line says which torch sees none, and what to use."""
    with pytest.raises(CalibrationError, match=r"device cuda: torch [\w.+]+ sees no CUDA .* --device cpu"):
        build_runner(written(tmp_path), **(SIZES | {"device": "cuda"}))


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    return build_runner(written(tmp_path), **SIZES)


def synthetic(decodes: list[int], chunks: list[tuple[int, int]]) -> StepInputs:
    return StepInputs.synthetic(decodes, chunks, block_size=16, num_blocks=40, vocab_size=101, seed=0)


STEPS = {
    "tokens": (synthetic([], [(0, 70)]), "a step of 70 tokens; the model was loaded for at most 64"),
    "sequences": (synthetic([1] * 5, []), "a step of 5 sequences; the model was loaded for at most 4"),
    "length": (synthetic([128], []), "a step of 129 tokens of one sequence; the model was loaded for at most 128"),
}


@pytest.mark.parametrize(("step", "complaint"), STEPS.values(), ids=STEPS)
def test_a_step_beyond_the_limits_is_refused(runner: ModelRunner, step: StepInputs, complaint: str) -> None:
    """With what was asked and what the runner was built for."""
    with pytest.raises(CalibrationError, match=complaint):
        runner.step(step)


def test_what_needs_a_step_or_a_pool_first_says_so(runner: ModelRunner) -> None:
    """Replaying nothing and swapping without swap blocks are refused."""
    with pytest.raises(CalibrationError, match="Call load"):
        runner.replay(1)
    with pytest.raises(CalibrationError, match="num_swap_blocks above 0"):
        runner.swap([(1, 0)], [])


class Failing(SdpaBackend):
    """A device that fails in the first decode."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def decode(self, *args: Any) -> Any:
        raise self.error


FAILURES = {
    "out_of_memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore."), "2.00 GiB"),
    "step_failed": (RuntimeError("CUDA error: an illegal memory access\nCompile with"), "illegal memory access"),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_device_that_fails_a_step_is_named_with_its_reason(runner: ModelRunner, reason: str) -> None:
    """One line with the step, the device's own first line, and the reason that the records keep."""
    failure, words = FAILURES[reason]
    error = step_error(runner, failure)
    assert isinstance(error, ExecutorError) and error.reason == reason
    assert re.fullmatch(f"a step of 1 decodes and 0 chunks, 1 tokens: .*{words}.*", str(error))


def test_a_kernel_that_cannot_be_compiled_is_a_failed_step(runner: ModelRunner) -> None:
    """Triton's errors are no RuntimeErrors; whatever is neither torch's nor Triton's goes through as it is."""
    errors = pytest.importorskip("triton.runtime.errors", reason="needs triton: pip install 'batchsim[live]'")
    for failure, words in (
        (errors.OutOfResources(300_000, 232_448, "shared memory"), "OutOfResources: .*shared memory"),
        (errors.PTXASError("bad code\nat line 3"), "PTXASError: .*bad code at line 3"),
    ):
        error = step_error(runner, failure)
        assert isinstance(error, ExecutorError) and error.reason == "step_failed"
        assert re.search(f"1 tokens: the device failed: {words}", str(error)) and "\n" not in str(error)
    assert isinstance(step_error(runner, AssertionError("ours")), AssertionError)


def step_error(runner: ModelRunner, failure: Exception) -> Exception:
    """What a step raises on a device that fails with `failure`."""
    transformer = Transformer(
        load_architecture(runner.spec), random_weights(load_architecture(runner.spec), runner.device, 0),
        Failing(failure), torch.zeros(2, 2, 9, 16, 2, 16), 128,
    )  # fmt: skip
    failing = ModelRunner(transformer, StepLimits(4, 64, 128))
    with pytest.raises(Exception) as error:
        failing.step(StepInputs.synthetic([3], [], block_size=16, num_blocks=8, vocab_size=101, seed=0))
    return error.value


# ---- sampling


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.5},
        {"top_k": 5},
    ],
    ids=str,
)
def test_nonsense_in_sampling_is_refused(knobs: dict[str, Any]) -> None:
    """Values out of range, and knobs that the likeliest token would ignore."""
    with pytest.raises(ScenarioError):
        Sampling(**knobs)


def test_tokens_are_drawn_by_their_probabilities() -> None:
    """Frequencies of 40,000 draws are within 0.01 of the softmax at that temperature, cut by top_k and top_p."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(40_000, -1)
    cases = {
        Sampling(temperature=2.0): [0.455, 0.276, 0.167, 0.102],
        Sampling(temperature=2.0, top_k=2): [0.622, 0.378, 0, 0],
        Sampling(temperature=2.0, top_p=0.8): [0.507, 0.307, 0.186, 0],
        Sampling(temperature=2.0, top_p=0.3): [1, 0, 0, 0],
    }
    for sampling, shares in cases.items():
        found = torch.bincount(sample(logits, sampling), minlength=4) / len(logits)
        assert torch.allclose(found, torch.tensor(shares, dtype=found.dtype), atol=0.01), sampling
        assert torch.equal(sample(logits, sampling), sample(logits, sampling))
    assert sample(logits[:2], Sampling()).tolist() == [0, 0]
