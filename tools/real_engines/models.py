"""Tiny models with random weights for real engines on a CPU: llama.cpp's one file, and a folder as Hugging Face has it.

Both have a vocabulary of words, ` w0`, ` w1`, ..., each of them one token however it is asked for. An answer shows a
word for every token of it: no token that an engine hides can be chosen greedily.
"""

# pyright: reportMissingImports=false
# gguf is an extra

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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

    num_hidden_layers: int = 6
    hidden_size: int = 384
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    intermediate_size: int = 1024
    vocab_size: int = 2048
    max_position_embeddings: int = 4096

    @property
    def words(self) -> range:
        """The ids of the tokens that are words."""
        return range(len(_SPECIAL) + _BYTES, self.vocab_size)

    def tokens(self) -> list[str]:
        """The text of every token by its id."""
        return [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(_BYTES)), *(f" w{i}" for i in range(len(self.words)))]


def write_gguf(shape: Shape, path: Path) -> None:
    """Writes a model of 32 bits a weight as llama.cpp reads it; needs the package `gguf`."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden_size // shape.num_attention_heads)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * _BYTES]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(shape.tokens())
    writer.add_token_scores([0.0] * shape.vocab_size)
    writer.add_token_types([*kinds, *[gguf.TokenType.USER_DEFINED] * len(shape.words)])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    for name, weights in _weights(shape).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(shape: Shape) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Every tensor by llama.cpp's name for it, rows first."""
    draw, hidden, inner = np.random.default_rng(_SEED), shape.hidden_size, shape.intermediate_size
    kv = shape.num_key_value_heads * hidden // shape.num_attention_heads

    def random(*size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return draw.standard_normal(size, np.float32) * np.float32(_WEIGHT)

    found = {name: random(shape.vocab_size, hidden) for name in ("token_embd.weight", "output.weight")}
    found["output.weight"][: shape.words.start] = 0  # a logit of 0 is never the highest of so many
    found["output_norm.weight"] = np.ones(hidden, np.float32)
    sizes = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
    }
    sizes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    for i in range(shape.num_hidden_layers):
        found |= {f"blk.{i}.{name}.weight": np.ones(hidden, np.float32) for name in ("attn_norm", "ffn_norm")}
        found |= {f"blk.{i}.{name}.weight": random(*size) for name, size in sizes.items()}
    return found


def write_hugging_face(shape: Shape, folder: Path) -> None:
    """Writes the config and the tokenizer of a model; its weights an engine makes up (`--load-format dummy`)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = asdict(shape) | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    vocabulary = {token.strip(): i for i, token in enumerate(shape.tokens())}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    tokenizer |= {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _SPECIAL[0]}}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_position_embeddings}
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        write_text(folder / f"{name}.json", json.dumps(content, indent=1))
