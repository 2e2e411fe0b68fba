"""What measured runs of an engine say of the kernels' times inside it, by GPU, types of numbers and model.

Kernel tables time kernels one by one. Inside an engine they take longer or shorter, and by how much differs from one
deployment to the next more than from one load to the next, so that no factor is taken from another GPU, type or model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchsim.cost.interpolation import Curve, Grid
from batchsim.cost.profile import Profile, StepCosts, work_of
from batchsim.deployment.catalog import read_model

_LEAST = 0.1  # of its time: what a shift leaves of a step


@dataclass(frozen=True)
class Measured:
    """Measured points of one engine, ahead of results, on one kind of GPU with one model, its types and `ep`.

    Steps of decodes take `decode` times what the tables say, and `shift_us` more; steps with prompts `prompts` times.
    `tpot` and `ttft`: the errors of the points' means that are left, the median and the 90th percentile of their size,
    as shares. `versions`: of the engine, as far as the points name them.
    """

    engine: str
    gpu: str
    weights: str
    experts: str
    ep: int
    model: str
    decode: float
    shift_us: float
    prompts: float
    points: int
    versions: str
    tpot: tuple[float, float]
    ttft: tuple[float, float]

    def is_of(self, profile: Profile) -> bool:
        """Whether the points are of the GPU, the engine, the types and the model that `profile` is of."""
        setup = profile.setup
        return (
            setup is not None
            and (setup.engine, profile.gpu, setup.weight_dtype, setup.moe_dtype, setup.ep)
            == (self.engine, self.gpu, self.weights, self.experts, self.ep)
            and work_of(profile.model) == work_of(read_model(self.model))
        )

    def __str__(self) -> str:
        points = f"{self.points} points of this GPU, type and model"
        points += f" under {self.engine} {self.versions}" if self.versions else ""
        tpot, most = (f"±{100 * share:.0f} %" for share in self.tpot)
        if (self.decode, self.shift_us, self.prompts) == (1, 0, 1):
            return f"kernels as in the tables: {points} miss TPOT by no one factor ({tpot} median, {most} p90)"
        shift = f"{self.shift_us / 1000:+.2g} ms".replace("-", "−") if self.shift_us else ""
        factor = f"× {self.decode:g}" if self.decode != 1 or not shift else ""
        return (
            f"kernels in the engine: decodes {' '.join(filter(None, (factor, shift)))}, prompts × {self.prompts:g},"
            f" fitted to {points} (then TPOT {tpot}, TTFT ±{100 * self.ttft[0]:.0f} % in the median)"
        )


UNMEASURED = "kernels as the tables have them: no measurement of this GPU, type and model in the engine"


def measured_of(profile: Profile) -> Measured | None:
    """The measured points of the GPU, types and model of `profile`; None if there are none."""
    return next((each for each in MEASURED if each.is_of(profile)), None)


def in_engine(costs: StepCosts, *, decode: float = 1.0, shift_ns: float = 0.0, prompts: float = 1.0) -> StepCosts:
    """`costs` with steps of decodes `decode` times as long and `shift_ns` longer, of which at least a tenth of their
    time is left, and steps with prompts `prompts` times as long. Decodes beyond the largest graph, launched op by
    op, take as long as the same rows beside prompts."""
    graphs = costs.decode
    if graphs is not None:
        ns = tuple(max(decode * ns + shift_ns, _LEAST * ns) for ns in graphs.ns)
        graphs = Curve(graphs.x, (*ns[:-1], max(ns[-2:])))
    chunk, experts = costs.chunk_attention, costs.experts
    return replace(
        costs,
        layers=_stretched(costs.layers, prompts),
        head=_stretched(costs.head, prompts),
        decode=graphs,
        decode_attention=_stretched_grid(costs.decode_attention, decode),
        beside=costs.beside * prompts / decode,
        chunk_attention=replace(
            chunk,
            per_chunk=chunk.per_chunk * prompts,
            per_token=chunk.per_token * prompts,
            per_pair=chunk.per_pair * prompts,
        ),
        chunk_grid=None if costs.chunk_grid is None else _stretched_grid(costs.chunk_grid, prompts),
        prefill_ns=costs.prefill_ns * prompts,
        experts=experts
        and replace(experts, layers=_stretched(experts.layers, prompts), decode=_stretched(experts.decode, decode)),
    )


def _stretched(curve: Curve, factor: float) -> Curve:
    return replace(curve, ns=tuple(ns * factor for ns in curve.ns))


def _stretched_grid(grid: Grid, factor: float) -> Grid:
    return replace(grid, ns=tuple(tuple(ns * factor for ns in row) for row in grid.ns))


_POINTS = """
vllm b200_sxm bfloat16 mxfp4 1 openai/gpt-oss-120b 0.985 0 0.58 35 0.15.1 0.112 0.162 0.133 0.365
vllm b200_sxm fp8 - 1 meta-llama/Llama-3.1-70B 0.894 0 1.2 30 - 0.029 0.171 0.067 0.31
vllm b200_sxm fp8 fp8 1 MiniMaxAI/MiniMax-M2.5 1.14 0 1.34 53 0.17.0..0.19.0 0.074 0.217 0.066 0.269
vllm b200_sxm fp8 fp8 2 MiniMaxAI/MiniMax-M2.5 1.126 0 1.1 7 0.19.0 0.04 0.135 0.043 0.07
vllm b200_sxm nvfp4 - 1 meta-llama/Llama-3.1-70B 1.086 0 1.22 15 - 0.014 0.062 0.08 0.163
vllm b200_sxm nvfp4 nvfp4 1 MiniMaxAI/MiniMax-M2.5 1.191 0 1.36 64 0.19.0 0.054 0.133 0.089 0.338
vllm b200_sxm nvfp4 nvfp4 1 moonshotai/Kimi-K2.5 1.034 0 0.88 4 0.17.0 0.025 0.07 0.108 0.482
vllm b300_sxm nvfp4 nvfp4 1 MiniMaxAI/MiniMax-M2.5 1.181 0 1.2 25 0.19.0 0.03 0.084 0.098 0.138
vllm b300_sxm nvfp4 nvfp4 1 moonshotai/Kimi-K2.5 0.727 0 0.7 4 0.17.0..0.19.0 0.029 0.047 0.179 0.353
vllm h100 bfloat16 mxfp4 1 openai/gpt-oss-120b 1.087 0 1.06 16 0.18.0 0.019 0.27 0.106 0.232
vllm h100 fp8 - 1 meta-llama/Llama-3.1-70B 1.12 0 0.88 28 - 0.076 0.139 0.085 0.193
vllm h200 bfloat16 mxfp4 1 openai/gpt-oss-120b 0.989 0 1.4 32 0.18.0 0.028 0.062 0.066 0.205
vllm h200 fp8 - 1 meta-llama/Llama-3.1-70B 1.018 0 1.08 29 - 0.027 0.083 0.065 0.135
tensorrt_llm b200_sxm fp8 - 1 meta-llama/Llama-3.1-70B 1 -3840 1.06 34 - 0.025 0.057 0.073 0.61
tensorrt_llm b200_sxm nvfp4 - 1 meta-llama/Llama-3.1-70B 1 -1770 1.04 36 - 0.022 0.064 0.09 0.528
tensorrt_llm b200_sxm nvfp4 nvfp4 1 deepseek-ai/DeepSeek-R1 1 0 1 25 1.1.0rc2..1.2.0rc6 0.198 0.787 0.533 0.659
tensorrt_llm b200_sxm nvfp4 nvfp4 8 deepseek-ai/DeepSeek-R1 1 0 1 5 1.2.0rc6 0.374 0.581 0.512 0.688
tensorrt_llm h200 fp8 - 1 meta-llama/Llama-3.1-70B 1 -2480 1.02 18 - 0.029 0.11 0.082 0.148
tensorrt_llm h200 fp8 fp8 1 deepseek-ai/DeepSeek-R1 1 290 1 15 - 0.035 0.095 0.623 0.724
tensorrt_llm h200 fp8 fp8 8 deepseek-ai/DeepSeek-R1 1 0 1 16 1.1.0rc2 0.731 1.404 0.784 0.848
sglang b200_sxm nvfp4 nvfp4 1 deepseek-ai/DeepSeek-R1 1.295 0 1 18 - 0.074 0.163 0.898 0.942
sglang b200_sxm nvfp4 nvfp4 4 deepseek-ai/DeepSeek-R1 0.99 0 1.22 10 0.5.9 0.024 0.044 0.048 0.173
sglang b300_sxm fp8 fp8_block 1 deepseek-ai/DeepSeek-R1 1.304 0 1 6 0.5.10 0.109 0.201 0.539 0.759
sglang h200 fp8 fp8_block 1 deepseek-ai/DeepSeek-R1 1 0 1 20 0.5.9 0.591 1.017 0.187 0.306
"""
"""Fitted by `python -m tests.silicon.fit` to measured points of others: aiconfigurator-core's silicon_sample.csv, the
half of its deployments whose SHA-256 is even. No factor where points disagree, or are so far off that the engine must
have run otherwise, as with draft tokens. A line has the fields of `Measured` in order, `-` for none."""


def _read(line: str) -> Measured:
    engine, gpu, weights, experts, ep, model, decode, shift_us, prompts, points, versions, *errors = line.split()
    tpot, tpot_p90, ttft, ttft_p90 = map(float, errors)
    return Measured(
        engine,
        gpu,
        weights,
        experts.strip("-"),
        int(ep),
        model,
        float(decode),
        float(shift_us),
        float(prompts),
        int(points),
        versions.strip("-").replace("..", " to "),
        (tpot, tpot_p90),
        (ttft, ttft_p90),
    )


MEASURED = tuple(map(_read, _POINTS.strip().splitlines()))
