"""What was measured of one executor, model and GPU: the numbers a `Calibrated` cost computes with, as one JSON file.

A step's kernels cost, with the padded work of `batchsim.cost.work`,

    in_situ · (layers(tokens) + head(rows) + decode_attention(B, context / B) + chunk_attention(chunks))

where `decode(B)` replaces layers and head in a decode-only step that replays a graph, and a step of chunks alone takes
`prefill_ns` more. Host and swap times come on top. Where there is a `chunk_grid`, all chunks together cost what it says
at their tokens and the mean number of keys that each of these reads, and decode attention beside them `beside` times
its own. Layers with a sliding window have grids of their own, over means of min(keys, window): `windowed`. Layers that
keep a state of fixed size cost a scan over the tokens of prompts and an update for each decode beside: `recurrence`.
All times are floats of ns. Reading is strict: whatever is not exactly a profile of this version is refused in one line.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from batchsim.base.errors import CalibrationError, ExtrapolationError, nearest, shown
from batchsim.base.files import json_kind, parse_json, read_text, reason_text
from batchsim.base.installed import installed, of_package
from batchsim.base.plain import LEFT_OUT, from_plain, to_plain
from batchsim.base.ranges import INT32_MAX, PositiveInt, Range, check_ranges
from batchsim.cost.interpolation import Curve, Grid
from batchsim.cost.step_costs import (
    ChunkCost,
    ChunkGrid,
    HostTerm,
    Recurrence,
    SharedExperts,
    StepCosts,
    SwapCost,
    WindowedAttention,
)
from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import DTYPE_BYTES, ModelSpec

__all__ = [
    "ChunkCost",
    "ChunkGrid",
    "Curve",
    "EngineSetup",
    "Grid",
    "HostTerm",
    "Hull",
    "Profile",
    "Recurrence",
    "SharedExperts",
    "StepCosts",
    "SwapCost",
    "WindowedAttention",
    "load_profile",
    "profile_names",
]

FORMAT = "batchsim-profile"
KIND = json_kind(FORMAT)
VERSION = 2
SHIPPED = "batchsim.tables"  # the package whose folder `profiles` holds the shipped ones
_ERRORS = {"n": Range(0, INT32_MAX), "p50": Range(0, 100), "p95": Range(0, 100), "bias": Range(-1, 100, above=True)}
"""What a row of errors holds: how many steps, quantiles of absolute relative errors, predicted / measured − 1."""
_LINE = 200  # letters from which a JSON value is broken into its items


@dataclass(frozen=True)
class Hull:
    """The largest that was measured: sequences and tokens of a step, mean context tokens of its decodes, tokens of a
    chunk with the prefix before it."""

    max_sequences: PositiveInt
    max_tokens: PositiveInt
    max_context: Annotated[float, Range(1, INT32_MAX)]
    max_chunk_context: PositiveInt

    __post_init__ = check_ranges


@dataclass(frozen=True)
class EngineSetup:
    """How the engine of a profile runs its model: the fields of `Deployment` of these names."""

    engine: str
    version: str
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    ep: PositiveInt = 1
    dp_attention: PositiveInt = 1
    weight_dtype: str = ""
    moe_dtype: str = ""
    kv_dtype: str = ""

    __post_init__ = check_ranges

    def __str__(self) -> str:
        degrees = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("dp_attention", self.dp_attention))
        types = (("weights", self.weight_dtype), ("moe", self.moe_dtype), ("kv", self.kv_dtype))
        parts = [f"{name} {count}" for name, count in degrees if count > 1]
        return ", ".join([f"{self.engine} {self.version}".strip(), *parts, *(f"{a} {b}" for a, b in types if b)])


@dataclass(frozen=True)
class TableFault:
    """An operation of the kernel tables that takes `ms` at a size, where `bound_ms` is the least or the most that can
    be believed: by its sheet (`floor`), by another GPU (`ceiling`), by a smaller size (`order`). `basis` says of what
    that is; `share`: how much of a step of that size lies beyond."""

    operation: str
    size: str
    ms: Annotated[float, Range(0, 1e9)]
    bound: Literal["floor", "ceiling", "order"]
    bound_ms: Annotated[float, Range(-1e9, 1e9)]
    basis: str
    share: Annotated[float, Range(0, 1e6)]

    __post_init__ = check_ranges

    def __str__(self) -> str:
        took = f"{self.operation} of {self.size} takes {self.ms:.3g} ms"
        if self.bound == "ceiling":
            return f"{took}, {self.ms / self.bound_ms:.1f} times what {self.basis} allows"
        return f"{took}, less than the {self.bound_ms:.3g} ms of {self.basis}"


@dataclass(frozen=True)
class Profile:
    """Step costs with all that is needed to judge them.

    `gpu` is the catalog's name of the GPU, None if it is not in there. `num_blocks` is the measured number of KV blocks
    of `block_size` tokens. `residuals` and `held_out` rows hold region, n, p50, p95 (absolute relative errors) and bias
    (predicted / measured − 1). `samples` are the raw measurements, `missing` names what was not measured. The dicts
    hold JSON values only: lists, no tuples.

    `ahead` holds the same costs as `costs`, measured in an engine that schedules ahead of results: its kernels are all
    that keeps the device from the next step, its host's work is done beside them, and each slows the other. None: no
    such engine was run, and `costs` apart stand in.

    `setup`: the engine, GPUs and data types that the costs are of; None: the executor on one GPU, with the model's own.
    `checks`: the operations of the tables that cannot be believed, the worst first.
    """

    name: str
    origin: Literal["measured", "imported"]
    executor: str
    model: ModelSpec
    gpu: str | None
    hardware: dict[str, Any]
    software: dict[str, Any]
    made: dict[str, Any]
    block_size: PositiveInt
    num_blocks: PositiveInt | None
    costs: StepCosts
    hull: Hull
    residuals: tuple[dict[str, Any], ...] = ()
    held_out: dict[str, Any] | None = None
    samples: tuple[dict[str, Any], ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    energy: dict[str, Any] | None = None
    ahead: StepCosts | None = None
    setup: EngineSetup | None = field(default=None, metadata=LEFT_OUT)
    checks: tuple[TableFault, ...] = field(default=(), metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.name:
            raise ValueError("name is empty")
        if self.model.dtype not in DTYPE_BYTES:
            raise ValueError(f"model dtype is {self.model.dtype}; known are {', '.join(DTYPE_BYTES)}")
        held_out = self.held_out or {}
        steps = [*self.residuals, *held_out.get("steps", []), *held_out.get("batches", []), *held_out.get("ahead", [])]
        for row in [*steps, *([held_out | {"region": held_out.get("what")}] if held_out else [])]:
            if not isinstance(row.get("region"), str):
                raise ValueError(f"a row of errors has no region: {row}")
            for key, within in _ERRORS.items():
                if not isinstance(row.get(key), int | float):
                    raise ValueError(f"the errors of {row['region']} lack {key}")
                if row[key] not in within:
                    raise ValueError(f"{key} of the errors of {row['region']} {within.refusal(row[key])}")

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why these step times are not to be trusted, a line each; () where nothing is known against them."""
        doubts: list[str] = []
        for worst in self.checks[:1]:
            more = f"; {len(self.checks) - 1} more of the kind" if len(self.checks) > 1 else ""
            doubts.append(f"tables of {self.gpu}: {worst}{more}: not to be trusted")
        deployment = self.deployment
        gpu = deployment.gpu
        if self.origin == "imported" and deployment.num_gpus > 1 and gpu is not None and gpu.over_pcie:
            doubts.append(
                f"{deployment.num_gpus} GPUs over {gpu.link}: collectives as the tables' own machine has"
                " them, where GPUs reach each other's memory; without that they take several times as long"
            )
        return tuple(doubts)

    @property
    def cautions(self) -> tuple[str, ...]:
        """`doubts`, and of steps of which a profile cannot know what they take which these are, a line each."""
        if "jump" not in self.made:
            return self.doubts
        tokens, ratio = self.made["jump"]
        took = f"a prompt of {tokens:,} tokens takes {ratio:g} times as long after a prefix of one token as without"
        return (*self.doubts, f"tables: {took}: short prefixes are timed between the two")

    @property
    def deployment(self) -> Deployment:
        """What was measured: the model on its GPUs, under the engine or executor."""
        gpu = None if self.gpu is None else GPUS.get(self.gpu)
        setup = EngineSetup(self.executor, "") if self.setup is None else self.setup
        return Deployment(self.model, gpu, **{one.name: getattr(setup, one.name) for one in fields(setup)})

    @property
    def machine(self) -> str:
        """The GPU, else the CPU, that it was measured on."""
        return str(self.hardware.get("gpu") or self.hardware.get("cpu") or "an unnamed machine")

    def to_json(self) -> str:
        """The profile as the text of its JSON file; equal profiles give equal bytes."""
        value = cast("dict[str, Any]", to_plain(self))
        if self.ahead is None:
            del value["ahead"]
        return _text({"format": FORMAT, "version": VERSION} | value, 0) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> Profile:
        """The profile in `text`; CalibrationError, headed `source`, at the first thing that does not belong."""

        def refuse(number: str) -> float:
            raise CalibrationError(f"{source}: holds {number}, which is no finite number. Calibrate again.")

        def finite(number: str) -> float:
            return float(number) if math.isfinite(float(number)) else refuse(number)

        try:
            value = parse_json(text, parse_float=finite, parse_constant=refuse)
        except ValueError as error:
            raise CalibrationError(f"{source}: is {error}. Calibrate again, or copy the file anew.") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise CalibrationError(f"{source}: is not a {FORMAT}. Give a file that `batchsim calibrate` wrote.")
        if value.get("version") != VERSION:
            raise CalibrationError(
                f"{source}: version {value.get('version')!r} of the format; this batchsim reads {VERSION}. Calibrate"
                " again with this version, or use the batchsim that wrote it."
            )
        del value["format"], value["version"]
        try:
            return from_plain(cls, value)
        except ValueError as error:
            raise CalibrationError(f"{source}: {error}. Calibrate again.") from None


