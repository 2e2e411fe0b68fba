"""The errors batchsim raises on purpose. Each message reads: where: what, with the numbers. What to do.

Anything else that escapes is a bug of batchsim, and the command line shows its traceback.
"""

from __future__ import annotations

import difflib
import json
import re
from bisect import bisect_left
from collections.abc import Iterable

MAX_SHOWN = 80
"""The most letters of a bad value that an error message quotes."""


def shown(value: object) -> str:
    """The `repr` of `value` as an error message quotes it: on one line, with at most MAX_SHOWN letters."""
    try:
        return cut(repr(value))
    except RecursionError:
        return "nested too deeply to be shown"


def cut(text: str, most: int = MAX_SHOWN) -> str:
    """A user's `text` as an error message gives it: on one line, with at most `most` letters."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The advice for an unknown `name`: the one of `known` that is most like it, else `otherwise`, by default all."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {near[0]}?" if near else otherwise or f"Known are {', '.join(names)}."


MAX_ECHO = 200
"""The most letters that a message repeats in one place of any one text of a user's."""
_LONG_WORD = re.compile(rf"\S{{{MAX_ECHO + 1},}}")


def bounded(message: str, texts: Iterable[str] = ()) -> str:
    """`message` on one line, every word of it and all that it repeats of one of `texts` cut to MAX_ECHO letters.

    The cut takes out the middle, so that a path keeps its folder and its file.
    """
    message = " ".join(message.split())
    for text in texts:
        if len(text) > MAX_ECHO:
            for form in {text, repr(text), json.dumps(text)}:
                message = _without(" ".join(form.split()), message)
    return _LONG_WORD.sub(lambda word: _without_middle(word[0]), message)


def _without(text: str, message: str) -> str:
    """`message` with every stretch that also stands in `text` cut to MAX_ECHO letters."""
    at, half = 0, MAX_ECHO // 2
    while (end := at + MAX_ECHO + 1) <= len(message):
        if message[at + half : at + 2 * half] not in text:  # every stretch that begins by then holds this piece
            at += half + 1
        elif message[at:end] in text:
            longer = range(end + 1, len(message) + 1)  # halved, since to grow letter by letter takes their square
            end += bisect_left(longer, True, key=lambda to: message[at:to] not in text)
            message = message[:at] + _without_middle(message[at:end]) + message[end:]
            at += MAX_ECHO
        else:
            at += 1
    return message


def _without_middle(text: str) -> str:
    return f"{text[: MAX_ECHO // 2]}...{text[3 - MAX_ECHO // 2 :]}"


class BatchsimError(Exception):
    """Base of every error a user can cause; the command line prints its lines, mostly one, and exits 2 unless said."""

    @property
    def lines(self) -> tuple[str, ...]:
        return (str(self),)


class ScenarioError(BatchsimError):
    """A scenario, a knob or a catalog name is wrong; of several errors each is an argument, and a line."""

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(map(str, self.args))


class NobodyToMeasure(ScenarioError):  # noqa: N818
    """A run has no request after its warm-up. A capacity search then tries higher loads; else the scenario is wrong."""


class TraceError(BatchsimError):
    """A trace file cannot be read as asked."""


class MeasuredError(BatchsimError):
    """The file of a measured run cannot be read, or its run not be replayed."""


class CalibrationError(BatchsimError):
    """A cost profile cannot be made or read."""


class ExtrapolationError(BatchsimError):
    """A batch lies outside what a profile was measured on. `advice`, the message's end, says how to extrapolate."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message, advice)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message} or {self.advice}." if self.advice else self.message


class PolicyError(BatchsimError):
    """A policy asks for what no engine could do."""


class SchedulerStalled(BatchsimError):  # noqa: N818
    """A scheduler has work and gets nowhere: it waits though nothing is due, preempts without end, or is where
    the engine that it follows fails."""


class PointsFailed(BatchsimError):  # noqa: N818
    """Some points of a sweep failed, the others are done and kept; the command line exits 1."""


class ExecutorError(BatchsimError):
    """The device failed a step. `reason`, for the records: `out_of_memory` or `step_failed`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[ExecutorError], tuple[str, str]]:
        return type(self), (str(self), self.reason)
