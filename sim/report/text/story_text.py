"""One request's life as data and as text: a sentence, a timeline in letters, chapters, parts that sum to its E2E."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S, format_duration, parse_duration_ns
from batchsim.explain.story import Chapter, Stories, Story
from batchsim.kernel.record import FINISHED, MISSING, OUTCOME_NAMES, Records
from batchsim.metrics.encoding import OTHERS, OWN
from batchsim.metrics.lives import KV_LOAD
from batchsim.metrics.masks import MASK_WAIT
from batchsim.report.layout import WIDTH, filled
from batchsim.report.reading import point_text
from batchsim.results.read import Results, scenario_of

_ROWS = 28  # chapters that the text lists; the shorter ones between them are added up
_CELLS = WIDTH - 4  # letters of the timeline
_UNBROKEN = "\u00a0"  # a no-break space: no line ends inside a time
_NUMBER_AND_UNIT = re.compile(r"(\d) (ns|us|ms|s)\b")
_LETTERS = {
    "frontend": "f",
    "failover": "F",
    "waiting_step": "w",
    "queued": "q",
    "prefill": "P",
    "recompute": "R",
    "decode": "d",
    "decode_beside_prefill": "b",
    "adapter_load": "A",
    "waiting_for_gpu": "g",
    "kv_load": "L",
    "waiting_for_ranks": "r",
    "padding_of_ranks": "p",
    "sat_out": "s",
    "preempted": "x",
    "swapped": "X",
    "kv_store_flush": "S",
    "host_gap": ".",
    "response_held": "h",
}
_REASONS = {
    "encoder": "no room in the encoder's budget or cache",
    "kv_blocks": "no KV blocks",
    "no_slot": "no slot",
    "batch_window": "the batch may still fill",
    "batch_running": "a batch runs",
    "preemption": "a step that preempts admits nobody",
    "in_flight": "preempted with results in flight",
    "prefill_first": "others' prefills first",
    "waits_for_prefix": "another prompt makes blocks it can reuse",
    "decode_first": "decodes first",
    "no_replica": "held at the router",
    "kv_storing": "its KV is still being stored",
    "kv_disk": "a disk is asked for its KV, or brings it to the host",
    "kv_load_queue": "steps and loads before its own",
    "kv_load": "its KV is loaded from the host",
    "kv_loaded": "until the engine notices its KV",
    "waking": "its model wakes up",
    "adapter": "others overtake, its adapter would be one too many",
}


def story(
    results: Results, policy: str, load: float, seed: int, request: int, records: Records | None = None
) -> dict[str, Any]:
    """The life of one request under one policy as JSON values. Times are ns since the run began; parts sum to `e2e_ns`.

    `chapters` are consecutive spans of time: what, reason, head of the queue, blocker, steps, parts in ns; `line` is
    the life to scale in letters. `records` are those of the point, where they are in memory. ScenarioError without such
    a request.

    >>> life = batchsim.life(results, "static", load=20, seed=0, request=3)
    >>> life["e2e_ns"] == sum(part["ns"] for part in life["parts"])
    True
    """
    records = results.records(policy, load, seed) if records is None else records
    frontend = scenario_of(results, policy)["workload"].get("frontend") or {}
    stories = Stories(records, parse_duration_ns(frontend.get("per_chunk", "0s")))
    known = records.requests["request_id"]
    try:
        life = stories.tell(request)
    except KeyError:
        raise ScenarioError(
            f"{results.path}: no request {request} at load {load:g} with seed {seed}. Ids go from {known.min()} to"
            f" {known.max()}."
        ) from None
    (row,) = records.requests[known == request]
    finished = row["outcome"] == FINISHED
    facts = ("prompt_tokens", "output_tokens", "sent_ns", "num_preemptions", "recomputed_tokens", "cached_tokens")
    answer = {
        "policy": policy,
        "load": load,
        "seed": seed,
        "request_id": request,
        **{name: int(row[name]) for name in facts if name in (row.dtype.names or ())},
        "request_class": records.texts[row["request_class"]],
        "outcome": OUTCOME_NAMES[int(row["outcome"])],
        "reason": records.texts[row["reason"]],
        "e2e_ns": int(row["delivered_ns"] if finished else row["ended_ns"]) - int(row["sent_ns"]),
        "parts": [{"part": part, "ns": ns} for part, ns in sorted(life.parts().items(), key=lambda item: -item[1])],
        "chapters": [_plain(chapter) for chapter in life.chapters],
    }
    if records.replicas is not None:
        (replica,) = records.replicas.requests[known == request].tolist()
        answer |= {"replica": None if replica == MISSING else replica, "num_retries": int(row["num_retries"])}
    assert life.ns == answer["e2e_ns"], "parts sum to E2E"
    return answer | {"sentence": _sentence(life, answer), "line": _line(life, stories.steps(request))}


def _line(story: Story, steps: NDArray[np.void]) -> str:
    """The life to scale as `_CELLS` letters of `_LETTERS`, each for the state at its cell's middle. `steps` are those
    of the engine that served the request.
    """
    chapters, k, line = story.chapters, 0, ""
    for cell in range(_CELLS if chapters else 0):
        at_ns = chapters[0].start_ns + (2 * cell + 1) * story.ns // (2 * _CELLS)
        while k + 1 < len(chapters) and chapters[k].end_ns <= at_ns:
            k += 1
        what = chapters[k].what
        if what == "decode":
            step = steps[int(np.searchsorted(steps["start_ns"], at_ns, "right")) - 1]
            if step["start_ns"] + step["duration_ns"] <= at_ns:
                what = "host_gap"
            elif step["num_chunks"]:
                what = "decode_beside_prefill" if step["num_decode"] else "sat_out"
        line += _LETTERS[what]
    return line


def _plain(chapter: Chapter) -> dict[str, Any]:
    names = ("what", "start_ns", "end_ns", "reason", "head", "blocker", "steps", "parts")
    return {name: getattr(chapter, name) for name in names}


# ---- the sentence


def _sentence(story: Story, facts: dict[str, Any]) -> str:
    """The kinds of state the request went through, by first occurrence, each with its total time, as one sentence."""
    by_kind: dict[str, list[Chapter]] = {}
    for chapter in story.chapters:
        by_kind.setdefault(chapter.what, []).append(chapter)
    terms = [term for what, chapters in by_kind.items() for term in _terms(what, chapters, facts)]
    gaps_ns = story.parts().get("host_gap", 0)
    beside = (
        (OWN, "encoding its own items"),
        (OTHERS, "encoding items of others"),
        (MASK_WAIT, "sampling waiting for masks"),
        (KV_LOAD, "steps waiting for KV from the host"),
    )
    for part, what in beside:
        terms += [f"{what} {format_duration(ns)}"] if (ns := story.parts().get(part, 0)) else []
    terms += [f"between steps {format_duration(gaps_ns)}"] if gaps_ns else []
    end = "" if facts["outcome"] == "finished" else f"; {facts['outcome']} ({facts['reason']})"
    return (", ".join(terms) or "no time at all") + end


def _terms(what: str, chapters: list[Chapter], facts: dict[str, Any]) -> list[str]:
    parts: Counter[str] = Counter()
    for chapter in chapters:
        parts.update(chapter.parts)
    own_ns, steps = parts.get(what, 0), sum(chapter.steps for chapter in chapters)
    match what:
        case "queued":
            return [f"queued {format_duration(parts.total())} ({', '.join(_holds(chapters))})"]
        case "prefill":
            cached = facts.get("cached_tokens", 0)
            after = f" after {cached:,} tokens from the prefix cache" if cached else ""
            return [f"prefill {format_duration(own_ns)} in {_count(steps, 'chunk')}{after}"]
        case "recompute":
            return [f"recompute of {facts['recomputed_tokens']:,} tokens {format_duration(own_ns)}"]
        case "decode":
            beside, alone = parts.get("decode_beside_prefill", 0), parts.get("decode_alone", 0)
            shown = [f"decoding {format_duration(alone)}"] if alone else []
            shown += [f"decoding beside others' prefills {format_duration(beside)}"] if beside else []
            out = [(part, ns) for part, ns in parts.items() if part.startswith("sat_out:")]
            return shown + [f"sat out {format_duration(ns)} ({_words(part.partition(':')[2])})" for part, ns in out]
        case "preempted" | "swapped":
            times = "once" if len(chapters) == 1 else f"{len(chapters)} times"
            ids = list(dict.fromkeys(c.blocker for c in chapters if c.blocker is not None))
            return [f"{what} {times}{_for(ids, facts['request_id'])} ({format_duration(parts.total())} out)"]
        case "sat_out":
            reasons = dict.fromkeys(_words(chapter.reason) for chapter in chapters)
            return [f"sat out {format_duration(parts.total())} ({', '.join(reasons)})"]
        case "waiting_step":
            return [f"arrived {format_duration(parts.total())} before the running step ended"]
        case "failover":
            lives = "a replica" if len(chapters) == 1 else f"{len(chapters)} replicas"
            return [f"lost {format_duration(parts.total())} on {lives} that failed"]
        case "frontend":
            return [f"on the way {format_duration(parts.total())}"]
        case "response_held":
            return [f"answer held back {format_duration(parts.total())}"]
    return []  # host gaps are added up


def _holds(chapters: list[Chapter]) -> list[str]:
    """Each reason for queueing with its time and the request longest at the queue's head meanwhile; longest first."""
    total: Counter[str] = Counter()
    heads: dict[str, Counter[int]] = {}
    for chapter in chapters:
        total[chapter.reason] += chapter.ns
        who = chapter.blocker if chapter.head is None else chapter.head
        if who is not None:
            heads.setdefault(chapter.reason, Counter())[who] += chapter.ns
    shown = []
    for reason, ns in total.most_common():
        behind = heads.get(reason, Counter())
        others = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
        who = f" behind request {behind.most_common(1)[0][0]}{others}" if behind else ""
        shown.append(f"{_words(reason)} {format_duration(ns)}{who}")
    return shown


