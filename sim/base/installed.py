"""Extensions that installed packages add by entry points: of the group `batchsim.policies` the name `mine` stands for
`module:Class`, and of the other GROUPS likewise.

A package that is installed runs when one of its names is used; a shipped name is always the shipped thing.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from batchsim.base.errors import ScenarioError, cut

GROUPS = ("policies", "routers", "autoscalers", "costs", "arrivals", "predictors", "readers", "profiles")
"""What packages can add, each by entry points of the group of that name after `batchsim.`."""


@cache
def _entries() -> dict[str, list[tuple[str, str, str]]]:
    """By group the (name, `module:attribute`, package with its version) of each entry point."""
    from importlib.metadata import distributions  # which takes longer to import than most checks of a scenario

    entries: dict[str, list[tuple[str, str, str]]] = {group: [] for group in GROUPS}
    seen = set[str]()
    for package in distributions():
        name = str(package.metadata["Name"])
        if name.lower() in seen:  # an older copy of it, further down the path
            continue
        seen.add(name.lower())
        for entry in package.entry_points:
            prefix, _, group = entry.group.partition(".")
            if prefix == "batchsim" and group in entries:
                entries[group].append((entry.name, entry.value, f"{name} {package.version}"))
    return {group: sorted(each) for group, each in entries.items()}


def installed(group: str, shipped: Collection[str] = ()) -> dict[str, str]:
    """`module:attribute` by the name that an installed package gave it in a group of GROUPS.

    ScenarioError for a name that is among the `shipped` ones of that group, or that two packages give.
    """
    targets, packages = dict[str, str](), dict[str, str]()
    for name, target, package in _entries()[group]:
        other = "batchsim itself" if name in shipped else packages.get(name)
        if other is not None:
            raise ScenarioError(
                f"{cut(package)} adds the name {cut(name)} to batchsim.{group}, which {cut(other)} has too. Uninstall"
                " it, or have it renamed there."
            )
        targets[name], packages[name] = target, package
    return targets


def is_installed(target: str) -> bool:
    """Whether an installed package gave a name to `target`, a `module:attribute`."""
    return any(target == each for entries in _entries().values() for _, each, _ in entries)


def of_package(target: str) -> str:
    """ " of NAME VERSION", the package that gave `target` a name; "" if none did."""
    packages = [package for entries in _entries().values() for _, each, package in entries if each == target]
    return f" of {cut(packages[0])}" if packages else ""
