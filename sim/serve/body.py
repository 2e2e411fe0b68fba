"""What a client asks for, read from the JSON of a request and checked before it costs anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import cut, shown
from batchsim.kernel.types import MISSING
from batchsim.serve.api_error import ApiError
from batchsim.serve.words import Texts

MAX_CHOICES = 128
"""Answers of a request: its prompts, each as often as `n` says."""
MAX_STOPS, MAX_STOP_LETTERS = 64, 256
"""Stop strings or stop tokens of a request, each of which is looked for at each token; letters of a stop string."""
MAX_USER = 256
"""Letters of the name of a user, which the results keep."""
MOST_TOKENS = 1 << 17
"""Most tokens of a request's prompts together, and of its answers, unless the model is longer: some 0.1 s of work."""
_MOST_TEXTS, _MOST_OTHERS, _VALUE_BYTES = 1 << 14, 1 << 14, 12
"""Texts in a body, keys included; lists and objects, and values beside token ids; bytes of a value that is no text, in
the mean."""
SHORT = 4096
"""Bytes of a body, or tokens of an answer, that cost a millisecond at most, whatever they are."""
MAX_REASON = 200
"""Letters of a chat template's message when it refuses a chat."""
DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion whose request does not say how many: as OpenAI and the engines have it."""
_INT64 = 1 << 63
_NO_LOGITS = "there are no logits"
_OWN_TEXT = "an answer's text is its own"
_OWN_TEMPLATE = "a chat's prompt is its messages, by the model's own template"
_REFUSED = {
    "logprobs": _NO_LOGITS,
    "prompt_logprobs": _NO_LOGITS,
    "top_logprobs": _NO_LOGITS,
    "logit_bias": _NO_LOGITS,
    "use_beam_search": _NO_LOGITS,
    "bad_words": _OWN_TEXT,
    "allowed_token_ids": _OWN_TEXT,
    "tools": "no answer would call them",
    "functions": "no answer would call them",
    "web_search_options": "no answer would search",
    "audio": "answers are text",
    "kv_transfer_params": "prefill and decode apart are simulated by run alone",
    "structured_outputs": _OWN_TEXT,
    "guided_json": _OWN_TEXT,
    "guided_regex": _OWN_TEXT,
    "guided_choice": _OWN_TEXT,
    "guided_grammar": _OWN_TEXT,
    "suffix": _OWN_TEXT,
    "prompt_embeds": "a prompt is text or token ids",
    "prompt_token_ids": "token ids are given as prompt",
    "truncate_prompt_tokens": "a prompt is taken whole",
    "chat_template": _OWN_TEMPLATE,
    "chat_template_kwargs": _OWN_TEMPLATE,
    "documents": _OWN_TEMPLATE,
    "reasoning_effort": _OWN_TEMPLATE,
    "continue_final_message": "an answer is a message of its own",
}
"""What would change an answer and is not served, with why. Samplers, as temperature is, change no length or time of a
simulated answer; a model's would be another one: see `_refuse_not_greedy`."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"], []),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "add_generation_prompt": (True,),
}
"""Fields with those of their values that ask for nothing but text."""


@dataclass(frozen=True)
class Prompt:
    """A prompt given by its token `ids`."""

    ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class CompletionRequest:
    """One request as checked: `prompts`, of each `n` answers of at most `max_tokens` tokens."""

    model: str
    is_chat: bool
    prompts: list[Prompt]
    n: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: bool
    priority: int
    user: str
    rank: int | None
    adapter: int = MISSING


def parse_json(body: bytes, most_tokens: int = MOST_TOKENS) -> dict[str, Any]:
    """The JSON object in `body`, of at most `most_tokens` token ids and the other values of a request.

    ApiError 400 for anything else, and for text that is none.
    """
    _check_number_of_values(body, most_tokens + _MOST_OTHERS)
    try:
        text = body.decode("utf-8-sig")
        values = json.loads(text)
        if _HALF.search(text):
            _check_texts(values)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {cut(str(error), 200)}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, not {shown(values)}")
    return values


_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a letter beyond U+FFFF, which JSON may escape as two


