"""What the JSON schema says of each key of a scenario."""

from __future__ import annotations

import json
import re
from typing import Any

from batchsim.scenario.key_words import KEY_WORDS
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


def test_words_come_from_the_class_and_its_range_follows() -> None:
    """A sentence that names the field, words of ours where none does, and the kinds by what their class is."""
    keys = {(owner, name): its["description"] for owner, name, its in keys_of(scenario_schema())}
    stop = keys["WorkloadConfig", "stop"]
    assert stop == "`stop` says how answers end: by a stop token unless given, as far as the output cap lets them"
    assert keys["HpaConfig", "cold_start"] == "From the start of a replica until it takes requests; from 0s to a year"
    assert keys["LlamaCppConfig", "n_ubatch"] == KEY_WORDS["LlamaCppConfig.n_ubatch"]
    assert keys["RampArrivals", "kind"].startswith("The kind: The rate grows in a straight line")
    assert keys["batchsim scenario", "deployment"].startswith("In the place of `cost`")


def test_no_words_are_of_a_key_that_is_not_there() -> None:
    """Each entry is the description of some key, as it stands."""
    said = [its.get("description", "") for _, _, its in keys_of(scenario_schema())]
    assert [
        name for name, words in KEY_WORDS.items() if not any(f"{each};".startswith(f"{words};") for each in said)
    ] == []


def test_what_the_schema_refers_to_is_in_it() -> None:
    """Every $ref names one of the schema's own $defs: an editor gives up at the first that does not."""
    schema = scenario_schema()
    refs = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))
    assert refs and refs <= set(schema["$defs"])
    assert "$defs" not in json.dumps(schema["$defs"]).replace("#/$defs/", "")
