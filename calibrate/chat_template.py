"""The text that a model was taught to read a chat as: the Jinja template beside its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchsim.base.errors import ScenarioError
from batchsim.base.files import read_json, read_text, reason_text

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """The block `generation`, which marks for training what an assistant said, and changes no text."""

    tags = {"generation"}  # noqa: RUF012  as Jinja has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
        except TemplateError as error:
            raise ScenarioError(f"{where}: is no template: {reason_text(error)}. Download it again.") from None
        self._special = dict(special)

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that `messages` make. ValueError, in the template's own words, for those that it refuses."""
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
    said = _config(config) if config.is_file() else {}
    special = {name: text for name in _SPECIAL if (text := _token(said.get(name))) is not None}
    if file.is_file():
        return ChatTemplate(_read(file), special, str(file))
    where, template = f"{config}: chat_template", said.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
        if template is None:
            raise ScenarioError(f"{where}: none of its templates is called default. Name one so.")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ScenarioError(f"{where}: is neither a text nor a list of named ones. Download it again.")
    return ChatTemplate(template, special, where)


def _config(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{file}: cannot be read: {reason_text(error)}. Download it again.") from None
    if not isinstance(found, dict):
        raise ScenarioError(f"{file}: is no JSON object. Download it again.")
    return found


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


def _json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    """The filter tojson, which escapes nothing for HTML as Jinja's own does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
