"""The time that drafting takes: a term of its own in the steps of a policy whose decodes verify draft tokens.

A step is followed by its drafter, which works on the step's tokens and on whose drafts the next step has to wait, ahead
of results too: nothing hides it, so that its time is a part of the step. `ngram` searches once, on the host. Any other
method makes its drafts in as many passes: the first over all tokens of the step, which are new to it, each of the
others over one token of every sequence, or of each of its branches. A model's passes are timed by the roofline of the
engine's GPU.

Simplified: it drafts for every sequence of a step, for prompts in parts and rows of padding too; later passes read the
context of decodes and this step's part of prompts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from batchsim.base.errors import ScenarioError
from batchsim.base.later import np
from batchsim.cost.base import Cost
from batchsim.cost.drafter_config import DrafterConfig, DraftersConfig
from batchsim.cost.host_config import HostCost
from batchsim.cost.profile import Profile
from batchsim.cost.roofline import Roofline
from batchsim.cost.scaled import Scaled
from batchsim.cost.work import Columns, Terms, draft_pairs, prefill_pairs
from batchsim.cost.wrapped import Wrapped
from batchsim.deployment.catalog import read_model
from batchsim.deployment.deployment import Deployment, DraftMemory
from batchsim.deployment.draft_memory import draft_memory
from batchsim.deployment.model import ModelSpec
from batchsim.kernel.batch import Batch
from batchsim.kernel.policy_config import Speculation

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Drafter:
    """The times of a drafter that makes `passes` passes after a step, each but the first over `branches` tokens of
    every sequence; `model` None: without a draft model."""

    def __init__(self, config: DrafterConfig, passes: int, model: Roofline | None, *, branches: int = 1) -> None:
        self._each_ns = passes * (config.base or 0)
        self._per_sequence_ns = passes * config.per_sequence
        self._per_token_ns = config.per_token
        self._passes, self._model, self._branches = passes, model, branches

    def step_ns(self, batch: Batch) -> int:
        """ns of drafting after the step `batch`; 0 for one that computes no token."""
        decodes, rows, prefill, context = (
            batch.num_decode,
            batch.num_decode_tokens,
            batch.num_prefill_tokens,
            batch.context_tokens,
        )
        tokens, sequences = rows + prefill + batch.pad_decode_rows, decodes + len(batch.chunks)
        if not tokens:
            return 0
        ns: float = self._each_ns + self._per_sequence_ns * sequences + self._per_token_ns * tokens
        if self._model is not None:
            pairs = prefill_pairs(batch) + draft_pairs(decodes, rows, context)
            ns += self._model.pass_ns(tokens, sequences, context, pairs)
            if self._passes > 1:
                rows = self._branches * sequences
                ns += (self._passes - 1) * self._model.pass_ns(rows, rows, context + prefill, 0)
        return int(ns)

    def ns(self, columns: Columns) -> NDArray[np.float64]:
        """ns of drafting after each recorded step."""
        c = columns
        tokens = c["num_decode_tokens"] + c["num_prefill_tokens"] + c["pad_decode_rows"]
        sequences = c["num_decode"] + c["num_chunks"]
        ns = self._each_ns + self._per_sequence_ns * sequences + self._per_token_ns * tokens * 1.0
        if self._model is not None:
            context = c["context_tokens"]
            pairs = c["prefill_pairs"] + draft_pairs(c["num_decode"], c["num_decode_tokens"], context)
            ns = ns + self._model.passes_ns(tokens, sequences, context, pairs)
            rows = self._branches * sequences
            later = self._model.passes_ns(rows, rows, context + c["num_prefill_tokens"], 0)
            ns = ns + (self._passes - 1) * later
        return ns * (tokens > 0)


@dataclass(frozen=True, slots=True)
class Drafted(Wrapped):
    """The cost model `cost` with a drafter after each step."""

    cost: Cost
    drafter: Drafter

    def step_ns(self, batch: Batch) -> int:
        return self.cost.step_ns(batch) + self.drafter.step_ns(batch)

    def explain(self, columns: Columns) -> Terms:
        """The terms of `cost`, and the drafter's time under `draft`."""
        return self.cost.explain(columns) | {"draft": self.drafter.ns(columns)}

    def without_host(self) -> Drafted:
        return Drafted(self.cost.without_host(), self.drafter)

    @property
    def profile(self) -> Profile | None:
        return self.cost.profile


