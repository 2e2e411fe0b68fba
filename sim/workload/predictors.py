"""Predictors of output lengths, for policies that order requests by them. Their names stand in every table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from batchsim.base.ranges import Config, Range
from batchsim.kernel.protocols import LengthPredictor
from batchsim.kernel.types import Request
from batchsim.workload.build import BuiltWorkload
from batchsim.workload.tagged import ByKind
from batchsim.workload.traces.random_stream import random_stream

NOISE_BLOCK = 8192  # request ids whose noise is drawn at once


@dataclass(frozen=True)
class OracleConfig(Config):
    """Predicts the true output length."""

    kind: Literal["oracle"] = "oracle"


@dataclass(frozen=True)
class NoisyConfig(Config):
    """Predicts the true output times exp(sigma Z), with Z standard normal, keyed by request id: right in the median."""

    sigma: Annotated[float, Range(0, 3, above=True)]  # at 3 a typical guess is off by 20 times
    kind: Literal["noisy"] = "noisy"


@dataclass(frozen=True)
class ClassMeanConfig(Config):
    """Predicts the mean true output of the request's class."""

    kind: Literal["class_mean"] = "class_mean"


PredictorConfig = Annotated[OracleConfig | NoisyConfig | ClassMeanConfig, ByKind()]


class Oracle:
    """The predictor of an OracleConfig. `predict` returns tokens, as those of the others do."""

    name = "oracle"

    def __init__(self, workload: BuiltWorkload) -> None:
        self._true = workload.true_output_tokens

    def predict(self, request: Request) -> int:
        return self._true(request)


class Noisy:
    """The predictor of a NoisyConfig."""

    def __init__(self, config: NoisyConfig, workload: BuiltWorkload) -> None:
        self.name = f"noisy (sigma {config.sigma:g})"
        self._sigma = config.sigma
        self._true = workload.true_output_tokens
        self._seed = workload.seed
        self._factors: dict[int, list[float]] = {}

    def predict(self, request: Request) -> int:
        block, offset = divmod(request.id, NOISE_BLOCK)
        factors = self._factors.get(block)
        if factors is None:
            normal = random_stream(self._seed, "length noise", block=block).standard_normal(NOISE_BLOCK)
            factors = self._factors[block] = np.exp(self._sigma * normal).tolist()
        return max(1, round(self._true(request) * factors[offset]))


class ClassMean:
    """The predictor of a ClassMeanConfig."""

    name = "class mean"

    def __init__(self, workload: BuiltWorkload) -> None:
        self._means = {name: max(1, round(mean)) for name, mean in workload.mean_output_tokens.items()}

    def predict(self, request: Request) -> int:
        return self._means[request.request_class]


def build_predictor(config: PredictorConfig, workload: BuiltWorkload) -> LengthPredictor:
    """The predictor that `config` asks for, of the requests of `workload`."""
    if isinstance(config, NoisyConfig):
        return Noisy(config, workload)
    return Oracle(workload) if isinstance(config, OracleConfig) else ClassMean(workload)
