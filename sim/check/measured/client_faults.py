"""Faults of the client of a measured run, detected from its file: late, in lockstep, not as configured, chunks merged.

A benchmark client shares a machine with others and is often what is measured; such a run still shows what the engine
did with what came when it came, and is replayed so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchsim.base.units import NS_PER_S, format_duration
from batchsim.check.measured.run import MISSING, Client, MeasuredRequests, MeasuredRun
from batchsim.workload.traces.trace_rows import Ints

LATE_NS = 10_000_000
LATE_GAPS = 0.1
"""A request is late that is sent LATE_NS and this share of the mean gap after the time meant for it."""
LATE_SHARE = 0.01
"""Share of late requests from which on a client is late."""
TOGETHER_NS = 1_000_000
TOGETHER_SHARE = 0.5
"""A client asked to send over time is in lockstep where this share of its requests is sent within TOGETHER_NS of the
one before, beyond what chance does at its rate."""
FEWEST = 20
"""Requests below which nothing is said of gaps and loops."""
SURE = 3.0
"""Standard errors of the coefficient of variation by which gaps must differ from exponential ones."""
HELD_SHARE = 0.95
"""Share of sendings at which a closed loop is full; and of the completed requests/s below which one is found."""


def with_faults(run: MeasuredRun) -> MeasuredRun:
    """`run` with a note for each fault of its client; one whose settings are unknown is known by what it did."""
    if run.requests is None:
        return _held_back(run)
    client = run.client
    notes = [*run.notes, *run.requests.notes]
    if run.requests.sent_ns is not None:
        client, loop = _found_out(client, run.requests)
        notes += [*loop, *_late(client, run.requests), *_together(client, run.requests), *_gaps(client, run.requests)]
    elif client.arrivals == "open":
        notes.append("the times of sending are not in the file")
    return replace(run, client=client, notes=tuple(notes))


def _held_back(run: MeasuredRun) -> MeasuredRun:
    """A run of aggregates; one whose client was to send over time, and waited for answers instead, as a closed loop.

    Detected by a throughput below that of a client that sends as many requests at the configured rate and waits for the
    last. Its users are the mean number in flight.
    """
    client, figures, count = run.client, run.figures, run.means.get("requests")
    asked, done, e2e_s = client.rate_rps, figures.get("throughput_rps"), figures.get("e2e_mean_s")
    asked = asked and asked * run.means.get("ended_well", 1.0)
    if client.arrivals != "open" or not (asked and done and e2e_s and count):
        return run
    if done >= HELD_SHARE * count / (count / asked + figures.get("e2e_p99_s", e2e_s)):
        return run
    users = max(round(done * e2e_s), 1)
    users = users if client.max_concurrency is None else min(users, client.max_concurrency)
    note = (
        f"{asked:.4g}/s were asked for and {done:.4g}/s completed: a closed loop in fact, of {users} in flight"
        " (completed/s × mean E2E)"
    )
    return replace(run, client=Client("closed", asked, max_concurrency=users), notes=(*run.notes, note))


def in_flight(requests: MeasuredRequests) -> Ints:
    """The number of requests in flight right after each sending.

    Failed requests of unknown duration are not counted.
    """
    assert requests.sent_ns is not None, "asked of requests with times of sending"
    known = requests.e2e_ns != MISSING
    sent = requests.sent_ns[known]
    begun = np.searchsorted(np.sort(sent), requests.sent_ns, "right")
    return begun - np.searchsorted(np.sort(sent + requests.e2e_ns[known]), requests.sent_ns, "right")


def _found_out(client: Client, requests: MeasuredRequests) -> tuple[Client, list[str]]:
    """The client, and notes; one of unknown arrivals is a closed loop if equally many requests are in flight after each
    sending."""
    if client.arrivals != "unknown" or len(requests) < FEWEST:
        return (replace(client, arrivals="open") if client.arrivals == "unknown" else client), []
    counts = in_flight(requests)
    most = int(counts.max())
    full = counts[most:] == most
    if len(full) < FEWEST // 2 or full.mean() < HELD_SHARE:
        return replace(client, arrivals="open"), []
    return Client("closed", max_concurrency=most), [f"a closed loop in fact: {most} in flight after every sending"]


def _late(client: Client, requests: MeasuredRequests) -> list[str]:
    """A line where requests were sent later than the client meant to send them, which only open arrivals say."""
    if client.arrivals != "open" or requests.intended_ns is None or requests.sent_ns is None:
        return []
    lag_ns = requests.sent_ns - requests.intended_ns
    gap_ns = int(requests.sent_ns[-1]) / max(len(requests) - 1, 1)
    late = lag_ns > LATE_NS + LATE_GAPS * gap_ns
    if late.mean() <= LATE_SHARE:
        return []
    return [
        f"the client was late: {int(late.sum()):,} of {len(requests):,} requests by more than"
        f" {format_duration(round(LATE_NS + LATE_GAPS * gap_ns))}, up to {format_duration(int(lag_ns.max()))}. Replayed"
        " as sent, not as meant"
    ]


def _together(client: Client, requests: MeasuredRequests) -> list[str]:
    """A line where requests were sent in groups though the client was to send over time."""
    if client.arrivals != "open" or len(requests) < FEWEST or requests.sent_ns is None:
        return []
    gaps_ns = np.diff(requests.sent_ns)
    share = float((gaps_ns < TOGETHER_NS).mean())
    chance = 1 - np.exp(-TOGETHER_NS / max(float(gaps_ns.mean()), 1.0))
    if share - chance < TOGETHER_SHARE:
        return []
    return [f"the client was in lockstep: {share:.0%} of its requests were sent within 1 ms of the one before"]


def _gaps(client: Client, requests: MeasuredRequests) -> list[str]:
    """A line where exponential gaps were asked for and others were sent, or another rate."""
    if client.arrivals != "open" or len(requests) < FEWEST or requests.sent_ns is None:
        return []
    notes: list[str] = []
    gaps_ns = np.diff(requests.sent_ns)
    mean_ns = float(gaps_ns.mean())
    held = client.max_concurrency is not None and int(in_flight(requests).max()) >= client.max_concurrency
    if client.poisson and mean_ns > 0 and not held:
        cv, error = float(gaps_ns.std()) / mean_ns, np.sqrt(2 / len(gaps_ns))
        if abs(cv - 1) > SURE * error:
            notes.append(f"Poisson was asked for, gaps with a coefficient of variation of {cv:.2f} were sent")
    if client.rate_rps is not None and mean_ns > 0:
        rate = NS_PER_S / mean_ns
        if abs(rate / client.rate_rps - 1) > max(SURE / np.sqrt(len(requests)), 0.02):
            notes.append(f"{client.rate_rps:.4g}/s were asked for and {rate:.4g}/s sent")
    return notes
