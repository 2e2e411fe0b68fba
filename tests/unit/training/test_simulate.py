"""Steps in time, and the figures of an epoch, each with numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchsim.training.config import RanksConfig, RooflineCost, TrainingConfig
from batchsim.training.cost import Roofline, training_cost
from batchsim.training.kpis import KPIS
from batchsim.training.load import load_training, run_training
from batchsim.training.steps import Layout
from tests.support.training import LINEAR, run

SEQUENTIAL = {"kind": "transformers.padded", "sampler": "sequential"}
# micro-batch j of rank r is example 3j + r
RANKS = [3, 1, 2, 1, 1, 2, 2, 5, 2]


def test_imbalance_of_ddp_and_fsdp(tmp_path: Path) -> None:
    """Ranks of 3 1 2, 1 1 5 and 2 2 2: 7 over a mean of 6.33 once a step, 10 at every micro-batch."""
    keys = {"ranks": {"data": 3}, "accumulate": 3}
    once = run(tmp_path, RANKS, SEQUENTIAL, **keys)
    assert [round(1e6 * time) for time in once.steps[0].rank_s] == [6, 7, 6]
    assert once.steps[0].time_s == pytest.approx(7e-6)
    assert once.figures["imbalance"] == pytest.approx(7 / (19 / 3))
    each = run(tmp_path, RANKS, SEQUENTIAL, sharding="fsdp", **keys)
    assert each.figures["imbalance"] == pytest.approx(10 / (19 / 3))
    assert each.figures["waiting"] == pytest.approx(1 - (19 / 3) / 10)


def test_what_attention_alone_makes_uneven(tmp_path: Path) -> None:
    """Of equal tokens and unequal squares all imbalance is attention's; of unequal tokens without squares none."""
    keys = {"ranks": {"data": 2}, "capacity": 4, "shuffle_rows": False}
    squares = {"kind": "linear", "base": "0s", "per_token": "1us", "tokens_per_square": 1.0}
    even = run(tmp_path, [4, 2, 2], {"kind": "torchtune.packed"}, cost=squares, **keys)
    assert even.steps[0].rank_s == pytest.approx((20e-6, 12e-6))
    assert even.figures["imbalance"] == even.figures["attention_imbalance"] == pytest.approx(20 / 16)
    tokens = run(tmp_path, [3, 1], SEQUENTIAL, cost=LINEAR, ranks={"data": 2})
    assert tokens.figures["imbalance"] == pytest.approx(3 / 2)
    assert tokens.figures["attention_imbalance"] == pytest.approx(1)


def test_a_pipeline_has_a_bubble_and_pads_to_the_longest(tmp_path: Path) -> None:
    """Stages share a micro-batch's time; those of a step are all as long as the longest, unless lengths vary."""
    keys = {"accumulate": 4, "ranks": {"pipeline": 2}}
    fixed = run(tmp_path, [6, 2, 2, 2], SEQUENTIAL, **keys)
    assert fixed.steps[0].time_s == pytest.approx((4 + 1) * 3e-6)
    assert fixed.steps[0].computed == 24
    assert fixed.figures["bubble"] == pytest.approx(1 / 5)
    vary = run(tmp_path, [6, 2, 2, 2], SEQUENTIAL, variable_lengths=True, **keys)
    assert vary.steps[0].time_s < fixed.steps[0].time_s and vary.steps[0].computed == 12


def test_padding_of_a_pipeline_has_the_squares_of_its_mask(tmp_path: Path) -> None:
    """Padded samples attend to their padding: two rows of 6 and of 2 are two of 6; behind a mask by document not."""
    keys = {"accumulate": 2, "samples": 1, "ranks": {"pipeline": 2}}
    padded = run(tmp_path, [6, 2], SEQUENTIAL, **keys)
    assert (padded.steps[0].computed, padded.steps[0].squares) == (12, 72)
    masked = run(tmp_path, [6, 2], SEQUENTIAL, mask="document", **keys)
    assert (masked.steps[0].computed, masked.steps[0].squares) == (12, 40)


