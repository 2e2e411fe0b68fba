"""Figures of a measured run that cannot be: faster than the GPUs' data sheet allows, whatever the engine does.

Each bound is the least there can be: all FLOP/s of all GPUs at the checkpoint's narrowest type, no byte read that a
cache of theirs might keep, of experts those of one token alone. What lies below was measured of something else than the
model computing each token: prompts found in a cache, drafts accepted, pieces of several tokens counted as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchsim.base.units import format_duration
from batchsim.check.measured.run import MeasuredRequests, MeasuredRun
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.layers import GroupedAttention
from batchsim.deployment.model import GpuSpec
from batchsim.scenario.setup import Setup

FASTER = {"fp8": 2.0, "fp8_block": 2.0, "int8": 2.0, "int4": 2.0, "nvfp4": 4.0, "mxfp4": 4.0}
"""Largest ratio of a type's FLOP/s to those of 16 bits, by the data sheets of all GPUs of the catalog and of GPUs that
multiply 4 bits."""
CACHE_BYTES = 128e6
"""Bytes that a GPU may keep from one step to the next: no L2 of the catalog is larger. Source: Blackwell's 126 MB."""
BELOW = 0.97
"""Share of a bound below which a latency cannot be; clocks round, and a sheet's clock may be exceeded by a little."""
MANY = 0.05
"""Share of the requests whose latencies cannot be from which on that latency is left out of a run."""

Floats = NDArray[np.float64]


class Floors(NamedTuple):
    """The least that the GPUs of a setup need: seconds of a prompt token, of a pair of prompt tokens, of the reading of
    weights for one step; the most tokens that a step yields a request; the share of prompts that may be cached."""

    token_s: float
    pair_s: float
    step_s: float
    tokens_a_step: int
    shared_tokens: int
    words: str

    def ttft_s(self, prompt_tokens: Floats) -> Floats:
        """Seconds until the first token of each prompt: its arithmetic, or one reading of the weights."""
        own = np.maximum(prompt_tokens - self.shared_tokens, 1)
        return np.maximum(own * self.token_s + own * (own + 1) / 2 * self.pair_s, self.step_s)

    @property
    def tpot_s(self) -> float:
        """Seconds of a token after the first."""
        return self.step_s / self.tokens_a_step


def floors(setup: Setup) -> Floors | None:
    """The least times of a setup's engine, of several kinds of replicas those of the fastest; None where its GPU, or
    which model it computes, is not known."""
    if setup.groups:
        by_group = [floors(group.setup) for group in setup.groups]
        known = [one for one in by_group if one is not None]
        return min(known, key=lambda one: one.step_s) if known and len(known) == len(by_group) else None
    deployment = setup.cost.deployment
    if deployment is None or (gpu := deployment.gpu) is None:
        return None
    types, model = deployment.types, deployment.model
    flops = gpu.peak_flops * deployment.num_gpus * max(FASTER.get(kind, 1.0) for kind in types)
    pairs = sum(
        2 * each.count * each.attention.pair_size
        for each in model.kinds
        if isinstance(each.attention, GroupedAttention) and each.attention.window is None
    )
    every, routed, share = deployment.step_bytes()
    readers = deployment.num_gpus // deployment.pp
    read = max(every + routed * share - CACHE_BYTES * deployment.num_gpus, 0.0)
    drafts = [spec.config.traits.speculation for spec in setup.scenario.specs]
    prefix = setup.traffic.shared_prefix
    return Floors(
        token_s=model.matmul_flops_per_token / flops,
        pair_s=pairs / flops,
        step_s=read / (gpu.memory_bandwidth * readers),
        tokens_a_step=1 + max((one.num_drafts for one in drafts if one is not None), default=0),
        shared_tokens=0 if prefix is None else prefix.added_tokens,
        words=_words(deployment, gpu, flops, every + routed * share),
    )


def _words(deployment: Deployment, gpu: GpuSpec, flops: float, read: float) -> str:
    count = f"{deployment.num_gpus} " if deployment.num_gpus > 1 else ""
    bandwidth = gpu.memory_bandwidth * deployment.num_gpus // deployment.pp
    return (
        f"by the sheet of {deployment.model.name} on {count}{gpu.name}: {flops / 1e12:.4g} TFLOP/s,"
        f" {read / 1e9:.3g} GB of weights a token at {bandwidth / 1e12:.3g} TB/s"
    )


@dataclass(frozen=True)
class _Checked:
    """The latencies and rates of a run that cannot be, each with its line."""

    lines: Mapping[str, str]
    apart: frozenset[str]


