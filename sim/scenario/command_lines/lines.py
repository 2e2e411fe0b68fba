"""Command lines of engines' servers: read by the table of their flags, and written back by it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from batchsim.base.errors import ScenarioError, cut, nearest
from batchsim.deployment.hub import apart
from batchsim.scenario.command_lines.flags import CHECKPOINTS, SAME, Engine, Flag, Keys

_FLAG = re.compile(r"--?[A-Za-z]")  # no negative number
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)
OPTIONS_FILE = "options.yaml"


@dataclass(frozen=True)
class Read:
    """What a command line says: `keys` of a scenario; `same` are its words that do not change timing, `untold` those
    that choose among kernels of which the tables have one. `quantised` is the flag, with its value, that says of the
    checkpoint how it is quantised; "" without one."""

    engine: str
    keys: Keys
    same: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()
    quantised: str = ""


def read_line(line: str, engine: Engine) -> Read:
    """What the command `line` says to a scenario.

    ScenarioError, in one line, for what is no such command, for a flag that changes timing and has no counterpart, and
    for one that is not known.
    """
    reader = _Reader(engine)
    reader.take(_after_head(line, engine, reader))
    if "model" not in reader.keys:
        raise ScenarioError(f"{engine.title}: the command names no model. Write {_example(engine)}.")
    engine.settle(reader.keys)
    if {"kv.tokens", "kv.memory"} & reader.keys.keys() and reader.keys.pop("kv.utilisation", None) is not None:
        reader.same += [flag.name for flag in engine.flags if flag.key == "kv.utilisation"]  # the tokens are stated
    return Read(engine.name, reader.keys, tuple(reader.same), tuple(reader.untold), reader.quantised)


@dataclass(frozen=True)
class Written:
    """A command line; `options` are the lines of the file OPTIONS_FILE that it names, () where it names none; `unsaid`
    names the keys for which the engine has no flag, each with its value."""

    line: str
    options: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()


def write_line(keys: Keys, engine: Engine) -> Written:
    """The command line that says `keys`. ScenarioError where the engine cannot divide its GPUs so."""
    left = dict(keys)
    model, revision = apart(left.pop("model"))
    engine.unsettle(left)
    options = () if engine.option_lines is None else tuple(engine.option_lines(left))
    if options:
        left["options"] = OPTIONS_FILE
    parts = [*engine.heads[0]]
    parts += [model] if engine.model_first else [engine.model_flags[0], model]
    for flag in engine.flags:
        if flag.key in left and _says(flag, left[flag.key]):
            value = left.pop(flag.key)
            parts += [flag.name] if flag.read is None else [flag.name, flag.show(value)]
    parts += ["--revision", revision] if revision else []
    return Written(shlex.join(parts), options, tuple(f"{key} {value}" for key, value in left.items()))


def _says(flag: Flag, value: Any) -> bool:
    """Whether the flag can say `value`."""
    if flag.read is None:
        return value == flag.value
    try:
        return flag.read(flag.show(value)) == value
    except ValueError:
        return False


def _example(engine: Engine) -> str:
    head = " ".join(engine.heads[0])
    return f"{head} MODEL" if engine.model_first else f"{head} {engine.model_flags[0]} MODEL"


def _after_head(line: str, engine: Engine, reader: _Reader) -> list[str]:
    """The words after the program's name; assignments before it go to `reader`."""
    try:
        words = shlex.split(re.sub(r"\\\s*\n", " ", line), comments=True)
    except ValueError as error:
        raise ScenarioError(f"{engine.title}: the command cannot be read: {str(error).lower()}. Close it.") from None
    while words and _ASSIGNMENT.match(words[0]):
        reader.assign(words.pop(0))
    for head in sorted(engine.heads, key=len, reverse=True):
        if [word.rpartition("/")[2] if i == 0 else word for i, word in enumerate(words[: len(head)])] == [*head]:
            return words[len(head) :]
    begins = cut(" ".join(words[:4])) or "nothing"
    raise ScenarioError(f"{engine.title}: the command begins with {begins}. Write {_example(engine)} and its flags.")