def _check_texts(values: Any) -> None:
    """ApiError 400 where a text has half a letter, which nothing can store or send."""
    for name, value in values.items() if isinstance(values, dict) else [("the body", values)]:
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ApiError(
                400, f"{cut(name)}: {half} is half of a letter. Send both halves, or none.", cut(name)
            ) from None


def _check_number_of_values(body: bytes, most: int) -> None:
    """ApiError 400 for JSON of too many values: a million of them take a second to read, whatever they are."""
    if len(body) <= SHORT:
        return
    # At the ends of strings stand the quotes that are not escaped.
    parts = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', 2 * _MOST_TEXTS + 1)
    outside = b"".join(parts[::2])
    if len(parts) > 2 * _MOST_TEXTS + 1:
        raise ApiError(400, f"the JSON has more than {_MOST_TEXTS:,} texts, keys included. Send less.")
    if outside.count(b"[") + outside.count(b"{") > _MOST_OTHERS:
        raise ApiError(400, f"the JSON has more than {_MOST_OTHERS:,} lists and objects. Send less.")
    if outside.count(b",") > most or len(outside) > _VALUE_BYTES * most:
        raise ApiError(
            400, f"the JSON has more than {most:,} values, or {_VALUE_BYTES * most:,} bytes of them. Send less."
        )


