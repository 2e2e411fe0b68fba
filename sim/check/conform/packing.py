"""Compares a packer with what the framework's own code made of given lengths, bin by bin and in order.

One JSON object, which may be gzipped:

    packer    the name of a packer here; `version` of the framework; `options` by their names there; `distribution`,
              `seed` and `note` are for readers
    lengths   tokens of each example; an index is a place in this list
    uids      of answers in groups, the prompt of each
    what chance chose, as data: `permutation`, `sampler_indices`, `shuffled` (of Megatron-Bridge lengths) or `order`
    the result, one of: `bins` and `batches`, lists of indices (of lengths where the packer returns those; Axolotl's
              batches are lists of bins); `packs`, rows of [index, first token, tokens]; `microbatches`,
              `partitions`, `groups`, `ranks`, `order`
    further results, if any: `seq_lens`, `efficiency`, `metadata`, `batch_sizes`, `batch_max_seqlens`, `row_tokens`

AReaL's `ffd` orders equal lengths by its CPU: there the lengths in each group are compared, in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchsim.base.errors import cut, nearest, shown
from batchsim.base.problems import first_problem
from batchsim.base.reading import read
from batchsim.base.units import counted
from batchsim.check.conform.fields import ANY, IDS, LIST, OBJECT, TEXT, BadRecording, ListOf, check_row, whole
from batchsim.training.packers.bins import PackerConfig
from batchsim.training.packers.registry import PACKERS

RESULTS = ("bins", "packs", "batches", "microbatches", "partitions", "groups", "ranks", "order")
FURTHER = ("seq_lens", "efficiency", "metadata", "batch_sizes", "batch_max_seqlens", "row_tokens")
INPUTS = ("permutation", "sampler_indices", "shuffled")
GROUPS = ("uids", "uid_list", "uid", "prompts", "prompt_ids", "group_ids")
"""Names of the lists that say to which prompt an answer belongs."""
GROUP_SIZES = ("n", "rollout_n", "group")
"""Names of the option that says how many answers a prompt has, `group_size` here."""
CHANCE = ("seed", "epoch")
"""Options that only say how chance chose, which the file holds as data."""
LENGTH = whole(0, 10**7)
NAMES = {"bins": "bin", "packs": "pack", "batches": "batch", "microbatches": "micro-batch", "order": "place"}
MOST_SHOWN = 12


@dataclass(frozen=True)
class PackingComparison:
    """A comparison: how many bins (or batches, parts, ranks) were compared, and the first difference in one line, ""
    if there is none, with both sides in `here` and `recorded`."""

    path: Path
    packer: str
    num_bins: int
    difference: str = ""
    here: str = ""
    recorded: str = ""
    note: str = ""

    def __str__(self) -> str:
        note = f", {self.note}" if self.note else ""
        equal = f"equal, {counted(self.num_bins, 'bin')} ({self.packer}){note}"
        lines = [f"{self.path.name}: {self.difference or equal}"]
        if self.difference:
            lines += [f"    here      {self.here}", f"    recorded  {self.recorded}"]
        return "\n".join(lines)


def is_packing(data: Any) -> bool:
    """Whether a JSON value is meant to be a packer's recorded result."""
    return isinstance(data, dict) and {"packer", "lengths"} <= data.keys()


def compare_packing(path: Path, data: Any) -> PackingComparison:
    """Packs the recorded lengths and compares the result. BadRecording, or ScenarioError of the packer, where that is
    not possible."""
    data = _checked(data)
    packer = _config(data)
    lengths: list[int] = data["lengths"]
    name = next(name for name in RESULTS if name in data and not _is_input(data, name))
    ours = _as_recorded(data, packer, packer.pack(lengths, _order(data, packer)))
    recorded = data[name]
    of_lengths = packer.name == "areal.ffd"
    if of_lengths:
        for place, group in enumerate(recorded):
            ListOf(whole(0, len(lengths) - 1)).check(group, f"groups[{place}]")
        ours, recorded = ([[lengths[i] for i in group] for group in side] for side in (ours, recorded))
    pairs = [(name, ours, recorded)]
    for name in (name for name in FURTHER if name in data):
        kind, fact = FACTS[name]
        if not data["packer"].startswith(kind):
            raise BadRecording(f"has {name}, which {data['packer']} does not report. Leave it out.")
        pairs.append((name, fact(data, packer, ours), data[name]))
    for what, here, there in pairs:
        if here != there:
            place, here, there = _first_difference(here, there, what)
            return PackingComparison(path, data["packer"], len(ours), place, _brief(here), _brief(there))
    note = "the lengths of each group" if of_lengths else ""
    return PackingComparison(path, data["packer"], len(ours), note=note)