def with_drafter(cost: Cost, config: DraftersConfig | None, speculation: Speculation | None) -> Cost:
    """`cost` for a policy with this `speculation`: itself where it drafts nothing, or `config` has no time for that.

    ScenarioError where a draft model is not known, or cannot be timed on the GPU.
    """
    own = None if config is None or speculation is None else config.by_method.get(speculation.method)
    if own is None or speculation is None:
        return cost
    if isinstance(cost, Scaled):
        return Scaled(with_drafter(cost.cost, config, speculation), cost.factor, cost.anchor)
    passes = 1 if speculation.method == "ngram" else speculation.num_drafts
    model = _model(own, cost.deployment, speculation.method)
    return Drafted(cost, Drafter(own, passes, model, branches=speculation.branches))


def memory_of_drafter(
    engine: Deployment, config: DraftersConfig | None, speculation: Speculation
) -> tuple[DraftMemory | None, str]:
    """(What the drafter of `speculation` takes of each GPU of `engine`, None where it has no model or none is named;
    in the latter case what to say of it, else "").

    ScenarioError where a draft model is not known, or cannot be split so.
    """
    method, own = speculation.method, None if config is None else config.by_method.get(speculation.method)
    try:
        model = read_model(own.model) if own is not None and own.model is not None else None
        layers = own.layers if own is not None and own.layers is not None else 1
        words = own.draft_vocab_size if own is not None else None
        memory = draft_memory(engine, method, own=model, layers=layers, words=words)
    except ScenarioError as error:
        raise ScenarioError(f"cost: draft.{method}: {error}") from None
    unnamed = memory is None and method != "ngram"
    return memory, "a draft model, which cost.draft does not name, not counted" if unnamed else ""


def draft_sources(config: DraftersConfig | None) -> list[str]:
    """Lines on where the times of drafting come from; that of a draft model has a digest of its shape."""
    lines: list[str] = []
    for method, own in ({} if config is None else config.by_method).items():
        digest = "" if own.model is None else hashlib.sha256(repr(read_model(own.model)).encode()).hexdigest()[:12]
        lines.append(f"drafting by {method}: {own}, as stated in the scenario{digest and f' (shape {digest})'}")
    return lines


def _model(config: DrafterConfig, engine: Deployment | None, method: str) -> Roofline | None:
    """The roofline of a draft model beside the model of an `engine`; None where the config names no draft model."""
    if config.layers is None and config.model is None:
        return None
    what = f"cost: draft.{method}"
    if engine is None or engine.gpu is None:
        raise ScenarioError(
            f"{what} names a draft model, and no GPU is known on which it would run. Write base and per_sequence."
        )
    try:
        model = read_model(config.model) if config.model is not None else _part(engine.model, config)
        return Roofline(model, engine.gpu, tp=engine.tp, host=HostCost(0, 0, 0))
    except ScenarioError as error:
        raise ScenarioError(f"{what}: {error}") from None


def _part(model: ModelSpec, config: DrafterConfig) -> ModelSpec:
    """The first layers of `model` and its output matrix, as a `config` without a model of its own asks for them."""
    layers, vocabulary = config.layers or 0, config.draft_vocab_size or model.vocab_size
    for name, asked, there in (
        ("layers", layers, model.num_hidden_layers),
        ("draft_vocab_size", vocabulary, model.vocab_size),
    ):
        if asked > there:
            raise ScenarioError(f"{name} {asked}, and {model.name} has {there}. Write no more.")
    return replace(model, num_hidden_layers=layers, vocab_size=vocabulary)
