"""From raw measurements to a cost profile: fits, errors, and the list of missing measurements."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.calibrate.engine.identity import catalog_gpu
from batchsim.calibrate.profile.bench import MeasuredStep
from batchsim.calibrate.profile.engine_runs import EngineSteps
from batchsim.calibrate.profile.fit import LAUNCH_BOUND, Kernels, errors, fit_host, fit_kernels, robust_nnls, short
from batchsim.calibrate.profile.job import Job
from batchsim.calibrate.profile.point_plan import BLOCKS, StepShape, columns
from batchsim.calibrate.profile.raw import Raw
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.host_config import HostCost
from batchsim.cost.interpolation import Curve
from batchsim.cost.periods import REGIONS, regions
from batchsim.cost.profile import HostTerm, Hull, Profile, StepCosts
from batchsim.cost.work import WORK_COLUMNS, chunk_rows

Floats = NDArray[np.float64]

_DISTURBED = 3.0  # a step this many times its expected duration was interrupted by something else on the machine
_FEWEST_STEPS = 30  # least steps of training runs from which a host term is fitted
_FEWEST_RESTED = 8  # least steps after a rest from which is known what a rest costs an engine ahead
_FEWEST_BOUND = 8  # least steps bound by their launches from which the launches inside an engine are known


def assemble(job: Job, raw: Raw) -> Profile:
    """The profile fitted to what `raw` has so far. CalibrationError if that is too little for a fit."""
    samples = [s for s in raw.samples.values() if s.rounds]
    fitted = [s for s in samples if s.point.block != "H"]
    kernels = fit_kernels(
        job.model,
        [s.point for s in fitted],
        [s.ns for s in fitted],
        buckets=job.buckets,
        measured_grid=job.device == "cuda",
    )
    no_host = HostTerm(0.0, 0.0, 0.0, "serial", assumed=True)
    bare = _profile(job, raw, samples, _costs(kernels, InEngine(), no_host, raw))
    training, held_out = ([run for run in raw.runs if run.spec.training is which] for which in (True, False))
    notes = list(raw.notes)
    if raw.swap is not None:
        notes.append("swap: out and back are one cost, measured alone, not beside a decode")
    in_engine, host = _engine_terms(bare, _by_turns(training))
    if host is None:
        stated = HostCost()
        host = HostTerm(stated.base, stated.per_sequence, stated.per_token, "serial", assumed=True)
        notes.append("host: assumed as for a roofline, since too few engine runs were made")
    profile = replace(
        bare,
        costs=_costs(in_engine.apply(kernels), in_engine, host, raw),
        made=bare.made | {"in_engine": asdict(in_engine)},
    )
    beside, beside_host = _engine_terms(bare, _ahead(training))
    if beside_host is not None:
        if _num_rested(_ahead(training)) < _FEWEST_RESTED:
            beside = replace(beside, prefill_ns=in_engine.prefill_ns)
        profile = replace(profile, ahead=_costs(beside.apply(kernels), beside, beside_host, raw))
    return replace(
        profile,
        residuals=tuple(_rows(bare, fitted)),
        held_out=_held_out(profile, bare, [s for s in samples if s.point.block == "H"], held_out),
        missing=tuple(_missing(job, raw)),
        notes=tuple(notes),
    )


def _costs(kernels: Kernels, in_engine: InEngine, host: HostTerm, raw: Raw) -> StepCosts:
    return StepCosts(
        layers=kernels.layers,
        head=kernels.head,
        decode=kernels.decode,
        decode_attention=kernels.decode_attention,
        chunk_attention=kernels.chunk_attention,
        launch_ns=kernels.launch_ns,
        prefill_ns=in_engine.prefill_ns,
        in_situ=in_engine.factor,
        host=host,
        swap=raw.swap,
    )


def _profile(job: Job, raw: Raw, samples: Sequence[MeasuredStep], costs: StepCosts) -> Profile:
    hardware, software = raw.key["hardware"], raw.key["software"]
    made: dict[str, Any] = {
        "on": datetime.date.today().isoformat(),
        "seconds": round(raw.seconds, 1),
        "options": raw.key["options"],
        "rounds": min((len(s.rounds) for s in samples), default=0),
        "engine_runs": {run.spec.name: len(run.period_ns) for run in raw.runs},
    }
    if raw.memory:
        made["memory"] = raw.memory
    if raw.sentinel:
        made["sentinel"] = raw.sentinel
    if raw.telemetry:
        made["telemetry"] = raw.telemetry
    return Profile(
        name=job.name,
        origin="measured",
        executor="batchsim",
        model=job.model,
        gpu=catalog_gpu(hardware),
        hardware=hardware,
        software=software,
        made=made,
        block_size=job.block_size,
        num_blocks=raw.num_blocks,
        costs=costs,
        hull=_hull([s.point for s in samples]),
        samples=tuple(s.to_row() for s in samples),
        energy=raw.energy,
    )


def _hull(points: Sequence[StepShape]) -> Hull:
    """The range of steps that the fit's points cover."""
    even = [p for p in points if p.block == "A"]
    return Hull(
        max_sequences=max((len(p.decode) for p in even), default=1),
        max_tokens=max(p.tokens for p in points if p.block != "H"),
        max_context=float(max((p.decode[0] for p in even), default=1)),
        max_chunk_context=max((prefix + n for p in points if p.block in "CDE" for prefix, n in p.chunks), default=1),
    )


