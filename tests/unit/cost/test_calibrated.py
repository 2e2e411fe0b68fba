"""Costs from profiles: the stated formula, parts that add up, the edges of what was measured, scenarios on them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsim.base.errors import BatchsimError, CalibrationError, ExtrapolationError, ScenarioError
from batchsim.cost.calibrated import Calibrated
from batchsim.cost.host_config import StatedHost
from batchsim.cost.interpolation import Curve, Grid
from batchsim.cost.kinds import COSTS as KINDS
from batchsim.cost.profile import ChunkGrid, EngineSetup, HostTerm, Recurrence, WindowedAttention, load_profile
from batchsim.cost.profile_config import ProfileConfig
from batchsim.cost.roofline import HOST_LINK_SHARE
from batchsim.cost.work import TIME_TERMS, columns_of
from batchsim.deployment.catalog import GPUS, MODELS
from batchsim.kernel.batch import Batch
from batchsim.kernel.sim_executor import SimExecutor
from batchsim.scenario import load_scenario
from batchsim.scenario.setup import Setup
from tests.unit.cost.test_cost import BATCHES, step
from tests.unit.cost.test_profile import COSTS, PROFILE

NAME = "llama-3.1-8b-h200-vllm-0.24.0"
OVERLAPPED = HostTerm(6e6, 1_000.0, 0.0, "overlapped", assumed=True)
MINE = Calibrated(PROFILE)
FREE = Calibrated(PROFILE, extrapolate=True)
EAGER = replace(PROFILE, costs=replace(COSTS, decode=None))
BESIDE = replace(
    COSTS,
    chunk_grid=Grid((1, 64, 512), (1.0, 64.0, 900.0), ((1e4, 2e4, 9e4), (2e4, 5e4, 1e6), (9e4, 4e5, 8e6))),
    beside=1.7,
)
WINDOWED = replace(
    COSTS,
    windowed=WindowedAttention(
        512,
        Grid((1, 64), (64.0, 512.0), ((1e4, 2e4), (9e4, 8e5))),
        Grid((1, 64, 512), (1.0, 64.0, 512.0), ((1e4, 2e4, 3e4), (2e4, 5e4, 2e5), (9e4, 4e5, 9e5))),
    ),
)
RECURRENT = replace(
    COSTS,
    recurrence=Recurrence(Grid((1, 4), (1.0, 512.0), ((3e5, 4e6), (4e5, 5e6))), Curve((1.0, 64.0), (1e5, 3e6))),
    decode=None,
)
MORE_CHUNKS = replace(BESIDE, more_chunks=(ChunkGrid(3, Grid((1, 512), (1.0, 900.0), ((1e4, 1e5), (2e5, 9e6)))),))
VARIANTS = {
    "graphs": FREE,
    "more chunks": Calibrated(replace(PROFILE, costs=MORE_CHUNKS), extrapolate=True),
    "windows": Calibrated(replace(PROFILE, costs=WINDOWED), extrapolate=True),
    "recurrence": Calibrated(replace(PROFILE, costs=RECURRENT), extrapolate=True),
    "shipped with a window": Calibrated(load_profile("gpt-oss-20b-h100-vllm-0.24.0-moe-mxfp4"), extrapolate=True),
    "chunk grid": Calibrated(replace(PROFILE, costs=BESIDE), extrapolate=True),
    "eager": Calibrated(EAGER, extrapolate=True),
    "overlapped": Calibrated(PROFILE, extrapolate=True, host=OVERLAPPED),
    "eager, overlapped": Calibrated(EAGER, extrapolate=True, host=OVERLAPPED),
    "shipped": Calibrated(load_profile(NAME), extrapolate=True),
}


@pytest.mark.parametrize("cost", VARIANTS.values(), ids=VARIANTS)
def test_a_cost_that_was_asked_travels_to_another_process(cost: Calibrated) -> None:
    """With all that it was made of, and none of what it has looked up."""
    times = [cost.step_ns(batch) for batch in BATCHES.values()]
    there = pickle.loads(pickle.dumps(cost))
    assert [there.step_ns(batch) for batch in BATCHES.values()] == times
    assert len(pickle.dumps(cost)) == len(pickle.dumps(Calibrated(cost.profile, extrapolate=True, host=cost.host)))


# ---- one step


def test_a_decode_step_takes_the_graph_that_holds_it() -> None:
    """3 decodes replay the graph of 8; attention by rows and mean context, host serial, all kernels in situ."""
    at_one, at_64 = 10_000 * 0.5, 50_000 + 950_000 * 0.5  # at a mean context of 500 of 1,000
    expected = 1.02 * (5.3e6 + at_one + (at_64 - at_one) * 2 / 63) + 300_000 + 3 * 1_500
    assert MINE.step_ns(step([400, 500, 600])) == int(expected)
    assert MINE.step_ns(step([499, 500], pad_decode_rows=1, pad_context_tokens=501)) == int(expected)


@pytest.mark.parametrize(
    ("pad_rows", "pad_context", "reads"), [(1, 1_000, 3), (1, 1_001, 4), (0, 1, 3), (0, 2_500, 5), (2, 900, 4)]
)
def test_padding_is_read_by_rows_of_padding_and_few_others(pad_rows: int, pad_context: int, reads: int) -> None:
    """Of 2 decodes: no row reads above 1,000 tokens, the profile's longest; a graph holds them, a CPU only attends."""
    batch = step([500, 600], pad_decode_rows=pad_rows, pad_context_tokens=pad_context)
    context = np.array([(1_100 + pad_context) / reads])
    attention = COSTS.decode_attention.at(np.array([reads]), context)[0]
    rows = 2 + pad_rows
    host = 300_000 + rows * 1_500
    exact = replace(COSTS, decode=Curve((1, 2, 3, 4, 5), (5.1e6, 5.2e6, 5.3e6, 5.4e6, 5.5e6)))
    for device, held in (("cuda", reads), ("cpu", rows)):
        cost = Calibrated(replace(PROFILE, costs=exact, hardware={"device": device}))
        assert cost.step_ns(batch) == int(1.02 * (5e6 + held * 1e5 + attention) + host)
        columns = columns_of(batch)
        assert cost.kernel_ns(columns)[0] + cost.host_ns(columns)[0] == pytest.approx(cost.step_ns(batch), abs=1)
    few = np.array([2 + max(pad_rows, 1)])  # enough where sequences may be of 5,001 tokens
    longer = Calibrated(replace(PROFILE, costs=exact), extrapolate=True, max_model_len=5_001)
    attention = COSTS.decode_attention.at(few, (1_100 + pad_context) / few)[0]
    assert longer.step_ns(batch) == int(1.02 * (5e6 + few[0] * 1e5 + attention) + host)


