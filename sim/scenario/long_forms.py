"""What a scenario writes in short, written out before it is checked, and what --set changes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchsim.base.errors import ScenarioError, nearest, shown
from batchsim.base.plain import value_at
from batchsim.cost.kinds import long_form
from batchsim.deployment.hub import apart, is_id
from batchsim.scenario.document import MAX_DEPTH, TEXTS, Document, read_document
from batchsim.scenario.document import Path as Keys
from batchsim.scenario.pools_forms import KEYS, decode_is_the_scenarios, rewritten, take_pools
from batchsim.scenario.rank_forms import take_ranks

if TYPE_CHECKING:
    from batchsim.deployment.log_lines import Logged

_TIERS = ("kv", "tiers")
"""The list that --set may begin: its first tier is stated by the key of one size."""
_DEPLOYMENT = "{engine: vllm, gpu: h100_sxm, tp: 4}"  # as an example


def override(document: Document, text: str) -> None:
    """Applies one `a.b=value` of --set to the document."""
    keys, equals, value = text.partition("=")
    path = tuple(keys.strip().split("."))
    if not equals or not all(path):
        raise ScenarioError(f"--set {text}: not of the form key.key=value. Write for example --set seeds=1.")
    if len(path) > MAX_DEPTH:
        raise ScenarioError(f"--set {text}: nested deeper than {MAX_DEPTH} levels. No scenario needs that.")
    parsed = read_document(value, f"--set {text}").value
    if path[-1] in TEXTS and isinstance(parsed, int | float):
        parsed = value.strip()
    if len(path) > 1 and path[0] == document.renamed.get(("replicas",)) and path[1] not in KEYS:
        raise ScenarioError(f"--set {text}: {path[0]} has no {path[1]}. {nearest(path[1], KEYS)}")
    path = _unwritten(document, rewritten(document.value, path))
    keep_alike = decode_is_the_scenarios(document.value)
    at: Any = document.value
    for i, key in enumerate(path[:-1]):
        at = _below(at, key)
        place = path[i + 1]
        if path[: i + 1] == _TIERS and at in ({}, []):
            at = document.value["kv"]["tiers"] = [{}] if place == "0" else []
        if isinstance(at, list) and not (place.isdecimal() and int(place) < len(at)):
            of = f"{'.'.join(path[: i + 1])} is a list of {len(at)}, and {place} is none of 0 to {len(at) - 1}"
            of = of if at else f"{'.'.join(path[: i + 1])} is empty"
            raise ScenarioError(f"--set {text}: {of}. {'Write one of these, or s' if at else 'S'}et it as a whole.")
        if not isinstance(at, dict | list):
            raise ScenarioError(f"--set {text}: {'.'.join(path[: i + 1])} has no keys. Set it as a whole.")
    place: Any = int(path[-1]) if isinstance(at, list) else path[-1]
    at[place] = parsed
    if keep_alike:
        keep_alike()
    document.overrides[path] = f"--set {text}"
    for names in (document.renamed, document.named):
        for name in [each for each in names if each[: len(path)] == path]:
            del names[name]


def _below(at: Any, key: str) -> Any:
    """What stands at `key` of a mapping, in which a missing one is made, or at that place of a list."""
    if isinstance(at, list):
        return at[int(key)]
    if at.get(key) is None:
        at[key] = {}
    return at[key]


def _unwritten(document: Document, path: tuple[str, ...]) -> tuple[str, ...]:
    """`path` with the keys that a renamed one stands under; a renamed mapping that is to be replaced gives way."""
    for renamed, key in list(document.renamed.items()):
        written = (*renamed[:-1], key)
        if path == written:
            del document.at(renamed[:-1])[renamed[-1]], document.renamed[renamed]
        elif path[: len(written)] == written:
            return (*map(str, renamed), *path[len(written) :])
    return path


def lengthen(document: Document) -> None:
    """Writes every `deployment` as a cost of that kind, and every `cost: NAME` and `router: NAME` out, so that --set
    can change a part of it."""
    take_pools(document)
    take_ranks(document)
    _take_hub(document)
    for path, owner in costs(document.value):
        _take_deployment(document, path, owner)
        cost = owner.get("cost")
        if isinstance(cost, str):
            try:
                owner["cost"] = long_form(cost)
            except ScenarioError as error:
                raise ScenarioError(f"{document.where((*path, 'cost'))}: {error}") from None
    for key in ("replicas", "plan"):
        block = document.value.get(key)
        if isinstance(block, dict) and isinstance(block.get("router"), str):
            block["router"] = {"kind": block["router"]}
    _take_frontend(document)
    _take_no_output(document)


def _take_hub(document: Document) -> None:
    """Writes `model: {hub: org/name, revision: R}` as the id `org/name@R`."""
    model = document.value.get("model")
    if not isinstance(model, dict) or not model:
        return
    where, hub, revision = document.where(("model",)), model.get("hub"), model.get("revision")
    if unknown := [str(key) for key in model if key not in ("hub", "revision")]:
        raise ScenarioError(f"{where}: model has no {unknown[0]}. {nearest(unknown[0], ('hub', 'revision'))}")
    if hub is None:
        raise ScenarioError(f"{where}: model.hub is missing. Write a Hugging Face id, like {{hub: Qwen/Qwen3-8B}}.")
    if not (isinstance(hub, str) and is_id(hub)):
        raise ScenarioError(f"{where}: model.hub is {shown(hub)}, no Hugging Face id. Write one, like Qwen/Qwen3-8B.")
    if revision is not None and apart(f"{hub}@{revision}") != (hub, revision):
        raise ScenarioError(f"{where}: model.revision is {shown(revision)}. Write a branch, tag or commit, like main.")
    document.value["model"] = hub if revision is None else f"{hub}@{revision}"


def _take_no_output(document: Document) -> None:
    """Writes `output: 0`, of pooling models, out as a law of lengths."""
    workload = document.value.get("workload")
    classes = workload.get("classes") if isinstance(workload, dict) else None
    for owner in (workload, *(classes.values() if isinstance(classes, dict) else ())):
        lengths = owner.get("lengths") if isinstance(owner, dict) else None
        if isinstance(lengths, dict) and lengths.get("output") == 0 and not isinstance(lengths["output"], bool):
            lengths["output"] = {"kind": "none"}


def _take_frontend(document: Document) -> None:
    """Writes `workload.frontend: ENGINE` out: the way from a client to that engine, as its preset has it."""
    workload = document.value.get("workload")
    if not isinstance(workload, dict) or not isinstance(name := workload.get("frontend"), str):
        return
    from batchsim.cost.presets import ways_there

    ways = ways_there()
    if name not in ways:
        where = document.where(("workload", "frontend"))
        raise ScenarioError(
            f"{where}: workload.frontend is {shown(name)}. {nearest(name, ways)} Or write it out: {{request: 13ms}}."
        )
    keys = ("request", "per_prompt_token", "per_stream")
    workload["frontend"] = {key: f"{ns}ns" for key, ns in zip(keys, ways[name], strict=True) if ns}


def read_logs(document: Document, folder: Path) -> None:
    """Writes `tokens`, or `memory`, in the place of every `kv.log`, a path from the scenario's folder or from the
    current one, and `source`, which names it."""
    for path, owner in costs(document.value):
        kv = owner.get("kv")
        if not isinstance(kv, dict) or not isinstance(log := kv.get("log"), str) or not log:
            continue
        from batchsim.deployment.startup_log import Wanted, read_kv_log

        try:
            for key in ("tokens", "memory", "utilisation"):
                if kv.get(key) is not None:
                    raise ScenarioError(f"kv.{key} is not read beside kv.log, which says it. Write one of them.")
            path_of_log = folder / log if (folder / log).is_file() else Path(log)
            cost = next((block for key in ("deployment", "cost") if isinstance(block := owner.get(key), dict)), {})
            size = kv.get("block_size")
            wanted = Wanted(
                model=_model_of(document, folder),
                block_size=size if isinstance(size, int) and size > 0 else 16,
                drafts=_drafts(document),
                max_model_len=most if type(most := document.value.get("max_model_len")) is int else None,
                max_num_seqs=_max_num_seqs(document),
            )
            if engine := cost.get("engine"):
                degrees = {name: cost.get(name, 1) for name in ("tp", "pp")}
                version = cost.get("version")
                of = {"engine": str(engine), "kv": _kv_of(cost), **degrees}
                wanted = replace(wanted, **of, version=str(version) if version else "")
            logged = read_kv_log(path_of_log, wanted)
            kv |= {**_room_of(logged), "source": logged.source}
            del kv["log"]
        except ScenarioError as error:
            raise ScenarioError(f"{document.where((*path, 'kv'))}: {error}") from None


def _room_of(logged: Logged) -> dict[str, Any]:
    """The keys of `kv` that say what a log does."""
    if logged.layout is not None:
        groups = [{key: value for key, value in asdict(group).items() if value} for group in logged.layout.groups]
        return {"groups": groups, "num_blocks": logged.num_blocks, "block_bytes": logged.layout.block_bytes}
    if logged.pools is not None:
        pools = {"window": logged.pools.window, "window_tokens": logged.pools.window_tokens}
        return {"tokens": logged.tokens, "pools": pools}
    return {"tokens": logged.tokens} if logged.tokens is not None else {"memory": f"{logged.memory_bytes}B"}


def _max_num_seqs(document: Document) -> int | None:
    """The most requests that a policy runs at once; None where any of them does not state it."""
    policies = document.value.get("policies")
    if not isinstance(policies, dict) or not policies:
        return None
    stated = [
        next((policy[key] for key in ("max_running_requests", "max_num_seqs") if type(policy.get(key)) is int), None)
        for policy in policies.values()
        if isinstance(policy, dict)
    ]
    known = [number for number in stated if number is not None]
    return max(known) if len(known) == len(policies) else None


def _drafts(document: Document) -> bool | None:
    """Whether a policy drafts with a model; None where policies are not written out."""
    policies = document.value.get("policies")
    if not isinstance(policies, dict):
        return None
    configs = [policy.get("speculative_config") for policy in policies.values() if isinstance(policy, dict)]
    return any(isinstance(config, dict) and config.get("method") != "ngram" for config in configs)


def _model_of(document: Document, folder: Path) -> str:
    """The scenario's model, a file's path from the current folder; "" where none is known by that name."""
    model = document.value.get("model")
    if not isinstance(model, str) or not model:
        return ""
    from batchsim.deployment.models import read_model

    model = str(folder / model) if os.path.exists(folder / model) else model
    try:
        read_model(model)
    except ScenarioError:
        return ""  # which is refused where the model is read
    return model


def _kv_of(deployment: dict[str, Any]) -> str:
    """The type of KV that a deployment states; `auto` where it leaves that to the engine."""
    stated = deployment.get("kv")
    return stated if isinstance(stated, str) and stated else "auto"


def _take_deployment(document: Document, path: Keys, owner: dict[str, Any]) -> None:
    """Moves the `deployment` of `owner`, which stands at `path`, to `cost`. ScenarioError where there is a cost too."""
    block, where = owner.get("deployment"), document.where((*path, "deployment"))
    if owner.get("cost") is None and block is not None:
        name = ".".join(map(str, (*path, "deployment")))
        if not isinstance(block, dict):
            raise ScenarioError(f"{where}: {name} is {shown(block)}. Write its keys: {_DEPLOYMENT}.")
        if "kind" in block:
            raise ScenarioError(f"{where}: {name}.kind is not a field of {name}. Leave it out: {_DEPLOYMENT}.")
        document.rename((*path, "deployment"), "cost")
        block["kind"] = "deployment"
    elif block is not None:
        raise ScenarioError(
            f"{where}: deployment and cost are both given, and a deployment says what steps cost. Keep one of them."
        )
    for key in ("deployment", "cost"):
        if key in owner and owner[key] is None:  # which says nothing
            del owner[key]


def name_policy(plain: dict[str, Any]) -> None:
    """Writes the policy of the deployment's engine where no policies are given."""
    cost = plain.get("cost")
    if "policies" not in plain and isinstance(cost, dict) and cost.get("kind") == "deployment":
        engine = cost.get("engine")
        plain["policies"] = {engine: {}} if isinstance(engine, str) else {}


def costs(plain: dict[str, Any]) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """Each mapping that may hold a `cost`, after its keys: the scenario, its plan's GPUs, its replicas' groups."""
    yield (), plain
    for key, kinds in (("plan", "gpus"), ("replicas", "groups")):
        entries = value_at(plain, (key, kinds))
        if isinstance(entries, dict):
            for name, entry in entries.items():
                if isinstance(entry, dict):
                    yield (key, kinds, name), entry


def place_files(cost: Any, folder: Path) -> None:
    """Rewrites the paths of a profile and of draft models to start from the current folder, where their files stand
    beside the scenario."""
    if not isinstance(cost, dict):
        return
    draft = cost.get("draft")
    drafters = list(draft.values()) if isinstance(draft, dict) else []
    for owner, key in ((cost, "profile"), *((drafter, "model") for drafter in drafters if isinstance(drafter, dict))):
        path = owner.get(key)
        if isinstance(path, str) and path.endswith(".json") and os.path.isfile(folder / path):
            owner[key] = str(folder / path)
