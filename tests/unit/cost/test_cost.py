"""The cost models: what a step costs, that its parts add up, and that padding is not free."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import Config
from batchsim.base.reading import Later
from batchsim.cost.base import Cost
from batchsim.cost.constant import Constant, Linear
from batchsim.cost.cost_error import Unknown
from batchsim.cost.fitted import Fitted, StepTerms
from batchsim.cost.host_config import HostCost
from batchsim.cost.kinds import COSTS, long_form
from batchsim.cost.own_cost import OwnCost
from batchsim.cost.roofline import KernelCosts, Roofline
from batchsim.cost.roofline_config import RooflineConfig
from batchsim.cost.work import TIME_TERMS, StepWork, columns_of, prefill_pairs, work_columns
from batchsim.deployment.catalog import GPUS, MODELS
from batchsim.deployment.deployment import Deployment
from batchsim.kernel.batch import Batch
from batchsim.kernel.record import STEP_DTYPE
from batchsim.kernel.types import DecodeGroup, Request, Sequence

LLAMA, H200 = MODELS["llama-3.1-8b"], GPUS["h200"]
ROOFLINE = Roofline(LLAMA, H200)
LINEAR = Linear(base=1_000_000, per_token=20_000, per_sequence=5_000, per_context_token=30, per_swapped_block=40_000)


@dataclass(frozen=True)
class EveryColumn(OwnCost):
    """A cost of one's own that reads all the work of a step."""

    def step_ns(self, step: StepWork) -> int:
        return 1 + sum((i + 1) * value for i, value in enumerate(step))


class OneForAll(OwnCost):
    """The less for a swap, which no estimate says to take time back."""

    def step_ns(self, step: StepWork) -> int:
        return 9 - step.swap_blocks


OWN = EveryColumn().build(LLAMA)
FREE_FIT = Fitted(None, StepTerms(0, 8e6, 90_000, 60_000, 60.5, 3.25, 0.4))
KERNEL_FIT = Fitted(ROOFLINE.without_host(), StepTerms(1.25, 1.5e6, 17_000, 6_500, 0, 4.5, 0))
STAIRS_FIT = Fitted(None, StepTerms(base=8e6, sequence=9e4, rows_2=3e6, rows_4=5e5, rows_8=7e5))


def sequence(computed: int, prompt: int = 100_000) -> Sequence:
    """A sequence with that many tokens computed."""
    seq = Sequence(Request(0, 0, prompt, 10))
    seq.settled_computed_tokens = computed
    return seq


def step(
    contexts: list[int] | None = None,
    chunks: list[tuple[int, int]] | None = None,
    swap_blocks: int = 0,
    pad_prefill_tokens: int = 0,
    pad_prefill_rows: int = 0,
    pad_decode_rows: int = 0,
    pad_context_tokens: int = 0,
    drafts: int = 0,
    passes: tuple[int, int] = (0, 0),
) -> Batch:
    """A batch of decodes at `contexts`, which verify `drafts` each, and of chunks (computed, tokens), in `passes`."""
    group = DecodeGroup(16)
    for context in contexts or []:
        seq = sequence(context, prompt=context)
        seq.settled_output_tokens = 1
        group.join(seq)
    pieces = [(sequence(computed), n) for computed, n in chunks or []]
    swapped = [(sequence(16), swap_blocks)] if swap_blocks else []
    batch = Batch(
        group if contexts else None,
        pieces,
        sum(n for _, n in pieces),
        swap_in=swapped,
        pad_prefill_tokens=pad_prefill_tokens,
        pad_prefill_rows=pad_prefill_rows,
        pad_decode_rows=pad_decode_rows,
        pad_context_tokens=pad_context_tokens,
    )
    batch.num_decode_tokens += drafts * batch.num_decode
    batch.num_passes, batch.num_wide_passes = passes
    return batch


BATCHES = {
    "one decode": step([512]),
    "decodes": step([100, 2000, 77] * 40),
    "prefill": step(chunks=[(0, 1000), (0, 24)]),
    "chunk after context": step(chunks=[(4096, 512)]),
    "mixed": step([1000] * 64, [(0, 300), (512, 1700)]),
    "padded decodes": step([1000] * 5, pad_decode_rows=3, pad_context_tokens=3000),
    "padded prompts": step(chunks=[(0, 1000), (0, 200)], pad_prefill_tokens=800),
    "copied prompts": step(chunks=[(0, 300), (0, 200)], pad_prefill_tokens=100 + 2 * 300, pad_prefill_rows=2),
    "swap beside decodes": step([1000] * 8, swap_blocks=64),
    "drafts": step([1000, 40] * 20, drafts=3),
    "drafts beside prompts": step([700] * 9, [(0, 300), (512, 1700)], drafts=2),
    "drafts beside padding": step([700] * 9, [(0, 1)], pad_decode_rows=2, drafts=2),
    "one narrow pass": step([512], passes=(1, 0)),
    "passes": step([512, 600, 700], [(0, 300)], passes=(4, 2)),
    "only a swap": step(swap_blocks=64),
    "nothing": step(),
}


