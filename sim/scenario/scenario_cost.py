"""What a scenario's `cost` may be once it is read: a deployment too, which is written `deployment:`, and a fit's."""

from typing import TYPE_CHECKING

from batchsim.base.reading import one_of
from batchsim.cost.kinds import COSTS

if TYPE_CHECKING:
    from batchsim.cost.kinds import CostConfig
    from batchsim.scenario.deployment_config import DeploymentConfig
    from batchsim.scenario.fitted_config import FittedConfig

    ScenarioCost = CostConfig | DeploymentConfig | FittedConfig
else:
    ScenarioCost = one_of(
        COSTS
        | {
            "deployment": "batchsim.scenario.deployment_config:DeploymentConfig",
            "fitted": "batchsim.scenario.fitted_config:FittedConfig",
        }
    )
