"""The completion rate under overload, where it is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from batchsim.study.sweep.overload import saturations

SCENARIO = """
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 100000}
workload:
  arrivals: {kind: poisson, mean_rate: 1/s}
  lengths:
    prompt: {kind: fixed, tokens: 10}
    output: {kind: fixed, tokens: 5}
  output_cap: 5
  duration: 10s
policies:
  static: {batch_size: SIZE, max_wait: 2s, respond: batch_end}
load: {mean_rate: [1/s]}
slo: e2e<1s @ 99%
"""


def setup_of(folder: Path, text: str) -> Setup:
    (folder / "s.yaml").write_text(text)
    return Setup.of(load_scenario(str(folder / "s.yaml")))


@pytest.mark.parametrize("size", [1, 64, 240])
def test_whole_batches_are_counted_whole(tmp_path: Path, size: int) -> None:
    """A batch of five steps of 10 ms is answered at once: its size every 50 ms, however large it is."""
    setup = setup_of(tmp_path, SCENARIO.replace("SIZE", str(size)))
    ((_, rate),) = saturations([(setup, setup.scenario.specs[0])], 1)
    assert rate == pytest.approx(size / 0.05)


@pytest.mark.parametrize("router", ["round_robin", "least_tokens"])
def test_a_bound_on_the_queue_does_not_count_under_overload(tmp_path: Path, router: str) -> None:
    """Nor on the queue of each replica: two engines complete twice what one does."""
    replicas = f"\nreplicas: {{count: 2, router: {{kind: {router}}}}}\nload:"
    text = SCENARIO.replace("SIZE", "4").replace("\nload:", replicas)
    for bound in ("", "max_waiting: 6\n"):
        setup = setup_of(tmp_path, bound + text)
        ((_, rate),) = saturations([(setup, setup.scenario.specs[0])], 1)
        assert rate == pytest.approx(2 * 4 / 0.05)


def test_where_nothing_completes_the_reason_is_told(tmp_path: Path) -> None:
    """Prompts that the pool cannot hold are rejected, which the words in the place of a rate say."""
    setup = setup_of(tmp_path, SCENARIO.replace("SIZE", "1").replace("tokens: 100000", "tokens: 16, block_size: 8"))
    large = setup_of(tmp_path, setup.scenario.text.replace("tokens: 10}", "tokens: 20}"))
    ((_, rate),) = saturations([(large, large.scenario.specs[0])], 1)
    assert isinstance(rate, str) and "only 0 requests completed" in rate and "Rejected: " in rate


@pytest.mark.slow
def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    """The numbers and the runs they belong to are the same on two processes as on one."""
    other = "  other: {kind: static, batch_size: 4, max_wait: 2s, respond: batch_end}\nload: {mean"
    two = SCENARIO.replace("SIZE", "8").replace("load: {mean", other)
    setup = setup_of(tmp_path, two)
    runs = [(setup, spec) for spec in setup.scenario.specs]
    alone = dict(saturations(runs, 1))
    assert len(set(alone.values())) == 2
    assert dict(saturations(runs, 2)) == alone
