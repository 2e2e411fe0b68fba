"""The parts of each recorded step's time: measured in a live run, else from the cost model if that still agrees."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import BatchsimError, ScenarioError
from batchsim.base.files import TABLE_BYTES, file_hash, open_file
from batchsim.cost.base import Cost
from batchsim.cost.shapes.shaped import explain_apart
from batchsim.cost.work import TIME_TERMS, padded_work, work_columns
from batchsim.explain.shape_use import shapes_of
from batchsim.kernel.record import Records
from batchsim.metrics.encoding import step_encode_ns
from batchsim.metrics.host_lane import stage_spans_ns
from batchsim.metrics.masks import step_mask_ns
from batchsim.metrics.rank_waits import gpu_waits, rank_waits
from batchsim.results.knobs import asks_for_no_tokens, has_items, speculation
from batchsim.results.read import Results, scenario_of
from batchsim.scenario.parse import parse_scenario
from batchsim.scenario.setup import Setup

_ANY_POLICY = ("kv.swap_space=0GB",)
"""Overrides beside one that replaces the scenario's policies, whose code may be a user's own: the cost alone matters
here, and who drafts. A pipeline is refused to a policy that runs one batch at a time."""
_ANY_SHAPES = json.dumps({"preset": "lists", "mix": True, "tokens": [2**31 - 1]})
"""Compiled shapes that go with any policy, where only the cost matters: what they pad stands in the records."""
_ROUNDING_NS = len(TIME_TERMS)
_STAGE_NS = 4  # of a step in its stages


def step_terms(
    results: Results, records: Records, policy: str, replica: int | None = None
) -> dict[str, NDArray[np.float64]]:
    """ns of each recorded step by part of its time; empty where the parts are not known. `records` are of `policy`, and
    of one `replica` if there are several.

    For a live run: `kernel` and `host`, as measured; a server measures none. For a simulated one the terms of its cost
    model, without the host's part where the engine was ahead, and only if they sum to every recorded duration: after a
    change of profile or catalog they would explain nothing. What a step of a pipeline waits between stages and on
    links, and what LoRA adapters cost, is `other`; what sampling waits for masks is `host`.
    """
    live = results.manifest.get("live")
    if live is not None:
        if "raw" not in live:
            return {}
        return _measured(results.path.parent / live["raw"], live["raw_sha256"], records.num_steps)
    try:
        cost, by_term, rest_ns = _explained(results, records, policy, replica)
    except (BatchsimError, KeyError, ValueError):
        return {}
    columns = work_columns(records.step_columns)
    if scenario_of(results, policy).get("lora_cost"):
        by_term["other"] = by_term["other"] + rest_ns  # what adapters cost
        rest_ns = np.minimum(rest_ns, 0)
    if rank_waits(records) is not None:  # in which other ranks took longer, and dummies of this one
        by_term["other"] = by_term["other"] + rest_ns
        rest_ns = np.minimum(rest_ns, 0)
    if (of_gpu := gpu_waits(records)) is not None:
        by_term["other"], rest_ns = by_term["other"] + of_gpu[1], rest_ns - of_gpu[1]
    if len(encode_ns := step_encode_ns(records)):
        by_term["other"], rest_ns = by_term["other"] + encode_ns, rest_ns - encode_ns
    if len(mask_ns := step_mask_ns(records)):
        by_term["host"], rest_ns = by_term["host"] + mask_ns, rest_ns - mask_ns
    if shapes_of(scenario_of(results, policy)) is not None:
        by_term["other"] = by_term["other"] + rest_ns
        rest_ns = np.minimum(rest_ns, 0) * (rest_ns < -_ROUNDING_NS * np.maximum(columns["num_passes"], 1))
    if cost.stages > 1 and len(rest_ns):
        by_term["other"] = by_term["other"] + rest_ns
        # The first step finds all stages free: it waits for none, and is in them as long as the cost says.
        tokens = padded_work({name: column[:1] for name, column in columns.items()}).tokens
        rest_ns = np.append(np.minimum(rest_ns, 0), rest_ns[0] - (cost.stages - 1) * cost.transfer_ns(int(tokens[0])))
    return by_term if (np.abs(rest_ns) <= _ROUNDING_NS).all() else {}


def device_rows(
    results: Results, records: Records, policy: str, replica: int | None = None
) -> dict[str, NDArray[np.int64]]:
    """When each step ran, in ns, a row a step of (start, end), by the name of what ran it: `device`, or `stage 1`,
    `stage 2`, ... of a pipeline; empty where a pipeline's cost is not known, or does not make the recorded steps.

    For an engine ahead of results; `policy` and `replica` as in `step_terms`.
    """
    start_ns = records.steps["start_ns"]
    whole = np.stack([start_ns, start_ns + records.steps["duration_ns"]], axis=1)
    if (whole[1:, 0] >= whole[:-1, 1]).all():
        return {"device": whole}
    try:
        stages_ns = _cost(results, records, policy, replica).lanes().stages_of(work_columns(records.step_columns))
    except (BatchsimError, KeyError, ValueError):
        return {}
    rows = stage_spans_ns(records, stages_ns)
    # Each step before it may have been off by its rounding, as long as none finds all stages free.
    if (np.abs(rows[-1][:, 1] - whole[:, 1]) > _STAGE_NS * (1 + np.arange(len(whole)))).any():
        return {}
    return {f"stage {number}": spans for number, spans in enumerate(rows, 1)}


def unexplained_ns(results: Results, records: Records, policy: str) -> NDArray[np.float64] | None:
    """The ns by which each simulated step in compiled shapes was longer than its work explains; None where the cost
    model is not known any more."""
    try:
        return _explained(results, records, policy, None)[2]
    except (BatchsimError, KeyError, ValueError):
        return None


def _explained(
    results: Results, records: Records, policy: str, replica: int | None
) -> tuple[Cost, dict[str, NDArray[np.float64]], NDArray[np.float64]]:
    """(The cost model, the ns of its terms, those of each step beyond them). As `explain` raises."""
    cost, columns = _cost(results, records, policy, replica), work_columns(records.step_columns)
    if len(records.lanes):
        cost = cost.without_host()
    apart = (shapes_of(scenario_of(results, policy)) or {}).get("preset") == "gaudi"
    terms = explain_apart(cost, columns) if apart else cost.explain(columns)
    by_term = {name: np.asarray(terms[name], dtype=np.float64) for name in TIME_TERMS}
    return cost, by_term, records.steps["duration_ns"] - sum(by_term.values(), np.zeros(records.num_steps))


def _cost(results: Results, records: Records, policy: str, replica: int | None) -> Cost:
    """The cost model of the steps of `policy` in a run, or of those of one of its replicas. What compiled shapes padded
    stands in the records, so that it needs none."""
    drafts = speculation(results, policy)
    scenario = scenario_of(results, policy)
    stand_in = {"vllm": {"speculative_config": drafts or None}} if len(records.lanes) or drafts else {"gated": {}}
    pools = asks_for_no_tokens(scenario)
    if pools or scenario.get("structured_cost") or has_items(scenario):
        runner = "pooling" if pools else "generate"
        stand_in = {"vllm": {"async_scheduling": len(records.lanes) > 0, "runner": runner}}
    if rank_waits(records) is not None:
        stand_in = {"vllm": {"async_scheduling": len(records.lanes) > 0}}
    overrides = (f"policies={json.dumps(stand_in)}", *_ANY_POLICY)
    if shapes_of(scenario) is not None:
        overrides = (*overrides, f"cost.shapes={_ANY_SHAPES}")
    # As it ran, which the kept file alone does not say: options changed keys.
    text = json.dumps(scenario, ensure_ascii=False)
    setup = Setup.of(parse_scenario(text, str(results.path), results.path, overrides))
    one = setup if replica is None else setup.group_of(replica).setup
    return one.cost_under(setup.scenario.specs[0].config)


def _measured(path: Path, sha256: str, num_steps: int) -> dict[str, NDArray[np.float64]]:
    """Kernel and host ns of each live step; empty if there is no file. ScenarioError if its hash is not `sha256`."""
    if not path.exists():
        return {}
    try:
        if file_hash(path) != sha256:
            raise ScenarioError(f"{path}: cannot be read: it is not as it was written. Remove it, or run again.")
        with open_file(path, TABLE_BYTES) as file, np.load(file) as raw:
            by_term = {name: np.asarray(raw[f"{name}_ns"], dtype=np.float64) for name in ("kernel", "host")}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return {}
    return by_term if all(len(ns) == num_steps for ns in by_term.values()) else {}
