"""Profiles made of the kernel tables' answers: the same bytes from the same tables, in a few seconds.

A query takes microseconds, so the layers are asked at every number of tokens that can differ, and of these so few knots
are kept that no time between them is off by more than `TOLERANCE`: kernels cut tokens into tiles, and a tile more may
cost 60 % at 257 tokens. The attention of decodes is asked on a grid of sequences by contexts, that of chunks on one of
tokens by mean keys, which a step with several chunks is read at too. Layers with a window have grids of their
own, which end where it is full.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from batchsim.cost.profile import (
    ChunkCost,
    ChunkGrid,
    Curve,
    EngineSetup,
    Grid,
    HostTerm,
    Hull,
    Profile,
    Recurrence,
    SharedExperts,
    StepCosts,
    WindowedAttention,
)
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.quantisation import Quantisation
from batchsim.tables.graph import REACHED
from batchsim.tables.handle import Tables
from batchsim.tables.modes import PACKAGE, gemm_dtype, has_experts
from batchsim.tables.versions import version

BUILDER = 4
"""Of this file: what it makes of the same tables. A higher number makes kept profiles anew."""

TOLERANCE = 0.01
"""How far the layers may be off between two knots, as a share of their time."""

JUMP = 1.06
"""By how much a prefix of one token may lengthen a step of a prompt before the heading says it."""

MAX_TOKENS = 32_768
MAX_CONTEXT = 131_072
_EVERY = 2_048  # tokens up to which each number is asked, and beyond which the edges of tiles are
_TILE = 16
_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024)
_CONTEXTS = (64, 256, 1_024, 2_048, 4_096, 8_192, 32_768, 131_072)
_CHUNK_TOKENS = (1, 16, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
_WINDOW_SEQUENCES = (*_SEQUENCES[:8], 40, 48, 56, 64, 80, *_SEQUENCES[10:])
_WINDOW_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # of a window, which decodes or a chunk's tokens read in it
_FULL = 2  # windows of context, at which the kernels of a full window are asked
_SCANNED = (1, 4, 16, 64, 128, 192, 256, 384, 512, 768, 1_024, 1_536, 2_048, 3_072, 4_096, 8_192, 16_384, 32_768)
_SCANNED_CHUNKS = (1, 2, 3, 4, 6, 8, 16)
_MORE_CHUNKS = (2, 4)  # numbers of chunks at which blocks are asked too
_BLOCK_CONTEXTS = (64, 256, 512, 1_024, 1_536, 2_048, 3_072, 4_096, 8_192, 32_768, 131_072)
_BLOCK_KEYS = (16, 64, 256, 512, 1_024, 1_536, 2_048, 2_560, 4_096, 8_192, 16_384, 131_072)
_CHUNK_KEYS = (16, 64, 256, 1_024, 4_096, 16_384, 131_072)
_HOST = HostTerm(600_000.0, 2_000.0, 0.0, "serial", assumed=True)  # the host time that a roofline assumes (HostCost)

_GRAPHS = {
    "vllm": (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)),
    "sglang": (1, 2, 4, 8, 12, *range(16, 257, 8)),
    "tensorrt_llm": (1, 2, 4, *range(8, 129, 8)),
}
"""Sizes of the CUDA graphs that engines capture for decodes, by default and where there is memory for all.

Sources: vLLM `compilation.cudagraph_capture_sizes` up to 512, SGLang `--cuda-graph-max-bs` 256, TensorRT-LLM
`cuda_graph_config` with padding up to 128."""

_BESIDE = {("vllm", "rtx_pro_6000_server"): 1.5, ("vllm", "l40s"): 1.8}
"""The attention of decodes beside a chunk over that of decodes alone, by engine and GPU, where it was measured: the
tables sum both as if each ran alone, and one kernel for all (FlashAttention 2) gives decodes the tiles of prompts.

