"""What `batchsim train` prints: a table of packers, what it says in a few sentences, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from batchsim.base.units import NS_PER_S, counted, format_duration, two_digits
from batchsim.report.layout import aligned, fit
from batchsim.training.config import TrainingConfig
from batchsim.training.kpis import Run
from batchsim.training.packers.registry import CLASSES, RECORDED

FULL, UNEVEN = 0.97, 1.3
"""From which fill rows are called full, and from which max over mean of their squares uneven."""
MUCH_LEFT = 0.1
"""From which share of examples on that wait at a stream's end, and below which share of idle time, it is too fast."""
Figures = dict[str, float | None]

_NONE = "–"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _number(value: float) -> str:
    return f"{value:,.0f}"


_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "steps", _number),
    ("fill", "fill", _share),
    ("padding", "padding", _share),
    ("squares", "row_imbalance", lambda value: f"{value:.2f}"),
    ("imbalance", "imbalance", lambda value: f"{value:.3f}"),
    ("attn", "attention_imbalance", lambda value: f"{value:.3f}"),
    ("bubble", "bubble", _share),
    ("step", "step_mean_s", lambda value: format_duration(value * NS_PER_S)),
    ("tok/s/GPU", "tokens_per_gpu_s", _number),
    ("MFU", "mfu", _share),
    ("cut", "truncated_tokens", _share),
    ("stale", "staleness_mean", lambda value: f"{value:.1f}"),
    ("age", "age_mean_s", lambda value: format_duration(value * NS_PER_S)),
    ("age p99", "age_p99_s", lambda value: format_duration(value * NS_PER_S)),
    ("behind", "behind", _number),
    ("idle", "idle", _share),
    ("dropped", "dropped", _share),
    ("GB", "memory_gb", lambda value: f"{value:.0f}"),
)
STREAM_LEGEND = "age: from arrival to the start of the step · behind: examples come since a step's newest, at its end"
LEGEND = (
    "squares: of documents, of a row, max over mean · imbalance: time until ranks have met over the mean of their own;"
    " attn: the same with equal tokens, attention's part · cut: tokens discarded"
)


def training_heading(name: str, runs: Sequence[Run]) -> str:
    """Scenario, examples, GPUs and cost in one line."""
    config, lengths = runs[0].config, runs[0].epoch.lengths
    ranks = config.ranks
    counts = {"data": ranks.data, "context": ranks.context, "pipeline": ranks.pipeline}
    parts = " × ".join(f"{count} {name}" for name, count in counts.items() if count > 1 or name == "data")
    how = f"{counted(ranks.gpus, 'GPU')} ({parts})"
    mean = f"mean {sum(lengths) / len(lengths):,.0f}, longest {counted(max(lengths), 'token')}"
    examples = f"{counted(len(lengths), 'example')}, {mean}"
    return f"{name} · {examples} · {how}, {config.sharding} · {runs[0].cost.text} · seed {config.seed}"


def training_table(runs: Sequence[Run]) -> list[str]:
    """A line a packer; columns that no packer has are left out."""
    figures = [run.figures for run in runs]
    columns = [column for column in _COLUMNS if any(each[column[1]] for each in figures)]
    examples = [f"{each['sequences_mean'] or 0:,.0f} ± {two_digits(each['sequences_sd'] or 0)}" for each in figures]
    grid = [["packer", *(head for head, *_ in columns), "ex./step"]]
    for run, each, count in zip(runs, figures, examples, strict=True):
        cells = [_NONE if (value := each[name]) is None else text(value) for _, name, text in columns]
        grid.append([run.label, *cells, count])
    spare = ("GB", "attn", "MFU", "bubble", "ex./step", "step") if runs[0].stream else ()
    return aligned(grid, left=(0,), close=True, spare=[head for head in spare if head in grid[0]])