@pytest.mark.parametrize(
    "cost",
    [ROOFLINE, Roofline(LLAMA, H200, tp=4), Constant(10_000_000), LINEAR, OWN, FREE_FIT, KERNEL_FIT, STAIRS_FIT],
    ids=["roofline", "tp4", "const", "lin", "own", "free fit", "kernel fit", "stairs fit"],
)
def test_the_explained_parts_add_up_to_the_step(cost: Cost) -> None:
    """`explain` on a recorded row and `step_ns` on the batch tell the same duration."""
    for name, batch in BATCHES.items():
        terms = cost.explain(columns_of(batch))
        assert abs(sum(terms[term][0] for term in TIME_TERMS) - cost.step_ns(batch)) <= 2, name
        assert min(terms[term][0] for term in terms) >= 0, name


def test_a_cost_of_one_s_own_estimates_by_the_steps_that_it_is_asked_for() -> None:
    """A chunk of 10 tokens: 3 · 10 + 4 · 1 + 6 · 55 + 1; a swapped block adds 11 to a step, one that adds none 0."""
    assert OWN.recompute_ns(10) == 30 + 4 + 330 + 1
    assert OWN.swap_ns(7) == 77
    assert OneForAll().build(LLAMA).swap_ns(7) == 0


def test_kernels_see_the_passes_of_a_step_that_is_split() -> None:
    """Three decodes in passes of two and one: the base twice, three sequences, a wide pass."""
    assert STAIRS_FIT.step_ns(step([9, 9, 9], passes=(2, 1))) == 2 * 8_000_000 + 3 * 90_000 + 3_000_000
    assert STAIRS_FIT.step_ns(step([9] * 8, passes=(1, 1))) == 8_000_000 + 8 * 90_000 + 3_000_000
    assert STAIRS_FIT.step_ns(step([9] * 8)) == 8_000_000 + 8 * 90_000 + 3_000_000 + 500_000 + 700_000


