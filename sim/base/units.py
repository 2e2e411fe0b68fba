"""Quantities with units, as scenarios write them: `50ms`, `8/s`, `55GB/s`, `5%`. A bare number is refused, unless it
is a fraction where a share is asked.

Inside, time is an integer of nanoseconds, a rate is requests per second, a size is bytes. Each quantity states its
range, as every number of a config does (`batchsim.base.ranges`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from batchsim.base.ranges import Range, number_text

NS_PER_S = 1_000_000_000
YEAR_NS = 365 * 24 * 3600 * NS_PER_S
MAX_TIME_NS = 2**62
"""146 years: sums of two such times still fit 64 bits."""
MAX_STEP_NS = 3600 * NS_PER_S
"""An hour: longer than any step of any engine."""

_TIME_NS = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
}
_SIZE_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_FLOPS = {"GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15}
_WATTS = {"W": 1, "kW": 1000}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%/]*)\s*\Z", re.ASCII)


def _split(text: object, what: str, example: str) -> tuple[float, str]:
    """The number and the unit of `text`; ValueError names what was expected."""
    if isinstance(text, bool) or not isinstance(text, str):
        raise ValueError(f"{text!r} is not a {what}. Write a number with a unit, like {example}.")
    match = _QUANTITY.match(text)
    if match is None or not math.isfinite(float(match[1])):
        raise ValueError(f"{text!r} is not a {what}. Write a number with a unit, like {example}.")
    return float(match[1]), match[2]


def _scaled(text: object, what: str, example: str, table: dict[str, int], suffix: str = "") -> float:
    value, unit = _split(text, what, example)
    scale = table.get(unit.removesuffix(suffix)) if unit.endswith(suffix) else None
    if scale is None:
        known = ", ".join(name + suffix for name in table)
        raise ValueError(f"{text!r} has no known unit of a {what}. Write one of {known}, like {example}.")
    if value < 0:
        raise ValueError(f"{text!r} is negative. A {what} is 0 or more.")
    if not math.isfinite(value * scale):
        raise ValueError(f"{text!r} is too large a {what}. Write one like {example}.")
    return value * scale


def parse_duration_ns(text: object) -> int:
    """`"50ms"` as 50_000_000 ns. Units ns, us, ms, s, min, h. ValueError on anything else."""
    return round(_scaled(text, "time", "50ms", _TIME_NS))


def parse_rate_rps(text: object) -> float:
    """`"8/s"` as 8.0 requests per second; also `/min` and `/h`. ValueError on anything else."""
    value, unit = _split(text, "rate", "8/s")
    per = {"/s": 1, "/min": 60, "/h": 3600}.get(unit)
    if per is None:
        raise ValueError(f"{text!r} has no known unit of a rate. Write one of /s, /min, /h, like 8/s.")
    if value <= 0:
        raise ValueError(f"{text!r} is not above 0. A rate is above 0.")
    return value / per


def parse_bytes(text: object) -> int:
    """`"32GB"` as 32_000_000_000 bytes; GB is decimal, GiB binary. ValueError on anything else."""
    return round(_scaled(text, "size", "32GB", _SIZE_BYTES))


def parse_bandwidth(text: object) -> float:
    """`"55GB/s"` as 55e9 bytes per second. ValueError on anything else."""
    value = _scaled(text, "bandwidth", "55GB/s", _SIZE_BYTES, suffix="/s")
    if value == 0:
        raise ValueError(f"{text!r} is not above 0. A bandwidth is above 0.")
    return value


def parse_flops(text: object) -> float:
    """`"989TFLOP/s"` as 989e12 operations per second. ValueError on anything else."""
    return _scaled(text, "speed of arithmetic", "989TFLOP/s", _FLOPS)


def parse_watts(text: object) -> float:
    """`"500W"` as 500 W; also `1.2kW`. ValueError on anything else."""
    return _scaled(text, "power", "500W", _WATTS)


def parse_share(text: object) -> float:
    """`"99%"` as 0.99, and a fraction below 1, number or text, as it is. ValueError on anything else: without % a 1 may
    be all or a hundredth, and more is no fraction."""
    bare = type(text) in (int, float)
    value, unit = _split(str(text) if bare else text, "share", "99%")
    if unit == "%" and 0 <= value <= 100:
        return value / 100
    if not unit and 0 <= value < 1:
        return value
    advice = "Write a percentage from 0% to 100%, like 99%, or a fraction, like 0.99."
    if not unit and 1 <= value <= 100:
        also = "or 100%, whichever is meant" if value == 1 else f"or {value / 100:g}"
        advice = f"Without a unit it is a fraction, below 1. Write {value:g}%, {also}."
    raise ValueError(f"{number_text(value) if bare else repr(text)} is not a share. {advice}")


def parse_price_per_h(text: object) -> float:
    """`"3.50/h"` as 3.5 units of money an hour. ValueError on anything else."""
    value, unit = _split(text, "price", "3.50/h")
    if unit != "/h" or value < 0:
        raise ValueError(f"{text!r} is not a price. Write the money for one GPU for an hour, like 3.50/h.")
    return value


def parse_price_per_kwh(text: object) -> float:
    """`"0.10/kWh"` as 0.1 units of money a kWh. ValueError on anything else."""
    value, unit = _split(text, "price of energy", "0.10/kWh")
    if unit != "/kWh" or value < 0:
        raise ValueError(f"{text!r} is not a price of energy. Write the money for one kWh, like 0.10/kWh.")
    return value


def parse_price_per_gb_month(text: object) -> float:
    """`"1.50/GB/month"` as 1.5 units of money a GB of memory a month. ValueError on anything else."""
    value, unit = _split(text, "price of memory", "1.50/GB/month")
    if unit != "/GB/month" or value < 0:
        raise ValueError(f"{text!r} is not a price of memory. Write the money for a GB a month, like 1.50/GB/month.")
    return value


def format_duration(ns: float) -> str:
    """A time for people, three significant digits: `1.23 s`, `48 ms`, `850 us`; whole seconds, and years from 2 on."""
    if abs(ns) >= 2 * YEAR_NS:
        return f"{_years(ns)} years"
    for unit, scale in (("s", NS_PER_S), ("ms", 1_000_000), ("us", 1_000)):
        if abs(ns) >= scale:
            return f"{ns / scale:.3g} {unit}" if abs(ns) < 1000 * scale else f"{ns / scale:,.0f} {unit}"
    return f"{ns:.0f} ns"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number of things in words: `1 step`, `1,200 steps`. `nouns` is the plural, where it is not `noun` and an s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def clock_text(ns: int) -> str:
    """A time since the start as a clock shows it, `13:42:07`: whole hours, minutes and seconds that have passed."""
    seconds = ns // NS_PER_S
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _years(ns: float) -> str:
    years = ns // YEAR_NS if isinstance(ns, int) else ns / YEAR_NS
    return number_text(years) if abs(years) >= 1000 else f"{ns / YEAR_NS:.3g}"


AS_HELD = {"quantities": "as held"}
"""A validator's context: the numbers of its JSON are in batchsim's own units."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Marks a config field that a scenario writes with a unit.

    From Python a number may be given as it is held, without one. The two dunder methods are pydantic's protocol, for
    which configs on the lowest floors need not import it.
    """

    parse: Callable[[object], float]
    example: str
    write: Callable[[float], str] = str
    """The text of a number that `parse` reads as that very number."""
    bare: bool = False
    """Whether `parse` reads numbers without a unit too."""

    def read(self, value: object, info: Any) -> object:
        """The number that `value` says; itself where no text comes from Python, or from JSON that is AS_HELD."""
        written = info.mode == "json" and info.context is not AS_HELD
        return self.parse(value) if written or isinstance(value, str) else value

    def __get_pydantic_core_schema__(self, source: object, handler: Callable[[object], Any]) -> dict[str, Any]:
        return {
            "type": "function-before",
            "function": {"type": "with-info", "function": self.read},
            "schema": handler(source),
            "serialization": {"type": "function-plain", "function": self.write, "when_used": "json"},
        }

    def __get_pydantic_json_schema__(self, schema: object, handler: object) -> dict[str, Any]:
        return {"type": ["string", "number"] if self.bare else "string", "examples": [self.example]}


def _with_unit(unit: str) -> Callable[[float], str]:
    return lambda value: f"{number_text(value)}{unit}"


def _exactly(unit: str, read: Callable[[float], float] = float) -> Callable[[float], str]:
    """A function that writes a number with `unit` so that `read` of what stands before the unit is that very number."""

    def write(value: float) -> str:
        middle = value / read(1) if read is not float else value
        near = (middle, math.nextafter(middle, math.inf), math.nextafter(middle, -math.inf))  # products are rounded
        return f"{next((each for each in near if read(each) == value), middle)!r}{unit}"

    return write


def _duration_text(ns: float) -> str:
    """The text that `parse_duration_ns` reads as these ns, in the largest unit in which it is short."""
    for unit in ("h", "min", "s", "ms", "us"):
        text = f"{ns / _TIME_NS[unit]:.6g}{unit}"
        is_short = ns % _TIME_NS[unit] == 0 or unit not in ("h", "min")
        if ns >= _TIME_NS[unit] and is_short and parse_duration_ns(text) == ns:
            return text
    return f"{round(ns)}ns" if ns else "0s"


def time_text(ns: float) -> str:
    """A time as a scenario writes it, where a range ends."""
    if ns == YEAR_NS:
        return "a year"
    return format_duration(ns).replace(" ", "") if ns else "0s"


def two_digits(number: float) -> str:
    """`0.012`, `7.5`, `700`: to two significant digits, as `.2g` has them but for its exponent from 100 on."""
    return f"{float(f'{number:.2g}'):g}"


def percent(share: float) -> str:
    """A share as a scenario writes it: `99%`."""
    return f"{number_text(100 * share)}%"


Duration = Annotated[int, Quantity(parse_duration_ns, "50ms", _duration_text), Range(0, YEAR_NS, show=time_text)]
"""Nanoseconds, written `50ms`."""
PositiveDuration = Annotated[Duration, Range(1, YEAR_NS, show=time_text)]
"""Nanoseconds, at least 1."""
StepDuration = Annotated[Duration, Range(1, MAX_STEP_NS, show=time_text)]
"""Nanoseconds that a whole step takes, at most an hour."""
HostDuration = Annotated[Duration, Range(0, 3600 * NS_PER_S, show=time_text)]
"""Nanoseconds that the host takes beside a step's kernels."""
PartDuration = Annotated[Duration, Range(0, NS_PER_S, show=time_text)]
"""Nanoseconds that one token, sequence or block adds to a step."""
TraceDuration = Annotated[Duration, Range(0, MAX_TIME_NS, show=time_text)]
"""Nanoseconds from the start of a trace, which may be a log of many years."""
Seconds = Annotated[float, Range(0, YEAR_NS / NS_PER_S)]
"""A time that a scenario writes as a bare number of seconds, as the system does whose knob it is."""
Microseconds = Annotated[int, Range(0, YEAR_NS // 1000)]
"""A time that a scenario writes as a bare number of microseconds, as the system does whose knob it is."""
Rate = Annotated[float, Quantity(parse_rate_rps, "8/s", _exactly("/s")), Range(1e-6, 1e6, show=_with_unit("/s"))]
"""Requests per second, written `8/s`: from one in 12 days to more than any service has."""
Size = Annotated[int, Quantity(parse_bytes, "32GB", _exactly("B")), Range(0, 10**15, show=_with_unit("B"))]
"""Bytes, written `32GB`."""
Bandwidth = Annotated[
    float, Quantity(parse_bandwidth, "55GB/s", _exactly("B/s")), Range(1e3, 1e15, show=_with_unit("B/s"))
]
"""Bytes per second, written `55GB/s`."""
Flops = Annotated[
    float,
    Quantity(parse_flops, "989TFLOP/s", _exactly("GFLOP/s", lambda number: number * 1e9)),
    Range(1e9, 1e18, show=_with_unit("FLOP/s")),
]
"""Floating-point operations per second, written `989TFLOP/s`."""
Watts = Annotated[float, Quantity(parse_watts, "500W", _exactly("W")), Range(1, 1e6, show=_with_unit("W"))]
"""Power in W, written `500W`."""
PricePerHour = Annotated[
    float, Quantity(parse_price_per_h, "3.50/h", _exactly("/h")), Range(0, 1e6, show=_with_unit("/h"))
]
"""Money an hour, written `3.50/h`; which money is said elsewhere."""
PricePerKwh = Annotated[
    float, Quantity(parse_price_per_kwh, "0.10/kWh", _exactly("/kWh")), Range(0, 1e6, show=_with_unit("/kWh"))
]
"""Money a kWh, written `0.10/kWh`; which money is said elsewhere."""
PricePerGbMonth = Annotated[
    float,
    Quantity(parse_price_per_gb_month, "1.50/GB/month", _exactly("/GB/month")),
    Range(0, 1e6, show=_with_unit("/GB/month")),
]
"""Money a GB of memory a month, written `1.50/GB/month`; which money is said elsewhere."""
Share = Annotated[
    float,
    Quantity(parse_share, "99%", _exactly("%", lambda number: number / 100), bare=True),
    Range(0, 1, show=percent),
]
"""A fraction from 0 to 1, written `99%` or `0.99`."""
PartialShare = Annotated[Share, Range(0, 1, below=True, show=percent)]
"""A share that cannot be all."""
