"""Makes the profiles of deployments that come with batchsim anew of the installed kernel tables, and prints how far
each is from 200 direct queries of these.

    python -m tools.ship_deployments [SCENARIO ...]            (needs pip install 'batchsim[gpus]')
    python -m tools.ship_deployments --only TEXT [--only TEXT ...]
    python -m tools.ship_deployments --add MODEL,GPU,ENGINE,TP[,KV] [...]

Each is made for the newest version of its engine in the tables, in the place of that of an older one; the deployments
of the SCENARIOs join them. `--only` makes those anew whose names hold one of the texts, `--add` those of models of the
tables, their experts divided over all GPUs (KV: the type of the cache; the checkpoint's, if it is left out); both leave
all others as they are. The same tables give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from batchsim.base.errors import BatchsimError
from batchsim.base.files import write_text
from batchsim.cost.profile import load_profile
from batchsim.deployment.catalog import GPUS, read_model
from batchsim.deployment.deployment import Deployment
from batchsim.scenario import load_scenario
from batchsim.scenario.deployment_config import DeploymentConfig
from batchsim.tables.compare import HEAD, line, within
from batchsim.tables.find import build
from batchsim.tables.models import model_spec
from batchsim.tables.modes import has_experts

SHIPPED = Path(__file__).parents[1] / "sim" / "tables" / "profiles"


def shipped(only: Sequence[str]) -> Iterator[Deployment]:
    """Those of the shipped profiles whose names hold one of the texts, or all."""
    for path in sorted(SHIPPED.glob("*.json")):
        if not only or any(text in path.stem for text in only):
            yield replace(load_profile(path.stem).deployment, version="")


def of_scenarios(scenarios: Sequence[str]) -> Iterator[Deployment]:
    """Those that the scenarios name."""
    for scenario in map(load_scenario, scenarios):
        if isinstance(scenario.cost, DeploymentConfig):
            yield scenario.cost.deployment(read_model(scenario.model_path))


def of_tables(text: str) -> Deployment:
    """The one that MODEL,GPU,ENGINE,TP[,KV] says."""
    name, gpu, engine, tp, *kv = text.split(",")
    model = model_spec(name)
    ep = int(tp) if has_experts(model) else 1
    return Deployment(model, GPUS[gpu], engine=engine, tp=int(tp), ep=ep, kv_dtype="".join(kv))


def main() -> int:
    """Writes the profiles and prints a line of each; returns 1 if one is refused or further off than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--add", nargs="+", default=[], metavar="MODEL,GPU,ENGINE,TP[,KV]")
    args = parser.parse_args()
    some = bool(args.only or args.add)
    asked = [] if args.add and not args.only else [*shipped(args.only)]
    asked += [*of_scenarios(args.scenario), *map(of_tables, args.add)]
    written, failed = set[str](), 0
    print(HEAD)
    for deployment in asked:
        try:
            profile = build(deployment)
        except BatchsimError as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        write_text(SHIPPED / f"{profile.name}.json", profile.to_json())
        written.add(profile.name)
        failed += not within(profile)
        print(line(profile), flush=True)
    if not failed and not some:
        for path in SHIPPED.glob("*.json"):
            if path.stem not in written:
                path.unlink()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
