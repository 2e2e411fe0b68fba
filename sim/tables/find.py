"""The profile of a deployment."""

from __future__ import annotations

from batchsim.base.errors import CalibrationError
from batchsim.cost.profile import Profile, load_profile, profile_names
from batchsim.deployment.deployment import Deployment


def profile_of(deployment: Deployment) -> Profile:
    """The shipped profile of `deployment`. CalibrationError if there is none."""
    for profile in map(load_profile, profile_names()):
        if profile.deployment == deployment:
            return profile
    assert deployment.gpu is not None, "profiles are of GPUs"
    raise CalibrationError(
        f"there is no profile of {deployment.model.name} on {deployment.gpu.name} under {deployment.engine}."
        " pip install 'batchsim[gpus]' builds one; or write gpu: {kind: sheet, ...}, cost: {kind: linear, ...} with"
        " kv.tokens, or cost: the profile of an engine of your own."
    )
