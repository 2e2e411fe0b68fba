"""The text of the scenario that `batchsim init` writes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchsim.base.errors import ScenarioError

if TYPE_CHECKING:
    from batchsim.scenario.command_lines.flags import Keys
    from batchsim.workload.traces.trace_config import TraceConfig

_TP = (1, 2, 4, 8)  # GPUs of one server
_HIGHEST_RPS = (8.0, 4.0, 2.0, 1.0)  # the highest of a starter's rates; the others are a half and a quarter of it

_PROMPT, _OUTPUT = 8000, 1024  # tokens: the longest prompt of a starter, and the most that is asked for

_SYNTHETIC = """\
# Question: {question}
# Source:   none: rates and lengths are examples, replace them by what you measured
# Expect:   {expect}
model: {model}  # catalog name (batchsim catalog), or the path of a config.json
{cost}
workload:
  arrivals: {{kind: poisson, mean_rate: {middle:g}/s}}  # or gamma, on_off, constant, closed_loop, all_at_once, trace
  lengths:  # or the very requests in order: {{kind: list, prompt: [1000, 200], output: [100, 50]}}
    prompt: {{kind: lognormal, mean: {mean}, cv: 1, max: {prompt}}}  # tokens
    output: {{kind: lognormal, mean: {written}, cv: 1, max: {most}}}
  output_cap: {cap}  # what clients ask for at most
  duration: 2min
  warmup: 20s  # left out of the latencies
{policies}load: {{mean_rate: [{low:g}/s, {middle:g}/s, {high:g}/s]}}  # one simulation a policy, load and seed
slo: ttft<1s & tpot<50ms @ 99%
seeds: 3
"""

_TRACE = """\
# Question: how do these policies serve the recorded requests, at their own rate and at others?
# Source:   {path}: {rows} requests{rate}
# Expect:   not known before it is run
model: {model}  # catalog name (batchsim catalog), or the path of a config.json
{cost}
workload:
  arrivals: {arrivals}
{lengths}  trace:
{trace}  output_cap: {cap}  # what clients ask for at most; the longest output of the trace is {longest}
{end}{policies}{load}slo: ttft<1s & tpot<50ms @ 99%
seeds: {seeds}
"""

_LORAS = """\
  loras: {{count: {count}, popularity: {{kind: zipf, alpha: 1}}, rank: {rank}}}  # an example: write your adapters
lora_cost: {{step: 5%, per_adapter: 1%, disk: 2GB/s}}  # examples: measure yours
"""

_PLAN = """\
plan:  # batchsim plan: how many replicas of what is listed under gpus, and at what price
  target: {target}
  growth: {{per_month: 5%, months: 3}}
  window: {window}s  # of the traffic, which all replicas are simulated on together
  currency: $
  gpus:  # a line for each kind to choose from
    {gpu}: {{{offer}, price: 2.50/h}}  # an invented price of one GPU: write yours
  router: least_tokens
  max_replicas: 16
"""

_NOT_RUN = "not known before it is run"
_ASKED = {
    "question": "which of these policies holds the SLO up to which request rate?",
    "expect": "continuous batching keeps the SLO at each of these rates",
}

_KNOBS = "policies:  # batchsim policies lists all, with their knobs"
_POLICIES = f"""\
{_KNOBS}
  static: {{batch_size: 16, max_wait: 2s, respond: row_end}}
  continuous: {{max_num_seqs: 256, max_num_batched_tokens: 8192}}
