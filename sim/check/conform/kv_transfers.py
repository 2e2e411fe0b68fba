"""Fields of recordings of engines with a KV connector, and a link that repeats their recorded times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import shown
from batchsim.check.conform.fields import COUNT, FLAG, IDS, PAIRS, SECONDS, TEXT, BadRecording, Fields, Kind, check_row
from batchsim.check.conform.step_forms import FORMS, OF_QUEUE, StepForm, as_here, of_pooling
from batchsim.check.conform.times import US
from batchsim.kernel.kv_transfer import Noticed
from batchsim.kernel.types import Request, Sequence
from batchsim.policies.systems.vllm.connector_config import VllmConnectorConfig
from batchsim.policies.systems.vllm.vllm_config import VllmConfig

ROLES = ("kv_producer", "kv_consumer", "kv_both")
META: dict[str, Kind] = {"kv_role": TEXT, "defer_block_free": FLAG, "requires_kv_delivery": FLAG}
META_MAYBE: dict[str, Kind] = {"kv_load_failure_policy": TEXT}
"""Keys of `meta` that say what an engine does with KV of others."""
NOTES = {"connector", "kv_transfer"}
PULLED: Fields = {"do_remote_prefill": FLAG, "transfer_us": COUNT}
KEPT: Fields = {"do_remote_decode": FLAG, "hold_us": COUNT}
_STEP = as_here(PAIRS, "loads_started", "sends_started") | as_here(IDS, "loads_done", "sends_done", "remote")
SETS = {"loads_done", "loads_failed", "sends_done", "remote", "errors", "flushed", "jobs_done"}
"""Facts of a step whose ids are in no order: an engine's worker reports sets."""


def with_connector(depth: int) -> StepForm:
    """The form of an engine with a connector and at most `depth` steps in flight, synchronous ones too."""
    none = {name: list[Any]() for name in _STEP}
    return FORMS["batch_queue"].plus(_STEP, if_any=none, without=() if depth > 1 else OF_QUEUE)


def several(depth: int) -> StepForm:
    """As `with_connector`, in a recording of several engines: pulls are counted in blocks, and may fail; what a prefill
    engine keeps stands where it is handed on."""
    return of_pooling(with_connector(depth)).plus(
        {"loads_started": ("pulled_blocks", PAIRS), **as_here(IDS, "loads_failed", "errors")},
        request={"taken": ("taken_ns", SECONDS), "error": ("error", FLAG)},
        if_any={"loads_failed": [], "errors": [], "error": False},
        without=(*OF_QUEUE, "sends_started"),
    )


OfConnector = Callable[[int], StepForm]
"""The form of an engine with a connector, by how many steps may be in flight."""


def connector_config(config: Any, meta: dict[str, Any], where: str) -> Any:
    """`config` of an engine with the connector that `meta` states. BadRecording where it is none that is simulated."""
    if not isinstance(config, VllmConfig):
        raise BadRecording(f"{where}.kv_role is not simulated for this policy, only for vllm. Name it with --policy.")
    check_row({name: meta[name] for name in (META | META_MAYBE) if name in meta}, where, META, META_MAYBE)
    role = meta["kv_role"]
    if role not in ROLES:
        raise BadRecording(f"{where}.kv_role is {shown(role)}, not {', '.join(ROLES)}. Record it again.")
    failed = meta.get("kv_load_failure_policy", "fail")
    if failed not in ("fail", "recompute"):
        what = f"{where}.kv_load_failure_policy is {shown(failed)}, not fail or recompute"
        raise BadRecording(f"{what}. Record it again.")
    try:
        made = VllmConnectorConfig.of(config, role, failed)
    except ValueError as error:
        raise BadRecording(f"{where}: {error}.") from None
    for name, ours in (("defer_block_free", made.defers), ("requires_kv_delivery", made.delivers)):
        if meta[name] != ours:
            what = f"{where}.{name} is {shown(meta[name])}, that of a {role} with the other knobs is {shown(ours)}"
            raise BadRecording(f"{what}. Write down what the engine ran with.")
    return made


@dataclass(frozen=True)
class TransferTimes:
    """What a recording states of one request, in ns: how long its KV is pulled, and how long it is kept; None: not."""

    pull_ns: int | None = None
    keep_ns: int | None = None


def transfer_times(row: dict[str, Any], where: str) -> TransferTimes:
    """The field `kv` of a request. BadRecording unless it says for how long what its flags say is done."""
    times = list[int | None]()
    kv = row.get("kv", {})
    check_row(kv, f"{where}.kv", {}, {**PULLED, **KEPT})
    for flag, time in (PULLED, KEPT):
        if (time in kv) is not kv.get(flag, False):
            raise BadRecording(f"{where}.kv has one of {flag} and {time} without the other. Record it again.")
        times.append(kv[time] * US if time in kv else None)
    return TransferTimes(*times)


class RecordedLink:
    """Transfers that take the recorded `times`, by the ids of requests."""

    def __init__(self, times: dict[int, TransferTimes]) -> None:
        self._times = times
        self._pulls: dict[Sequence, int] = {}  # when they are over
        self._kept: dict[Sequence, int] = {}

    def pulls(self, request: Request) -> bool:
        return self._times[request.id].pull_ns is not None

    def keeps(self, request: Request) -> bool:
        return self._times[request.id].keep_ns is not None

    def begin(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        self._pulls[seq] = now_ns + (self._times[seq.request.id].pull_ns or 0)

    def keep(self, seq: Sequence, num_blocks: int, now_ns: int) -> None:
        self._kept[seq] = now_ns + (self._times[seq.request.id].keep_ns or 0)

    def over(self, now_ns: int) -> Noticed:
        return Noticed(loaded=_taken(self._pulls, now_ns), sent=_taken(self._kept, now_ns))


def _taken(transfers: dict[Sequence, int], now_ns: int) -> list[Sequence]:
    """Takes out those of `transfers` that are over by `now_ns`, in the order in which they began."""
    over = [seq for seq, end_ns in transfers.items() if end_ns <= now_ns]
    for seq in over:
        del transfers[seq]
    return over
