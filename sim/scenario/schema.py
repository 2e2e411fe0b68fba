"""The JSON schema of a scenario file, as an editor needs it: what each key is, its default, and examples of it.

Descriptions are the docstrings under the fields of the configs (`described`), defaults are the fields' own, examples
are of the scenarios that come with batchsim; of keys that none of these writes, from the range of the key's type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from importlib import resources
from typing import Any, get_args

from pydantic import TypeAdapter

from batchsim.base.units import (
    Bandwidth,
    Duration,
    Flops,
    PricePerGbMonth,
    PricePerHour,
    PricePerKwh,
    Quantity,
    Rate,
    Share,
    Size,
    Watts,
)
from batchsim.drive.fleet.lockstep.lockstep_config import MAX_RANKS
from batchsim.policies.registry import POLICIES
from batchsim.scenario.config import ScenarioFile
from batchsim.scenario.described import Described, mappings
from batchsim.scenario.document import TEXTS, read_document
from batchsim.scenario.replicas_config import PoolsConfig
from batchsim.workload.predictors import PredictorConfig

Node = dict[str, Any]
SHIPPED = "batchsim.scenarios"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"  # a name, which is not fetched
_MOST_EXAMPLES = 3
_MOST_LETTERS = 160  # of an example; a longer one is given where there is no shorter
_SHORT = {
    "cost": "one name: a profile, or a GPU for its roofline",
    "router": "its kind alone",
    "frontend": "the name of an engine",
}
"""Keys that may be one word in the place of a mapping."""
_OWN = {("ReplicasConfig", "router"), ("ReplicasConfig", "autoscaler"), ("PlanConfig", "router")}
_OWN |= {
    ("PreemptiveConfig", "predictor"),
    ("WorkloadConfig", "arrivals"),
    ("ScenarioFile", "cost"),
    ("ReplicaGroup", "cost"),
    ("GpuOffer", "cost"),
}
"""Keys, with their owner, whose kind may be a class of the user's own, with knobs of its own."""
EXAMPLES: dict[str, list[Any]] = {
    "HubModel.hub": ["Qwen/Qwen3-8B"],
    "Columns.prompt": ["prompt_tokens"],
    "Columns.output": ["output_tokens"],
    "Columns.arrival": ["timestamp"],
    "Columns.hash_ids": ["hash_ids"],
    "Columns.acceptance": ["acceptance_rate"],
    "Columns.request_class": ["type"],
    "Columns.priority": ["priority"],
    "Columns.tenant": ["user"],
    "Columns.session": ["session_id"],
    "Columns.turn": ["turn"],
    "Columns.id": ["request_id"],
    "Columns.parent": ["parent_id"],
    "Columns.delay": ["delay"],
    "Columns.deadline": ["timeout"],
    "Columns.status": ["status"],
    "Columns.ttft": ["ttft"],
    "Columns.e2e": ["latency"],
    "Columns.task": ["task_id"],
    "Columns.lora": ["adapter"],
    "Columns.items": ["num_images"],
    "Columns.structured": ["guided"],
    "DrafterConfig.model": ["drafter/config.json"],
    "KvConfig.log": ["startup.log"],
    "ReplicaGroup.model": ["qwen2.5-7b"],
    "ReplicaGroup.knobs": [{"max_num_batched_tokens": 16384}],
    "Own.kind": ["own_router:Sticky"],
    "TraceConfig.reader": ["own_reader:OwnReader"],
    "TraceConfig.rows": [[0, 10000]],
    "TraceConfig.time": [["10min", "30min"]],
    "DecodingConfig.decoding_type": ["Eagle", "MTP", "NGram"],
}
"""Examples of keys that no shipped scenario writes and whose types have none, by CLASS.KEY."""


def scenario_schema() -> Node:
    """The JSON schema of a scenario file, with the knobs of every policy under its `$defs`."""
    return json.loads(schema_text())