"""


def starter_text(model: str, gpu: str, folder: Path, trace: TraceConfig | None, figures: dict[str, Any] | None) -> str:
    """The YAML text of a scenario for a file in `folder`; `figures` is the result of `inspect_trace` for `trace`.

    Without a trace the scenario is simulated here: its rates and its number of GPUs are such that its continuous
    batching keeps the SLO. ScenarioError if model or GPU is unknown, or no number of GPUs up to 8 serves the load or
    holds the longest request.
    """
    from batchsim.deployment.catalog import load_gpu, load_model
    from batchsim.deployment.deployment import Deployment

    if not _budgets(model, gpu):
        Deployment(load_model(model), load_gpu(gpu)).derive_kv()  # raises an error that says what memory is short
    common = {"model": _model_word(model, folder), "policies": _POLICIES}
    if trace is None or figures is None:
        return _synthetic(common, model, gpu, folder)
    common["cost"] = _cost_that_holds(model, gpu, figures["prompt_tokens"]["max"] + figures["output_tokens"]["max"])
    return _replayed(common, folder, trace, figures)


def deployed_text(
    keys: Keys, engine: str, gpu: str, folder: Path, trace: TraceConfig | None, figures: dict[str, Any] | None
) -> str:
    """The YAML text of a scenario of a deployment, by the flat `keys` of `batchsim.scenario.command_lines`."""
    from batchsim.fit.traffic.load_file import flow

    blocks: dict[str, dict[str, Any]] = {"deployment": {"engine": engine, "gpu": gpu}, "kv": {}, "policy": {}, "": {}}
    for key, value in keys.items():
        owner, _, name = key.rpartition(".")
        blocks[owner][name] = value
    lines = ["deployment:", *(f"  {name}: {flow(value)}" for name, value in blocks["deployment"].items())]
    lines += [f"kv: {flow(blocks['kv'])}"] if blocks["kv"] else []
    lines += [f"{name}: {flow(value)}" for name, value in blocks[""].items() if name != "model"]
    common = {
        "model": _model_word(str(keys["model"]), folder),
        "cost": "\n".join(lines),
        "policies": f"{_loras(blocks['policy'])}{_KNOBS}\n  {engine}: {flow(blocks['policy'])}\n",
    }
    if trace is not None and figures is not None:
        return _replayed(common, folder, trace, figures)
    asked = {"question": "up to which request rate does this deployment hold the SLO?", "expect": _NOT_RUN}
    lengths = _lengths(int(keys.get("max_model_len", _PROMPT + _OUTPUT)))
    return _SYNTHETIC.format(**common, **asked, **lengths, low=1, middle=2, high=4)


def _loras(knobs: dict[str, Any]) -> str:
    """The lines of LoRA adapters, with which a workload ends, for an engine that has such `knobs`; "" for others."""
    if not any("lora" in name for name in knobs):
        return ""
    slots = int(knobs.get("max_loras", knobs.get("max_loras_per_batch", 1)))
    return _LORAS.format(count=4 * slots, rank=knobs.get("max_lora_rank", 16))


def planned_text(text: str, span_s: float | None) -> str:
    """The scenario `text` with a plan for traffic like its own, on its GPU: replayed arrivals last `span_s`."""
    from batchsim.fit.traffic.load_file import flow
    from batchsim.scenario.document import read_document

    scenario: dict[str, Any] = read_document(text, "starter").value
    name = "deployment" if "deployment" in scenario else "cost"
    cost = scenario[name]
    gpu = cost if isinstance(cost, str) else cost["gpu"]
    target, window = "{trace: {factor: 4, shift: 30s}}  # so many times the trace", 1200
    if scenario["workload"]["arrivals"]["kind"] == "trace":
        window = min(window, max(int((span_s or 0) / 2), 1))
    else:
        highest = float(scenario["load"]["mean_rate"][-1].removesuffix("/s"))
        target = f"{{rate: {5 * highest:g}/s}}  # at the busiest, or {{diurnal: {{peak: ..., hours: [...]}}}}"
        window = 120
    return text + _PLAN.format(target=target, window=window, gpu=gpu, offer=flow({name: cost})[1:-1])


def _lengths(most: int = _PROMPT + _OUTPUT) -> dict[str, int]:
    """The lengths of a starter, of whose requests none takes more than `most` tokens, where these are two at least."""
    cap = max(min(_OUTPUT, most // 4), 1)
    prompt = max(min(_PROMPT, most - cap), 1)
    means = {"mean": max(min(1000, prompt // 2), 1), "written": max(min(200, cap // 2), 1)}
    return means | {"prompt": prompt, "most": min(1000, cap), "cap": cap}


def _model_word(model: str, folder: Path) -> str:
    from batchsim.fit.traffic.load_file import flow

    return flow(model if not Path(model).exists() else _relative(Path(model), folder))


def _replayed(common: dict[str, str], folder: Path, trace: TraceConfig, figures: dict[str, Any]) -> str:
    """The text of the scenario that replays `trace`."""
    from batchsim.fit.traffic.load_file import cap_above, flow
    from batchsim.workload.traces.arrival_stats import RateChange

    path = _relative(Path(trace.path), folder)
    arrivals = figures["arrivals"]
    timed = arrivals is not None and arrivals["rate_rps"] is not None
    longest = figures["output_tokens"]["max"]
    rate = ", no times"
    if arrivals is not None:
        rate = ", all of one time"
    if timed and arrivals is not None:
        change = arrivals["change"] and RateChange(**arrivals["change"]).ends_rps
        varied = f" on average, from {change[0]:.3g}/s to {change[1]:.3g}/s" if change else ""
        rate = f", {arrivals['rate_rps']:.4g}/s{varied}, CV of the gaps {arrivals['cv']:.3g}"
    load = "load: {mean_rate: [2/s, 4/s, 8/s]}\n"
    if arrivals is not None:
        load = "load: {rate_scale: [0.5, 1, 2]}  # times the recorded rate\n" if timed else ""
    return _TRACE.format(
        **common,
        path=flow(path),
        rows=f"{figures['rows']:,}",
        rate=rate,
        arrivals="{kind: trace}" if arrivals else "{kind: poisson, mean_rate: 4/s}  # the trace has no times",
        lengths="" if arrivals else "  lengths: {kind: trace}\n",
        trace=_trace_block(trace, path, timed),
        cap=cap_above(longest),
        longest=f"{longest:,}",
        end="" if arrivals else "  duration: 2min\n  warmup: 20s\n",
        load=load,
        seeds="1  # a replayed trace has nothing random" if arrivals else "3",
    )


def _synthetic(common: dict[str, str], model: str, gpu: str, folder: Path) -> str:
    """The text of the scenario without a trace, on the fewest GPUs that serve its load."""
    from batchsim.deployment.catalog import GPUS

    text = _served(common, model, gpu, folder)
    if text is not None:
        return text
    fitted = (each for each in GPUS.values() if each.efficiencies.models and each is not GPUS[gpu])
    names = dict.fromkeys(each.name for each in fitted)
    others = [name for name in names if _served(common, model, name, folder)]
    advice = f"Use --gpu {' or '.join(others)}, or a smaller --model." if others else "Use a smaller --model."
    raise ScenarioError(
        f"{model} on {gpu}: up to {_TP[-1]} GPUs keep the starter's SLO of ttft<1s & tpot<50ms @ 99% not even at"
        f" {_HIGHEST_RPS[-1]:g} request/s. {advice}"
    )


def _served(common: dict[str, str], model: str, gpu: str, folder: Path) -> str | None:
    """The text with the fewest GPUs, and then the highest rates, that keep the SLO; None if none do."""
    for tp, _ in _budgets(model, gpu):
        known: dict[float, bool] = {}
        for high in _HIGHEST_RPS:
            rates = {"low": high / 4, "middle": high / 2, "high": high}
            text = _SYNTHETIC.format(
                **common, **_ASKED, **rates, **_lengths(), cost=_cost(gpu, tp, "serve these rates")
            )
            if all(_keeps_slo(text, folder, rate, known) for rate in (high, high / 2, high / 4)):
                return text
    return None


def _keeps_slo(text: str, folder: Path, rate: float, known: dict[float, bool]) -> bool:
    """Whether continuous batching keeps the SLO of the scenario `text` at `rate`, in all seeds; cached in `known`."""
    from batchsim.metrics.slo import parse_slo
    from batchsim.results.keep import measured_point, summary_rows
    from batchsim.results.landmarks import curve
    from batchsim.scenario.parse import parse_scenario
    from batchsim.scenario.point import simulate_point
    from batchsim.scenario.setup import Setup

    if rate not in known:
        scenario = parse_scenario(text, "starter", folder, (f"load.mean_rate=[{rate}/s]",))
        setup = Setup.of(scenario)
        points = [point for point in scenario.points() if point.spec.label == "continuous"]
        results = [measured_point(setup, simulate_point(setup, point), "").result for point in points]
        (tested,) = curve(summary_rows(scenario, results), parse_slo(scenario.file.slo))
        known[rate] = tested.meets_slo
    return known[rate]


def _cost_that_holds(model: str, gpu: str, tokens: int) -> str:
    """The YAML cost block with the fewest GPUs whose KV memory holds a request of `tokens` tokens."""
    most = 0
    for tp, most in _budgets(model, gpu):
        if most >= tokens:
            return _cost(gpu, tp, "hold the model and the longest request")
    raise ScenarioError(
        f"{model} on {gpu}: the longest request of the trace takes {tokens:,} tokens of KV memory, and up to {_TP[-1]}"
        f" GPUs have {most:,}. Use a GPU with more memory, or a smaller --model."
    )


def _cost(gpu: str, tp: int, why: str) -> str:
    return (
        f"cost: {gpu}  # the GPU"
        if tp == 1
        else f"cost: {{kind: roofline, gpu: {gpu}, tp: {tp}}}  # the fewest GPUs that {why}"
    )


def _budgets(model: str, gpu: str) -> list[tuple[int, int]]:
    """(GPUs, tokens of KV memory) for each number of GPUs that holds the model. ScenarioError if one is unknown."""
    from batchsim.deployment.catalog import load_gpu, load_model
    from batchsim.deployment.deployment import Deployment

    spec, device = load_model(model), load_gpu(gpu)
    budgets = []
    for tp in _TP:
        try:
            budgets.append((tp, Deployment(spec, device, tp=tp).derive_kv().tokens))
        except ScenarioError:
            continue  # too little memory, or heads that cannot be cut so
    return budgets


def _trace_block(trace: TraceConfig, path: str, timed: bool) -> str:
    from batchsim.fit.traffic.load_file import flow
    from batchsim.scenario.written import as_written

    said = as_written(replace(trace, path=path, rate_scale=None))
    if "columns" in said:
        said["columns"] = {role: said["columns"][role] for role in sorted(said["columns"], key="arrival".__ne__)}
    lines = [f"{name}: {flow(value)}" for name, value in said.items()]
    if timed:
        scale = {"factor": 1, "by": "compress"} if trace.rate_scale is None else as_written(trace.rate_scale)
        lines.append(f"rate_scale: {flow(scale)}  # how load changes the rate; or overlay, thin")
    return "".join(f"    {line}\n" for line in lines)


def _relative(path: Path, folder: Path) -> str:
    """`path` relative to `folder`, as a scenario there names it."""
    return str(path) if path.is_absolute() else Path(os.path.relpath(path, folder)).as_posix()
