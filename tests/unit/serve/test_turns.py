"""Work for clients is done in turns, and beside the event loop where it is long."""

from __future__ import annotations

import asyncio

import pytest

from batchsim.serve import turns
from batchsim.serve.turns import Turns


def test_what_is_more_than_a_turn_waits_in_order_while_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With turns that one act fills, others of the loop come between; nothing is left out."""
    monkeypatch.setattr(turns, "_TURN_S", 1e-9)

    async def use() -> list[str]:
        told: list[str] = []
        mine = Turns()

        def round_of_loop() -> None:
            told.append("loop")
            if mine.num_waiting:
                asyncio.get_running_loop().call_soon(round_of_loop)

        asyncio.get_running_loop().call_soon(round_of_loop)
        for number in range(4):
            mine.take(lambda number=number: told.append(str(number)))
        while mine.num_waiting:
            await asyncio.sleep(0)
        mine.close()
        return told

    told = asyncio.run(use())
    assert [each for each in told if each != "loop"] == list("0123")
    assert all("loop" in told[told.index(str(n)) : told.index(str(n + 1))] for n in range(3))


def test_what_is_done_aside_tells_its_result_or_its_error_in_order() -> None:
    """One after another, in a thread, while the loop goes on; an error is raised to who takes the result."""

    async def use() -> list[object]:
        told: list[object] = []
        mine = Turns()

        def then(found: object) -> None:
            try:
                told.append(found())  # type: ignore[operator]
            except ZeroDivisionError as error:
                told.append(type(error))

        for work in (lambda: 1, lambda: 1 // 0, lambda: 3):
            mine.aside(work, then)
        while mine.num_waiting:
            await asyncio.sleep(0)
        mine.close()
        return told

    assert asyncio.run(use()) == [1, ZeroDivisionError, 3]