@pytest.mark.parametrize("cost", [FREE_FIT, KERNEL_FIT, STAIRS_FIT], ids=["free", "kernel", "stairs"])
def test_the_features_of_a_step_times_the_terms_are_its_time(cost: Fitted) -> None:
    """One row a step, one column a term, whatever the step holds."""
    rows = [columns_of(batch) for batch in BATCHES.values()]
    together = {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
    found = cost.features(together) @ np.array(astuple(cost.terms))
    assert found == pytest.approx([cost.step_ns(batch) for batch in BATCHES.values()], abs=3)


@pytest.mark.parametrize("context", [1, 17, 1000, 99_999])
def test_a_step_of_decodes_is_on_its_line_at_every_context(context: int) -> None:
    """To the nanosecond; so is the device's part of it. A cost that does not say so has no line."""
    for cost in (ROOFLINE, ROOFLINE.lanes(), LINEAR, Constant(7)):
        alone_ns, token_ns, last = cost.decode_line(step([5, 6, 7])) or (0, 0, 0)
        assert int(alone_ns + token_ns * 3 * context) == cost.step_ns(step([context] * 3))
        assert last == inf
    assert FREE_FIT.decode_line(step([5])) is None


def test_draft_tokens_are_rows_of_their_sequence_that_read_its_keys_once() -> None:
    """Layers and head compute every row; KV is read and the host's part taken a sequence; the rest is pairs."""
    few, many = (ROOFLINE.explain(columns_of(step([1000] * 40, drafts=drafts))) for drafts in (0, 3))
    assert many["kv_reads"][0] == few["kv_reads"][0] and many["host"][0] == few["host"][0]
    rows = ROOFLINE.explain(columns_of(step([1000] * 160)))
    assert many["matmul"][0] == rows["matmul"][0]
    pairs = 40 * (1001 + 1002 + 1003)
    chunk = ROOFLINE.explain(columns_of(step(chunks=[(pairs - 1, 1)])))
    assert many["attention"][0] == pytest.approx(chunk["attention"][0]) and few["attention"][0] == 0
    assert LINEAR.step_ns(step([1000] * 2, drafts=3)) - LINEAR.step_ns(step([1000] * 2)) == 6 * LINEAR.per_token


def test_explain_takes_many_steps_at_once() -> None:
    """Columns of all steps give what each step's own row gives."""
    rows = [columns_of(batch) for batch in BATCHES.values()]
    together = ROOFLINE.explain({key: np.concatenate([row[key] for row in rows]) for key in rows[0]})
    for index, row in enumerate(rows):
        assert {key: values[index] for key, values in together.items()} == {
            key: values[0] for key, values in ROOFLINE.explain(row).items()
        }


def test_prefill_pairs_equal_brute_force() -> None:
    """Each token of a chunk reads all tokens before it and itself."""
    batch = step(chunks=[(0, 5), (7, 3), (4, 1)])
    assert prefill_pairs(batch) == sum(c + i + 1 for c, n in [(0, 5), (7, 3), (4, 1)] for i in range(n))


def test_a_split_prompt_has_the_pairs_of_the_whole() -> None:
    """Chunking moves attention work between steps but makes none."""
    pieces = [(0, 512), (512, 512), (1024, 476)]
    assert sum(prefill_pairs(step(chunks=[piece])) for piece in pieces) == prefill_pairs(step(chunks=[(0, 1500)]))


def test_step_is_kernels_and_what_is_beside_them() -> None:
    """The kernel part leaves out host, elementwise kernels and swap; the host part is its own sum."""
    batch = BATCHES["mixed"]
    terms = ROOFLINE.explain(columns_of(batch))
    host_ns = ROOFLINE.host_part.ns(batch)
    assert host_ns == 600_000 + 66 * 2_000 == terms["host"][0]
    elementwise = KernelCosts.of(Deployment(LLAMA), H200).other_per_token * (64 + 2000)
    assert ROOFLINE.step_ns(batch) == pytest.approx(ROOFLINE.kernel_ns(batch) + host_ns + elementwise)


def test_a_decode_step_cannot_beat_the_memory_bandwidth() -> None:
    """A lone decode takes at least the weights' bytes at the sheet's bandwidth, and at most twice that."""
    floor = (LLAMA.num_parameters - LLAMA.head_parameters) * 2 / H200.memory_bandwidth * 1e9
    assert floor < ROOFLINE.kernel_ns(BATCHES["one decode"]) < 2 * floor


def test_a_long_prompt_cannot_beat_the_peak() -> None:
    """Prefill reaches between half of the sheet's arithmetic peak and all of it."""
    batch = step(chunks=[(0, 8192)])
    flops = ROOFLINE.explain(columns_of(batch))["flops"][0]
    assert 0.5 < flops / H200.peak_flops / (ROOFLINE.step_ns(batch) / 1e9) < 1


@pytest.mark.parametrize("gpu", GPUS)
def test_more_work_never_costs_less(gpu: str) -> None:
    """Duration grows with sequences, context, chunk length and a chunk's context."""
    cost = Roofline(LLAMA, GPUS[gpu])
    series = [
        [step([500] * n) for n in range(1, 300, 13)],
        [step([n] * 16) for n in range(1, 9000, 500)],
        [step([500], [(0, n)]) for n in range(1, 9000, 300)],
        [step(chunks=[(c, 256)]) for c in range(0, 30_000, 1000)],
    ]
    for batches in series:
        durations = [cost.step_ns(batch) for batch in batches]
        assert all(a < b for a, b in pairwise(durations))


@pytest.mark.parametrize("cost", [ROOFLINE, LINEAR], ids=["roofline", "linear"])
def test_padding_costs_what_work_costs(cost: Cost) -> None:
    """Rows of ended sequences cost as live ones; a padded prompt as one of the longest's length, and so a copy."""
    assert cost.step_ns(BATCHES["padded decodes"]) == cost.step_ns(step([1000] * 8))
    assert cost.step_ns(BATCHES["padded prompts"]) == cost.step_ns(step(chunks=[(0, 1000), (0, 1000)]))
    assert cost.step_ns(BATCHES["copied prompts"]) == cost.step_ns(step(chunks=[(0, 300)] * 4))


@pytest.mark.parametrize("cost", [ROOFLINE, Roofline(LLAMA, H200, tp=2)], ids=["roofline", "tp2"])
def test_padding_takes_no_attention_away(cost: Roofline) -> None:
    """A chunk after 4,096 tokens has more pairs than a whole prompt of the padded length: those count."""
    padded, bare = step(chunks=[(4096, 512)], pad_prefill_tokens=8), step(chunks=[(4096, 512)])
    terms = [cost.explain(columns_of(batch)) for batch in (padded, bare)]
    assert terms[0]["attention"][0] == terms[1]["attention"][0]
    assert sum(terms[0][term][0] for term in TIME_TERMS) == pytest.approx(cost.step_ns(padded), abs=1)


def test_padding_is_not_useful_work() -> None:
    """FLOPs and bytes for MFU count real rows only."""
    padded, real = (ROOFLINE.explain(columns_of(b)) for b in (BATCHES["padded decodes"], step([1000] * 5)))
    assert padded["flops"][0] == real["flops"][0]
    assert padded["bytes"][0] == real["bytes"][0]


def test_two_gpus_halve_the_matmuls_and_pay_for_talking() -> None:
    """Arithmetic and weight bytes halve with tp 2; the all-reduces appear in what is neither."""
    one, two = (KernelCosts.of(Deployment(LLAMA, tp=tp), H200) for tp in (1, 2))
    assert two.layers[0] == one.layers[0] / 2
    assert two.layers[2] == one.layers[2] / 2
    assert two.head[2] == one.head[2] / 2
    assert two.kv_per_token == one.kv_per_token / 2
    assert two.attention_per_pair == one.attention_per_pair / 2
    assert (one.other_constant, two.other_constant) == (0, 2 * 32 * H200.peer_latency_ns)
    # Ring of two: each sends its half once to sum and once to share, twice a layer.
    sent = 32 * 2 * 4096 * 2 / H200.peer_link * 1e9
    slow = KernelCosts.of(Deployment(LLAMA, tp=2), replace(H200, peer_link=H200.peer_link / 2))
    assert slow.other_per_token - two.other_per_token == pytest.approx(sent)
    both = Roofline(LLAMA, H200, tp=2).deployment
    assert (both.num_gpus, both.peak_flops, both.memory_bandwidth) == (
        2,
        2 * H200.peak_flops,
        2 * H200.memory_bandwidth,
    )


def test_swap_is_bytes_over_the_link() -> None:
    """64 blocks of 2 MiB over 64 GB/s × 0.85, or over the stated bandwidth; it adds to the step."""
    assert ROOFLINE.swap_ns(64) == int(64 * 16 * 131_072 / (64 * 0.85))
    assert Roofline(LLAMA, H200, swap_bandwidth=10e9, block_size=32).swap_ns(1) == int(32 * 131_072 / 10)
    assert ROOFLINE.step_ns(BATCHES["swap beside decodes"]) == pytest.approx(
        ROOFLINE.step_ns(step([1000] * 8)) + ROOFLINE.swap_ns(64), abs=1
    )


def test_recompute_is_a_prefill_step_of_its_own() -> None:
    """The estimator's answer is the step that would be run."""
    assert ROOFLINE.recompute_ns(1500) == ROOFLINE.step_ns(step(chunks=[(0, 1500)]))
    assert LINEAR.recompute_ns(1500) == LINEAR.step_ns(step(chunks=[(0, 1500)]))


def test_a_step_takes_at_least_a_nanosecond() -> None:
    """An empty step costs the host's constant, and where that is 0, one nanosecond."""
    assert ROOFLINE.step_ns(step()) == 600_000
    assert Roofline(LLAMA, H200, host=HostCost(0, 0, 0)).step_ns(step()) == 1


def test_constant_and_linear_by_hand() -> None:
    """Linear: 1 ms + 2064 tokens × 20 us + 66 sequences × 5 us + 64,000 context tokens × 30 ns."""
    assert Constant(7).step_ns(BATCHES["mixed"]) == 7
    assert LINEAR.step_ns(BATCHES["mixed"]) == 1_000_000 + 2064 * 20_000 + 66 * 5_000 + 64_000 * 30
    assert LINEAR.step_ns(BATCHES["only a swap"]) == 1_000_000 + 64 * 40_000


def test_a_gpu_name_builds_its_roofline() -> None:
    """The short form, the long form and the stated costs all build."""
    config = Later(COSTS["roofline"]).config()
    short, long = config(**long_form("h100")).build(LLAMA), RooflineConfig("h100", tp=2).build(LLAMA, block_size=32)
    assert isinstance(short, Roofline) and isinstance(long, Roofline)
    assert short.describe() == "cost: roofline, not measured here (kernel part ±8.6 %)"
    assert long.describe().startswith("cost: roofline, tp 2, ")
    assert long.block_bytes == 32 * 131_072 // 2
    assert LINEAR.build(LLAMA) is LINEAR


@pytest.mark.parametrize("kind", COSTS)
def test_every_kind_says_what_scenarios_ask_of_a_cost(kind: str) -> None:
    """Its name, what drafting costs (nothing said unless it is), the GPUs of an engine, and the cost that it makes."""
    config = Later(COSTS[kind]).config()
    assert issubclass(config, Config)
    assert {field.name: field.default for field in fields(config) if field.name in ("kind", "draft")} == {
        "kind": kind,
        "draft": None,
    }
    assert "num_gpus" in dir(config) and callable(config.build)


def test_what_is_assumed_is_said() -> None:
    """Assumed host times and unfitted attention are named where the sources are printed."""
    assert [line.split(":")[0] for line in ROOFLINE.sources() if "assumed" in line] == ["host", "swap"]
    stated = Roofline(LLAMA, H200, host=HostCost(1_000), swap_bandwidth=50e9)
    assert not any("assumed" in line for line in stated.sources())
    l40s = Roofline(LLAMA, GPUS["l40s"])
    assert any("attention not fitted" in line for line in l40s.sources())
    assert any(line.startswith("matmuls off by") for line in l40s.sources())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: long_form("b300"), ScenarioError, "b300 is not in the catalog"),
        (lambda: RooflineConfig("h200", tp=3).build(LLAMA), ScenarioError, "into 3 equal parts"),
        (lambda: RooflineConfig("h200", pp=3).build(LLAMA), ScenarioError, "32 layers.*into 3 equal stages"),
        (lambda: Roofline(replace(LLAMA, dtype="float32"), H200), ScenarioError, "16-bit types only"),
    ],
)
def test_a_wrong_cost_is_refused(make: object, error: type[Exception], message: str) -> None:
    """Each wrong knob is named with its value."""
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


