"""Which rule of vLLM's scheduler a recording and the policy part at: whether those of another version go on further."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from batchsim.check.conform.compare_steps import StepComparison
from batchsim.check.conform.recording import Recording
from batchsim.policies.systems.vllm.vllm_config import SINCE, Version, VllmConfig

WORDS = {
    "lone_whole": "a request that is alone is not cut by long_prefill_token_threshold",
    "goes_on": "those behind a running request that preempts itself are scheduled",
    "interval_alone": "prefill_schedule_interval counts in an engine alone",
}
"""The rules of SINCE in words."""


def with_rule(
    verdict: StepComparison, recording: Recording, compared: Callable[[Recording], StepComparison]
) -> StepComparison:
    """`verdict`, a difference, with a line for the rules of the version under which most steps are equal, where these
    are more; as it is where there is no such version."""
    config = recording.config
    if type(config) is not VllmConfig:
        return verdict
    best, best_version, rules = verdict, "", frozenset[str]()
    for version, differing in _nearest_first(config):
        try:
            other = replace(config, version=version)
        except ValueError:  # a knob that this version does not have, or a part simulated of the latest alone
            continue
        tried = compared(replace(recording, config=other))
        if best.difference and (not tried.difference or tried.num_steps > best.num_steps):
            best, best_version, rules = tried, version, differing
    if not best_version:
        return verdict
    words = "; ".join(f"{WORDS[name]} since {'.'.join(map(str, SINCE[name]))}" for name in sorted(rules))
    end = "equal" if not best.difference else f"equal up to step {best.num_steps - 1}"
    return replace(verdict, around=(*verdict.around, f"by the rules of {best_version} it is {end}: {words}"))


def _nearest_first(config: VllmConfig) -> list[tuple[str, frozenset[str]]]:
    """The versions with other rules than `config` has where its knobs let them bite, each with the rules that differ;
    with the fewest first."""
    bites = {
        "lone_whole": config.long_prefill_token_threshold > 0,
        "goes_on": config.policy == "priority",
        "interval_alone": config.prefill_schedule_interval > 1,
    }
    differing = list[tuple[str, frozenset[str]]]()
    for version in reversed(get_args(Version)):
        numbers = tuple(map(int, version.split(".")))
        rules = {name for name, since in SINCE.items() if bites[name] and config.has_rule(name) != (numbers >= since)}
        differing.append((version, frozenset(rules)))
    return sorted((each for each in differing if each[1]), key=lambda each: len(each[1]))
