"""The batching policies. One explicit table: name -> (config, policy)."""

from batchsim.policies.families.aimd import Aimd, AimdConfig
from batchsim.policies.families.continuous import Continuous, ContinuousConfig
from batchsim.policies.families.dynamic import Dynamic, DynamicConfig
from batchsim.policies.families.energy_aware import EnergyAware, EnergyAwareConfig
from batchsim.policies.families.exclusive import Exclusive, ExclusiveConfig
from batchsim.policies.families.gated import Gated, GatedConfig
from batchsim.policies.families.memory_seqs import MemorySeqs, MemorySeqsConfig
from batchsim.policies.families.preemptive import Preemptive, PreemptiveConfig
from batchsim.policies.families.static import Static, StaticConfig
from batchsim.policies.families.tbt_feedback import TbtFeedback, TbtFeedbackConfig
from batchsim.policies.families.tbt_model import TbtModel, TbtModelConfig
from batchsim.policies.systems.clipper import Clipper, ClipperConfig
from batchsim.policies.systems.clockwork import Clockwork, ClockworkConfig
from batchsim.policies.systems.faster_transformer import FasterTransformer, FasterTransformerConfig
from batchsim.policies.systems.hf_static import HfStatic, HfStaticConfig
from batchsim.policies.systems.llama_cpp.llama_cpp import LlamaCpp
from batchsim.policies.systems.llama_cpp.llama_cpp_config import LlamaCppConfig
from batchsim.policies.systems.nexus import Nexus, NexusConfig
from batchsim.policies.systems.ray_serve import RayServe, RayServeConfig
from batchsim.policies.systems.sglang.sglang_config import SglangConfig
from batchsim.policies.systems.sglang.sglang_drafts import SglangWithDrafts
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_config import TensorrtLlmConfig
from batchsim.policies.systems.tensorrt_llm.tensorrt_llm_drafts import TensorrtLlmWithDrafts
from batchsim.policies.systems.tf_adaptive import TfAdaptive, TfAdaptiveConfig
from batchsim.policies.systems.tf_serial_device import TfSerialDevice, TfSerialDeviceConfig
from batchsim.policies.systems.tf_serving import TfServing, TfServingConfig
from batchsim.policies.systems.tgi.tgi import Tgi
from batchsim.policies.systems.tgi.tgi_config import TgiConfig
from batchsim.policies.systems.triton.triton import Triton, TritonConfig
from batchsim.policies.systems.vidur.orca import Orca, OrcaConfig
from batchsim.policies.systems.vidur.sarathi import Sarathi, SarathiConfig
from batchsim.policies.systems.vidur.vllm_v0 import VllmV0, VllmV0Config
from batchsim.policies.systems.vllm.vllm_config import VllmConfig
from batchsim.policies.systems.vllm.vllm_drafts import VllmWithDrafts
from batchsim.policies.systems.vllm.vllm_neuron import VllmNeuron, VllmNeuronConfig

POLICIES = {
    "static": (StaticConfig, Static),
    "dynamic": (DynamicConfig, Dynamic),
    "continuous": (ContinuousConfig, Continuous),
    "preemptive": (PreemptiveConfig, Preemptive),
    "gated": (GatedConfig, Gated),
    "energy_aware": (EnergyAwareConfig, EnergyAware),
    "vllm": (VllmConfig, VllmWithDrafts),
    "vllm_neuron": (VllmNeuronConfig, VllmNeuron),
    "orca": (OrcaConfig, Orca),
    "sarathi": (SarathiConfig, Sarathi),
    "vllm_v0": (VllmV0Config, VllmV0),
    "faster_transformer": (FasterTransformerConfig, FasterTransformer),
    "hf_static": (HfStaticConfig, HfStatic),
    "sglang": (SglangConfig, SglangWithDrafts),
    "tensorrt_llm": (TensorrtLlmConfig, TensorrtLlmWithDrafts),
    "tgi": (TgiConfig, Tgi),
    "llama_cpp": (LlamaCppConfig, LlamaCpp),
    "ray_serve": (RayServeConfig, RayServe),
    "tf_serving": (TfServingConfig, TfServing),
    "triton": (TritonConfig, Triton),
    "clipper": (ClipperConfig, Clipper),
    "aimd": (AimdConfig, Aimd),
    "clockwork": (ClockworkConfig, Clockwork),
    "nexus": (NexusConfig, Nexus),
    "adaptive_shared_batch": (TfAdaptiveConfig, TfAdaptive),
    "serial_device_batch": (TfSerialDeviceConfig, TfSerialDevice),
    "tbt_model": (TbtModelConfig, TbtModel),
    "tbt_feedback": (TbtFeedbackConfig, TbtFeedback),
    "memory_seqs": (MemorySeqsConfig, MemorySeqs),
    "exclusive": (ExclusiveConfig, Exclusive),
}
