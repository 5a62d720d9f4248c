"""A fixture that keeps answers in a separate folder, so that no test writes into anybody's answers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("COURSE_STATE", str(folder))
    return folder
