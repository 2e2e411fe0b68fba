"""The token ids of prompts: random, or from text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.base.files import read_text, reason_text
from batchsim.calibrate.engine.chat_template import read_chat_template
from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Request

TOKENIZER = "tokenizer.json"

Answers = Mapping[int, Sequence[int]]
"""Outputs of ended requests, by the number of the token stream that each output is."""


class Prompts(Protocol):
    """Gives each request the token ids of its prompt: the same for the same request, whatever the policy."""

    def ids(self, request: Request, answers: Answers) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids, with equal ids where two requests' `tokens` say so."""
        ...


class RandomPrompts:
    """Uniformly random ids, keyed by seed and request id, or by token stream where a request names its tokens."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed

    def ids(self, request: Request, answers: Answers) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids; what an earlier output in the prompt lacks, as it was cut short, is random."""
        if request.tokens is None:
            return self._stream(output_stream(request.id), request.prompt_tokens)  # no prompt's stream has this key
        parts: list[NDArray[np.int64]] = []
        for stream, start, length in request.tokens.segments:
            if stream % 2 == 0:
                parts.append(self._stream(stream, start + length)[start:])
                continue
            made = np.array(answers.get(stream, ())[start : start + length], dtype=np.int64)
            parts += [made, self._stream(stream, start + length)[start + len(made) :]]
        return np.concatenate(parts)

    def _stream(self, key: int, num_tokens: int) -> NDArray[np.int64]:
        """The first `num_tokens` ids of the stream `key`; the same prefix for any number."""
        return np.random.default_rng([self.seed, key]).integers(0, self.vocab_size, num_tokens)


def load_tokenizer(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` in `folder`, which takes texts whole, whatever lengths its file says.

    ScenarioError without one, CalibrationError without the library.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CalibrationError("text prompts need the tokenizers library. pip install tokenizers") from None
    file = folder / TOKENIZER
    if not file.is_file():
        raise ScenarioError(f"{file}: no such file. Text prompts need the model's folder with its {TOKENIZER}.")
    try:
        tokenizer = Tokenizer.from_str(read_text(file))
    except Exception as error:  # the library raises nothing more special
        raise ScenarioError(f"{file}: is no tokenizer: {reason_text(error)}. Download it again.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class ModelTexts:
    """Text as tokens and back, as the tokenizer of the model in `folder` has it, and chats by the template there.
    Errors as `load_tokenizer` and `read_chat_template`, and ScenarioError for a tokenizer of more tokens than the
    model's `vocab_size`."""

    stands_alone = False
    """The text of several tokens is not that of each: a letter may take several."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = load_tokenizer(folder)
        self._template = read_chat_template(folder)
        if (size := self._tokenizer.get_vocab_size()) > vocab_size:
            raise ScenarioError(
                f"{folder / TOKENIZER}: has {size} tokens, the model has {vocab_size}. Give the model's own."
            )
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, most: int = sys.maxsize) -> list[int]:
        """The token ids of `text`, with the tokenizer's begin and end tokens, if any; of one of more than `most` tokens
        at least one more than `most`."""
        return self._ids(text, most, add_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]], most: int = sys.maxsize) -> list[int] | None:
        """The token ids, as of `encode`, of the prompt that `messages` make by the model's chat template; None where it
        has none. ValueError for messages that the template refuses."""
        if self._template is None:
            return None
        return self._ids(self._template.text(messages), most, add_special_tokens=False)

    def _ids(self, text: str, most: int, *, add_special_tokens: bool) -> list[int]:
        """As `encode`. A megabyte takes seconds: of a text that is surely too long only the beginning is read."""
        first = text[: (most + 1) * self._longest]
        ids = self._tokenizer.encode(first, add_special_tokens=add_special_tokens).ids
        if len(first) < len(text) and len(ids) <= most:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens `ids`, without special ones."""
        return self._tokenizer.decode(list(ids))


class TextPrompts:
    """Lines of a text file in turn, by request id; a line is repeated or cut to the request's prompt length.

    `folder` holds the model's tokenizer.json. ScenarioError if a file is missing or has no text.
    """

    def __init__(self, texts: Path, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        try:
            lines = [line for line in read_text(texts).splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise ScenarioError(
                f"{texts}: cannot be read as text: {reason_text(error)}. Give one prompt a line."
            ) from None
        self._lines = [np.array(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(lines) if e.ids]
        if not self._lines:
            raise ScenarioError(f"{texts}: holds no text. Give one prompt a line.")
        self._largest = max(int(line.max()) for line in self._lines)
        self._tokenizer = folder / TOKENIZER

    def check(self, vocab_size: int) -> None:
        """ScenarioError if a token id of the prompts is outside the model's vocabulary."""
        if self._largest >= vocab_size:
            raise ScenarioError(
                f"{self._tokenizer}: makes token {self._largest}, the model has {vocab_size}. Give the model's own."
            )

    def ids(self, request: Request, answers: Answers) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids. ScenarioError for a request that names its tokens."""
        if request.tokens is not None:
            raise ScenarioError(
                f"request {request.id}: text prompts cannot share the tokens that the workload says. Leave out"
                " --prompts, or the workload's prefix."
            )
        return np.resize(self._lines[request.id % len(self._lines)], request.prompt_tokens)
