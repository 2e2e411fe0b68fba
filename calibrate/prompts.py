"""What stands in the prompts: random ids, or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import CalibrationError, ScenarioError
from batchsim.base.files import TEXT_BYTES, check_regular, read_text, told
from batchsim.kernel.tokens import output_stream
from batchsim.kernel.types import Request

Answers = Mapping[int, Sequence[int]]
"""What ended requests have generated, by the stream that it is."""


class Prompts(Protocol):
    """Gives each request its token ids: the same for the same request, whatever the policy."""

    def ids(self, request: Request, answers: Answers) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids, equal where its `tokens` say so."""
        ...


class RandomPrompts:
    """Uniform ids, keyed by seed and request id, or by streams where a request says what its tokens are."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seed = seed

    def ids(self, request: Request, answers: Answers) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids. What an answer lacks, since its request was given up, is made up."""
        if request.tokens is None:
            return self._stream(output_stream(request.id), request.prompt_tokens)  # no prompt has a stream so keyed
        parts: list[NDArray[np.int64]] = []
        for stream, start, length in request.tokens.segments:
            if stream % 2 == 0:
                parts.append(self._stream(stream, start + length)[start:])
                continue
            made = np.array(answers.get(stream, ())[start : start + length], dtype=np.int64)
            parts += [made, self._stream(stream, start + length)[start + len(made) :]]
        return np.concatenate(parts)

    def _stream(self, key: int, num_tokens: int) -> NDArray[np.int64]:
        """The first tokens of a stream; more of them begin with the same ones."""
        return np.random.default_rng([self.seed, key]).integers(0, self.vocab_size, num_tokens)


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
            lines = [line for line in read_text(texts).splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise ScenarioError(f"{texts}: cannot be read as text: {told(error)}. Give one prompt a line.") from None
        try:
            check_regular(file, TEXT_BYTES)
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more special
            raise ScenarioError(f"{file}: is no tokenizer: {told(error)}. Download it again.") from None
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

    def ids(self, request: Request, answers: Answers) -> NDArray[np.int64]:
        """`request.prompt_tokens` ids. ScenarioError for a request that says what its tokens are."""
        if request.tokens is not None:
            raise ScenarioError(
                f"request {request.id}: text prompts cannot share the tokens that the workload says. Leave out"
                " --prompts, or the workload's prefix."
            )
        return np.resize(self._lines[request.id % len(self._lines)], request.prompt_tokens)
