"""`shapes:` of a cost or a deployment: which programs an engine on compiled shapes has.

Sources of the presets, with the defaults of their engines:

    neuron         vLLM Neuron for Trainium 2 and 3, aws-neuron-sdk @ a3247f5b, vllm-neuron/docs/design/vllm
    nxdi           NxD Inference, neuronx-distributed-inference @ 4bcdc54, models/config.py and model_wrapper.py
    tpu            tpu-inference 0.32.0, runner/utils.py and runner/compilation_manager.py
    gaudi          vllm-gaudi @ 091bbadd, extension/bucketing and v1/worker/hpu_model_runner.py
    cuda_graphs    vLLM's config/vllm.py, `_set_cudagraph_sizes`
    sglang_graphs  SGLang 0.5.23, arg_groups/cuda_graph_hook.py
    lists          none: lists of the user's own
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Annotated, Literal

from batchsim.base.errors import ScenarioError
from batchsim.base.ranges import Config, NonNegativeInt, PositiveInt, Range
from batchsim.base.units import HostDuration, PartDuration, Share, Size, percent
from batchsim.cost.shapes.gaudi import GaudiEngine
from batchsim.cost.shapes.lists import grid, pow2, pow2_round, sglang_graph_sizes, tpu_tokens, vllm_graph_sizes
from batchsim.cost.shapes.programs import Phase, Shapes

Preset = Literal["neuron", "nxdi", "tpu", "gaudi", "cuda_graphs", "sglang_graphs", "lists"]
MAX_PROGRAMS = 100_000
"""Programs of a phase at most: more are no list that a device could compile."""
_ANY = {"preset", "warmup_per_program", "memory_per_program"}
_COLD = {"compile", "warm"}
KNOBS = {
    "neuron": _ANY | {"tokens", "requests", "context"},
    "nxdi": _ANY | {"tokens", "requests", "context"},
    "tpu": _ANY | _COLD | {"tokens", "gap"},
    "gaudi": _ANY | _COLD | {"strategy", "prompts", "contiguous", "graph_memory"},
    "cuda_graphs": _ANY | {"tokens", "eager"},
    "sglang_graphs": _ANY | {"requests", "eager"},
    "lists": _ANY | _COLD | {"tokens", "requests", "context", "mix", "beyond", "eager"},
}
"""The keys that each preset reads."""
_SOURCES = {
    "neuron": "vLLM Neuron, aws-neuron-sdk @ a3247f5b",
    "nxdi": "NxD Inference @ 4bcdc54",
    "tpu": "tpu-inference 0.32.0",
    "gaudi": "vllm-gaudi @ 091bbadd",
    "cuda_graphs": "vLLM's graph sizes",
    "sglang_graphs": "SGLang 0.5.23's graphs of decodes",
    "lists": "as stated in the scenario",
}
Sizes = tuple[PositiveInt, ...]


@dataclass(frozen=True)
class EngineSizes:
    """What default lists depend on: the policy's limits (None: it has none), the longest sequence, the KV memory."""

    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True)
