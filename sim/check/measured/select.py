"""Which of the runs of some files are of one model, where the files are of several."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from batchsim.base.errors import MeasuredError
from batchsim.check.measured.run import MeasuredRun

_SHOWN = 6


def runs_of_model(runs: Sequence[MeasuredRun], model: str) -> list[MeasuredRun]:
    """`runs`, or where they are of several models those of `model` and of unknown models, with a note on the others.
    There is a note, too, where the only model is another.

    Names are compared without the case and the folder before them, and may have more words (`-Instruct`).
    MeasuredError, with the names, where none is of `model`, or several are.
    """
    counts: Counter[str] = Counter()
    for run in runs:
        counts[run.model] += 1 if run.requests is None else len(run.requests)
    named, words = [name for name in counts if name], _words(model)
    fits = [name for name in named if _words(name) == words]
    fits = fits or [name for name in named if words in _words(name) or _words(name) in words]
    if len(named) < 2:
        note = () if fits or not named else (f"measured of {named[0]}, and the scenario's model is {model}",)
        return [replace(run, notes=(*run.notes, *note)) if run.model else run for run in runs]
    names = ", ".join(f"{name} ({counts[name]:,})" for name in named[:_SHOWN])
    names += f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    if len(fits) != 1:
        raise MeasuredError(
            f"{runs[0].source}: rows of {len(named)} models, {names}: {'several are' if fits else 'none is'} the"
            f" scenario's {model}. Pick one by --part NAME, give the files of one, or write its name as the"
            " scenario's model."
        )
    others = sum(count for name, count in counts.items() if name not in ("", fits[0]))
    note = f"{others:,} of other models left out: the rows are of {names}"
    return [replace(run, notes=(*run.notes, note)) for run in runs if run.model in ("", fits[0])]


def _words(name: str) -> str:
    """`meta-llama/Llama3.1_8B` as `-llama-3.1-8b-`."""
    words = re.sub(r"[^a-z0-9.]+", "-", name.rstrip("/").rpartition("/")[2].lower())
    return f"-{re.sub(r'(?<=[a-z])(?=[0-9])', '-', words)}-"
