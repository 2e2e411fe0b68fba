"""From raw measurements to a profile, made by a law: what a GPU's graphs and an engine's runs become."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine runs of a calibration need torch: pip install 'batchsim[live]'")

from batchsim.calibrate.profile.assemble import assemble
from batchsim.calibrate.profile.bench import MeasuredStep
from batchsim.calibrate.profile.engine_runs import EngineSteps, run_specs
from batchsim.calibrate.profile.job import Job
from batchsim.calibrate.profile.point_plan import StepRange, StepShape, columns, plan
from batchsim.calibrate.profile.raw import Raw
from batchsim.calibrate.profile.schedules import Pace, held_out_batches, requests
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.profile import Profile, SwapCost
from batchsim.cost.work import WORK_COLUMNS
from batchsim.deployment.catalog import MODELS
from batchsim.workload.open_loop import OpenWorkload

LIMITS = StepRange(max_seqs=64, max_tokens=1024, max_context=2048, kv_tokens=64 * 2048)
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
LAUNCHES_NS = 5e6
FACTOR, STEP_NS, HOST_NS, HOST_PER_SEQUENCE_NS = 1.02, 40_000, 350_000, 3_000
PREFILL_NS = 300_000  # of a step of chunks alone
BESIDE, HOST_BESIDE = 1.2, 2.0  # how much longer kernels and the host take beside each other
IDENTITY = {"hardware": {"device": "cuda", "gpu": "NVIDIA H200"}, "software": {"torch": "2.11"}, "options": {}}


def kernel_ns(table: dict[str, np.ndarray]) -> np.ndarray:
    """Times back to back: decode-only steps fill their graph, all others wait for their launches."""
    decodes, chunks = table["num_decode"], table["num_chunks"]
    alone = chunks == 0
    rows = np.where(alone, np.array([next(g for g in GRAPHS if g >= max(n, 1)) for n in decodes]), decodes + chunks)
    tokens = np.where(alone, rows, decodes + table["num_prefill_tokens"])
    ns = 4e6 + 6_000 * tokens + 30_000 * np.maximum(tokens - 256, 0) + 1_000 * rows
    ns = ns + 5_000 * decodes + 30 * table["context_tokens"] + 200_000 * chunks + 0.8 * table["prefill_pairs"]
    return np.where(alone, ns, np.maximum(ns, LAUNCHES_NS))


def job(rounds: int = 1) -> Job:
    """All that there is to do on a GPU with these limits."""
    steps = plan(LIMITS, block_size=16, buckets=GRAPHS, fine=True)
    points = (*steps, *held_out_batches(LIMITS, 16, 60, 0))
    runs = tuple(run_specs(LIMITS, rounds, 0))
    return Job("made", MODELS["llama-3.1-8b"], 16, GRAPHS, "cuda", points, rounds, runs)


def engine_steps(work: Job, launches: float = 0.0) -> list[EngineSteps]:
    """Runs of held-out batches, slower by what an engine adds, and by more in one that schedules ahead; only runs that
    rest have chunks alone. Steps with chunks take at least `launches` times as long as their launches back to back."""
    made = []
    for number, spec in enumerate(work.runs):
        random = np.random.default_rng(number)
        fewest = 0 if spec.rests else 1
        chosen = [p for p in work.points if p.block == "H" and fewest <= len(p.decode) <= spec.max_seqs]
        table = columns([chosen[i] for i in random.integers(0, len(chosen), 200)])
        kernel = FACTOR * kernel_ns(table) + STEP_NS
        kernel = np.where(table["num_chunks"] > 0, np.maximum(kernel, launches * LAUNCHES_NS), kernel)
        kernel += PREFILL_NS * (table["num_decode"] == 0)
        host = HOST_NS + HOST_PER_SEQUENCE_NS * (table["num_decode"] + table["num_chunks"])
        period = kernel + host
        if spec.kind == "ahead":
            kernel, host = BESIDE * kernel, HOST_BESIDE * host
            period = np.maximum(kernel, host)
        made.append(EngineSteps(spec, {name: table[name] for name in WORK_COLUMNS}, kernel, host, period))
    return made


def measured(work: Job, launches: float = 0.0, key: dict[str, Any] = IDENTITY) -> Raw:
    """All that there is to measure, without noise."""
    times = kernel_ns(columns(work.points))
    samples = {p: MeasuredStep(p, [float(ns)] * 2) for p, ns in zip(work.points, times, strict=True)}
    swap = SwapCost(10_000.0, 40_000.0, assumed=False)
    return Raw(key, num_blocks=55_000, samples=samples, runs=engine_steps(work, launches), swap=swap)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """The profile of everything measured, without noise."""
    work = job(rounds=2)
    return assemble(work, measured(work))


def test_what_an_engine_adds_is_found(profile: Profile) -> None:
    """Whole steps that took no part in the fit come out within 1 %, without bias."""
    held_out = profile.held_out
    assert held_out is not None
    assert held_out["p50"] < 0.01
    assert abs(held_out["bias"]) < 0.002
    assert abs(held_out["kernel_bias"]) < 0.002
    assert profile.costs.prefill_ns == pytest.approx(PREFILL_NS, rel=0.05)


def test_graphs_and_launches_are_in_the_profile(profile: Profile) -> None:
    """Every size of graph has its time, and the launches of all other steps their floor, as inside an engine."""
    assert profile.costs.decode is not None
    assert profile.costs.decode.x == GRAPHS
    assert profile.costs.launch_ns == pytest.approx(FACTOR * LAUNCHES_NS + STEP_NS, rel=0.002)


def test_launches_slow_inside_an_engine_are_found_apart_from_kernels() -> None:
    """Launches are the host's work: where they take 1.6 times as long there, other steps keep their times."""
    work = job(rounds=2)
    slow = assemble(work, measured(work, launches=1.6))
    assert slow.costs.launch_ns == pytest.approx(1.6 * LAUNCHES_NS, rel=0.01)
    assert slow.costs.in_situ == pytest.approx(FACTOR, rel=0.01)
    assert slow.held_out is not None
    assert slow.held_out["p50"] < 0.01 and abs(slow.held_out["kernel_bias"]) < 0.005