def _for(ids: list[int], me: int) -> str:
    """` for request 7 and 2 more`: the requests in whose favour request `me` was preempted. `me` itself may be one: the
    newest that needs a block gives up its own.
    """
    shown = ", ".join("itself" if id_ == me else f"request {id_}" for id_ in ids[:4])
    more = f" and {len(ids) - 4} more" if len(ids) > 4 else ""
    return f" for {shown}{more}" if ids else ""


def _words(reason: str) -> str:
    return _REASONS.get(reason, reason.replace("_", " "))


def _count(number: int, one: str) -> str:
    return f"{number:,} {one if number == 1 else one + 's'}"


# ---- the text


def story_text(results: Results, facts: dict[str, Any]) -> str:
    """`facts`, which `story` returned, as text: sentence, timeline in letters, chapters, and the exact sum.

    >>> life = batchsim.life(results, "vllm", load=20, seed=0, request=3)
    >>> print(batchsim.life_text(results, life).splitlines()[1].strip())
    36.9 ms: arrived 6.92 ms before the running step ended, prefill 20 ms in 2 chunks, decoding 10 ms
    """
    request_class = f" of class {facts['request_class']}" if facts["request_class"] else ""
    tokens = f"{facts['prompt_tokens']:,} + {facts['output_tokens']:,} tokens"
    sent_s = facts["sent_ns"] / NS_PER_S
    head = (
        f"{point_text(results, facts)}: request {facts['request_id']}{request_class} ({tokens}), sent at {sent_s:.6f} s"
    )
    life = f"{format_duration(facts['e2e_ns'])}: {facts['sentence']}"
    head, life = (_NUMBER_AND_UNIT.sub(f"\\1{_UNBROKEN}\\2", text) for text in (head, life))
    lines = [text.replace(_UNBROKEN, " ") for text in (*filled(head, "  "), *filled(life, "    ", "  "))]
    if facts["chapters"]:
        legend = "  ".join(f"{letter} {what}" for what, letter in _LETTERS.items() if letter in facts["line"])
        lines += ["", f"  |{facts['line']}|", f"   {legend}", "", *_chapter_rows(facts["chapters"])]
    lines += ["", *_sum_rows(facts)]
    return "\n".join(lines)


