"""A scenario of milliseconds, and calling `batchsim` inside this process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import typer.testing
from typer.main import get_command
from typer.testing import CliRunner

from batchsim.cli import app

typer.testing._get_command = cache(get_command)  # to make a command takes Typer longer than many a call of it

TINY = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: poisson, mean_rate: 20/s}
  lengths:
    prompt: {kind: fixed, tokens: 100}
    output: {kind: uniform, min: 2, max: 12}
  output_cap: 16
  requests: 40
policies:
  static: {batch_size: 4, max_wait: 100ms}
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
load: {mean_rate: [10/s, 20/s]}
slo: ttft<1s & tpot<50ms @ 99%
seeds: 2
"""

REPLAY = """\
model: llama-3.1-8b
cost: {kind: constant, step: 10ms}
kv: {tokens: 16000}
workload:
  arrivals: {kind: trace}
  trace: {path: my.csv, columns: {arrival: ts, prompt: in, output: out}, time_unit: ms}
  output_cap: exact
policies:
  continuous: {max_num_seqs: 8, max_num_batched_tokens: 512}
slo: e2e<10s @ 90%
seeds: 1
"""


def batchsim(*args: object) -> Any:
    """The result of a call: `exit_code`, `stdout`, `stderr`, `exception`."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


def changed(text: str, old: str, new: str) -> str:
    """`text` with its one `old` replaced."""
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the tiny scenario"
    return text.replace(old, new)


def listing(folder: Path) -> set[str]:
    """Everything below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
