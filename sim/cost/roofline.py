"""Step times from a model's shape and a GPU's sheet, with one set of measured efficiencies for each GPU.

A step of T tokens (padding counted) of which S rows are sampled, one for each sequence that takes part, costs

    layers' matmuls   soft(weight and activation bytes / bandwidth, 2 · weights · T / peak)
    output matmul     the same with the vocabulary's matrix and S rows
    KV reads          context bytes of the decodes / bandwidth
    attention         4 · layers · query width · pairs / peak; a chunk of n tokens after c has n·c + n(n+1)/2 pairs
    constants         of each layer's matmuls and attention, and of each layer and sequence
    elementwise       bytes of norms, rotary embedding, KV store and activation function / bandwidth
    all-reduces       two for each layer with tensor parallelism, ring algorithm
    host and swap     serial: base + a part for each sequence and prompt token; blocks moved / link bandwidth

where soft(x, y) = (x⁴ + y⁴)^¼: max(x, y) with a rounded corner, since near the ridge a real matmul is bound by neither
alone; the power 4 fits the public kernel sums of H200 and H100 as well as 3 or 6 do, and is two square roots. Bandwidth
and peak are those of the sheet times the share in `Efficiencies`. The first five lines are the `kernel` part, which is
what public kernel timings hold and what the efficiencies are fitted to; elementwise traffic is computed, not fitted.
Simplified: no tile steps in T; L2 hits are not modelled; a decode's and a chunk's attention do not overlap.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from batchsim.base.errors import ScenarioError
from batchsim.base.later import np
from batchsim.base.units import NS_PER_S
from batchsim.cost.base import Cost, HostPart
from batchsim.cost.cost_error import CostError, Unknown, symmetric
from batchsim.cost.host_config import HostCost
from batchsim.cost.work import (
    Columns,
    Terms,
    columns_of,
    draft_pairs,
    padded_pairs,
    padded_work,
    prefill_pairs,
    swap_blocks,
    useful_flops_bytes,
)
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import GpuSpec, ModelSpec
from batchsim.deployment.quantisation import ELEMENT_BYTES, Quantisation
from batchsim.kernel.batch import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

KERNELS = "kernel part"  # what was compared where both matmuls and attention were
HOST_LINK_SHARE = 0.85
"""Share of the host link's sheet that pinned copies reach. Assumed: 55 of 64 GB/s on PCIe 5.0 x16."""


class KernelCosts(NamedTuple):
    """Coefficients in ns of one GPU's part of a step. `layers` and `head` have three of their matmuls: time of the
    weight bytes, of the activation bytes of a row, of the arithmetic of a row."""

    layers: tuple[float, float, float]
    head: tuple[float, float, float]
    gemm_constant: float
    attention_constant: float
    attention_per_row: float
    attention_per_pair: float
    kv_per_token: float
    other_constant: float
    other_per_token: float

    @classmethod
    def of(cls, deployment: Deployment, gpu: GpuSpec) -> KernelCosts:
        """The coefficients of a deployment on `gpu`: matrices and heads are divided, activations between them are not.

        Matrices have the bytes of their type; those in FP8 are multiplied so where the GPU can, all others in 16 bits.
        """
        model, tp = deployment.model, deployment.tp
        e, layers, hidden, width = gpu.efficiencies, model.num_hidden_layers, model.hidden_size, model.dtype_bytes
        weight_byte, kv_byte = (NS_PER_S / (share * gpu.memory_bandwidth) for share in (e.weights, e.kv))
        flop = NS_PER_S / (e.matmul * gpu.peak_flops)
        q, kv, mlp = model.q_size, model.kv_size, model.intermediate_size
        # In and out of the four matmuls of a layer, and of the elementwise kernels between them: two norms with their
        # residual (read two, write two), rotary embedding in place, KV store, activation function. In elements.
        matmul_io = 4 * hidden + (2 * q + 2 * kv + 3 * mlp) / tp
        elementwise_io = 8 * hidden + (2 * (q + kv) + 4 * kv + 3 * mlp) / tp
        head_flops = 2 * model.head_parameters / tp
        ring_bytes = 2 * (tp - 1) / tp * hidden * width
        (kind,) = model.kinds
        weights, moved = kind.weights(hidden), 0.0
        by_rate: dict[float, int] = {}
        for number, dtype in ((weights.attention, deployment.types.attention), (weights.mlp, deployment.types.mlp)):
            moved += layers * number * ELEMENT_BYTES[dtype]
            rate = (gpu.fp8_flops if dtype.startswith("fp8") else None) or gpu.peak_flops
            by_rate[rate] = by_rate.get(rate, 0) + 2 * layers * number
        return cls(
            layers=(
                moved / tp * weight_byte,
                layers * matmul_io * width * weight_byte,
                sum(flops / tp * (NS_PER_S / (e.matmul * rate)) for rate, flops in by_rate.items()),
            ),
            head=(
                model.head_parameters * width / tp * weight_byte,
                (hidden + model.vocab_size / tp) * width * weight_byte,
                head_flops * flop,
            ),
            gemm_constant=layers * e.gemm_ns,
            attention_constant=layers * e.attention_ns,
            attention_per_row=layers * e.sequence_ns,
            attention_per_pair=model.attention_flops_per_pair / tp * NS_PER_S / (e.attention * gpu.peak_flops),
            kv_per_token=deployment.kv_bytes_per_token * kv_byte,
            other_constant=2 * layers * gpu.peer_latency_ns * (tp > 1),
            other_per_token=layers * (elementwise_io * width * kv_byte + 2 * ring_bytes * NS_PER_S / gpu.peer_link),
        )