def test_the_host_and_the_kernels_stay_apart(profile: Profile) -> None:
    """The host's time of a step of 30 decodes is the one put in, to 3 %."""
    table = columns([StepShape("H", (500,) * 30)])
    host = Calibrated(profile).host_ns(table)[0]
    assert host == pytest.approx(HOST_NS + 30 * HOST_PER_SEQUENCE_NS, rel=0.03)
    assert not profile.costs.host.assumed


def test_what_an_engine_ahead_takes_is_found_apart(profile: Profile) -> None:
    """Both lanes of a step of 30 decodes are those of the runs ahead, to 3 %, and so are held-out periods, to 1 %; the
    engine that waits keeps its own."""
    cost, table = Calibrated(profile), columns([StepShape("H", (500,) * 30)])
    kernels = FACTOR * kernel_ns(table)[0] + STEP_NS
    assert cost.overlap_known
    assert not Calibrated(replace(profile, ahead=None)).overlap_known
    assert cost.without_host().explain(table)["host"][0] == 0
    assert cost.without_host().kernel_ns(table)[0] == pytest.approx(BESIDE * kernels, rel=0.03)
    assert cost.kernel_ns(table)[0] == pytest.approx(kernels, rel=0.03)
    assert cost.host_part.base == pytest.approx(HOST_BESIDE * HOST_NS, rel=0.1)
    assert profile.held_out is not None
    assert profile.held_out["ahead"][-1]["p50"] < 0.01


