"""The text that a model was taught to read a chat as: the Jinja template beside its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchsim.base.errors import ScenarioError, cut
from batchsim.base.files import read_json, read_text, reason_text

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
TOKENS = "special_tokens_map.json"  # older folders have their special tokens there
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """The block `generation`, which marks for training what an assistant said: a scope of its own, and no text."""

    tags = {"generation"}  # noqa: RUF012  as Jinja has it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A template as transformers renders it, its beginning of the answer included. `special`: what it may name besides
    the messages, such as bos_token. ScenarioError with `where` it stands if `template` is none."""

    def __init__(self, template: str, special: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(template)
        except Exception as error:  # also Python's own, of what Jinja makes of it
            why = cut(str(error) or type(error).__name__)
            raise ScenarioError(f"{where}: is no template: {why}. Download it again.") from None
        self._special = dict(special)

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that `messages` make; a content that is None is left out. ValueError, in the template's own words,
        for messages that it refuses."""
        messages = [
            {name: each[name] for name in each if name != "content" or each[name] is not None} for each in messages
        ]
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except Exception as error:  # whatever a template does with messages that it was not written for
            raise ValueError(str(error) or type(error).__name__) from None


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of the model in `folder`: the file chat_template.jinja, else what its tokenizer_config.json says,
    of several the default one. None where there is none. ScenarioError for files that cannot be read as such."""
    config, file = folder / CONFIG, folder / TEMPLATE
    said = _config(config)
    tokens = _config(folder / TOKENS) | said
    special = {name: text for name in _SPECIAL if (text := _token(tokens.get(name))) is not None}
    if file.is_file():
        return ChatTemplate(_read(file), special, str(file))
    where, template = f"{config}: chat_template", said.get("chat_template")
    if template is None:
        return None
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        if not named:
            raise ScenarioError(f"{where}: none of its templates is called default. Name one so.")
        template = named[0].get("template")
    if not isinstance(template, str):
        raise ScenarioError(f"{where}: is neither a text nor a list of named ones. Download it again.")
    return ChatTemplate(template, special, where)


def _config(file: Path) -> dict[str, Any]:
    """What a file of the tokenizer's says; nothing if it is not there."""
    if not file.is_file():
        return {}
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{file}: cannot be read: {reason_text(error)}. Download it again.") from None
    if not isinstance(config, dict):
        raise ScenarioError(f"{file}: is no JSON object. Download it again.")
    return config


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{file}: cannot be read as text: {reason_text(error)}. Download it again.") from None


def _token(value: Any) -> str | None:
    """A special token's text, which a config says as such or under content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter tojson, which escapes nothing for HTML as Jinja's own does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
