"""The line that heads what a run prints: scenario, model, deployment, cost, and what came by default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from batchsim.base.units import format_duration
from batchsim.cost.base import Cost
from batchsim.cost.presets import ways_there
from batchsim.cost.scaled import Scaled
from batchsim.deployment.catalog import read_model
from batchsim.drive.fleet.sleeping import SleepConfig
from batchsim.scenario import Scenario
from batchsim.scenario.deployment_config import ENGINES, DeploymentConfig
from batchsim.scenario.setup import Setup
from batchsim.workload.workload_config import Frontend


def heading(setup: Setup) -> str:
    """Scenario, model, GPU and cost in one line; no model where its shape plays no part."""
    gpu = "" if setup.gpu is None else f" on {setup.gpu.name}" + (f" × {setup.num_gpus}" if setup.num_gpus > 1 else "")
    deployed = setup.deployment_text
    dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(setup.model.dtype, setup.model.dtype)
    says_types = isinstance(setup.scenario.cost, DeploymentConfig)
    name = setup.model.name if says_types else f"{setup.model.name} {dtype}"
    model, cost = f"{name}{gpu}", setup.cost_text
    if setup.groups:
        model, deployed, cost = name, "", _describe_replicas(setup)
    model = model if setup.shape_counts else ""
    facts = (
        setup.scenario.name,
        model,
        deployed,
        cost,
        _varied(setup.scenario),
        *_doubts(setup),
        _others_kernels(setup),
        *_presets(setup),
        _hidden_host(setup),
        f"measured at: {measured_at(setup)}",
        *dict.fromkeys(_defaults(setup.scenario)),
    )
    return " · ".join(filter(None, facts))


def kv_text(setup: Setup) -> str:
    """The KV memory of an engine, of several replicas that of each group, with what it is made of."""
    names = _joined((engine_kv_text(group.setup), group.name) for group in setup.groups)
    return "; ".join(f"{named} {text}".strip() for text, named in names.items()) or engine_kv_text(setup)


def engine_kv_text(setup: Setup) -> str:
    """The KV memory of one engine, with the tier beyond its GPU if it has one."""
    return " · ".join(str(each) for each in (setup.kv, setup.tier) if each is not None)


def _joined(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The names of which each text is, by text, as in `a, b and c`."""
    names: dict[str, list[str]] = {}
    for text, name in named:
        names.setdefault(text, []).append(name)
    return {text: ", ".join(each[:-1]) + " and " * (len(each) > 1) + each[-1] for text, each in names.items()}


def _varied(scenario: Scenario) -> str:
    """That GPUs and costs differ by the value of the key that varies, where they may; those named are of the first."""
    varied = scenario.vary_key.split(".")[0] in ("deployment", "cost", "model")
    return f"GPU and cost are those of the first value of {scenario.vary_key}" if varied else ""


def _doubts(setup: Setup) -> Iterator[str]:
    """What is known against the step times of values that vary, beyond what the cost of `setup` says itself."""
    for each in [group.setup for group in setup.groups] or [setup]:
        named = set(_doubts_of(each.cost))
        for scenario in each.scenario.variants if _varied(each.scenario) else ():
            if isinstance(cost := scenario.cost, DeploymentConfig):
                doubts = dict.fromkeys(_doubts_of(cost.build(read_model(scenario.model_path))))
                yield from (f"! {doubt}" for doubt in doubts if doubt not in named)
                named |= {*doubts}


def _doubts_of(cost: Cost) -> tuple[str, ...]:
    return () if cost.profile is None else cost.profile.cautions


def _others_kernels(setup: Setup) -> str:
    """Which policies are of another engine than one with whose kernels their steps are timed."""
    labels_of: dict[str, list[str]] = {}
    for scenario in _deployed(setup):
        engine = scenario.cost.engine if isinstance(scenario.cost, DeploymentConfig) else ""
        others = [spec.label for spec in scenario.specs if engine and spec.kind in ENGINES and spec.kind != engine]
        labels_of.setdefault(engine, []).extend(others)
    return " · ".join(
        f"{', '.join(dict.fromkeys(labels))}: with {engine}'s kernels" for engine, labels in labels_of.items() if labels
    )


def _deployed(setup: Setup) -> Iterator[Scenario]:
    """The scenario of each group of replicas and of each value that varies; the one that there is without them."""
    for each in [group.setup for group in setup.groups] or [setup]:
        yield from each.scenario.variants or (each.scenario,)


def _presets(setup: Setup) -> Iterator[str]:
    """The presets of the deployment's engine in the modes that policies have, with what they rest on, and whether the
    kernels were measured in the engine; with a key that varies, those of its first value."""
    names: dict[str, None] = {}
    kernels: dict[str, None] = {}
    for each in [group.setup for group in setup.groups] or [setup]:
        profile = (each.cost.cost if isinstance(each.cost, Scaled) else each.cost).profile
        for number, scenario in enumerate(each.scenario.variants or (each.scenario,)):
            if not isinstance(cost := scenario.cost, DeploymentConfig):
                continue
            presets = [preset for spec in scenario.specs if (preset := cost.preset(spec.config)) is not None]
            names |= dict.fromkeys(map(str, presets))
            if profile is not None and not number:
                kernels |= dict.fromkeys(preset.kernels_text(profile) for preset in presets)
    yield from names
    yield from kernels


