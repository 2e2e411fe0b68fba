"""Session affinity: all turns of a conversation go to one replica, as long as that takes requests.

A first turn, or one whose replica is gone, goes to the replica with the fewest outstanding requests, and stays there.
Turns are of one conversation if their prompts hold the text of the same first turn: the last piece of a prompt before
the first answer in it. A prompt that shares no tokens is a conversation of its own.

Source: session-affinity-scorer of the llm-d inference scheduler (a header names the replica of the turn before) in the
place of all other scorers; where a session begins, it leaves the choice to those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchsim.base.ranges import Config
from batchsim.drive.fleet.routers.router import Outstanding, Stage
from batchsim.kernel.types import Request


@dataclass(frozen=True)
class SessionAffinityConfig(Config):
    """The replica of the conversation's turn before; for a first turn the one with the fewest outstanding requests."""

    kind: Literal["session_affinity"] = "session_affinity"

    def build(self, seed: int) -> SessionAffinity:
        return SessionAffinity()


class SessionAffinity:
    """See the module's text."""

    def __init__(self) -> None:
        self._requests = Outstanding()
        self._homes: dict[tuple[Stage, int], int] = {}

    def route(self, request: Request, stage: Stage, up: Sequence[int]) -> int:
        session = _session(request)
        replica = None if session is None else self._homes.get((stage, session))
        if replica not in up:
            replica = self._requests.least(up)
        assert replica is not None, "one of those that are up"
        if session is not None:
            self._homes[stage, session] = replica
        self._requests.add(replica, 1)
        return replica

    def answered(self, request: Request, stage: Stage, replica: int) -> None:
        self._requests.add(replica, -1)

    def removed(self, replica: int) -> None:
        """Forgets whose home the replica was."""
        self._homes = {key: home for key, home in self._homes.items() if home != replica}


def _session(request: Request) -> int | None:
    """The stream of the conversation's first turn, of which no other conversation has tokens."""
    if request.tokens is None:
        return None
    streams = [stream for stream, _, _ in request.tokens.segments]
    first_answer = next((i for i, stream in enumerate(streams) if stream % 2), len(streams))
    return streams[max(first_answer, 1) - 1]