def test_ranks_that_never_meet_wait_only_at_the_end(tmp_path: Path) -> None:
    """Updates of 3 1 2, 1 1 5 and 2 2 2: all done at 7, where ranks that meet at each take 10; the mean is 6.33.

    The update of 5 reads at 2 and is overtaken by three of each other rank.
    """
    keys = {"ranks": {"data": 3}}
    result = run(tmp_path, RANKS, SEQUENTIAL, sharding="async", **keys)
    assert result.figures["epoch_s"] == pytest.approx(7e-6)
    assert result.figures["imbalance"] == pytest.approx(7 / (19 / 3))
    assert run(tmp_path, RANKS, SEQUENTIAL, **keys).figures["epoch_s"] == pytest.approx(10e-6)
    late = run(tmp_path, RANKS, SEQUENTIAL, sharding="async", reduce="1us", **keys)
    assert late.figures["epoch_s"] == pytest.approx(10e-6)
    assert (result.figures["staleness_max"], result.figures["attention_imbalance"]) == (6, None)


def test_context_ranks_share_a_document(tmp_path: Path) -> None:
    """Each of two ranks has half of the tokens, of documents rounded up to four."""
    shared = run(tmp_path, [6], SEQUENTIAL, mask="document", ranks={"context": 2})
    assert shared.steps[0].time_s == pytest.approx(4e-6)
    assert shared.figures["tokens_per_gpu_s"] == pytest.approx(6 / 4e-6 / 2)


def test_the_reduction_is_part_of_every_step(tmp_path: Path) -> None:
    """What is stated for it is added once a step, and is no waiting."""
    result = run(tmp_path, [5, 5], SEQUENTIAL, reduce="1ms")
    assert result.figures["epoch_s"] == pytest.approx(2 * (1e-3 + 5e-6))
    assert result.figures["waiting"] == 0


def test_figures_of_rows(tmp_path: Path) -> None:
    """Fill, squares of rows, pieces of one example in two rows, discarded tokens."""
    split = run(tmp_path, [6, 2], {"kind": "trl.bfd_split"}, capacity=4)
    assert split.figures["fill"] == pytest.approx(8 / 8)
    assert split.figures["row_imbalance"] == pytest.approx(16 / ((16 + 8) / 2))
    assert (split.figures["split"], split.figures["truncated_tokens"]) == (0.5, 0)
    cut = run(tmp_path, [6, 2], {"kind": "trl.bfd"}, capacity=4)
    assert (cut.figures["split"], cut.figures["truncated"]) == (0, 0.5)
    assert cut.figures["truncated_tokens"] == pytest.approx(2 / 8)


def test_figures_of_order(tmp_path: Path) -> None:
    """Ascending lengths rise with the step; random ones of many steps do not; examples a step vary by packing."""
    rising = run(tmp_path, range(1, 33), SEQUENTIAL, samples=4)
    assert rising.figures["order_bias"] == pytest.approx(0.99, abs=0.02)
    assert rising.figures["length_spread"] == pytest.approx(np.var(np.arange(8) * 4) / (np.var(np.arange(32)) / 4))
    assert (rising.figures["sequences_mean"], rising.figures["sequences_sd"]) == (4, 0)
    packed = run(tmp_path, [4, 1, 3, 2, 2], {"kind": "torchtune.packed"}, capacity=4, shuffle_rows=False)
    assert [step.sequences for step in packed.steps] == [1, 2, 2]
    assert packed.figures["sequences_mean"] == pytest.approx(5 / 3)
    assert packed.figures["shapes"] == 1


def test_every_figure_has_a_value_or_a_reason() -> None:
    """Names are unique; missing are those of pipelines and streams where there is none, and the fill without rows."""
    loaded = load_training("packing", ["training.lengths.examples=800", "training.global_batch=32"])
    runs = {each.label: each for each in run_training(loaded)}
    stream = ["staleness_mean", "staleness_max", "age_mean_s", "age_p99_s", "behind", "idle", "left"]
    missing = [name for name, value in runs["first fit"].figures.items() if value is None]
    assert missing == ["bubble", *stream]
    assert len({kpi.name for kpi in KPIS}) == len(KPIS)
    assert [name for name, value in runs["padded"].figures.items() if value is None] == ["fill", "bubble", *stream]