def profile_names() -> list[str]:
    """The names of the profiles that come with batchsim, those of deployments."""
    folder = resources.files(SHIPPED) / "profiles"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """The shipped profile of that name, else the one in that file. CalibrationError, in one line, if there is none."""
    name = str(name_or_path)
    if name in profile_names():
        return _shipped(name)
    if not name.endswith(".json") and (target := installed("profiles", profile_names()).get(name)):
        return _of_a_package(name, target)
    return _read(name, Path(name))


def _of_a_package(name: str, target: str) -> Profile:
    """The profile whose file's path is `target`, a `module:attribute` of an installed package."""
    module, _, attribute = target.partition(":")
    try:
        path = getattr(import_module(module), attribute)
    except Exception as error:  # a package's code may raise anything
        said = f"{type(error).__name__}: {shown(str(error))}"
        raise CalibrationError(f"profile {name}: {target}{of_package(target)} cannot be imported: {said}.") from None
    if not isinstance(path, str | Path):
        raise CalibrationError(f"profile {name}: {target}{of_package(target)} is no path of a file. Make it one.")
    return _read(name, Path(path))


@cache
def _shipped(name: str) -> Profile:
    """A shipped profile, read once: a plan asks for the same one for hundreds of configurations."""
    return _read(name, Path(str(resources.files(SHIPPED) / "profiles" / f"{name}.json")))


