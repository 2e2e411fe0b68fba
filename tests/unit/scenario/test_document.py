"""YAML text to plain values with their lines: libyaml's loader, where it reads as PyYAML's own does."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from batchsim.base.errors import ScenarioError
from batchsim.scenario import document
from batchsim.scenario.document import read_document
from batchsim.scenario.load import SHIPPED, shipped_scenarios

TRAPS = [
    "a: 1\n? b",
    "a: \t1",
    "a:\n- 1\n-\n- 2",
    "a: {b:\n  }\nc: 1",
    "a: !",
    "a: |#\n",
    "a: !!python/name:os.system x",
    "a: &b 1\nc: *b",
    "a: 'it''s # no comment'\nb: \"x\\ty\"  # ?",
    "# what? | !\na: é",
    "a: b\n  c\nd: [1,\n 2]",
    "a: \ud800",
    "a: 1\na: 2",
    "a: [1",
    "a: b: c",
    "--- 1\n--- 2",
    "\ufeffa: 1",
    "",
    "[" * 1_000,
]


def outcome(text: str, loader: object) -> object:
    """Values and lines of a text, or the error, with a loader; None: that which `read_document` takes."""
    try:
        read = read_document(text, "s.yaml") if loader is None else document._document(text, "s.yaml", loader)
    except ScenarioError as error:
        return str(error)
    return repr(read.value), read.lines


@pytest.mark.parametrize("text", TRAPS)
def test_a_text_is_read_as_by_the_loader_in_python(text: str) -> None:
    """Its values, the line of each, and the words of what is wrong in it."""
    assert outcome(text, None) == outcome(text, yaml.SafeLoader)


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_are_read_by_the_fast_loader(name: str) -> None:
    """None has what the two may read otherwise, and they read it alike."""
    text = (resources.files(SHIPPED) / f"{name}.yaml").read_text(encoding="utf-8")
    assert not document._UNLIKE.search(text)
    assert outcome(text, document._FAST) == outcome(text, yaml.SafeLoader)
