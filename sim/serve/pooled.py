"""Requests to a pooling model, which end with their prompt: /v1/embeddings, /v1/rerank, /score and /pooling, as vLLM
has them. A vector depends on its tokens alone, and so does a score; neither means anything: there is no model.

Source: vllm/entrypoints/pooling of vLLM 0.32.0.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np

from batchsim.base.errors import shown
from batchsim.serve.api_error import ApiError
from batchsim.serve.body import MAX_CHOICES, Body, CompletionRequest, Prompt, completion
from batchsim.serve.exchange import Exchange
from batchsim.serve.words import Texts

EMBED, POOL, SCORE, RERANK = "embedding", "pooling", "score", "rerank"
PATHS = {
    "/v1/embeddings": EMBED, "/pooling": POOL, "/score": SCORE, "/v1/score": SCORE,
    "/rerank": RERANK, "/v1/rerank": RERANK, "/v2/rerank": RERANK,
}  # fmt: skip
_REFUSED = ("messages", "truncate_prompt_tokens", "max_tokens_per_doc", "instruction", "embed_dtype", "task")


@dataclass(frozen=True)
class PoolRequest:
    """One request of `kind` as checked: what its prompts ask of an engine, and of the answer: the dimensions of its
    vectors, whether they are base64, the texts that are ranked and how many of them are wanted."""

    kind: str
    asked: CompletionRequest
    dimensions: int
    is_base64: bool
    texts: tuple[str, ...] = ()
    top_n: int = 0


def pool_request(
    values: Mapping[str, Any], kind: str, words: Texts, max_model_len: int, dimensions: int
) -> PoolRequest:
    """The request in `values`; `dimensions` is the model's. ApiError 400 for none."""
    body = Body(values)
    for name in _REFUSED:
        if body.raw(name) is not None:
            raise ApiError(400, f"{name} is not served: a prompt is taken whole, by itself. Leave it out.", name)
    asks_vectors = kind in (EMBED, POOL)
    texts = () if asks_vectors else _texts(body, *_names(body, kind))
    prompts = _input(body) if asks_vectors else [*_pairs(texts)]
    # Of what else is in the body a completion's checks see model, priority, user and rank.
    more = {name: values[name] for name in ("model", "priority", "user", "data_parallel_rank") if name in values}
    made = completion({**more, "prompt": prompts, "max_tokens": 1}, words, max_model_len + 1, chat=False)
    wanted = body.whole("dimensions", dimensions, low=1, high=dimensions) if asks_vectors else dimensions
    form = body.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise ApiError(400, f"encoding_format must be float or base64, not {shown(form)}", "encoding_format")
    top_n = body.whole("top_n", 0, low=0) if kind == RERANK else 0
    return PoolRequest(kind, _ending_with_prompt(made), wanted, form == "base64", texts[1:], top_n)


def _ending_with_prompt(made: CompletionRequest) -> CompletionRequest:
    return replace(made, max_tokens=0, min_tokens=0, ignore_eos=True, stream=False)


def _input(body: Body) -> Any:
    value = body.raw("input")
    if value is None or value == []:
        raise ApiError(400, f"input must be a text, token ids, or a list of these, not {shown(value)}", "input")
    return value


def _names(body: Body, kind: str) -> tuple[str, str]:
    """The fields of the one text and of the texts to compare it with."""
    if kind == RERANK:
        return "query", "documents"
    return ("queries", "documents") if body.raw("queries") is not None else ("text_1", "text_2")


def _texts(body: Body, one: str, others: str) -> tuple[str, ...]:
    """The text, and the texts to compare it with."""
    first, rest = body.raw(one), body.raw(others)
    if isinstance(first, list) and len(first) == 1:
        first = first[0]
    if not isinstance(first, str) or not first.strip():
        raise ApiError(400, f"{one} must be a text, not {shown(first)}", one)
    rest = [rest] if isinstance(rest, str) else rest
    if not isinstance(rest, list) or not rest or not all(isinstance(text, str) for text in rest):
        raise ApiError(400, f"{others} must be a list of texts, at least one, not {shown(rest)}", others)
    if len(rest) > MAX_CHOICES:
        raise ApiError(400, f"{others} has {len(rest):,} texts, of which {MAX_CHOICES} are taken at most", others)
    return first, *rest


def _pairs(texts: Sequence[str]) -> list[str]:
    return [f"{texts[0]} {each}" for each in texts[1:]]


def _seed(prompt: Prompt) -> int:
    return crc32(repr(prompt.ids).encode())


def score(prompt: Prompt) -> float:
    """The score of a pair, from 0 to 1."""
    return _seed(prompt) / 0xFFFFFFFF


def vector(prompt: Prompt, dimensions: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The vector of a prompt, of length 1."""
    drawn = np.random.default_rng(_seed(prompt)).standard_normal(dimensions)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


class PooledExchange(Exchange):
    """A request to a pooling model, answered whole, as `pooled` asks."""

    def __init__(self, pooled: PoolRequest, *args: Any) -> None:
        super().__init__(*args)
        self._pooled = pooled

    @property
    def size(self) -> int:
        pooled = self._pooled
        return pooled.dimensions * len(self.choices) if pooled.kind in (EMBED, POOL) else len(self.choices)

    def _whole(self) -> bytes:
        pooled = self._pooled
        prompts = [choice.prompt for choice in self.choices]
        tokens = sum(prompt.num_tokens for prompt in prompts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        number = self.id.partition("-")[2]
        head = {"id": f"{_ID[pooled.kind]}-{number}", "model": self.request.model}
        if pooled.kind == RERANK:
            return json.dumps(head | {"usage": usage, "results": _ranked(pooled, prompts)}).encode()
        rows = [_row(pooled, place, prompt) for place, prompt in enumerate(prompts)]
        return json.dumps(head | {"object": "list", "created": self.created_s, "data": rows, "usage": usage}).encode()


_ID = {EMBED: "embd", POOL: "pool", SCORE: "score", RERANK: "rerank"}


def _row(pooled: PoolRequest, place: int, prompt: Prompt) -> dict[str, Any]:
    row: dict[str, Any] = {"index": place, "object": pooled.kind}
    if pooled.kind == SCORE:
        return row | {"score": score(prompt)}
    numbers = vector(prompt, pooled.dimensions)
    value = b64encode(numbers.astype("<f4").tobytes()).decode() if pooled.is_base64 else numbers.tolist()
    return row | {"embedding" if pooled.kind == EMBED else "data": value}


def _ranked(pooled: PoolRequest, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    rows = [
        {"index": place, "document": {"text": text}, "relevance_score": score(prompt)}
        for place, (text, prompt) in enumerate(zip(pooled.texts, prompts, strict=True))
    ]
    rows.sort(key=lambda row: -row["relevance_score"])
    return rows[: pooled.top_n or len(rows)]
