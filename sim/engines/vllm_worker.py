"""Serves the V1 scheduler of this interpreter's vLLM: a question a line on stdin, its answer on stdout, in JSON.

A program of its own, which imports vLLM and the standard library: vLLM need not be installed where batchsim is. It
holds any number of schedulers, by number; none has a model, and of tokens counts alone which are equal.

    {"hello": true}  ->  {"version"}
    {"new": number, "knobs": {...}, "block_size", "num_blocks", "max_model_len", "ahead", "scheduler_cls"}
                     ->  {"scheduler": class path, "unknown": [knobs that this version does not have]}
    {"ask": number, "add": [request...]}
                     ->  {"rows": [[id, tokens, computed tokens after, KV blocks held]...] in batch order,
                          "cached": [[id, tokens]...], "preempted": [id...] in that order, "free", "waiting",
                          "running"}
    {"land": number, "samples": [id...], "ends": [id...]}: the oldest step in flight is over
                     ->  {"ended": [id...], "free", "waiting", "running"}
    {"abort": number, "ids": [id...]}
                     ->  {"free", "waiting", "running"}

Any question may have "drop", the numbers of schedulers that are needed no more. A request is {"id", "arrival": seconds,
"prompt": [[stream, start, length]...], "output": stream, "cap", "priority", "ignore_eos"}; "cap" is max_tokens, and an
end before it comes by a stop token. What fails is answered {"error": text}.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
from collections import deque
from typing import Any

STOP = 1
"""The stop token. Tokens of streams are all above it."""
STREAM = 1 << 24
"""Tokens of one stream, the most there may be."""


class Model:
    """What a scheduler asks of its model's config: a decoder of text."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.runner_type = "generate"
        self.architectures: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # that a model has none of it, whichever it is: off, as all that is not of a decoder of text


class Grammars:
    """Stands for the manager of structured outputs, which no request asks for."""

    def should_advance(self, request: Any) -> bool:
        return False

    def accept_tokens(self, request: Any, new_token_ids: list[int]) -> bool:
        return True


