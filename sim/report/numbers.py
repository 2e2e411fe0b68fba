"""Numbers as people read them: to the digits that their confidence interval leaves, never rounded to all or nothing."""

from __future__ import annotations

import math

from batchsim.base.units import two_digits

DASH = "–"


def rounded(value: float, ci: float, scale: float) -> str:
    """`48 ± 2`: value and half-width, times `scale`; `ci` to one digit, the value to its place but with two to four."""
    value, ci = value * scale, ci * scale
    lead = math.floor(math.log10(abs(value))) if value else 0
    place = lead - 2  # three digits where there is no interval
    if ci > 0:
        place = min(max(math.floor(math.log10(ci)), lead - 3), lead - 1)
    decimals = max(0, -place)
    text = f"{round(value, -place):.{decimals}f}"
    return text if math.isnan(ci) else f"{text} ± {round(ci, -place):.{decimals}f}"


def time_text(seconds: float, ci: float) -> str:
    """`610 ± 90 ms`, `2.4 ± 0.3 s`: a time with the half-width of its interval, both in seconds."""
    if math.isnan(seconds):
        return DASH
    unit, scale = ("s", 1) if seconds >= 1 else ("ms", 1e3)
    return f"{rounded(seconds, ci, scale)} {unit}"


def per_token_text(seconds: float) -> str:
    """`0.012`: seconds per token to two digits, without the interval, which pictures show."""
    return DASH if math.isnan(seconds) else two_digits(seconds)


def percent_text(share: float) -> str:
    """`99.4 %`, `41 %`, `0`: a share from 0 to 1 in percent, never rounded up to 100 nor down to 0."""
    if math.isnan(share):
        return DASH
    if share in (0, 1):
        return "0" if share == 0 else "100 %"
    percent = 100 * share
    if percent < 0.1:
        return "<0.1 %"
    if percent > 99.9:
        return ">99.9 %"
    return f"{percent:.1f} %" if percent < 10 or percent > 90 else f"{percent:.0f} %"


def rate_text(per_s: float) -> str:
    return DASH if math.isnan(per_s) else f"{per_s:.2f}" if per_s < 1 else f"{per_s:.1f}"
