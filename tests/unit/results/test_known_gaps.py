"""Objectives on gaps between tokens, under policies whose records do not tell these apart."""

from __future__ import annotations

import pytest

from batchsim.base.errors import ScenarioError
from batchsim.results.known_gaps import check_gaps
from tests.support.scenarios import setup_of

TEXT = """\
model: llama-3.1-8b
cost: {kind: roofline, gpu: h100, tp: 1}
kv: {tokens: 20000}
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths: {prompt: {kind: fixed, tokens: 9}, output: {kind: fixed, tokens: 3}}
  output_cap: 8
  duration: 10s
  classes: {chat: {share: 100%%, slo: "%s"}}
policies:
  plain: {kind: vllm}
  drafts: {kind: vllm, speculative_config: {method: ngram, num_speculative_tokens: 3, acceptance: 0.6}}
slo: "%s"
"""
ITL, TPOT = "p99(itl)<50ms", "tpot<50ms @ 99%"


@pytest.mark.parametrize("pair", [(TPOT, ITL), (ITL, TPOT)])
def test_gaps_under_drafts_cannot_be_bounded(pair: tuple[str, str]) -> None:
    """By the scenario's objective or a class's, in one line with its place and the way out; tpot can."""
    setup = setup_of(TEXT % pair)
    with pytest.raises(
        ScenarioError, match=r"^mine\.yaml:13: slo 'p99\(itl\)<50ms': drafts makes several .*Bound tpot"
    ):
        check_gaps(setup)
    check_gaps(setup_of(TEXT % (TPOT, TPOT)))


def test_gaps_in_a_pipeline_cannot_be_bounded() -> None:
    """Without drafts either, since every stage has a group of decodes of its own."""
    plain = TEXT[: TEXT.index("  drafts")] + TEXT[TEXT.rindex("slo:") :]
    check_gaps(setup_of(plain % (TPOT, ITL)))
    two = plain.replace("tp: 1", "pp: 2")
    with pytest.raises(ScenarioError, match=r"mine\.yaml:12: .*: plain has a group of decodes in each stage"):
        check_gaps(setup_of(two % (TPOT, ITL)))
