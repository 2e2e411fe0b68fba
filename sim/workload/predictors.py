"""Predictors of output lengths, for policies that order requests by them. Their names stand in every table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.later import np
from batchsim.base.ranges import INT32_MAX, Config, Range
from batchsim.kernel.protocols import LengthPredictor
from batchsim.kernel.types import Request
from batchsim.workload.tagged import ByKind
from batchsim.workload.traces.random_stream import random_stream
from batchsim.workload.traces.values import shown

if TYPE_CHECKING:
    from batchsim.workload.build import BuiltWorkload

NOISE_BLOCK = 8192  # request ids whose noise is drawn at once


@dataclass(frozen=True)
class OracleConfig(Config):
    """Predicts the true output length."""

    kind: Literal["oracle"] = "oracle"


@dataclass(frozen=True)
class NoisyConfig(Config):
    """Predicts the true output times exp(sigma Z), with Z standard normal, keyed by request id: right in the median."""

    sigma: Annotated[float, Range(0, 3, above=True)]  # at 3 a typical guess is off by 20 times
    """Standard deviation of the guesses' logarithms."""
    kind: Literal["noisy"] = "noisy"


@dataclass(frozen=True)
class ClassMeanConfig(Config):
    """Predicts the mean true output of the request's class."""

    kind: Literal["class_mean"] = "class_mean"


@dataclass(frozen=True)
class OwnPredictor(Config):
    """What a predictor of a user's own derives from: `kind: "module:Class"` names the dataclass."""

    @property
    def kind(self) -> str:
        """Its name in tables."""
        return type(self).__name__

    def predicted_tokens(self, request: Request, true_tokens: int, random: np.random.Generator) -> int:
        """The predicted output of `request` in tokens, at least 1, asked once a request; chance is of `random` alone,
        which every request has of its own. `true_tokens` is the true output, for a model of a predictor's errors."""
        raise NotImplementedError


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


class Own:
    """The predictor of an OwnPredictor. ScenarioError for whatever it raises, and for what is no number of tokens."""

    def __init__(self, config: OwnPredictor, workload: BuiltWorkload) -> None:
        self.name = config.kind
        self._config = config
        self._true = workload.true_output_tokens
        self._seed = workload.seed
        self._known: dict[int, int] = {}  # by request id

    def predict(self, request: Request) -> int:
        tokens = self._known.get(request.id)
        if tokens is None:
            tokens = self._known[request.id] = self._asked(request)
        return tokens

    def _asked(self, request: Request) -> int:
        random = random_stream(self._seed, "own length prediction", block=request.id)
        where = f"{self.name}.predicted_tokens"
        try:
            tokens = self._config.predicted_tokens(request, self._true(request), random)
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            said = f"{type(error).__name__}: {shown(str(error))}"
            raise ScenarioError(f"{where} fails for request {request.id}: {said}. Correct it.") from error
        if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer) or not 1 <= tokens <= INT32_MAX:
            raise ScenarioError(
                f"{where} gives {shown(tokens)} for request {request.id}. Return a whole number of tokens from 1 to"
                f" {INT32_MAX:,}."
            )
        return int(tokens)


def build_predictor(config: PredictorConfig | OwnPredictor, workload: BuiltWorkload) -> LengthPredictor:
    """The predictor that `config` asks for, of the requests of `workload`."""
    if isinstance(config, OwnPredictor):
        return Own(config, workload)
    if isinstance(config, NoisyConfig):
        return Noisy(config, workload)
    return Oracle(workload) if isinstance(config, OracleConfig) else ClassMean(workload)
