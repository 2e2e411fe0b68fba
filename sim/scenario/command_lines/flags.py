"""What the flags of an engine's server mean to a scenario: a line is read by a table of them, and written back by it.

Flags that set a key of a scenario are in the .py of their server, all others in other_flags.yaml.
A scenario's keys are flat here: `model`, `max_model_len`, `deployment.tp`, `kv.utilisation`, and `policy.KNOB` for the
knobs of the engine's own policy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from batchsim.base.errors import ScenarioError

Keys = dict[str, Any]
_INT = re.compile(r"[+-]?\d+\Z", re.ASCII)
_DIGITS = 20  # of the longest number of 64 bits
_SUFFIXED = re.compile(rf"(\d{{1,{_DIGITS}}}(?:\.\d{{1,{_DIGITS}}})?)([A-Za-z]*)\Z", re.ASCII)
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
        number = _SUFFIXED.match(text)
        factor = powers.get(number[2]) if number else None
        value = 0.5 if number is None or factor is None else float(number[1]) * factor
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


def settle_loras(keys: Keys, title: str, slots: str, default: int) -> None:
    """Makes knobs of what flags say of LoRA adapters: with `enable_lora` alone as many `slots` as the engine has by
    `default`. ScenarioError where flags say something and it is not switched on."""
    stated = sorted(key.removeprefix("policy.") for key in keys if key.startswith("policy.") and "lora" in key)
    if keys.pop("enable_lora", False):
        keys.setdefault(slots, default)
    elif stated:
        flag = "--" + stated[0].replace("_", "-")
        raise ScenarioError(f"{title}: {flag} does nothing without --enable-lora. Add that, or leave it out.")


def unsettle_loras(keys: Keys) -> None:
    """Switches LoRA on where `keys` have a knob of it."""
    if any(key.startswith("policy.") and "lora" in key for key in keys):
        keys["enable_lora"] = True


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