def _checked(data: Any) -> Any:
    """`data` with every field known and of its kind, and one result."""
    needed = {"packer": TEXT, "version": TEXT, "options": OBJECT, "lengths": ListOf(LENGTH)}
    free = dict.fromkeys(("distribution", "seed", "note", "efficiency", "metadata", "row_tokens"), ANY)
    lists = dict.fromkeys((*RESULTS, *INPUTS, "seq_lens", "batch_sizes", "batch_max_seqlens", *GROUPS), LIST)
    check_row(data, "the recording", needed, {**free, **lists})
    if not data["lengths"]:
        raise BadRecording("has no lengths. Record it again.")
    results = [name for name in RESULTS if name in data and not _is_input(data, name)]
    if len(results) != 1:
        what = f"both {results[0]} and {results[1]}" if results else "no result"
        raise BadRecording(f"has {what}. It needs one of {', '.join(RESULTS)}.")
    return data


def _is_input(data: Mapping[str, Any], name: str) -> bool:
    """Whether `order` is what chance chose, beside DeepSpeed's micro-batches."""
    return name == "order" and name in data and "microbatches" in data


def _config(data: Mapping[str, Any]) -> PackerConfig:
    kind = data["packer"]
    if kind not in PACKERS:
        raise BadRecording(f"packer {cut(kind)} is not known. {nearest(kind, PACKERS)}")
    options = {name: value for name, value in data["options"].items() if name not in CHANCE}
    if kind == "verl.group_balanced":
        options = {"group_size" if name in GROUP_SIZES else name: value for name, value in options.items()}
    for name in GROUPS:
        if name in data:
            options["group_size"] = _group_size(data[name], len(data["lengths"]))
    known = {each.name for each in fields(PACKERS[kind])}
    if strange := sorted(options.keys() - known):
        raise BadRecording(f"options.{strange[0]} is no option of {kind}. {nearest(strange[0], known)}")
    needed = (PACKERS[kind].capacity_option, PACKERS[kind].ranks_option)
    if missing := [name for name in needed if name and name not in options]:
        raise BadRecording(f"options has no {missing[0]}. Write down what {kind} ran with.")
    if needed[0] and options[needed[0]] is None:
        raise BadRecording(f"options.{needed[0]} is null. Write down what {kind} ran with.")
    try:
        return read(PACKERS[kind], options)
    except ValidationError as error:
        raise BadRecording(f"{first_problem(error, options, 'options')} Record it again.") from None


def _group_size(groups: Sequence[Any], count: int) -> int:
    """The answers of each prompt, where neighbours that share a prompt are equally many."""
    size = next((i for i, group in enumerate(groups) if group != groups[0]), len(groups))
    if len(groups) != count or count % size or any(groups[i] != groups[i - i % size] for i in range(count)):
        raise BadRecording("the answers of a prompt do not stand side by side, equally many of each. Sort them.")
    return size


def _order(data: Mapping[str, Any], packer: PackerConfig) -> list[int]:
    """The examples in the order in which the packer reads them."""
    lengths = data["lengths"]
    name = next((name for name in INPUTS if name in data), "order" if _is_input(data, "order") else "")
    if not name:
        if packer.reads == "random":
            raise BadRecording(f"has no {' or '.join(INPUTS)}, which {data['packer']} needs. Record it again.")
        return list(range(len(lengths)))
    IDS.check(data[name], name)
    if name == "shuffled" and data["packer"].startswith("megatron_bridge"):
        return _examples_of(data[name], lengths)
    if len(set(data[name])) != len(data[name]) or (data[name] and max(data[name]) >= len(lengths)):
        raise BadRecording(f"{name} is no order of {len(lengths)} examples. Record it again.")
    return list(data[name])