class Engine:
    """One scheduler with its requests, driven as vLLM's engine drives it."""

    def __init__(self, new: dict[str, Any]) -> None:
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        config, kind = vllm_config(new), AsyncScheduler if new["ahead"] else Scheduler
        if new["scheduler_cls"]:
            kind = config.scheduler_config.get_scheduler_cls()
        block_size = new["block_size"]
        self.caches = new["knobs"]["enable_prefix_caching"]
        self.hasher: Any = None
        if self.caches:
            hash_function = hash_function_of(config)
            kv_cache_utils.init_none_hash(hash_function)
            self.hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_function)
        beside = known_of(Scheduler, {"block_size": block_size, "hash_block_size": block_size})
        self.scheduler: Any = kind(config, kv_config(new), Grammars(), **beside)
        self.class_path = f"{kind.__module__}.{kind.__qualname__}"
        self.preempted: list[int] = []
        self.steps: deque[tuple[Any, list[int]]] = deque()
        self.outputs: dict[int, tuple[int, int]] = {}  # by request: its output stream, and the next token of it
        self.running: set[str] = set()
        self._watch()

    def _watch(self) -> None:
        """Notes preemptions in their order, which the scheduler's answer does not tell."""
        scheduler = self.scheduler
        owner = scheduler if hasattr(scheduler, "_preempt_request") else scheduler.waiting
        name = "_preempt_request" if owner is scheduler else "prepend_request"
        call = getattr(owner, name)

        def noted(request: Any, *rest: Any, **named: Any) -> Any:
            self.preempted.append(int(request.request_id))
            return call(request, *rest, **named)

        setattr(owner, name, noted)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        scheduler = self.scheduler
        for request in question["add"]:
            scheduler.add_request(self._request(request))
        before = {request.request_id for request in scheduler.running}
        self.preempted.clear()
        output = scheduler.schedule()
        rows: list[list[int]] = []
        cached: list[list[int]] = []
        for name, tokens in output.num_scheduled_tokens.items():
            computed = scheduler.requests[name].num_computed_tokens
            rows.append([int(name), tokens, computed, self._held(name)])
            if name not in before and computed > tokens:
                cached.append([int(name), computed - tokens])
        if rows:
            self.steps.append((output, [row[0] for row in rows]))
        else:
            scheduler.update_from_output(output, model_output([], []))
        return {"rows": rows, "cached": cached, "preempted": list(self.preempted), **self._counts()}

    def abort(self, question: dict[str, Any]) -> dict[str, Any]:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name_of(i) for i in question["ids"]], RequestStatus.FINISHED_ABORTED)
        return self._counts()

    def land(self, question: dict[str, Any]) -> dict[str, Any]:
        output, ids = self.steps.popleft()
        samples, ends = set(question["samples"]), set(question["ends"])
        tokens = [[self._token(i, i in ends)] if i in samples else [] for i in ids]
        made = self.scheduler.update_from_output(output, model_output([name_of(i) for i in ids], tokens))
        ended = [int(each.request_id) for outputs in made.values() for each in outputs.outputs if each.finished]
        for i in ended:
            self.outputs.pop(i, None)
        return {"ended": ended, **self._counts()}

    def _token(self, i: int, is_last: bool) -> int:
        stream, place = self.outputs.get(i, (0, 0))  # of one that has ended, whose token is made in vain
        self.outputs[i] = stream, place + 1
        return STOP if is_last else token(stream, place)

    def _request(self, request: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        i = request["id"]
        self.outputs[i] = request["output"], 0
        prompt = [token(stream, start + n) for stream, start, length in request["prompt"] for n in range(length)]
        sampling = SamplingParams(max_tokens=request["cap"], ignore_eos=request["ignore_eos"], stop_token_ids=[STOP])
        given = {
            "request_id": name_of(i),
            "prompt_token_ids": prompt,
            "sampling_params": sampling,
            "pooling_params": None,
            "eos_token_id": None,
            "arrival_time": request["arrival"],
            "priority": request["priority"],
            "block_hasher": self.hasher,
        }
        return Request(**known_of(Request, given))

    def _held(self, name: str) -> int:
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return sum(len(manager.req_to_blocks.get(name, ())) for manager in managers)

    def _counts(self) -> dict[str, int]:
        running, waiting = self.scheduler.get_request_counts()
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return {"free": free, "waiting": waiting, "running": running}


def vllm_config(new: dict[str, Any]) -> Any:
    """vLLM's config with the knobs `new` has, of a model that is none."""
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig

    knobs = dict(new["knobs"])
    caching = knobs.pop("enable_prefix_caching")
    knobs |= {"max_model_len": new["max_model_len"], "is_encoder_decoder": False, "async_scheduling": new["ahead"]}
    knobs |= {"scheduler_cls": new["scheduler_cls"]} if new["scheduler_cls"] else {}
    scheduler = SchedulerConfig(**known_of(SchedulerConfig, knobs))
    cache = CacheConfig(**known_of(CacheConfig, {"block_size": new["block_size"]}))
    config = VllmConfig(scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig("cpu"))
    # What follows is what the engine has once it knows its model, and not what a machine without a GPU would prefer.
    config.model_config = Model(new["max_model_len"])
    scheduler, cache = config.scheduler_config, config.cache_config
    for name, value in known_of(SchedulerConfig, knobs).items():
        if name not in ("max_model_len", "is_encoder_decoder"):
            setattr(scheduler, name, value)
    scheduler.max_model_len = new["max_model_len"]
    cache.block_size, cache.num_gpu_blocks = new["block_size"], new["num_blocks"] + 1
    cache.enable_prefix_caching = caching
    return config


def kv_config(new: dict[str, Any]) -> Any:
    """vLLM's KV memory: one group of layers of full attention, and the null block beside those to be used."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    shape = {"block_size": new["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = FullAttentionSpec(**known_of(FullAttentionSpec, shape | {"use_mla": False}))
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return KVCacheConfig(num_blocks=new["num_blocks"] + 1, kv_cache_tensors=[], kv_cache_groups=groups)


def hash_function_of(config: Any) -> Any:
    from vllm.utils import hashing

    return hashing.get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)


def model_output(names: list[str], tokens: list[list[int]]) -> Any:
    """The output of a model that made `tokens` of the requests `names`."""
    from vllm.v1.outputs import ModelRunnerOutput

    given: dict[str, Any] = {
        "req_ids": names,
        "req_id_to_index": {name: n for n, name in enumerate(names)},
        "sampled_token_ids": tokens,
        "prompt_logprobs_dict": dict.fromkeys(names),
    }
    for field in dataclasses.fields(ModelRunnerOutput):
        if field.name == "sampled_token_ids" and "ndarray" in str(field.type):  # as up to 0.11
            import numpy

            given[field.name] = [numpy.array(each, dtype=numpy.int64) for each in tokens]
        if field.name not in given and field.default is field.default_factory is dataclasses.MISSING:
            given[field.name] = [] if field.name == "pooler_output" else None
    return ModelRunnerOutput(**given)


def known_of(function: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments `given` that `function` has in this version."""
    import inspect

    names = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in names}


def unknown_knobs(knobs: dict[str, Any]) -> list[str]:
    """The names of the knobs that the scheduler's config does not have in this version."""
    from vllm.config import SchedulerConfig

    return sorted(knobs.keys() - known_of(SchedulerConfig, knobs).keys() - {"enable_prefix_caching"})


def name_of(i: int) -> str:
    """The name of request `i`: names tie in the order of numbers."""
    return f"{i:015d}"


def token(stream: int, place: int) -> int:
    return (stream + 1) * STREAM + place


def answers(lines: Any, answer: Any) -> None:
    """Answers the questions on `lines` until they end."""
    engines: dict[int, Engine] = {}
    for line in lines:
        question = json.loads(line)
        for number in question.get("drop", ()):
            engines.pop(number, None)
        try:
            if "hello" in question:
                import vllm

                said: dict[str, Any] = {"version": vllm.__version__}
            elif "new" in question:
                unknown = unknown_knobs(question["knobs"])
                engine = engines[question["new"]] = Engine(question)
                said = {"scheduler": engine.class_path, "unknown": unknown}
            elif "ask" in question:
                said = engines[question["ask"]].ask(question)
            elif "land" in question:
                said = engines[question["land"]].land(question)
            else:
                said = engines[question["abort"]].abort(question)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = traceback.format_exception_only(error)[-1].strip()
            said = {"error": f"{text} ({os.path.basename(place.filename)}, line {place.lineno})"}
        answer.write(json.dumps(said) + "\n")
        answer.flush()


def main() -> None:
    sys.path.pop(0)  # this folder, whose files are batchsim's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints to stdout
    with contextlib.suppress(BrokenPipeError):
        answers(sys.stdin, answer)


if __name__ == "__main__":
    main()
