"""Reads the file of a measured run, whatever tool wrote it: the form is recognised by its keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchsim.base.errors import MeasuredError
from batchsim.base.files import read_bytes, reason_text, unique_keys
from batchsim.check.measured import aiperf, bench_serving, guidellm, inference_perf, llm_serving_sim, tidy
from batchsim.check.measured.client_faults import with_faults
from batchsim.check.measured.limits import check_run
from batchsim.check.measured.run import MeasuredRun
from batchsim.check.measured.spellings import check_alike
from batchsim.check.measured.values import Node

MAX_BYTES = 1 << 31
FORMS = "vllm bench serve, SGLang bench_serving, guidellm, aiperf, inference-perf, LLMServingSim or a table"
_NOT = f"Give a file of {FORMS} with columns such as prompt_tokens, output_tokens, sent_s, ttft_s, e2e_s."


def read_measured(path: Path | str) -> list[MeasuredRun]:
    """The runs of a file, each with what is wrong with its client in `notes`. MeasuredError for any other file."""
    path = Path(path)
    return [with_faults(check_run(run)) for run in _runs(path, _text(path))]


def _text(path: Path) -> str:
    try:
        data = read_bytes(path, MAX_BYTES)
    except OSError as error:
        raise MeasuredError(f"{path}: cannot be read: {reason_text(error)}. Give the file of a measured run.") from None
    if data[:2] == b"\x1f\x8b":
        raise MeasuredError(f"{path}: is packed by gzip. Unpack it.")
    if b"\0" in data:
        raise MeasuredError(f"{path}: holds zero bytes, so is no text. {_NOT}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MeasuredError(f"{path}: byte {error.start + 1:,} is not UTF-8 text. {_NOT}") from None
    if not text.strip():
        raise MeasuredError(f"{path}: is empty. {_NOT}")
    return text


def _runs(path: Path, text: str) -> list[MeasuredRun]:
    source = str(path)
    if text.lstrip()[0] not in "{[":
        rows, names = tidy.csv_rows(text, source)
        if not tidy.is_tidy(names):
            Node(None, source).bad(f"columns {', '.join(names[:8])} are of no form that is known", _NOT)
        check_alike(rows, names)
        return tidy.read_tidy(rows, names, source, _ids_beside(path, rows))
    values = _values(path, text)
    if len(values) == 1 and isinstance(values[0].value, list):
        return _of_list(values[0], source)
    return _of_records(path, values)


def _values(path: Path, text: str) -> list[Node]:
    """The JSON value of a text, or those of its lines."""
    try:
        return [Node(_parse(text), str(path))]
    except ValueError as whole:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) == 1 or not lines[0][1].rstrip().endswith("}"):
            raise MeasuredError(f"{path}: not JSON: {whole}. Write the file anew.") from None
    nodes: list[Node] = []
    for number, line in lines:
        try:
            nodes.append(Node(_parse(line), f"{path}:{number}"))
        except ValueError as error:
            cut = " (the last: was the tool cut off?)" if number == lines[-1][0] else ""
            raise MeasuredError(
                f"{path}:{number}: not JSON{cut}: {error}. Remove the line, or write it anew."
            ) from None
    return nodes


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError as error:  # of Python's limit on the digits of a whole number
        raise ValueError(str(error).partition(";")[0]) from None


def _of_list(node: Node, source: str) -> list[MeasuredRun]:
    if inference_perf.is_requests(node.value):
        return [inference_perf.read_requests(node, source)]
    if not node.value:
        node.bad("is an empty list", _NOT)
    return _of_records(Path(source), node.items())


def _of_records(path: Path, values: list[Node]) -> list[MeasuredRun]:
    """The runs of objects: one a run, or one a request."""
    objects = [value.object() for value in values]
    source, data = str(path), dict(objects[0])
    for form, fits in ((bench_serving.VLLM, bench_serving.is_vllm), (bench_serving.SGLANG, bench_serving.is_sglang)):
        if fits(data):
            parts = [f"line {number}" if len(values) > 1 else "" for number in range(1, len(values) + 1)]
            return [
                bench_serving.read_bench(node, source, part, form) for node, part in zip(values, parts, strict=True)
            ]
    if guidellm.is_guidellm(data):
        return guidellm.read_guidellm(values[0], source)
    if inference_perf.is_aggregates(data):
        return [inference_perf.read_aggregates(values[0], source)]
    if aiperf.is_aiperf(data):
        return [aiperf.read_aiperf(values, source, _beside(path, "profile_export_aiperf.json"))]
    if llm_serving_sim.is_llm_serving_sim(data):
        return [llm_serving_sim.read_llm_serving_sim(values, source)]
    if aiperf.is_aggregates(data):
        return [aiperf.read_aggregates(values[0], source)]
    names = list(data)
    if not tidy.is_tidy(names):
        values[0].bad(f"keys {', '.join(names[:8])} are of no form that is known", _NOT)
    check_alike(values, names)
    return tidy.read_tidy(values, names, source)


def _beside(path: Path, name: str) -> Node | None:
    """The JSON object in the file `name` of the same folder; None without such a file."""
    other = path.with_name(name)
    if not other.is_file():
        return None
    (node, *_) = _values(other, _text(other))
    return node


def _ids_beside(path: Path, rows: Sequence[Node]) -> list[Node] | None:
    """What prompts share, by `trace.jsonl` beside a table of as many requests of the same prompts; None without."""
    other = path.with_name("trace.jsonl")
    if not other.is_file() or not rows or "hash_ids" in rows[0].value:
        return None
    nodes = _values(other, _text(other))
    lists = [node for node in nodes if isinstance(node.value, dict) and isinstance(node.value.get("hash_ids"), list)]
    prompts = [node.value.get("prompt") for node in lists]
    if len(lists) != len(rows) or prompts != [row.value.get("prompt_tokens") for row in rows]:
        return None
    return [node.of("hash_ids") for node in lists]
