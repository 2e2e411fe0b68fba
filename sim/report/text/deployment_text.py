"""What `batchsim show` prints: a scenario's deployment, its memory, its policies, and the command that starts it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from batchsim.base.errors import CalibrationError
from batchsim.base.plain import to_plain
from batchsim.report.layout import fit
from batchsim.results.heading import heading
from batchsim.scenario import Scenario
from batchsim.scenario.command_lines.engines import command_of
from batchsim.scenario.command_lines.lines import OPTIONS_FILE, Written
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.setup import Setup


@dataclass(frozen=True)
class ShownDeployment:
    """A scenario in words: `heading` and `kv` as a run has them, or `missing`, why step times cannot be had here; every
    knob of each policy; `command`, None where the scenario states a cost instead of a deployment."""

    heading: str
    kv: str
    missing: str
    policies: dict[str, dict[str, Any]]
    command: Written | None

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.heading, self.kv, f"! {self.missing}" if self.missing else ""]
        for label, knobs in self.policies.items():
            lines.append(f"policy {label}: " + ", ".join(f"{name} {_text(value)}" for name, value in knobs.items()))
        text = [fit(line) for line in lines if line]
        if self.command is not None:
            text += ["", self.command.line]  # not broken: it is to be copied
            text += (
                [f"{OPTIONS_FILE}:", *(f"  {line}" for line in self.command.options)] if self.command.options else []
            )
            text += [fit(f"! no flag says {', '.join(self.command.unsaid)}")] if self.command.unsaid else []
        return "\n".join(text)


def shown_deployment(scenario: Scenario) -> ShownDeployment:
    """What there is to show of `scenario`. ScenarioError where its parts do not go together."""
    title = kv = missing = ""
    try:
        setup = Setup.of(scenario)
        title, kv = heading(setup), str(setup.kv)
    except CalibrationError as error:
        missing = str(error)
    policies = {spec.name: cast("dict[str, Any]", to_plain(spec.config)) for spec in scenario.specs}
    command = command_of(scenario) if isinstance(scenario.cost, DeploymentConfig) else None
    return ShownDeployment(title, kv, missing, policies, command)


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
