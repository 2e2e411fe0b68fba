"""What a plan recommends, in sentences: what to buy, what that was shown to hold, what growth or a loss takes."""

from __future__ import annotations

from collections.abc import Callable

from batchsim.report.cost_words import HOW
from batchsim.report.page.plan_columns import Tables, cell, is_below_all
from batchsim.report.sheet import NO_BREAK, Cell, Sentence
from batchsim.study.planning.assumptions import COMMAND, UNSAID
from batchsim.study.planning.make import GROWN, WHAT_IFS


def recommendation(tables: Tables, currency: str) -> list[Sentence]:
    """What to buy at which price; what it was shown to hold; how uncertain that is; what growth would take, where that
    is known; what a lost replica leaves. One sentence if nothing holds."""
    if "recommendation" not in tables:
        nothing: Sentence = [
            "No configuration holds this traffic within the SLO: the table below says what keeps each from it."
        ]
        return [nothing, *_if_fast(tables)]
    chosen = tables["recommendation"][0]
    index = next(
        i
        for i, row in enumerate(tables["configurations"])
        if (row["gpu"], row["policy"], row["holds"]) == (chosen["gpu"], chosen["policy"], True)
    )

    def of(column: str, table: str = "configurations") -> Cell:
        return cell(tables, table, index if table == "configurations" else 0, column)

    row = tables["configurations"][index]
    one = "set of engines" if " prefill" in row["policy"] else "replica"  # as the name of a search's choice says it
    engines = one if row["replicas"] == 1 else {"replica": "replicas"}.get(one, "sets of engines")
    first: Sentence = ["Run ", of("replicas"), f" {engines} on ", of("gpu"), " under ", of("policy")]
    if "router " not in row["policy"]:  # else a search has chosen it, and its name says so
        first += [" behind ", of("router", "recommendation")]
    first += _of_traffic(tables, of)
    first += [
        f": {currency}{NO_BREAK}",
        of("cost_per_month"),
        f" a month, {currency}{NO_BREAK}",
    ]
    first += [of("cost_per_1m_output_tokens"), " per million output tokens"]
    if chosen["next_cost_per_month"] == chosen["cost_per_month"]:
        first += _tied(tables, chosen["next_index"], index)
    elif chosen["next_cost_per_month"] is not None:
        first += [f" (the next best: {currency}{NO_BREAK}", of("next_cost_per_month", "recommendation"), " a month)"]
    second: Sentence = ["In the busiest window (", of("window", "recommendation"), ") ", of("attainment")]
    second += [f" of {chosen['counted']} meet ", of("slo", "recommendation")]
    holds = "the same replica holds" if row["replicas"] == 1 else "the same replicas hold"
    if row["headroom"]:
        second += [f", and {holds} with ", of("headroom"), " of traffic"]
    else:
        second += [", and there is no room above the target: no traffic beyond it was shown to hold"]
    if row["one_less"] is not None:
        is_ = "" if row["one_less_shown"] == "fails" else "is "
        second += ["; one replica less gives ", of("one_less"), f" and {is_}", of("one_less_shown")]
        least, worst = row["one_less_margin_low"], row["one_less_class"]
        if least is not None and not is_below_all(least):
            second += [" (lower end of its margin: ", of("one_less_margin_low")]
            second += [", of ", of("one_less_class"), ")"] if worst else [")"]
        elif worst:
            second += [" (worst: ", of("one_less_class"), ")"]
    sentences = [[*first, "."], [*second, "."], [*_uncertainty(tables, index), "."], *_grown(tables, index, currency)]
    return [*sentences, _lost(tables, index, currency)]


def _of_traffic(tables: Tables, of: Callable[[str, str], Cell]) -> Sentence:
    """For which traffic the recommendation is the cheapest, growth apart; of tasks the rate of requests says little."""
    chosen = tables["recommendation"][0]
    if chosen["peak_rps"] is None or chosen["counted"] == "tasks":
        return [", the cheapest that holds this traffic"]
    said: Sentence = [", the cheapest that holds ", of("peak_rps", "recommendation"), " requests/s at the peak"]
    if chosen["months"]:
        said += [" (", of("today_rps", "recommendation"), " today, and ", of("growth_per_month", "recommendation")]
        said += [" more each month for ", of("months", "recommendation"), " months)"]
    return said


def _tied(tables: Tables, other: int, index: int) -> Sentence:
    """The configuration that costs as much as the recommended one, and why it is not the one."""
    rows = tables["configurations"]
    gpu, policy, replicas, room = (
        cell(tables, "configurations", other, name) for name in ("gpu", "policy", "replicas", "headroom")
    )
    own = cell(tables, "configurations", index, "headroom")
    said: Sentence = [" (", gpu, " × ", replicas, " under ", policy, " costs as much, with "]
    if rows[other]["headroom"] < rows[index]["headroom"]:
        return [*said, "a headroom of ", room, " where this has ", own, ")"]
    return [*said, "no more headroom or margin)"]


def _if_fast(tables: Tables) -> list[Sentence]:
    """Where no configuration holds, which would with steps as short as its cost's error allows; [] where none would."""
    rows = tables["configurations"]
    held = [i for i, row in enumerate(rows) if row["replicas_if_fast"] is not None]
    if not held:
        return []
    said: Sentence = ["With steps as short as the error of their costs allows, "]
    for number, i in enumerate(held):
        of = [cell(tables, "configurations", i, name) for name in ("replicas_if_fast", "gpu", "policy")]
        said += [*([" or "] if number else []), of[0], " × ", of[1], " under ", of[2]]
    return [[*said, f" would hold it: whether any does {HOW}."]]


