"""Planted faults, five in each kind of extension, are found by the check that is named after them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchsim.testing.check import CASES
from batchsim.testing.extension import KINDS, checks_of
from tests.conformance.test_conformance import failed
from tests.unit.testing.faults import FAULTS


@pytest.mark.parametrize(("kind", "thing", "name"), FAULTS, ids=[f"{kind}-{name}" for kind, _, name in FAULTS])
def test_a_planted_fault_is_found_by_name(kind: str, thing: Any, name: str, tmp_path: Path) -> None:
    file = None
    if kind == "reader":
        file = tmp_path / "some.log"
        file.write_text("one\ntwo\nthree\n", encoding="utf-8")
    cases = 60 if kind == "policy" else CASES  # what hypothesis draws differs with the modules that are loaded
    (check,) = [check for check in checks_of(kind, thing, cases=cases, file=file) if check.name == name]
    assert failed([check]).keys() == {name}


def test_every_kind_has_five_planted_faults_of_different_names() -> None:
    counts = Counter(kind for kind, _ in {(kind, name) for kind, _, name in FAULTS})
    assert set(counts) == set(KINDS) and min(counts.values()) >= 5
