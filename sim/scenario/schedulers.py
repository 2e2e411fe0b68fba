"""The scheduler of one policy of a scenario, and which of the drafts it verifies are right in simulation."""

from __future__ import annotations

from collections.abc import Collection

from batchsim.base.errors import ScenarioError
from batchsim.kernel.acceptance import DrawnLuck
from batchsim.kernel.kv_blocks import KVBlockManager
from batchsim.kernel.kv_transfer import KvConnector
from batchsim.kernel.policy_config import Speculation
from batchsim.kernel.protocols import ItemsContext, LengthPredictor, PolicyContext, Scheduler, StepEstimator
from batchsim.kernel.types import Request
from batchsim.scenario.config import PolicySpec
from batchsim.workload.build import BuiltWorkload
from batchsim.workload.predictors import build_predictor

_ATTRIBUTES = ("kv", "events", "streams", "num_waiting", "num_running")


def new_scheduler(
    spec: PolicySpec,
    kv: KVBlockManager,
    max_model_len: int,
    workload: BuiltWorkload | None,
    estimator: StepEstimator | None,
    stages: int = 1,
    adapter_copy_ns: int = 0,
    items: ItemsContext | None = None,
    connector: KvConnector | None = None,
) -> Scheduler:
    """A new scheduler of the policy `spec`, for an engine of `stages` pipeline stages, which takes `adapter_copy_ns` to
    copy a LoRA adapter onto the GPU, whose requests bring `items` and whose KV `connector` passes on.

    Without a workload one that predicts lengths can be built but not run. ScenarioError where the policy cannot have a
    batch in each stage, or is no scheduler.
    """
    predictor: LengthPredictor | None = None
    if spec.predictor is not None:
        predictor = _Unasked() if workload is None else build_predictor(spec.predictor, workload)
    if stages > 1 and not spec.config.traits.pipelines:
        raise ScenarioError(
            f"{spec.kind} runs one batch at a time, which leaves {stages - 1} of {stages} stages idle and is not"
            " simulated. Set pp to 1, or use vllm, orca, sarathi or vllm_v0."
        )
    if items is not None and not spec.config.traits.takes_items:
        raise ScenarioError(
            f"{spec.kind}: requests with images, audios or videos are not simulated under it. Drop workload.items, or"
            " use vllm or sglang."
        )
    loop = spec.config.traits.loop.over(stages)
    context = PolicyContext(kv, max_model_len, predictor, estimator, loop, adapter_copy_ns, items, connector)
    try:
        scheduler: Scheduler = spec.policy(spec.config, context)
    except SystemExit as error:
        raise ScenarioError(f"{spec.kind} ends the program (SystemExit {error}). Correct it.") from None
    missing = [name for name in _ATTRIBUTES if not hasattr(scheduler, name)]
    if missing:
        raise ScenarioError(
            f"{spec.kind} has no {', '.join(missing)}. See the Scheduler protocol in batchsim.kernel.protocols."
        )
    return scheduler


class _Unasked:
    """Stands for a predictor while a policy's knobs are only being checked."""

    name = "unasked"

    def predict(self, request: Request) -> int:
        raise AssertionError("a scheduler must not predict before a request arrives")


def drawn_luck(
    spec: PolicySpec, speculation: Speculation, workload: BuiltWorkload, names: Collection[str]
) -> DrawnLuck:
    """Which drafts are right where a simulation draws it. ScenarioError where the policy's acceptance is not said of
    each class of `names`, those of `workload`, or of its requests by their trace."""
    if not speculation.positions:
        if not workload.source.tells_acceptance:
            raise ScenarioError(
                f"{spec.name}: acceptance is to be the trace's, and no trace tells it of all requests. Write"
                " columns.acceptance in trace, and take all lengths from it."
            )
        return DrawnLuck.of_requests(workload.seed, speculation.num_drafts, workload.acceptance, speculation.found)
    classes, of = set(names), set(speculation.positions)
    if unknown := sorted(of - classes - {""}):
        known = ", ".join(sorted(classes)) or "no classes"
        raise ScenarioError(f"{spec.name}: acceptance of class {unknown[0]}; the workload has {known}. Correct it.")
    if "" not in of and (missing := sorted((classes or {""}) - of)):
        raise ScenarioError(
            f'{spec.name}: no acceptance of class {missing[0]!r}. Add it, or one under "" for all others.'
        )
    return DrawnLuck(workload.seed, speculation.positions, speculation.found)
