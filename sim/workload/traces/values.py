"""Single values of a trace file as integers: token counts and arrival times, never through a float."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal, InvalidOperation

from batchsim.base.units import NS_PER_S

UNIT_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": NS_PER_S}

_MAX_TOKENS = 2**31 - 1  # what engines hold a length in: a signed 32-bit integer
_MAX_NS = 2**63 - 1  # what an int64 column holds: 292 years, or a hash
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_ISO = re.compile(
    r"\s*(\d{4}-\d\d-\d\d)[T ]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:[.,](\d{1,9}))?"
    r"\s*(?:(Z)|([+-])(\d\d):?([0-5]\d))?\s*",
    re.ASCII,
)
_SHOWN = 40  # characters of a bad value shown in an error


def shown(value: object) -> str:
    """`value` for an error message: one line, quoted, cut where long."""
    text = str(value) if isinstance(value, (int, float, Decimal)) else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def refused(name: str, value: object, why: str) -> ValueError:
    """The error of a value of column `name`: that it is missing, or what it is, and `why` that is not taken."""
    return ValueError(f"{name} is missing" if value is None or value == "" else f"{name} {shown(value)} {why}")


def _number(value: object) -> Decimal | None:
    """`value` as a finite exact number, or None. Booleans are no numbers; a float means its shortest text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    text = value.strip() if isinstance(value, str) else str(value)
    if "_" in text or not text.isascii():
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def token_reader(name: str) -> Callable[[object], int]:
    """A reader of column `name`: a value to a token count of 0 or more, ValueError on any other."""

    def tokens(value: object) -> int:
        # The usual cases, kept fast; fewer than 10 digits need no further check.
        if type(value) is str and len(value) < 10 and value.isdigit() and value.isascii():
            return int(value)
        if type(value) is int and 0 <= value <= _MAX_TOKENS:
            return value
        number = _number(value)
        if number is None:
            raise refused(name, value, "is not a number of tokens")
        if number < 0:
            raise refused(name, value, "is negative")
        if number > _MAX_TOKENS:
            raise refused(name, value, f"is above {_MAX_TOKENS:,} tokens")
        if number != int(number):
            raise refused(name, value, "is not a whole number of tokens")
        return int(number)

    return tokens


def share_reader(name: str) -> Callable[[object], float]:
    """A reader of column `name`: a value to a number from 0 to 1, ValueError on any other."""

    def share(value: object) -> float:
        number = _number(value)
        if number is None or not 0 <= number <= 1:
            raise refused(name, value, "is no number from 0 to 1")
        return float(number)

    return share


def hash_id_reader(name: str, block_tokens: int) -> Callable[[object, int], list[int]]:
    """A reader of column `name`: (value, prompt tokens) to the list of its ids, one a block of `block_tokens`.

    A list may stand as its JSON text. The last block may be cut, or have no id, as where only full blocks are hashed.
    The reader raises ValueError on what is no such list.
    """

    def ids(value: object, prompt_tokens: int) -> list[int]:
        entries = value
        if isinstance(value, str):
            try:
                entries = json.loads(value)
            except ValueError:
                entries = None
        if not isinstance(entries, list) or not all(type(x) is int and 0 <= x <= _MAX_NS for x in entries):
            raise ValueError(f"{name} {shown(value)} is not a list of whole numbers from 0 to 2^63 - 1")
        whole, rest = divmod(prompt_tokens, block_tokens)
        if len(entries) not in (whole, whole + (rest > 0)):
            raise ValueError(
                f"{name} has {len(entries)} ids for {prompt_tokens} prompt tokens, which are"
                f" {whole + (rest > 0)} blocks of {block_tokens}; hash_id_block_size may be another"
            )
        return entries

    return ids


def clock_reader(name: str, unit: str) -> Callable[[object], int]:
    """A reader of column `name`: a value to a time in ns, exact to the ns, ValueError on any other.

    `unit` is ns, us, ms, s, counted from any origin, or iso, which is read as ns since 1970.
    """
    return _iso_reader(name) if unit == "iso" else _number_reader(name, unit)


def _number_reader(name: str, unit: str) -> Callable[[object], int]:
    unit_ns = UNIT_NS[unit]

    def clock(value: object) -> int:
        if type(value) is int and 0 <= value <= _MAX_NS // unit_ns:
            return value * unit_ns  # the usual case of JSON, kept fast
        number = _number(value)
        if number is None:
            hint = "; write time_unit: iso" if isinstance(value, str) and _ISO.fullmatch(value) else ""
            raise refused(name, value, f"is not a number{hint}")
        if number < 0:
            raise ValueError(f"{name} {shown(value)} is negative")
        if number > _MAX_NS // unit_ns:
            raise ValueError(f"{name} {shown(value)} is over 292 years if in {unit}: look at the time unit")
        return round(number * unit_ns)

    return clock


def _iso_reader(name: str) -> Callable[[object], int]:
    day_start_s: dict[str, int] = {}
    zoned: bool | None = None

    def clock(value: object) -> int:
        nonlocal zoned
        match = _ISO.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise refused(name, value, "is not an ISO date and time")
        day, hour, minute, second, fraction, utc, sign, zone_h, zone_min = match.groups()
        has_zone = utc is not None or sign is not None
        if zoned is None:
            zoned = has_zone
        elif zoned is not has_zone:
            raise ValueError(f"{name} {shown(value)} has {'a' if has_zone else 'no'} time zone, unlike those before it")
        start_s = day_start_s.get(day)
        if start_s is None:
            start_s = day_start_s[day] = _day_start_s(name, day)
        seconds = start_s + int(hour) * 3600 + int(minute) * 60 + int(second)
        if sign is not None:
            offset_s = int(zone_h) * 3600 + int(zone_min) * 60
            seconds += -offset_s if sign == "+" else offset_s
        return seconds * NS_PER_S + (int(fraction.ljust(9, "0")) if fraction else 0)

    return clock


def _day_start_s(name: str, day: str) -> int:
    """Seconds from 1970 to the start of `day`."""
    try:
        ordinal = date.fromisoformat(day).toordinal()
    except ValueError:
        raise ValueError(f"{name} {shown(day)} is no day of the calendar") from None
    seconds = (ordinal - _EPOCH_DAY) * 86_400
    if abs(seconds) > _MAX_NS // NS_PER_S - 2 * 86_400:
        raise ValueError(f"{name} {shown(day)} is over 292 years from 1970")
    return seconds
