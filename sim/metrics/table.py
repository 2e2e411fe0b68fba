"""Every metric of a run, a row each: name, unit, which of two values is the better one, what it is, what it needs.

Summaries have the columns of this table in its order; of classes of traffic some of them again, as `ttft_p99_s[CLASS]`.
The values are made by `batchsim.metrics.measure`, those of the engine by `batchsim.metrics.kpis`.

Cohort: the requests sent in the arrival window [start, end], warm-up and pruned ones excluded. They run to their end,
so what drains after the window counts for latency; never for throughput. Span: the arrival window, or the makespan of
work that arrives all at once. Busy time: the time of the span in which steps ran. Of several replicas the same, over
the steps of all: means over busy time weigh each by its own, the use of KV memory being of the replica's own blocks;
the busy share is of the time replicas were up or draining; mfu and mbu are of the peaks of the replicas that ran the
steps. Of a pipeline, whose steps overlap, each counts from the end of those before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from batchsim.metrics.adapters import ADAPTER_METRICS
from batchsim.metrics.attribution import PARTS
from batchsim.metrics.latencies import LATENCIES, TASK_DOC, TASK_E2E
from batchsim.metrics.lives import KV_LOAD
from batchsim.metrics.rank_waits import FOR_GPU, PADDING, RANK_METRICS, WAITING
from batchsim.metrics.sleeping import SLEEP_METRICS
from batchsim.metrics.tiers import FLUSH, TIER_METRICS

STATISTICS = {
    "mean": "mean",
    "p50": "median",
    "p90": "90th percentile",
    "p95": "95th percentile",
    "p99": "99th percentile",
}
"""Those of each latency. A percentile is the smallest observation that at least that share of all does not exceed."""

Unit = Literal[
    "s",
    "requests/s",
    "tokens/s",
    "share",
    "requests",
    "tokens",
    "blocks",
    "steps",
    "replicas",
    "tasks",
    "trainings",
    "versions",
    "answers/s",
    "hours",
    "preemptions",
    "adapters",
    "loads",
    "stores",
    "B",
    "W",
    "J",
    "yes or no",
]
Better = Literal["lower", "higher", ""]
Needs = Literal[
    "",
    "streamed answers",
    "arrivals over time",
    "an objective",
    "an objective of requests",
    "a limit on sequences",
    "a prefix cache",
    "draft tokens",
    "an engine ahead",
    "a GPU of the catalog",
    "known power",
    "idle power",
    "replicas",
    "ranks",
    "a steady run",
    "tasks",
    "sessions",
    "rollouts",
    "offline",
    "adapters",
    "tiers",
    "sleep",
    "share",
]


@dataclass(frozen=True)
class Metric:
    """One number of a run. Without what it `needs` it is None; without replicas, tasks, sessions, rollouts, offline
    jobs, adapters, tiers of KV or models that sleep or share a GPU theirs are not there at all.

    `better`: which of two values is the better one, "" where that depends. `heading` stands above it in tables.
    """

    name: str
    unit: Unit
    better: Better
    doc: str
    needs: Needs = ""
    short: str = ""

    @property
    def words(self) -> str:
        """The name in words, without the unit of a time: `ttft p99`, `output tokens per s`."""
        return (self.name.removesuffix("_s") if self.unit == "s" else self.name).replace("_", " ")

    @property
    def heading(self) -> str:
        """What stands above the metric in tables."""
        return self.short or self.words


def _latencies() -> Iterator[Metric]:
    for name, latency in LATENCIES.items():
        needs: Needs = "streamed answers" if latency.streamed else ""
        for statistic, words in STATISTICS.items():
            short = "s/token" if (name, statistic) == ("norm_latency", "mean") else ""
            yield Metric(f"{name}_{statistic}_s", "s", "lower", f"{words} of: {latency.doc}", needs, short)


_COUNTED = (
    Metric("submitted", "requests", "", "requests of the whole run, those that it never let in included"),
    Metric("finished", "requests", "", "of these, those that got all they asked for"),
    Metric("rejected", "requests", "", "of these, those turned away"),
    Metric("cancelled", "requests", "", "of these, those given up by their client"),
    Metric("unfinished", "requests", "", "of these, those open when the run ended, or never let in"),
    Metric("cohort", "requests", "", "requests that are measured, those never let in included"),
    Metric("uncompleted_share", "share", "lower", "requests of the cohort that did not finish, and lack in latencies"),
)
_RATES = (
    Metric("offered_rps", "requests/s", "", "requests of the cohort / window", "arrivals over time"),
    Metric("throughput_rps", "requests/s", "higher", "completions inside the arrival window / window", short="done/s"),
    Metric("output_tokens_per_s", "tokens/s", "higher", "output tokens of what completes inside the span / span"),
    Metric("output_tokens_per_s_per_gpu", "tokens/s", "higher", "the same / GPUs held, as a mean over the span"),
    Metric("total_tokens_per_s", "tokens/s", "higher", "output and prompt tokens of what completes in the span / span"),
    Metric(
        "makespan_throughput_rps",
        "requests/s",
        "higher",
        "completed requests of the cohort / time from the first of them sent to the last delivered",
    ),
    Metric("makespan_s", "s", "lower", "from the first of the cohort's requests sent to the last delivered"),
    Metric(
        "user_tokens_per_s_p50",
        "tokens/s",
        "higher",
        "1 / median tpot: the pace of an answer once it has begun",
        "streamed answers",
    ),
)
_OBJECTIVES = (
    Metric(
        "in_slo",
        "share",
        "higher",
        "share of requests that meet all bounds jointly; every offered one counts",
        "an objective of requests",
        "in SLO",
    ),
    Metric(
        "goodput_rps",
        "requests/s",
        "higher",
        "completions inside the span that meet all bounds jointly / span",
        "an objective of requests",
    ),
    Metric(
        "slo_margin", "share", "higher", "by how much the objectives are met, the least of any class", "an objective"
    ),
    Metric("slo_met", "yes or no", "higher", "1 where the margin is 0 or more, else 0", "an objective"),
)
_ENGINE = (
    Metric("slot_occupancy", "share", "", "mean of running / max_num_seqs over busy time", "a limit on sequences"),
    Metric(
        "pad_share",
        "share",
        "lower",
        "padded token rows / (useful + padded token rows) of the steps that start in the span",
        short="pad",
    ),
    Metric("kv_utilisation_mean", "share", "", "used / all KV blocks, mean over busy time"),
    Metric("kv_utilisation_p99", "share", "", "the same, not exceeded for 99 % of busy time", short="KV p99"),
    Metric("kv_utilisation_peak", "share", "", "the same, the largest", short="KV peak"),
    Metric(
        "kv_fragmentation",
        "share",
        "lower",
        "1 − tokens in KV / (used blocks × block size), over decode steps in which everything that runs decodes: only"
        " there do the records hold all tokens. It includes what is reserved ahead. None where a prefix cache was hit:"
        " shared blocks hold the tokens of several",
    ),
    Metric("preemptions", "preemptions", "lower", "preemptions of the cohort's requests"),
    Metric("preemption_rate", "share", "lower", "preemptions of the cohort's requests / requests of the cohort"),
    Metric("recomputed_tokens", "tokens", "lower", "tokens the cohort's requests computed again after preemptions"),
    Metric(
        "prefix_hit_rate",
        "share",
        "higher",
        "tokens that admissions of the cohort's requests found in the prefix cache / those and the ones computed"
        " instead: prompts of the admitted and what preemptions made needed again",
        "a prefix cache",
        "hit",
    ),
    *(
        Metric(
            f"prefix_hit_rate_turn_{turn}", "share", "higher", f"the same, of {of} turns of sessions", "sessions", short
        )
        for turn, of, short in (
            ("1", "first", "hit turn 1"),
            ("2", "second", "hit turn 2"),
            ("3", "third", "hit turn 3"),
            ("4_on", "later", "hit turn 4+"),
        )
    ),
    Metric("swapped_blocks", "blocks", "lower", "KV blocks moved to and from host memory, both ways"),
    Metric("engine_busy_share", "share", "", "share of the window in which an engine runs a step", short="in steps"),
    Metric(
        "host_bound_share",
        "share",
        "lower",
        "share of the window in which an engine that schedules ahead runs no step because its host is still at work on"
        " the next one, or on results right before that",
        "an engine ahead",
    ),
    Metric(
        "wasted_tokens",
        "tokens",
        "lower",
        "tokens that the steps that start in the span computed of requests that had ended by then",
        "an engine ahead",
    ),
    Metric(
        "mfu",
        "share",
        "higher",
        "useful FLOPs of the steps / (peak × their time), of the roofline's counting; what came from a prefix cache was"
        " not computed and does not count",
        "a GPU of the catalog",
    ),
    Metric("mbu", "share", "higher", "bytes that the steps read / (bandwidth × their time)", "a GPU of the catalog"),
    Metric(
        "power_w",
        "W",
        "",
        "mean power of a replica's GPUs over busy time, as its profile measured it or else by the power law of its GPU,"
        " an estimate; idle is left out",
        "known power",
    ),
    Metric(
        "energy_j_per_output_token",
        "J",
        "lower",
        "energy of busy time / output tokens of the requests completed in the span; idle is left out",
        "known power",
        "J/token",
    ),
    Metric(
        "energy_j",
        "J",
        "lower",
        "energy of all GPUs held over the span: of steps, and of the time between them at the power of an idle GPU",
        "idle power",
    ),
    Metric("mean_power_w", "W", "lower", "energy_j / span: mean power of all GPUs held, idle included", "idle power"),
    Metric(
        "energy_with_idle_j_per_output_token",
        "J",
        "lower",
        "energy_j / output tokens of the requests completed in the span",
        "idle power",
        "J/token with idle",
    ),
    Metric("mean_batch", "requests", "", "sequences in a step: decodes + chunks, mean over the steps"),
    Metric(
        "acceptance_length",
        "tokens",
        "higher",
        "tokens that a decode gains a step: its own and the draft tokens accepted, mean over all",
        "draft tokens",
    ),
    Metric("rejected_share", "share", "lower", "rejected draft tokens over all tokens computed", "draft tokens"),
    Metric("num_steps", "steps", "", "steps that start in the span"),
)
_REPLICAS = (
    Metric(
        "replica_seconds",
        "s",
        "lower",
        "time replicas were held within the span, cold starts, draining and repair included",
        "replicas",
    ),
    Metric("num_replicas_mean", "replicas", "lower", "replica_seconds / span", "replicas"),
    Metric("num_replicas_max", "replicas", "lower", "the most held at any time of the span", "replicas"),
    Metric("retries", "requests", "lower", "lives of the cohort's requests lost with their replica", "replicas"),
)
_TASKS = (
    *(
        Metric(f"{TASK_E2E}_{statistic}_s", "s", "lower", f"{words} of: {TASK_DOC}", "tasks")
        for statistic, words in STATISTICS.items()
    ),
    Metric("tasks", "tasks", "", "tasks whose first request was sent in the arrival window, warm-up excluded", "tasks"),
    Metric(
        "pruned", "requests", "", "requests of the whole run, given up since another of their task succeeded", "tasks"
    ),
    Metric("tasks_undone_share", "share", "lower", "of these, those of which a request did not finish", "tasks"),
)
_ROLLOUT_ROWS: tuple[tuple[str, Unit, Better, str, str], ...] = (
    ("trainings", "trainings", "", "trainings of the trainer", ""),
    ("training_cycle_mean_s", "s", "lower", "time of the whole run / trainings", "cycle"),
    ("trainer_wait_mean_s", "s", "lower", "how long the trainer waits for groups, mean over trainings", "waits"),
    (
        "trainer_idle_share",
        "share",
        "lower",
        "share of the run that the trainer waits for groups, or for engines to be ready for other weights",
        "trainer idle",
    ),
    (
        "generation_mean_s",
        "s",
        "lower",
        "from when the first group of a training was sent to its last answer, mean over trainings",
        "generation",
    ),
    (
        "generation_bound_share",
        "share",
        "higher",
        "lower bounds of the trainings' generations / these: the longest answer alone, or all tokens at the best"
        " rate, whichever takes longer",
        "of bound",
    ),
    (
        "tail_mean_s",
        "s",
        "lower",
        "the part of a generation after 90 % of its answers are done, mean over trainings",
        "tail",
    ),
    ("drain_mean_s", "s", "lower", "from the end of a training until engines are ready for other weights", ""),
    ("loading_mean_s", "s", "lower", "how long weights are loaded then", ""),
    ("loading_share", "share", "lower", "share of the run in which weights are loaded, and no engine runs a step", ""),
    ("generated_tokens", "tokens", "", "tokens of answers that were made, useful or not", ""),
    ("used_tokens", "tokens", "higher", "of these, those that were trained on", ""),
    ("waste_share", "share", "lower", "of these, the share that was not", "waste"),
    ("aborted_share", "share", "lower", "of these, the share of answers aborted", ""),
    ("filtered_share", "share", "lower", "of these, the share of groups without a difference", ""),
    ("stale_share", "share", "lower", "of these, the share of groups dropped for their age", ""),
    ("left_share", "share", "lower", "of these, the share of groups that were there when the run ended", ""),
    ("failed_share", "share", "lower", "of these, the share of groups of which an answer was rejected or lost", ""),
    (
        "prefilled_again_tokens",
        "tokens",
        "lower",
        "tokens of prompts and partial answers that were computed again after an abort",
        "",
    ),
    ("useful_answers_per_s", "answers/s", "higher", "answers that were trained on / time of the run", "useful/s"),
    (
        "gpu_hours_per_1000_answers",
        "hours",
        "lower",
        "hours of the engines' GPUs for 1,000 answers that were trained on",
        "",
    ),
    ("prompts_per_used_group", "requests", "lower", "prompts sent / prompts trained on", ""),
    ("answers_at_cap_share", "share", "", "of the answers that were trained on, those cut at their cap", ""),
    ("group_spread_mean_s", "s", "", "from the first to the last answer of a group that was trained on", ""),
    (
        "staleness_mean",
        "versions",
        "lower",
        "versions of the weights between an answer's first token and its use, mean",
        "staleness",
    ),
    ("staleness_p99", "versions", "lower", "the same, 99th percentile", ""),
    ("staleness_max", "versions", "lower", "the same, the most", "most"),
    ("beyond_limit_share", "share", "lower", "share of answers staler than the scheme's own limit", ""),
    (
        "mixed_version_share",
        "share",
        "",
        "share of answers that were trained on with tokens by several versions",
        "mixed",
    ),
    (
        "slowest_has_longest_share",
        "share",
        "",
        "share of trainings whose last answer came from the replica with the longest one",
        "",
    ),
    (
        "slowest_has_most_share",
        "share",
        "",
        "share of trainings whose last answer came from the replica with most tokens",
        "",
    ),
)
_ROLLOUTS = tuple(
    Metric(name, unit, better, doc, "rollouts", short) for name, unit, better, doc, short in _ROLLOUT_ROWS
)
_OFFLINE = (
    Metric("offline_requests", "requests", "", "requests of offline jobs", "offline"),
    Metric("offline_done_share", "share", "higher", "of these, the share done by their deadline", "offline"),
    Metric("offline_expired_share", "share", "lower", "of these, the share not done by then", "offline"),
    Metric("offline_makespan_s", "s", "lower", "from the start of the first job to the last answer", "offline"),
    Metric(
        "offline_tokens_per_s", "tokens/s", "higher", "output tokens of those that were done / that time", "offline"
    ),
    Metric("offline_aborts", "requests", "lower", "aborts of offline requests for others", "offline"),
    Metric(
        "offline_prefilled_again_tokens",
        "tokens",
        "lower",
        "tokens of their prompts and partial answers that were sent again after an abort",
        "offline",
    ),
)
_ADAPTERS = tuple(Metric(*row, needs="adapters") for row in ADAPTER_METRICS)
_RANKS = tuple(Metric(*row, needs="ranks") for row in RANK_METRICS)
_TIERS = tuple(Metric(*row, needs="tiers") for row in TIER_METRICS)
_SLEEP = tuple(Metric(*row, needs="sleep") for row in SLEEP_METRICS)
_E2E = "of the summed E2E of the cohort's finished requests"
PART_NEEDS: dict[str, Needs] = {"adapter_load": "adapters", WAITING: "ranks", PADDING: "ranks"}
PART_NEEDS |= {FLUSH: "tiers", KV_LOAD: "tiers", FOR_GPU: "share"}
"""What a run must have for some parts of a request's life to be there."""
_PARTS = (Metric(f"attr_{part}_share", "share", "", f"{part} {_E2E}", PART_NEEDS.get(part, "")) for part in PARTS)
_JUDGED = (
    Metric("too_short", "yes or no", "lower", "1 where the median request runs for over a quarter of the window"),
    Metric(
        "warmup_needed_s",
        "s",
        "",
        "how long the run's beginning differs from the rest (MSER-5 of TTFT in order of sending)",
        "a steady run",
    ),
)
METRICS = {
    row.name: row
    for rows in (
        *(_latencies(), _COUNTED, _RATES, _OBJECTIVES, _ENGINE, _REPLICAS, _RANKS, _SLEEP),
        *(_TASKS, _ROLLOUTS, _OFFLINE, _ADAPTERS, _TIERS, _PARTS, _JUDGED),
    )
    for row in rows
}
"""All metrics of a run by name, in the order of the summary's columns."""
