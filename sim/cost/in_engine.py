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
    """Measured points of one engine, ahead of results, on one GPU with one model in one combination of types.

    Steps of decodes take `decode` times what the tables say, and `shift_us` more; steps with prompts `prompts` times.
    `tpot` and `ttft`: the errors of the points' means that are left, the median and the 90th percentile of their size,
    as shares. `versions`: of the engine, as far as the points name them.
    """

    engine: str
    gpu: str
    weights: str
    experts: str
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
        its = profile.setup
        return (
            its is not None
            and (its.engine, profile.gpu, its.weight_dtype, its.moe_dtype)
            == (self.engine, self.gpu, self.weights, self.experts)
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
    """The measured points of what `profile` is of; None if there are none."""
    return next((each for each in MEASURED if each.is_of(profile)), None)


def in_engine(costs: StepCosts, *, decode: float = 1.0, shift_ns: float = 0.0, prompts: float = 1.0) -> StepCosts:
    """`costs` with steps of decodes `decode` times as long and `shift_ns` longer, of which at least a tenth of their
    time is left, and steps with prompts `prompts` times as long; a step without graphs for decodes counts as one."""
    graphs = costs.decode
    if graphs is not None:
        ns = tuple(max(decode * ns + shift_ns, _LEAST * ns) for ns in graphs.ns)
        graphs = Curve(graphs.x, (*ns[:-1], max(ns[-2:])))
    chunk = costs.chunk_attention
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
    )


def _stretched(curve: Curve, factor: float) -> Curve:
    return replace(curve, ns=tuple(ns * factor for ns in curve.ns))


def _stretched_grid(grid: Grid, factor: float) -> Grid:
    return replace(grid, ns=tuple(tuple(ns * factor for ns in row) for row in grid.ns))


MEASURED: tuple[Measured, ...] = ()
