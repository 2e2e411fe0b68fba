"""What the flags of an engine's server mean to a scenario: a line is read by a table of them, and written back by it.

Flags that set a key of a scenario are in the .py of their server, all others in other_flags.yaml.
A scenario's keys are flat here: `model`, `max_model_len`, `deployment.tp`, `kv.utilisation`, and `policy.KNOB` for the
knobs of the engine's own policy.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from batchsim.base.errors import ScenarioError, cut, nearest

Keys = dict[str, Any]
_INT = re.compile(r"[+-]?\d+\Z", re.ASCII)
_DIGITS = 20  # of the longest number of 64 bits
_SUFFIXED = re.compile(rf"(\d{{1,{_DIGITS}}}(?:\.\d{{1,{_DIGITS}}})?)([A-Za-z]*)\Z", re.ASCII)
_FLAG = re.compile(r"--?[A-Za-z]")  # no negative number
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)
OPTIONS_FILE = "options.yaml"
SAME = "without effect on timing"
UNTOLD = "chooses among kernels that the tables do not tell apart"
CHECKPOINTS = "as the checkpoint is quantised"
"""What `--quantization` is read as where it only names what the checkpoint's config.json says."""


def integer(text: str) -> int:
    """`text` as a whole number; ValueError if it is none."""
    if not _INT.match(text):
        raise ValueError("a whole number")
    if len(text) > _DIGITS:
        raise ValueError(f"a whole number of at most {_DIGITS} digits")
    return int(text)


def with_suffix(powers: Mapping[str, int]) -> Callable[[str], int]:
    """A reader of whole numbers that may end in one of the suffixes `powers`, as 8k does."""

    def read(text: str) -> int:
        found = _SUFFIXED.match(text)
        factor = powers.get(found[2]) if found else None
        value = 0.5 if found is None or factor is None else float(found[1]) * factor
        if value != int(value):
            raise ValueError(f"a whole number, like 8192, or with one of {', '.join(filter(None, powers))}")
        return int(value)

    return read


def share(text: str) -> str:
    """`text`, a number up to 1, as the percentage that a scenario writes; ValueError if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = 2.0
    if not 0 < value <= 1:
        raise ValueError("a number above 0 and up to 1")
    return f"{100 * value:.10g}%"


def as_share(percent: str) -> str:
    """A percentage as the number that flags write."""
    return f"{float(percent.rstrip('%')) / 100:.10g}"


def number(text: str) -> float:
    """`text` as a finite number; ValueError if it is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError("a number")
    return value


def one_of(**meanings: Any) -> Callable[[str], Any]:
    """A reader of words: each of `meanings` as its value."""

    def read(text: str) -> Any:
        word = text.lower().replace("-", "_")
        if word not in meanings:
            raise ValueError(f"one of {', '.join(meanings)}")
        return meanings[word]

    return read


def words(*known: str) -> Callable[[str], str]:
    """A reader of words that a scenario writes as they are."""
    return one_of(**{word: word for word in known})


@dataclass(frozen=True)
class Flag:
    """A flag that sets `key`, by its name and further ones. `read` makes the key's value of the flag's, or raises
    ValueError with what it should be, and `show` the text of that value; a flag without `read` takes none and sets
    `value`. A value read as None sets nothing: it is the engine's own choice."""

    key: str
    name: str
    others: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = integer
    show: Callable[[Any], str] = str
    value: Any = True


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


@dataclass(frozen=True)
class OtherFlags:
    """Flags of a server that set no key, as other_flags.yaml has them.

    `means` is SAME or UNTOLD by name, and `takes` says of these whether they take `nothing`, `a value` or `several`;
    `refused` says why a flag has no counterpart, `refused_values` the same by patterns of a flag with its value.
    `environment` is SAME or UNTOLD by patterns of assignments that may stand before the command. `same_options` are
    names in the file of options that change nothing.
    """

    means: Mapping[str, str]
    takes: Mapping[str, str]
    refused: Mapping[str, str]
    refused_values: Mapping[str, str]
    environment: Mapping[str, str]
    same_options: tuple[str, ...]


@cache
def other_flags(server: str) -> OtherFlags:
    """The flags of the server of an engine that set no key; KeyError for an engine without a server."""
    text = resources.files("batchsim.scenario.command_lines").joinpath("other_flags.yaml").read_text(encoding="utf-8")
    table = yaml.safe_load(text)[server]
    groups = [
        (meaning, takes, names.split())
        for key, meaning in (("same", SAME), ("untold", UNTOLD))
        for takes, names in table[key].items()
    ]
    return OtherFlags(
        means={name: meaning for meaning, _, names in groups for name in names},
        takes={name: takes for _, takes, names in groups for name in names},
        refused={name: why for names, why in table["refused"].items() for name in names.split()},
        refused_values=table.get("refused_values", {}),
        environment={
            pattern: meaning
            for key, meaning in (("same", SAME), ("untold", UNTOLD))
            for pattern in table["environment"][key]
        },
        same_options=tuple(table.get("same_options", "").split()),
    )


@dataclass(frozen=True)
class Engine:
    """The server of an engine: how its command line begins, where the model stands, and the flags that set keys.

    `spell` brings flags into the one form that tables have. `settle` makes keys of what was read, and `unsettle` what
    was read of keys. `options` reads the file of options that a flag names, and `option_lines` takes out of keys what
    only such a file can say.
    """

    name: str
    title: str
    heads: tuple[tuple[str, ...], ...]
    flags: tuple[Flag, ...]
    model_flags: tuple[str, ...]
    spell: Callable[[str], str]
    settle: Callable[[Keys], None]
    unsettle: Callable[[Keys], None]
    model_first: bool = True
    options: Callable[[str], Keys] | None = None
    option_lines: Callable[[Keys], list[str]] | None = None

    @property
    def others(self) -> OtherFlags:
        """The flags that set no key."""
        return other_flags(self.name)

    def by_name(self) -> dict[str, Flag]:
        """Every flag by each of its names."""
        return {name: flag for flag in self.flags for name in (flag.name, *flag.others)}

    def names(self) -> Iterable[str]:
        """All names that the table knows."""
        return [*self.by_name(), *self.model_flags, *self.others.means, *self.others.refused]


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
    if "kv.tokens" in reader.keys and reader.keys.pop("kv.utilisation", None) is not None:
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
    model = left.pop("model")
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
    """The words after the program's name; assignments before it are told to `reader`."""
    try:
        found = shlex.split(re.sub(r"\\\s*\n", " ", line), comments=True)
    except ValueError as error:
        raise ScenarioError(f"{engine.title}: the command cannot be read: {str(error).lower()}. Close it.") from None
    while found and _ASSIGNMENT.match(found[0]):
        reader.assign(found.pop(0))
    for head in sorted(engine.heads, key=len, reverse=True):
        if [word.rpartition("/")[2] if i == 0 else word for i, word in enumerate(found[: len(head)])] == [*head]:
            return found[len(head) :]
    begins = cut(" ".join(found[:4])) or "nothing"
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
