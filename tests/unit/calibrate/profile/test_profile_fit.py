"""The fit of step times: on times made by a known law, and with the disturbances that measurements have."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls as scipy_nnls

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.profile.fit import errors, fit_host, fit_kernels, nnls, robust_nnls
from batchsim.calibrate.profile.point_plan import StepRange, StepShape, columns, doublings, plan
from batchsim.cost.work import padded_work
from batchsim.deployment.catalog import MODELS

LLAMA = MODELS["llama-3.1-8b"]
LIMITS = StepRange(max_seqs=16, max_tokens=256, max_context=512, kv_tokens=16 * 512)


def law(points: list[StepShape]) -> np.ndarray:
    """Times in ns: bent in the tokens, linear in all else."""
    work = padded_work(columns(points))
    decodes = np.array([len(p.decode) for p in points])
    chunks = np.array([len(p.chunks) for p in points])
    matmul = 500_000 + 9_000 * work.tokens + 4_000 * np.maximum(work.tokens - 64, 0) + 2_000 * work.rows
    return matmul + 60_000 * decodes + 150 * work.context + 40_000 * chunks + 25 * work.pairs


def predicted(kernels, points: list[StepShape]) -> np.ndarray:
    """What fitted kernels say of points, without graphs."""
    work, chunk = padded_work(columns(points)), kernels.chunk_attention
    decodes = np.array([len(p.decode) for p in points])
    c = columns(points)
    attention = kernels.decode_attention.at(decodes, work.context / np.maximum(decodes, 1)) * (decodes > 0)
    chunks = chunk.per_chunk * c["num_chunks"] + chunk.per_token * c["num_prefill_tokens"] + chunk.per_pair * work.pairs
    matmul = kernels.layers.at(work.tokens) + kernels.head.at(work.rows)
    if kernels.decode is not None:
        own = c["num_chunks"] == 0
        matmul[own] = kernels.decode.holding(decodes[own])
    return matmul + attention + chunks


def test_nnls_equals_scipys() -> None:
    """The active-set method finds the minimum that another implementation finds, on 30 random problems."""
    random = np.random.default_rng(0)
    for _ in range(30):
        a, b = random.normal(size=(40, 12)), random.normal(size=40)
        assert nnls(a, b) == pytest.approx(scipy_nnls(a, b)[0], abs=1e-9)


def test_nnls_of_columns_that_depend_on_each_other_still_fits() -> None:
    """Two equal columns leave their shares open, and the sum right."""
    a = np.ones((5, 3))
    a[:, 2] = np.arange(5)
    found = nnls(a, 2 + 3.0 * np.arange(5))
    assert found[:2].sum() == pytest.approx(2)
    assert found[2] == pytest.approx(3)


def test_a_few_disturbed_times_do_not_bend_the_fit() -> None:
    """With 5 % of the times tripled the line is found within 1 %, where plain least squares is not."""
    random = np.random.default_rng(1)
    x = random.uniform(1, 100, 200)
    y = 50 + 3 * x
    y[::20] *= 3
    a = np.stack([np.ones(200), x], axis=1)
    assert robust_nnls(a, y) == pytest.approx([50, 3], rel=0.01)
    assert nnls(a, y)[1] > 3.05 or nnls(a, y)[0] > 55


def test_a_known_law_is_found() -> None:
    """Every step of blocks A to E, and steps between them, come out within 1 % of the law that made the times."""
    points = plan(LIMITS, block_size=16)
    kernels = fit_kernels(LLAMA, points, law(points).tolist(), buckets=(), measured_grid=False)
    between = [
        StepShape("H", (100, 300, 7), ((33, 90),)),
        StepShape("H", (400,) * 11),
        StepShape("H", (), ((64, 150), (0, 40))),
    ]
    for some in (points, between):
        assert predicted(kernels, some) == pytest.approx(law(some), rel=0.01)
    assert kernels.launch_ns == 0
    assert kernels.decode is not None


def test_noise_of_five_percent_leaves_less_than_two() -> None:
    """Points that scatter by 5 % are smoothed: the median error against the law itself is below 2 %."""
    points = plan(LIMITS, block_size=16)
    noisy = law(points) * np.random.default_rng(2).normal(1.0, 0.05, len(points))
    kernels = fit_kernels(LLAMA, points, noisy.tolist(), buckets=(), measured_grid=False)
    assert float(np.median(np.abs(predicted(kernels, points) / law(points) - 1))) < 0.02


def test_curves_never_fall() -> None:
    """Whatever the noise, more tokens never cost less."""
    points = plan(LIMITS, block_size=16)
    noisy = law(points) * np.random.default_rng(3).normal(1.0, 0.2, len(points))
    kernels = fit_kernels(LLAMA, points, noisy.tolist(), buckets=(), measured_grid=False)
    assert list(kernels.layers.ns) == sorted(kernels.layers.ns)
    assert list(kernels.layers.x) == doublings(LIMITS.max_tokens)


def test_graphs_get_a_curve_by_size_and_launches_a_floor() -> None:
    """With graphs, decodes are timed by the graph that holds them; op by op no step is quicker than its launches."""
    sizes, floor = (1, 2, 4, 8, 16), 3_000_000.0
    points = plan(LIMITS, block_size=16, buckets=sizes, fine=True)
    times = [ns if not p.chunks else max(ns, floor) for p, ns in zip(points, law(points), strict=True)]
    kernels = fit_kernels(LLAMA, points, times, buckets=sizes, measured_grid=True)
    assert kernels.launch_ns == pytest.approx(floor, rel=0.01)
    assert kernels.decode is not None
    assert kernels.decode.x == sizes
    for b, c in ((1, 511), (8, 255), (16, 127)):
        found = float(
            kernels.decode.holding(np.array([b]))[0] + kernels.decode_attention.at(np.array([b]), np.array([c]))[0]
        )
        assert found == pytest.approx(law([StepShape("A", (c,) * b)])[0], rel=0.02)


@pytest.mark.parametrize(("most", "ran"), [(100, 104), (20, 24)])
@pytest.mark.parametrize("measured", ["all", "cut"])
def test_every_size_of_graph_has_a_time_of_its_own(most: int, ran: int, measured: str) -> None:
    """The most sequences ran in a graph that is larger than they are; sizes not measured come from their neighbours."""
    sizes = tuple(size for size in (1, 2, 4, 8, 16, *range(24, 120, 8)) if size <= ran + 8)
    limits = StepRange(max_seqs=most, max_tokens=256, max_context=512, kv_tokens=most * 512)
    points = plan(limits, block_size=16, buckets=sizes, fine=True)
    if measured == "cut":
        points = [p for p in points if p.block != "A" or len(p.decode) in (1, 8, 64, most)]
    held = [len(p.decode) if p.chunks else next(size for size in sizes if size >= len(p.decode)) for p in points]
    more = np.array(held) - [len(p.decode) for p in points]  # rows that only fill the graph: layers and head
    times = law(points) + 11_000 * more + 4_000 * np.maximum(np.minimum(more, np.array(held) - 64), 0)
    kernels = fit_kernels(LLAMA, points, times.tolist(), buckets=sizes, measured_grid=True)
    decode = kernels.decode
    assert decode is not None
    assert decode.x == sizes
    full = [StepShape("A", (16,) * size) for size in sizes]
    assert predicted(kernels, full) == pytest.approx(law(full), rel=0.01)
    assert decode.holding(np.array([most]))[0] == decode.ns[sizes.index(ran)]


def test_too_few_points_are_said() -> None:
    """A fit of next to nothing is refused in one line."""
    with pytest.raises(CalibrationError, match="too few"):
        fit_kernels(LLAMA, [StepShape("A", (5,))], [1e6], buckets=(), measured_grid=False)


def test_the_hosts_time_is_what_periods_have_beyond_kernels() -> None:
    """Base, part of a sequence and part of a prefill token come back, with one step in 50 held up for long."""
    random = np.random.default_rng(4)
    steps = {
        "num_decode": random.integers(0, 64, 500),
        "pad_decode_rows": random.integers(0, 5, 500),
        "num_chunks": random.integers(0, 3, 500),
        "pad_prefill_rows": random.integers(0, 2, 500),
        "num_prefill_tokens": random.integers(0, 500, 500),
    }
    host = (
        300_000
        + 4_000 * sum(steps[name] for name in ("num_decode", "pad_decode_rows", "num_chunks", "pad_prefill_rows"))
        + 100 * steps["num_prefill_tokens"]
    )
    host[::50] += 40_000_000
    kernel = random.uniform(1e6, 5e6, 500)
    assert fit_host(steps, kernel, kernel + host) == pytest.approx([300_000, 4_000, 100], rel=0.03)


def test_errors_of_a_constant_factor() -> None:
    """Predictions 2 % high have 2 % in every column, with the sign in the bias."""
    row = errors(np.array([102.0, 204.0]), np.array([100.0, 200.0]), "all")
    assert row == {"region": "all", "n": 2, "p50": 0.02, "p95": 0.02, "bias": 0.02}


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        StepRange(256, 8192, 8192, 400_000),
        StepRange(1, 16, 64, 64),
        StepRange(3, 3, 40, 100),
        StepRange(512, 512, 131_072, 200_000),
    ],
)
def test_a_plan_stays_within_its_hull(limits: StepRange) -> None:
    """No point has more sequences, tokens, context or KV than asked for; the ends of the hull are among them."""
    points = plan(limits, block_size=16)
    assert all(p.fits(limits, 16) for p in points)
    assert max(p.tokens for p in points) == limits.max_tokens
    assert max(len(p.decode) for p in points) == limits.max_seqs
    assert max(p.decode[0] for p in points if p.block == "A") == limits.max_context - 1
    assert len(points) == len(set(points))


def test_points_survive_json() -> None:
    """A point read back from a sample's row is the point."""
    for point in (*plan(LIMITS, block_size=16), StepShape("H", (3, 3, 4), ((0, 7),))):
        assert StepShape.from_row(point.to_row()) == point