def start_rows(tables: Tables, kind: str = COMMAND) -> list[int]:
    """Rows of the assumptions with the recommended deployment's command line, or with UNSAID what that leaves out."""
    chosen = {f"{kind} {row['gpu']}" for row in tables.get("recommendation", [])}
    return [i for i, row in enumerate(tables.get("assumptions", [])) if row["what"] in chosen]


def start_sentences(tables: Tables) -> list[Sentence]:
    """The command line that starts a replica of the recommended deployment, where it is known; what it cannot state."""
    of = [[cell(tables, "assumptions", i, "assumed") for i in start_rows(tables, kind)] for kind in (COMMAND, UNSAID)]
    said: list[Sentence] = [["A replica is started by: ", line] for line in of[0]]
    return said + [["That command cannot state ", unsaid, ": the assumptions have its knobs."] for unsaid in of[1]]


def _grown(tables: Tables, index: int, currency: str) -> list[Sentence]:
    """What the recommended kind of replica would take of more traffic: a sentence, or none where it was not tried."""
    chosen = tables["configurations"][index]
    for i, row in enumerate(tables.get("what_if", [])):
        is_grown = (row["gpu"], row["policy"], row["change"]) == (chosen["gpu"], chosen["policy"], GROWN)
        if not is_grown or row["replicas_needed"] is None:
            continue
        change, needed, cost = (
            cell(tables, "what_if", i, name) for name in ("change", "replicas_needed", "cost_per_month_needed")
        )
        if row["replicas_needed"] == row["replicas"]:
            return [["With ", change, " it would take no more."]]
        engines = "replica" if row["replicas_needed"] == 1 else "replicas"
        said: Sentence = ["With ", change, " it would take ", needed, f" {engines}, {currency}{NO_BREAK}", cost]
        return [[*said, " a month", *_cheaper_grown(tables, row["cost_per_month_needed"], currency), "."]]
    return []


def _cheaper_grown(tables: Tables, cost: float, currency: str) -> Sentence:
    """The cheapest other configuration known to hold the grown traffic, where it costs less than `cost`."""
    known = [
        (row["cost_per_month"], "configurations", i)
        for i, row in enumerate(tables["configurations"])
        if row["holds"] and row["headroom"] is not None and row["headroom"] >= WHAT_IFS[GROWN].traffic - 1 - 1e-9
    ]
    known += [
        (row["cost_per_month"], "sensitivity", i)
        for i, row in enumerate(tables.get("sensitivity", []))
        if row["change"] == GROWN and row["cost_per_month"] is not None
    ]
    cheaper = min((each for each in known if each[0] < cost), default=None)
    if cheaper is None:
        return []
    _, table, i = cheaper
    replicas, gpu, policy, less = (
        cell(tables, table, i, name) for name in ("replicas", "gpu", "policy", "cost_per_month")
    )
    return [", or ", replicas, " on ", gpu, " under ", policy, f", {currency}{NO_BREAK}", less, " a month"]


_LEFT = {
    "fails": "those that are left fail",
    "overloaded": "those that are left are overloaded",
    "not shown to hold": "those that are left are not shown to hold",
    "undecided": "whether those that are left hold was not decided",
    "not simulated": "what those that are left hold could not be simulated",
    None: "none is left to serve",
}
"""What one replica less was shown to be, as what is left of the group when one is lost."""


def _lost(tables: Tables, index: int, currency: str) -> Sentence:
    """What is left when a replica is lost, and how many hold then too: one more than the smallest group that holds."""
    spare, cost = (cell(tables, "recommendation", 0, name) for name in ("replicas_spare", "cost_per_month_spare"))
    row = tables["configurations"][index]
    held = "one, which was shown to hold" if row["replicas"] == 1 else "as many as were shown to hold"
    return [
        f"If a replica is lost, {_LEFT[row['one_less_shown']]}; to lose one and hold, run ",
        spare,
        f" replicas, {currency}{NO_BREAK}",
        cost,
        f" a month: that leaves {held}. The moment of the loss itself was not simulated.",
    ]


def _uncertainty(tables: Tables, index: int) -> Sentence:
    chosen = tables["configurations"][index]
    row_of = {
        (row["error"], row["quantity"]): i
        for i, row in enumerate(tables["sureness"])
        if (row["gpu"], row["policy"]) == (chosen["gpu"], chosen["policy"])
    }

    def of(error: str, quantity: str, column: str) -> Cell:
        return cell(tables, "sureness", row_of[error, quantity], column)

    sampling = ("sampling", "attainment")
    low, high = (of(*sampling, end) for end in ("low", "high"))
    sentence: Sentence = [
        "Sampling leaves ",
        low,
        *([" to ", high] if low.text != high.text else []),
        " within the SLO",
    ]
    sentence += [" at both ends of the interval"] if low.text == high.text else []
    if ("cost model", "replicas") not in row_of:
        unknown: Sentence = ["; the error of the step times is ", of("cost model", "step_time", "source")]
        return [*sentence, *unknown, f", so how many replicas hold {HOW}"]
    sentence += ["; apart from that, step times that are off by ", of("cost model", "step_time", "low"), " to "]
    replicas = tables["sureness"][row_of["cost model", "replicas"]]
    fewest, most = (
        "more than max_replicas" if replicas[end] is None else of("cost model", "replicas", end)
        for end in ("low", "high")
    )
    sentence += [of("cost model", "step_time", "high"), " would take "]
    if replicas["low"] == replicas["high"]:
        return [*sentence, fewest, " replica" if replicas["low"] == 1 else " replicas", " either way"]
    return [*sentence, fewest, " to ", most, f" replicas, and which {HOW}"]
