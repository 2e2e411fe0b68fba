"""Makes every shipped profile of public kernel tables anew, in OUT, `calibrate/profiles` by default.

    python -m tools.import_profiles FOLDER [OUT]

FOLDER holds `kernel_tables/` of AIConfigurator. `batchsim calibrate import-aiconfigurator` makes a single one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from batchsim.base.errors import BatchsimError
from batchsim.base.files import write_text
from batchsim.calibrate.import_aiconfigurator import SYSTEMS, import_profile

MODELS = ("llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "mistral-7b")


def main() -> int:
    """Writes one profile for each GPU and model and prints its path; returns 2 if a table is missing."""
    if len(sys.argv) not in (2, 3):
        print("usage: python -m tools.import_profiles FOLDER [OUT]", file=sys.stderr)
        return 2
    out = Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parents[1] / "calibrate" / "profiles"
    try:
        for system in SYSTEMS:
            for model in MODELS:
                profile = import_profile(Path(sys.argv[1]), system, model)
                write_text(out / f"{profile.name}.json", profile.to_json())
                print(out / f"{profile.name}.json")
    except BatchsimError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