@pytest.mark.parametrize("cost", [MINE, *VARIANTS.values()], ids=["within its hull", *VARIANTS])
def test_decodes_are_on_a_line_up_to_the_next_piece_of_the_curve(cost: Calibrated) -> None:
    """To the nanosecond at the first context of each piece, in its midst and at its end; beyond it another one goes on,
    to the edge of what was measured."""
    pieces = 0
    for rows in (1, 3, 40):
        context = rows
        while context <= rows * 5_000 and (line := cost.decode_line(decodes(rows, context))) is not None:
            alone_ns, token_ns, last = line
            assert last >= context
            end = int(min(last, rows * 9_000))
            for each in (context, (context + end) // 2, end):
                assert int(alone_ns + token_ns * each) == cost.step_ns(decodes(rows, each))
            context, pieces = end + 1, pieces + 1
        if cost is MINE:
            assert context == PROFILE.hull.max_context * rows + 1
    assert pieces > 3 or cost is not VARIANTS["shipped"]


def test_a_step_without_decodes_is_on_no_line() -> None:
    """As where all were preempted: there is no context to divide by a number of rows."""
    assert SimExecutor(FREE, 1_000).decode_line(decodes(0, 0)) is None
    assert SimExecutor(FREE, 1_000).decode_line(decodes(1, 1)) == FREE.decode_line(decodes(1, 1))


def decodes(rows: int, context: int) -> Batch:
    """A step of so many decodes with so much context in all."""
    batch = step([1] * rows)
    batch.context_tokens = context
    return batch


def test_a_step_with_chunks_is_launched_op_by_op() -> None:
    """Layers over all tokens, head over all rows, each chunk's attention, no graph."""
    batch = step([500], [(0, 100), (200, 27)])
    layers = 6e6 + (128 - 64) / (512 - 64) * 3.5e6
    head = 250_000 + 2 / 63 * 50_000
    pairs = 100 * 101 / 2 + 27 * 200 + 27 * 28 / 2
    chunks = 2 * 10_000 + 127 * 20 + pairs * 0.5
    expected = 1.02 * (layers + head + 5_000 + chunks) + 300_000 + 3 * 1_500 + 127 * 2.5
    assert MINE.step_ns(batch) == int(expected)


def test_a_chunk_grid_is_read_at_all_tokens_and_their_mean_keys() -> None:
    """Chunks of one step cost by their tokens and the keys each reads; decode attention beside them by `beside`."""
    batch = step([500], [(0, 100), (200, 27)])
    keys = (100 * 101 / 2 + 27 * 200 + 27 * 28 / 2) / 127
    tall, wide = (127 - 64) / (512 - 64), (keys - 64) / (900 - 64)
    chunks = (5e4 + 9.5e5 * wide) * (1 - tall) + (4e5 + 7.6e6 * wide) * tall
    plain = Calibrated(replace(PROFILE, costs=replace(COSTS, in_situ=1)))
    grid = Calibrated(replace(PROFILE, costs=replace(BESIDE, in_situ=1)))
    before = 2 * 10_000 + 127 * 20 + keys * 127 * 0.5 + 5_000
    assert grid.step_ns(batch) - plain.step_ns(batch) == pytest.approx(chunks + 1.7 * 5_000 - before, abs=1)
    assert grid.step_ns(step([500])) == plain.step_ns(step([500]))
    assert grid.recompute_ns(100) == grid.step_ns(step(chunks=[(0, 100)])) - 150_000


def test_stages_share_what_is_not_the_head() -> None:
    """A profile of a pipeline gives each stage its part, and what goes between them the time of its curve."""
    costs = replace(COSTS, transfer=Curve((1.0, 512.0), (1_000.0, 512_000.0)))
    piped = replace(PROFILE, costs=costs, setup=EngineSetup("vllm", "0.24.0", tp=2, pp=4))
    cost, batch = Calibrated(piped), step(chunks=[(0, 100)])
    first, *_, last = stages = cost.lanes().stages_ns(batch)
    assert (len(stages), cost.deployment.num_gpus, cost.stages) == (4, 8, 4)
    head = 1.02 * 250_000
    assert last - first == pytest.approx(head - 100_000, abs=2)
    whole = cost.without_host().step_ns(batch) + 3 * 100_000
    assert sum(stages) == pytest.approx(whole, abs=8)  # each stage is cut to a whole ns


def test_a_row_of_padding_is_a_chunk_of_its_own() -> None:
    """Three copies of a prompt cost as three prompts more, less the host's part of their tokens; none is longer."""
    copied = step(chunks=[(0, 128)], pad_prefill_tokens=3 * 128, pad_prefill_rows=3)
    cost = Calibrated(replace(PROFILE, hull=replace(PROFILE.hull, max_chunk_context=128)))
    assert cost.step_ns(copied) == pytest.approx(cost.step_ns(step(chunks=[(0, 128)] * 4)) - 3 * 128 * 2.5, abs=1)


def test_launching_takes_its_least_time() -> None:
    """A small step with a chunk waits for its launches and, without decodes, for cold caches; a graph of the same work
    does not."""
    profile = replace(PROFILE, costs=replace(COSTS, launch_ns=20e6))
    small = Calibrated(profile)
    assert small.step_ns(step(chunks=[(0, 1)])) == 20_000_000 + 150_000 + 300_000 + 1_500 + 2
    beside = small.step_ns(step([10], [(0, 1)])), small.step_ns(step([10, 10], [(0, 1)]))
    assert beside == (20_000_000 + 300_000 + 2 * 1_500 + 2, 20_000_000 + 300_000 + 3 * 1_500 + 2)
    assert small.step_ns(step([10])) < 7_000_000
    assert Calibrated(replace(profile, costs=replace(profile.costs, decode=None))).step_ns(step([10])) > 20_000_000
    terms = small.explain(columns_of(step(chunks=[(0, 1)])))
    assert terms["other"][0] > 10e6


def test_more_rows_than_the_largest_graph_are_launched() -> None:
    """64 rows replay a graph, 65 do not: layers and head are read instead, and launching has its floor."""
    graph, eager = FREE.step_ns(step([1] * 64)), FREE.step_ns(step([1] * 65))
    assert graph == int(1.02 * (6.3e6 + 50_000 + 950) + 300_000 + 64 * 1_500)
    layers, head = 6e6 + 3.5e6 / 448, 300_000 + 50_000 / 63
    attention = 50_950 + (50_950 - 10) / 63
    assert eager == int(1.02 * (layers + head + attention) + 300_000 + 65 * 1_500)


def test_an_overlapped_host_hides_behind_the_kernels() -> None:
    """The longer of the two counts, and `host` explains only what sticks out."""
    few, many = step([10]), step([900] * 64)
    cost = VARIANTS["overlapped"]
    assert cost.step_ns(few) == 6_001_000
    terms = cost.explain(columns_of(few))
    assert terms["host"][0] == pytest.approx(6_001_000 - cost.kernel_ns(columns_of(few))[0])
    assert cost.host_ns(columns_of(few))[0] == 6_001_000
    assert cost.step_ns(many) == int(cost.kernel_ns(columns_of(many))[0])
    assert cost.explain(columns_of(many))["host"][0] == 0


def test_an_empty_step_is_host_and_swap() -> None:
    """A step that only swaps runs no kernel; one that does nothing costs the host's base."""
    assert MINE.step_ns(step(swap_blocks=10)) == 300_000 + 20_000 + 10 * 40_000
    assert MINE.step_ns(step()) == 300_000
    assert Calibrated(PROFILE, host=HostTerm(0, 0, 0, "serial", assumed=False)).step_ns(step()) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_explained_parts_add_up_to_the_step(variant: str) -> None:
    """`explain` on a recorded row and `step_ns` on the batch tell the same duration; there swaps are whole ns for
    themselves."""
    cost = VARIANTS[variant]
    for name, batch in BATCHES.items():
        took_ns = cost.step_ns(batch)  # which notes what is read within a window
        columns = columns_of(batch)
        terms = cost.explain(columns)
        rounded = 2 if terms["swap"][0] else 1
        assert abs(sum(terms[term][0] for term in TIME_TERMS) - took_ns) <= rounded, name
        assert min(terms[term][0] for term in terms) >= 0, name
        if cost.host.mode == "serial":
            beside = terms["swap"][0] + cost.kernel_ns(columns)[0] + cost.host_ns(columns)[0]
            assert beside == pytest.approx(sum(terms[term][0] for term in TIME_TERMS)), name


@given(st.lists(st.integers(1, 5_000), max_size=80), st.lists(st.tuples(st.integers(0, 900), st.integers(1, 700))))
def test_any_step_is_explained(contexts: list[int], chunks: list[tuple[int, int]]) -> None:
    """The quick path of `step_ns` and the columns of `explain` agree wherever a step falls."""
    batch = step(contexts, chunks)
    for cost in VARIANTS.values():
        took_ns = cost.step_ns(batch)  # which notes what is read within a window
        terms = cost.explain(columns_of(batch))
        assert abs(sum(terms[term][0] for term in TIME_TERMS) - took_ns) <= 1


def test_a_growing_context_never_gets_cheaper() -> None:
    """Over all segments of a row count, step by step as a simulation asks, and back again."""
    cost = Calibrated(load_profile(NAME))
    batch = step([1] * 100)
    times = []
    for _ in range(3000):
        times.append(cost.step_ns(batch))
        batch.again()
    columns = columns_of(batch)
    assert np.all(np.diff(times) >= -30_000)  # what the tables' own noise is
    assert times[-1] > 1.5 * times[0]
    assert cost.step_ns(step([1] * 100)) == times[0]
    assert columns["context_tokens"][0] == 300_100


# ---- the edges


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            step([10] * 65),
            "65 decode sequences asked; profile mine was measured up to 64. Recalibrate with --max-seqs 65",
        ),
        (step(chunks=[(0, 513)]), "513 tokens in a step asked; profile mine was measured up to 512"),
        (step([10] * 12, [(0, 501)]), "513 tokens in a step asked"),
        (step([10] * 60, [(0, 1)] * 5), "65 sequences in a step asked; .* up to 64. Recalibrate with --max-seqs 65"),
        (step(chunks=[(0, 1)] * 65), "65 sequences in a step asked"),
        (step(chunks=[(0, 300)], pad_prefill_tokens=213), "513 tokens in a step asked"),
        (step(chunks=[(0, 1)], pad_prefill_tokens=64, pad_prefill_rows=64), "65 sequences in a step asked"),
        (step([1000, 1001]), "1001 mean context tokens of the decodes asked; profile mine was measured up to 1000"),
        (step(chunks=[(1900, 101)]), "2001 tokens of one prompt asked; .* --max-model-len 2001"),
    ],
    ids=["decodes", "tokens", "mixed tokens", "mixed rows", "chunks", "padding", "copies", "context", "prompt"],
)
def test_outside_the_hull_is_refused(batch: Any, message: str) -> None:
    """With what was asked, what was measured and what to do; on request the curves go on instead."""
    with pytest.raises(ExtrapolationError, match=message):
        MINE.step_ns(batch)
    assert FREE.step_ns(batch) > 5_000_000


