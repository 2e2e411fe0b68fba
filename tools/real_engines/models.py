"""Tiny models with random weights for real engines on a CPU: llama.cpp's one file, and a folder as Hugging Face has it.

Both have a vocabulary of words, ` w0`, ` w1`, ..., each of them one token however it is asked for. An answer shows a
word for every token of it: no token that an engine hides can be chosen greedily.
"""

# pyright: reportMissingImports=false
# gguf is an extra

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchsim.base.files import write_text

_SPECIAL = ("<unk>", "<s>", "</s>")
_BYTES = 256  # tokens that stand for one byte each; llama.cpp looks for that of a new line
_WEIGHT = 0.02  # standard deviation of all matrices
_SEED = 0


@dataclass(frozen=True)
class Shape:
    """A Llama: sizes in elements, `positions` in tokens. 11 million parameters unless said."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    kv_heads: int = 2
    intermediate: int = 1024
    vocabulary: int = 2048
    positions: int = 4096

    @property
    def first_word(self) -> int:
        return len(_SPECIAL) + _BYTES

    @property
    def words(self) -> range:
        """The ids of the tokens that are words."""
        return range(self.first_word, self.vocabulary)

    def tokens(self) -> list[str]:
        """The text of every token by its id."""
        words = self.vocabulary - self.first_word
        return [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(_BYTES)), *(f" w{i}" for i in range(words))]


def write_gguf(shape: Shape, path: Path) -> None:
    """Writes a model of 32 bits a weight as llama.cpp reads it; needs the package `gguf`."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer, shape)
    for name, weights in _weights(shape).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, shape: Shape) -> None:
    import gguf

    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * _BYTES]
    words = shape.vocabulary - shape.first_word
    writer.add_tokenizer_model("llama")
    writer.add_token_list(shape.tokens())
    writer.add_token_scores([0.0] * shape.vocabulary)
    writer.add_token_types([*kinds, *[gguf.TokenType.USER_DEFINED] * words])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _weights(shape: Shape) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Every tensor by llama.cpp's name for it, rows first."""
    draw = np.random.default_rng(_SEED)
    kv = shape.kv_heads * shape.hidden // shape.heads

    def random(*size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return draw.standard_normal(size, np.float32) * np.float32(_WEIGHT)

    found = {
        "token_embd.weight": random(shape.vocabulary, shape.hidden),
        "output_norm.weight": np.ones(shape.hidden, np.float32),
        "output.weight": random(shape.vocabulary, shape.hidden),
    }
    found["output.weight"][: shape.first_word] = 0  # a logit of 0 is never the highest of so many
    for i in range(shape.layers):
        layer = {
            "attn_norm": np.ones(shape.hidden, np.float32),
            "ffn_norm": np.ones(shape.hidden, np.float32),
            "attn_q": random(shape.hidden, shape.hidden),
            "attn_k": random(kv, shape.hidden),
            "attn_v": random(kv, shape.hidden),
            "attn_output": random(shape.hidden, shape.hidden),
            "ffn_gate": random(shape.intermediate, shape.hidden),
            "ffn_up": random(shape.intermediate, shape.hidden),
            "ffn_down": random(shape.hidden, shape.intermediate),
        }
        found |= {f"blk.{i}.{name}.weight": weights for name, weights in layer.items()}
    return found


def write_hugging_face(shape: Shape, folder: Path) -> None:
    """Writes the config and the tokenizer of a model; its weights an engine makes up (`--load-format dummy`)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vocabulary = {token.strip(): i for i, token in enumerate(shape.tokens())}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _SPECIAL[0]},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.positions}
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        write_text(folder / f"{name}.json", json.dumps(content, indent=1))
