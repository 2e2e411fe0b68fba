"""Tiny Hugging Face checkpoints of the four families, and what transformers answers with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")
transformers = pytest.importorskip("transformers", reason="the reference the executor is held against")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {  # 4 query heads a KV head, RoPE stretched
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True},  # 7 a KV head, biases
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},  # 1 a KV head, its own head_dim
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": None},
}
SHAPE = {
    "vocab_size": 499,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
}


def checkpoint(family: str, folder: Path, *, dtype: str = "float32", shard: str = "1GB", **changes: Any) -> Any:
    """Writes a random checkpoint of `family` to `folder` and returns the model of transformers.

    Norms, biases and matrices have spread enough for the likeliest token to be clear of the second.
    """
    options = {"hidden_size": 112 if family == "qwen2" else 96, **SHAPE, **FAMILIES[family], **changes}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2 if name.endswith("bias") else 0.08)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def expected(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that transformers generates, the likeliest each."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return found[0, len(prompt) :].tolist()