def test_the_hull_itself_is_inside() -> None:
    """At every limit exactly, the step has its time; and beyond after that it is still refused."""
    assert MINE.step_ns(step([1000] * 64)) == FREE.step_ns(step([1000] * 64))
    assert MINE.step_ns(step(chunks=[(1488, 512)])) == FREE.step_ns(step(chunks=[(1488, 512)]))
    with pytest.raises(ExtrapolationError):
        MINE.step_ns(step([1000] * 63 + [1001]))


def test_beyond_kernel_tables_less_is_advised() -> None:
    """Tables cannot be calibrated again: the workload asks for less, or what lies beyond is extrapolated."""
    cost = Calibrated(load_profile(NAME))
    with pytest.raises(ExtrapolationError, match=r"asked up to .* ask for no more or pass --set deployment\.extrapol"):
        cost.step_ns(step([1] * 1025))


def test_recompute_takes_the_steps_it_needs() -> None:
    """Within a step's limit it is that step, but with warm caches; beyond, the steps of a chunked prefill; beyond the
    prompt's, refused."""
    assert MINE.recompute_ns(512) == MINE.step_ns(step(chunks=[(0, 512)])) - 150_000
    chunked = [MINE.step_ns(step(chunks=[piece])) for piece in ((0, 512), (512, 512), (1024, 76))]
    assert MINE.recompute_ns(1100) == pytest.approx(sum(chunked) - 3 * 150_000, abs=3)
    assert FREE.recompute_ns(5000) == FREE.step_ns(step(chunks=[(0, 5000)])) - 150_000
    with pytest.raises(ExtrapolationError, match="2001 tokens of one prompt"):
        MINE.recompute_ns(2001)


