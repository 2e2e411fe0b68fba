"""The sections of a plan's report in order: sentences, pictures and tables; all numbers in them are cells of tables."""

from __future__ import annotations

from dataclasses import replace

from batchsim.report.page.plan_advice import recommendation, start_sentences
from batchsim.report.page.plan_charts import day_charts, latency_charts, slo_charts
from batchsim.report.page.plan_columns import COLUMNS, Tables, cell, heading
from batchsim.report.sheet import Section, Sentence, Table, folded

CHOICES = ("replicas", "forecast", "grown", "lost", "slow", "cost_per_month", "choice")
HELD = (
    "gpu",
    "policy",
    "replicas",
    "cost_per_month",
    "cost_per_1m_output_tokens",
    "energy_kwh_per_1m_output_tokens",
    "cost_per_1m_with_energy",
    "headroom",
    "replicas_if_fast",
    "replicas_if_slow",
)
EVIDENCE = (
    "gpu",
    "policy",
    "replicas",
    "attainment",
    "attainment_low",
    "attainment_high",
    "margin_low",
    "one_less",
    "one_less_shown",
    "one_less_margin_low",
    "one_less_class",
    "goodput_rps",
    "engine_busy_share",
)
NOT_HELD = ("gpu", "policy", "saturation_rps", "replicas_if_fast", "why_not")
WHAT_IF = ("gpu", "policy", "replicas", "change", "shown", "attainment", "seeds", "margin_low", "replicas_needed")
WHAT_IF += ("cost_per_month_needed", "note")
TRAFFIC = ("part", "rate_rps", "share_of_peak", "attainment", "replicas_enough", "cost_per_1m_output_tokens")
GROWTH = ("month", "peak_rps", "replicas", "cost_per_month", "how")
CLASSES = (
    "class",
    "priority",
    "share_of_requests",
    "slo",
    "attainment",
    "attainment_low",
    "ttft_p99_s",
    "ttft_p99_s_fast",
    "ttft_p99_s_slow",
    "replicas_up_to",
    "cost_per_month_tiered",
    "share_of_use",
    "cost_per_month_by_use",
)
SURENESS = ("gpu", "policy", "quantity", "low", "planned", "high", "note")
_ENDS = {
    "sampling": {"low": "interval from", "high": "to"},
    "cost model": {"low": "with the shortest steps", "high": "with the longest steps"},
}
"""What the ends are called of either error."""
SEARCH = ("rung", "window_s", "seeds", "what", "entered", "looks", "why_left")
SEARCHED = ("gpu", "policy", "replicas_at_least", "cost_per_month_at_least", "margin_low", "why_lost")
SENSITIVITY = (
    "change",
    "price_per_hour",
    "decision_changes_at",
    "relative",
    "gpu",
    "policy",
    "replicas",
    "cost_per_month",
    "same_decision",
    "note",
)
PARETO = (
    "gpu",
    "policy",
    "replicas",
    "cost_per_month",
    "attainment",
    "seeds",
    "holds",
    "goodput_rps",
    "energy_j_per_output_token",
)
FIRST = 12
"""Configurations of a search that the report shows."""
_RUNGS: Sentence = [
    "Of the configurations that entered a rung, those that were not left there entered the next. A short look runs the"
    " beginning of the window: what misses there so often that the rest of the window could not make up for it is ruled"
    " out. Before all others the first configuration of every kind of GPU is taken to the end, so that it is known what"
    " has to be paid at most."
]
SHOWN = list(
    dict.fromkeys(
        (*CHOICES, *HELD, *EVIDENCE, *NOT_HELD, *WHAT_IF, *TRAFFIC, *GROWTH, *CLASSES, *SEARCH, *SEARCHED, *SENSITIVITY)
    )
)


def view(tables: Tables, name: str, columns: tuple[str, ...], currency: str, rows: list[int] | None = None) -> Table:
    """Table `name` with those of `columns` in which some row has a value; `rows` chooses by number, by default all."""
    chosen = range(len(tables[name])) if rows is None else rows
    kept = tuple(column for column in columns if any(tables[name][i][column] not in (None, "") for i in chosen))
    cells = tuple(tuple(cell(tables, name, i, column) for column in kept) for i in chosen)
    explained = {COLUMNS[column].heading for column in kept if COLUMNS[column].meaning}
    meanings = tuple(
        (cell(tables, "glossary", i, "term"), cell(tables, "glossary", i, "meaning"))
        for i, row in enumerate(tables.get("glossary", []))
        if row["term"] in explained
    )
    return Table(name, tuple(heading(column, currency) for column in kept), cells, meanings)


