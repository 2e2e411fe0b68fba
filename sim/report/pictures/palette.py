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
}
_OTHER_KINDS = (("#7F7F7F", "<"), ("#8C6D31", ">"), ("#5B5EA6", "p"))  # in the order in which they appear
_TONES = (0.0, -0.4, 0.45, -0.65, 0.65)  # of members of one kind: toward black below 0, toward white above
_LINES = ("-", (0, (4, 1.5)), "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))  # tell members of one kind apart
_PALE, _DARK = 0.55, 0.55  # how far the first and last value of a varied key are from their policy's own colour


@dataclass(frozen=True)
class PolicyStyle:
    """How one policy is drawn in every picture of a run."""

    color: str
    marker: str
    linestyle: Any


def policy_styles(policies: list[PolicyCurve]) -> dict[str, PolicyStyle]:
    """The style of each policy by name: its kind's marker and a tone of its colour; within a kind lines differ too.

    The values of a varied key share a policy's line and marker and differ in shade, the first the palest.
    """
    kinds = {sweep.label: sweep.kind for sweep in policies}
    styles = dict(zip(kinds, kind_styles(list(kinds.values())), strict=True))
    by_policy = {}
    for sweep in policies:
        values = [each.policy for each in policies if each.label == sweep.label]
        style = styles[sweep.label]
        color = _shade(style.color, values.index(sweep.policy), len(values))
        by_policy[sweep.policy] = replace(style, color=color)
    return by_policy


def kind_styles(kinds_of: list[str]) -> list[PolicyStyle]:
    """The styles of policies of these kinds, in their order."""
    kinds: dict[str, tuple[str, str, int]] = dict(_KINDS)
    seen: Counter[str] = Counter()
    styles = []
    for kind in kinds_of:
        other = _OTHER_KINDS[(len(kinds) - len(_KINDS)) % len(_OTHER_KINDS)]
        color, marker, first = kinds.setdefault(kind, (*other, _SOLID))
        tone = _TONES[seen[kind] % len(_TONES)]
        tone = abs(tone) if color == _BLACK else tone
        styles.append(PolicyStyle(_toned(color, tone), marker, _LINES[(first + seen[kind]) % len(_LINES)]))
        seen[kind] += 1
    return styles


def _shade(color: str, number: int, of: int) -> str:
    """Shade `number` (from 0) of `of` shades of `color`, as #RRGGBB; they run from nearly white to nearly black."""
    if of == 1:
        return color
    place = number / (of - 1)
    return _toned(color, _PALE * (1 - 2 * place) if place < 0.5 else -_DARK * (2 * place - 1))


def _toned(color: str, tone: float) -> str:
    """`color` as #RRGGBB, mixed with white by a share of `tone`, with black where that is below 0."""
    toward, share = (255 if tone > 0 else 0), abs(tone)
    mixed = (round((1 - share) * int(color[i : i + 2], 16) + share * toward) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02X}" for part in mixed)