class Body:
    """The values of a request by name, each checked as it is taken; null counts as not given."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def whole(self, name: str, default: int, low: int = -_INT64, high: int = _INT64 - 1) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is not int:
            raise ApiError(400, f"{name} must be a whole number, not {shown(value)}", name)
        if not low <= value <= high:
            bound = f"at least {low}" if value < low else f"at most {high}"
            raise ApiError(400, f"{name} must be {bound}, got {shown(value)}.", name)
        return value

    def number(self, name: str, low: float, high: float) -> None:
        value = self._values.get(name)
        if value is None:
            return
        if type(value) not in (int, float):
            raise ApiError(400, f"{name} must be a number, not {shown(value)}", name)
        if not low <= value <= high:
            raise ApiError(400, f"{name} must be in [{low:g}, {high:g}], got {shown(value)}.", name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ApiError(400, f"{name} must be true or false, not {shown(value)}", name)
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ApiError(400, f"{name} must be a string, not {shown(value)}", name)
        return value


def completion(
    values: Mapping[str, Any], words: Texts, max_model_len: int, *, chat: bool, real: bool = False
) -> CompletionRequest:
    """The request in `values`, of /v1/chat/completions if `chat`, else of /v1/completions. ApiError 400 for none, and
    for one that a simulated engine, or a `real` one, would answer otherwise than is asked."""
    body = Body(values)
    _refuse_not_served(body)
    n = body.whole("n", 1, low=1, high=MAX_CHOICES)
    most = max(MOST_TOKENS, max_model_len)
    prompts: list[Prompt] = []
    for ids in [_ids_of_chat(body, words, max_model_len)] if chat else _ids_of_prompts(body, words, n, max_model_len):
        if not ids:
            raise ApiError(400, "The decoder prompt cannot be empty", "messages" if chat else "prompt")
        prompts.append(Prompt(ids))
        longest = max(prompt.num_tokens for prompt in prompts)
        if longest >= max_model_len:
            had = str(longest) if longest <= max_model_len else f"more than {max_model_len}"
            raise ApiError(
                400,
                f"This model's maximum context length is {max_model_len} tokens. However, your request has {had} input"
                " tokens. Please reduce the length of the input messages.",
                "input_tokens",
            )
        if n * sum(prompt.num_tokens for prompt in prompts) > most:
            raise _too_many("messages" if chat else "prompt", "the prompts of its answers", most)
    room = max_model_len - longest
    name = "max_completion_tokens" if chat and body.raw("max_completion_tokens") is not None else "max_tokens"
    max_tokens = body.whole(name, room if chat else min(DEFAULT_MAX_TOKENS, room), low=1)
    if max_tokens > room:
        raise ApiError(
            400,
            f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's maximum context length"
            f" is {max_model_len} tokens and your request has {longest} input tokens ({max_tokens} > {max_model_len} -"
            f" {longest}).",
            name,
        )
    ignore_eos, min_tokens = body.flag("ignore_eos"), body.whole("min_tokens", 0, low=0, high=max_tokens)
    if n * len(prompts) * (max_tokens if ignore_eos else min_tokens) > most:
        raise _too_many(name if ignore_eos else "min_tokens", "its answers", most)
    stream = body.flag("stream")
    options = body.raw("stream_options")
    if options is not None and not stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError(400, f"stream_options must be an object, not {shown(options)}", "stream_options")
    body.number("temperature", 0, 1e9)
    body.number("top_p", 0, 1)
    body.number("presence_penalty", -2, 2)
    body.number("frequency_penalty", -2, 2)
    body.number("repetition_penalty", 0, 1e9)
    body.whole("seed", 0)
    if real:
        _refuse_not_greedy(body)
    elif body.raw("stop_token_ids") not in (None, []):
        raise ApiError(400, "stop_token_ids is not served: stop takes texts. Leave it out.", "stop_token_ids")
    include_usage = Body(options or {}).flag("include_usage")
    return CompletionRequest(
        model=body.text("model"),
        is_chat=chat,
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop=_stop(body.raw("stop")),
        stop_token_ids=_stop_token_ids(body.raw("stop_token_ids")),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and Body(options or {}).flag("continuous_usage_stats"),
        return_token_ids=body.flag("return_token_ids"),
        echo=body.flag("echo"),
        priority=body.whole("priority", 0, low=-(1 << 31), high=(1 << 31) - 1),
        user=_user(body),
        rank=None if body.raw("data_parallel_rank") is None else body.whole("data_parallel_rank", 0, low=0),
    )


def tokenized(body: bytes, words: Texts, max_model_len: int, most_tokens: int) -> bytes:
    """The response to /tokenize, of a `prompt` or of `messages`. ApiError 400 for more than `most_tokens`."""
    values = parse_json(body, most_tokens)
    if "messages" in values:
        ids = completion(values | {"max_tokens": 1}, words, max_model_len, chat=True).prompts[0].ids
    else:
        ids = words.encode(Body(values).text("prompt"), most_tokens)
        if len(ids) > most_tokens:
            raise ApiError(400, f"prompt has more than the {most_tokens:,} tokens that are told", "prompt")
    response = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": None}
    return json.dumps(response).encode()


def detokenized(body: bytes, words: Texts, most_tokens: int) -> bytes:
    """The response to /detokenize, of `tokens`."""
    ids = parse_json(body, most_tokens).get("tokens")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ApiError(400, "tokens must be a list of token ids", "tokens")
    check_ids(ids, words, "tokens")
    return json.dumps({"prompt": words.decode(ids)}).encode()


def _too_many(name: str, whose: str, most: int) -> ApiError:
    return ApiError(400, f"{whose} have more than {most:,} tokens together. Ask for less at a time.", name)


def _user(body: Body) -> str:
    user = body.text("user")
    if len(user) > MAX_USER or not user.isprintable():  # as of a trace's tenants
        raise ApiError(400, f"user {shown(user)} is no name: at most {MAX_USER} printable letters. Shorten it.", "user")
    return user


def _refuse_not_greedy(body: Body) -> None:
    """ApiError 400 for what would have a model take another token than the likeliest."""
    for name, plain in (
        ("temperature", 0),
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
        ("repetition_penalty", 1),
    ):
        value = body.raw(name)
        if value is not None and value != plain:
            raise ApiError(
                400,
                f"{name} {shown(value)} is not served: the model's likeliest token is taken. Write {plain}, or leave it"
                " out.",
                name,
            )
    if body.whole("min_tokens", 0, low=0) and not body.flag("ignore_eos"):
        raise ApiError(
            400, "min_tokens is not served: the model ends its answers. Leave it out, or add ignore_eos.", "min_tokens"
        )


def _refuse_not_served(body: Body) -> None:
    """ApiError 400 for what would change the answer and does not here; what is switched off is no matter."""
    for name, why in _REFUSED.items():
        value = body.raw(name)
        asks = value is not None and value is not False and value not in ("", [], {})
        if asks and not (name == "top_logprobs" and value == 0):
            raise ApiError(400, f"{name} is not served: {why}. Leave it out.", name)
    if body.raw("best_of") not in (None, 1, body.raw("n")):
        raise ApiError(400, f"best_of is not served: {_NO_LOGITS}. Ask for n answers.", "best_of")
    for name, plain in _ONLY.items():
        if body.raw(name) is not None and body.raw(name) not in plain:
            raise ApiError(400, f"{name} is not served but for {shown(plain[0])}. Leave it out.", name)
    form = body.raw("response_format")
    if form is not None and form != {"type": "text"}:
        raise ApiError(400, f"response_format is not served: {_OWN_TEXT}. Leave it out.", "response_format")


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) for text in texts):
        kind = f"a list of strings, at most {MAX_STOPS}"
        raise ApiError(400, f"stop must be a string or {kind}, not {_described(value)}", "stop")
    if "" in texts:
        raise ApiError(400, "stop cannot contain an empty string.", "stop")
    if (longest := max(map(len, texts), default=0)) > MAX_STOP_LETTERS:
        raise ApiError(400, f"stop has a string of {longest:,} letters, at most are {MAX_STOP_LETTERS}", "stop")
    return tuple(texts)


def _described(value: Any) -> str:
    """A bad value in a message: of a long list its length, which says more and costs less."""
    return f"a list of {len(value):,}" if isinstance(value, list) and len(value) > MAX_STOPS else shown(value)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or len(ids) > MAX_STOPS or not all(type(one) is int for one in ids):
        kind = f"a list of token ids, at most {MAX_STOPS}"
        raise ApiError(400, f"stop_token_ids must be {kind}, not {_described(value)}", "stop_token_ids")
    return tuple(ids)


def _ids_of_prompts(body: Body, words: Texts, n: int, max_model_len: int) -> Iterator[list[int]]:
    """The tokens of one prompt, a text or a list of ids, or of several, each for `n` answers: a list of these."""
    value = body.raw("prompt")
    prompts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if n * len(prompts) > MAX_CHOICES:
        asked = f"prompt has {len(prompts):,} prompts, n is {n}: {n * len(prompts):,} answers"
        raise ApiError(400, f"{asked}, of which {MAX_CHOICES} are taken at most", "prompt")
    return (_ids_of_prompt(each, words, max_model_len) for each in prompts)


def check_ids(ids: list[int], words: Texts, name: str) -> None:
    """ApiError 400 for a token id in the field `name` that is none of the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < words.vocab_size:
        bad = next(one for one in ids if not 0 <= one < words.vocab_size)
        raise ApiError(400, f"Token id {shown(bad)} is out of vocabulary", name)