def sections(tables: Tables, currency: str, pictures: dict[str, str]) -> list[Section]:
    """The report's sections in their order; `pictures` has the caption of every picture that was drawn, by name."""
    first, *reasons = recommendation(tables, currency)
    choices = [view(tables, "choices", CHOICES, currency)] if "choices" in tables else []
    page = [Section("Recommendation", [first, *start_sentences(tables)], views=choices)]
    if reasons:
        page.append(Section("Why", reasons))
    if charts := slo_charts(tables):
        page.append(Section("Within the SLO against load", charts=charts, pictures=_of(pictures, "replicas")))
    if charts := latency_charts(tables):
        page.append(Section("Latency against load", charts=charts))
    rest = None
    if "traffic" in tables:
        views = [folded(view(tables, "traffic", TRAFFIC, currency))]
        if "growth" in tables:
            views.append(view(tables, "growth", GROWTH, currency))
        day = _of(pictures, "traffic")
        sentence_of_day: Sentence = [
            "Within the SLO is what all replicas give, all of them running all the time; replicas enough are how many"
            " would do, none of them simulated alone."
        ]
        charts = day_charts(tables)
        rest = Section("The rest of the traffic", [sentence_of_day], day, views, charts, folded=True)
    if "classes" in tables:
        page.append(Section("What each class gets and costs", views=[view(tables, "classes", CLASSES, currency)]))
    page += [rest] if rest is not None else []
    if "what_if" in tables:
        page.append(Section("What if", views=[view(tables, "what_if", WHAT_IF, currency)], folded=True))
    if "sureness" in tables:
        page.append(_how_sure(tables, currency))
    page += search_sections(tables, currency)
    assumed = [view(tables, "assumptions", ("what", "assumed"), currency)]
    page.append(Section("Assumptions", views=assumed, folded="recommendation" in tables))
    return [*page, _configurations(tables, currency, pictures)]


def _how_sure(tables: Tables, currency: str) -> Section:
    """A table of each error, and where it is from: once for all rows that share it."""
    said: list[Sentence] = [["Sampling and cost-model error are apart: no interval here contains both."]]
    views = []
    for error, names in _ENDS.items():
        of_error = [(i, row) for i, row in enumerate(tables["sureness"]) if row["error"] == error]
        once = {(row["source"], row["gpu"], row["policy"]): i for i, row in reversed(of_error)}
        alike = len({source for source, _, _ in once}) == 1
        for i in sorted(once.values())[: 1 if alike else None]:
            gpu, policy, source = (cell(tables, "sureness", i, column) for column in ("gpu", "policy", "source"))
            said.append([f"The {error} error", *([] if alike else [" of ", gpu, " under ", policy]), ": ", source, "."])
        if known := [i for i, row in of_error if row["planned"] is not None]:
            shown = view(tables, "sureness", SURENESS, currency, known)
            heads = {COLUMNS[end].heading: name for end, name in names.items()}
            views.append(replace(shown, headings=tuple(heads.get(head, head) for head in shown.headings)))
    return Section("How sure", said, views=views, folded=True)


def search_sections(tables: Tables, currency: str) -> list[Section]:
    """Of a plan that searched: what would change the decision, what more money buys, how it was found."""
    if "search" not in tables:
        return []
    views = [view(tables, "sensitivity", SENSITIVITY, currency)] if "sensitivity" in tables else []
    page = [Section("What would change the decision", views=views)]
    if "pareto" in tables:
        known = any(row["energy_j_per_output_token"] is not None for row in tables["pareto"])
        notes: list[Sentence] = (
            [["Joules a token are estimates where no profile measured power; their laws stand under Assumptions."]]
            if known
            else [["Joules a token are left out: the power of no GPU here is known."]]
        )
        shown = view(tables, "pareto", PARETO, currency)
        page.append(Section("What more money buys", notes, views=[shown]))
    lost = [i for i, row in enumerate(tables["searched"]) if not row["twin"]][:FIRST]
    views = [view(tables, "search", SEARCH, currency), view(tables, "searched", SEARCHED, currency, lost)]
    views += [view(tables, "left_out", ("configurations", "why_lost"), currency)] if "left_out" in tables else []
    every: Sentence = [f"The first {len(lost)} of {len(tables['searched']):,} configurations; searched.csv has all."]
    return [*page, Section("How it was found", [_RUNGS, every], views=views, folded=True)]


def _configurations(tables: Tables, currency: str, pictures: dict[str, str]) -> Section:
    """All configurations: an appendix where one of them is recommended."""
    held = [i for i, row in enumerate(tables["configurations"]) if row["holds"]]
    failed = [i for i, row in enumerate(tables["configurations"]) if not row["holds"]]
    views = [view(tables, "configurations", columns, currency, held) for columns in (HELD, EVIDENCE) if held]
    views += [view(tables, "configurations", NOT_HELD, currency, failed)] if failed else []
    drawn = _of(pictures, "pareto", *([] if held else ["replicas"]))
    return Section("All configurations", pictures=drawn, views=views, folded=bool(held))


def _of(pictures: dict[str, str], *names: str) -> list[tuple[str, str]]:
    return [(name, pictures[name]) for name in names if name in pictures]
