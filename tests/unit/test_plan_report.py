"""A plan's report: what its charts, pictures and sentences say of tables written by hand."""

from __future__ import annotations

import re
from typing import Any

from batchsim.report.page.plan_pictures import draw_pictures
from batchsim.study.planning.tables import Row, Tables

UNCHANGED: Row = {"traffic": 1.0, "dispersion": 1, "prompts": 1.0, "classes": "", "cost_factor": 1.0}
UNCHANGED |= {"slo_factor": 1.0, "window_share": 1.0, "gpu": "one", "policy": "fcfs", "seeds": 3, "holds": True}


def probe(replicas: int, share: float, **other: Any) -> Row:
    """A row of the table of probes: so many replicas at 10 requests/s with this share within the SLO."""
    row: Row = UNCHANGED | {"replicas": replicas, "attainment": share, "cost_per_month": 100.0 * replicas}
    row |= {"attainment_low": share - 0.001, "attainment_high": min(share + 0.001, 1.0), "offered_rps": 10.0}
    row |= {"goodput_rps": 10 * share, "margin_low": share - 0.991, "ttft_p99_s": 0.2, "tpot_p99_s": 0.02}
    return row | other


def tables_of(probes: list[Row], **other: Any) -> Tables:
    names = dict.fromkeys((row["gpu"], row["policy"]) for row in probes)
    chosen = {"gpu": "one", "policy": "fcfs", "replicas": 2, "slo": "ttft<300ms & tpot<50ms @ 99%"}
    return {
        "recommendation": [chosen],
        "configurations": [{"gpu": gpu, "policy": policy} for gpu, policy in names],
        "probes": probes,
        **other,
    }


def test_one_number_stands_above_marks_of_one_cost() -> None:
    """Of one kind of GPU, where two configurations cost the same; above each of another kind its own."""
    rows = [probe(3, 1.0), probe(3, 0.999, policy="other"), probe(3, 0.5, gpu="two"), probe(2, 0.8)]
    picture = draw_pictures(tables_of(rows), "$")["pareto"][1]
    assert re.findall(r"<!-- (\d) -->", picture).count("3") == 2
