"""Fixtures for explorers: stand-ins for runs, short trainings, no pauses; and a separate folder for answers."""

from __future__ import annotations

from typing import Any

import pytest

from lessons.L06_tensor_parallelism import explorer as tensor_parallel
from lessons.L07_mixed_precision import explorer as mixed_precision
from tests.classroom.questions.conftest import state  # noqa: F401
from tests.lessons.stand_ins import STAND_INS, Cut


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings run so far, with stand-ins for the runs."""
    settings: list[Any] = []

    def recorded(setting: Any, stand_in: Any) -> Any:
        settings.append(setting)
        return stand_in(setting)

    for kind, stand_in in STAND_INS.items():
        monkeypatch.setattr(kind, "run", lambda setting, stand_in=stand_in: recorded(setting, stand_in))
    monkeypatch.setattr(
        tensor_parallel, "run_cut", lambda way, ranks, hidden, seq, _: recorded(Cut(ranks, hidden, way, seq), Cut.run)
    )
    return settings


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every setting with the training that begins for it."""
    trainings: list[Any] = []
    begin = mixed_precision.OngoingTraining

    def recorded(setting: Any) -> Any:
        trainings.append((setting, begin(setting)))
        return trainings[-1][1]

    monkeypatch.setattr(mixed_precision, "OngoingTraining", recorded)
    return trainings


@pytest.fixture
def one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest possible trainings, for tests that do not depend on their end."""
    monkeypatch.setattr(mixed_precision, "STEPS", mixed_precision.PIECE)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explorers whose further views follow a move at once."""
    for name in ("PAUSE", "BREATH"):
        monkeypatch.setattr(f"course_lib.classroom.widgets.explorer.{name}", 0.0)