def possible(setup: Setup, run: MeasuredRun) -> MeasuredRun:
    """`run` without figures that cannot be of the engine of `setup`, each named in a note with the likely reason."""
    bounds = floors(setup)
    if bounds is None:
        return run
    latencies = _of_requests(bounds, run.requests) if run.requests is not None else _of_means(bounds, run)
    rates = _rates(bounds, setup.num_engines, run)
    lines = [*latencies.lines.values(), *rates.lines.values()]
    if not lines:
        return run
    apart = latencies.apart | rates.apart
    out = {name: value for name, value in run.figures.items() if {name, name.partition("_")[0]} & apart}
    kept = {name: value for name, value in run.figures.items() if name not in out}
    requests = None if run.requests is None else replace(run.requests, apart=run.requests.apart | latencies.apart)
    left = "; these are left out of the errors" if out else ""
    note = f"cannot be as measured ({bounds.words}): {'; '.join(lines)}{left}"
    return replace(run, figures=kept, requests=requests, notes=(*run.notes, note), impossible={**run.impossible, **out})


_WHY = {
    "ttft": "were prompts, or their beginnings, found in a cache",
    "tpot": "did drafts bring several tokens a step, or pieces several tokens that were told as one",
    "e2e": "were answers shorter than is told, prompts cached or drafts accepted",
}


def _line(latency: str, what: str, measured_s: float, floor_s: float) -> str:
    times = (format_duration(round(1e9 * one)) for one in (measured_s, floor_s))
    return f"{what} of {next(times)} where at least {next(times)} are needed ({_WHY[latency]}?)"


def _of_means(bounds: Floors, run: MeasuredRun) -> _Checked:
    """Of aggregates the means are judged by the mean lengths: more than these need requests whose lengths vary."""
    prompt, output = (run.means.get(f"{side}_tokens", 1.0) for side in ("prompt", "output"))
    first = float(bounds.ttft_s(np.array([prompt]))[0])
    least = {"ttft": first, "tpot": bounds.tpot_s, "e2e": first + max(output - 1, 0.0) * bounds.tpot_s}
    lines: dict[str, str] = {}
    for latency, floor_s in least.items():
        mean = run.figures.get(f"{latency}_mean_s")
        if mean is not None and mean < BELOW * floor_s:
            what = f"a mean {latency.upper()}" + f" of prompts of {prompt:,.0f} tokens" * (latency == "ttft")
            lines[latency] = _line(latency, what, mean, floor_s)
    return _Checked(lines, frozenset(lines))


def _of_requests(bounds: Floors, requests: MeasuredRequests) -> _Checked:
    prompts = requests.prompt_tokens.astype(np.float64)
    if requests.hash_ids is not None and requests.hash_ids.reused_share:
        prompts = np.ones(len(prompts))  # any of them may have been cached
    first = bounds.ttft_s(prompts)
    after = np.maximum(requests.output_tokens - 1, 0) * bounds.tpot_s
    least = {"ttft": first, "tpot": np.full(len(prompts), bounds.tpot_s), "e2e": first + after}
    lines: dict[str, str] = {}
    apart: set[str] = set()
    for latency, floor_s in least.items():
        measured_s = requests.latency_s(latency)
        known = int((~np.isnan(measured_s)).sum())
        below = np.flatnonzero(measured_s < BELOW * floor_s)  # NaN, an unknown latency, is never below
        if not len(below):
            continue
        apart |= {latency} if len(below) >= MANY * known else set()
        row = int(below[0])
        what = f"the {latency.upper()} of {len(below):,} of {known:,} requests, the first one"
        what += f" of a prompt of {requests.prompt_tokens[row]:,} tokens" * (latency == "ttft")
        lines[latency] = _line(latency, what, float(measured_s[row]), float(floor_s[row]))
    return _Checked(lines, frozenset(apart))


def _rates(bounds: Floors, engines: int, run: MeasuredRun) -> _Checked:
    """The rates above the most that all engines together can do, or that a closed loop's users can get."""
    users = run.client.max_concurrency if run.client.arrivals == "closed" else None
    most = engines / bounds.token_s
    if users is not None and bounds.tpot_s:
        most = min(most, users / bounds.tpot_s)
    rate = run.figures.get("output_tokens_per_s")
    if rate is None or BELOW * rate <= most:
        return _Checked({}, frozenset())
    of = f" with {users:,} in flight" if users is not None else ""
    line = f"{rate:,.0f} output tokens/s{of} where at most {most:,.0f} can be (are they of several engines or drafts?)"
    return _Checked({"rate": line}, frozenset({"output_tokens_per_s", "throughput_rps"}))