def joined(runs: Sequence[EngineSteps]) -> tuple[dict[str, NDArray[np.int64]], Floats, Floats, Floats]:
    """Work columns, and ns of kernels, host and periods, of all steps of `runs`, concatenated."""
    table = {name: np.concatenate([run.columns[name] for run in runs]) for name in WORK_COLUMNS}
    times = ("kernel_ns", "host_ns", "period_ns")
    kernel, host, period = (np.concatenate([getattr(run, name) for run in runs]) for name in times)
    return table, kernel, host, period


def _by_turns(runs: Sequence[EngineSteps]) -> list[EngineSteps]:
    """Those of `runs` in which host and device worked by turns."""
    return [run for run in runs if not run.spec.is_ahead]


def _ahead(runs: Sequence[EngineSteps]) -> list[EngineSteps]:
    """Those of `runs` in which the engine scheduled ahead of results."""
    return [run for run in runs if run.spec.is_ahead]


def _num_rested(runs: Sequence[EngineSteps]) -> int:
    """The steps of chunks alone in those of `runs` that rest."""
    tables = [run.columns for run in runs if run.spec.rests]
    return sum(int(((t["num_decode"] + t["pad_decode_rows"]) == 0).sum()) for t in tables)


@dataclass(frozen=True)
class InEngine:
    """What steps take inside an engine beyond kernels run back to back: each step starts with cold caches there.

    `factor` on the back-to-back time; `step_ns`, `chunk_ns` and `decode_ns` more for the step, each chunk and each
    decode; `prefill_ns` more for a step of chunks alone after a rest, its longer host time included. `launch_ns`: the
    least that launches take there, where the engine's own work is between them; None: as back to back.
    """

    factor: float = 1.0
    step_ns: float = 0.0
    chunk_ns: float = 0.0
    decode_ns: float = 0.0
    prefill_ns: float = 0.0
    launch_ns: float | None = None

    def apply(self, kernels: Kernels) -> Kernels:
        """`kernels` with the constants put in, over `factor`: times the factor they give the times inside an engine."""
        step, chunk, decode = (ns / self.factor for ns in (self.step_ns, self.chunk_ns, self.decode_ns))
        grid, chunks = kernels.decode_attention, kernels.chunk_attention
        rows = zip(grid.sequences, grid.ns, strict=True)
        launch = kernels.launch_ns * self.factor + self.step_ns if self.launch_ns is None else self.launch_ns
        return replace(
            kernels,
            layers=_raised(kernels.layers, step),
            decode=None if kernels.decode is None else _raised(kernels.decode, step),
            decode_attention=replace(grid, ns=tuple(tuple(short(ns + b * decode) for ns in row) for b, row in rows)),
            chunk_attention=replace(chunks, per_chunk=short(chunks.per_chunk + chunk)),
            launch_ns=short(launch) if kernels.launch_ns else 0.0,
        )