def test_identity_and_gaps_are_written_down(profile: Profile) -> None:
    """The catalog's GPU, the measured blocks and the hull are there; only energy is missing; JSON keeps it all."""
    assert (profile.gpu, profile.num_blocks) == ("h200", 55_000)
    assert (profile.hull.max_sequences, profile.hull.max_tokens) == (64, 1024)
    assert (profile.hull.max_context, profile.hull.max_chunk_context) == (2047, 2048)
    assert [what.partition(":")[0] for what in profile.missing] == ["energy"]
    assert Profile.from_json(profile.to_json(), "made.json") == profile


@pytest.mark.parametrize("training", [True, False])
def test_engine_runs_have_padding_and_rests_in_the_fit_and_held_out(training: bool) -> None:
    """A static batch of the longest prompts fits into a step; sparse requests come one by one, far apart, for as
    long as asked."""
    specs = {spec.kind: spec for spec in run_specs(LIMITS, 1, 0) if spec.training is training}
    pace, longer = Pace(0.005, 1e-5), not training
    made = {kind: requests(kind, specs[kind].max_seqs, LIMITS, 0, 5.0, pace, longer=longer) for kind in specs}
    assert all(isinstance(one, OpenWorkload) for one in made.values())
    static, sparse = ([one.request for one in made[kind].arrivals()] for kind in ("static", "sparse"))
    assert specs["static"].max_seqs > 1
    assert max(one.prompt_tokens for one in static) * specs["static"].max_seqs <= LIMITS.max_tokens
    assert 3e9 < sparse[-1].arrival_ns < 7e9
    assert 60e6 < np.diff([one.arrival_ns for one in sparse]).mean() < 110e6


@pytest.mark.parametrize("max_seqs", [256, 16])
def test_an_engine_run_is_of_decodes_and_of_requests_that_come_and_end(max_seqs: int) -> None:
    """On a GPU of 8 ms a step and 25 us a prompt token the first prompts take a quarter of 3 s, and about three
    requests end in a slot; on one so quick that all fits, lengths are those that the limits allow."""
    limits = StepRange(max_seqs=256, max_tokens=8192, max_context=16384, kv_tokens=400_000)

    def means(pace: Pace, longer: bool = False) -> tuple[float, float]:
        made = [one.request for one in requests("continuous", max_seqs, limits, 0, 3.0, pace, longer=longer).arrivals()]
        return np.mean([r.prompt_tokens for r in made]).item(), np.mean([r.max_output_tokens for r in made]).item()

    prompt, output = means(Pace(0.008, 25e-6))
    assert prompt == pytest.approx(min(512, 0.25 * 3.0 / (25e-6 * max_seqs)), rel=0.15)
    assert output == pytest.approx(3.0 / 0.008 / 3, rel=0.15)
    assert means(Pace(1e-4, 1e-9)) == (pytest.approx(512, rel=0.15), pytest.approx(256, rel=0.15))
    assert means(Pace(1.0, 0.1)) == (pytest.approx(16, rel=0.15), pytest.approx(8, rel=0.15))
    longer = means(Pace(0.008, 25e-6), longer=True)
    assert longer[1] == pytest.approx(1.5 * output, rel=0.15) and (longer[0] > 1.3 * prompt) == (max_seqs == 256)


def test_without_engine_runs_the_host_is_assumed_and_said_to_be() -> None:
    """Points alone make a profile, whose host term is assumed, with a note, and whose gaps are listed by block."""
    work = job()
    chosen = [p for p in work.points if p.block in "AC"]
    times = kernel_ns(columns(chosen))
    raw = Raw(IDENTITY, samples={p: MeasuredStep(p, [float(ns)]) for p, ns in zip(chosen, times, strict=True)})
    partial = assemble(work, raw)
    assert partial.costs.host.assumed
    assert partial.costs.in_situ == 1.0
    assert any("host: assumed" in note for note in partial.notes)
    lacking = {what.partition(":")[0] for what in partial.missing}
    assert {"block B", "block D", "block E", "block H", "block host", "block held out", "block swap"} <= lacking
    assert partial.held_out is None
