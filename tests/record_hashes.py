"""Prints a hash of the records of every point of scenarios: equal before and after a change, nothing has changed.

    python -m tests.record_hashes [--seeds N] [SCENARIO ...]

Without names, all shipped scenarios. A line a point: hash, scenario, load, seed, policy; the last line is of all lines.
What is hashed are the columns as readers return them, not how they are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

from batchsim.drive.fleet.fleet_records import stay_rows
from batchsim.kernel.record import Records
from batchsim.scenario import load_scenario
from batchsim.scenario.load import shipped_scenarios
from batchsim.scenario.point import simulate_point
from batchsim.scenario.setup import Setup
from batchsim.study.curves.lines import ANY_LOAD, lines_of

ADDED = ("num_passes", "num_wide_passes", "window_tokens", "window_pairs")
"""Columns of steps that are left out where they are 0 throughout, so that hashes of before there were any hold."""


def record_hash(records: Records) -> str:
    """A hash of all rows, texts and details of `records`."""
    found = hashlib.sha256()
    tables = {name: getattr(records, name) for name in ("requests", "steps", "states")}
    if records.replicas is not None:
        owners = ("requests", "steps", "states")
        tables |= {f"replicas.{name}": getattr(records.replicas, name) for name in owners}
        # As rows of requests, which hashes of before there were stays are of.
        tables |= {"replicas.lost": stay_rows(records), "replicas.of_lost": records.replicas.stays["replica"]}
    for name, table in tables.items():
        columns = table.dtype.names or ("",)
        for column in columns:
            if column in ADDED and not table[column].any():
                continue
            found.update(f"{name}.{column}:".encode())
            found.update((table[column] if column else table).astype("<i8").tobytes())
    found.update(json.dumps([records.texts, sorted(records.details.items())]).encode())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*")
    parser.add_argument("--seeds", type=int, help="at most so many of each scenario")
    args = parser.parse_args()
    everything = hashlib.sha256()
    folders = [Path(os.environ["BATCHSIM_TRACES"])] if "BATCHSIM_TRACES" in os.environ else []
    for name in args.scenario or shipped_scenarios():
        scenario = load_scenario(name, trace_folders=folders)
        for line in lines_of(Setup.of(scenario)):
            for load in sorted(scenario.loads) or [ANY_LOAD]:
                for setup, point in line.points(load):
                    if args.seeds is not None and point.seed >= args.seeds:
                        continue
                    found = record_hash(simulate_point(setup, point).records)
                    text = f"{found} {name} {load:g} {point.seed} {line.policy} {point.spec.name}"
                    everything.update(text.encode())
                    print(text, flush=True)
    print(everything.hexdigest()[:16], "all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
