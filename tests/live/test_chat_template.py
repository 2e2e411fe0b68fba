"""A chat is the prompt that transformers makes of it by the same template, and what a template refuses is a 400."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the executor runs on torch: pip install 'batchsim[live]'")

from batchsim.base.errors import ScenarioError
from batchsim.calibrate.engine.chat_template import read_chat_template
from batchsim.calibrate.engine.prompts import ModelTexts
from batchsim.serve.api_error import ApiError
from batchsim.serve.body import completion

MARKS = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{ raise_exception('the system speaks first') }}
    {%- endif %}
    {{ '<|' + message['role'] + '|>' }}
    {{ (message.content or 'nothing') | trim }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
TURNS = """\
{% if tools is defined and tools is none and documents is none %}no tools{% endif %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
{% set inside = 'no' %}
{% generation %}{% set inside = 'yes' %}{{ message | tojson(indent=2) }}{{ message | tojson(true) }}{% endgeneration %}
{{ inside }}{{ message.content is defined }}
{% endfor %}
{{ strftime_now('%Y-%m') }}{{ eos_token }}{{ pad_token }}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  café <b>&amp;  "}],
    [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi\n"}],
    [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "f"}, {"role": "user", "content": "é"}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "content": None}, {"role": "user", "content": ""}],
]


def write(folder: Path, template: Any = None) -> Path:
    """A model's folder with a tokenizer of bytes that begins each text with the token <s>, and a config."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    made.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": end}
    chats = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | chats))
    return folder


@pytest.mark.parametrize("template", [MARKS, TURNS])
@pytest.mark.parametrize("place", ["config", "named", "file"])
def test_a_chat_is_the_prompt_that_transformers_makes_of_it(tmp_path: Path, template: str, place: str) -> None:
    """Token by token, wherever the template stands; a text with its first token is given no second one."""
    transformers = pytest.importorskip("transformers")
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": template}]
    write(tmp_path, {"config": template, "named": named, "file": "that of the config"}[place])
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    theirs, texts = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path)), ModelTexts(tmp_path, 300)
    for chat in CHATS:
        assert texts.chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert texts.encode("a")[0] == 256


def test_special_tokens_of_an_older_folder_stand_apart(tmp_path: Path) -> None:
    """In special_tokens_map.json, of which what the config says is preferred."""
    write(tmp_path, "{{ bos_token }}{{ unk_token }}{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "?", "eos_token": "no"}')
    template = read_chat_template(tmp_path)
    assert template is not None and template.text([]) == "<s>?</s>"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    """With or without a config beside its tokenizer: then the marks of who speaks stand for one."""
    texts = ModelTexts(write(tmp_path), 300)
    asked = {"messages": [{"role": "user", "content": [{"text": "a"}, {"text": "b"}]}], "max_tokens": 1}
    (prompt,) = completion(asked, texts, 1000, chat=True).prompts
    assert texts.chat(CHATS[0]) is None and prompt.ids == texts.encode("<|user|> a\nb <|assistant|>")
    (tmp_path / "tokenizer_config.json").unlink()
    assert read_chat_template(tmp_path) is None


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (MARKS, [*CHATS[0], {"role": "system", "content": ""}], "refuses them: the system speaks first"),
        ("{{ messages[0].content + 1 }}", CHATS[0], "refuses them: can only concatenate str"),
        ("{{ messages[0].name.first }}", CHATS[0], "refuses them: 'dict object' has no attribute 'name'"),
        ("{{ messages.clear() }}", CHATS[0], "refuses them: access to attribute 'clear'"),
        ("{{ raise_exception(messages[0].role * 90) }}", CHATS[0], "refuses them: " + ("user" * 50)[:197] + "..."),
        ("", CHATS[0], "The decoder prompt cannot be empty"),
    ],
)
def test_what_a_template_refuses_is_a_400(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ApiError) as error:
        completion({"messages": messages}, ModelTexts(write(tmp_path, template), 300), 1000, chat=True)
    assert error.value.status == 400 and said in str(error.value), error.value


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "tokenizer_config.json: chat_template: is no template: Expected an expression"),
        (7, "tokenizer_config.json: chat_template: is neither a text nor a list of named ones"),
        ("{% break %}", "tokenizer_config.json: chat_template: is no template: 'break' outside loop"),
        ("{{ " + "1" * 5000 + " }}", "tokenizer_config.json: chat_template: is no template: Exceeds the limit"),
        ("{{ " + "(" * 5000 + " }}", "tokenizer_config.json: chat_template: is no template: maximum recursion depth"),
        ([{"name": "rag", "template": ""}], "tokenizer_config.json: chat_template: none of its templates is called"),
        ([{"name": ["a"]}, {"name": "default"}], "tokenizer_config.json: chat_template: is neither a text nor a list"),
    ],
)
def test_a_template_that_is_none_is_told_at_the_start(tmp_path: Path, template: Any, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        ModelTexts(write(tmp_path, template), 300)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("documents", [{"text": "a"}]),
        ("reasoning_effort", "low"),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
    ],
)
def test_what_would_make_another_prompt_of_a_chat_is_a_400(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{field} is not served") as error:
        completion({"messages": CHATS[0], field: value}, ModelTexts(write(tmp_path, MARKS), 300), 1000, chat=True)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer_config.json", b"[]", "is no JSON object"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: cannot be read: "),
        ("chat_template.jinja", b"\xff", "cannot be read as text: byte 1 is not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_text_is_told_at_the_start(tmp_path: Path, name: str, text: bytes, said: str) -> None:
    (write(tmp_path) / name).write_bytes(text)
    with pytest.raises(ScenarioError, match=said):
        ModelTexts(tmp_path, 300)
