"""A length predictor of one's own: a classifier of answers into ranges, right for a share `right` of the requests.

    policies: {sjf: {predictor: {kind: "own_predictor:Classifier", right: 0.8}, kind: preemptive, ...}}

with this folder on PYTHONPATH and --allow-code. A wrong guess is the range beside the true one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from batchsim.base.ranges import Range
from batchsim.kernel.types import Request
from batchsim.workload.predictors import OwnPredictor

ENDS = (64, 256, 1024, 4096)  # tokens


@dataclass(frozen=True)
class Classifier(OwnPredictor):
    right: Annotated[float, Range(0, 1)]

    def predicted_tokens(self, request: Request, true_tokens: int, random: np.random.Generator) -> int:
        at = min(int(np.searchsorted(ENDS, true_tokens)), len(ENDS) - 1)
        if random.random() >= self.right:
            at += -1 if at else 1
        return ENDS[at]