def _examples_of(shuffled: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """An example of each of the lengths `shuffled`."""
    of_length: defaultdict[int, list[int]] = defaultdict(list)
    for i, length in enumerate(lengths):
        of_length[length].append(i)
    for place, length in enumerate(shuffled):
        if not of_length[length]:
            raise BadRecording(f"shuffled[{place}] is {length}, of which no example is left. Record it again.")
    return [of_length[length].pop() for length in shuffled]


def _as_recorded(data: Mapping[str, Any], packer: PackerConfig, packed: Any) -> Any:
    """What the packer made, in the form of the framework's own function."""
    lengths, kind = data["lengths"], data["packer"]
    if kind.startswith("megatron_bridge") or kind == "llamafactory.greedy_knapsack":
        return [[lengths[i] for i in row] for row in packed]
    if kind.startswith("deepspeed"):
        count = packer.effective_batch_size or 1  # type: ignore[attr-defined]
        return [[place // count, batch] for place, batch in enumerate(packed)]
    if kind == "areal.min_abs_diff":
        return [[part[0], part[-1] + 1] for part in packed]
    if packer.makes == "pieces":
        return [[list(piece) for piece in row] for row in packed]
    return packed


def _seq_lens(data: Mapping[str, Any], packer: Any, packed: Any) -> list[list[int]]:
    rows = [[piece[2] for piece in row] for row in packed]
    return [[*row, packer.max_seq_len - sum(row)] if sum(row) < packer.max_seq_len else row for row in rows]


def _efficiency(data: Mapping[str, Any], packer: Any, packed: Any) -> float:
    rows = [row for batch in packed for row in batch]
    return sum(data["lengths"][i] for row in rows for i in row) / (len(rows) * packer.batch_max_len)


def _metadata(data: Mapping[str, Any], packer: Any, packed: Any) -> dict[str, Any]:
    sums = [sum(row) for row in packed]
    return {
        "dataset_max_seqlen": max(data["lengths"]),
        "max_samples_per_bin": max(map(len, packed)),
        "packing_factor": round(sum(map(len, packed)) / len(packed), 2),
        "packing_efficiency": round(sum(sums) / len(sums) / packer.pack_size * 100, 2),
        "pack_size": packer.pack_size,
        "min_packed_seqlen": min(sums),
    }


def _of_batches(data: Mapping[str, Any], packed: Any) -> list[list[int]]:
    """The lengths of the samples of each of DeepSpeed's batches."""
    batches: defaultdict[int, list[int]] = defaultdict(list)
    for number, samples in packed:
        batches[number] += [data["lengths"][i] for i in samples]
    return list(batches.values())


FACTS: dict[str, tuple[str, Callable[[Mapping[str, Any], Any, Any], Any]]] = {
    "seq_lens": ("torchtune.", _seq_lens),
    "efficiency": ("axolotl.", _efficiency),
    "metadata": ("megatron_bridge.", _metadata),
    "batch_sizes": ("deepspeed.", lambda data, packer, packed: [len(batch) for batch in _of_batches(data, packed)]),
    "batch_max_seqlens": (
        "deepspeed.",
        lambda data, packer, packed: [max(batch) for batch in _of_batches(data, packed)],
    ),
    "row_tokens": ("llamafactory.packed", lambda data, packer, packed: packer.row_tokens),
}
"""Further results by name: the packers that report it, and what it is here."""


def _first_difference(here: Any, there: Any, name: str) -> tuple[str, Any, Any]:
    """Where two results part, in words, and both sides of that."""
    if isinstance(here, list) and isinstance(there, list):
        for place, (one, two) in enumerate(zip(here, there, strict=False)):
            if one != two:
                deeper = isinstance(one, list) and isinstance(two, list) and any(isinstance(each, list) for each in two)
                if deeper and not all(isinstance(each, list) and len(each) == 3 for each in two):
                    return _first_difference(one, two, f"{name}[{place}]")
                what = NAMES.get(name)
                number = f"{what} {place + 1} ({name}[{place}])" if what else f"{name}[{place}]"
                return f"{number} differs", one, two
        what = NAMES.get(name, "part")
        return f"{name} ends after {len(here)}, the recording has {len(there)} ({what} by {what})", here, there
    return f"{name} differs", here, there


def _brief(value: Any) -> str:
    if isinstance(value, list) and len(value) > MOST_SHOWN:
        return f"{len(value)}: {shown(value[:MOST_SHOWN])[:-1]}, ...]"
    return shown(value)
