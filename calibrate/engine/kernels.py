"""Triton kernels of the executor: RMSNorm, rotary embedding with the KV store, SwiGLU, paged attention.

Accumulators are fp32 and dots of fp32 inputs full fp32. KV caches are contiguous [blocks, block_size, HKV, D]; what
lies in block 0 must be finite, since masked keys are read there. `HKV` kv heads serve `G` query heads each; attention
packs those into the rows of one tile, padded to a power of two `GP`. Softmax runs in base 2 (scale holds log2 e).

Decode is split evenly over a fixed number of programs: the key tiles of all sequences and kv heads form one line, and
every program takes an equal stretch of it. So the work is balanced for any mix of contexts and the launch is the same
at every step, as a CUDA graph needs; on an H100 time follows the sum of contexts that are alike, and is up to 18 %
longer where they are not. Idea: Stream-K (Osama et al., PPoPP 2023; for decode attention Sanovar et al., LeanAttention,
2024). The loop over keys is FlashAttention-2 (Dao, 2023).

What differs from step to step (counts, table widths, where an index array begins) is not specialised on, so that no
kernel is compiled in the middle of a run: one variant a model, of decode one for each power of two of rows.
"""

# Capitals are pointers and constants of the compilation, as in other Triton code; Triton makes the constants.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false

import triton
import triton.language as tl

_HIDDEN = tl.constexpr(-1.0e30)  # the score of a key that may not be seen: finite, so that no NaN can come of it