def _schema() -> Node:
    schema = TypeAdapter(ScenarioFile).json_schema(schema_generator=Described)
    for kind, (config, _) in POLICIES.items():
        policy = TypeAdapter(config).json_schema(schema_generator=Described)
        schema["$defs"] |= policy.pop("$defs", {})  # where "#/$defs/..." looks for them
        schema["$defs"][f"policy_{kind}"] = policy
    predictor = TypeAdapter(PredictorConfig).json_schema(schema_generator=Described)
    schema["$defs"] |= predictor.pop("$defs")
    words = "Who guesses how long answers get, where an order or a victim is chosen by that"
    predictor |= {"description": words, "default": None}
    schema["$defs"]["policy_preemptive"]["properties"]["predictor"] = predictor
    pools = TypeAdapter(PoolsConfig).json_schema(schema_generator=Described)
    schema["$defs"] |= pools.pop("$defs", {})
    schema["$defs"]["PoolsConfig"] = pools
    words = "Prefill and decode on different engines, in the place of `replicas`; else all engines do both"
    schema["properties"]["pools"] = {"$ref": "#/$defs/PoolsConfig", "description": words, "default": None}
    ranks = {"type": "integer", "minimum": 1, "maximum": MAX_RANKS, "description": "How many ranks"}
    options = schema["$defs"]["LockstepConfig"]["properties"]
    long = {"type": "object", "properties": {"ranks": ranks} | deepcopy(options), "additionalProperties": False}
    long |= {"required": ["ranks"], "description": "Ranks of one model with experts that step together"}
    schema["$defs"]["DpAttention"] = long
    words = "Ranks of a model with experts that step together, in the place of `replicas`: vLLM's data parallelism"
    schema["properties"]["dp_attention"] = {
        "anyOf": [ranks, {"$ref": "#/$defs/DpAttention"}],
        "description": words,
        "default": None,
    }
    _add_hub(schema)
    _write_defaults(schema)
    for owner in (schema, *schema["$defs"].values()):
        own = {*owner.get("properties", ())}
        if "cost" in own and own & {"kv", "price"}:
            _add_deployment(owner)
    sides = {"type": "object", "required": ["prefill", "decode", "transfer"], "description": "as of `pools`"}
    deployment = schema["properties"]["deployment"]
    schema["properties"]["deployment"] = {
        "anyOf": [{"$ref": deployment["$ref"]}, sides],
        "description": deployment["description"],
    }
    schema["required"].remove("policies")
    del schema["$defs"]["DeploymentConfig"]["properties"]["kind"]
    _add_short_forms(schema)
    _add_policies(schema)
    _add_examples(schema)
    return {"$schema": _DIALECT, "title": "batchsim scenario"} | {k: v for k, v in schema.items() if k != "title"}


@cache
def schema_text() -> str:
    """The schema as the text of a file."""
    return json.dumps(_schema(), indent=1, ensure_ascii=False) + "\n"


# ---- what files may say


def _add_deployment(owner: Node) -> None:
    """Adds `deployment` to the schema of a mapping that has a `cost`: one of them where the cost is required."""
    words = "In the place of `cost`: an engine on GPUs, whose step costs come from measured kernel tables"
    owner["properties"]["deployment"] = {"$ref": "#/$defs/DeploymentConfig", "description": words}
    if "cost" in owner.get("required", ()):
        owner["required"].remove("cost")
        owner["oneOf"] = [{"required": ["cost"]}, {"required": ["deployment"]}]


def _add_hub(schema: Node) -> None:
    """Adds `model: {hub: ID, revision: R}` beside its name."""
    text, model = {"type": "string", "minLength": 1}, schema["properties"]["model"]
    hub = text | {"description": "Its Hugging Face id, org/name"}
    revision = text | {"description": "A branch, tag or commit", "default": "main"}
    schema["$defs"]["HubModel"] = {
        "type": "object",
        "title": "HubModel",
        "description": "A model that huggingface_hub looks up",
        "properties": {"hub": hub, "revision": revision},
        "required": ["hub"],
        "additionalProperties": False,
    }
    name = {"type": model.pop("type"), "description": "A name, an id or a path"}
    model["anyOf"] = [name, {"$ref": "#/$defs/HubModel"}]