def test_columns_of_recorded_steps_are_wide() -> None:
    """Of 32 bits on record: products of two would not fit."""
    steps = np.zeros(2, STEP_DTYPE)
    steps["num_prefill_tokens"] = 70_000, 4
    tokens = work_columns(steps)["num_prefill_tokens"]
    assert (tokens * tokens).tolist() == [4_900_000_000, 16]


def test_quantised_matrices_are_read_in_their_bytes_and_multiplied_in_what_the_gpu_has():
    """FP8 halves the bytes, and the arithmetic where the GPU multiplies it; INT4 a quarter of the bytes alone."""
    plain = KernelCosts.of(Deployment(LLAMA), H200)
    fp8, int4 = (KernelCosts.of(Deployment(LLAMA, weight_dtype=dtype), H200) for dtype in ("fp8", "int4"))
    assert fp8.layers[0] == pytest.approx(plain.layers[0] / 2)
    assert fp8.layers[2] == pytest.approx(plain.layers[2] * H200.peak_flops / H200.fp8_flops)
    assert fp8.head == plain.head and fp8.layers[1] == plain.layers[1]
    assert (
        int4.layers[0] == pytest.approx(plain.layers[0] * (0.5 + 2.5 / 128) / 2) and int4.layers[2] == plain.layers[2]
    )
    a100 = GPUS["a100"]
    old, older = (KernelCosts.of(Deployment(LLAMA, weight_dtype=dtype), a100) for dtype in ("fp8", "bfloat16"))
    assert old.layers[2] == older.layers[2]
    assert KernelCosts.of(Deployment(LLAMA, kv_dtype="fp8"), H200).kv_per_token == plain.kv_per_token / 2


def test_a_roofline_of_a_deployment_has_its_types_and_no_error_it_knows():
    """What was not in the fit is named; a cost without a host is of the same deployment."""
    its = Deployment(LLAMA, H200, weight_dtype="fp8", kv_dtype="fp8")
    cost = Roofline(LLAMA, H200, deployment=its)
    assert cost.error == Unknown("weights fp8, kv fp8 not in the fit")
    assert cost.without_host().deployment == its and cost.step_ns(BATCHES["mixed"]) < ROOFLINE.step_ns(BATCHES["mixed"])
    terms = cost.explain(columns_of(BATCHES["mixed"]))
    total = sum(terms[name][0] for name in TIME_TERMS)
    assert total == pytest.approx(cost.step_ns(BATCHES["mixed"]), abs=2)