def test_swaps_cost_what_was_measured_or_what_the_link_gives() -> None:
    """Measured: base and blocks, scaled to the run's block size. Else the host link of the GPU; else an error."""
    assert MINE.swap_ns(0) == 0
    assert MINE.swap_ns(5) == 20_000 + 5 * 40_000
    assert Calibrated(PROFILE, block_size=32).swap_ns(5) == 20_000 + 10 * 40_000
    unmeasured = replace(PROFILE, costs=replace(COSTS, swap=None))
    block_bytes = 16 * PROFILE.model.kv_bytes_per_token
    link = GPUS["h200"].host_link * HOST_LINK_SHARE
    assert Calibrated(unmeasured).swap_ns(100) == int(100 * block_bytes / link * 1e9)
    unknown = Calibrated(replace(unmeasured, gpu=None))
    assert unknown.step_ns(step([10])) > 0
    with pytest.raises(CalibrationError, match="swaps were not measured"):
        unknown.swap_ns(1)


# ---- words


def test_the_heading_says_what_it_rests_on() -> None:
    """Measured or of kernel tables, on what, how far off, and whose host time."""
    assert Calibrated(load_profile(NAME)).describe() == (
        "cost: kernel tables of vllm 0.24.0, weights bfloat16, kv bfloat16 (aiconfigurator-core 0.12.0; follows them to"
        " ±0.3 % (median of 200 steps); host assumed)"
    )
    assert MINE.describe() == (
        "cost: profile mine (measured on NVIDIA H200, torch 2.11.0, commit abc; ±1.2 % (median of 150 held-out steps),"
        " bias +0.2 %)"
    )
    assert "no held-out steps" in Calibrated(replace(PROFILE, held_out=None)).describe()
    cut = replace(PROFILE, missing=("block E: 3 of 9 steps not measured", "energy: no counter"))
    assert "PARTIAL, 2 things missing; ±1.2 %" in Calibrated(cut).describe()
    stated = Calibrated(PROFILE, extrapolate=True, host=StatedHost(1_000_000).term())
    assert stated.describe().endswith("; host stated; extrapolates)")
    assert stated.step_ns(step([10])) == FREE.step_ns(step([10])) - 301_500 + 1_000_000


