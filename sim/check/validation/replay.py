"""A measured run played again in simulation: the same requests, from a client that acts as the measured one did.

Open arrivals are sent when the client sent them, late or not; with a limit on those in flight they wait at the client.
A closed loop is one list of requests in the order of sending, each taken when another is answered. Where a file has
aggregates alone, as many requests of its mean lengths are sent at its rate, with exponential gaps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from batchsim.base.errors import MeasuredError
from batchsim.base.units import NS_PER_S
from batchsim.check.measured.client_faults import in_flight
from batchsim.check.measured.run import MISSING, MeasuredRequests, MeasuredRun
from batchsim.kernel.record import FINISHED
from batchsim.scenario import Point
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.point import Run, Setup, simulate_point
from batchsim.workload.arrivals import arrival_times_ns
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.traces.trace_config import RateScale, TraceConfig
from batchsim.workload.traces.trace_rows import Ints, TraceRows
from batchsim.workload.workload_config import TraceArrivals, WorkloadConfig

SEED = 0


@dataclass(frozen=True)
class Replay:
    """A measured run as the workload of `setup`. Request i of a simulation is row `index[i]` of the measured requests,
    where there are some. `open`: requests come whatever the answers do, so that their rate is a load. `notes`: what is
    not as it was."""

    setup: Setup
    run: MeasuredRun
    index: Ints
    open: bool
    limit: int | None
    notes: tuple[str, ...]

    def simulate(self, spec: PolicySpec, load: float = 1.0) -> Run:
        """The simulation under a policy. `load`: times the measured rate, or the users of a closed loop."""
        replay = self if self.open or load == 1.0 else _with_users(self, load)
        return simulate_point(replay.setup, Point(spec, load if self.open else 1.0, SEED))


def replay(setup: Setup, run: MeasuredRun) -> Replay:
    """`run` as a workload for the engine of `setup`. MeasuredError where that engine could not have served it."""
    requests, client = run.requests, run.client
    notes: list[str] = []
    if requests is None:
        prompt, output, index = _of_means(run)
        notes.append(f"played as {len(prompt):,} requests of the mean lengths: the file has none one by one")
    else:
        index = np.flatnonzero((requests.prompt_tokens > 0) & (requests.output_tokens > 0))
        if left := len(requests) - len(index):
            notes.append(
                f"failed requests that are not replayed, as nobody knows how long the engine had them: {left:,}"
            )
        prompt, output = requests.prompt_tokens[index], requests.output_tokens[index]
    limit = client.max_concurrency if client.arrivals in ("closed", "open") else None
    closed = client.arrivals == "closed"
    sent_ns, note = _sendings(run, index, closed, limit)
    notes += note
    hash_ids = None if requests is None or requests.hash_ids is None else requests.hash_ids.picked(index)
    prefix = setup.resolved.workload.shared_prefix if hash_ids is None else None
    if prefix is not None:
        if int(prompt.min()) <= prefix.added_tokens:
            _refuse(
                run,
                f"a prompt of {int(prompt.min())} tokens cannot hold shared_prefix.added_tokens {prefix.added_tokens}",
                "Lower it in the scenario.",
            )
        notes.append(f"prompts share what the scenario's shared_prefix says: {prefix.groups} of {prefix.added_tokens}")
    _check_lengths(setup, run, prompt + output)
    rows = TraceRows(
        sent_ns,
        prompt - (0 if prefix is None else prefix.added_tokens),
        output,
        run.name,
        "measured",
        hash_ids=hash_ids,
    )
    config = WorkloadConfig(
        arrivals=TraceArrivals(),
        output_cap="exact",
        trace=TraceConfig(run.source, rate_scale=RateScale(1.0, "compress")),
        frontend=setup.resolved.workload.frontend,
        shared_prefix=prefix,
        max_concurrency=limit,
    )
    is_open = client.arrivals in ("open", "unknown") and bool(sent_ns.any())
    return Replay(playing(setup, config, rows), run, index, is_open, limit, tuple(notes))


def _of_means(run: MeasuredRun) -> tuple[Ints, Ints, Ints]:
    """Lengths of as many requests as there were, each of the mean length, and no index."""
    for name in ("requests", "prompt_tokens", "output_tokens"):
        if not run.means.get(name):
            _refuse(run, f"does not say its {name}", "Give a file with the requests.")
    count = round(run.means["requests"])
    lengths = [np.full(count, max(round(run.means[name]), 1)) for name in ("prompt_tokens", "output_tokens")]
    return lengths[0], lengths[1], np.empty(0, np.int64)


def _sendings(run: MeasuredRun, index: Ints, closed: bool, limit: int | None) -> tuple[Ints, list[str]]:
    """When each request is sent, in ns, or where its client is full, from when on; and what is not as it was."""
    requests, client = run.requests, run.client
    count = len(index) if requests is not None else round(run.means["requests"])
    if client.arrivals == "at_once" or (closed and limit is None):
        return np.zeros(count, np.int64), []
    told = None if requests is None or requests.sent_ns is None else requests.sent_ns[index]
    if closed and limit is not None and told is None and client.rate_rps is not None:
        times_ns = np.zeros(count, np.int64)
        times_ns[:limit] = arrival_times_ns(PoissonArrivals(client.rate_rps), SEED, None, count)[:limit]
        return times_ns, [f"its users begin at the {client.rate_rps:.4g}/s that were asked for, with exponential gaps"]
    if closed:
        if told is None or requests is None or limit is None:
            return np.zeros(count, np.int64), []
        full = np.flatnonzero(in_flight(requests)[index] >= limit)
        begun = int(full[0]) if len(full) else limit - 1  # by then all users have sent one
        return np.where(np.arange(count) <= begun, told, 0), []
    if told is not None:
        assert requests is not None, "its sendings are known"
        notes: list[str] = []
        if limit is not None and int(in_flight(requests).max()) >= limit:
            notes.append(f"the client was full, {limit} in flight: what it held back is sent no sooner than it was")
        return told, notes
    rate = run.means.get("sent_rps") or client.rate_rps
    if not rate:
        _refuse(run, "tells neither when requests were sent nor at which rate", "Give a file that does.")
    times_ns = arrival_times_ns(PoissonArrivals(rate), SEED, None, count)
    if count > 1:  # as the tools do themselves, so that the rate is the one asked for
        times_ns = np.rint(times_ns * ((count - 1) / rate * NS_PER_S / int(times_ns[-1]))).astype(np.int64)
    return times_ns, [f"sent at {rate:.4g}/s with exponential gaps: when they were is not in the file"]


def _check_lengths(setup: Setup, run: MeasuredRun, tokens: Ints) -> None:
    longest, most = int(tokens.max()), setup.max_model_len
    if longest > most:
        _refuse(
            run,
            f"a request of {longest:,} tokens, prompt and answer, is beyond max_model_len {most:,} of the scenario",
            "Raise that: the measured engine served it.",
        )


def _refuse(run: MeasuredRun, what: str, advice: str) -> NoReturn:
    raise MeasuredError(f"{run.name}: {what}. {advice}")


def playing(setup: Setup, config: WorkloadConfig, rows: TraceRows) -> Setup:
    """`setup`, and that of each of its groups, with the workload `config` of `rows`, scaled by its load."""
    resolved = replace(setup.resolved, workload=config, rows={SEED: rows}, load_name="rate_scale", loads=(1.0,))
    groups = tuple(replace(group, setup=playing(group.setup, config, rows)) for group in setup.groups)
    return replace(setup, resolved=resolved, groups=groups)


def _with_users(one: Replay, load: float) -> Replay:
    """`one` with `load` times as many users of its closed loop."""
    assert one.limit is not None, "asked of closed loops with a number of users"
    resolved = one.setup.resolved
    config = replace(resolved.workload, max_concurrency=max(round(one.limit * load), 1))
    return replace(one, setup=playing(one.setup, config, resolved.rows[SEED]))


def simulated_requests(run: Run) -> MeasuredRequests:
    """The requests of a simulation as if they had been measured, by request id; latencies from the actual sending.

    Those that did not finish are not `ok`. Responses that are sent whole have no TTFT.
    """
    rows = np.sort(run.records.requests, order="request_id")
    done = rows["outcome"] == FINISHED
    first = done & run.streams
    return MeasuredRequests(
        sent_ns=rows["sent_ns"],
        intended_ns=None,
        ttft_ns=np.where(first, rows["first_delivery_ns"] - rows["sent_ns"], MISSING),
        e2e_ns=np.where(done, rows["delivered_ns"] - rows["sent_ns"], MISSING),
        prompt_tokens=rows["prompt_tokens"],
        output_tokens=rows["output_tokens"],
        ok=done,
        chunks=np.full(len(rows), MISSING),
    )