def _add_short_forms(schema: Node) -> None:
    """What is written in short, and is written out before the configs see it (`long_forms`)."""
    for owner in mappings(schema):
        for name, node in owner["properties"].items():
            if name in _SHORT and node.get("type") != "string":
                kept = {key: node.pop(key) for key in ("description", "default", "title") if key in node}
                long = dict(node)
                node.clear()
                node |= {"anyOf": [{"type": "string", "description": _SHORT[name]}, long], **kept}
            if (owner.get("title"), name) in _OWN:
                kept = {key: node.pop(key) for key in ("description", "default", "title") if key in node}
                known = dict(node)
                node.clear()
                node |= {"anyOf": [known, {"$ref": "#/$defs/own"}], **kept}
            if name in TEXTS and node.get("type") == "string":
                node["type"] = ["string", "number"]
    schema["$defs"]["own"] = {
        "type": "object",
        "title": "Own",
        "description": "A class of your own, with its knobs (--allow-code)",
        "properties": {"kind": {"type": "string", "pattern": ":", "description": "The kind: `module:Class`"}},
        "required": ["kind"],
    }
    kv = schema["$defs"]["KvConfig"]["properties"]
    kv["log"] = {"type": "string", "description": kv["log"]["description"], "default": None}


def _add_policies(schema: Node) -> None:
    """The knobs of a policy whose label is its kind; each may be a list of values, of which the best is kept."""
    policies = schema["properties"]["policies"]
    policies["properties"] = {}
    for kind in POLICIES:
        policy = schema["$defs"][f"policy_{kind}"]
        for name, knob in policy["properties"].items():
            kept = {key: knob.pop(key) for key in ("description", "default", "title", "examples") if key in knob}
            one = dict(knob)
            best = {"$ref": "#/$defs/best_of"}
            knob.clear()
            knob |= {"anyOf": [one, best], **kept} if name != "kind" else {**one, **kept}
        own = {"$ref": f"#/$defs/policy_{kind}", "not": {"required": ["kind"]}}
        other = {"type": "object", "required": ["kind"]}
        policies["properties"][kind] = {
            "anyOf": [own, other, {"type": "null"}],
            "description": f"The policy {kind}, or by `kind` another under this label",
            "default": None,
        }
    schema["$defs"]["best_of"] = {
        "type": "object",
        "description": "A knob with several values, of which the best at each load is kept",
        "properties": {"best_of": {"type": "array", "minItems": 1, "description": "The values that are tried"}},
        "required": ["best_of"],
        "additionalProperties": False,
    }


# ---- defaults


def _write_defaults(schema: Node) -> None:
    """Writes the defaults of all keys as a scenario has them."""
    for owner in mappings(schema):
        for node in owner["properties"].values():
            if node.get("default") is not None:
                node["default"] = _as_written(schema, node, node["default"])


def _as_written(schema: Node, node: Node, value: Any) -> Any:
    """A config's value as a scenario writes it: quantities with their units."""
    for each in _branches(schema, node):
        own = each.get("properties", {})
        if "string" in each.get("type", ()) and isinstance(value, int | float) and not isinstance(value, bool):
            return _WRITERS[each["examples"][0]](value)
        if isinstance(value, dict) and own and set(value) <= set(own):
            return {name: _as_written(schema, own[name], part) for name, part in value.items()}
        if isinstance(value, list | tuple) and isinstance(each.get("items"), dict):
            return [_as_written(schema, each["items"], part) for part in value]
    return value


def _quantities() -> dict[str, Callable[[float], str]]:
    """How each quantity is written, by the example that its type has."""
    writers: dict[str, Callable[[float], str]] = {}
    for kind in (Duration, Rate, Size, Watts, Bandwidth, Flops, PricePerHour, PricePerKwh, PricePerGbMonth, Share):
        quantity = next(each for each in get_args(kind) if isinstance(each, Quantity))
        writers[quantity.example] = _short_number(quantity)
    return writers


def _short_number(quantity: Quantity) -> Callable[[float], str]:
    """`quantity.write`, without the fraction of a whole number, and of whole GB with that unit."""
    whole = re.compile(r"\.0(?=[^0-9])")
    return lambda value: whole.sub("", quantity.write(value)).replace("000000000B", "GB")


_WRITERS = _quantities()


# ---- examples