def test_the_sources_tell_contents_apart() -> None:
    """Two profiles of one name with other numbers give other lines, so no result of one stands for the other."""
    other = replace(PROFILE, costs=replace(COSTS, launch_ns=5.3e6))
    assert MINE.sources()[0] != Calibrated(other).sources()[0]
    assert MINE.sources() != FREE.sources()
    assert any("(assumed)" in line for line in Calibrated(load_profile(NAME)).sources() if line.startswith("host: "))


# ---- scenarios

SCENARIO = """
model: llama-3.1-8b
cost: {cost}
workload:
  arrivals: {{kind: poisson, mean_rate: 2/s}}
  lengths: {{prompt: {{kind: fixed, tokens: 100}}, output: {{kind: fixed, tokens: 20}}}}
  output_cap: 64
  duration: 10s
policies: {{continuous: {{max_num_seqs: 8, max_num_batched_tokens: 512}}}}
slo: ttft<1s & tpot<50ms @ 99%
"""


def scenario_file(folder: Path, cost: str) -> str:
    """A small scenario in `folder` with that cost."""
    path = folder / "small.yaml"
    path.write_text(SCENARIO.format(cost=cost), encoding="utf-8")
    return str(path)


def test_a_scenario_names_a_shipped_profile(tmp_path: Path) -> None:
    """With its wishes, which --set reaches; a GPU's name is its roofline."""
    named = f"{{kind: profile, profile: {NAME}}}"
    plain = load_scenario(scenario_file(tmp_path, named))
    assert plain.cost == ProfileConfig(NAME)
    assert Setup.of(plain).cost.describe() == Calibrated(load_profile(NAME)).describe()
    long = load_scenario(
        scenario_file(tmp_path, f"{{kind: profile, profile: {NAME}, extrapolate: true, host: {{base: 1ms}}}}")
    )
    assert long.cost == ProfileConfig(NAME, extrapolate=True, host=StatedHost(1_000_000))
    assert load_scenario(scenario_file(tmp_path, "h200")).plain["cost"] == {"kind": "roofline", "gpu": "h200"}
    changed = load_scenario(scenario_file(tmp_path, named), overrides=["cost.extrapolate=true"])
    assert changed.cost == ProfileConfig(NAME, extrapolate=True)
    assert set(KINDS) == {"roofline", "profile", "constant", "linear", "free"}


