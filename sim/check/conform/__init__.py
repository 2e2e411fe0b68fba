"""Replays a schedule recorded from a real engine and compares every step of ours with it.

A recording is one JSON object; times are seconds from the start of the run. The forms of others are named at the end.

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

    A synchronous loop may be recorded so too, without `in_flight`, `num_waiting_sched` and `num_running_sched`. With
    batch_queue_size 1 vLLM's is asked once more after the last request has ended, in an empty step; without
    `t_scheduled` that takes its time by the law.

With `spec_decode` true, under either of vLLM's loops:

    meta      also `spec_method`, `num_spec_tokens`, `num_lookahead_tokens`, `draft_slots`, `num_prefill_lookahead`,
              `num_hash_lookahead_tokens`, `accept_rate`. `totals`: also drafts_scheduled, drafts_accepted.
    steps     if any, `spec` [[id, drafts scheduled, drafts accepted, tokens got]...], `blocks` [[id, KV blocks
              held]...] once it is scheduled, `skip_drafts` where no request could use drafts, and in the synchronous
              loop `drafts` [[id, number]...] given back after it. What was accepted and given back is the recording's.

With LoRA adapters, under either of vLLM's loops: `meta.max_loras`; `requests[].lora`, the adapter's number, none where
the base model alone answers; `steps[].loras`, the adapters of all running requests once the step is scheduled, sorted;
`totals`: also max_active, the most of them.

With `encoder_budget` and `encoder_cache` in `meta`, both in embeddings, and `disable_chunked_mm_input` if true, of an
engine whose requests have images, audios or videos:

    requests  if any, `mm` [[identifier, first token, length]...]: the prompt has the tokens of that stream there.
    steps     if any, `encode` [[id, [place in mm...]]...] encoded in this step, and `enc_freed`, the identifiers that
              the worker is to drop, sorted; `enc_free`, `enc_freeable`: embeddings once the step is scheduled, and
              `enc_free_after`, `enc_freeable_after`: once it is processed. `totals`: also encoded, evicted.

With `pooling` true, of models that make no tokens: `output_len` is 0, and `first_token_time` null.

With `kv_role`, of an engine of vLLM that passes KV to others or from them, in either loop the form of the batch queue
(with batch_queue_size 1 without `in_flight` and what is counted once a step is scheduled, and with empty steps), and:

    meta      `kv_role`, `defer_block_free`, `requires_kv_delivery`; `kv_load_failure_policy`, fail if absent. Notes
              `connector`, `kv_transfer`.
    requests  `kv`, if anything is passed: `do_remote_prefill` with `transfer_us`, for how long its KV is pulled from
              the launch of the step in `loads_started`; `do_remote_decode` with `hold_us`, for how long it is kept
              from the processing of the step in `sends_started`.
    steps     if any, `loads_started` [[id, tokens]...], `sends_started` [[id, KV blocks]...], `remote` [id...] still
              held for their pull once it is scheduled, and `loads_done`, `sends_done` [id...] in any order, noticed at
              its launch.

With `tier`, of an engine of vLLM that offloads KV to the host's memory, in either loop the same without `kv`, and:

    meta      `tier`: `cpu_chunks`, and `blocks_per_chunk`, `eviction_policy`, `store_threshold`, `max_tracker_size`,
              `offload_prompt_only` where they are not vLLM's defaults; `link`, in seconds: a transfer takes `fixed` and
              `store_per_chunk` or `load_per_chunk` for each chunk. `totals`: also chunks_loaded, chunks_stored,
              stores_refused, evicted, flushed_jobs, deferred_lookups.
    requests  `prompt` without prefix caching, too.
    steps     if any, of the scheduler's call `matched` [[id, tokens in the prefix cache, tokens in the tier, null:
              asked for again]...], `loads_started` and `stores_queued` [[id, chunks, job]...], `remote` in the order
              of the queue, `offers` [[id, chunks, chunks taken in, null: no room, chunks evicted]...], `flushed`
              [job...] for which the launch waits, with `t_launch` where that comes later than `t_scheduled`; of the
              launch `xfers` [[job, "s" or "l", id, chunks, start, end]...] in order of submission, `jobs_done`
              [job...] and `loads_done`, noticed then; `cpu` [chunks used, evictable, being stored] once it is
              processed, all 0 if absent.

Several such engines behind a proxy are one file, as `sim/check/conform/prefill_decode.py` says.

Under an overlap of scheduling and steps, as SGLang's:

    meta      also `schedule_us` (of a call that launches a batch; another takes no time), `process_us`, and
              `gpu_fixed_us`, `gpu_token_us`, which `step_time` may name: "t_end = t_gpu_start + gpu_fixed_us +
              gpu_token_us*sum(num_tokens)". `totals`: also ignored, and empty_calls, that launched nothing.
    steps     in order of launch: `t_scheduled`, the call's end, `t_gpu_start`, `t_end`, `t_processed`; after the call
              `scheduled`, `retracted` since the last step, `cached`, `free_blocks_sched`, `num_waiting`, `num_running`;
              after processing `finished`, `free_blocks_processed` and, if any, `ignored`, ids of rows whose token was
              thrown away; `free_blocks_after`, found by the next call before it admits.

Ranks that step together are read from one file, by `sim/check/conform/lockstep_form.py`. Bucket lists of accelerators
with compiled shapes are read too, by `sim/check/conform/buckets.py`, and what packers made of lengths, by
`sim/check/conform/packing.py`; the replicas that a gateway's router chose, by `sim/check/conform/routes.py`.

Another form is Vidur's, as `sim/check/conform/vidur.py` says. Every step takes the time that was recorded. Compared
is all that the recording holds of a step, of a request (at the step that settles it) and of the whole run, exactly;
Vidur's times, which are rounded sums of floats, to 1e-5 s. A field or a knob that is not known is refused, never passed
over.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from batchsim.base.errors import ScenarioError, cut
from batchsim.check.conform.buckets import CaseComparison, bucket_cases, compare_buckets
from batchsim.check.conform.compare_steps import FactDifference, StepComparison, compare
from batchsim.check.conform.fields import BadRecording
from batchsim.check.conform.lockstep import compare_lockstep
from batchsim.check.conform.lockstep_form import is_lockstep
from batchsim.check.conform.other_versions import with_rule
from batchsim.check.conform.packing import PackingComparison, compare_packing, is_packing
from batchsim.check.conform.prefill_decode import engines_recording, is_prefill_decode
from batchsim.check.conform.read_recording import read_file, recording_of
from batchsim.check.conform.recording import EXACT
from batchsim.check.conform.replay_engines import compare_engines
from batchsim.check.conform.routes import RouteComparison, compare_routes, is_routes
from batchsim.policies.registry import POLICIES

__all__ = [
    "CaseComparison", "Comparison", "FactDifference", "PackingComparison", "RouteComparison", "StepComparison",
    "conform",
]  # fmt: skip

Comparison = StepComparison | PackingComparison | CaseComparison | RouteComparison


def conform(path: Path, policy: str | None = None, order: str | None = None) -> Comparison:
    """Compares the recording at `path` with a replay under its scheduler's policy, or under `policy` with those knobs;
    what a packer made with the packer of that name, and bucket lists with those made here.

    `order` of the rows within a batch: "exact" as the engine had it, "arrival" (the replay's rows are put so before
    they are compared), "free" (order does not count); None: as the recording says. ScenarioError, in one line, if the
    file is no whole recording or asks for what is not simulated.
    """
    if policy is not None and policy not in POLICIES:
        raise ScenarioError(f"conform: {cut(policy)} is no policy here. Known: {', '.join(POLICIES)}.")
    try:
        data = read_file(path)
        if is_lockstep(data):
            return compare_lockstep(path, data, policy, order)
        if is_prefill_decode(data):
            if order not in (None, EXACT):
                raise BadRecording(f"order {order} is not for several engines, which are recorded exactly. Drop it.")
            return compare_engines(path, engines_recording(data, policy))
        if is_routes(data):
            if policy is not None or order is not None:
                raise BadRecording(
                    "has a router's decisions, of no policy and in one order. Drop --policy and --order."
                )
            return compare_routes(path, data)
        cases = bucket_cases(data)
        if cases is None and not is_packing(data):
            recording = recording_of(data, policy, order)
            verdict = compare(path, recording)
            return with_rule(verdict, recording, partial(compare, path)) if verdict.difference else verdict
        if policy is not None or order is not None:
            what = "is what a packer made" if cases is None else "has bucket lists"
            raise BadRecording(f"{what}, of no policy and with one order. Drop --policy and --order.")
        return compare_packing(path, data) if cases is None else compare_buckets(path, cases)
    except BadRecording as error:
        raise ScenarioError(f"{path}: {error}") from None
