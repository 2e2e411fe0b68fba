"""How much output SGLang expects of a request with a large cap. A step takes 10 ns, a prefill token 1, a decode 2."""

from __future__ import annotations

import pytest

from batchsim.kv.radix_cache import RadixKV
from batchsim.policies.systems.sglang.sglang import Sglang
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from tests.support.stepping import run


@pytest.mark.parametrize(("first_prompt", "start_ns"), [(1080, 0), (1100, 1122)])
def test_a_newcomer_is_expected_to_make_4096_tokens_at_most(first_prompt: int, start_ns: int) -> None:
    """With a cap of 5,000 it needs 4 prompt and 4,096 output tokens and a page beside the first, not 5,000."""
    config = SglangConfig(chunked_prefill_size=-1)
    arrivals = f"0:{first_prompt}->2/9 0:4->1/5000"
    result = run(Sglang, config, arrivals, blocks=1300, kv=RadixKV, max_model_len=8000)
    assert result.records.requests["scheduled_ns"].tolist() == [0, start_ns]
