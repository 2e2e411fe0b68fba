"""How each policy is drawn, the same in every picture: colour and marker by its kind, which is fixed here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from batchsim.report.reading import PolicyCurve

# Line, the first of those below: solid where members join and leave at every step, dashed where batches run whole.
_SOLID, _DASHED = 0, 1
_BLACK = "#000000"
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", _BLACK)
"""The palette of Okabe and Ito (jfly.uni-koeln.de/color, 2008), made for colour-blind readers; black last."""

# Okabe and Ito's palette, then Tol's muted one (personal.sron.nl/~pault, 2021): each is
# made for colour-blind readers. Where both stand in one picture markers and lines help.
_KINDS = {
    "static": ("#D55E00", "s", _SOLID),
    "dynamic": ("#E69F00", "D", _SOLID),
    "continuous": ("#0072B2", "o", _SOLID),
    "preemptive": ("#009E73", "^", _SOLID),
    "vllm": ("#CC79A7", "v", _SOLID),
    "sglang": ("#56B4E9", "P", _SOLID),
    "tensorrt_llm": (_BLACK, "X", _SOLID),
    "tgi": ("#117733", "d", _SOLID),
    "llama_cpp": ("#8C6D31", "h", _SOLID),
    "orca": ("#882255", "<", _SOLID),
    "sarathi": ("#999933", ">", _SOLID),
    "vllm_v0": ("#332288", "^", _SOLID),
    "hf_static": ("#D55E00", "s", _DASHED),
    "faster_transformer": ("#7F7F7F", "H", _DASHED),
    "triton": ("#0072B2", "p", _DASHED),
    "tf_serving": ("#E69F00", "D", _DASHED),
    "ray_serve": ("#44AA99", "*", _DASHED),
    "energy_aware": ("#117733", "p", _DASHED),
}
_OTHER_KINDS = (("#7F7F7F", "<"), ("#8C6D31", ">"), ("#5B5EA6", "p"))  # in the order in which they appear
_TONES = (0.0, -0.4, 0.25, -0.65, -0.2)  # of members of one kind: toward black below 0, toward white above
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", (0, (4, 1.5)), "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))  # tell members of one kind apart
_PALE, _DARK = 0.35, 0.6  # how far the first and last value of a varied key are from their policy's own colour
LEAST_CONTRAST = 3.0
"""Of a line to white, as WCAG 2.2 asks of graphics (success criterion 1.4.11)."""


@dataclass(frozen=True)
class PolicyStyle:
    """How one policy is drawn in every picture of a run."""

    color: str
    marker: str
    linestyle: Any


def policy_styles(policies: list[PolicyCurve]) -> dict[str, PolicyStyle]:
    """The style of each policy by name: its kind's marker and a tone of its colour; within a kind lines differ too.
    Where several are of one kind alone, each has a colour and a marker of its own.

    The values of a varied key share a policy's line and colour and differ in shade, the first the palest, and marker.
    """
    kinds = {sweep.label: sweep.kind for sweep in policies}
    styles = dict(zip(kinds, kind_styles(list(kinds.values())), strict=True))
    by_policy = {}
    for sweep in policies:
        values = [each.policy for each in policies if each.label == sweep.label]
        style = styles[sweep.label]
        number = values.index(sweep.policy)
        color = _shade(style.color, number, len(values))
        marker = style.marker if len(values) == 1 else _MARKERS[number % len(_MARKERS)]
        by_policy[sweep.policy] = replace(style, color=color, marker=marker)
    return by_policy


def kind_styles(kinds_of: list[str]) -> list[PolicyStyle]:
    """The styles of policies of these kinds, in their order."""
    if len(kinds_of) > 1 and len(set(kinds_of)) == 1:
        return [
            PolicyStyle(
                _readable(OKABE_ITO[i % len(OKABE_ITO)]), _MARKERS[i % len(_MARKERS)], _LINES[i // len(OKABE_ITO) % 5]
            )
            for i in range(len(kinds_of))
        ]
    kinds: dict[str, tuple[str, str, int]] = dict(_KINDS)
    seen: Counter[str] = Counter()
    styles = []
    for kind in kinds_of:
        other = _OTHER_KINDS[(len(kinds) - len(_KINDS)) % len(_OTHER_KINDS)]
        color, marker, first = kinds.setdefault(kind, (*other, _SOLID))
        tone = _TONES[seen[kind] % len(_TONES)]
        tone = abs(tone) if color == _BLACK else tone
        styles.append(PolicyStyle(_readable(_toned(color, tone)), marker, _LINES[(first + seen[kind]) % len(_LINES)]))
        seen[kind] += 1
    return styles


def _shade(color: str, number: int, of: int) -> str:
    """Shade `number` (from 0) of `of` shades of `color`, as #RRGGBB: from the palest that shows to nearly black."""
    if of == 1:
        return color
    palest = _PALE
    while contrast_to_white(_toned(color, palest)) < LEAST_CONTRAST:
        palest -= 0.05
    return _toned(color, palest - (palest + _DARK) * number / (of - 1))


def contrast_to_white(color: str) -> float:
    """The contrast of `color`, as #RRGGBB, to white, from 1 to 21 (WCAG 2.2, relative luminance)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


def _readable(color: str) -> str:
    """`color`, darkened until its contrast to white is LEAST_CONTRAST."""
    tone = 0.0
    while contrast_to_white(_toned(color, tone)) < LEAST_CONTRAST:
        tone -= 0.05
    return _toned(color, tone)


def _toned(color: str, tone: float) -> str:
    """`color` as #RRGGBB, mixed with white by a share of `tone`, with black where that is below 0."""
    toward, share = (255 if tone > 0 else 0), abs(tone)
    mixed = (round((1 - share) * int(color[i : i + 2], 16) + share * toward) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02X}" for part in mixed)
