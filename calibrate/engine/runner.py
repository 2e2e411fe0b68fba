"""A model on its device, ready to run steps: weights, KV cache, staging and CUDA graphs. Costly to build, so shared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from batchsim.base.errors import CalibrationError
from batchsim.calibrate.engine.architecture import Architecture, load_architecture
from batchsim.calibrate.engine.backend import SPARE_BLOCKS, SdpaBackend
from batchsim.calibrate.engine.failures import device_errors
from batchsim.calibrate.engine.footprint import StepLimits, check_limits, check_memory, find_device, step_bytes
from batchsim.calibrate.engine.graphs import DecodeGraphs, bucket_of, buckets_for, filled
from batchsim.calibrate.engine.inputs import StepInputs
from batchsim.calibrate.engine.sampling import GREEDY, Sampling, sample
from batchsim.calibrate.engine.staging import Staging, table_width
from batchsim.calibrate.engine.swap import Moves, SwapPool
from batchsim.calibrate.engine.transformer import DeviceInputs, Reads, Transformer
from batchsim.calibrate.engine.weights import Weights, load_weights, random_weights
from batchsim.deployment.model import ModelSpec


@dataclass(frozen=True, slots=True)
class StepTimes:
    """ns that a step took: its kernels (layers, logits, sampling) on the device, and the host's part, all the rest."""

    kernel_ns: int
    host_ns: int


@dataclass(frozen=True)
class _Loaded:
    """A step whose inputs lie on the device; `bucket` is the size of its graph, None: it runs without one."""

    inputs: DeviceInputs
    bucket: int | None
    num_rows: int


