"""Models and GPUs known by name, with the source of every figure (`models.py`, `gpus.py`)."""

from batchsim.deployment.gpus import ACCELERATORS, GPUS, load_gpu, sheet_gpu
from batchsim.deployment.models import (
    MODEL_SOURCES,
    MODELS,
    checkpoint_names,
    hugging_face_id,
    load_model,
    read_model,
)

__all__ = [
    "ACCELERATORS",
    "GPUS",
    "MODELS",
    "MODEL_SOURCES",
    "checkpoint_names",
    "hugging_face_id",
    "load_gpu",
    "load_model",
    "read_model",
    "sheet_gpu",
]
