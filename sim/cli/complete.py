"""Completions of values for a shell after `batchsim --install-completion`: names that batchsim knows.

Where nothing begins with what was typed the shell offers files.
"""

from __future__ import annotations

from collections.abc import Iterable

import typer


def scenarios(incomplete: str) -> list[str]:
    """Names of shipped scenarios."""
    from batchsim.scenario.load import shipped_scenarios

    return _beginning(shipped_scenarios(), incomplete)


def training(incomplete: str) -> list[str]:
    """Names of shipped training scenarios."""
    from batchsim.training.load import shipped_training

    return _beginning(shipped_training(), incomplete)


def policies(ctx: typer.Context, incomplete: str) -> list[str]:
    """Labels of the policies of the scenario that stands before; none while it cannot be read."""
    from batchsim.base.errors import BatchsimError
    from batchsim.scenario import load_scenario

    # An option that still lacks its value keeps click from assigning the arguments before it.
    named = ctx.params.get("scenario") or next(iter(ctx.args), "")
    try:
        labels = load_scenario(str(named)).file.policies
    except BatchsimError:
        return []
    return _beginning(labels, incomplete)


def models(incomplete: str) -> list[str]:
    """Catalog names of models."""
    from batchsim.deployment.catalog import MODELS

    return _beginning(MODELS, incomplete)


def gpus(incomplete: str) -> list[str]:
    """Catalog names of GPUs."""
    from batchsim.deployment.catalog import GPUS

    return _beginning(GPUS, incomplete)


def engines(incomplete: str) -> list[str]:
    """Engines of which a deployment can be."""
    from batchsim.scenario.command_lines.engines import SERVERS

    return _beginning(SERVERS, incomplete)


def profiles(incomplete: str) -> list[str]:
    """Names of shipped profiles."""
    from batchsim.cost.profile import profile_names

    return _beginning(profile_names(), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
