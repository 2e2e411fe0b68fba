"""What the JSON schema says of each key of a scenario."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter

from batchsim.scenario.described import Described, field_words
from batchsim.scenario.schema import scenario_schema


def keys_of(node: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """(mapping, key, what the schema has of it), however deep."""
    if isinstance(node, list):
        return [key for part in node for key in keys_of(part)]
    if not isinstance(node, dict):
        return []
    own = node["properties"].items() if isinstance(node.get("properties"), dict) else ()
    found = [(str(node.get("title")), name, its) for name, its in own]
    return found + [key for part in node.values() for key in keys_of(part)]


def test_every_key_says_what_it_is() -> None:
    """A reader of an editor's tooltip learns more than its range."""
    keys = keys_of(scenario_schema())
    assert len(keys) > 300
    assert [(owner, name) for owner, name, its in keys if its.get("description", "from ").startswith("from ")] == []


def test_words_are_the_docstring_under_the_field_and_its_range_follows() -> None:
    """In the class, or in the base that has the field; of a kind it is what its class is."""
    keys = {(owner, name): its["description"] for owner, name, its in keys_of(scenario_schema())}
    stop = keys["WorkloadConfig", "stop"]
    assert stop == "How answers end: by a stop token unless given, as far as the output cap lets them"
    assert keys["HpaConfig", "cold_start"] == "From the start of a replica until it takes requests; from 0s to a year"
    assert keys["KedaConfig", "min"] == "The fewest replicas; 0: none while nothing happens"
    assert keys["RampArrivals", "kind"].startswith("The kind: The rate grows in a straight line")
    assert keys["KvConfig", "log"].startswith("In the place of `tokens`")
    assert keys["batchsim scenario", "deployment"].startswith("In the place of `cost`")


@dataclass
class Silent:
    """Two keys, of which one says nothing."""

    said: int
    """What it is,
    in two lines."""
    unsaid: int


def test_a_key_without_words_is_noticed() -> None:
    """The schema cannot be made before its class says what the key is."""
    assert field_words(Silent) == {
        "kind": "The kind: Two keys, of which one says nothing",
        "said": "What it is, in two lines",
    }
    with pytest.raises(KeyError, match="unsaid"):
        TypeAdapter(Silent).json_schema(schema_generator=Described)


def test_what_the_schema_refers_to_is_in_it() -> None:
    """Every $ref names one of the schema's own $defs: an editor gives up at the first that does not."""
    schema = scenario_schema()
    refs = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))
    assert refs and refs <= set(schema["$defs"])
    assert "$defs" not in json.dumps(schema["$defs"]).replace("#/$defs/", "")
