"""Replays a schedule recorded from a real engine and compares every step of ours with it.

Two forms of recording are read. Both are one JSON object; times are seconds from the start of the run.

The form to record your own with (made so from vLLM 0.33.0; one engine, one replica, one scheduler):

    meta      `scheduler`: vLLM's class path, or the name of a policy here; `block_size`, `usable_blocks`
              (less any null block; `num_gpu_blocks` may stand beside it), `max_model_len`; every knob of the policy by
              its name, as a scenario writes it; `step_time`, if steps follow a law, by which they are then replayed:
              "t_end = t_start + 0.005 + 0.00002*sum(num_tokens)"; `engine_version` (or `vllm_version`); `order`
              within a batch: "exact", as the engine had it; "arrival", put so afterwards, prompts before decodes, as
              in a recording whose `name` ends in _by_arrival; "free" where it does not count; notes.
              `totals`, if any: requests, steps, preemptions, tokens, cached_tokens, empty_steps, makespan and others.
    requests  `id`, `arrival`, `prompt_len`, `output_len` (generated in fact), `max_new_tokens` (the cap that the
              scheduler knew; `output_len` if absent), `priority` (0 if absent), `ignore_eos` (false if absent), and
              with prefix caching `prompt`, a list of segments [stream, start, len]: equal segments are equal tokens.
              Output token j of request i is ("o<i>", j).
    steps     in order of time, each with `t_start`, `t_end`, `scheduled` [[id, tokens]...] in batch order, `preempted`
              in the order of preemption, `finished` in batch order, `free_blocks_sched` once the step is scheduled, and
              `free_blocks_after`, `num_waiting`, `num_running` after the step's end: what the scheduler finds when it
              is next asked, arrivals since aside. Free blocks count evictable ones, too.
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

Engines that schedule ahead of results (the policy's knobs say whether) have other steps; the rest is the same. Under
vLLM's batch queue, that is asynchronous scheduling, pipelines or both:

    meta      also `host_schedule`, `host_update`, `idle_sleep` in seconds; if stated, `batch_queue_size`,
              `pipeline_parallel_size`, `engine_step` and `model_runner` are what the knobs make of them. `step_time`
              counts from t_gpu_start, or is that of the stages of a pipeline, "2 stages, each (0.005 +
              0.00002*sum(num_tokens))/2 rounded down to whole microseconds: stage k of a step starts when its stage
              k-1 and stage k of the previous step have ended". `totals`: also victim_in_flight, wasted_tokens,
              stale_outputs, sleeps.
    requests  `max_tokens`, if above `output_len`: the request ends by a stop token. It is `max_new_tokens` by vLLM's
              name.
    steps     one for each call of the scheduler, those included that found nothing to run: `t_start` it was called,
              `t_scheduled` it had returned, `t_gpu_start` and `t_end` on the device (both `t_scheduled` where nothing
              ran), `t_processed`. Once it is scheduled: `scheduled`, `preempted`, `cached`, `free_blocks_sched`,
              `num_waiting_sched`, `num_running_sched`, and `in_flight`, the steps that were not processed when it was
              called. Once it is processed: `finished`, `free_blocks_after`, `num_waiting`, `num_running`; if any,
              `wasted` [[id, tokens]...] of requests that had ended, and `stale` [id...], preempted since.
    per_request  times are `t_processed`; `wasted_tokens`, if any.

    With batch_queue_size 1, vLLM's synchronous loop is asked once more after the last request has ended, and that
    empty step takes its time by the law.

With `spec_decode` true, under either of vLLM's loops:

    meta      also `spec_method`, `num_spec_tokens`, `num_lookahead_tokens`, `draft_slots`, `num_prefill_lookahead`,
              `num_hash_lookahead_tokens`, `accept_rate`. `totals`: also drafts_scheduled, drafts_accepted.
    steps     if any, `spec` [[id, drafts scheduled, drafts accepted, tokens got]...], `blocks` [[id, KV blocks
              held]...] once it is scheduled, `skip_drafts` where no request could use drafts, and in the synchronous
              loop `drafts` [[id, number]...] given back after it. What was accepted and given back is the recording's.

Under an overlap of scheduling and steps, as SGLang's:

    meta      also `schedule_us` (of a call that launches a batch; another takes no time), `process_us`, and
              `gpu_fixed_us`, `gpu_token_us`, which `step_time` may name: "t_end = t_gpu_start + gpu_fixed_us +
              gpu_token_us*sum(num_tokens)". `totals`: also ignored, and empty_calls, that launched nothing.
    steps     in order of launch: `t_scheduled`, the call's end, `t_gpu_start`, `t_end`, `t_processed`; after the call
              `scheduled`, `retracted` since the last step, `cached`, `free_blocks_sched`, `num_waiting`, `num_running`;
              after processing `finished`, `free_blocks_processed` and, if any, `ignored`, ids of rows whose token was
              thrown away; `free_blocks_after`, found by the next call before it admits.

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
from batchsim.check.conform.read_recording import read
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
