"""Replays a schedule recorded from a real engine and compares every step of ours with it.

Two forms of recording are read. Both are one JSON object; times are seconds from the start of the run.

The form to record your own with (made so from vLLM 0.33.0; one engine, one replica, one scheduler):

    meta      `scheduler`: vLLM's class path, or the name of a policy here; `block_size`, `usable_blocks`
              (less any null block; `num_gpu_blocks` may stand beside it), `max_model_len`; every knob of the policy by
              its name, as a scenario writes it; `step_time`, if steps follow a law: "t_end = t_start + 0.005 +
              0.00002*sum(num_tokens)"; `engine_version` (or `vllm_version`); `order` within a batch: "exact", as the
              engine had it; "arrival", put so afterwards, prompts before decodes, as in a recording whose `name` ends
              in _by_arrival; "free" where it does not count; notes.
              `totals`, if any: requests, steps, preemptions, tokens, cached_tokens, empty_steps, makespan and others.
    requests  `id`, `arrival`, `prompt_len`, `output_len` (generated in fact), `max_new_tokens` (the cap that the
              scheduler knew; `output_len` if absent), `priority` (0 if absent), `ignore_eos` (false if absent), and
              with prefix caching `prompt`, a list of segments [stream, start, len]: equal segments are equal tokens.
              Output token j of request i is ("o<i>", j).
    steps     in order of time, each with `t_start`, `t_end`, `scheduled` [[id, tokens]...] in batch order, `preempted`
              in the order of preemption, `finished` in batch order, `free_blocks_sched` once the step is scheduled, and
              `free_blocks_after`, `num_waiting`, `num_running` after the step's end: what the scheduler finds when it
              is next asked, arrivals since aside. Free blocks are those that are free or can be evicted.
              `cached` [[id, tokens]...], in batch order: prefix hits of admissions.
    per_request (optional) by id: `first_token_time`, `finish_time`, `num_preemptions`, `cached_tokens` (first
              admission), `cached_tokens_all`, `admissions`.

A knob may be left out, or null, only where the policy's own default is null: unset, it follows from the others. An
unknown key of `meta` is passed only where it is null, false, 0 or "": off. With order free, `scheduled`, `cached` and
`finished` are compared as rows in any order; `preempted` is not, nor does it make the policy itself choose otherwise. A
policy with a knob of its own named `order` keeps the key; say `--order free`. Whole numbers and times have ranges
(`sim/check/conform/fields.py`), checked before anything is made of them.

The engine's loop that this assumes: requests that have arrived enter by (arrival, id), then the scheduler is asked; the
step runs, tokens are appended, the finished leave. With nothing to run, time goes on to the next arrival.

The other form is Vidur's, as `sim/check/conform/vidur.py` says. Every step takes the time that was recorded. Compared
is all that the recording holds of a step, of a request (at the step that settles it) and of the whole run, exactly;
Vidur's times, which are rounded sums of floats, to 1e-5 s. A field or a knob that is not known is refused, never passed
over.
"""

from __future__ import annotations

from pathlib import Path

from batchsim.base.errors import ScenarioError, cut
from batchsim.check.conform.compare_steps import FactDifference, StepComparison, compare
from batchsim.check.conform.fields import BadRecording
from batchsim.check.conform.recording import read
from batchsim.policies.registry import POLICIES

__all__ = ["FactDifference", "StepComparison", "conform"]


def conform(path: Path, policy: str | None = None, order: str | None = None) -> StepComparison:
    """Compares the recording at `path` with a replay under its scheduler's policy, or under `policy` with those knobs.

    `order` of the rows within a batch: "exact" as the engine had it, "arrival" (the replay's rows are put so before
    they are compared), "free" (order does not count); None: as the recording says. ScenarioError, in one line, if the
    file is no whole recording or asks for what is not simulated.
    """
    if policy is not None and policy not in POLICIES:
        raise ScenarioError(f"conform: {cut(policy)} is no policy here. Known: {', '.join(POLICIES)}.")
    try:
        return compare(path, read(path, policy, order))
    except BadRecording as error:
        raise ScenarioError(f"{path}: {error}") from None