def _raised(curve: Curve, ns: float) -> Curve:
    return Curve(curve.x, tuple(short(value + ns) for value in curve.ns))


def _engine_terms(bare: Profile, training: Sequence[EngineSteps]) -> tuple[InEngine, HostTerm | None]:
    """The times inside an engine and the host's term, from steps of engine runs; no term (None) from too few steps.

    A step that something else on the machine interrupted counts with at most `_DISTURBED` times its expected time.
    """
    if sum(len(run.period_ns) for run in training) < _FEWEST_STEPS:
        return InEngine(), None
    table, kernel, host_ns, _ = joined(training)
    period = kernel + host_ns
    decodes, chunks = table["num_decode"] + table["pad_decode_rows"], chunk_rows(table)
    alone = Calibrated(bare, extrapolate=True).kernel_ns(table)
    design = np.stack((alone, np.ones(len(alone)), chunks, decodes), axis=1).astype(np.float64)
    rests = np.concatenate([np.full(len(run.period_ns), run.spec.rests) for run in training])
    rested = rests & (decodes == 0)
    warm = ~rested
    launch_ns, bound = _launches(bare, alone, kernel, (chunks > 0) & warm)
    free = warm & ~bound
    if free.sum() < _FEWEST_STEPS:
        launch_ns, free = None, warm
    # Cold caches only ever add; how fast the machine was meanwhile is then a factor on all of it.
    solution = robust_nnls(design[free], (kernel - alone)[free], scale=kernel[free]) + np.array([1.0, 0.0, 0.0, 0.0])
    typical = design @ solution
    factor = np.minimum(kernel, _DISTURBED * typical)[free].sum() / typical[free].sum()
    solution, typical = solution * factor, typical * factor
    if launch_ns is not None:
        typical = np.where(chunks > 0, np.maximum(typical, launch_ns), typical)
    base, per_sequence, per_token = fit_host({name: ns[warm] for name, ns in table.items()}, kernel[warm], period[warm])
    host = base + per_sequence * (decodes + chunks) + per_token * table["num_prefill_tokens"]
    beyond = np.minimum(period - kernel, host + (_DISTURBED - 1) * (host + typical)) - host
    more = max(float(beyond[warm].mean()), -base)  # medians leave out the tail that every long run has
    whole = typical + host + more
    late = (np.minimum(period, _DISTURBED * whole) - whole)[rested]
    prefill_ns = max(float(late.mean()), 0.0) if len(late) else 0.0
    terms = (short(value) for value in (base + more, per_sequence, per_token))
    factor, step_ns, chunk_ns, decode_ns = (short(float(value)) for value in solution)
    in_engine = InEngine(factor, step_ns, chunk_ns, decode_ns, short(prefill_ns), launch_ns)
    return in_engine, HostTerm(*terms, mode="serial", assumed=False)


def _launches(
    bare: Profile, alone: Floats, kernel: Floats, chunked: NDArray[np.bool_]
) -> tuple[float | None, NDArray[np.bool_]]:
    """(ns of the steps whose launches bind inside an engine, which steps these are); None where they are too few.

    `chunked` are the steps to look at, which no graph runs; `alone` is their time back to back. Launches are the host's
    work, whose speed has nothing to do with how fast the kernels of other steps run.
    """
    back_to_back = bare.costs.launch_ns
    bound = chunked & (alone <= LAUNCH_BOUND * back_to_back)
    if not back_to_back or bound.sum() < _FEWEST_BOUND:
        return None, np.zeros(len(alone), dtype=bool)
    bound_ns = kernel[bound]
    launch_ns = short(float(np.minimum(bound_ns, _DISTURBED * np.median(bound_ns)).mean()))
    return launch_ns, chunked & (alone <= LAUNCH_BOUND * max(launch_ns, back_to_back))


