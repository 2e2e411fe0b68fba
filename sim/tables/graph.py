"""The kinds of operations in the tables' graph of a model: what each one's time depends on, and where it is counted.

An operation is known by the class that the tables give it, not by its name: whole blocks of sparse attention with their
projections are called `context_attention` there, as attention alone is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batchsim.tables.modes import NoTablesError

ATTENTION = frozenset({"ContextAttention", "GenerationAttention"})
"""Classes of attention and nothing else, with a window or without."""
_RECURRENT = frozenset({"Gdn", "Kda", "Mamba2"})
"""Classes of the kernels that read and write a state of fixed size for each sequence: convolution and recurrence."""
_EXPERTS = frozenset({"Moe", "MoeDispatch"})
"""Classes of the kernels of routed experts, and of the way of tokens to the GPUs that hold these and back."""
_LAW = re.compile(r'"workload_distribution": "([^"]+)"')
_STATE_BYTES = 4
"""Of an element of a recurrent state: engines keep it in float32 (Nemotron-H's `mamba_ssm_cache_dtype`)."""
REACHED = 0.8
"""The share of a GPU's bandwidth at which states are read and written. The tables' gated delta net, timed under vLLM
0.24 on an H200, reaches 81 % (64 sequences of Qwen3.5-27B on two GPUs)."""


@dataclass(frozen=True)
class Operation:
    """One operation of a graph: its index there, its class, its window in tokens (None: none), and the bytes of the
    state that each sequence has in all of its layers, on all GPUs (0: none, or the tables' rooflines count it). `law`:
    of the loads of experts, as the tables name it."""

    index: int
    name: str
    kind: str
    window: int | None = None
    state_bytes: float = 0.0
    law: str = ""

    @property
    def is_of_experts(self) -> bool:
        """Whether it is of routed experts, of a shared one that is computed beside them too."""
        return self.kind in _EXPERTS or (self.kind == "Overlap" and "moe" in self.name)

    @classmethod
    def of(cls, index: int, spec: dict[str, dict[str, Any]]) -> Operation:
        """The operation that the tables describe as {class: fields}."""
        ((kind, values),) = spec.items()
        window = values.get("window_size") if kind in ATTENTION else None
        state = 0.0
        if kind == "Mamba2" and values["kernel_source"] == "selective_state_update":
            elements = values["nheads"] * values["head_dim"] * values["d_state"]
            state = values["scale_factor"] * elements * _STATE_BYTES
        law = _LAW.search(json.dumps(values))  # of an operation within one that overlaps several, too
        return cls(index, values["name"], kind, window or None, state, law[1] if law else "")


@dataclass(frozen=True)
class Phase:
    """Indices of the operations of steps with chunks, or of steps of decodes, by what their times depend on.

    `attention` and `windowed`: keys alone. `blocks`: keys too, with projections. `recurrent`: tokens or sequences, not
    keys. `head`: the output matmul. `rest`: the tokens of the step; of these `experts`: the tokens of all GPUs that
    share the experts."""

    rest: tuple[int, ...]
    head: tuple[int, ...]
    attention: tuple[int, ...]
    windowed: tuple[int, ...]
    blocks: tuple[int, ...]
    recurrent: tuple[int, ...]
    experts: tuple[int, ...]

    @classmethod
    def of(cls, operations: Sequence[Operation], of_keys: frozenset[int], *, whole: bool) -> Phase:
        """`of_keys` are the indices of operations whose times depend on keys; `whole`: operations that are no attention
        by their class hold projections too."""
        keyed = [each for each in operations if each.kind in ATTENTION or each.index in of_keys]
        plain = [each for each in keyed if each.window is None]
        apart = [each for each in plain if each.kind in ATTENTION or not whole]
        recurrent = [each for each in operations if each.kind in _RECURRENT]
        head = [each for each in operations if "logits" in each.name]
        counted = [*keyed, *recurrent, *head]
        rest = [each for each in operations if each not in counted]
        return cls(
            _indices(rest),
            _indices(head),
            _indices(apart),
            _indices(each for each in keyed if each.window is not None),
            _indices(each for each in plain if each not in apart),
            _indices(recurrent),
            _indices(each for each in rest if each.is_of_experts),
        )

    @property
    def keyed(self) -> frozenset[int]:
        """The operations that depend on keys."""
        return frozenset((*self.attention, *self.windowed, *self.blocks))


def _indices(operations: Iterable[Operation]) -> tuple[int, ...]:
    return tuple(each.index for each in operations)


def operations_of(specs: Iterable[str]) -> list[Operation]:
    """The operations whose descriptions are `specs`, each the JSON of {class: fields}."""
    return [Operation.of(i, json.loads(spec)) for i, spec in enumerate(specs)]


def window_of(operations: Iterable[Operation]) -> int | None:
    """The window of the operations that have one; None: none has. NoTablesError if they have several."""
    windows = sorted({each.window for each in operations if each.window is not None})
    if len(windows) > 1:
        raise NoTablesError(
            f"deployment: the tables' graph has layers with windows of {' and '.join(map(str, windows))} tokens; a"
            " profile holds one width."
        )
    return windows[0] if windows else None
