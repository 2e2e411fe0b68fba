"""A scenario: the YAML file, its checks, and the points it asks to run."""

from typing import TYPE_CHECKING, Any

from batchsim.scenario.load import load_scenario

if TYPE_CHECKING:
    from batchsim.scenario.config import KvConfig, LoadConfig, Point, PolicySpec, Scenario
    from batchsim.scenario.parse import changed

__all__ = [
    "KvConfig",
    "LoadConfig",
    "Point",
    "PolicySpec",
    "Scenario",
    "changed",
    "load_scenario",
]


def __getattr__(name: str) -> Any:
    """The others, imported when one is read first: a scenario that is not there is refused without them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from batchsim.scenario import config, parse

    return getattr(parse if name == "changed" else config, name)
