"""The options of a calibration, and the range of steps (the hull) that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.profile.point_plan import StepRange
from batchsim.deployment.model import ModelSpec

LEAST_MINUTES = 0.25
_DEFAULTS = {"cuda": (256, 8192, 16384), "cpu": (16, 256, 512)}  # sequences, tokens of a step, tokens of a sequence


@dataclass(frozen=True)
class Options:
    """The options of a calibration. None where the model, the device or its memory decides.

    `model` is a catalog name, a config.json or a Hugging Face folder; `minutes` is the budget of one call. `max_seqs`,
    `max_batched_tokens` and `max_model_len` are the range of steps to cover, `kv_tokens` states the KV pool instead of
    measuring it. Without `graphs` the kernels of decode steps are launched one by one.
    """

    model: str
    device: str
    minutes: float = 8.0
    max_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    block_size: int = 16
    graphs: bool = True
    seed: int = 0
    name: str | None = None


def limits_of(options: Options, model: ModelSpec) -> StepRange:
    """The range of steps asked for, defaults filled in; its `kv_tokens` is 0 where memory is to be measured."""
    seqs, tokens, context = _DEFAULTS[options.device]
    limits = StepRange(
        max_seqs=options.max_seqs or seqs,
        max_tokens=options.max_batched_tokens or max(tokens, options.max_seqs or 0),
        max_context=options.max_model_len or min(context, model.max_position_embeddings),
        kv_tokens=options.kv_tokens or 0,
    )
    least = {"--max-seqs": limits.max_seqs, "--max-batched-tokens": limits.max_tokens, "--max-model-len": 2}
    for option, value in least.items():
        if value < 1:
            raise CalibrationError(f"{option} is {value}. It is at least 1.")
    if limits.max_tokens < limits.max_seqs:
        raise CalibrationError(
            f"--max-batched-tokens {limits.max_tokens} is below --max-seqs {limits.max_seqs}: all sequences decode in"
            " one step, a token each. Raise it."
        )
    if not 2 <= limits.max_context <= model.max_position_embeddings:
        raise CalibrationError(
            f"--max-model-len {limits.max_context}: {model.name} takes 2 to {model.max_position_embeddings} tokens."
            " Correct it."
        )
    if options.device == "cpu" and not options.kv_tokens:
        limits = replace(limits, kv_tokens=limits.max_seqs * limits.max_context)
    if limits.kv_tokens and options.block_size > limits.kv_tokens:
        raise CalibrationError(
            f"--block-size {options.block_size} is more than the KV pool of {limits.kv_tokens} tokens. Lower it."
        )
    if options.kv_tokens and options.kv_tokens < limits.max_context:
        raise CalibrationError(
            f"--max-model-len {limits.max_context} is more than --kv-tokens {options.kv_tokens} hold. Correct one."
        )
    return limits