def _rows(bare: Profile, samples: Sequence[MeasuredStep]) -> list[dict[str, Any]]:
    """Errors of the fitted kernel times of back-to-back steps, a row for each region and one for all."""
    if not samples:
        return []
    table = columns([s.point for s in samples])
    measured = np.array([s.ns for s in samples])
    return _by_region(Calibrated(bare, extrapolate=True).kernel_ns(table), measured, table)


def _by_region(predicted: Floats, measured: Floats, table: dict[str, NDArray[np.int64]]) -> list[dict[str, Any]]:
    region = regions(table)
    chosen = [(name, region == code) for code, name in enumerate(REGIONS)]
    chosen.append(("all", np.ones(len(region), dtype=bool)))
    return [errors(predicted[in_region], measured[in_region], name) for name, in_region in chosen if in_region.any()]


def _held_out(
    profile: Profile, bare: Profile, batches: Sequence[MeasuredStep], runs: Sequence[EngineSteps]
) -> dict[str, Any] | None:
    """Errors on what no fit has seen, whole steps of engine runs and kernels of sampled batches; None without any.

    `ahead` has those of whole steps of engines that scheduled ahead of results: the longer of the device's and the
    host's part.
    """
    errors_by_kind: dict[str, Any] = {}
    by_turns = _by_turns(runs)
    if by_turns:
        table, kernel, _, period = joined(by_turns)
        cost = Calibrated(profile, extrapolate=True)
        kernels = cost.kernel_ns(table)
        rows = _by_region(kernels + cost.host_ns(table), period, table)
        errors_by_kind |= {"what": "whole steps of engine runs with other requests and another policy"}
        errors_by_kind |= {name: value for name, value in rows[-1].items() if name != "region"}
        errors_by_kind |= {"kernel_bias": errors(kernels, kernel, "")["bias"], "steps": rows}
    if batches:
        rows = _rows(bare, batches)
        if not by_turns:
            errors_by_kind |= {"what": "kernels of sampled batches"}
            errors_by_kind |= {name: value for name, value in rows[-1].items() if name != "region"}
        errors_by_kind["batches"] = rows
    if errors_by_kind and profile.ahead is not None and (ahead := _ahead(runs)):
        table, _, _, period = joined(ahead)
        cost = Calibrated(replace(profile, costs=profile.ahead), extrapolate=True)
        errors_by_kind["ahead"] = _by_region(np.maximum(cost.kernel_ns(table), cost.host_ns(table)), period, table)
    return errors_by_kind or None


def _missing(job: Job, raw: Raw) -> list[str]:
    """What the profile lacks, in words. Entries that begin with `block` are there after another call of the command."""
    missing = []
    for block in BLOCKS:
        todo = [p for p in job.points if p.block == block]
        lacking = sum(p not in raw.samples or not raw.samples[p].rounds for p in todo)
        if lacking:
            missing.append(f"block {block}: {lacking} of {len(todo)} steps not measured")
    done = [run.spec for run in raw.runs]
    for training, name in ((True, "host"), (False, "held out")):
        specs = [spec for spec in job.runs if spec.training is training]
        if lacking := sum(spec not in done for spec in specs):
            missing.append(f"block {name}: {lacking} of {len(specs)} engine runs not made")
    if raw.swap is None:
        missing.append("block swap: bandwidth not measured")
    fewest = min((len(raw.samples[p].rounds) if p in raw.samples else 0 for p in job.points), default=0)
    if fewest < job.rounds:
        missing.append(f"rounds: {fewest} of {job.rounds} done")
    if raw.num_blocks is None:
        missing.append("num_blocks: not measured, state kv.tokens in the scenario")
    if raw.energy is None:
        missing.append("energy: not measured" + (" on a CPU" if job.device == "cpu" else ", or no counter"))
    return missing
