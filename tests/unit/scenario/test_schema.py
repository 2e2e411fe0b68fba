"""The JSON schema as an editor uses it: it takes what batchsim takes, and says of each key its default and examples."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.scenario.document import read_document
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.schema import scenario_schema, shipped_documents
from tests.unit.scenario.test_schema_words import keys_of

CHOICES = {"cost", "deployment", "policies"}
"""Keys without a default, though none of them alone is required: one of the first two is, and then the third may be."""
SMALL = """\
model: llama-3.1-8b
cost: h200
workload: {arrivals: {kind: poisson, mean_rate: 1/s}, lengths: {prompt: {kind: fixed, tokens: 9},
  output: {kind: fixed, tokens: 9}}, output_cap: 9, requests: 9}
policies: {vllm: {max_num_seqs: 8}}
slo: ttft<1s @ 99%
"""


@cache
def schema() -> dict[str, Any]:
    """The schema of a scenario; to be read, not changed."""
    return scenario_schema()


def errors(value: Any, part: dict[str, Any] | None = None) -> list[str]:
    """What an editor would underline in a value: of a whole scenario, or of a part of its schema."""
    whole = schema() if part is None else part | {"$defs": schema()["$defs"]}
    return [error.message for error in jsonschema.Draft202012Validator(whole).iter_errors(value)]


def test_every_key_has_examples_and_they_are_valid() -> None:
    """So are the defaults, as a scenario writes them: with units."""
    jsonschema.Draft202012Validator.check_schema(schema())
    keys = keys_of(schema())
    assert len(keys) > 550
    for owner, name, its in keys:
        assert its["examples"] and its["description"], (owner, name)
        for example in its["examples"]:
            assert not errors(example, its), (owner, name, example)
        if its.get("default") is not None:
            assert not errors(its["default"], its), (owner, name, its["default"])


def test_every_key_has_a_default_or_is_required() -> None:
    """But for those of which one or another is to be given."""
    found = set()
    for mapping in mappings(schema()):
        required = mapping.get("required", ())
        found |= {name for name, its in mapping["properties"].items() if "default" not in its and name not in required}
    assert found == CHOICES


def mappings(node: Any) -> list[dict[str, Any]]:
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = [node] if isinstance(node, dict) and isinstance(node.get("properties"), dict) else []
    return own + [found for part in parts for found in mappings(part)]


def test_defaults_and_examples_are_as_scenarios_write_them() -> None:
    """Nanoseconds and bytes as text; examples of shipped scenarios before those of a type."""
    keys = {(owner, name): its for owner, name, its in keys_of(schema())}
    assert keys["HpaConfig", "every"]["default"] == "15s" and keys["PlanConfig", "window"]["default"] == "20min"
    assert keys["GpuSheet", "host_link"]["default"] == "32GB/s"
    assert keys["PreemptiveConfig", "watermark"]["default"] == "1%"
    assert keys["HpaConfig", "scale_down"]["default"]["stabilization_window"] == "5min"
    assert keys["OnOffArrivals", "on"]["examples"] == ["4s", "15s"]
    assert {"bfloat16"} <= set(keys["DeploymentConfig", "moe"]["examples"])


def test_shipped_scenarios_are_valid() -> None:
    """All of them, with their short forms."""
    documents = list(shipped_documents())
    assert len(documents) > 18
    for document in documents:
        assert not errors(document), document["model"]


VALID = [
    "cost: {kind: linear, base: 8ms}",
    "policies: {vllm: {max_num_seqs: {best_of: [8, 16]}}}",
    "policies: {a: {kind: vllm, max_num_seqs: 8}, vllm: {kind: static, batch_size: 4, max_wait: 1s}, sglang: null}",
    "replicas: {count: 2, router: {kind: 'my_router:Sticky', knob: 3}}",
    "replicas: {count: 2, router: least_tokens}",
    "cost: {kind: 'my_cost:Steps', knob: 3}",
    "kv: {log: startup.log}",
    "model: {hub: org/name, revision: 0123456}",
]


@pytest.mark.parametrize("line", VALID)
def test_what_scenarios_may_say_is_valid(line: str) -> None:
    """Short forms, best_of, other labels, classes of one's own."""
    assert not errors(changed(line))


@pytest.mark.parametrize(
    "line",
    [
        "policies: {vllm: {max_num_seqz: 8}}",
        "policies: {vllm: {max_num_seqs: 0}}",
        "policies: {vllm: {max_num_seqs: {best_of: []}}}",
        "replicas: {count: 2, deployment: {engine: vllm, gpu: h100}}",
        "cost: {kind: linear, bass: 8ms}",
        "seeds: 0",
        "unknown: 1",
        "model: {revision: main}",
        "model: {hub: org/name, rev: main}",
    ],
)
def test_what_is_refused_is_underlined(line: str) -> None:
    """By the schema and by batchsim alike."""
    document = changed(line)
    assert errors(document)
    with pytest.raises(ScenarioError):
        parse_scenario(replaced(line), "s.yaml", Path())


def changed(line: str) -> Any:
    """The small scenario with one key set."""
    return read_document(replaced(line), "s.yaml").value


def replaced(line: str) -> str:
    key = line.partition(":")[0]
    kept = [each for each in SMALL.splitlines() if not each.startswith(f"{key}:")]
    return "\n".join([*kept, line]) + "\n"
