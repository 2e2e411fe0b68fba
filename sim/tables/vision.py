"""The time of a vision tower from the kernel tables: matrices, attention of an image's patches, and all in between.

The tables' own operations of an encoder (`build_encoder_ops`) are asked, with the tower cut over the deployment's `tp`
GPUs as vLLM and SGLang cut it unless a flag divides images among them.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from batchsim.cost.encoder import VisionTime
from batchsim.cost.interpolation import Curve, Grid
from batchsim.deployment.catalog import MODELS
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.vision import TOWERS, VisionTower
from batchsim.tables.build import knots_of
from batchsim.tables.handle import errors_of_tables
from batchsim.tables.models import model_folder
from batchsim.tables.modes import PACKAGE, NoTablesError
from batchsim.tables.refusals import reason_of
from batchsim.tables.versions import engine_of, system_of, version, versions_for

MAX_IMAGE = 16_384
"""Embeddings of the largest image: of four patches each, as many as attention was timed over."""
_MAX_TOKENS = 32_768  # of all images of a step
_EVERY, _APART = 512, 16  # embeddings up to which each number is asked, and how far apart numbers are beyond
_IMAGES = (1, 2, 4, 8, 16, 32, 64)
_PER_OCTAVE = 6  # sizes of an image, whose attention grows with the square


def vision_time(deployment: Deployment) -> VisionTime:
    """How long the deployment takes for the images of a step. NoTablesError, with a `reason`, where it is not known."""
    model = deployment.model
    if (tower := model.vision) is None:
        known = model.model_type in TOWERS
        raise NoTablesError(
            f"the config.json of {model.name} has no vision_config"
            if known
            else f"the encoder of {model.model_type} models is not known here; those of {', '.join(TOWERS)} are"
        )
    if version() is None:
        raise NoTablesError("the kernel tables are not installed (pip install 'batchsim[gpus]')")
    _check_cut(tower, deployment.tp)
    kernels = _Kernels(system_of(deployment), engine_of(deployment), deployment.engine, tuple(versions_for(deployment)))
    return _timed(tower, deployment.tp, kernels)


class _Kernels(NamedTuple):
    """Where the tables have an engine's kernels: their names of the GPU and of the engine, the engine's own name, and
    the versions that may answer, in order."""

    system: str
    backend: str
    engine: str
    versions: tuple[str, ...]


@cache
def _timed(tower: VisionTower, tp: int, kernels: _Kernels) -> VisionTime:
    """`vision_time` of a tower cut over `tp` GPUs."""
    logging.getLogger(PACKAGE.replace("-", "_")).setLevel(logging.ERROR)
    problems: list[str] = []
    with model_folder(MODELS["llama-3.1-8b"], "bfloat16") as (_, folder):  # any: no graph of it is asked
        for version_of in kernels.versions:
            try:
                operations = _Operations(tower, tp, kernels, folder, version_of)
                return _asked(operations, f"{_words(tower, tp)}, kernels of {kernels.engine} {version_of}")
            except errors_of_tables() as error:
                problems.append(reason_of(str(error)))
    raise NoTablesError("; ".join(dict.fromkeys(problems)))


def _words(tower: VisionTower, tp: int) -> str:
    return f"vision tower of {tower}" + (f" cut over {tp} GPUs" if tp > 1 else "")


def _check_cut(tower: VisionTower, tp: int) -> None:
    sizes = (("heads", tower.num_heads), ("intermediate size", tower.intermediate_size))
    uncut = next((f"{what} {size}" for what, size in sizes if size % tp), "")
    if uncut:
        raise NoTablesError(f"tp {tp} does not divide the encoder's {uncut}")


class _Operations:
    """The tower's operations in the tables of one version: ms of attention, and of all else."""

    def __init__(self, tower: VisionTower, tp: int, kernels: _Kernels, folder: str, version_of: str) -> None:
        from aiconfigurator_core.sdk import common  # pyright: ignore[reportMissingImports]
        from aiconfigurator_core.sdk.engine import (  # pyright: ignore[reportMissingImports]
            EngineHandle,
            build_ops_json,
        )
        from aiconfigurator_core.sdk.models.blocks.vit import (  # pyright: ignore[reportMissingImports]
            build_encoder_ops,
        )

        merged = tower.hidden_size * tower.patches
        encoder = common.VisionEncoderConfig(
            depth=tower.num_hidden_layers,
            hidden_size=tower.hidden_size,
            num_heads=tower.num_heads,
            intermediate_size=tower.intermediate_size,
            patch_size=1,  # of pixels, which are not asked for
            temporal_patch_size=1,
            spatial_merge_size=1,
            out_hidden_size=tower.out_size,
            projector_dims=((merged, merged), (merged, tower.out_size)),
            projector_n_instances=1 + tower.deepstack,
            partial_rotary_factor=0.5,  # of a rotary table: all of a head is rotated
        )
        self._patches = tower.patches
        self._handle: Any = EngineHandle.compile(
            folder, kernels.system, kernels.backend, backend_version=version_of, tp_size=1, pp_size=1
        )
        ops = build_encoder_ops(encoder, tp, enable_encoder_dp=False)
        attention = [op for op in ops if op._name == "encoder_attention"]
        after = [op for op in ops if "projector" in op._name]
        before = [op for op in ops if op not in attention and op not in after]
        self._attention, self._after, self._before = (build_ops_json(each) for each in (attention, after, before))

    def attention(self, images: int, tokens: int) -> float:
        """ms of attention in `images` of `tokens` embeddings each."""
        return self._ms(self._attention, images, tokens * self._patches)

    def dense(self, tokens: int) -> float:
        """ms of all else, of `tokens` embeddings in all."""
        return self._ms(self._before, 1, tokens * self._patches) + self._ms(self._after, 1, tokens)

    def _ms(self, ops: str, batch: int, length: int) -> float:
        asked = self._handle.evaluate_ops_json(ops, is_context=True, batch_size=batch, s=length, x=batch * length)
        return sum(ms for _, ms, _, _ in asked)


def _asked(ops: _Operations, source: str) -> VisionTime:
    counts = [*range(1, _EVERY), *range(_EVERY, _MAX_TOKENS + 1, _APART)]
    dense = _rising([(n, ops.dense(n)) for n in counts])
    kept = [dense[i] for i in knots_of(dense)]
    octaves = MAX_IMAGE.bit_length() - 1
    sizes = sorted({round(2 ** (i / _PER_OCTAVE)) for i in range(octaves * _PER_OCTAVE + 1)})
    rows = [_rising([(n, ops.attention(images, n)) for n in sizes]) for images in _IMAGES]
    for above, row in pairwise(rows):
        row[-1] = (row[-1][0], max(row[-1][1], above[-1][1]))
    return VisionTime(
        Curve(tuple(float(n) for n, _ in kept), tuple(_ns(ms) for _, ms in kept)),
        Grid(_IMAGES, tuple(float(n) for n in sizes), tuple(tuple(_ns(ms) for _, ms in row) for row in rows)),
        source,
    )


def _rising(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """The points (x, y) whose last y is no less than that before: a curve goes on from there."""
    (before, last), floats = points[-2:], [(float(x), y) for x, y in points]
    floats[-1] = float(last[0]), max(before[1], last[1])
    return floats


def _ns(ms: float) -> float:
    return float(f"{ms * 1e6:.5g}")
