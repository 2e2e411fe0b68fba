"""The recommended group as a Kubernetes manifest: a Deployment with its number of replicas, and a Service before
them."""

from __future__ import annotations

import json
import math
import re
import shlex

import yaml

from batchsim.base.errors import ScenarioError
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.study.planning.assumptions import commands_for
from batchsim.study.planning.make import Planned
from batchsim.study.planning.pool_manifests import Side, pool_manifests
from batchsim.study.planning.probe import Ask

PORT = 8000
_IMAGES = {"vllm": "vllm/vllm-openai"}
"""By engine, the image whose entry point is its server, as its documentation names it; the version is its tag."""
_HEADS = {"vllm": ("vllm", "serve")}
"""The words of the command line that the image's entry point says already."""


def manifest(planned: Planned) -> str:
    """The manifest as YAML; "" where nothing holds, prefill and decode are apart, which a Service does not join, or the
    recommended GPU is no deployment of an engine with an image.

    Its router is Kubernetes' own, which balances connections: a router that the plan assumed is not part of it.
    """
    held = None if planned.best is None else planned.held(planned.best)
    if held is None or held.ask.group.is_apart:
        return ""
    setup = planned.book.setup(Ask(planned.groups[planned.best or 0]))
    config, group = setup.scenario.cost, held.ask.group
    if not isinstance(config, DeploymentConfig) or config.engine not in _IMAGES:
        return ""
    try:
        written = commands_for(planned, planned.groups[planned.best or 0])[0]
    except ScenarioError:
        return ""
    words = shlex.split(written.line)[len(_HEADS[config.engine]) :]
    name = f"{config.engine}-{_label(group.gpu)}"
    unsaid = [f"not said by a flag: {text}" for text in written.unsaid]
    notes = [
        f"{group.replicas} × {config.num_gpus} GPU ({group.gpu}); simulated behind the router {_router(planned)},"
        " while a Service balances connections: put that router before the pods",
        *(
            [f"a version of {config.engine} is not stated: name the tag that was measured"]
            if not config.version
            else []
        ),
        *unsaid,
    ]
    container = {
        "name": config.engine,
        "image": f"{_IMAGES[config.engine]}:{_tag(config.version)}",
        "args": [*words, "--port", str(PORT)],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}},
        "resources": {"limits": {"nvidia.com/gpu": config.num_gpus}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pods = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "replicas": group.replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pods},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": PORT, "targetPort": PORT}]},
    }
    head = "".join(f"# {note}\n" for note in notes)
    return head + yaml.safe_dump_all((deployment, service), sort_keys=False, width=math.inf)


def manifests_of_pools(planned: Planned) -> dict[str, str]:
    """The manifests of a recommended group whose prefill and decode are apart, by their tables; {} for any other, or
    where no deployment of an engine is recommended."""
    held = None if planned.best is None else planned.held(planned.best)
    if held is None or not held.ask.group.is_apart:
        return {}
    try:
        setup = planned.book.setup(held.ask)
        written = commands_for(planned, held.ask.group)
    except ScenarioError:
        return {}
    configs = [group.setup.scenario.cost for group in setup.groups]
    sides = [
        Side(group.name, group.count, config.num_gpus, config.tp, command.line, command.unsaid)
        for group, config, command in zip(setup.groups, configs, written, strict=True)
        if isinstance(config, DeploymentConfig)
    ]
    engines = {config.engine for config in configs if isinstance(config, DeploymentConfig)}
    router = setup.scenario.file.replicas.chosen_router.kind if setup.scenario.file.replicas is not None else ""
    if len(engines) != 1 or len(sides) < len(configs):
        return {}
    return pool_manifests(engines.pop(), sides, router)


def _router(planned: Planned) -> str:
    group = planned.groups[planned.best or 0]
    chosen = dict(group.knobs).get("router")
    return planned.demand.plan.router.kind if chosen is None else str(json.loads(chosen)["kind"])


def _label(name: str) -> str:
    """A name as Kubernetes takes it: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def _tag(version: str) -> str:
    return f"v{version}" + ".0" * (2 - version.count(".")) if version else "latest"
