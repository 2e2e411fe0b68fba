"""What the `openai` package sees of a server: `python openai_client.py URL MODEL COUNT RATE [OTHER]`, JSON on stdout.

With OTHER, the URL of another server, it gets as many completions, in turn with the first: as many pieces are read at
once of either.

Run by the interpreter that has the package, which need not have batchsim: it imports nothing else.
"""

import asyncio
import json
import random
import sys
import time

import openai

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
GIVEN: list[tuple[str, object]] = [
    ("n", 2),
    ("n", 0),
    ("n", 10**6),
    ("max_tokens", 0),
    ("max_completion_tokens", 2),
    ("max_completion_tokens", -1),
    ("stop", "a"),
    ("stop", [""]),
    ("stop", 3),
    ("seed", 7),
    ("seed", "seven"),
    ("temperature", 0),
    ("temperature", -1),
    ("top_p", 0.5),
    ("top_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("logit_bias", {"5": 1}),
    ("logprobs", True),
    ("logprobs", False),
    ("top_logprobs", 2),
    ("tools", [TOOL]),
    ("tools", []),
    ("tool_choice", "required"),
    ("tool_choice", "none"),
    ("functions", [{"name": "now"}]),
    ("function_call", {"name": "now"}),
    ("response_format", {"type": "text"}),
    ("response_format", {"type": "json_object"}),
    ("modalities", ["text"]),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("web_search_options", {"search_context_size": "low"}),
    ("stream_options", {"include_usage": True}),
    ("user", "me"),
    ("user", 7),
    ("messages", []),
    ("messages", [{"content": "no role"}]),
    ("store", False),
    ("metadata", {"a": "b"}),
    ("service_tier", "auto"),
]


async def timed(client: openai.AsyncOpenAI, model: str, due_s: float, tokens: int) -> dict[str, object]:
    """One streamed completion sent at `due_s`: its id, and its times in s."""
    await asyncio.sleep(max(due_s - time.perf_counter(), 0))
    start, times = time.perf_counter(), []
    stream = await client.completions.create(
        model=model,
        prompt=list(range(100)),
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for piece in stream:
        if piece.choices:
            times.append(time.perf_counter())
        else:
            usage = piece.usage.completion_tokens
        id_ = piece.id
    return {"id": id_, "ttft_s": times[0] - start, "e2e_s": times[-1] - start, "tokens": usage}


async def words(client: openai.AsyncOpenAI, model: str) -> dict[str, object]:
    """The answers that need no clock: models, a chat, several choices, and the classes of errors."""
    messages = [{"role": "user", "content": "how are you"}]
    chat = await client.chat.completions.create(model=model, messages=messages, max_tokens=3, n=2)
    errors = {}
    for name, asked in (("logprobs", {"logprobs": 2}), ("max_tokens", {"max_tokens": -1}), ("model", {"model": "no"})):
        try:
            await client.completions.create(**({"model": model, "prompt": "a"} | asked))
        except openai.APIStatusError as error:
            errors[name] = [type(error).__name__, error.status_code, error.param]
    asked: dict[str, str] = {}
    for name, value in GIVEN:
        try:
            answer = await client.chat.completions.create(
                **({"model": model, "messages": messages, "max_tokens": 3} | {name: value})
            )
            asked[json.dumps({name: value})] = f"{len(answer.choices)} served"
        except openai.APIStatusError as error:
            asked[json.dumps({name: value})] = f"{error.status_code} {error.param}"
    return {
        "given": asked,
        "models": [each.id async for each in await client.models.list()],
        "choices": [choice.message.role for choice in chat.choices],
        "errors": errors,
    }


async def main(model: str, count: int, rate_rps: float, *urls: str) -> None:
    """Prints both; `timed` has a list for each server."""
    clients = [openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) for url in urls]
    draw = random.Random(1)
    told = await words(clients[0], model)
    due_s, asked = time.perf_counter() + 0.5, []
    for number in range(count * len(clients)):
        due_s += draw.expovariate(rate_rps)
        asked.append(timed(clients[number % len(clients)], model, due_s, draw.randrange(10, 60)))
    found = await asyncio.gather(*asked)
    print(json.dumps({"words": told, "timed": [found[place :: len(clients)] for place in range(len(clients))]}))


url, model, count, rate, *others = sys.argv[1:]
asyncio.run(main(model, int(count), float(rate), url, *others))
