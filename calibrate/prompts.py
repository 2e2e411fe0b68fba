"""What stands in the prompts: random ids, or text."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.errors import CalibrationError, ScenarioError
from sim.types import Request


class Prompts(Protocol):
    """Gives each request its token ids: the same for the same request, whatever the policy."""

    def ids(self, request: Request) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids."""
        ...


class RandomPrompts:
    """Uniform ids, keyed by seed and request id."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed

    def ids(self, request: Request) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids."""
        return np.random.default_rng([self.seed, request.id]).integers(0, self.vocab_size, request.prompt_tokens)


class TextPrompts:
    """Lines of a text file in turn, by request id; a line is repeated or cut to the request's prompt length.

    `folder` holds the model's tokenizer.json. ScenarioError if a file is missing or has no text.
    """

    def __init__(self, texts: Path, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise CalibrationError("text prompts need the tokenizers library. pip install tokenizers") from None
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ScenarioError(f"{file}: no such file. Text prompts need the model's folder with its tokenizer.json.")
        try:
            lines = [line for line in texts.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ScenarioError(f"{texts}: cannot be read as text: {error}. Give one prompt a line.") from None
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more special
            raise ScenarioError(f"{file}: is no tokenizer: {error}. Download it again.") from None
        self._lines = [np.array(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(lines) if e.ids]
        if not self._lines:
            raise ScenarioError(f"{texts}: holds no text. Give one prompt a line.")
        self._largest = max(int(line.max()) for line in self._lines)
        self._tokenizer = file

    def check(self, vocab_size: int) -> None:
        """ScenarioError if a token of the prompts is none of the model's."""
        if self._largest >= vocab_size:
            raise ScenarioError(
                f"{self._tokenizer}: makes token {self._largest}, the model has {vocab_size}. Give the model's own."
            )

    def ids(self, request: Request) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids."""
        return np.resize(self._lines[request.id % len(self._lines)], request.prompt_tokens)
