"""Whatever a user gets wrong about images and pooling models: one line, which says where, what and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.base.errors import BatchsimError
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup
from batchsim.study.curves.run import check_inputs

IMAGES = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us, encoder: {base: 2ms, per_token: 10us}}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 8/s}
  lengths: {prompt: {kind: fixed, tokens: 10}, output: {kind: fixed, tokens: 10}}
  items: {tokens: {kind: fixed, tokens: 64}, per_request: {kind: fixed, tokens: 2}, share: 50%}
  output_cap: 10
  requests: 10
policies:
  vllm: {}
slo: ttft<1s @ 90%
"""
POOLING = """\
model: llama-3.1-8b
cost: {kind: linear, base: 5ms, per_token: 20us}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 8/s}
  lengths: {prompt: {kind: fixed, tokens: 10}, output: 0}
  output_cap: exact
  requests: 10
policies:
  vllm: {runner: pooling}
slo: e2e<1s @ 90%
"""
ITEMS = "items: {tokens: {kind: fixed, tokens: 64}, per_request: {kind: fixed, tokens: 2}, share: 50%}"
TOKENS = "tokens: {kind: fixed, tokens: 64}"
ENCODER = ", encoder: {base: 2ms, per_token: 10us}"
VLLM = "vllm: {}"
POOLED = "vllm: {runner: pooling}"
PROMPT, OUTPUT = "prompt: {kind: fixed, tokens: 10}", "output: {kind: fixed, tokens: 10}"
SESSIONS = "sessions: {turns: {kind: fixed, tokens: 3}, think_time: 1s}\n  duration: 9s"
STAGES = "tasks: {stages: [{fan_out: 1, prompt: {kind: fixed, tokens: 5}, output: {kind: fixed, tokens: 5}}]}"