def test_full_rows_say_nothing_of_balance() -> None:
    """The shipped scenario: rows nearly full, squares of one row far above the mean, ranks that wait a fifth and more;
    by balanced work they wait less, at the same fill."""
    loaded = load_training("packing", ["training.lengths.examples=2500"])
    figures = {each.label: each.figures for each in run_training(loaded)}
    for label in ("first fit", "FFD", "best fit", "worst fit"):
        assert (figures[label]["fill"] or 0) > 0.98
        assert (figures[label]["row_imbalance"] or 0) > 2
        assert (figures[label]["waiting"] or 0) > 0.2 > (figures["balanced"]["waiting"] or 0)
    assert (figures["next fit"]["fill"] or 1) < 0.9


def stated(**keys: object) -> TrainingConfig:
    cost = RooflineCost(params=1e9, layers=10, hidden=1000, peak=1e14, efficiency=0.5, **keys)  # type: ignore[arg-type]
    from batchsim.training.lengths import DrawnLengths
    from batchsim.training.packers.hf_transformers import Padded
    from batchsim.workload.laws import FixedTokens

    return TrainingConfig(DrawnLengths(FixedTokens(5), 5), {"p": Padded()}, cost)


def test_time_of_a_roofline() -> None:
    """FLOPs over what is reached of the peak, by stages, with a launch each; few tokens wait for the weights."""
    cost = training_cost(stated(t0=1_000_000, flash=False))
    assert cost.stage_s(100, 0, 1) == pytest.approx(6 * 1e9 * 100 / 5e13 + 1e-3)
    assert cost.stage_s(0, 100, 2) == pytest.approx(6 * 10 * 1000 * 100 / 5e13 / 2 + 1e-3)
    slow = training_cost(stated(bandwidth=1e12))
    assert slow.stage_s(1, 0, 1) == pytest.approx(2 * 2 * 1e9 / 1e12)
    assert slow.stage_s(10_000, 0, 1) == pytest.approx(6 * 1e9 * 10_000 / 5e13)


def test_memory_of_a_micro_batch() -> None:
    """16 bytes a parameter, 34·h a token and layer, six a logit; sharded, recomputed and split by ranks less."""
    batch = Layout("padded", "longest", None, 1, 1).micro_batch([[(0, 0, 100)]])
    one, many = RanksConfig(), RanksConfig(data=4, context=2)
    cost = training_cost(stated(vocab=500))
    assert isinstance(cost, Roofline)
    state, layers, logits = 16e9, 34 * 1000 * 100 * 10, 6 * 100 * 500
    assert cost.memory_bytes(batch, one, sharded=False) == pytest.approx(state + layers + logits)
    assert cost.memory_bytes(batch, many, sharded=True) == pytest.approx(state / 8 + (layers + logits) / 2)
    again = training_cost(stated(recompute=True)).memory_bytes(batch, one, sharded=False)
    assert again == pytest.approx(state + 2 * 1000 * 100 * 10)
    scores = training_cost(stated(flash=False, heads=8)).memory_bytes(batch, one, sharded=False)
    assert scores == pytest.approx(state + layers + 5 * 8 * 100**2 * 10)
    assert training_cost(stated(lora=True)).memory_bytes(batch, one, sharded=False) == pytest.approx(2e9 + layers)
    lora = training_cost(stated(lora=True, state_bytes=3.0))
    assert lora.memory_bytes(batch, one, sharded=False) == pytest.approx(3e9 + layers)


def test_mfu_counts_examples_own_tokens(tmp_path: Path) -> None:
    """At a peak that is reached whole, without padding and FlashAttention, MFU is 100 %; padding lowers it."""
    cost = {"params": 1e9, "layers": 1, "hidden": 1, "peak": "100TFLOP/s", "efficiency": "100%", "flash": False}
    assert run(tmp_path, [7, 7], SEQUENTIAL, cost=cost).figures["mfu"] == pytest.approx(1)
    assert run(tmp_path, [3, 9], SEQUENTIAL, cost=cost, samples=2).figures["mfu"] == pytest.approx(12 / 18, rel=1e-6)
    assert run(tmp_path, [3, 9], SEQUENTIAL).figures["mfu"] is None