class _Reader:
    """Reads the words of a line one after another into `keys`, `same`, `untold` and `quantised`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.flags, self.keys = engine.by_name(), Keys()
        self.same: list[str] = []
        self.untold: list[str] = []
        self.quantised = ""
        self._given: dict[str, str] = {}

    def assign(self, word: str) -> None:
        """Takes a variable of the environment."""
        name = word.partition("=")[0]
        kind = next((kind for pattern, kind in self.engine.others.environment.items() if re.match(pattern, word)), "")
        if not kind:
            raise ScenarioError(
                f"{self.engine.title}: whether {name} changes timing is not known. Leave it out if it does not."
            )
        (self.same if kind == SAME else self.untold).append(name)

    def take(self, words: list[str]) -> None:
        """Takes all words after the program's name."""
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if not word.startswith("-"):
                self._set_model(word)
                continue
            spelt, equals, value = word.partition("=")
            name = self.engine.spell(spelt)
            count = 0 if equals else self._count(name, words[at:])
            values = [value] if equals else words[at : at + count]
            at += count
            self._flag(name, spelt, values)

    def _count(self, name: str, rest: list[str]) -> int:
        """How many of the words after the flag `name` are its values."""
        others = self.engine.others
        if name in self.flags:
            return 0 if self.flags[name].read is None else 1
        if name in others.refused:
            return 0
        if name in self.engine.model_flags:
            return 1
        takes = others.takes.get(name, "a value")
        most = {"nothing": 0, "a value": 1, "several": len(rest)}[takes]
        return next((i for i, word in enumerate(rest[:most]) if _FLAG.match(word)), min(most, len(rest)))

    def _set_model(self, model: str) -> None:
        if "model" in self.keys:
            raise ScenarioError(
                f"{self.engine.title}: {cut(model)} is the value of no flag, and the model is {self.keys['model']}."
                " Leave one out."
            )
        self.keys["model"] = model

    def _flag(self, name: str, spelt: str, values: list[str]) -> None:
        engine, title = self.engine, self.engine.title
        flag = self.flags.get(name)
        canonical = name if flag is None else flag.name
        if canonical in self._given:
            raise ScenarioError(f"{title}: {spelt} is given twice. Keep one.")
        self._given[canonical] = spelt
        if why := self._refused(name, values):
            way_out = "" if ". " in why else " Leave it out to simulate an engine without it."
            raise ScenarioError(f"{title}: {' '.join((spelt, *values))} has no counterpart: {why}.{way_out}")
        if flag is not None:
            self._set(flag, spelt, values)
        elif name in engine.model_flags:
            self._set_model(*values or self._missing(spelt))
        elif name in engine.others.means:
            (self.same if engine.others.means[name] == SAME else self.untold).append(spelt)
        else:
            known = nearest(name, engine.names(), "Leave it out if it does not change timing.")
            raise ScenarioError(f"{title}: {cut(spelt)} is no flag that is known of {title}. {known}")

    def _refused(self, name: str, values: list[str]) -> str | None:
        """Why a flag with such values has no counterpart; None where it has."""
        others, said = self.engine.others, " ".join((name, *values))
        return others.refused.get(name) or next(
            (why for pattern, why in others.refused_values.items() if re.match(pattern, said)), None
        )

    def _missing(self, spelt: str) -> list[str]:
        raise ScenarioError(f"{self.engine.title}: {spelt} has no value. Write one.")

    def _set(self, flag: Flag, spelt: str, values: list[str]) -> None:
        if flag.read is None:
            if values:
                raise ScenarioError(f"{self.engine.title}: {spelt} takes no value. Write {spelt} alone.")
            self.put(flag.key, flag.value, spelt)
            return
        (text,) = values or self._missing(spelt)
        if text.startswith("--"):
            self._missing(spelt)
        if flag.key == "options" and self.engine.options is not None:
            for key, value in self.engine.options(text).items():
                self.put(key, value, f"{key} of {text}")
            return
        try:
            value = flag.read(text)
        except ValueError as error:
            raise ScenarioError(f"{self.engine.title}: {spelt} is {cut(text)!r}. Write {error}.") from None
        if value is CHECKPOINTS:
            self.quantised = f"{spelt} {text}"
        if value in (None, CHECKPOINTS):
            self.same.append(spelt)
        else:
            self.put(flag.key, value, spelt)

    def put(self, key: str, value: Any, spelt: str) -> None:
        """Sets `key`; ScenarioError where two flags say different things of it."""
        if key in self.keys and self.keys[key] != value:
            raise ScenarioError(f"{self.engine.title}: {spelt} says another thing than a flag before it. Keep one.")
        self.keys[key] = value