class ShapesConfig(Config):
    """Compiled shapes: steps are padded to buckets and cost what these cost.

    Every list ascends, and a default one follows from the policy's limits and max_model_len by the engine's rule.
    """

    preset: Preset
    """The engine whose rules hold: neuron, nxdi, tpu, gaudi, cuda_graphs (vLLM's), sglang_graphs, or lists."""
    tokens: Sizes | None = None
    """Buckets of tokens: of the prompt of a step (neuron, nxdi, lists), of the whole step (tpu, cuda_graphs, lists with
    mix)."""
    requests: Sizes | None = None
    """Buckets of decoding requests (neuron, nxdi, sglang_graphs, lists)."""
    context: Sizes | None = None
    """Buckets of the context of the longest decode (neuron, nxdi, lists). Of neuron without them every decode reads
    max_model_len tokens; of lists its own."""
    gap: NonNegativeInt = 0
    """Of tpu: tokens between buckets, from where doubling would leave more; 0: they double."""
    strategy: Literal["exp", "lin"] = "exp"
    """Of gaudi: whether its lists are exponential or linear."""
    prompts: PositiveInt = 1
    """Of gaudi: prompts in one program at most."""
    contiguous: bool = False
    """Of gaudi: whether decodes read the KV pool in one piece, as they do without a prefix cache."""
    mix: bool = False
    """Of lists: whether prompts and decodes run in one program, whose `tokens` are those of all."""
    beyond: Literal["error", "exact", "compile"] = "error"
    """Of lists: how a step that fits no bucket is treated: an error, run as it is, or its program compiled."""
    warm: bool = True
    """Whether all programs are compiled before the first request, or each when a step first needs it (tpu, gaudi,
    lists)."""
    compile: HostDuration | None = None
    """What the compilation of a program takes while a step waits for it."""
    eager: PartDuration = 0
    """What a step without a program takes longer than one with it (cuda_graphs, lists; of sglang_graphs decodes alone,
    since prompts have none)."""
    warmup_per_program: HostDuration = 0
    """What compiling or loading a program takes before the first request; reported, no request waits for it."""
    memory_per_program: Size = 0
    """Memory of each GPU that a program keeps, which is missing for KV."""
    graph_memory: Annotated[Share, Range(0, 1, below=True, show=percent)] | None = None
    """Of gaudi: part of the derived KV memory that captured graphs keep; 10% unless given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        stated = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if foreign := [name for name in stated if name not in KNOBS[self.preset]]:
            has = ", ".join(sorted(KNOBS[self.preset] - {"preset"}))
            raise ValueError(f"{foreign[0]} is not read with preset {self.preset}, which has {has}. Leave it out")
        for name in ("tokens", "requests", "context"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or list(sizes) != sorted(set(sizes))):
                raise ValueError(f"{name} {list(sizes)} must hold at least one size, each above the one before")
        needs = not self.warm or self.beyond == "compile" or self.preset == "gaudi"
        if needs and self.compile is None:
            why = "gaudi compiles" if self.preset == "gaudi" else "there are programs to compile"
            raise ValueError(f"compile is missing: {why} while requests wait. State how long, like 20s")
        if self.compile is not None and not needs:
            raise ValueError("compile has no effect: all programs are compiled before. Write warm: false, or drop it")
        if self.preset == "lists" and (self.tokens is None or (self.requests is None and not self.mix)):
            lacking = "tokens" if self.tokens is None else "requests"
            raise ValueError(f"{lacking} is missing: preset lists has no list of its own. State its buckets")
        if self.preset == "lists" and self.mix and (self.requests or self.context):
            given = "requests" if self.requests else "context"
            raise ValueError(f"{given} has no effect with mix: every step runs in a program of tokens. Leave it out")
        if self.eager and self.preset == "lists" and self.beyond != "exact":
            raise ValueError(f"eager has no effect with beyond: {self.beyond}. Write beyond: exact, or leave it out")

    def build(self, engine: EngineSizes) -> Shapes:
        """The programs of an engine. ScenarioError, in one line, where its limits and the lists do not go together."""
        prefill, decode, mixed = getattr(self, f"_{self.preset}")(engine)
        apart = self.prompts if self.preset == "gaudi" else 0
        shapes = Shapes(self.preset, prefill, decode, mixed, apart, source=_SOURCES[self.preset])
        return replace(
            shapes,
            compile_ns=self.compile or 0,
            is_warm=self.warm,
            warmup_ns=int(self.warmup_per_program) * shapes.num_programs if self.warm else 0,
            memory_bytes=self.memory_per_program * shapes.num_programs,
            eager_ns=self.eager,
        )

    # ---- the rules of engines

    def _neuron(self, engine: EngineSizes) -> tuple[Phase, Phase, None]:
        seqs = self._limit(engine, "max_num_seqs")
        most = min(self._limit(engine, "max_num_batched_tokens"), engine.max_model_len)
        tokens = list(self.tokens or pow2(min(128, most), most))
        requests = list(self.requests or pow2(1, seqs))
        self._check_last("tokens", tokens, most, "the least of max_num_batched_tokens and max_model_len")
        self._check_last("requests", requests, seqs, "max_num_seqs")
        prefill = Phase(("requests", "query"), tuple(grid([1], tokens)))
        if self.context is None:
            return prefill, Phase(("requests",), tuple(grid(requests)), read_tokens=engine.max_model_len), None
        if self.context[-1] >= engine.max_model_len or any(size % 128 for size in self.context):
            raise ScenarioError(
                f"shapes neuron: context {list(self.context)} must be multiples of 128 below max_model_len"
                f" {engine.max_model_len}, which is the last bucket itself. Correct it."
            )
        lengths = [*self.context, engine.max_model_len]
        return prefill, Phase(("requests", "longest"), tuple(grid(requests, lengths))), None

    def _nxdi(self, engine: EngineSizes) -> tuple[Phase, Phase, None]:
        seqs, most = self._limit(engine, "max_num_seqs"), engine.max_model_len
        tokens = list(self.tokens or pow2_round(min(128, most), most))
        context = list(self.context or pow2_round(min(128, most), most))
        requests = sorted({*(self.requests or ()), seqs})
        for name, sizes, limit, what in (
            ("tokens", tokens, most, "max_model_len"),
            ("context", context, most, "max_model_len"),
            ("requests", requests, seqs, "max_num_seqs"),
        ):
            if sizes[-1] > limit:
                raise ScenarioError(
                    f"shapes nxdi: {name} ends with {sizes[-1]}, above {what} {limit}. Lower it, or raise {what}."
                )
        prefill = Phase(("requests", "longest"), tuple(grid([1], tokens)), above=True)
        return prefill, Phase(("requests", "longest"), tuple(grid(requests, context)), above=len(requests) == 1), None

    def _tpu(self, engine: EngineSizes) -> tuple[Phase, Phase, Phase]:
        budget = self._limit(engine, "max_num_batched_tokens")
        sizes = sorted({*tpu_tokens(16, budget, self.gap), *(self.tokens or ())})
        phase = Phase(("tokens",), tuple(grid(sizes)))
        return phase, phase, phase

    def _cuda_graphs(self, engine: EngineSizes) -> tuple[Phase, Phase, Phase]:
        seqs, budget = self._limit(engine, "max_num_seqs"), self._limit(engine, "max_num_batched_tokens")
        phase = Phase(("tokens",), tuple(grid(self.tokens or vllm_graph_sizes(seqs, budget))), "exact")
        return phase, phase, phase

    def _sglang_graphs(self, engine: EngineSizes) -> tuple[Phase, Phase, Phase]:
        eager = Phase(("tokens",), (), "exact")
        requests = self.requests or sglang_graph_sizes(self._limit(engine, "max_num_seqs"))
        return eager, Phase(("requests",), tuple(grid(requests)), "exact"), eager

    def _gaudi(self, engine: EngineSizes) -> tuple[Phase, Phase, None]:
        gaudi = GaudiEngine(
            self._limit(engine, "max_num_seqs"),
            self._limit(engine, "max_num_batched_tokens"),
            engine.max_model_len,
            engine.num_blocks,
            engine.block_size,
            self.prompts,
            self.strategy,
            self.contiguous,
        )
        if gaudi.max_num_batched_tokens < engine.block_size:
            raise ScenarioError(
                f"shapes gaudi: max_num_batched_tokens {gaudi.max_num_batched_tokens} is below a block of"
                f" {engine.block_size}, the smallest query. Raise it."
            )
        if (count := prod(map(len, gaudi.lists()))) > MAX_PROGRAMS:
            raise ScenarioError(
                f"shapes gaudi: {count:,} combinations of batches, queries and contexts, and {MAX_PROGRAMS:,} are the"
                " most. Take strategy: exp, or fewer prompts a program."
            )
        prompts, decodes = tuple(gaudi.prompts()), tuple(gaudi.decodes())
        prefill = Phase(("requests", "query", "blocks"), prompts, "compile", rounded=gaudi.prompt_beyond)
        return prefill, Phase(("requests", "blocks"), decodes, "compile", rounded=gaudi.decode_beyond), None

    def _lists(self, engine: EngineSizes) -> tuple[Phase, Phase, Phase | None]:
        assert self.tokens is not None, "checked in __post_init__"
        if self.mix:
            phase = Phase(("tokens",), tuple(grid(self.tokens)), self.beyond)
            return phase, phase, phase
        assert self.requests is not None, "checked in __post_init__"
        prefill = Phase(("tokens",), tuple(grid(self.tokens)), self.beyond)
        if self.context is None:
            return prefill, Phase(("requests",), tuple(grid(self.requests)), self.beyond), None
        return prefill, Phase(("requests", "longest"), tuple(grid(self.requests, self.context)), self.beyond), None

    def _limit(self, engine: EngineSizes, name: str) -> int:
        limit = getattr(engine, name)
        if limit is None:
            raise ScenarioError(
                f"shapes {self.preset}: its lists follow from {name}, and this policy has none. Take a policy that has,"
                " or preset: lists."
            )
        return limit

    def _check_last(self, name: str, sizes: list[int], last: int, what: str) -> None:
        if sizes[-1] != last:
            raise ScenarioError(
                f"shapes {self.preset}: {name} ends with {sizes[-1]}, and the last must be {last}, {what}. Set it so."
            )