def test_a_profile_stands_beside_its_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is looked for beside the scenario, then in the current folder."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.json").write_text(PROFILE.to_json(), encoding="utf-8")
    scenario = load_scenario(scenario_file(tmp_path / "there", "mine.json"))
    assert scenario.cost == ProfileConfig(str(tmp_path / "there" / "mine.json"))
    assert "measured on NVIDIA H200" in Setup.of(scenario).cost.describe()
    here = replace(PROFILE, hardware={"gpu": "another"})
    (tmp_path / "other.json").write_text(here.to_json(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    cost = Setup.of(load_scenario(scenario_file(tmp_path / "there", "other.json"))).cost
    assert "measured on another" in cost.describe()


def test_a_share_of_memory_beside_a_measured_one_is_refused(tmp_path: Path) -> None:
    """The profile says how many blocks there are, in blocks of its size; in others the share is read."""
    (tmp_path / "mine.json").write_text(PROFILE.to_json(), encoding="utf-8")
    path = scenario_file(tmp_path, "mine.json")
    with pytest.raises(ScenarioError, match=r"kv\.utilisation is not read: profile mine has its KV memory measured"):
        Setup.of(load_scenario(path, overrides=["kv={utilisation: 80%}"]))
    derived = f"kv={{utilisation: 80%, block_size: {2 * PROFILE.block_size}}}"
    assert "× 0.80" in str(Setup.of(load_scenario(path, overrides=[derived])).kv)


def test_a_config_json_profile_of_the_same_shape_fits(tmp_path: Path) -> None:
    """Names and positions may differ, nothing that costs time may."""
    renamed = replace(MODELS["llama-3.1-8b"], name="a/folder", max_position_embeddings=8192)
    (tmp_path / "mine.json").write_text(replace(PROFILE, model=renamed).to_json(), encoding="utf-8")
    cost = ProfileConfig(str(tmp_path / "mine.json")).build(MODELS["llama-3.1-8b"])
    assert isinstance(cost, Calibrated)
    with pytest.raises(CalibrationError, match=r"is of a/folder with model_type llama; mistral-7b has mistral"):
        ProfileConfig(str(tmp_path / "mine.json")).build(MODELS["mistral-7b"])


@pytest.mark.parametrize(
    ("cost", "error", "message"),
    [
        ("h20", ScenarioError, r"small.yaml:3: cost: h20 is not in the catalog .* Did you mean h200\?"),
        (NAME, ScenarioError, rf"small.yaml:3: cost: {NAME} is not in the catalog of GPUs"),
        ("cerebras", ScenarioError, r"Known are h200, .*; a profile's own file ends in \.json"),
        ("nowhere.json", CalibrationError, r"small.yaml:3: nowhere.json: neither a shipped profile nor a file"),
        (
            "{kind: profile, profile: qwen3-8b-h100-vllm-0.24.0}",
            CalibrationError,
            r"small.yaml:3: .* of Qwen/Qwen3-8B with vocab_size 151936; llama-3.1-8b has 128256",
        ),
        (f"{{kind: profile, profile: {NAME}, tp: 2}}", ScenarioError, "small.yaml:3: cost.tp is not a field of cost"),
        (f"{{kind: profile, profile: {NAME}, host: {{base: 3}}}}", ScenarioError, "small.yaml:3: cost.host.base"),
        ("{kind: profile}", ScenarioError, "small.yaml:3: cost.profile is missing"),
    ],
)
def test_a_wrong_cost_is_named_with_its_line(
    tmp_path: Path, cost: str, error: type[BatchsimError], message: str
) -> None:
    """Unknown names with the nearest, files that are not there, models of another shape, keys that do not belong."""
    with pytest.raises(error, match=message):
        Setup.of(load_scenario(scenario_file(tmp_path, cost)))


def test_a_newer_profile_is_told_from_a_broken_one(tmp_path: Path) -> None:
    """The version comes first, so that a file of a later batchsim is not called corrupt."""
    plain = json.loads(PROFILE.to_json()) | {"version": 3, "colour": "blue"}
    (tmp_path / "mine.json").write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(CalibrationError, match=r"small.yaml:3: .*mine.json: version 3 of the format"):
        Setup.of(load_scenario(scenario_file(tmp_path, "mine.json")))