def _step_ns(
    coefficients: tuple[float, ...],
    tokens: int,
    rows: int,
    sequences: int,
    context: int,
    pairs: int,
    prefill_tokens: int,
) -> float:
    """ns of kernels and host of a step that runs anything. `coefficients` are `Roofline._coefficients`, the linear ones
    already summed by what they multiply."""
    a, b, c, d, e, f, constant, per_token, per_sequence, per_context, per_pair, per_prefill = coefficients
    x = a + b * tokens
    y = c * tokens
    z = d + e * rows
    w = f * rows
    x *= x
    y *= y
    z *= z
    w *= w
    return (
        sqrt(sqrt(x * x + y * y))
        + sqrt(sqrt(z * z + w * w))
        + constant
        + per_token * tokens
        + per_sequence * sequences
        + per_context * context
        + per_pair * pairs
        + per_prefill * prefill_tokens
    )


def _matmul_ns(
    coefficients: tuple[float, float, float], rows: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(ns of the bytes alone, ns of the matmuls), an element a step: for columns what `_step_ns` begins with."""
    fixed, per_row, arithmetic = coefficients
    moved, computed = fixed + per_row * rows, arithmetic * rows
    return moved, np.sqrt(np.sqrt(moved**4 + computed**4))


class Roofline(Cost):
    """The durations of steps of `model` on `tp` GPUs, or in `pp` stages of `tp` GPUs: then `step_ns` is of all stages.

    A `deployment` says both, and the types, in their place.

    The coefficients are made once; `step_ns` only reads them.
    """

    __slots__ = (
        "_coefficients",
        "_context_ns",
        "_decode_ns",
        "_empty_ns",
        "block_bytes",
        "block_size",
        "deployment",
        "gpu",
        "host",
        "swap_bandwidth",
    )
    deployment: Deployment

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        *,
        tp: int = 1,
        pp: int = 1,
        host: HostCost | None = None,
        swap_bandwidth: float | None = None,
        block_size: int = 16,
        deployment: Deployment | None = None,
    ) -> None:
        model.check_timed()
        self.deployment = Deployment(model, gpu, tp=tp, pp=pp) if deployment is None else deployment
        if model.dtype_bytes != 2:
            raise ScenarioError(
                f"cost: {model.name} is {model.dtype}; the roofline of {gpu.name} knows 16-bit types only. Set"
                " torch_dtype to bfloat16, or use a constant or linear cost."
            )
        self.gpu = gpu
        self.host = HostCost() if host is None else host
        self.swap_bandwidth = gpu.host_link * HOST_LINK_SHARE if swap_bandwidth is None else swap_bandwidth
        self.block_size = block_size
        self.block_bytes = block_size * self.deployment.kv_bytes_per_token
        self._empty_ns = float(self.host.base or 1)
        k = self._kernels()
        self._coefficients = (
            *k.layers,
            *k.head,
            k.gemm_constant + k.attention_constant + k.other_constant + self.host.base,
            k.other_per_token,
            k.attention_per_row + self.host.per_sequence,
            k.kv_per_token,
            k.attention_per_pair,
            self.host.per_token,
        )
        self._context_ns = k.kv_per_token
        self._decode_ns: dict[int, float] = {}

    def step_ns(self, batch: Batch) -> int:
        """The step's duration in ns, at least 1. A decode-only step is O(1), any other O(chunks + swaps)."""
        rows = batch.num_decode_tokens + batch.pad_decode_rows
        context = batch.context_tokens + batch.pad_context_tokens
        chunks = batch.chunks
        if chunks or rows > batch.num_decode + batch.pad_decode_rows:
            prefill = batch.num_prefill_tokens
            pad = batch.pad_prefill_tokens
            pieces = len(chunks) + batch.pad_prefill_rows
            pairs = padded_pairs(prefill_pairs(batch), pieces, prefill, pad) if pieces else 0
            pairs += draft_pairs(batch.num_decode, batch.num_decode_tokens, batch.context_tokens)
            sequences = batch.num_decode + batch.pad_decode_rows + pieces
            ns = _step_ns(self._coefficients, rows + prefill + pad, rows + pieces, sequences, context, pairs, prefill)
        elif rows:
            ns = (self._decode_ns.get(rows) or self._alone_ns(rows)) + self._context_ns * context
        else:
            ns = self._empty_ns
        if batch.swap_out or batch.swap_in:
            ns += self.swap_ns(swap_blocks(batch))
        return int(ns)

    def decode_line(self, batch: Batch) -> tuple[float, float, float]:
        return self._decode_ns.get(batch.num_decode) or self._alone_ns(batch.num_decode), self._context_ns, inf

    def _alone_ns(self, rows: int) -> float:
        """ns of a step of `rows` decodes but for their context, on which nothing else depends."""
        return self._decode_ns.setdefault(rows, _step_ns(self._coefficients, rows, rows, rows, 0, 0, 0))

    def kernel_ns(self, batch: Batch) -> int:
        """ns of the step's matmuls and attention, without elementwise kernels, all-reduces, host and swap."""
        gemm, attention = self.kernel_parts(columns_of(batch))
        return int(gemm[0] + attention[0])

    @property
    def stages(self) -> int:
        return self.deployment.pp

    @property
    def host_part(self) -> HostPart:
        return HostPart(self.host.base, self.host.per_sequence, self.host.per_token)

    def without_host(self) -> Roofline:
        bandwidth, deployment = self.swap_bandwidth, self.deployment
        return Roofline(
            deployment.model,
            self.gpu,
            host=HostCost(0, 0, 0),
            swap_bandwidth=bandwidth,
            block_size=self.block_size,
            deployment=deployment,
        )

    def head_ns(self, rows: int) -> float:
        _, _, _, d, e, f, *_ = self._coefficients
        return sqrt(sqrt((d + e * rows) ** 4 + (f * rows) ** 4))

    def transfer_ns(self, tokens: int) -> float:
        """The hidden states of `tokens`, of which with tensor parallelism each GPU sends its part, over a peer link."""
        model, gpu = self.deployment.model, self.gpu
        sent = tokens * model.hidden_size * model.dtype_bytes / self.deployment.tp
        return gpu.peer_latency_ns + sent * NS_PER_S / gpu.peer_link

    def swap_ns(self, num_blocks: int) -> int:
        """ns of moving `num_blocks` over the host link, one way; with tensor parallelism each GPU moves its part."""
        return int(num_blocks * self.block_bytes * NS_PER_S / self.swap_bandwidth)

    def recompute_ns(self, num_tokens: int) -> int:
        """ns of a step that computes the first `num_tokens` of one sequence, and nothing else."""
        return int(_step_ns(self._coefficients, num_tokens, 1, 1, 0, num_tokens * (num_tokens + 1) // 2, num_tokens))

    def pass_ns(self, tokens: int, rows: int, context: int, pairs: int) -> float:
        """ns of a pass over `tokens` of `rows` sequences, each of which samples one token."""
        return _step_ns(self._coefficients, tokens, rows, rows, context, pairs, 0)

    def passes_ns(self, tokens: NDArray[Any], rows: NDArray[Any], context: Any, pairs: Any) -> NDArray[np.float64]:
        """`pass_ns` of columns, an element a pass."""
        k, host = self._kernels(), self.host
        return (
            _matmul_ns(k.layers, tokens)[1]
            + _matmul_ns(k.head, rows)[1]
            + (k.gemm_constant + k.attention_constant + k.other_constant + host.base)
            + k.other_per_token * tokens
            + (k.attention_per_row + host.per_sequence) * rows
            + k.kv_per_token * context
            + k.attention_per_pair * pairs
        )

    def _kernels(self) -> KernelCosts:
        return KernelCosts.of(self.deployment, self.gpu)

    def kernel_parts(self, columns: Columns) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(ns of matmuls, ns of attention), an element a step, constants included: what public kernel tables hold."""
        k, t = self._kernels(), self.explain(columns)
        busy = padded_work(columns).tokens > 0
        attention_constants = k.attention_constant * busy + k.attention_per_row * padded_work(columns).sequences
        return t["weights"] + t["matmul"] + k.gemm_constant * busy, t["kv_reads"] + t["attention"] + attention_constants

    def explain(self, columns: Columns) -> Terms:
        """What each step's time is made of: ns arrays `weights, kv_reads, matmul, attention, host, swap, other,
        draft`, which sum to `step_ns`, and `flops` and `bytes` of the useful work on all GPUs, for MFU and bandwidth
        use.

        `weights` is the time of the matmuls' bytes, `matmul` what their arithmetic adds to it; `other` holds constants,
        elementwise kernels and all-reduces.
        """
        k, host = self._kernels(), self.host
        work = padded_work(columns)
        busy = work.tokens > 0
        layers_bytes, layers = _matmul_ns(k.layers, work.tokens)
        head_bytes, head = _matmul_ns(k.head, work.rows)
        constants = k.gemm_constant + k.attention_constant + k.other_constant
        flops, moved = useful_flops_bytes(self.deployment, columns)
        return {
            "weights": (layers_bytes + head_bytes) * busy,
            "kv_reads": k.kv_per_token * work.context,
            "matmul": (layers - layers_bytes + head - head_bytes) * busy,
            "attention": k.attention_per_pair * work.pairs,
            "host": host.base
            + host.per_sequence * work.sequences
            + host.per_token * columns["num_prefill_tokens"] * 1.0,
            "swap": columns["swap_blocks"] * (self.block_bytes * NS_PER_S / self.swap_bandwidth),
            "other": constants * busy + k.attention_per_row * work.sequences + k.other_per_token * work.tokens,
            "draft": np.zeros(len(busy)),
            "flops": flops,
            "bytes": moved,
        }

    def describe(self) -> str:
        """One line for the head of a report."""
        deployment, error = self.deployment, self.error
        degrees = ("tp", deployment.tp), ("pp", deployment.pp)
        degree = "".join(f", {name} {count}" for name, count in degrees if count > 1)
        error_text = f"error unknown: {error.source}" if isinstance(error, Unknown) else f"{KERNELS} {error}"
        return f"cost: roofline{degree}, not measured here ({error_text})"

    @property
    def error(self) -> CostError | Unknown:
        """The 95th percentile of the error on models held out from the fit, for the kernel part it was fitted to.

        Unknown for all that was in no comparison: other models and types, several GPUs, attention where none was timed.
        """
        e, model, tp, pp = self.gpu.efficiencies, self.deployment.model, self.deployment.tp, self.deployment.pp
        if e.error_p95 is None:
            return Unknown(f"no kernel of {self.gpu.name} was timed" + f", no collective{self.gpu.via}" * (tp * pp > 1))
        types, plain = self.deployment.types, model.dtype
        as_fitted = replace(model, dtype=e.dtype, quantised=Quantisation())
        missing = [
            ("attention", e.compared == KERNELS),
            (f"weights {types.mlp}", types.attention == types.mlp == plain),
            (f"kv {types.kv}", types.kv == plain),
            (f"tp {tp}{self.gpu.via}", tp == 1),
            (f"pp {pp}{self.gpu.via}", pp == 1),
            (model.dtype, model.dtype == e.dtype),
            (model.name, any(as_fitted.same_shape(other) for other in e.models)),
        ]
        outside = [what for what, compared in missing if not compared]
        if outside:
            return Unknown(f"{', '.join(outside)} not in the fit")
        assumed = "assumed" if self.host.is_assumed else "stated"
        return symmetric(e.error_p95, f"95th percentile of {e.compared} on {e.held_out}; its host is {assumed}")

    def sources(self) -> list[str]:
        """Lines on where the numbers come from: sheet, fit, host, swap."""
        e, assumed = self.gpu.efficiencies, self.swap_bandwidth == self.gpu.host_link * HOST_LINK_SHARE
        error = f"unknown, {self.error.source}" if isinstance(self.error, Unknown) else f"{self.error} of the {KERNELS}"
        compared = [f"error {error}"]
        if e.error_p50 is not None and e.error_p95 is not None:
            off = f"off by {100 * e.error_p50:.1f} % (median), {100 * e.error_p95:.1f} % (p95)"
            known = f"known of {', '.join(m.name for m in e.models)} in {e.dtype} on one GPU; here: {error}"
            compared = [f"{e.compared} {off} on {e.held_out}", known]
        return [
            f"{self.gpu.name}: {self.gpu.source}" + (f"; {self.gpu.peers}" if self.deployment.num_gpus > 1 else ""),
            f"efficiencies: {e.source}; fitted on {e.fitted_on}",
            *compared,
            f"host: {self.host}, serial" + (" (assumed)" if self.host.is_assumed else ""),
            f"swap: {self.swap_bandwidth / 1e9:.1f} GB/s one way, serial" + (" (assumed)" if assumed else ""),
        ]