def _read(name: str, path: Path) -> Profile:
    """The profile in the file `path`, which goes by `name`."""
    try:
        return Profile.from_json(read_text(path), str(path))
    except FileNotFoundError:
        known = "Check the path." if path.suffix == ".json" else "Write a deployment, which finds the shipped ones."
        advice = nearest(path.name.removesuffix(".json"), profile_names(), known)
        raise CalibrationError(f"{name}: neither a shipped profile nor a file. {advice}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the name
        raise CalibrationError(
            f"{name[:200]}: cannot be read: {reason_text(error)}. Give a profile's JSON file."
        ) from None


# ---- JSON


def _text(value: Any, depth: int) -> str:
    """JSON of `value`, one line for what fits in one and for plain lists of numbers, else one for each item."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    scalars = not isinstance(value, dict | list | tuple) or not any(isinstance(v, dict | list | tuple) for v in value)
    if len(line) + depth <= _LINE or not value or (scalars and not isinstance(value, dict)):
        return line
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key, ensure_ascii=False)}: {_text(v, depth + 1)}" for key, v in value.items()]
        return "{\n" + pad + f",\n{pad}".join(items) + f"\n{' ' * depth}}}"
    return "[\n" + pad + f",\n{pad}".join(_text(v, depth + 1) for v in value) + f"\n{' ' * depth}]"


def check_model(profile: Profile, model: ModelSpec) -> None:
    """CalibrationError, naming the first difference, if `profile` was made of a model of another shape.

    Names may differ, the positions a model allows, and what a roofline could time of it: none costs time. A profile
    with a setup is compared by `work_of`.
    """
    if profile.setup is None:
        left = ("name", "max_position_embeddings", "untimed")
        names = [one.name for one in fields(ModelSpec) if one.name not in left]
        pairs = [(name, getattr(profile.model, name), getattr(model, name)) for name in names]
    else:
        work = work_of(model)
        pairs = [(name, own, work[name]) for name, own in work_of(profile.model).items()]
    for name, own, asked in pairs:
        if own != asked:
            if profile.setup is None:
                model.check_timed()
            raise CalibrationError(
                f"cost: profile {profile.name} is of {profile.model.name} with {name} {own}; {model.name} has"
                f" {asked}. Calibrate {model.name}, or use a GPU's name as cost."
            )


def work_of(model: ModelSpec) -> dict[str, Any]:
    """The properties of a model that its kernels depend on: hidden size, vocabulary and the kinds of its layers.

    Biases, norms and how matrices are tied cost no time that tables show.
    """
    layers = [(each.count, *(_sizes(part) for part in (each.attention, each.mlp))) for each in model.kinds]
    return {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size, "layers": layers}


def _sizes(part: Any) -> dict[str, Any]:
    return {one.name: getattr(part, one.name) for one in fields(part) if one.name != "vectors"}


# ---- reach

_REACH = {
    "decodes": ("decode sequences", "--max-seqs"),
    "sequences": ("sequences in a step", "--max-seqs"),
    "tokens": ("tokens in a step", "--max-batched-tokens"),
    "context": ("mean context tokens of the decodes", "--max-model-len"),
    "chunk": ("tokens of one prompt", "--max-model-len"),
}
"""Of each limit of the hull: what it limits, and the option of `batchsim calibrate` that raises it."""


def check_reach(profile: Profile, asked: float, limit: float, of: str) -> None:
    """ExtrapolationError if a step asks for more than the `limit` of `profile`: `of` decodes, sequences, tokens, mean
    context or a chunk."""
    if asked <= limit:
        return
    needed, (what, option) = math.ceil(asked), _REACH[of]
    if profile.setup is not None:
        raise ExtrapolationError(
            f"{needed} {what} asked; the kernel tables of {profile.name} were asked up to {limit:.0f}. Let policy"
            " or workload ask for no more",
            "pass --set deployment.extrapolate=true",
        )
    raise ExtrapolationError(
        f"{needed} {what} asked; profile {profile.name} was measured up to {limit:.0f}. Recalibrate with {option}"
        f" {needed}",
        "pass --set cost.extrapolate=true",
    )
