"""All kinds of autoscaler a scenario may name."""

from __future__ import annotations

from batchsim.drive.fleet.scaling.hpa import HpaConfig
from batchsim.drive.fleet.scaling.thresholds import KvScaler, QueueScaler

Scaler = QueueScaler | KvScaler | HpaConfig
