"""Compares bucket lists and choices with the recorded ones of engines with compiled shapes.

The form: `{"versions": {engine: version}, "cases": {function: [{"args", "result"}...]}}`, where a function is one of
`FUNCTIONS`; under `gaudi.manager` each case has the keys of `GaudiEngine`, with its buckets `prompt` and `decode` (or
`prompt_count` and `decode_count`) and `lookups`, of the sizes of a `prompt` or of a `decode` and the `bucket` that it
gets. Such a file may be packed (gzip).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from batchsim.base.errors import cut
from batchsim.check.conform.fields import BadRecording
from batchsim.cost.shapes import lists
from batchsim.cost.shapes.gaudi import GaudiEngine, fallback

MANAGER = "gaudi.manager"
MAX_NUMBER = 1 << 24
"""The largest number of a case: no engine has sequences, budgets or KV blocks beyond it."""
_KNOBS = [field.name for field in fields(GaudiEngine)]


def _prefix(low: int, high: int, second_low: int, second_high: int, zero: bool) -> list[lists.Bucket]:
    return lists.nxdi_prefix(low, high, second_low, second_high, zero=zero)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nxdi.generate_buckets": lists.pow2_round,
    "nxdi.2d_prefix": _prefix,
    "nxdi.chunk": lists.nxdi_chunks,
    "tpu.build_token_paddings": lists.tpu_tokens,
    "tpu.get_token_paddings": lists.pow2_gap,
    "tpu.get_req_paddings": lists.tpu_requests,
    "gaudi.exp_range": lists.exp,
    "gaudi.lin_range": lists.lin,
    "gaudi.fallback": fallback,
}
"""The functions compared, by the names of the engines' own."""


@dataclass(frozen=True)
class CaseComparison:
    """A comparison: how many lists and choices were compared, and the first difference in one line, "" if none."""

    path: Path
    num_cases: int
    difference: str = ""

    def __str__(self) -> str:
        return f"{self.path.name}: {self.difference or f'equal, {self.num_cases} bucket lists and choices'}"


def bucket_cases(data: Any) -> dict[str, Any] | None:
    """The cases of a file whose JSON value is `data`; None if it is no file of buckets."""
    cases = data.get("cases") if isinstance(data, dict) else None
    return cases if isinstance(cases, dict) else None


def compare_buckets(path: Path, cases: dict[str, Any]) -> CaseComparison:
    """Makes every list and choice of `cases` again. BadRecording for a function or a knob that is not known."""
    count = 0
    for function, rows in cases.items():
        if function != MANAGER and function not in FUNCTIONS:
            known = ", ".join([*FUNCTIONS, MANAGER])
            raise BadRecording(f"cases.{cut(function)} is no function of buckets. Known: {known}.")
        for i, row in enumerate(rows):
            where = f"cases.{function}[{i}]"
            try:
                _check_numbers(row["args"] if function != MANAGER else [row.get(knob) for knob in _KNOBS])
                made = list(_manager(row)) if function == MANAGER else [_called(function, row)]
            except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                raise BadRecording(f"{where} cannot be made: {cut(str(error))}. Record it again.") from None
            for what, here, recorded in made:
                if here != recorded:
                    first = _parting(here, recorded)
                    return CaseComparison(path, count, f"{where} differs in {what}: {first}")
                count += 1
    return CaseComparison(path, count)


def _check_numbers(values: Any) -> None:
    """ValueError for a number of which a list would be longer than any of a device."""
    if any(isinstance(value, int | float) and abs(value) > MAX_NUMBER for value in values):
        raise ValueError(f"a number is above {MAX_NUMBER:,}")


def _called(function: str, row: dict[str, Any]) -> tuple[str, Any, Any]:
    return f"result of {row['args']}", _plain(FUNCTIONS[function](*row["args"])), row["result"]


def _manager(row: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(what, made here, recorded) of each fact of a bucket manager."""
    made_of = {"prompt", "decode", "prompt_count", "decode_count", "lookups"}
    if unknown := row.keys() - made_of - set(_KNOBS):
        raise ValueError(f"{min(unknown)} is not known")
    engine = GaudiEngine(**{name: row[name] for name in _KNOBS})
    if prod(map(len, engine.lists())) > MAX_NUMBER:
        raise ValueError(f"its lists have more than {MAX_NUMBER:,} combinations")
    prompts, decodes = engine.prompts(), engine.decodes()
    every = {
        "prompt": _plain(prompts),
        "decode": [[batch, 1, blocks] for batch, blocks in decodes],
        "prompt_count": len(prompts),
        "decode_count": len(decodes),
    }
    for name, here in every.items():
        if name in row:
            yield name, here, row[name]
    for each in row.get("lookups", []):
        if "prompt" in each:
            bucket = lists.first_fit(prompts, tuple(each["prompt"])) or engine.prompt_beyond(*each["prompt"])
            yield f"the bucket of prompt {each['prompt']}", list(bucket), each["bucket"]
        else:
            batch, blocks = lists.first_fit(decodes, tuple(each["decode"])) or engine.decode_beyond(*each["decode"])
            yield f"the bucket of decode {each['decode']}", [batch, 1, blocks], each["bucket"]


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _parting(here: Any, recorded: Any) -> str:
    """Where two values part, in words: lists at their first place that is not the same."""
    if isinstance(here, list) and isinstance(recorded, list):
        for i, (ours, theirs) in enumerate(zip(here, recorded, strict=False)):
            if ours != theirs:
                return f"place {i + 1} is {ours} here, {theirs} in the recording"
        return f"{len(here)} here, {len(recorded)} in the recording"
    return f"{here} here, {recorded} in the recording"