def training_sentences(runs: Sequence[Run]) -> list[str]:
    """What the table says: which packer trains most, whether full rows are even, what is lost, what does not fit."""
    figures: dict[str, Figures] = {run.label: run.figures for run in runs}
    speeds = {label: each["tokens_per_gpu_s"] or 0.0 for label, each in figures.items()}
    best, least = max(speeds, key=lambda label: speeds[label]), min(speeds, key=lambda label: speeds[label])
    lines: list[str] = []
    ratio = f"{speeds[best] / speeds[least]:.2f}" if speeds[least] else "1.00"
    if ratio != "1.00":
        lines.append(f"Most tokens a second: {best}, {ratio} times as many as {least}.")
    full = {label: each for label, each in figures.items() if (each["fill"] or 0) >= FULL}
    uneven = {label: each["row_imbalance"] or 0 for label, each in full.items()}
    if uneven and max(uneven.values()) >= UNEVEN:
        low, high = min(uneven.values()), max(uneven.values())
        many = f"{low:.1f} to {high:.1f}" if f"{low:.1f}" != f"{high:.1f}" else f"{high:.1f}"
        fills = [each["fill"] or 0 for each in full.values()]
        lines.append(
            f"Full rows are not even ones: of rows {_share(min(fills))} full and more, one has {many} times the mean"
            " in squares of documents."
        )
    for run in runs:
        each = figures[run.label]
        if (each["left"] or 0) > MUCH_LEFT and (each["idle"] or 0) < MUCH_LEFT:
            lines.append(
                f"! {run.label}: the stream outruns the trainer: {_share(each['left'] or 0)} of the examples wait when"
                " the last one arrives, and ages grow with the stream. Add ranks, or lower stream.rate."
            )
    for name, words in (("dropped", "leaves out"), ("truncated", "truncates"), ("lost", "loses in the last step")):
        there = {label: each[name] or 0 for label, each in figures.items() if (each[name] or 0) >= 0.01}
        lines += [f"{label} {words} {_share(value)} of the examples." for label, value in there.items()]
    for run in runs:
        each = figures[run.label]
        if each["too_large"] and run.cost.limit_bytes:
            lines.append(
                f"! {run.label}: {_share(each['too_large'])} of the micro-batches do not fit: up to"
                f" {each['memory_gb']:.0f} GB of {run.cost.limit_bytes / 1e9:.0f} GB. Shard, recompute or lower"
                " micro_batch."
            )
    return lines


def training_text(name: str, runs: Sequence[Run]) -> str:
    """All that is printed of a comparison."""
    lines = [fit(training_heading(name, runs)), "", *training_table(runs), "", fit(LEGEND)]
    lines += [fit(STREAM_LEGEND)] if runs[0].stream else []
    lines.append(fit(mfu_text(runs)))
    return "\n".join(lines + [fit(each) for each in training_sentences(runs)])


def mfu_text(runs: Sequence[Run]) -> str:
    """Which convention MFU has, and whether anything of it was measured."""
    config: TrainingConfig = runs[0].config
    if runs[0].cost.shape is None:
        return "No MFU: the cost is stated in time."
    factor = "12·L·h·S2, PaLM's" if config.mfu == "palm" else "6·L·h·S2, Megatron-LM's"
    return f"MFU: 6·N·T + {factor} convention, of examples' own tokens. Derived, not measured."


def training_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a packer with every figure."""
    return [{"packer": run.label, "kind": run.kind} | run.figures for run in runs]


def step_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a step of every packer."""
    return [
        {
            "packer": run.label,
            "step": number,
            "rows": step.rows,
            "examples": step.sequences,
            "real_tokens": step.real,
            "computed_tokens": step.computed,
            "squares": step.squares,
            "own_squares": step.own_squares,
            "time_s": step.time_s,
            "fastest_rank_s": min(step.rank_s),
            "mean_rank_s": step.mean_s,
            "slowest_rank_s": max(step.rank_s),
            "rank_times_s": " ".join(f"{time:.6g}" for time in step.rank_s),
            "imbalance": step.imbalance,
            "bubble": step.bubble,
            "lost_s": step.meet_s - step.mean_s,
        }
        for run in runs
        for number, step in enumerate(run.steps)
    ]


def packers_text() -> str:
    """Every packer below the framework it follows: its kind, how many recorded results it makes again, its rule."""
    grid = [["kind", "recorded", "rule"]]
    for framework in dict.fromkeys(each.follows for each in CLASSES):
        grid.append([framework, "", ""])
        for each in (each for each in CLASSES if each.follows == framework):
            kind = str(each.__dataclass_fields__["kind"].default)
            grid.append([f"\u00a0 {kind}", str(RECORDED[kind] or _NONE), each.rule])
    return "\n".join(aligned(grid, left=(0, 2))).replace("\u00a0", " ")
