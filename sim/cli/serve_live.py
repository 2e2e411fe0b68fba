"""`batchsim serve --engine live`: the endpoint answered by the real model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchsim.base.errors import ScenarioError
from batchsim.cli.live import check_kv_stated, check_weights, load_runner, prepare_machine

if TYPE_CHECKING:
    from batchsim.scenario import PolicySpec
    from batchsim.scenario.setup import Setup
    from batchsim.serve.live_engine import LiveEngine
    from batchsim.serve.metrics import Metrics


def live_engine(
    setup: Setup, spec: PolicySpec, metrics: Metrics, *, device: str, weights: Path | None, seed: int
) -> tuple[LiveEngine, dict[str, Any]]:
    """The scenario's model on `device` behind the policy `spec`, and on what it runs, as JSON values.

    CalibrationError or ScenarioError, one line, where the device or the memory is not there, or the scenario can only
    be simulated.
    """
    from batchsim.calibrate.engine.prompts import TOKENIZER, ModelTexts
    from batchsim.calibrate.engine.serving import ServingEngine
    from batchsim.calibrate.engine.session import made_on, step_limits_up_to
    from batchsim.serve.live_engine import LiveEngine, SentPrompts
    from batchsim.serve.served_workload import unplayed
    from batchsim.workload.workload_config import Frontend

    setup.check_can_be_real()
    if setup.traffic.frontend != Frontend():
        raise ScenarioError(
            f"{setup.scenario.source}: workload.frontend delays requests, and here the way there is a real one. Remove"
            " it: --set workload.frontend=null"
        )
    graphs = prepare_machine(setup, device)
    check_kv_stated(setup)
    if weights is not None:
        check_weights(weights, setup.model)
    folder = model_folder(setup, weights)
    texts = ModelTexts(folder, setup.model.vocab_size) if (folder / TOKENIZER).is_file() else None
    limits = [step_limits_up_to((spec,), setup.max_model_len)]
    runner = load_runner(setup, limits, device=device, weights=weights, graphs=graphs)
    prompts = SentPrompts()
    nothing = unplayed(setup).workload(1.0, 0)
    engine = ServingEngine(setup, spec, runner, nothing, prompts, setup.cost)
    return LiveEngine(setup, spec, metrics, engine, prompts, seed, texts=texts), made_on(runner)


def model_folder(setup: Setup, weights: Path | None) -> Path:
    """Where the model's tokenizer would be: beside its weights."""
    return weights or Path(setup.scenario.model_path)


def text_line(engine: LiveEngine, folder: Path) -> str:
    """What the start line says of text: "" where the model's tokenizer in `folder` reads and writes it."""
    from batchsim.calibrate.engine.prompts import TOKENIZER

    if engine.texts is not None:
        return ""
    return f"; text: words stand for tokens (no {TOKENIZER} in {folder})"