def _chapter_rows(chapters: list[dict[str, Any]]) -> list[str]:
    """Lines of the `_ROWS` longest chapters in order of time; shorter ones between two of them are added up in one."""
    longest = sorted(range(len(chapters)), key=lambda i: chapters[i]["start_ns"] - chapters[i]["end_ns"])
    shown = set(longest[:_ROWS])
    lines, skipped = [f"  {'at':>14}  {'lasts':>9}"], []
    for i, chapter in enumerate([*chapters, None]):
        if chapter is not None and i not in shown:
            skipped.append(chapter)
            continue
        if skipped:
            lines.append(_row(skipped[0]["start_ns"], skipped[-1]["end_ns"], f"{len(skipped)} shorter ones"))
            skipped = []
        if chapter is not None:
            lines.append(_row(chapter["start_ns"], chapter["end_ns"], _title(chapter)))
    return lines


def _row(start_ns: int, end_ns: int, text: str) -> str:
    row = f"  {start_ns / NS_PER_S:>12.6f} s  {format_duration(end_ns - start_ns):>9}  "
    return "\n".join(filled(text, " " * (len(row) + 2), row))


def _title(chapter: dict[str, Any]) -> str:
    """A chapter in words: `queued:kv_blocks behind request 71`, `decode in 14 steps: 200 ms decode_alone`."""
    what, parts = chapter["what"], chapter["parts"]
    title = f"{what}:{chapter['reason']}" if chapter["reason"] else what
    title += f" behind request {chapter['head']}" if chapter["head"] is not None else ""
    if chapter["blocker"] is not None:
        title += f" {'for' if what in ('preempted', 'swapped') else 'held by'} request {chapter['blocker']}"
    title += f" in {_count(chapter['steps'], 'step')}" if chapter["steps"] else ""
    if set(parts) - {what, title}:
        parts_text = " + ".join(
            f"{format_duration(ns)} {part}" for part, ns in sorted(parts.items(), key=lambda p: -p[1])
        )
        title += f": {parts_text}" if what == "decode" or len(parts) > 1 else ""
    return title


def _sum_rows(facts: dict[str, Any]) -> list[str]:
    """Lines with each part of the life in ns and percent, and their sum."""
    total_ns = sum(part["ns"] for part in facts["parts"])
    width = max([len(part["part"]) for part in facts["parts"]] + [len("sum")])
    digits = len(f"{total_ns:,}")
    rows = [
        f"  {part['part'].ljust(width)}  {part['ns']:>{digits},} ns  {100 * part['ns'] / total_ns:>3.0f} %"
        for part in facts["parts"]
    ]
    end = "E2E" if facts["outcome"] == "finished" else f"its life until {facts['outcome']}"
    return [*rows, f"  {'sum'.ljust(width)}  {total_ns:>{digits},} ns  = {end}, {facts['e2e_ns']:,} ns"]
