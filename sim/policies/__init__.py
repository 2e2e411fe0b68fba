"""The batching policies. One explicit table: name -> (config, policy)."""

from sim.policies.continuous import Continuous, ContinuousConfig
from sim.policies.dynamic import Dynamic, DynamicConfig
from sim.policies.gated import Gated, GatedConfig
from sim.policies.preemptive import Preemptive, PreemptiveConfig
from sim.policies.static import Static, StaticConfig
from sim.policies.systems.faster_transformer import FasterTransformer, FasterTransformerConfig
from sim.policies.systems.hf_static import HfStatic, HfStaticConfig
from sim.policies.systems.orca import Orca, OrcaConfig
from sim.policies.systems.ray_serve import RayServe, RayServeConfig
from sim.policies.systems.sarathi import Sarathi, SarathiConfig
from sim.policies.systems.sglang import Sglang, SglangConfig
from sim.policies.systems.tensorrt_llm import TensorrtLlm
from sim.policies.systems.tf_serving import TfServing, TfServingConfig
from sim.policies.systems.tgi import Tgi
from sim.policies.systems.tgi_config import TgiConfig
from sim.policies.systems.triton import Triton, TritonConfig
from sim.policies.systems.trt_config import TensorrtLlmConfig
from sim.policies.systems.vllm import Vllm, VllmConfig
from sim.policies.systems.vllm_v0 import VllmV0, VllmV0Config

POLICIES = {
    "static": (StaticConfig, Static),
    "dynamic": (DynamicConfig, Dynamic),
    "continuous": (ContinuousConfig, Continuous),
    "preemptive": (PreemptiveConfig, Preemptive),
    "gated": (GatedConfig, Gated),
    "vllm": (VllmConfig, Vllm),
    "orca": (OrcaConfig, Orca),
    "sarathi": (SarathiConfig, Sarathi),
    "vllm_v0": (VllmV0Config, VllmV0),
    "faster_transformer": (FasterTransformerConfig, FasterTransformer),
    "hf_static": (HfStaticConfig, HfStatic),
    "sglang": (SglangConfig, Sglang),
    "tensorrt_llm": (TensorrtLlmConfig, TensorrtLlm),
    "tgi": (TgiConfig, Tgi),
    "ray_serve": (RayServeConfig, RayServe),
    "tf_serving": (TfServingConfig, TfServing),
    "triton": (TritonConfig, Triton),
}
