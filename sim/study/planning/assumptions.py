"""What a plan takes for granted: every input, rule and simplification behind its numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from batchsim.results.fleet_inputs import energy_words
from batchsim.results.heading import measured_at
from batchsim.results.provenance import provenance
from batchsim.scenario.command_lines.engines import command_of, command_of_side
from batchsim.scenario.command_lines.lines import Written
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.study.planning.batches import BATCHES
from batchsim.study.planning.demand import minutes
from batchsim.study.planning.fleet_search import FIRST_GUESS, LIGHT
from batchsim.study.planning.make import CURVE, Planned
from batchsim.study.planning.money import HOURS_A_MONTH
from batchsim.study.planning.probe import PLANNED, Ask, GpuGroup

COMMAND = "command on"
"""What the row begins with that has the command line of a deployment; the name of its GPU follows."""
UNSAID = "not in the command on"
"""What the row begins with that says what that command line leaves out; the name of its GPU follows."""
DOUBT = "against the step times of"
"""What the row begins with that says why they are not to be trusted; the name of the GPU follows."""


def assumptions(planned: Planned) -> list[dict[str, Any]]:
    """Rows of everything that a plan takes for granted, from the inputs to the machine."""
    demand, plan = planned.demand, planned.demand.plan
    scenario = demand.scenario
    file, made = scenario.file, provenance()
    rows: list[tuple[str, str]] = [
        ("traffic", _told_traffic(planned)),
        ("requests a second", "those of the recording" if demand.slice_ns is not None else
         "as stated, in costs, goodput and the rest of the traffic; those drawn differ by chance: drawn_rps in"
         " probes.csv"),
        ("lengths of requests", _told_lengths(planned)),
        ("busiest window", demand.window + demand.about),
        ("before the window", f"{minutes(file.workload.warmup)} of the traffic, simulated and not counted"
         if file.workload.warmup else "nothing: the engines start empty"),
        ("after the window", f"requests open {minutes(file.workload.drain)} after it are missed"
         if file.workload.drain else "every request runs to its end"),
        ("objective", f"{file.slo}; each class its own where it has one; of the {demand.counted} all that are offered"
         " count"),
        ("holds", f"the lower end of the 95 % interval of the {demand.counted} within the SLO meets it, for every"
         f" class; it is never above what as many {demand.counted} without a miss would show"
         + ("; and the queue of most seeds is not seen to grow as long as requests come, which only"
            " a window shows that is four times as long as a request" if demand.is_steady else "")),
        ("interval", _told_interval(planned)),
        ("router", f"{', '.join(f'{name} {value}' for name, value in asdict(plan.router).items())}; it takes no time"
         " and never fails"),
        ("replicas", "alike, each an engine of its own, all simulated together; at most"
         f" {plan.max_replicas} of a kind; none fails unless said"),
        *_told_pools(planned),
        ("measured at", measured_at(planned.book.setup(Ask(planned.groups[0])))),
        ("month", f"{HOURS_A_MONTH:g} hours, each like the planned traffic; all GPUs are paid for all the time"),
        ("other hours", _told_parts(planned)),
        ("too few", "replicas that were not shown to hold the planned traffic are taken, untried, not to hold with more"
         " traffic, denser bursts, longer prompts or longer steps"),
        ("search", "starts with one replica: tasks cannot be piled up, to see what saturates it"
         if file.workload.tasks is not None else
         f"starts where a replica has {100 * FIRST_GUESS:g} % of its saturation, what it completes when"
         f" all requests wait already; an empty engine is tried at {100 * LIGHT:g} %"),
    ]  # fmt: skip
    for name in dict.fromkeys(group.gpu for group in planned.groups):
        group = _shown(planned, name)
        setup, offer = planned.book.setup(Ask(group)), planned.book.offer(group)
        gpus = f" a GPU, {offer.gpus} in a replica" if offer.gpus > 1 else ""
        rows.append((f"price of {name}", f"{plan.currency} {offer.price:g} an hour{gpus}: the scenario's number"))
        if plan.host_memory_price is not None:
            gb, price = planned.book.host_bytes(group) / 1e9, f"{plan.currency} {plan.host_memory_price:g} a GB a month"
            rows.append((f"memory of hosts for KV on {name}", f"{gb:g} GB a replica at {price}: the scenario's number"))
        elif setup.tier is not None:
            rows.append((f"memory of hosts for KV on {name}", f"{setup.tier}; its price is held by that of the GPU"))
        if setup.deployment_text:
            rows.append((f"deployment on {name}", setup.deployment_text))
        if isinstance(setup.scenario.cost, DeploymentConfig):
            for written in commands_for(planned, group):
                rows.append((f"{COMMAND} {name}", written.line))
                rows += [(f"{UNSAID} {name}", ", ".join(written.unsaid))] if written.unsaid else []
        rows.append((f"step times of {name}", setup.cost_text.removeprefix("cost: ")))
        error = setup.cost_error
        rows.append((f"their error on {name}", f"{error}: {error.source}"))
        rows.append((f"KV memory of {name}", str(setup.kv)))
        profile = setup.cost.profile
        rows += [(f"{DOUBT} {name}", doubt) for doubt in (profile.cautions if profile else ())]
        rows.append((f"energy of {name}", f"{energy_words(setup)}; while steps run, idle is left out"))
    if plan.energy_price is not None:
        price = f"{plan.currency} {plan.energy_price:g} a kWh: the scenario's number"
        rows.append(("price of energy", f"{price}, on top of the prices of GPUs, for the energy of steps alone"))
    for label, knobs in scenario.plain["policies"].items():
        rows.append((f"policy {label}", json.dumps(knobs, ensure_ascii=False) if knobs else "its defaults"))
    rows += [
        ("seeds", ", ".join(str(seed) for seed in planned.book.seeds(PLANNED))),
        ("changed by --set", "; ".join(scenario.overrides) or "nothing"),
        ("scenario", scenario.source),
        ("batchsim", f"{made['packages']['batchsim']}, commit {made['commit'] or 'unknown'}, code {made['code']}"),
        ("machine", f"{made['machine']}, Python {made['python']}"),
    ]
    return [{"what": what, "assumed": assumed} for what, assumed in rows]


def commands_for(planned: Planned, group: GpuGroup) -> list[Written]:
    """The command line that starts a replica of a group under its policy, or those of a prefill and of a decode engine.
    ScenarioError as `command_of` raises it."""
    setup = planned.book.setup(Ask(group))
    if group.is_apart:
        return [command_of_side(side.setup.scenario, side.name, setup.scenario.plain) for side in setup.groups]
    alone = planned.demand.plan.free is not None  # a search makes a scenario of the group's policy alone
    return [command_of(setup.scenario, None if alone else group.policy)]


def _told_pools(planned: Planned) -> list[tuple[str, str]]:
    if not any(group.is_apart for group in planned.groups):
        return []
    written = planned.demand.scenario.plain["plan"]["transfer"]
    transfer = ", ".join(f"{name} {value}" for name, value in written.items())
    return [
        ("pools", "where prefill and decode are apart a replica is a set of engines; of several sets those of a side"
         f" are one pool, taken in turn; transfers: {transfer}; one replica more or less is a whole set")
    ]  # fmt: skip


def _shown(planned: Planned, gpu: str) -> GpuGroup:
    """Of the groups on a kind of GPU the one that is recommended, or else the cheapest that holds, or the first."""
    first = next(i for i, group in enumerate(planned.groups) if group.gpu == gpu)
    favourite = next((i for i in planned.favourites if planned.groups[i].gpu == gpu), first)
    return planned.groups[favourite]


def _told_traffic(planned: Planned) -> str:
    demand, plan = planned.demand, planned.demand.plan
    growth = ""
    if plan.growth.months:
        growth = f", grown by {100 * plan.growth.per_month:g} % a month for {plan.growth.months} months"
    if plan.target.trace is not None:
        shift = minutes(plan.target.trace.shift)
        return (
            f"{plan.target.trace.factor:g} times the trace{growth}: {demand.peak:.4g} copies, each moved by a random"
            f" time of up to {shift} either way, so that bursts do not line up; of the last a random share of rows"
        )
    if plan.target.diurnal is not None:
        return f"a day with a peak of {plan.target.diurnal.peak:g} requests/s{growth}, drawn as the scenario says"
    return f"{plan.target.rate:g} requests/s at all hours{growth}, drawn as the scenario says"


def _told_lengths(planned: Planned) -> str:
    """Mean tokens of the planned traffic's requests, of the first group that was simulated."""
    simulated = (probe.results for probe in planned.book.probes() if probe.ask.change == PLANNED and probe.results)
    if not (results := next(simulated, ())):
        return "not known: no group could be simulated"
    prompt, output = (
        np.mean([result["workload"][f"mean_{part}_tokens"] for result in results]) for part in ("prompt", "output")
    )
    return f"on average {prompt:,.0f} prompt and {output:,.0f} output tokens, as simulated"


def _told_interval(planned: Planned) -> str:
    if planned.book.by_batches(PLANNED):
        return f"over {BATCHES} stretches of the window: one recording has no seeds; it says nothing of other days"
    if planned.demand.slice_ns is not None:
        return "over seeds, each with other shifts of the copies of one trace; it says nothing of other days"
    return "over seeds, each with other requests of the same laws"


def _told_parts(planned: Planned) -> str:
    if planned.demand.is_flat:
        return "like the busiest window"
    parts = ", ".join(f"{100 * part:g} %" for part in CURVE)
    return (
        f"not simulated one by one: read off a line through the recommended group at {parts}, 100 % and more of the"
        " peak's traffic; below the lowest as there"
    )
