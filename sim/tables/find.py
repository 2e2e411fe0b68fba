"""The profile of a deployment: shipped, kept from before, or built of the kernel tables where they are installed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

from batchsim.base.errors import CalibrationError
from batchsim.base.files import read_text, write_text
from batchsim.base.plain import to_plain
from batchsim.cost.profile import Profile, load_profile, profile_names, work_of
from batchsim.deployment.deployment import Deployment
from batchsim.tables.build import BUILDER, build_profile, marks_of, name_of, setup_of
from batchsim.tables.check import checked
from batchsim.tables.compare import held_out, within
from batchsim.tables.handle import Tables, holes_told
from batchsim.tables.modes import PACKAGE, WAYS_OUT
from batchsim.tables.versions import nearest_version, number_of, version


def profile_of(deployment: Deployment, *, cache_folder: Path | None = None) -> Profile:
    """The step costs of `deployment`, of the model's work as it is shaped, whatever its name.

    The shipped profile of the version asked for (any version, if none is asked for); else, with `aiconfigurator-core`,
    the one in `cache_folder` (default: `batchsim` in the user's cache), else one built now and kept there; else the
    shipped profile of the nearest version of the engine. Its `setup.version` says which version it is of, and where
    that is not the one asked for, its notes do too. Its `model` is the deployment's.

    CalibrationError, in one line with the ways out, if there is none and the tables are not installed or do not answer.
    """
    profile = _known_profile(deployment, cache_folder)
    version_of, asked = profile.setup.version if profile.setup else "", deployment.version
    other = asked and asked != version_of and not version_of.startswith(f"{asked}.")
    note = (
        f"{deployment.engine} {asked} was asked for; of the versions with kernel tables {version_of} is the nearest",
    )
    return replace(profile, model=deployment.model, notes=profile.notes + (note if other else ()))


def _known_profile(deployment: Deployment, folder: Path | None) -> Profile:
    """`profile_of` as it was made: with a model of another name, maybe."""
    shipped = {profile.setup.version: profile for profile in _shipped_of(deployment) if profile.setup}
    asked = deployment.version
    exact = [known for known in shipped if not asked or known == asked or known.startswith(f"{asked}.")]
    if exact:
        return shipped[exact[0]]
    if version() is not None:
        return _built(deployment, user_cache() if folder is None else folder)
    if shipped:
        return shipped[nearest_version(asked, list(shipped))]
    gpu = "its GPU" if deployment.gpu is None else deployment.gpu.name
    raise CalibrationError(
        f"deployment: no profile of {deployment.model.name} on {gpu}, {setup_of(deployment, asked)}, comes with"
        f" batchsim, and the kernel tables are not installed. pip install 'batchsim[gpus]'. {_nearest(deployment)}"
        f" {WAYS_OUT}"
    )


def user_cache() -> Path:
    """The folder of the user's cache for profiles, by the rules of the XDG base directories."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchsim" / "profiles"


def key_of(deployment: Deployment) -> str:
    """A digest of all that shapes a profile: the model's work, its reach, the setup, the tables and the builder."""
    gpu = None if deployment.gpu is None else deployment.gpu.name
    shape = {
        "work": work_of(deployment.model),
        "type": deployment.model.model_type,  # picks one of several graphs of kernels
        "positions": deployment.model.max_position_embeddings,
        "gpu": gpu,
        "setup": to_plain(setup_of(deployment, deployment.version)),
        "tables": f"{PACKAGE} {version()}",
        "builder": BUILDER,
    }
    shape |= {"experts": "apart"} if deployment.dp_attention > 1 else {}  # as they were not kept at first
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def build(deployment: Deployment) -> Profile:
    """The profile of `deployment` made now of the installed tables, and held against them. NoTablesError without."""
    tables = Tables(deployment)
    with holes_told(tables):
        profile = build_profile(tables)
        errors = held_out(profile, tables)
        faults, note = checked(tables)
    compared = replace(profile, held_out=errors, checks=faults, notes=(*profile.notes, note))
    if within(compared):
        return compared
    far = f"one step in twenty misses what the tables sum by {errors['p95']:.0%} or more: their attention is not of a"
    return replace(compared, notes=(*compared.notes, f"{far} form that a profile holds"))


def _built(deployment: Deployment, folder: Path) -> Profile:
    """The kept profile, else one made now. A file that cannot be read is made anew, and a folder that cannot be written
    is no reason not to answer."""
    path = folder / f"{key_of(deployment)}.json"
    try:
        return Profile.from_json(read_text(path), str(path))
    except (OSError, ValueError, CalibrationError):
        profile = build(deployment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, profile.to_json())
    except OSError:
        pass
    return profile


def _nearest(deployment: Deployment) -> str:
    """A sentence that names the shipped profiles most like the deployment's, three at most, by their names.

    The model counts more than the GPU, the GPU more than the engine, and that more than degrees and types.
    """
    gpu = "" if deployment.gpu is None else deployment.gpu.name
    slug, _, _ = name_of(deployment, "").partition(f"-{gpu}-")
    own = set(marks_of(setup_of(deployment, "")))

    def distance(name: str) -> tuple[bool, bool, bool, int, str]:
        _, engine, rest = name.partition(f"-{deployment.engine}-")
        other_gpu = f"-{gpu}-" not in name
        return not name.startswith(f"{slug}-"), other_gpu, not engine, len(own ^ set(rest.split("-")[1:])), name

    return f"The nearest that come with batchsim: {', '.join(sorted(profile_names(), key=distance)[:3])}."


def _shipped_of(deployment: Deployment) -> list[Profile]:
    """The shipped profiles of the deployment, one for each version of its engine, the newest first."""
    gpu, asked, work = deployment.gpu, setup_of(deployment, ""), work_of(deployment.model)
    if gpu is None:
        return []
    marks, by_version = "-".join(marks_of(asked)), dict[str, Profile]()
    for name in profile_names():
        _, _, rest = name.partition(f"-{gpu.name}-{asked.engine}-")
        backend, _, own = rest.partition("-")
        if backend and own == marks and work_of((profile := load_profile(name)).model) == work:
            by_version[backend] = profile
    return [by_version[backend] for backend in sorted(by_version, key=number_of, reverse=True)]
