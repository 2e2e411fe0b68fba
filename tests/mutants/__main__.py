"""Plants faults one at a time and counts those that the tests notice: `make mutants`, or a sample of them.

Each mutant is tested in a process of its own, forked from one that has collected all tests, by the tests of its file
(table.py), quickest first as far as is known, until one fails. It is killed if a test fails that passes without it, or
takes far more CPU time than without it.
Survivors are printed as entries of survivors.toml: the lines that were and that are. Those that stand there with a
reason why no test can or should notice them are not run again; an entry that fits no mutant any more is reported, and
an error of a run of all.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

from tests.mutants.making import ROOT, Mutant, mutate, mutated_files
from tests.mutants.table import check
from tests.mutants.testing import Tester, test

REASONS = ROOT / "tests" / "mutants" / "survivors.toml"


def excused(mutants: list[Mutant]) -> tuple[set[Mutant], list[dict[str, str]]]:
    """Those for whose survival there is a reason, and the reasons that fit none of `mutants`."""
    entries = tomllib.loads(REASONS.read_text(encoding="utf-8")).get("survivor", [])
    found: set[Mutant] = set()
    stale: list[dict[str, str]] = []
    by_change: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_change[mutant.was, mutant.now].append(mutant)
    for entry in entries:
        fitting = [m for m in by_change[entry["was"], entry["now"]] if fnmatch.fnmatchcase(m.where, entry["where"])]
        found.update(fitting)
        if not fitting:
            stale.append(entry)
    return found, stale


def interval(killed: int, number: int) -> str:
    """Wilson's 95 % interval of a share."""
    z = 1.96
    middle = killed + z * z / 2
    half = z * math.sqrt(killed * (number - killed) / number + z * z / 4)
    return f"{(middle - half) / (number + z * z):.1%} to {(middle + half) / (number + z * z):.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="*", help="of names of mutants or of files (sim/kv/*.py); without any, all")
    parser.add_argument("--sample", type=int, metavar="N", help="test N of them, drawn at random")
    parser.add_argument("--seed", default="0", help="what the sample is drawn by")
    parser.add_argument("--least", type=float, default=90, metavar="PERCENT", help="the score below which it fails")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    os.chdir(ROOT)
    paths = mutated_files()
    check(paths)
    names = [*args.pattern] or ["*"]
    if args.pattern and all(pattern.endswith(".py") for pattern in args.pattern):
        paths = [path for path in paths if any(fnmatch.fnmatch(path, name) for name in names)]
    drawn = Counter(paths)
    if args.sample is not None:  # a file by its length: to make all mutants of all files takes longer than to test 25
        drawn = Counter(chance.choices(paths, [(ROOT / path).stat().st_size for path in paths], k=args.sample))
        paths = sorted(drawn)
    with multiprocessing.Pool(args.jobs) as pool:
        made = dict(zip(paths, pool.map(mutate, paths, chunksize=1), strict=True))
    mutants = [mutant for _, found in made.values() for mutant in found]
    known, stale = excused(mutants)
    stale = stale if len(paths) == len(mutated_files()) else []
    for entry in stale:
        print(f"{REASONS.name} has a reason for a mutant that there is no more. Take it out: {entry}")
    mutants = [m for m in mutants if any(fnmatch.fnmatch(text, name) for name in names for text in (m.name, m.path))]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        counts[mutant.path]["explained"] += mutant in known
    mutants = [mutant for mutant in mutants if mutant not in known]
    if args.sample is not None:
        counts.clear()
        of_file = {path: [mutant for mutant in mutants if mutant.path == path] for path in paths}
        mutants = [m for path, left in of_file.items() for m in chance.sample(left, min(drawn[path], len(left)))]

    def notify(mutant: Mutant, killed: bool) -> None:
        counts[mutant.path]["killed" if killed else "survived"] += 1
        if not killed:
            print(f"[[survivor]]  # {mutant.name}")
            for key in ("where", "was", "now"):
                print(f"{key} = {json.dumps(getattr(mutant, key), ensure_ascii=False)}")
            print('why = ""\n', flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        wanted = {mutant.path for mutant in mutants}
        test(
            {path: code for path, (code, _) in made.items() if path in wanted},
            Tester(mutants, args.jobs, notify),
            Path(folder),
        )
    return report(counts, args.least) or (bool(stale) and args.sample is None)


def report(counts: dict[str, Counter[str]], least: float) -> int:
    """Prints the table; 1 if the score is below `least` percent."""
    columns = ("killed", "explained", "survived")
    print(f"{'':45} {'mutants':>9} {' '.join(f'{name:>9}' for name in columns)} {'score':>9}")
    total: Counter[str] = Counter()
    for of_file in counts.values():
        total += of_file
    for path, row in [*sorted(counts.items()), ("all", total)]:
        number = sum(row.values())
        cells = " ".join(f"{row[name]:9}" for name in columns)
        print(f"{path:45} {number:9} {cells} {1 - row['survived'] / max(number, 1):9.1%}")
    number, good = total.total(), total["killed"] + total["explained"]
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"95 % interval {interval(good, max(number, 1))}; {seconds.ru_utime + seconds.ru_stime:.0f} CPU seconds")
    if good < least / 100 * number:
        print(f"The tests noticed fewer than {least:g} % of the mutants. Write those that notice the survivors above.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