def _ids_of_prompt(value: Any, words: Texts, max_model_len: int) -> list[int]:
    if isinstance(value, str):
        return words.encode(value, max_model_len)
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise ApiError(
            400, f"prompt must be a string, a list of token ids, or a list of these, not {shown(value)}", "prompt"
        )
    check_ids(value, words, "prompt")
    return value


def _ids_of_chat(body: Body, words: Texts, max_model_len: int) -> list[int]:
    """The tokens of the prompt that messages make: as the model's template has it, else a mark of the role before each
    message, and one before the answer."""
    messages = body.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, f"messages must be a list of at least one message, not {shown(messages)}", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"a message must be an object with a role, not {shown(message)}", "messages")
    messages = [each | {"content": _content(each["content"])} if "content" in each else each for each in messages]
    try:
        ids = words.chat(messages, max_model_len)
    except ValueError as error:
        why = cut(str(error), MAX_REASON)
        raise ApiError(400, f"messages: the model's chat template refuses them: {why}", "messages") from None
    if ids is None:
        parts = [f"<|{each['role'].strip() or 'user'}|> {each.get('content') or ''}" for each in messages]
        ids = words.encode(" ".join([*parts, "<|assistant|>"]), max_model_len)
    return ids


def _content(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    raise ApiError(400, f"content must be a string or a list of texts, not {shown(content)}", "messages")