@triton.jit
def rms_norm(X, RESIDUAL, W, OUT, SUM, x_stride, residual_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    """OUT = norm(X) * W, one row a program; with a RESIDUAL, SUM = X + RESIDUAL, rounded, and OUT is its norm."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < H
    x = tl.load(X + row * x_stride + i, mask=inside, other=0.0)
    if RESIDUAL is not None:
        residual = tl.load(RESIDUAL + row * residual_stride + i, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(SUM.dtype.element_ty)
        tl.store(SUM + row * H + i, x, mask=inside)
    x = x.to(tl.float32)
    w = tl.load(W + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(OUT + row * H + i, (x * scale * w).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul(X, OUT, x_stride, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """OUT = silu(first half of X) * second half; X [T, 2 * INNER]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < INNER
    gate = tl.load(X + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * x_stride + INNER + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * INNER + i, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(X, head_offsets, present, W, cos, sin, eps, HALF: tl.constexpr):
    """Both halves [heads, HALF] of each head, fp32, normalised (if W is given) and then rotated."""
    i = tl.arange(0, HALF)
    at = X + head_offsets[:, None] + i[None, :]
    first = tl.load(at, mask=present[:, None], other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=present[:, None], other=0.0).to(tl.float32)
    if W is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * scale * tl.load(W + i).to(tl.float32)[None, :]
        second = second * scale * tl.load(W + HALF + i).to(tl.float32)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize_on_alignment=["POSITIONS", "SLOTS"])
def rope_store(
    Q, K, V, COS, SIN, POSITIONS, K_CACHE, V_CACHE, SLOTS, Q_NORM, K_NORM, OUT, q_stride, k_stride, v_stride, eps,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rotates the queries of a token and kv head into OUT; stores the rotated key and the value in the token's slot.

    Halves are rotated against each other (the convention of HF checkpoints). A slot below 0 stores nothing.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    i = tl.arange(0, HALF)
    position = tl.load(POSITIONS + token)
    cos = tl.load(COS + position * HALF + i)[None, :]
    sin = tl.load(SIN + position * HALF + i)[None, :]
    g = tl.arange(0, GP)
    heads = (head * G + g) * D
    first, second = _rotated(Q + token * q_stride, heads, g < G, Q_NORM, cos, sin, eps, HALF)
    at = OUT + token * (HKV * G * D) + heads[:, None] + i[None, :]
    tl.store(at, first.to(OUT.dtype.element_ty), mask=(g < G)[:, None])
    tl.store(at + HALF, second.to(OUT.dtype.element_ty), mask=(g < G)[:, None])
    slot = tl.load(SLOTS + token).to(tl.int64)
    if slot >= 0:
        one = tl.arange(0, 1)
        k_first, k_second = _rotated(K + token * k_stride + head * D, one, one == 0, K_NORM, cos, sin, eps, HALF)
        k_at = K_CACHE + (slot * HKV + head) * D + i[None, :]
        tl.store(k_at, k_first.to(K_CACHE.dtype.element_ty))
        tl.store(k_at + HALF, k_second.to(K_CACHE.dtype.element_ty))
        d = tl.arange(0, D)
        tl.store(V_CACHE + (slot * HKV + head) * D + d, tl.load(V + token * v_stride + head * D + d))


@triton.jit
def _attend(
    q, K, V, table, head, start, stop, bound, scale, m, norm, acc,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state (m, norm, acc) of a running softmax after the keys start..stop; from key `bound` on a row sees none.

    m: largest score of each row, norm: sum of 2^(score - m), acc: the values weighted likewise. start is a multiple of
    KEYS; without MASKED so is stop, and every row sees every key.
    """
    d = tl.arange(0, D)
    for tile in range(start, stop, KEYS):
        n = tile + tl.arange(0, KEYS)
        block = tl.load(table + n // BLOCK_SIZE, mask=n < stop if MASKED else None, other=0 if MASKED else None)
        offset = (block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE) * (HKV * D) + head * D
        k = tl.load(K + offset[:, None] + d[None, :])
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            score = tl.where(n[None, :] < bound, score, _HIDDEN)
        largest = tl.maximum(m, tl.max(score, 1))
        p = tl.exp2(score - largest[:, None])
        shrink = tl.exp2(m - largest)
        v = tl.load(V + offset[:, None] + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        norm = norm * shrink + tl.sum(p, 1)
        m = largest
    return m, norm, acc


@triton.jit(do_not_specialize=["chunks", "table_stride"], do_not_specialize_on_alignment=["TABLES", "STARTS", "LENS"])
def prefill(
    Q, K, V, OUT, TABLES, STARTS, LENS, scale, chunks, q_stride, table_stride,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Causal attention of QUERIES query tokens of one chunk and one kv head; grid (HKV, T // QUERIES + chunks).

    The tiles of chunk c start at STARTS[c] // QUERIES + c: room for all its tiles, found by binary search, with at
    most one idle tile a chunk. The last tiles, which see most keys, are launched first.
    """
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    chunk = 0
    beyond = chunks
    while beyond - chunk > 1:
        middle = (chunk + beyond) // 2
        if tl.load(STARTS + middle) // QUERIES + middle <= tile:
            chunk = middle
        else:
            beyond = middle
    first = tl.load(STARTS + chunk)
    queries = tl.load(STARTS + chunk + 1) - first
    done = (tile - first // QUERIES - chunk) * QUERIES
    if done < queries:
        context = tl.load(LENS + chunk)
        row = tl.arange(0, QUERIES * GP)
        query = done + row // GP
        d = tl.arange(0, D)
        real = (query < queries) & (row % GP < G)
        column = ((head * G + row % GP) * D)[:, None] + d[None, :]
        token = (first + query).to(tl.int64)[:, None]
        q = tl.load(Q + token * q_stride + column, mask=real[:, None], other=0.0)
        seen = context - queries + query + 1
        everyone = (context - queries + done + 1) // KEYS * KEYS  # keys that the first query, so each one, sees
        stop = tl.minimum(context, context - queries + done + QUERIES)
        m = tl.full([QUERIES * GP], _HIDDEN, tl.float32)
        norm = tl.zeros([QUERIES * GP], tl.float32)
        acc = tl.zeros([QUERIES * GP, D], tl.float32)
        table = TABLES + chunk * table_stride
        m, norm, acc = _attend(
            q, K, V, table, head, 0, everyone, seen[:, None], scale, m, norm, acc, HKV, D, BLOCK_SIZE, KEYS, False
        )
        m, norm, acc = _attend(
            q, K, V, table, head, everyone, stop, seen[:, None], scale, m, norm, acc, HKV, D, BLOCK_SIZE, KEYS, True
        )
        out = (acc / norm[:, None]).to(OUT.dtype.element_ty)
        tl.store(OUT + token * (HKV * G * D) + column, out, mask=real[:, None])


@triton.jit
def _tiles(LENS, rows, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Key tiles of each sequence, at least 1 (a sequence without keys gives zeros); 0 beyond the last sequence."""
    row = tl.arange(0, ROWS)
    lens = tl.load(LENS + row, mask=row < rows, other=0)
    return tl.where(row < rows, tl.maximum(tl.cdiv(lens, KEYS), 1), 0)


@triton.jit(do_not_specialize=["rows", "table_stride"], do_not_specialize_on_alignment=["TABLES", "LENS"])
def decode(
    Q, K, V, OUT, PARTS, PART_LOGS, TABLES, LENS, scale, rows, q_stride, table_stride,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attention of one new token a sequence: this program's stretch of the tiles in order of (sequence, head, key).

    A (sequence, head) that lies in the stretch whole is finished into OUT. One that began before leaves its part in
    PARTS [programs, 2, G, D] at 0, one that goes on after it at 1, each with the logarithm of its weight. `combine`
    adds them.
    """
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    tiles = _tiles(LENS, rows, ROWS, KEYS)
    ends = tl.cumsum(tiles, 0) * HKV
    total = tl.sum(tiles, 0) * HKV
    stretch = tl.cdiv(total, tl.num_programs(0))
    begin, end = program * stretch, tl.minimum((program + 1) * stretch, total)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    at = begin
    while at < end:
        b = tl.sum((ends <= at).to(tl.int32), 0)
        count = tl.sum(tl.where(row == b, tiles, 0), 0)
        before = tl.sum(tl.where(row < b, tiles, 0), 0) * HKV
        head = (at - before) // count
        item = before + head * count
        stop = tl.minimum(end, item + count)
        column = ((head * G + g) * D)[:, None] + d[None, :]
        q = tl.load(Q + b.to(tl.int64) * q_stride + column, mask=(g < G)[:, None], other=0.0)
        last = tl.minimum(tl.load(LENS + b), (stop - item) * KEYS)
        m = tl.full([GP], _HIDDEN, tl.float32)
        norm = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        m, norm, acc = _attend(
            q, K, V, TABLES + b * table_stride, head, (at - item) * KEYS, last, last, scale, m, norm, acc,
            HKV, D, BLOCK_SIZE, KEYS, True,
        )  # fmt: skip
        out = acc / tl.maximum(norm, 1.0)[:, None]  # the largest key alone gives 1; 0 only without keys
        if (item >= begin) & (item + count <= end):
            out_at = OUT + b.to(tl.int64) * (HKV * G * D) + column
            tl.store(out_at, out.to(OUT.dtype.element_ty), mask=(g < G)[:, None])
        else:
            part = (2 * program + (item >= begin).to(tl.int32)) * G + g
            tl.store(PARTS + part[:, None] * D + d[None, :], out, mask=(g < G)[:, None])
            tl.store(PART_LOGS + part, m + tl.log2(norm), mask=g < G)
        at = stop


@triton.jit(do_not_specialize=["rows", "programs"], do_not_specialize_on_alignment=["LENS"])
def combine(
    OUT, PARTS, PART_LOGS, LENS, rows, programs,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Adds the parts that `decode` left of one (sequence, query head) into OUT; grid (rows, HKV * G).

    Does nothing where one program finished it. Reads STEP parts at a time.
    """
    b = tl.program_id(0)
    query_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    tiles = _tiles(LENS, rows, ROWS, KEYS)
    stretch = tl.cdiv(tl.sum(tiles, 0) * HKV, programs)
    count = tl.sum(tl.where(row == b, tiles, 0), 0)
    item = tl.sum(tl.where(row < b, tiles, 0), 0) * HKV + query_head // G * count
    first = item // stretch
    last = (item + count - 1) // stretch
    if first < last:
        d = tl.arange(0, D)
        m = _HIDDEN + 0.0
        norm = 0.0
        acc = tl.zeros([D], tl.float32)
        for start in range(first, last + 1, STEP):
            program = start + tl.arange(0, STEP)
            part = (2 * program + (item >= program * stretch).to(tl.int32)) * G + query_head % G
            log = tl.load(PART_LOGS + part, mask=program <= last, other=_HIDDEN)
            out = tl.load(PARTS + part[:, None] * D + d[None, :], mask=(program <= last)[:, None], other=0.0)
            largest = tl.maximum(m, tl.max(log, 0))
            weight = tl.exp2(log - largest)
            shrink = tl.exp2(m - largest)
            acc = acc * shrink + tl.sum(out * weight[:, None], 0)
            norm = norm * shrink + tl.sum(weight, 0)
            m = largest
        at = OUT + (b.to(tl.int64) * (HKV * G) + query_head) * D + d
        tl.store(at, (acc / norm).to(OUT.dtype.element_ty))
