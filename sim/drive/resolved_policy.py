"""One policy of a scenario, with its knobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import ScenarioError
from batchsim.workload.predictors import OwnPredictor, PredictorConfig


@dataclass(frozen=True)
class ResolvedPolicy:
    """One policy to run: a label with one set of knobs, held by `config`, the policy's own `PolicyConfig`.

    `variant` names the choice where `best_of` listed several.
    """

    label: str
    kind: str
    config: Any
    variant: str = ""
    predictor: PredictorConfig | OwnPredictor | None = None

    @property
    def name(self) -> str:
        """The label with the chosen variant, and the predictor that knows more of the lengths than an engine does."""
        additions = [self.variant, "" if self.predictor is None else f"{self.predictor.kind} lengths"]
        return f"{self.label} ({', '.join(filter(None, additions))})" if any(additions) else self.label

    def check_can_be_real(self) -> None:
        """ScenarioError if only a simulation could run the policy: it verifies drafts of another model."""
        speculation = self.config.traits.speculation
        if speculation is not None and speculation.lookup is None:
            raise ScenarioError(
                f"{self.name}: no draft model runs here, and no search but vllm's, so that its drafts can only be"
                " simulated. Use method ngram of vllm, or no drafts."
            )
