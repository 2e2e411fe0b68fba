"""Compares a router with the replicas that a real gateway sent requests to, one decision after another.

One JSON object, which may be gzipped:

    router    the `kind` of a router here; `options` by their names here; `gateway`, `version`, `policy`, `command` and
              `note` are for readers
    replicas  how many there are, by number from 0, in the gateway's own order where it takes the first of equals
    prompts   of each request a list of segments [stream, first token, length]: equal segments are equal tokens
    events    in order, each with `t` in seconds if it matters: {"send": request, "replica": number} the request was
              sent there; {"end": request} it was answered, or its client left
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchsim.base.errors import cut, nearest
from batchsim.base.problems import first_problem
from batchsim.base.reading import read
from batchsim.base.units import NS_PER_S, counted
from batchsim.check.conform.fields import ANY, LIST, OBJECT, TEXT, BadRecording, ListOf, check_row, number, whole
from batchsim.drive.fleet.routing import ROUTERS
from batchsim.kernel.tokens import TokenIds
from batchsim.kernel.types import Request

MOST_REPLICAS, MOST_TOKENS = 10_000, 10**7
_PLACE = whole(0, MOST_TOKENS)


@dataclass(frozen=True)
class RouteComparison:
    """A comparison: how many decisions were compared, and the first difference in one line, "" if there is none, with
    both sides in `here` and `recorded`, and the requests outstanding at each replica in `outstanding`."""

    path: Path
    router: str
    num_routes: int
    difference: str = ""
    here: str = ""
    recorded: str = ""
    outstanding: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.difference:
            return f"{self.path.name}: equal, {counted(self.num_routes, 'decision')} ({self.router})"
        lines = [f"{self.path.name}: {self.difference}", f"    here      {self.here}"]
        return "\n".join(
            [*lines, f"    recorded  {self.recorded}", f"    outstanding before  {list(self.outstanding)}"]
        )


def is_routes(data: Any) -> bool:
    """Whether a JSON value is meant to be a recording of routes."""
    return isinstance(data, dict) and {"router", "events"} <= data.keys()


def compare_routes(path: Path, data: Any) -> RouteComparison:
    """Routes the recorded requests and compares each decision. BadRecording where that is not possible."""
    requests = _checked(data)
    kind, up = data["router"], range(data["replicas"])
    router = _config(kind, data["options"]).build(0)
    at: dict[int, int] = {}  # the replica of each request that is outstanding, as recorded
    num_routes = now_ns = 0
    for place, event in enumerate(data["events"]):
        where = f"events[{place}]"
        now_ns = max(now_ns + 1, int(event.get("t", 0) * NS_PER_S))
        if "end" in event:
            if event["end"] not in at:
                raise BadRecording(f"{where} ends request {event['end']}, which is not outstanding. Record it again.")
            router.answered(_request(event["end"], requests, 0), "both", at.pop(event["end"]))
            continue
        id_, recorded = event["send"], event["replica"]
        if id_ in at:
            raise BadRecording(f"{where} sends request {id_}, which is outstanding. Record it again.")
        outstanding = tuple(list(at.values()).count(replica) for replica in up)
        here = router.route(_request(id_, requests, now_ns), "both", up)
        num_routes += 1
        if here != recorded:
            what = f"decision {num_routes} ({where}, request {id_}) differs"
            sides = f"replica {here}", f"replica {recorded}"
            return RouteComparison(path, kind, num_routes, what, *sides, outstanding)
        at[id_] = recorded
    return RouteComparison(path, kind, num_routes)


def _checked(data: Any) -> list[TokenIds]:
    """The prompts of `data`, every field of which is known and of its kind."""
    needed = {"router": TEXT, "replicas": whole(1, MOST_REPLICAS), "prompts": ListOf(LIST), "events": ListOf(OBJECT)}
    names: tuple[str, ...] = ("gateway", "version", "policy", "command", "note")
    readers = dict.fromkeys(names, ANY)
    check_row(data, "the recording", needed | {"options": OBJECT}, {**readers})
    prompts = [_prompt(segments, f"prompts[{place}]") for place, segments in enumerate(data["prompts"])]
    if not data["events"]:
        raise BadRecording("has no events. Record it again.")
    id_, replica = whole(0, len(prompts) - 1), whole(0, data["replicas"] - 1)
    for place, event in enumerate(data["events"]):
        kinds = {"end": id_} if "end" in event else {"send": id_, "replica": replica}
        check_row(event, f"events[{place}]", kinds, {"t": number("a time in seconds", MOST_TOKENS)})
    return prompts


def _prompt(segments: Sequence[Any], where: str) -> TokenIds:
    for place, segment in enumerate(segments):
        ListOf(_PLACE).check(segment, f"{where}[{place}]")
        if len(segment) != 3:
            raise BadRecording(
                f"{where}[{place}] has {len(segment)} numbers: stream, first token, length. Write three."
            )
    try:
        return TokenIds.of([(stream, start, length) for stream, start, length in segments])
    except ValueError as error:
        raise BadRecording(f"{where}: {error}. Record it again.") from None


def _request(id_: int, prompts: Sequence[TokenIds], now_ns: int) -> Request:
    return Request(id_, now_ns, prompts[id_].num_tokens, 1, tokens=prompts[id_])


def _config(kind: str, options: dict[str, Any]) -> Any:
    if kind not in ROUTERS:
        raise BadRecording(f"router {cut(kind)} is not known. {nearest(kind, ROUTERS)}")
    try:
        return read(ROUTERS[kind], {"kind": kind, **options})
    except ValidationError as error:
        raise BadRecording(f"{first_problem(error, options, 'options')} Record it again.") from None