def _hidden_host(setup: Setup) -> str:
    """A note that the overlap of the host's part of steps with the device was not measured, with the policies for which
    that counts; "" if none."""
    ahead: list[str] = []
    for each in [group.setup for group in setup.groups] or [setup]:
        for scenario in each.scenario.variants or (each.scenario,):
            loops = {spec.label: spec.config.traits.loop.over(each.cost.stages) for spec in scenario.specs}
            ahead += [label for label, loop in loops.items() if loop.is_ahead and not each.cost.overlap_known]
    return f"{', '.join(dict.fromkeys(ahead))}: host all beside the device, not measured" if ahead else ""


def _defaults(scenario: Scenario) -> Iterator[str]:
    """The defaults that policies have because of the GPU, by GPU where that is what the scenario varies."""
    for each in scenario.variants or (scenario,):
        owners: dict[str, list[str]] = {}
        for spec in each.specs:
            knobs = ", ".join(f"{name} {value}" for name, value in spec.by_device.items())
            owners.setdefault(knobs, []).append(spec.label)
        owners.pop("", None)
        if each.device is not None and owners:
            texts = (f"{', '.join(dict.fromkeys(labels))} {knobs}" for knobs, labels in owners.items())
            yield f"by default on {each.device.name}: {'; '.join(texts)}"


def _describe_replicas(setup: Setup) -> str:
    """How many replicas of which kind, at what cost, behind which router."""
    config = setup.scenario.file.replicas
    assert config is not None, "asked of several replicas"
    kinds = []
    if config.are_models:
        return _describe_models(setup, config.sleep)
    for group in setup.groups:
        gpu = "" if group.setup.gpu is None else group.setup.gpu.name
        gpu += f" × {group.setup.num_gpus}" if group.setup.num_gpus > 1 else ""
        count = f"{group.count}" if config.autoscaler is None else f"{config.autoscaler.min} to {config.autoscaler.max}"
        noun = "replica" if count == "1" else "replicas" if config.lockstep is None else "ranks in lockstep"
        what = " ".join(filter(None, (count, group.name, noun, f"on {gpu}" if gpu else "")))
        kinds.append(" · ".join(filter(None, (what, group.setup.deployment_text, group.setup.cost_text))))
    varied = setup.scenario.vary_key.startswith("replicas.router")
    router = "" if config.router is None or varied else f" · router {_name(config.router)}"
    scaler = "" if config.autoscaler is None else f" · autoscaler by {_name(config.autoscaler)}"
    times = "once" if len(config.failures) == 1 else f"{len(config.failures)} times"
    lost = "sent again" if config.lost == "retry" else "lost"
    fails = f" · a replica fails {times}, what it held is {lost}" if config.failures else ""
    return " · ".join(kinds) + router + scaler + fails


def _describe_models(setup: Setup, sleep: SleepConfig | None) -> str:
    """Which models share which GPU, and how their weights move where they take turns."""
    config, kinds = setup.scenario.file.replicas, []
    assert config is not None and config.groups is not None, "models that share a GPU are groups"
    for own in (False, True):
        groups = [group for group in setup.groups if config.groups[group.name].own_gpu == own]
        costs = _joined(
            (_describe_engine(group.setup, config.groups[group.name].model), group.name) for group in groups
        )
        kinds += [f"{names}{' with a GPU of its own' * own}: {text}" for text, names in costs.items()]
    count = f"{sum(not group.own_gpu for group in config.groups.values())} models"
    if sleep is None:
        return " · ".join([f"{count}: side by side, their steps one after another", *kinds])
    disk = "" if sleep.disk is None else f", disk {sleep.disk / 1e9:g} GB/s"
    where = f"one awake at a time, sleep level {sleep.level}, link {sleep.link / 1e9:g} GB/s{disk}"
    least = f", awake {format_duration(sleep.min_awake)} at least" if sleep.min_awake else ""
    return " · ".join([f"{count}: {where}{least}", *kinds])


def _describe_engine(own: Setup, model: str | None) -> str:
    """The model where it is not the scenario's, the GPU and the cost of an engine."""
    gpu = "" if own.gpu is None else f"{own.gpu.name}" + (f" × {own.num_gpus}" if own.num_gpus > 1 else "")
    return " · ".join(filter(None, (model, gpu, own.deployment_text, own.cost_text)))


def _name(config: object) -> str:
    """The kind of a router or an autoscaler; of a user's own the name of its class."""
    return str(getattr(config, "kind", type(config).__name__))


def measured_at(setup: Setup) -> str:
    """Where latencies are taken: at the engine, or at the client where the scenario models the way there."""
    frontend = setup.scenario.file.workload.frontend
    for engine, (request_ns, per_token_ns, per_stream_ns) in ways_there().items():
        if frontend == Frontend(request_ns, per_token_ns, per_stream=per_stream_ns):
            return f"client, front end by the preset of {engine}"
    return "engine" if frontend == Frontend() else "client, front end modelled"
