"""A measured run played again in simulation: the same requests, from a client that acts as the measured one did.

Open arrivals are sent when the client sent them, late or not; with a limit on those in flight they wait at the client.
A closed loop is one list of requests in the order of sending, each taken when another is answered. Where a file has
aggregates alone, as many requests of its mean lengths are sent at its rate, with exponential gaps; the lengths vary as
in the file, and in any case where they would keep users in lockstep. A request that failed after it had held the engine
is given up when it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

import numpy as np

from batchsim.base.errors import MeasuredError
from batchsim.base.units import NS_PER_S
from batchsim.check.measured.client_faults import in_flight
from batchsim.check.measured.run import MISSING, MeasuredRequests, MeasuredRun
from batchsim.check.validation.impossible import possible
from batchsim.kernel.record import FINISHED, Records
from batchsim.scenario import Point
from batchsim.scenario.config import PolicySpec
from batchsim.scenario.point import Run, simulate_point
from batchsim.scenario.setup import Setup
from batchsim.workload.arrivals import arrival_times_ns
from batchsim.workload.processes import PoissonArrivals
from batchsim.workload.traces.trace_config import RateScale, TraceConfig
from batchsim.workload.traces.trace_rows import Ints, TraceRows
from batchsim.workload.workload_config import TraceArrivals, WorkloadConfig

SEED = 0
SPREAD = 0.2
"""Share by which lengths vary uniformly around their mean, where their spread is unknown and all users of a closed loop
begin at once."""
SKEWED = 0.4
"""Standard deviation, as a share of the mean, from which on lengths are taken as lognormal: normal ones would be below
0."""


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

    @property
    def count(self) -> int:
        """The requests that are sent."""
        return len(self.setup.rows[SEED])

    def simulate(self, spec: PolicySpec, load: float = 1.0) -> Run:
        """The simulation under a policy. `load`: times the measured rate, or the users of a closed loop."""
        replay = self if self.open or load == 1.0 else _with_users(self, load)
        return simulate_point(replay.setup, Point(spec, load if self.open else 1.0, SEED))

    def unfinished(self, simulated: MeasuredRequests) -> int:
        """The number of requests that finished when measured, but not in simulation."""
        rows, measured = self.setup.rows[SEED], self.run.requests
        did = rows.labels["patience"] < 0 if "patience" in rows.labels else np.full(len(rows), True)
        return int((~simulated.ok & (did if measured is None else measured.ok[self.index])).sum())


def replay(setup: Setup, run: MeasuredRun) -> Replay:
    """`run` as a workload for the engine of `setup`. MeasuredError where that engine could not have served it."""
    run = possible(setup, run)
    requests, client = run.requests, run.client
    if requests is None:
        prompt, output, notes = _of_means(setup, run)
        index = np.empty(0, np.int64)
        prompt, output, patience_ns = _with_given_up(setup, run, prompt, output)
    else:
        index, output, patience_ns, notes = _held(requests, setup.max_model_len)
        prompt = requests.prompt_tokens[index]
    limit = client.max_concurrency if client.arrivals in ("closed", "open") else None
    closed = client.arrivals == "closed"
    sent_ns, note = _sendings(run, index, closed, limit)
    notes += note
    hash_ids = None if requests is None or requests.hash_ids is None else requests.hash_ids.picked(index)
    prefix = setup.traffic.shared_prefix if hash_ids is None else None
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
        labels={} if patience_ns is None else {"patience": patience_ns},
    )
    config = WorkloadConfig(
        arrivals=TraceArrivals(),
        output_cap="exact",
        trace=TraceConfig(run.source, rate_scale=RateScale(1.0, "compress")),
        frontend=setup.traffic.frontend,
        shared_prefix=prefix,
        max_concurrency=limit,
    )
    is_open = client.arrivals in ("open", "unknown") and bool(sent_ns.any())
    return Replay(playing(setup, config, rows), run, index, is_open, limit, tuple(notes))


def _held(requests: MeasuredRequests, max_model_len: int) -> tuple[Ints, Ints, Ints | None, list[str]]:
    """(indices of the rows to replay, the output tokens of each, the patience of each in ns or None where none failed,
    notes on failures).

    A failed request is replayed where it held the engine: one of known duration as an endless answer that is given up
    after that time, else as an answer of the tokens that came.
    """
    lasted = ~requests.ok & (requests.e2e_ns > 0)
    beyond = ~requests.ok & (requests.output_tokens == 0) & (requests.prompt_tokens >= max_model_len)
    played = (requests.prompt_tokens > 0) & ((requests.output_tokens > 0) | lasted) & ~beyond
    index = np.flatnonzero(played)
    cut = lasted[index]
    failed = int((~requests.ok[index]).sum())
    notes: list[str] = []
    if failed:
        notes.append(
            f"failed requests that held the engine, and are replayed until they were given up: {failed:,}; their"
            " latencies are no figures"
        )
    if refused := int(beyond.sum()):
        notes.append(
            f"failed requests that are not replayed, of prompts that leave no token below max_model_len"
            f" {max_model_len:,}: {refused:,}"
        )
    if left := len(requests) - len(index) - refused:
        notes.append(f"failed requests that are not replayed, as the file tells of no time in the engine: {left:,}")
    output = requests.output_tokens[index]
    if not cut.any():
        return index, output, None, notes
    room = np.maximum(max_model_len - requests.prompt_tokens[index], 1)
    return index, np.where(cut, room, output), np.where(cut, requests.e2e_ns[index], -1), notes


def _of_means(setup: Setup, run: MeasuredRun) -> tuple[Ints, Ints, list[str]]:
    """Prompts and outputs of as many requests as there were, which have the means, and a note on how they vary.

    They vary by no more than leaves the longest to be served and timed, and the shortest longer than what prompts
    share; by assumption, where the model is hardly longer than their sum, longer prompts have shorter outputs.
    """
    for name in ("requests", "prompt_tokens", "output_tokens"):
        if not run.means.get(name):
            _refuse(run, f"does not say its {name}", "Give a file with the requests.")
    count, client = round(run.means["requests"]), run.client
    in_step = client.arrivals in ("closed", "at_once") and client.max_concurrency != 1 and client.rate_rps is None
    spread = SPREAD if in_step else 0.0
    rng, prefix, reach = np.random.default_rng(SEED), setup.traffic.shared_prefix, setup.cost.reach
    means = [run.means[side] for side in ("prompt_tokens", "output_tokens")]
    room = max(setup.max_model_len - sum(means) - 1, 0.0)
    most = [mean * (1 + room / sum(means)) for mean in means]
    shortest = 1 if prefix is None else prefix.added_tokens + 1
    timed = setup.max_model_len if reach is None else reach.max_chunk_context - 1
    prompt = _varied(run, "prompt_tokens", rng, spread, (shortest, min(most[0], timed)))
    output = _varied(run, "output_tokens", rng, spread, (1, most[1]))
    spread_in_file = [any(f"{side}_tokens_{of}" in run.means for of in ("std", "min")) for side in ("prompt", "output")]
    if spread * sum(means) > room and not any(spread_in_file):
        half = max(int(min(spread * min(means), means[0] - shortest, timed - means[0])), 0)
        off = rng.permutation(np.linspace(-half, half, count)).astype(np.int64)
        prompt, output = int(means[0]) + off, int(means[1]) - off
    note = f"played as {count:,} requests of the mean lengths: the file has none one by one"
    for side, lengths, by_file in zip(("prompts", "outputs"), (prompt, output), spread_in_file, strict=True):
        if lengths.min() < lengths.max():
            how = (
                "as the file says" if by_file else f"within ± {SPREAD:.0%} by assumption, as equal ones run in lockstep"
            )
            note += f"; {side} vary from {lengths.min():,} to {lengths.max():,} tokens, {how}"
    return prompt, output, [note]


def _with_given_up(setup: Setup, run: MeasuredRun, prompt: Ints, output: Ints) -> tuple[Ints, Ints, Ints | None]:
    """Prompts, outputs and patience of the requests of aggregates with those among them that were given up."""
    if not (count := round(run.means.get("given_up", 0))):
        return prompt, output, None
    rng, mean = np.random.default_rng(SEED), int(run.means["prompt_tokens"])
    gone = rng.permutation(np.arange(len(prompt) + count) < count)
    columns = [np.zeros(len(gone), np.int64) for _ in range(3)]
    for column, others, of_given_up in zip(
        columns,
        (prompt, output, -1),
        (mean, max(setup.max_model_len - mean, 1), round(run.means["given_up_s"] * NS_PER_S)),
        strict=True,
    ):
        column[~gone], column[gone] = others, of_given_up
    return columns[0], columns[1], columns[2]


def _varied(run: MeasuredRun, side: str, rng: np.random.Generator, spread: float, limits: tuple[float, float]) -> Ints:
    """Lengths of `side` with its mean: normal with the given standard deviation, lognormal for a large one, uniform
    between the given shortest and longest, else within ± `spread` of the mean (of what is beyond the lower of
    `limits`); drawn together where they would leave `limits`."""
    mean, count = run.means[side], round(run.means["requests"])
    low, high, std = (run.means.get(f"{side}_{of}") for of in ("min", "max", "std"))
    if std is not None:
        off = rng.standard_normal(count)
        off = std * (off - off.mean()) / (off.std() or 1.0)
        if std > SKEWED * mean:
            sigma = np.sqrt(np.log1p((std / mean) ** 2))
            off = mean * (np.exp(sigma * off / std - sigma**2 / 2) - 1)
        off = np.clip(off, (1 if low is None else low) - mean, np.inf if high is None else max(high - mean, 0.0))
        off -= off.mean()
    else:
        half = spread * (mean - limits[0] + 1) if low is None or high is None else (high - low) / 2
        off = half * (rng.permutation(2 * np.arange(count) + 1) / count - 1)
    room = ((mean - limits[0], -off.min()), (limits[1] - mean, off.max()))
    narrowed = min(1.0, *(max(free, 0.0) / max(float(most), 1e-9) for free, most in room))
    return np.maximum(np.rint(mean + narrowed * off), 1).astype(np.int64)


def _sendings(run: MeasuredRun, index: Ints, closed: bool, limit: int | None) -> tuple[Ints, list[str]]:
    """When each request is sent, in ns, or where its client is full, from when on; and what is not as it was."""
    requests, client = run.requests, run.client
    count = len(index) if requests is not None else round(run.means["requests"] + run.means.get("given_up", 0))
    if client.arrivals == "at_once" or (closed and limit is None):
        return np.zeros(count, np.int64), []
    sent_ns = None if requests is None or requests.sent_ns is None else requests.sent_ns[index]
    if closed and limit is not None and sent_ns is None and client.rate_rps is not None:
        times_ns = np.zeros(count, np.int64)
        times_ns[:limit] = arrival_times_ns(PoissonArrivals(client.rate_rps), SEED, None, count)[:limit]
        return times_ns, [f"its users begin at the {client.rate_rps:.4g}/s that were asked for, with exponential gaps"]
    if closed:
        if sent_ns is None or requests is None or limit is None:
            return np.zeros(count, np.int64), []
        full = np.flatnonzero(in_flight(requests)[index] >= limit)
        begun = int(full[0]) if len(full) else limit - 1  # by then all users have sent one
        return np.where(np.arange(count) <= begun, sent_ns, 0), []
    if sent_ns is not None:
        assert requests is not None, "its sendings are known"
        notes: list[str] = []
        if limit is not None and int(in_flight(requests).max()) >= limit:
            notes.append(f"the client was full, {limit} in flight: what it held back is sent no sooner than it was")
        return sent_ns, notes
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
    groups = tuple(replace(group, setup=playing(group.setup, config, rows)) for group in setup.groups)
    played = replace(setup, traffic=config, rows={SEED: rows}, load_name="rate_scale", loads=(1.0,))
    return replace(played, groups=groups)


def _with_users(one: Replay, load: float) -> Replay:
    """`one` with `load` times as many users of its closed loop."""
    assert one.limit is not None, "asked of closed loops with a number of users"
    config = replace(one.setup.traffic, max_concurrency=max(round(one.limit * load), 1))
    return replace(one, setup=playing(one.setup, config, one.setup.rows[SEED]))


class Ran(Protocol):
    """An engine's run: its records, and whether responses were streamed."""

    @property
    def records(self) -> Records: ...
    @property
    def streams(self) -> bool: ...


def simulated_requests(run: Ran) -> MeasuredRequests:
    """The requests of a simulation as if they had been measured, by request id; latencies from the actual sending.

    Unfinished ones are not `ok`. Responses that are sent whole have no TTFT.
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
