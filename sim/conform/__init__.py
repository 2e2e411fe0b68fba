"""Replays a schedule recorded from a real engine and compares every step of ours with it.

Two forms of recording are read. Both are one JSON object; times are seconds from the start of the run.

The form to record your own with (made so from vLLM 0.33.0; one engine, one replica, one scheduler):

    meta      `scheduler`: vLLM's class path, or the name of a policy here; `block_size`, `usable_blocks`
              (less any null block; `num_gpu_blocks` may stand beside it), `max_model_len`; every knob of the policy by
              its name; `step_time`, if steps follow a law: "t_end = t_start + 0.005 + 0.00002*sum(num_tokens)"; notes.
              `totals`, if any: requests, steps, preemptions, tokens, cached_tokens, empty_steps, makespan and others.
    requests  `id`, `arrival`, `prompt_len`, `output_len` (generated in fact), `priority` (0 if absent), and with prefix
              caching `prompt`, a list of segments [stream, start, len]: equal segments are equal tokens. Output token j
              of request i is ("o<i>", j).
    steps     in order, each with `t_start`, `t_end`, `scheduled` [[id, tokens]...] in batch order, `preempted` in the
              order of preemption, `finished` in batch order, `free_blocks_sched` after scheduling, and after the step
              `free_blocks_after`, `num_waiting`, `num_running`. `cached` [[id, tokens]...]: prefix hits of admissions.
    per_request (optional) by id: `first_token_time`, `finish_time`, `num_preemptions`, `cached_tokens` (first
              admission), `cached_tokens_all`, `admissions`.

The engine's loop that this assumes: requests that have arrived enter by (arrival, id), then the scheduler is asked; the
step runs, tokens are appended, the finished leave. With nothing to run, time goes on to the next arrival.

The other form is Vidur's, as `sim/conform/vidur.py` says. Every step takes the time that was recorded. Compared is all
that the recording holds of a step, of a request (at the step that settles it) and of the whole run, exactly; Vidur's
times, which are rounded sums of floats, to 1e-5 s. A field or a knob that is not known is refused, never passed over.
"""

from __future__ import annotations

from pathlib import Path

from sim.conform.compare import Difference, Verdict, compare
from sim.conform.recording import BadRecording, read
from sim.errors import ScenarioError
from sim.policies import POLICIES

__all__ = ["Difference", "Verdict", "conform"]


def conform(path: Path, policy: str | None = None) -> Verdict:
    """Compares the recording at `path` with the policy of its scheduler, or with `policy` given the same knobs.

    ScenarioError, in one line, if it is no whole recording or asks for what is not simulated.
    """
    if policy is not None and policy not in POLICIES:
        raise ScenarioError(f"conform: {policy} is no policy here. Known: {', '.join(POLICIES)}.")
    try:
        return compare(path, read(path, policy))
    except BadRecording as error:
        raise ScenarioError(f"{path}: {error}") from None
