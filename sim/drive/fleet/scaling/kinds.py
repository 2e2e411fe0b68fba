"""All kinds of autoscaler a scenario may name."""

from __future__ import annotations

from batchsim.drive.fleet.scaling.dynamo_planner import DynamoPlannerConfig
from batchsim.drive.fleet.scaling.hpa import HpaConfig
from batchsim.drive.fleet.scaling.keda import KedaConfig
from batchsim.drive.fleet.scaling.thresholds import KvScaler, QueueScaler

Scaler = QueueScaler | KvScaler | HpaConfig | KedaConfig | DynamoPlannerConfig
