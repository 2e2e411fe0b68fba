"""A training scenario by its path, or by the name under which it is shipped, and its packers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from batchsim.base.errors import CalibrationError, ScenarioError, TraceError, bounded, nearest
from batchsim.base.files import read_text, reason_text
from batchsim.base.plain import texts_in
from batchsim.scenario.check_values import check_values
from batchsim.scenario.document import Document, read_document
from batchsim.scenario.long_forms import override
from batchsim.training.config import TrainingConfig, TrainingFile
from batchsim.training.cost import training_cost
from batchsim.training.kpis import Run
from batchsim.training.lengths import example_lengths
from batchsim.training.simulate import step_times
from batchsim.training.steps import epoch_of
from batchsim.training.stream import Cut

SHIPPED = "batchsim.scenarios"
FOLDER = "training"


@dataclass(frozen=True)
class TrainingScenario:
    """A checked scenario of training. `folders` are where files are looked for; `plain` its values with --set."""

    name: str
    source: str
    text: str
    config: TrainingConfig
    folders: tuple[Path, ...]
    document: Document

    @contextmanager
    def at(self, *keys: str) -> Iterator[None]:
        """A context whose errors begin with the place of `keys` below `training`."""
        try:
            yield
        except (ScenarioError, TraceError, CalibrationError) as error:
            message = f"{self.document.where(('training', *keys))}: {error}"
            raise type(error)(bounded(message, texts_in(self.document.value))) from None


def shipped_training() -> list[str]:
    """The names of the training scenarios that come with batchsim."""
    folder = resources.files(SHIPPED) / FOLDER
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_training(
    name_or_path: str, overrides: Sequence[str] = (), trace_folders: Sequence[Path] = ()
) -> TrainingScenario:
    """The scenario at a path, or shipped under a name, with `overrides` like `training.micro_batch=2`.

    ScenarioError, in one line a fault: where, what, what to do.
    """
    path, shipped = Path(name_or_path), resources.files(SHIPPED) / FOLDER / f"{name_or_path}.yaml"
    try:
        if path.name == name_or_path and not path.is_file() and shipped.is_file():
            path = Path(str(shipped))
        text = read_text(path)
    except FileNotFoundError:
        names = shipped_training()
        advice = nearest(path.name.removesuffix(".yaml"), names, f"Shipped are {', '.join(names)}.")
        raise ScenarioError(f"{name_or_path}: no such training scenario. {advice}") from None
    except (OSError, ValueError) as error:
        raise ScenarioError(f"{name_or_path}: cannot be read: {reason_text(error)}. Give a YAML text file.") from None
    document = read_document(text, str(path))
    if not isinstance(document.value, dict) or "training" not in document.value:
        advice = "batchsim run takes scenarios of serving" if isinstance(document.value, dict) else "It holds no keys"
        raise ScenarioError(f"{path}: has no training block. {advice}; write training: {{lengths, packers, cost}}.")
    for each in overrides:
        override(document, each)
    file: TrainingFile = check_values(TrainingFile, document.value, document, ())
    folders = (path.parent, Path.cwd(), *trace_folders)
    return TrainingScenario(path.name.removesuffix(".yaml"), str(path), text, file.training, folders, document)


def run_training(scenario: TrainingScenario, progress: Callable[[int, int, str], None] = lambda *_: None) -> list[Run]:
    """An epoch with each packer, in the order of the scenario."""
    config = scenario.config
    with scenario.at("cost"):
        cost = training_cost(config)
    with scenario.at("lengths"):
        lengths = example_lengths(config.lengths, scenario.folders, config.seed)
    runs: list[Run] = []
    cuts: list[Cut | None] = [*config.stream.cuts()] if config.stream else [None]
    for number, (label, packer) in enumerate(config.packers.items()):
        progress(number, len(config.packers), label)
        for cut in cuts:
            with scenario.at("packers", label):
                epoch = epoch_of(config, label, lengths, cut)
                times = step_times(config, cost, epoch, label)
            name = label if cut is None else f"{label}, {cut}"
            runs.append(Run(name, packer.name, config, cost, epoch, times))
    return runs
