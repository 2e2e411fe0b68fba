"""A scenario's values against the dataclasses they are to be; each error is one line, from file:line on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchsim.base.errors import ScenarioError, cut, nearest
from batchsim.base.problems import UNKNOWN, name_of, path_of, range_error, type_wanted
from batchsim.base.reading import read
from batchsim.scenario.config import ScenarioFile
from batchsim.scenario.document import Document
from batchsim.scenario.document import Path as Keys

MOST_ERRORS = 10
"""Errors that are shown of one value: what is written for another tool has one in every line."""

_MISSING = ("missing", "missing_argument")
_GONE = {
    "busy_share": "an engine that batches is busy as soon as one request runs, so that this is full at any load. Write"
    " kv_utilisation, the share of KV blocks in use, or queue_per_replica, the requests that wait for each"
}
"""Kinds of earlier versions, and what to write instead."""


def check_values(kind: Any, value: Any, document: Document, path: Keys, own: Mapping[str, Any] | None = None) -> Any:
    """`value` as the dataclass `kind`; its errors as a ScenarioError, in file order, a line each. `own` are configs of
    the user's own kinds, by the JSON of their values."""
    try:
        return read(kind, value, {"own": own})
    except ValidationError as error:
        problems = [(path_of(item["loc"], value), item) for item in error.errors(include_url=False)]

    def at(keys: Keys) -> int:
        return document.line((*path, *keys))

    # Beside an unknown key a missing one is most often the same key misspelt: the unknown one says more.
    odd = {keys[:-1] for keys, item in problems if item["type"] == UNKNOWN}
    telling = [p for p in problems if not (p[1]["type"] in _MISSING and p[0][:-1] in odd)]

    # A missing cost comes first, without missing policies: a deployment in its place names one too.
    if any(keys == ("cost",) and item["type"] in _MISSING for keys, item in telling):
        telling = [p for p in telling if not (p[0] == ("policies",) and p[1]["type"] in _MISSING)]

    def rank(problem: tuple[Keys, ErrorDetails]) -> tuple[bool, int, bool]:
        return (
            problem[0] != ("cost",) or problem[1]["type"] not in _MISSING,
            at(problem[0]),
            range_error(problem[1]) is None,
        )

    first: dict[Keys, ErrorDetails] = {}
    for keys, item in sorted(telling, key=rank):
        first.setdefault(keys, item)
    lines = []
    for keys, item in first.items():
        message = _message(kind, document.written((*path, *keys)), item)
        lines.append(f"{document.where(_blamed(document, (*path, *keys), item))}: {message}")
    more = [f"{len(lines) - MOST_ERRORS:,} more after these."] if len(lines) > MOST_ERRORS else []
    raise ScenarioError(*lines[:MOST_ERRORS], *more)


def _blamed(document: Document, path: Keys, item: ErrorDetails) -> Keys:
    """The path of the key that a check of the whole mapping at `path` names first, where it stands there."""
    named = str(item["msg"]).removeprefix("Value error, ").split(" ")[0].partition("[")[0].split(".")
    longest = (*path, *named) if item["type"] == "value_error" else path
    return longest if longest in document.lines or longest in document.overrides else path


def _message(kind: Any, full: Keys, item: ErrorDetails) -> str:
    name = ".".join(str(part) for part in full) or "the scenario"
    match item["type"]:
        case "unexpected_keyword_argument":
            owner = ".".join(str(part) for part in full[:-1]) or "a scenario"
            known = _field_names(item.get("ctx", {})["owner"])
            return f"{name} is not a field of {owner}. {nearest(str(full[-1]), known)}"
        case "missing" | "missing_argument":
            if full[-1] == "cost":
                return f"{name} is missing. Add deployment: {{engine: vllm, gpu: h100_sxm}}, or cost: a GPU or profile."
            return f"{name} is missing. Add it."
        case "union_tag_invalid":
            expected = item.get("ctx", {}).get("expected_tags", "")
            given = item.get("ctx", {}).get("tag", "")
            if given in _GONE:
                return f"{name}.kind is {given}: {_GONE[given]}."
            tags = [tag.strip(" '") for tag in expected.split(",")]
            return f"{name}.kind is {given}. {nearest(given, tags, f'Write one of {expected}.')}"
        case "union_tag_not_found":
            return f"{name} has no kind. Add kind: with the name of one."
        case "value_error" if error := range_error(item):
            owner = ".".join(str(part) for part in full[: -len(error.keys)])
            return (f"{owner}: " if owner else "") + f"{name_of(full[-len(error.keys) :])} {error}"
        case "value_error":
            reason = str(item["msg"]).removeprefix("Value error, ")
            return (f"{name}: " if full else "") + reason + ("" if reason.endswith((".", "?")) else ".")
        case _:
            shown = cut(json.dumps(item["input"]), 60)
            or_auto = ", or auto" if kind is ScenarioFile and len(full) == 2 and full[0] == "load" else ""
            named = "the name of a GPU, or its sheet as " if full and full[-1] == "gpu" else ""
            return f"{name} is {shown}. Write {named}{type_wanted(item)}{or_auto}."


def _field_names(kind: type) -> list[str]:
    """The keys that a scenario may write where the dataclass `kind` stands."""
    no_scenario_has = ("kind", "deployment")
    names = [field.name for field in fields(kind) if (field.name, field.default) != no_scenario_has]
    return ["deployment", *names] if "cost" in names else names
