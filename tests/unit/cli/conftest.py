"""One run of the tiny scenario for all tests that only read results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_scenario import TINY, batchsim


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scenario's results: the folder `s`, beside the scenario. To be read, not changed."""
    folder = tmp_path_factory.mktemp("ran")
    (folder / "s.yaml").write_text(TINY)
    assert batchsim("run", folder / "s.yaml", "--out", folder, "--jobs", 1, "--no-pictures").exit_code == 0
    return folder / "s"
