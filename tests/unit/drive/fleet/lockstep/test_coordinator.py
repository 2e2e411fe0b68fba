"""The coordinator by hand, in ms; vllm/v1/engine/coordinator.py of vLLM 0.33.0, `process_input_socket`."""

from __future__ import annotations

from typing import Any

from batchsim.drive.fleet.lockstep.agenda import COORDINATOR, MESSAGE, Agenda
from batchsim.drive.fleet.lockstep.coordinator import MS, Coordinator, RankLoad

A, B, C = RankLoad(1, 0, 0.0), RankLoad(0, 1, 0.1), RankLoad(0, 2, 0.2)
NONE = RankLoad(0, 0, 0.0)


class Heard:
    """Writes down what is sent, with the time in ms."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.coordinator = Coordinator(self.agenda, 2, self)
        self.published_at: list[tuple[float, Any]] = []
        self.woken_at: list[tuple[float, int, int]] = []

    def published(self, loads: list[RankLoad] | None, wave: int, is_running: bool) -> None:
        self.published_at.append((self.agenda.now_ns / MS, (wave, is_running) if loads is None else loads))

    def woken(self, wave: int, but: int) -> None:
        self.woken_at.append((self.agenda.now_ns / MS, wave, but))

    def at(self, ms: float, what: str, *message: Any) -> None:
        """Plans a message to the coordinator."""
        time_ns = round(ms * MS)
        act = getattr(self.coordinator, what)
        self.agenda.plan(time_ns, COORDINATOR, MESSAGE, lambda: act(time_ns, *message))

    def until(self, ms: int) -> list[tuple[float, Any]]:
        self.agenda.plan(ms * MS, COORDINATOR, MESSAGE, lambda: None)
        self.agenda.run()
        return self.published_at


def test_loads_go_out_when_no_message_has_come_for_50_ms() -> None:
    """The first ones then; later ones of the same pass 100 ms after those, and 5 s after them if nothing changed."""
    heard = Heard()
    heard.at(5.5, "reported", 0, A, 0, 0)
    heard.at(13.5, "reported", 0, B, 0, 0)
    heard.at(80, "reported", 1, C, 0, 0)
    assert heard.until(5164) == [(63.5, [B, NONE]), (163, [B, C]), (5163, [B, C])]


def test_while_a_newer_pass_is_told_of_the_one_before_it_goes_out() -> None:
    """The counts as they were before pass 1 was first told of, which all ranks are through with; then the newest."""
    heard = Heard()
    heard.at(1, "reported", 0, A, 0, 0)
    heard.at(2, "reported", 1, A, 0, 0)
    heard.at(60, "reported", 0, B, 0, 1)
    heard.at(70, "reported", 0, C, 0, 2)
    heard.at(71, "reported", 1, B, 0, 1)
    assert heard.until(300) == [(52, [A, A]), (152, [B, A]), (252, [C, B])]


def test_each_message_begins_the_wait_anew_in_whole_milliseconds() -> None:
    """From 52.0 to 152.0; the message at 60.7 waits 100 - (60 - 52) ms, until 152.7."""
    heard = Heard()
    heard.at(2, "reported", 0, A, 0, 0)
    heard.at(60.7, "reported", 0, B, 0, 1)
    assert heard.until(300)[:2] == [(52, [A, NONE]), (152.7, [B, NONE])]


def test_a_wave_wakes_ranks_once_and_clients_hear_of_it_at_once() -> None:
    """A second rank that says so changes nothing, nor does an old wave; a newer one does."""
    heard = Heard()
    for ms, rank, wave in ((1, 1, 0), (2, 0, 0), (20, 0, 1), (21, 1, 0)):
        heard.at(ms, "started", rank, wave)
    heard.at(10, "completed", 0)
    heard.at(11, "completed", 0)
    assert heard.until(22)[:3] == [(1, (0, True)), (10, (1, False)), (20, (1, True))]
    assert heard.woken_at == [(1, 0, 1), (20, 1, 0)]