WITH_IMAGES = {
    # what is replaced, by what; what the line says
    "at_intervals": (VLLM, "vllm: {prefill_schedule_interval: 2}", "prefill_schedule_interval beside images"),
    "groups_of_layers": (
        "kv: {tokens: 100000}",
        "kv: {num_blocks: 900, groups: [{kind: full, block_size: 16}]}",
        "a model with groups of KV blocks beside images",
    ),
    "tokens_missing": (f"{TOKENS}, ", "", "s.yaml:7: workload.items.tokens is missing"),
    "tokens_without_a_law": (TOKENS, "tokens: 64", "workload.items.tokens is 64"),
    "tokens_without_a_largest": (TOKENS, "tokens: {kind: gamma, mean: 64, cv: 1}", "tokens has no largest value"),
    "tokens_zero": (TOKENS, "tokens: {kind: fixed, tokens: 0}", "tokens is 0. It must be"),
    "tokens_misspelt": (
        TOKENS,
        "token: {kind: fixed, tokens: 64}",
        "token is not a field of workload.items. Did you mean tokens?",
    ),
    "many_without_a_largest": (
        "per_request: {kind: fixed, tokens: 2}",
        "per_request: {kind: gamma, mean: 2, cv: 1}",
        "per_request has no largest",
    ),
    "too_many": (
        "per_request: {kind: fixed, tokens: 2}",
        "per_request: {kind: fixed, tokens: 2000}",
        "goes up to 2,000 items. At most 1,000",
    ),
    "none_a_request": (
        "per_request: {kind: fixed, tokens: 2}",
        "per_request: {kind: fixed, tokens: 0}",
        "workload.items.per_request: tokens is 0.",
    ),
    "share_beyond_all": ("share: 50%", "share: 150%", "s.yaml:7: workload.items.share"),
    "share_without_unit": (
        "share: 50%",
        "share: 5",
        "workload.items.share: 5 is not a share. Without a unit it is a fraction",
    ),
    "distinct_zero": ("share: 50%", "distinct: {count: 0}", "distinct: count is 0. It must be from 1 to"),
    "distinct_a_number": ("share: 50%", "distinct: 9", "workload.items.distinct is 9"),
    "distinct_without_count": ("share: 50%", "distinct: {zipf: 1}", "workload.items.distinct.count is missing"),
    "distinct_too_uneven": ("share: 50%", "distinct: {count: 9, zipf: 11}", "zipf is 11. It must be from 0 to 10"),
    "place_unknown": (
        "share: 50%",
        "place: middle",
        "workload.items.place is \"middle\". Write 'before_text' or 'after_text'",
    ),
    "key_unknown": ("share: 50%", "kinds: 3", "kinds is not a field of workload.items"),
    "items_a_list": (ITEMS, "items: [1, 2]", "workload.items is"),
    "encoder_missing": (ENCODER, "", "s.yaml:2: how long encoding images, audios and videos takes is not known. Write"),
    "encoder_without_base": (
        "encoder: {base: 2ms, per_token: 10us}",
        "encoder: {per_token: 10us}",
        "encoder.base is missing",
    ),
    "encoder_without_unit": (
        "base: 2ms, per_token",
        "base: 2, per_token",
        "cost.encoder.base: 2 is not a time. Write a number with a unit",
    ),
    "encoder_below_zero": ("per_token: 10us}", "per_token: -10us}", "encoder.per_token"),
    "encoder_key_unknown": ("per_token: 10us}", "per_patch: 10us}", "per_patch is not a field of"),
    "encoder_unread": (ITEMS, "prompt_scale: 1", "encoder 2 ms + 10 us a token an item: no request has images"),
    "policy_static": (
        VLLM,
        "gated: {}",
        "s.yaml:11: gated: requests with images, audios or videos are not simulated under it",
    ),
    "policy_drafts": (
        VLLM,
        "vllm: {speculative_config: {method: ngram, num_speculative_tokens: 2, acceptance: 0.5}}",
        "speculative_config beside images",
    ),
    "sglang_drafts": (
        VLLM,
        "sglang: {speculative_algorithm: NGRAM, acceptance: 0.5}",
        "beside images, audios or videos is not simulated",
    ),
    "budget_zero": (VLLM, "vllm: {max_num_encoder_input_tokens: 0}", "max_num_encoder_input_tokens is 0"),
    "cache_zero": (VLLM, "vllm: {encoder_cache_size: 0}", "encoder_cache_size is 0"),
    "cache_in_bytes": (VLLM, "sglang: {vlm_cache_size_mb: 100MB}", 'vlm_cache_size_mb is "100MB"'),
    "chunked_a_word": (VLLM, "vllm: {disable_chunked_mm_input: never}", 'disable_chunked_mm_input is "never"'),
    "sessions": ("requests: 10", SESSIONS, "items: images, audios and videos beside sessions are not simulated"),
    "tasks": ("requests: 10", f"{STAGES}\n  duration: 9s", "items: images, audios and videos beside tasks"),
    "none_with_images": (OUTPUT, "output: 0", "output_cap 10: requests with output 0 ask for no token. Write exact."),
}
WITHOUT_TOKENS = {
    "budget_without_images": (
        POOLED,
        "vllm: {runner: pooling, max_num_encoder_input_tokens: 4096}",
        "max_num_encoder_input_tokens is for images, audios and videos, and no request has any",
    ),
    "cache_without_images": (POOLED, "sglang: {is_embedding: true, vlm_cache_size_mb: 50}", "vlm_cache_size_mb"),
    "policy_generates": (POOLED, "vllm: {}", "s.yaml:10: requests with output 0 are of a pooling model"),
    "policy_unknown_to_it": (POOLED, "gated: {}", "which this policy does not run. Write runner: pooling of vllm"),
    "output_stated": (
        "output: 0",
        "output: {kind: fixed, tokens: 5}",
        "a pooling model makes no tokens, and the requests",
    ),
    "output_below_zero": ("output: 0", "output: -1", "workload.lengths.output is -1"),
    "cap": (
        "output_cap: exact",
        "output_cap: 5",
        "output_cap 5: requests with output 0 ask for no token. Write exact.",
    ),
    "slo_of_first_tokens": ("e2e<1s", "ttft<1s", "s.yaml:11: slo 'ttft<1s @ 90%': ttft is of tokens"),
    "slo_of_gaps": ("e2e<1s @ 90%", "p99(itl)<1s", "itl is of tokens, and requests with output 0 get none. Bound e2e"),
    "slo_of_pace": ("e2e<1s", "tpot<1s", "tpot is of tokens"),
    "asynchronous": (
        POOLED,
        "vllm: {runner: pooling, async_scheduling: true}",
        "async_scheduling of runner: pooling is not",
    ),
    "chunked_cls": (
        POOLED,
        "vllm: {runner: pooling, pooling_type: CLS, enable_chunked_prefill: true}",
        "pooling_type CLS needs whole prompts",
    ),
    "cached_mean": (
        POOLED,
        "vllm: {runner: pooling, pooling_type: MEAN, enable_prefix_caching: true}",
        "enable_prefix_caching: pooling_type MEAN",
    ),
    "pooling_type_alone": (POOLED, "vllm: {pooling_type: CLS}", "pooling_type CLS is of runner: pooling"),
    "pooling_type_unknown": (POOLED, "vllm: {runner: pooling, pooling_type: cls}", 'pooling_type is "cls"'),
    "runner_unknown": (
        POOLED,
        "vllm: {runner: embed}",
        "policies.vllm.runner is \"embed\". Write 'generate' or 'pooling'",
    ),
    "drafts": (
        POOLED,
        "vllm: {runner: pooling, speculative_config: {method: ngram, num_speculative_tokens: 2, acceptance: 0.5}}",
        "a pooling model makes no tokens. Drop it",
    ),
    "sglang_overlaps": (
        POOLED,
        "sglang: {is_embedding: true, disable_overlap_schedule: false}",
        "SGLang does not overlap with is_embedding",
    ),
    "sessions_without_answers": (
        "requests: 10",
        SESSIONS,
        "sessions: requests with output 0 get no answer. Drop sessions.",
    ),
    "stop_tokens": ("requests: 10", "requests: 10\n  stop: {by_eos: 50%}", "stop"),
    "one_class_with_answers": (
        "requests: 10",
        f"requests: 10\n  classes: {{a: {{share: 50%}}, b: {{share: 50%, lengths: {{{PROMPT}, {OUTPUT}}}}}}}",
        "some requests have output 0, of a pooling model, and others may not",
    ),
    "short_budget_whole": (
        POOLED,
        "vllm: {runner: pooling, pooling_type: CLS, max_num_batched_tokens: 512, max_num_seqs: 9}",
        "without chunked prefill max_num_batched_tokens 512 must be at least max_model_len",
    ),
}
CASES = [
    *(pytest.param(IMAGES, *case, id=name) for name, case in WITH_IMAGES.items()),
    *(pytest.param(POOLING, *case, id=f"pooling_{name}") for name, case in WITHOUT_TOKENS.items()),
]


def checked(text: str) -> Setup:
    setup = Setup.of(parse_scenario(text, source="s.yaml", folder=Path()))
    check_inputs(setup)
    return setup


@pytest.mark.parametrize(("text", "replaced", "by", "said"), CASES)
def test_a_mistake_is_one_line_that_says_what_to_do(text: str, replaced: str, by: str, said: str) -> None:
    """The place, the value and the way out; never more than a line."""
    assert text.count(replaced) == 1
    with pytest.raises(BatchsimError) as raised:
        checked(text.replace(replaced, by))
    line = str(raised.value)
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize("text", [IMAGES, POOLING, IMAGES.replace(VLLM, "sglang: {}")])
def test_without_a_mistake_there_is_no_error(text: str) -> None:
    """What the mistakes are made in is right."""
    assert checked(text).items is None if text is POOLING else checked(text).items is not None
