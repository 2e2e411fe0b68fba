"""Reads numbers and lists of a Hugging Face config.json, or says in one line which one is missing or wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from batchsim.base.errors import ScenarioError, shown
from batchsim.base.ranges import INT32_MAX, Range, number_text

COUNTS = Range(1, INT32_MAX)
_WITHIN = {"num_hidden_layers": Range(1, 10_000)}
"""Ranges of numbers that are smaller: of layers, each of which is made."""


def count_at(config: Mapping[str, object], key: str, name: str, default: int | None = None) -> int:
    """The positive integer at `key`; ScenarioError if it is something else or missing without a default."""
    value, within = config.get(key), _WITHIN.get(key, COUNTS)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value not in within:
        what = "missing" if value is None else number_text(value) if type(value) is int else shown(value)
        raise ScenarioError(f"{name}: {key} is {what}. A config.json holds a whole number {within} there.")
    return value


def count_or_none(config: Mapping[str, object], key: str, name: str) -> int:
    """The positive integer at `key`; 0 where nothing, null, false or 0 is."""
    return count_at(config, key, name) if config.get(key) else 0


def flag_at(config: Mapping[str, object], key: str, name: str, *, default: bool = False) -> bool:
    """The boolean at `key`; `default` where nothing or null is, ScenarioError for anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ScenarioError(f"{name}: {key} is {shown(value)}. Write true or false.")
    return default if value is None else value


def object_at(config: Mapping[str, object], key: str, name: str) -> Mapping[str, object]:
    """The object at `key`; ScenarioError where there is none."""
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise ScenarioError(f"{name}: {key} is {'missing' if value is None else shown(value)}. Write an object there.")
    return cast("Mapping[str, object]", value)


def list_at(
    config: Mapping[str, object], key: str, name: str, known: Sequence[object], layers: int | None = None
) -> list[object]:
    """The list at `key`, of which each entry is among `known`, one for each of as many `layers` as are stated.

    ScenarioError, headed `name`, with the first entry that is not, or how many there are.
    """
    value = config.get(key)
    words = f"{known[0]} to {known[-1]}" if isinstance(known, range) else ", ".join(map(str, known))
    if not isinstance(value, list):
        what = "missing" if value is None else shown(value)
        raise ScenarioError(f"{name}: {key} is {what}. Write a list, one of {words} for each layer.")
    listed = cast("list[object]", value)
    if any(kind not in known for kind in listed):
        other = next(kind for kind in listed if kind not in known)
        raise ScenarioError(f"{name}: {key} has {shown(other)}; known are {words}, one for each layer.")
    if layers is not None and len(listed) != layers:
        raise ScenarioError(
            f"{name}: {key} has {len(listed)} of {layers} layers; known are {words}, one for each layer."
        )
    return listed
