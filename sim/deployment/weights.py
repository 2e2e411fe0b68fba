"""Numbers of weights of a layer, and how GPUs share it."""

from __future__ import annotations

from typing import NamedTuple


class Weights(NamedTuple):
    """Numbers of weights: matrices of attention, of MLPs through which all tokens go, of routed experts; `plain`,
    which no quantisation touches: router, norms, biases, convolutions, embedding and output matrix; and matrices of
    linear attention, whose type may be another than that of attention."""

    attention: int = 0
    mlp: int = 0
    experts: int = 0
    plain: int = 0
    linear: int = 0


class Split(NamedTuple):
    """How GPUs share a layer: `tp` parts of every matrix, whole experts over `ep` GPUs, `moe_tp` parts of each."""

    tp: int = 1
    ep: int = 1
    moe_tp: int = 1


WHOLE = Split()
"""One GPU holds all."""


def cannot_cut(tp: int, *sizes: tuple[str, int]) -> str:
    """The first of the named sizes that `tp` does not divide, in words; "" where it divides all."""
    return next((f"{name} {size}" for name, size in sizes if size % tp), "")
