"""What /metrics counts is what the records hold."""

from __future__ import annotations

import re

import numpy as np
import pytest

from batchsim.kernel.record import FINISHED, Records
from batchsim.serve.answers import Asked
from batchsim.serve.metrics import Histogram, Names, tokens_buckets
from batchsim.serve.realtime import RealtimeSimulation
from tests.support.serving.served import setup_of, simulation_of

CONTINUOUS = "continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}"
_SAMPLE = re.compile(r'^([a-z0-9_:]+)(?:\{((?:[a-z_]+="[^"]*",?)*)\})? (\S+)$')


def samples(text: str) -> dict[tuple[str, str], float]:
    """The values of Prometheus' text by name and labels; each line must be one that Prometheus reads."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = _SAMPLE.match(line)
            assert match is not None, line
            found[match[1], match[2] or ""] = float(match[3])
    return found


def ran(names: Names = "vllm") -> tuple[dict[tuple[str, str], float], Records]:
    """The metrics after 60 requests, of which the last is given up, and the records."""
    simulation: RealtimeSimulation = simulation_of(setup_of(CONTINUOUS), names)
    for number in range(60):
        answer = simulation.send(Asked(50 + number, 20, 1 + number % 20), number * 7_000_000, lambda answer: None)
    simulation.run_to(500_000_000)
    simulation.cancel(answer, 500_000_000)
    simulation.drain()
    while simulation.answers:
        simulation.run_to(int(simulation.next_ns))
    text = simulation.metrics.text({engine.slot.number: engine.core for engine in simulation.engines()})
    return samples(text), simulation.close(simulation.now_ns)[0]


def test_vllm_histograms_sum_to_the_records() -> None:
    """Latencies of vLLM's histograms sum to those of the requests that finished, tokens to all that were made."""
    found, records = ran()
    labels = 'engine="0",model_name="m"'
    requests = records.requests
    done = requests[requests["outcome"] == FINISHED]
    assert len(done) == 59
    for name, start, end in (
        ("request_queue_time_seconds", "arrival_ns", "scheduled_ns"),
        ("request_prefill_time_seconds", "scheduled_ns", "first_token_ns"),
        ("request_decode_time_seconds", "first_token_ns", "last_token_ns"),
        ("e2e_request_latency_seconds", "sent_ns", "last_token_ns"),
    ):
        assert found[f"vllm:{name}_count", labels] == 59
        np.testing.assert_allclose(found[f"vllm:{name}_sum", labels], (done[end] - done[start]).sum() / 1e9)
    started = requests[requests["first_token_ns"] >= 0]
    ttft_s = (started["first_token_ns"] - started["sent_ns"]) / 1e9
    np.testing.assert_allclose(found["vllm:time_to_first_token_seconds_sum", labels], ttft_s.sum())
    below = found["vllm:time_to_first_token_seconds_bucket", f'{labels},le="0.1"']
    assert below == (ttft_s <= 0.1).sum() > 0
    assert found["vllm:generation_tokens_total", labels] == requests["output_tokens"].sum()
    assert found["vllm:request_success_total", f'{labels},finished_reason="abort"'] == 1
    by_length = (done["output_tokens"] == done["max_output_tokens"]).sum()
    assert found["vllm:request_success_total", f'{labels},finished_reason="length"'] == by_length
    assert found["vllm:num_requests_running", labels] == found["vllm:kv_cache_usage_perc", labels] == 0


def test_sglang_names_have_the_same_counts() -> None:
    """Under SGLang's names there are the same requests and tokens."""
    found, records = ran("sglang")
    labels = 'model_name="m",dp_rank="0"'
    assert found["sglang:num_requests_total", labels] == 59
    assert found["sglang:generation_tokens_total", labels] == records.requests["output_tokens"].sum()
    assert found["sglang:time_to_first_token_seconds_count", labels] >= 59
    assert not any(name.startswith("vllm") for name, _ in found)


@pytest.mark.parametrize(("value", "bucket"), [(0.5, 0), (1.0, 0), (1.5, 1), (2.0, 1), (3.0, 2)])
def test_a_bucket_holds_its_upper_bound(value: float, bucket: int) -> None:
    """A value equal to a bound is in that bound's bucket, as Prometheus has `le`."""
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    assert histogram.counts.index(1) == bucket


def test_buckets_of_tokens_end_with_the_model() -> None:
    """They go by 1, 2 and 5 up to what the model can hold."""
    assert tokens_buckets(120) == (1, 2, 5, 10, 20, 50, 100)
