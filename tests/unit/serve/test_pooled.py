"""Pooling models behind HTTP: embeddings, scores and rankings, which end with their prompts."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("h11", reason="batchsim serve needs h11")

from batchsim.serve.keep_served import keep_table
from tests.support.serving.served import scenario_of, setup_from
from tests.unit.serve.test_metrics import samples
from tests.unit.serve.test_server import CHAT, COMPLETIONS, Client, ask, ask_of

POOLS = "vllm: {runner: pooling, max_num_seqs: 8, max_num_batched_tokens: 512}"
EMBED, POOL, SCORE, RERANK = "/v1/embeddings", "/pooling", "/score", "/v1/rerank"


def ask_pooling(use: Any) -> Any:
    """What `use` returns of a client of a new server whose model pools."""
    text = (
        scenario_of(POOLS)
        .replace("{kind: uniform, min: 2, max: 12}", "0")
        .replace("output_cap: 16", "output_cap: exact")
    )
    return ask_of(use, setup_from(text))


def test_vectors_are_those_of_their_tokens() -> None:
    """One for each prompt, of the model's width and length 1; equal prompts have equal ones, in floats and base64."""

    async def use(client: Client) -> Any:
        both = await client.json(EMBED, {"input": ["a b c", [1, 2], "a b c"], "model": "m"})
        short = await client.json(EMBED, {"input": [1, 2], "dimensions": 8, "encoding_format": "base64"})
        pooled = await client.json(POOL, {"input": "a b c"})
        row = client.server.backend.records().requests
        return both, short, pooled, row

    both, short, pooled, rows = ask_pooling(use)
    one, two, three = (each["embedding"] for each in both["data"])
    assert len(one) == 4096 and sum(x * x for x in one) == pytest.approx(1) and one == three != two
    assert both["usage"] == {"prompt_tokens": 8, "total_tokens": 8} and both["id"].startswith("embd-")
    (found,) = short["data"]
    assert len(struct.unpack("<8f", base64.b64decode(found["embedding"]))) == 8
    assert pooled["data"] == [{"index": 0, "object": "pooling", "data": one}]
    assert rows["output_tokens"].tolist() == [0] * 5 and rows["prompt_tokens"].tolist() == [3, 2, 3, 2, 3]


def test_a_gateway_learns_that_the_model_makes_no_tokens() -> None:
    """/model_info says so."""
    assert ask_pooling(lambda client: client.json("/model_info"))["is_generation"] is False


def test_a_ranking_is_by_score() -> None:
    """Scores of pairs are the same asked for either way; a ranking has the best first, and no more than are wanted."""

    async def use(client: Client) -> Any:
        texts = ["red", "green", "blue", "black"]
        scored = await client.json(SCORE, {"text_1": "what", "text_2": texts})
        ranked = await client.json(RERANK, {"query": "what", "documents": texts})
        best = await client.json(RERANK, {"query": "what", "documents": texts, "top_n": 2})
        return scored, ranked, best

    scored, ranked, best = ask_pooling(use)
    scores = {each["index"]: each["score"] for each in scored["data"]}
    order = [each["index"] for each in ranked["results"]]
    assert order == sorted(scores, key=lambda index: -scores[index]) and len(set(scores.values())) == 4
    assert [each["relevance_score"] for each in ranked["results"]] == [scores[index] for index in order]
    assert best["results"] == ranked["results"][:2] and ranked["usage"]["total_tokens"] == 8


def test_what_was_received_is_kept_as_a_table(tmp_path: Path) -> None:
    """A row for each prompt, with its latency; the first token that there is none of counts as the end."""

    async def use(client: Client) -> Path:
        await client.json(EMBED, {"input": ["a b c", "d"]})
        backend = client.server.backend
        records, spans = backend.close(client.server.now_ns)
        return keep_table(backend, records, spans, tmp_path)

    head, *rows = ask_pooling(use).read_text().splitlines()
    assert head == "sent_ns,ttft_ns,e2e_ns,prompt_tokens,output_tokens,max_tokens,status"
    assert [row.split(",")[1:] for row in rows] == [
        ["10000000", "10000000", "3", "0", "0", "ok"],
        ["10000000", "10000000", "1", "0", "0", "ok"],
    ]


def test_metrics_count_what_a_pooling_model_has() -> None:
    """An end, its latency, queue time and prompt tokens; no first token and no gap."""

    async def use(client: Client) -> str:
        await client.json(EMBED, {"input": ["a b c", "d"]})
        return (await client.call("GET", "/metrics"))[2].decode()

    found = {name: value for (name, labels), value in samples(ask_pooling(use)).items() if "bucket" not in name}
    assert found["vllm:e2e_request_latency_seconds_count"] == found["vllm:request_queue_time_seconds_count"] == 2
    assert found["vllm:prompt_tokens_total"] == 4
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:request_prefill_time_seconds_count"] == 0


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (EMBED, {}, "input must be a text"),
        (EMBED, {"input": []}, "input must be a text"),
        (EMBED, {"input": ""}, "cannot be empty"),
        (EMBED, {"input": 7}, "must be a string"),
        (EMBED, {"input": [1, "a"]}, "must be a string"),
        (EMBED, {"input": [-1]}, "out of vocabulary"),
        (EMBED, {"input": ["a"] * 129}, "129"),
        (EMBED, {"input": "a", "dimensions": 0}, "dimensions must be at least 1"),
        (EMBED, {"input": "a", "dimensions": 5000}, "dimensions must be at most 4096"),
        (EMBED, {"input": "a", "encoding_format": "bytes"}, "encoding_format must be float or base64"),
        (EMBED, {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens is not served"),
        (EMBED, {"input": [list(range(5000))]}, "maximum context length"),
        (SCORE, {"text_1": "a"}, "text_2 must be a list of texts"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_1 must be a text"),
        (SCORE, {"queries": "a", "documents": [1]}, "documents must be a list of texts"),
        (RERANK, {"query": " ", "documents": ["a"]}, "query must be a text"),
        (RERANK, {"query": "a", "documents": []}, "documents must be a list of texts"),
        (RERANK, {"query": "a", "documents": ["b"] * 129}, "documents has 129 texts"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n must be at least 0"),
        (COMPLETIONS, {"prompt": "a"}, "the model makes no tokens"),
        (CHAT, {"messages": []}, "the model makes no tokens"),
        (EMBED, {"input": "\ud800"}, "half of a letter"),
        (EMBED, [1], "must be a JSON object"),
    ],
)
def test_what_cannot_be_pooled_is_refused(path: str, body: Any, says: str) -> None:
    """A 400 in one line, and no engine is asked."""

    async def use(client: Client) -> Any:
        status, _, text = await client.call("POST", path, body)
        return status, json.loads(text)["error"]["message"], client.server.backend.num_sent

    status, message, num_sent = ask_pooling(use)
    assert (status, num_sent) == (400, 0) and says in message and "\n" not in message


def test_a_model_that_makes_tokens_pools_nothing() -> None:
    """A 400 says how to serve one that does."""

    async def use(client: Client) -> Any:
        return await client.call("POST", EMBED, {"input": "a"})

    status, _, text = ask(use)
    assert status == 400 and b"runner: pooling" in text