Source: the attention tables of github.com/casys-kaist/LLMServingSim (profiler/perf), Llama-3.1-8B in bf16 under vLLM,
with one chunk's own attention taken off. RTX PRO 6000 @ 0d3de68: median of 25, 8 to 128 decodes of 923 to 4,671 tokens
beside a chunk of 410 (1.2 to 3.0). RTX 4090 @ a09fa56, the chip of an L40S: median of 15, 8 to 128 decodes of 1,024 to
4,096 tokens beside a chunk of 256 (1.7 to 3.9). Engines with a kernel for either (TensorRT-LLM's, FlashInfer's) sum.
"""


def build_profile(tables: Tables) -> Profile:
    """The profile of the deployment that `tables` answers for, without a comparison."""
    deployment, groups = tables.deployment, tables.deployment.dp_attention
    longest = min(deployment.model.max_position_embeddings, MAX_CONTEXT)
    most = max(_SEQUENCES) * groups
    grid = _decode_grid(tables, longest)
    chunks = _chunk_grid(tables, longest)
    tokens, keys = chunks.sequences[-1], chunks.context
    per_pair = max(chunks.ns[-1][-1] - chunks.ns[-1][-2], 0.0) / (keys[-1] - keys[-2]) / tokens
    costs = StepCosts(
        layers=_layers(tables),
        head=_curve([(rows * groups, tables.head(rows * groups)) for rows in _SEQUENCES]),
        decode=_decode(tables, most),
        decode_attention=grid,
        chunk_attention=ChunkCost(0.0, 0.0, _short(per_pair)),
        launch_ns=0.0,
        prefill_ns=0.0,
        in_situ=1.0,
        host=_HOST,
        swap=None,
        chunk_grid=chunks,
        beside=_BESIDE.get((deployment.engine, deployment.gpu.name if deployment.gpu else ""), 1.0),
        transfer=_curve([(n, tables.transfer(n)) for n in (1, 64, 1_024, 8_192, MAX_TOKENS)])
        if deployment.pp > 1
        else None,
        more_chunks=_more_chunks(tables, longest, chunks) if tables.compound else (),
        windowed=None if tables.window is None else _windowed(tables, tables.window),
        recurrence=_recurrence(tables) if tables.recurrent else None,
        experts=_experts(tables, most) if groups > 1 else None,
    )
    shares = tables.provenance()
    power = shares.pop("power")
    known = f"power of {power:.0%} of the time" if power else "power of none of these kernels"
    return Profile(
        name=name_of(deployment, tables.backend),
        origin="imported",
        executor=deployment.engine,
        model=replace(deployment.model, untimed="", quantised=Quantisation(), vision=None),
        gpu=None if deployment.gpu is None else deployment.gpu.name,
        hardware={"gpu": tables.system, "gpus": deployment.num_gpus},
        software={PACKAGE: version(), deployment.engine: tables.backend},
        made={
            "from": f"{PACKAGE} {version()}",
            "builder": BUILDER,
            "graph_of": tables.model_id,
            "modes": str(tables.modes),
            "times": {source: round(share, 3) for source, share in shares.items()},
            **_jump(tables, longest),
        },
        block_size=16,
        num_blocks=None,
        costs=costs,
        hull=Hull(most, MAX_TOKENS * groups, float(longest), longest),
        missing=("num_blocks", "host", "swap", f"energy: the tables have the {known}"),
        notes=_notes(tables, costs.beside),
        setup=setup_of(deployment, tables.backend),
    )


def setup_of(deployment: Deployment, backend: str) -> EngineSetup:
    """How the engine of `deployment` runs, with the version `backend` of its kernels and no type left to the model."""
    weights = plain_dtype(gemm_dtype(deployment))
    experts = plain_dtype(deployment.types.experts) if has_experts(deployment.model) else ""
    return EngineSetup(
        deployment.engine,
        backend,
        tp=deployment.tp,
        pp=deployment.pp,
        ep=deployment.ep,
        dp_attention=deployment.dp_attention,
        weight_dtype="bfloat16" if weights == experts == "mxfp4" else weights,  # of which experts alone are
        moe_dtype=experts,
        kv_dtype=plain_dtype(deployment.types.kv),
    )


def plain_dtype(dtype: str) -> str:
    """The type whose kernels take as long: one of the two of 16 bits stands for both."""
    return "bfloat16" if dtype == "float16" else dtype


def name_of(deployment: Deployment, backend: str) -> str:
    """A profile's name: model, GPU, engine and version, then what differs from one GPU and 16 bits."""
    slug = deployment.model.name.rpartition("/")[2].lower().removeprefix("meta-")
    gpu = "gpu" if deployment.gpu is None else deployment.gpu.name
    setup = setup_of(deployment, backend)
    return "-".join([slug, gpu, setup.engine, backend, *marks_of(setup)])