class ModelRunner:
    """Runs steps on one device, from one thread. KV that a step stores stays for the steps after it.

    `weights` says where the weights come from; `eos_token_ids` is empty where the model's files name none.
    """

    def __init__(
        self,
        transformer: Transformer,
        limits: StepLimits,
        *,
        num_swap_blocks: int = 0,
        graphs: bool = False,
    ) -> None:
        spec, kv = transformer.architecture.spec, transformer.kv
        self.spec: ModelSpec = spec
        self.device: torch.device = kv.device
        self.backend: SdpaBackend = transformer.backend
        self.num_blocks: int = kv.shape[2] - SPARE_BLOCKS
        self.block_size: int = kv.shape[3]
        self.num_swap_blocks = num_swap_blocks
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.max_model_len = limits.max_model_len
        self.graph_buckets: tuple[int, ...] = buckets_for(limits.max_num_seqs) if graphs else ()
        self.weights: str = transformer.weights.origin
        self.eos_token_ids = transformer.architecture.eos_token_ids
        self._transformer = transformer
        self._head = transformer.weights.head
        self._swap_pool = SwapPool(kv, num_swap_blocks) if num_swap_blocks else None
        self._loaded: _Loaded | None = None
        rows = max(limits.max_num_seqs, *self.graph_buckets, 1)
        blocks = -(-limits.max_model_len // self.block_size)
        self._staging = Staging(max(limits.max_num_batched_tokens, rows), rows, blocks, self.device)
        on_cuda = self.device.type == "cuda"
        self._tokens = torch.zeros(rows, dtype=torch.int64, pin_memory=on_cuda)
        if graphs:
            # Of one width, since a graph keeps it; a step writes the columns it needs.
            bucket = max(self.graph_buckets)
            self._tables = torch.zeros(bucket, table_width(blocks), dtype=torch.int32, device=self.device)
            self._logits = torch.empty(bucket, spec.vocab_size, dtype=kv.dtype, device=self.device)
            with torch.inference_mode(), device_errors("capturing CUDA graphs"):
                self._graphs = DecodeGraphs(self._place, self._run_in_place, self.graph_buckets)
        if on_cuda:
            self._warm_up()

    def _warm_up(self) -> None:
        """Compiles the kernels of chunks and takes the memory of the largest step, so that no later step has to."""
        longest = min(self.max_model_len, self.max_num_batched_tokens)
        full, rest = divmod(self.max_num_batched_tokens, longest)
        lens = ([longest] * full + [rest] * (rest > 0))[: self.max_num_seqs]
        self.step(StepInputs.padding(0, lens, block_size=self.block_size))
        if self.max_num_seqs > 1 and self.max_num_batched_tokens > 2:
            self.step(StepInputs.padding(1, [2], block_size=self.block_size))

    # ---- a step

    def synthetic(self, decodes: Sequence[int], chunks: Sequence[tuple[int, int]], seed: int = 0) -> StepInputs:
        """A step of random tokens that fits this runner; see `StepInputs.synthetic`."""
        sizes = {"block_size": self.block_size, "num_blocks": self.num_blocks, "vocab_size": self.spec.vocab_size}
        return StepInputs.synthetic(decodes, chunks, **sizes, seed=seed)

    def step(self, inputs: StepInputs, sampling: Sampling = GREEDY) -> tuple[list[int], StepTimes]:
        """(the next token of every sequence of the step, the step's times). ExecutorError if the device fails."""
        start_ns = time.perf_counter_ns()
        with torch.inference_mode(), device_errors(_described(inputs)):
            loaded = self._put(inputs)
            if self.device.type == "cuda":
                tokens, kernel_ns = self._step_cuda(loaded, sampling)
            else:
                kernels_ns = time.perf_counter_ns()
                tokens = sample(self._run(loaded), sampling).tolist()
                kernel_ns = time.perf_counter_ns() - kernels_ns
        return tokens[: loaded.num_rows], StepTimes(kernel_ns, time.perf_counter_ns() - start_ns - kernel_ns)

    def _step_cuda(self, loaded: _Loaded, sampling: Sampling) -> tuple[list[int], int]:
        """(tokens, ns from the start of the first kernel to the end of the last); waits for the device once."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        tokens = sample(self._run(loaded), sampling)
        end.record()
        self._tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return self._tokens[: len(tokens)].tolist(), round(start.elapsed_time(end) * 1e6)

    def logits(self, inputs: StepInputs) -> Tensor:
        """The logits of every sequence of the step, [num_decode + C, vocab] in fp32; stores its keys and values."""
        with torch.inference_mode(), device_errors(_described(inputs)):
            loaded = self._put(inputs)
            logits = self._run(loaded)[: loaded.num_rows].to(torch.float32, copy=True)
            if self.device.type == "cuda":  # the next step may not be staged before this one's inputs are there
                torch.cuda.synchronize(self.device)
            return logits

    # ---- a step again and again, for measuring

    def load(self, inputs: StepInputs) -> None:
        """Puts `inputs` on the device, for `replay`; a step run in between takes their place."""
        with torch.inference_mode(), device_errors(_described(inputs)):
            self._put(inputs)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def replay(self, n: int) -> list[int]:
        """Runs the loaded step `n` times, as `step` would; the kernel time of each, ns."""
        loaded = self._loaded
        if loaded is None:
            raise CalibrationError("replay: no step is loaded. Call load() first.")
        with torch.inference_mode(), device_errors("replaying a step"):
            if self.device.type == "cuda":
                return self._replay_cuda(loaded, n)
            times = []
            for _ in range(n):
                start_ns = time.perf_counter_ns()
                sample(self._run(loaded), GREEDY)
                times.append(time.perf_counter_ns() - start_ns)
            return times

    def _replay_cuda(self, loaded: _Loaded, n: int) -> list[int]:
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
        for start, end in marks:
            start.record()
            sample(self._run(loaded), GREEDY)
            end.record()
        torch.cuda.synchronize(self.device)
        return [round(start.elapsed_time(end) * 1e6) for start, end in marks]

    # ---- blocks over the host link

    def swap(self, out: Moves, into: Moves) -> int:
        """Copies blocks `out`, (device block, slot), to host memory and `into`, (slot, device block), back; returns ns.

        All is read before any of it is overwritten.
        """
        if self._swap_pool is None:
            raise CalibrationError("swap: this runner has no swap blocks. Build it with num_swap_blocks above 0.")
        with torch.inference_mode(), device_errors(f"swapping {len(out)} KV blocks out and {len(into)} in"):
            return self._swap_pool.move(out, into)

    # ---- inside

    def _put(self, inputs: StepInputs) -> _Loaded:
        """`inputs` on the device; if a graph is to run them, in its place."""
        self._check(inputs)
        num_rows = inputs.num_rows
        bucket = bucket_of(inputs, self.graph_buckets)
        if bucket is not None:
            inputs = filled(inputs, bucket)
        staged = self._staging.put(inputs)
        if bucket is not None and staged.decodes is not None:
            tables = staged.decodes.tables
            self._tables[:bucket, : tables.shape[1]] = tables
        self._loaded = _Loaded(staged, bucket, num_rows)
        return self._loaded

    def _run(self, loaded: _Loaded) -> Tensor:
        """The logits of the step's rows, [rows, vocab], followed by those of a bucket's padding."""
        if loaded.bucket is not None:
            self._graphs.replay(loaded.bucket)
            return self._logits[: loaded.bucket]
        return F.linear(self._transformer.hidden(loaded.inputs), self._head)

    def _place(self, bucket: int) -> DeviceInputs:
        """A step of padding in the place of all decode steps of `bucket`, its tables in those of full width."""
        staged = self._staging.put(StepInputs.padding(bucket, [], block_size=self.block_size))
        assert staged.decodes is not None
        return replace(staged, decodes=Reads(self._tables[:bucket], staged.decodes.seq_lens))

    def _run_in_place(self, inputs: DeviceInputs) -> None:
        """Enqueues the step at `inputs`, as a graph captures it; its logits go to the first rows of `_logits`."""
        hidden = self._transformer.hidden(inputs)
        torch.mm(hidden, self._head.t(), out=self._logits[: len(hidden)])

    def _check(self, inputs: StepInputs) -> None:
        """CalibrationError if the step is larger than the runner was built for."""
        longest = int(inputs.seq_lens.max(initial=0))
        for what, count, limit in (
            ("tokens", len(inputs.ids), self.max_num_batched_tokens),
            ("sequences and drafts" if inputs.num_drafted else "sequences", inputs.num_rows, self.max_num_seqs),
            ("tokens of one sequence", longest, self.max_model_len),
        ):
            if count > limit:
                raise CalibrationError(
                    f"a step of {count} {what}; the model was loaded for at most {limit}. Load it for larger steps."
                )


def build_runner(
    model: str | ModelSpec,
    *,
    device: str,
    num_blocks: int,
    block_size: int = 16,
    num_swap_blocks: int = 0,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    backend: str | None = None,
    graphs: bool | None = None,
    seed: int = 0,
) -> ModelRunner:
    """A runner of the model that is a catalog name, a config.json, a Hugging Face folder or a bare shape.

    A folder's *.safetensors are loaded; all other models run on random weights. By default CUDA has the triton backend,
    with graphs, and the CPU sdpa, without. ScenarioError or CalibrationError, one line, for whatever cannot be had:
    model type, device, dtype, memory, length, backend, weights.
    """
    architecture = load_architecture(model)
    spec = architecture.spec
    place = find_device(device, spec)
    on_cuda = place.type == "cuda"
    chosen = _backend(backend or ("triton" if on_cuda else "sdpa"), on_cuda)
    graphs = chosen.name == "triton" if graphs is None else graphs
    if graphs and chosen.name != "triton":
        raise CalibrationError(
            f"CUDA graphs need --device cuda and the triton backend, not {device} and {chosen.name}."
        )
    limits = StepLimits(max_num_seqs, max_num_batched_tokens, max_model_len)
    check_limits(spec, limits, num_blocks, block_size)
    step = step_bytes(spec, max_num_seqs, max_num_batched_tokens)
    check_memory(spec, place, num_blocks=num_blocks, block_size=block_size, num_swap_blocks=num_swap_blocks, step=step)
    if on_cuda and place.index is not None:
        torch.cuda.set_device(place)  # where kernels and events go that name no device
    with torch.inference_mode(), device_errors(f"loading {spec.name}"):
        weights = _weights(architecture, model, place, seed)
        shape = (
            spec.num_hidden_layers,
            2,
            num_blocks + SPARE_BLOCKS,
            block_size,
            spec.num_key_value_heads,
            spec.head_dim,
        )
        kv = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=place)
        # Numbers to read for steps that are timed on a cache that nothing was stored in: zeros run faster.
        kv[:, :, 1:].normal_(generator=torch.Generator(place).manual_seed(seed))
        transformer = Transformer(architecture, weights, chosen, kv, max_model_len)
        return ModelRunner(transformer, limits, num_swap_blocks=num_swap_blocks, graphs=graphs)


def _backend(name: str, on_cuda: bool) -> SdpaBackend:
    if name == "sdpa":
        return SdpaBackend()
    if name != "triton":
        raise CalibrationError(f"backend {name} is not known. Use sdpa or triton.")
    if not on_cuda:
        raise CalibrationError("backend triton needs --device cuda. Use sdpa on the CPU.")
    from batchsim.calibrate.engine.triton_backend import TritonBackend

    return TritonBackend()


def _weights(architecture: Architecture, model: str | ModelSpec, device: torch.device, seed: int) -> Weights:
    folder = Path(model) if isinstance(model, str) else None
    if folder is None or not folder.is_dir():
        return random_weights(architecture, device, seed)
    if any(folder.glob("*.safetensors*")):
        return load_weights(architecture, folder, device)
    if any(folder.glob("*.bin")):
        raise CalibrationError(f"{folder}: its weights are *.bin files, only *.safetensors are read. Convert them.")
    return random_weights(architecture, device, seed)


def _described(inputs: StepInputs) -> str:
    return f"a step of {inputs.num_decode} decodes and {len(inputs.chunk_lens)} chunks, {len(inputs.ids)} tokens"
