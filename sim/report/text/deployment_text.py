"""What `batchsim show` prints: a scenario's deployment, its memory, its policies, and the command that starts it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, cast, get_args, get_type_hints

from batchsim.base.errors import CalibrationError
from batchsim.base.plain import to_plain
from batchsim.base.units import Quantity, format_duration, parse_duration_ns
from batchsim.kernel.policy_config import PolicyConfig
from batchsim.report.layout import fit
from batchsim.results.heading import heading, kv_text
from batchsim.scenario import Scenario
from batchsim.scenario.command_lines.engines import command_of, command_of_side
from batchsim.scenario.command_lines.lines import OPTIONS_FILE, Written
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.scenario.setup import Group, Setup
from batchsim.study.curves.run import check_objectives


@dataclass(frozen=True)
class ShownDeployment:
    """A scenario in words: `heading` and `kv` as a run has them, or `missing`, why step times cannot be had here; the
    config of each policy; `command`, None where the scenario states a cost instead of a deployment, or two sides."""

    heading: str
    kv: str
    missing: str
    policies: dict[str, PolicyConfig]
    command: Written | None
    sides: dict[str, Written] = field(default_factory=dict[str, Written])
    """The command of an engine of each side, prefill and decode; none where every engine does both."""

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"policies": {label: to_plain(config) for label, config in self.policies.items()}}

    def __str__(self) -> str:
        lines = [self.heading, self.kv, f"! {self.missing}" if self.missing else ""]
        lines += [f"policy {label}: {_knobs(config)}" for label, config in self.policies.items()]
        text = [fit(line) for line in lines if line]
        for command in (self.command, *self.sides.values()):
            if command is None:
                continue
            text += ["", command.line]  # not broken: it is to be copied
            text += [f"{OPTIONS_FILE}:", *(f"  {line}" for line in command.options)] if command.options else []
            text += [fit(f"! the command cannot state {', '.join(command.unsaid)}")] if command.unsaid else []
        return "\n".join(text)


def shown_deployment(scenario: Scenario) -> ShownDeployment:
    """What there is to show of `scenario`. ScenarioError where its parts do not go together."""
    title = kv = missing = ""
    sides: tuple[Group, ...] = ()
    try:
        setup = Setup.of(scenario)
        check_objectives(setup)
        title, kv, sides = heading(setup), kv_text(setup), setup.groups
    except CalibrationError as error:
        missing = str(error)
    replicas = scenario.file.replicas
    if replicas is not None and replicas.transfer is not None:
        of = {f"{spec.name}, {side.name}": spec.config for side in sides for spec in side.setup.scenario.specs}
        deployed = (side for side in sides if isinstance(side.setup.scenario.cost, DeploymentConfig))
        commands = {side.name: command_of_side(side.setup.scenario, side.name, scenario.plain) for side in deployed}
        return ShownDeployment(title, kv, missing, of, None, commands)
    policies = {spec.name: spec.config for spec in scenario.specs}
    is_one = replicas is None or not replicas.are_models  # whose command is that of all engines
    command = command_of(scenario) if is_one and isinstance(scenario.cost, DeploymentConfig) else None
    return ShownDeployment(title, kv, missing, policies, command)


def _knobs(config: Any) -> str:
    """Every knob of a config with its value, as a scenario writes it."""
    hints = get_type_hints(type(config), include_extras=True)
    shown = cast("dict[str, Any]", to_plain(config))
    return ", ".join(f"{name} {_text(getattr(config, name), hints[name])}" for name in shown)


def _text(value: Any, hint: Any) -> str:
    if is_dataclass(value):
        return f"{{{_knobs(value)}}}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and _is_duration(hint):
        text = format_duration(value) if value else "0 s"
        return text if parse_duration_ns(text) == value else f"{value:,} ns"  # three digits are not all there are
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(each, hint) for each in value)}]" if value else "none"
    return "none" if value is None else str(value)


def _is_duration(hint: Any) -> bool:
    """Whether `hint` is, or holds, the type of a time in ns."""
    is_time = isinstance(hint, Quantity) and hint.parse is parse_duration_ns
    return is_time or any(map(_is_duration, get_args(hint)))
