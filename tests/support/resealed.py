"""Results that were changed and given new checksums: such as another version of batchsim might have written."""

from __future__ import annotations

import json
from pathlib import Path

from batchsim.results.checksums import SEAL, file_facts, sealed


def reseal(home: Path) -> None:
    """Gives every point and run of a scenario's results the checksums of the files that are there."""
    for path in [*home.glob("points/*/point.json"), *home.glob("*/manifest.json")]:
        facts = json.loads(path.read_text())
        facts["files"] = {name: file_facts((path.parent / name).read_bytes()) for name in facts.get("files", ())}
        facts.pop(SEAL, None)
        path.write_text(json.dumps(sealed(facts)))
