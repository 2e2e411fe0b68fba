"""What a request may ask for is bounded before it costs anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchsim.serve.api_error import ApiError
from batchsim.serve.body import MOST_TOKENS, SHORT, completion, parse_json
from batchsim.serve.words import Words

WORDS = Words(1000)


def asked(real: bool = False, chat: bool = False, **values: Any) -> Any:
    return completion(parse_json(json.dumps(values).encode()), WORDS, 4096, chat=chat, real=real)


AT_MOST: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"stop": ["a"] * 64},
        {"stop": ["a"] * 65},
        "stop must be a string or a list of strings, at most 64, not a list of",
    ),
    ({"stop": "a" * 256}, {"stop": ["b", "a" * 257]}, "stop has a string of 257 letters, at most are 256"),
    ({"real": True, "stop_token_ids": [1] * 64}, {"real": True, "stop_token_ids": [1] * 65}, "ids, at most 64, not a"),
    ({"prompt": ["a"] * 128}, {"prompt": ["a"] * 129}, "prompt has 129 prompts, n is 1: 129 answers, of which 128"),
    ({"prompt": ["a"] * 2, "n": 64}, {"prompt": ["a"] * 2, "n": 65}, "prompt has 2 prompts, n is 65: 130 answers"),
    ({"n": 128}, {"n": 129}, "n must be at most 128"),
    ({"user": "a" * 256}, {"user": "a" * 257}, "user 'aaa"),
    ({"user": "a b"}, {"user": "a\nb"}, "is no name: at most 256 printable letters"),
    ({"prompt": "a " * 1024, "n": 128}, {"prompt": "a " * 1025, "n": 128}, "the prompts of its answers have more than"),
    ({"prompt": [[1] * 1024] * 128}, {"prompt": [[1] * 1025] * 128}, "more than 131,072 tokens together"),
    (
        {"n": 128, "max_tokens": 1024, "ignore_eos": True},
        {"n": 128, "max_tokens": 1025, "ignore_eos": True},
        "its answers have more than 131,072 tokens together",
    ),
    ({"n": 128, "max_tokens": 4000}, {"n": 128, "max_tokens": 4000, "min_tokens": 1025}, "its answers have more than"),
    ({"prompt": "a " * 4095}, {"prompt": "a " * 4096}, "maximum context length is 4096 tokens"),
    ({"prompt": [1] * 4095}, {"prompt": [1] * 9000}, "your request has more than 4096 input tokens"),
]


@pytest.mark.parametrize(("most", "more", "message"), AT_MOST)
def test_a_request_is_bounded(most: dict[str, Any], more: dict[str, Any], message: str) -> None:
    """As much as it may have is taken; more is a 400 in one line with the numbers."""
    asked(**{"prompt": "a", "max_tokens": 1} | most)
    with pytest.raises(ApiError) as caught:
        asked(**{"prompt": "a", "max_tokens": 1} | more)
    assert caught.value.status == 400 and message in str(caught.value) and "\n" not in str(caught.value)


def test_a_prompt_is_read_no_further_than_a_model_takes() -> None:
    """Of a text of a million words the first ones tell that it is too long."""
    assert len(WORDS.encode("a " * 1_000_000, 10)) == 11
    assert WORDS.encode("1 2 3", 3) == [1, 2, 3]


MANY = 1 << 14
QUOTED = r"\" , [ { \\"  # what stands in texts is no value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": list(range(MOST_TOKENS))}, None),
        ({"prompt": QUOTED * 40_000}, None),
        ({"prompt": ["\\" * 7 + '"'] * 8000}, None),
        ({"prompt": "a", "metadata": ["a"] * (MANY - 3)}, None),
        ({"prompt": "a", "metadata": ["a"] * (MANY - 2)}, "more than 16,384 texts, keys included"),
        ({"prompt": "a", "metadata": ["\\"] * MANY}, "more than 16,384 texts, keys included"),
        ({f"k{number}": 1 for number in range(MANY + 1)}, "more than 16,384 texts, keys included"),
        ({"prompt": [[]] * MANY}, "more than 16,384 lists and objects"),
        ({"prompt": [{}] * MANY}, "more than 16,384 lists and objects"),
        ({"prompt": [1] * (MOST_TOKENS + MANY + 2)}, "more than 147,456 values"),
        ({"prompt": [10**4000] * 500}, "bytes of them"),
    ],
)
def test_values_are_counted_before_they_are_read(body: dict[str, Any], message: str | None) -> None:
    """A body of too many texts, lists or numbers is a 400; what stands in its texts does not count."""
    data = json.dumps(body).encode()
    assert len(data) > SHORT
    if message is None:
        assert parse_json(data) == body
        return
    with pytest.raises(ApiError, match=message) as caught:
        parse_json(data)
    assert caught.value.status == 400


@pytest.mark.parametrize("field", ["n", "best_of", "tools", "response_format", "modalities", "stop", "prompt", "x"])
@pytest.mark.parametrize("half", ["", r',"\ud800"'])
def test_deep_json_is_refused_or_left_alone(field: str, half: str) -> None:
    """Lists in lists as deep as JSON is read, and deeper, are a 400 or an unknown field, never more."""
    for depth in (900, 3000):
        data = b'{"prompt": "a", "%b": %b1%b%b}' % (field.encode(), b"[" * depth, half.encode(), b"]" * depth)
        try:
            completion(parse_json(data), WORDS, 4096, chat=False)
        except ApiError as error:
            assert error.status == 400 and len(str(error)) < 400
        else:
            assert field == "x" and not half