def _add_examples(schema: Node) -> None:
    """Gives each key up to three examples, short ones if there are. KeyError for a key that has none."""
    examples: dict[int, list[Any]] = {}
    for document in shipped_documents():
        _collect(schema, schema, document, examples)
    owners = [(str(owner.get("title")), owner["properties"].items()) for owner in mappings(schema)]
    keys = [(f"{owner}.{name}", node) for owner, own in owners for name, node in own]
    for title, node in keys:
        seen = examples.get(id(node), [])
        short = [value for value in seen if len(json.dumps(value)) <= _MOST_LETTERS]
        default = [] if node.get("default") in (None, {}, [], 0, "0s", "0B", True, False, "") else [node["default"]]
        known = short[:_MOST_EXAMPLES] or seen[:1] or EXAMPLES.get(title)
        if known := known or _words(schema, node, of="enum") or default or _words(schema, node):
            node["examples"] = known
    for title, node in keys:
        if "examples" not in node:
            node["examples"] = [_of_type(schema, node, title)]


def shipped_documents() -> Iterator[Any]:
    """The plain values of every scenario that comes with batchsim, as they are written."""
    for item in sorted(resources.files(SHIPPED).iterdir(), key=lambda item: item.name):
        if item.name.endswith(".yaml"):
            yield read_document(item.read_text(encoding="utf-8"), item.name).value


def _collect(schema: Node, node: Node, value: Any, examples: dict[int, list[Any]]) -> None:
    """Notes in `examples`, by the identity of a key's schema, its values in `value`, which `node` describes."""
    if isinstance(value, list):
        for part in value:
            for each in _branches(schema, node):
                if isinstance(each.get("items"), dict):
                    _collect(schema, each["items"], part, examples)
        return
    if not isinstance(value, dict):
        return
    for each in _branches(schema, node):
        own, more = each.get("properties", {}), each.get("additionalProperties")
        if isinstance(own.get("kind"), dict) and own["kind"].get("const", value.get("kind")) != value.get("kind"):
            continue
        if each is schema["$defs"].get("own") and ":" not in str(value.get("kind")):
            continue
        if own and more is False and not set(value) <= set(own):
            continue
        for key, part in value.items():
            child = own.get(key)
            if child is not None:
                values = examples.setdefault(id(child), [])
                if part is not None and part not in values:
                    values.append(part)
                _collect(schema, child, part, examples)
            elif isinstance(more, dict):
                _collect(schema, more, part, examples)


def _branches(schema: Node, node: Node) -> Iterator[Node]:
    """The mappings that `node` may be, references followed."""
    if "$ref" in node:
        yield from _branches(schema, schema["$defs"][node["$ref"].removeprefix("#/$defs/")])
        return
    yield node
    for key in ("anyOf", "oneOf"):
        for each in node.get(key, ()):
            yield from _branches(schema, each)


def _words(schema: Node, node: Node, of: str = "") -> list[Any]:
    """The examples that the type of a key states, or its first words; or only those `of` one of both."""
    for each in _branches(schema, node):
        for key in (of,) if of else ("examples", "enum"):
            if each.get(key):
                return list(each[key][:_MOST_EXAMPLES])
        if each.get("type") == "boolean" and not of:
            return [True, False]
    return []


def _of_type(schema: Node, node: Node, title: str, depth: int = 6) -> Any:
    """A value that `node` takes, `title` being its key: its default, the least of its range, or the least that a
    mapping needs. KeyError for a text, which can be anything."""
    if node.get("default") not in (None, {}, []):
        return node["default"]
    if given := node.get("examples") or EXAMPLES.get(title) or _words(schema, node):
        return given[0]
    for each in _branches(schema, node):
        kind = each.get("type")
        if "const" in each:
            return each["const"]
        if "exclusiveMinimum" in each:
            return each["exclusiveMinimum"] + 1
        if "minimum" in each:
            return each["minimum"]
        if kind == "array" and depth:
            return [_of_type(schema, each["items"], title, depth - 1)]
        if kind == "object" and each.get("properties") and depth:
            own, owner = each["properties"], each.get("title")
            names = each.get("required") or list(own)[:1]
            if "kind" in own and "const" in own["kind"]:
                names = dict.fromkeys(["kind", *names])
            return {name: _of_type(schema, own[name], f"{owner}.{name}", depth - 1) for name in names}
        if kind == "object" and isinstance(each.get("additionalProperties"), dict) and depth:
            return {"name": _of_type(schema, each["additionalProperties"], title, depth - 1)}
    raise KeyError(f"{title}: no example is known; write one into EXAMPLES")