def marks_of(setup: EngineSetup) -> list[str]:
    """The parts of a profile's name that distinguish the setup from one GPU and 16 bits."""
    degrees = (("tp", setup.tp), ("pp", setup.pp), ("ep", setup.ep), ("dp", setup.dp_attention))
    marks = [f"{name}{count}" for name, count in degrees if count > 1]
    marks += [setup.weight_dtype] if setup.weight_dtype != "bfloat16" else []
    marks += [f"moe-{setup.moe_dtype}"] if setup.moe_dtype not in ("", setup.weight_dtype) else []
    return marks + ([f"kv-{setup.kv_dtype}"] if setup.kv_dtype != "bfloat16" else [])


def _layers(tables: Tables) -> Curve:
    return _over_tokens(tables, tables.layers)


def _experts(tables: Tables, most: int) -> SharedExperts:
    """The part that all attention groups compute together."""
    return SharedExperts(_over_tokens(tables, tables.experts), _over_graphs(tables, tables.decode_experts, most))


def _over_tokens(tables: Tables, ms: Callable[[int], float]) -> Curve:
    """`ms` over tokens, knots where no time between them is off by more than the tolerance."""
    groups = tables.deployment.dp_attention
    edges = range(_EVERY, MAX_TOKENS + 1, _TILE)
    counts = [*range(1, _EVERY), *(n for edge in edges for n in (edge, edge + 1) if n <= MAX_TOKENS)]
    points = [(n * groups, ms(n * groups)) for n in counts]
    return _curve([points[i] for i in knots_of(points)])


def knots_of(points: Sequence[tuple[float, float]], tolerance: float = TOLERANCE) -> list[int]:
    """Indices of so few of the points (x, y) that lines between them miss no other y by more than that share of it."""
    knots, start = [0], 0
    while start < len(points) - 1:
        least, most, best = -inf, inf, start + 1
        x, y = points[start]
        for i in range(start + 1, len(points)):
            run, rise = points[i][0] - x, points[i][1]
            if least <= (rise - y) / run <= most:
                best = i
            least = max(least, (rise * (1 - tolerance) - y) / run)
            most = min(most, (rise * (1 + tolerance) - y) / run)
            if least > most:
                break
        start = best
        knots.append(start)
    return knots


def _decode(tables: Tables, most: int) -> Curve:
    """Layers and output matmul of decodes alone."""
    return _over_graphs(tables, tables.decode, most)


