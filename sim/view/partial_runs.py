"""What a page can show of a run that kept less than all: minutes in the place of steps, and a line for each panel that
has nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchsim.base.errors import ScenarioError
from batchsim.base.units import NS_PER_S
from batchsim.explain.causes import Objectives
from batchsim.metrics.by_minute import MINUTE_NS
from batchsim.results.read import Results, scenario_of
from batchsim.view.downsampling import downsampled_rows

_LACKS = {
    "all": ((), ""),
    "requests": (("timeline", "lanes", "life"), "steps and states"),
    "minutes": (("lanes", "life", "requests", "compare", "change"), "rows of requests and steps"),
}
"""By what was kept: the panels that have nothing, and what they would need."""
_MEANS = ("num_waiting", "num_running", "kv_utilisation", "busy_ns")
_COUNTS = ("sent", "judged", "within", "finished")


def lacks(results: Results, policy: str) -> dict[str, str]:
    """By panel (timeline, lanes, life, requests, compare, change) that has nothing to show of a policy's points: one
    line that says why and what to do."""
    keep = results.keeps(policy)
    panels, rows = _LACKS[keep]
    line = f"Not shown: {rows} were not kept, since the scenario says keep: {keep}. Run it again with --set keep=all."
    lines = dict.fromkeys(panels, line)
    if "change" not in lines:
        try:
            Objectives.of(scenario_of(results, policy))
        except ScenarioError as error:
            lines["change"] = f"Not simulated here: {error}"
    return lines


def minutes_length(results: Results, policy: str, load: float, seed: int) -> dict[str, Any]:
    """Of a point of which minutes were kept: its requests, steps, length in s, and replicas that ran a step."""
    requests, engines = results.minutes(policy, load, seed), results.engine_minutes(policy, load, seed)
    starts_ns = [np.asarray(table["start_ns"], np.int64) for table in (requests, engines)]
    return {
        "end_s": (int(np.concatenate(starts_ns).max()) + MINUTE_NS) / NS_PER_S,
        "requests": int(np.asarray(requests["sent"]).sum()),
        "steps": int(np.asarray(engines["num_steps"]).sum()),
        "replicas": np.unique(np.asarray(engines["replica"].fillna(0), np.int64)).tolist(),
    }


def minutes_series(
    results: Results, at: tuple[str, float, int], replica: int, window_s: tuple[float, float] | None, most: int
) -> dict[str, Any]:
    """A replica's minutes that overlap a window, the whole run without one, as columns of at most `most` rows.

    `waiting`, `running`, `kv_share`: means over the steps of the minute; `busy`: the share of it that steps took;
    `sent`, `finished`, requests; `within`: the share of the judged sent in it that met their objective, None of none.
    """
    engines, requests = results.engine_minutes(*at), results.minutes(*at)
    length = minutes_length(results, *at)
    if replica not in length["replicas"]:
        raise ScenarioError(f"replica {replica}: no step ran there. Choose another.")
    start_s, end_s = window_s or (0.0, length["end_s"])
    of_engines, of_requests = (_columns(table, replica) for table in (engines, requests))
    every = np.unique(np.concatenate((of_engines["start_ns"], of_requests["start_ns"])))
    by_minute: dict[str, NDArray[np.float64]] = {}
    for table, names in ((of_engines, _MEANS), (of_requests, _COUNTS)):
        place = np.searchsorted(every, table["start_ns"])
        for name in names:  # rows of requests are by class too
            by_minute[name] = np.bincount(place, table[name], len(every)).astype(np.float64)
    time_s = every / NS_PER_S
    seen = (time_s < end_s) & (time_s + MINUTE_NS / NS_PER_S > start_s)
    time_s, by_minute = time_s[seen], {name: values[seen] for name, values in by_minute.items()}
    columns = {
        "waiting": by_minute["num_waiting"],
        "running": by_minute["num_running"],
        "kv_share": by_minute["kv_utilisation"],
        "busy": by_minute["busy_ns"] / MINUTE_NS,
        "sent": by_minute["sent"],
        "finished": by_minute["finished"],
        "within": np.where(by_minute["judged"] > 0, by_minute["within"] / np.maximum(by_minute["judged"], 1), np.nan),
    }
    kept = downsampled_rows(list(columns.values()), most)
    plain = {name: [None if np.isnan(x) else float(x) for x in values[kept]] for name, values in columns.items()}
    return {
        "from_s": start_s,
        "to_s": end_s,
        "exact": len(kept) == len(time_s),
        "of": len(time_s),
        "start_s": time_s[kept].tolist(),
        **plain,
    }


def _columns(table: Any, replica: int) -> dict[str, NDArray[Any]]:
    """The numbers of a replica's rows; of an engine without replicas all of them."""
    of = np.asarray(table["replica"].fillna(0), np.int64)
    names = [name for name in table.columns if name not in ("replica", "request_class")]
    return {name: np.asarray(table[name])[of == replica] for name in names}
