"""Which systems, engines and versions the kernel tables have, by our names."""

from __future__ import annotations

from batchsim.base.errors import nearest
from batchsim.deployment.deployment import Deployment
from batchsim.deployment.model import GpuSpec
from batchsim.tables.modes import PACKAGE, WAYS_OUT, NoTablesError

ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm"}
"""The tables' names of engines by ours."""
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "a100": "a100_sxm"}
"""The tables' names of GPUs by ours, where they differ."""


def version() -> str | None:
    """The installed version of the package; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    try:
        return of(PACKAGE)
    except PackageNotFoundError:
        return None


def system_of(deployment: Deployment) -> str:
    """The tables' name of the deployment's GPU. NoTablesError if it is none of the catalog."""
    gpu = deployment.gpu
    if gpu is None:
        raise NoTablesError("deployment: its GPU is not in the catalog, and there are no kernel tables of it.")
    return SYSTEMS.get(gpu.name, gpu.name)


def engine_of(deployment: Deployment) -> str:
    """The tables' name of the deployment's engine. NoTablesError if there are no tables of it."""
    if deployment.engine not in ENGINES:
        advice = nearest(deployment.engine.lower(), ENGINES, f"Known are {', '.join(ENGINES)}.")
        raise NoTablesError(f"deployment.engine: there are no kernel tables of {deployment.engine!r}. {advice}")
    return ENGINES[deployment.engine]


def has_tables(gpu: GpuSpec, engine: str) -> bool:
    """Whether kernels of the engine were timed on the GPU."""
    return bool(_versions(SYSTEMS.get(gpu.name, gpu.name), ENGINES[engine]))


def _versions(system: str, engine: str) -> list[str]:
    """The versions of the engine whose kernels were timed on the system, the tables' own choice first."""
    from aiconfigurator_core.sdk.perf_database import get_version_slots  # pyright: ignore[reportMissingImports]

    slots = get_version_slots(system, engine) or {}
    return list(dict.fromkeys(slots[slot] for slot in ("current", "previous", "next") if slots.get(slot)))


def versions_for(deployment: Deployment) -> list[str]:
    """The versions whose tables may answer: the one nearest to the deployment's, then newer ones, in order.

    Tables of kernels that an engine got later (block-sparse attention, KDA under SGLang) are those of a newer version
    alone. NoTablesError if there is none.
    """
    known = _versions(system_of(deployment), engine_of(deployment))
    if not known:
        assert deployment.gpu is not None
        raise NoTablesError(
            f"deployment: {PACKAGE} has no kernel tables of {deployment.engine} on {deployment.gpu.name}. {WAYS_OUT}"
        )
    first = nearest_version(deployment.version, known)
    return [first, *sorted((each for each in known if number_of(each) > number_of(first)), key=number_of)]


def nearest_version(asked: str, known: list[str]) -> str:
    """Of the versions `known` the one that begins as `asked` does, else the nearest by number; "": the first."""
    if not asked or asked in known:
        return asked or known[0]
    for each in known:
        if each.startswith(f"{asked}."):
            return each
    return min(known, key=lambda each: abs(number_of(each) - number_of(asked)))


def number_of(version: str) -> int:
    """A number that grows with the version: its first three parts, zeros where there are none."""
    parts = [int("".join(filter(str.isdigit, part.partition("rc")[0])) or 0) for part in version.split(".")]
    first, second, third = (*parts, 0, 0, 0)[:3]
    return (first * 1_000 + second) * 1_000 + third