def _over_graphs(tables: Tables, ms: Callable[[int], float], most: int) -> Curve:
    """`ms` at the sizes of CUDA graphs; beyond the largest the knots are spaced 1/16 apart."""
    groups = tables.deployment.dp_attention
    sizes = [size * groups for size in _GRAPHS[tables.deployment.engine]]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + groups * max(8, sizes[-1] // groups // 16 // 8 * 8)))
    return _curve([(size, ms(size)) for size in sizes[: bisect_left(sizes, most) + 1]])


def _decode_grid(tables: Tables, longest: int) -> Grid:
    groups = tables.deployment.dp_attention
    contexts = _within(_BLOCK_CONTEXTS if tables.compound else _CONTEXTS, longest)
    rows = [rows * groups for rows in _SEQUENCES]
    return _grid(rows, contexts, [[tables.decode_attention(b, c) for c in contexts] for b in rows])


def _chunk_grid(tables: Tables, longest: int, chunks: int = 1) -> Grid:
    groups = tables.deployment.dp_attention
    keys = _within(_BLOCK_KEYS if tables.compound else _CHUNK_KEYS, longest)
    tokens = [n * groups for n in _CHUNK_TOKENS]
    return _grid(tokens, keys, [[tables.chunk_attention(n, k, chunks) for k in keys] for n in tokens])


def _more_chunks(tables: Tables, longest: int, single: Grid) -> tuple[ChunkGrid, ...]:
    """The chunks of steps with several on each attention group; `single` is of those with one on each."""
    groups = tables.deployment.dp_attention
    more = tuple(ChunkGrid(n * groups, _chunk_grid(tables, longest, n)) for n in _MORE_CHUNKS)
    return more if groups == 1 else (ChunkGrid(groups, single), *more)


def _windowed(tables: Tables, window: int) -> WindowedAttention:
    """The attention of layers with a window; knots end where it is full.

    Kernels that mask a window within a longer context take up to 1.7 times as long as those of a context that is as
    long as the window, so that the last knot is asked at a longer one.
    """
    groups = tables.deployment.dp_attention
    read = sorted({max(1, round(share * window)) for share in _WINDOW_SHARES})
    rows, tokens = [n * groups for n in _WINDOW_SEQUENCES], [n * groups for n in _CHUNK_TOKENS]
    contexts = [c if c < window else _FULL * window for c in read]
    return WindowedAttention(
        window,
        _grid(rows, read, [[tables.window_attention(b, c) for c in contexts] for b in rows]),
        _grid(tokens, read, [[tables.chunk_window_attention(n, k) for k in read] for n in tokens]),
    )


def _recurrence(tables: Tables) -> Recurrence:
    """The layers that keep a state."""
    groups = tables.deployment.dp_attention
    tokens = [n * groups for n in _SCANNED]
    return Recurrence(
        _grid(
            [k * groups for k in _SCANNED_CHUNKS],
            tokens,
            [[tables.scan(n, k) for n in tokens] for k in _SCANNED_CHUNKS],
        ),
        _curve([(n * groups, tables.update(n * groups)) for n in _SEQUENCES]),
    )


def _within(knots: Sequence[int], longest: int) -> list[int]:
    return [*(knot for knot in knots if knot < longest), longest]


def _grid(rows: Sequence[int], columns: Sequence[int], ms: list[list[float]]) -> Grid:
    """A grid that grows at its ends, where it may be continued: noise of single points is lifted there."""
    for i, row in enumerate(ms):
        row[-1] = max(row[-2:] + ([ms[i - 1][-1]] if i else []))
    return Grid(tuple(rows), tuple(float(x) for x in columns), tuple(tuple(_short(t * 1e6) for t in row) for row in ms))


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    """The curve through (x, ms); its end is lifted to where it does not fall."""
    ns = [_short(ms * 1e6) for _, ms in points]
    ns[-1] = max(ns[-2:])
    return Curve(tuple(float(x) for x, _ in points), tuple(ns))


def _short(ns: float) -> float:
    """Five digits: far below what the tables' own noise is."""
    return float(f"{ns:.5g}")


def _jump(tables: Tables, longest: int) -> dict[str, list[float]]:
    """`jump`: the tokens of a prompt, and how many times as long its step takes after a prefix of one token as without
    any, where that is most; {} where it is no more than `JUMP`. A profile knows the mean of keys alone."""
    if not tables.compound:
        return {}
    tokens = [n for n in _CHUNK_TOKENS if _TILE <= n < longest]
    ratio, most = max((tables.prefill_step(1, n, 1) / tables.prefill_step(1, n, 0), n) for n in tokens)
    return {"jump": [most, round(ratio, 2)]} if ratio > JUMP else {}


def _notes(tables: Tables, beside: float) -> tuple[str, ...]:
    notes = [f"kernels as the tables have them: {tables.modes}; graph of {tables.model_id}"]
    if tables.deployment.dp_attention > 1:
        notes.append("dp_attention: tokens and sequences of a step are taken as divided evenly among the groups")
        notes.append(f"experts: their loads are those of {tables.law_of_experts}, without copies of the busiest (EPLB)")
    if tables.compound:
        notes.append("attention is timed as one block with its projections: what grows with keys is told apart")
    if tables.adds_states:
        share = f"at {REACHED:.0%} of the bandwidth"
        notes.append(f"recurrence: a roofline without its states; reading and writing them {share} is added")
    if beside != 1:
        notes.append(f"decode attention beside chunks × {beside:g}: others' timings of one model; the tables only sum")
    return tuple(notes)
