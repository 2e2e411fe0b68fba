"""What was measured of one executor, model and GPU: the numbers a `Calibrated` cost computes with, as one JSON file.

A step's kernels cost, with the padded work of `batchsim.cost.work`,

    in_situ · (layers(tokens) + head(rows) + decode_attention(B, context / B) + chunk_attention(chunks))

where `decode(B)` replaces layers and head in a decode-only step that replays a graph, and a step of chunks alone takes
`prefill_ns` more. Host and swap times come on top.
All times are floats of ns. Reading is strict: whatever is not exactly a profile of this version is refused in one line.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from batchsim.base.errors import CalibrationError, nearest
from batchsim.base.files import parse_json, read_text, reason_text
from batchsim.base.plain import from_plain, to_plain
from batchsim.base.ranges import INT32_MAX, Config, PositiveInt, Range, check_ranges
from batchsim.base.units import HostDuration, PartDuration
from batchsim.cost.interpolation import Curve, Grid, Ns
from batchsim.deployment.catalog import GPUS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import DTYPE_BYTES, ModelSpec

__all__ = [
    "ChunkCost",
    "Curve",
    "Grid",
    "HostTerm",
    "Hull",
    "Profile",
    "StatedHost",
    "StepCosts",
    "SwapCost",
    "load_profile",
    "profile_names",
]

FORMAT = "batchsim-profile"
VERSION = 2
SHIPPED = "batchsim.calibrate"  # the package whose folder `profiles` holds those that come with batchsim
_ERRORS = {"n": Range(0, INT32_MAX), "p50": Range(0, 100), "p95": Range(0, 100), "bias": Range(-1, 100, above=True)}
"""What a row of errors holds: how many steps, quantiles of absolute relative errors, predicted / measured − 1."""
_LINE = 200  # letters from which a JSON value is broken into its items


@dataclass(frozen=True)
class ChunkCost:
    """ns of the attention of prefill chunks: for each chunk, for each of its tokens, and for each query-key pair."""

    per_chunk: Ns
    per_token: Ns
    per_pair: Ns

    __post_init__ = check_ranges


@dataclass(frozen=True)
class HostTerm:
    """ns that a step spends on the host, outside its kernels; `per_token` is for each prefill token.

    `serial`: after the kernels. `overlapped`: beside them, so that the longer of the two counts. `assumed`: nobody
    measured it.
    """

    base: Ns
    per_sequence: Ns
    per_token: Ns
    mode: Literal["serial", "overlapped"]
    assumed: bool

    __post_init__ = check_ranges


@dataclass(frozen=True)
class SwapCost:
    """ns that swapping adds to a step: once, and for every block that crosses the host link, either way."""

    base: Ns
    per_block: Ns
    assumed: bool

    __post_init__ = check_ranges


@dataclass(frozen=True)
class StepCosts:
    """The parts of a step's time, in ns.

    `layers` is over the tokens of the step, `head` over its rows of logits. `decode`, if any, holds layers and head of
    decode-only steps by size of the captured graph: a step takes the time of the smallest that holds its rows, and one
    with more rows than the largest is launched op by op. `decode_attention` comes on top of these. `launch_ns` is the
    least that the kernels of a step launched op by op take. `prefill_ns` is what a step of chunks alone takes besides:
    as a rule such a step follows a rest, with cold caches, the host's too. `in_situ` is the time of kernels inside an
    engine over their time back to back.
    """

    layers: Curve
    head: Curve
    decode: Curve | None
    decode_attention: Grid
    chunk_attention: ChunkCost
    launch_ns: Ns
    prefill_ns: Ns
    in_situ: Annotated[float, Range(0.01, 100)]
    host: HostTerm
    swap: SwapCost | None

    def __post_init__(self) -> None:
        check_ranges(self)
        self.layers.check_end("layers")
        self.head.check_end("head")


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
class Profile:
    """Step costs with all that is needed to judge them.

    `gpu` is the catalog's name of the GPU, None if it is not in there. `num_blocks` is the measured number of KV blocks
    of `block_size` tokens. `residuals` and `held_out` rows hold region, n, p50, p95 (absolute relative errors) and bias
    (predicted / measured − 1). `samples` are the raw measurements, `missing` names what was not measured. The dicts
    hold JSON values only: lists, no tuples.

    `ahead` holds the same costs as `costs`, measured in an engine that schedules ahead of results: its kernels are all
    that keeps the device from the next step, its host's work is done beside them, and each slows the other. None: no
    such engine was run, and `costs` apart stand in.
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
                within.check(f"{key} of the errors of {row['region']}", row[key])

    @property
    def deployment(self) -> Deployment:
        """What was measured: the model on one GPU, under the executor."""
        return Deployment(self.model, None if self.gpu is None else GPUS.get(self.gpu), self.executor)

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
            return from_plain(cls, {"ahead": None} | value)
        except ValueError as error:
            raise CalibrationError(f"{source}: {error}. Calibrate again.") from None


@dataclass(frozen=True, slots=True)
class StatedHost(Config):
    """Host time as a scenario states it, in place of the profile's."""

    base: HostDuration
    per_sequence: PartDuration = 0
    per_token: PartDuration = 0
    mode: Literal["serial", "overlapped"] = "serial"

    def term(self) -> HostTerm:
        return HostTerm(self.base, self.per_sequence, self.per_token, self.mode, assumed=False)


def profile_names() -> list[str]:
    """The names of the profiles that come with batchsim."""
    folder = resources.files(SHIPPED) / "profiles"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """The shipped profile of that name, else the one in that file. CalibrationError, in one line, if there is none."""
    name = str(name_or_path)
    path = Path(str(resources.files(SHIPPED) / "profiles" / f"{name}.json")) if name in profile_names() else Path(name)
    try:
        return Profile.from_json(read_text(path), str(path))
    except FileNotFoundError:
        known = "Check the path." if path.suffix == ".json" else f"Shipped are {', '.join(profile_names())}."
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

    Names may differ, the positions a model allows, and what a roofline could time of it: none costs time.
    """
    for field in fields(ModelSpec):
        own, asked = getattr(profile.model, field.name), getattr(model, field.name)
        if own != asked and field.name not in ("name", "max_position_embeddings", "untimed"):
            model.check_timed()
            raise CalibrationError(
                f"cost: profile {profile.name} is of {profile.model.name} with {field.name} {own}; {model.name} has"
                f" {asked}. Calibrate {model.name}, or use a GPU's name as cost."
            )
