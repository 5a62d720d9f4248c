"""A lesson as a room sees it: by sections, and nothing that answers a question before its time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import traitlets.config

from course import SETTINGS
from course_lib.classroom.presenting import AFTER_A_RUN, projected, stage

ROOT = Path(__file__).parents[2]
SHOWN = Path("notebooks") / "02_data_parallelism.ipynb"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of one lesson, which has run."""
    text = ["# Title\n", "## 1. One\n", "text\n", "### Question"]
    prose = {"id": "a", "cell_type": "markdown", "metadata": {}, "source": text}
    code = {"id": "b", "cell_type": "code", "metadata": {}, "source": "1", "outputs": ["seen"], "execution_count": 1}
    for name in ("notebooks", "exercises"):
        (tmp_path / name).mkdir()
    (tmp_path / SHOWN).write_text(json.dumps({"cells": [prose, code], "metadata": {}}), encoding="utf-8")
    return tmp_path


def test_a_projected_lesson_unfolds_by_sections_and_shows_no_results(root: Path, tmp_path: Path) -> None:
    before = (root / SHOWN).read_bytes()
    stage(root, SETTINGS, tmp_path / "stage", root / SHOWN)
    cells = json.loads((tmp_path / "stage" / SHOWN).read_bytes())["cells"]
    assert [cell["source"] for cell in cells] == ["# Title", "## 1. One", "text", "### Question", "1"]
    folded = [cell["metadata"].get("jp-MarkdownHeadingCollapsed", False) for cell in cells]
    assert folded == [False, True, False, True, False]
    assert len({cell["id"] for cell in cells}) == 5
    assert cells[-1]["outputs"] == [] and cells[-1]["execution_count"] is None
    assert (root / SHOWN).read_bytes() == before


@pytest.mark.parametrize("file", sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ids=lambda file: file.stem)
def test_what_answers_a_prediction_waits_in_a_room_until_its_code_has_run(file: Path) -> None:
    cells = json.loads(file.read_bytes())["cells"]
    predictions = [number for number, cell in enumerate(cells) if "*Predict" in "".join(cell["source"])]
    for number in predictions:
        code = next(place for place, cell in enumerate(cells) if place > number and cell.get("outputs"))
        text = next(place for place in range(code, len(cells)) if cells[place]["cell_type"] == "markdown")
        (answer, *others) = projected(cells[text], cells[text - 1])
        assert answer["source"].endswith(AFTER_A_RUN) or answer["source"].startswith("##")
        assert not any(AFTER_A_RUN in other["source"] for other in others)
    assert predictions


def test_what_a_lesson_has_folded_is_in_sight_in_a_room_once_it_has_run_but_its_code_is_not() -> None:
    folds = {"outputs_hidden": True, "source_hidden": True}
    code = {"id": "a", "cell_type": "code", "metadata": {"jupyter": folds}, "source": "1", "outputs": ["seen"]}
    (shown,) = projected(code, None)
    assert shown["metadata"]["jupyter"] == {"outputs_hidden": False, "source_hidden": True}


def test_only_text_below_results_waits_for_them() -> None:
    text = {"id": "a", "cell_type": "markdown", "metadata": {}, "source": "So it is.\n## 2. Two\nNext"}
    for outputs, first in ((["seen"], f"So it is.\n\n\n{AFTER_A_RUN}"), ([], "So it is.")):
        code = {"id": "b", "cell_type": "code", "metadata": {}, "source": "1", "outputs": outputs}
        assert [part["source"] for part in projected(text, code)] == [first, "## 2. Two", "Next"]


def test_presenting_keeps_the_settings_of_the_lab_and_adds_its_own(root: Path, tmp_path: Path) -> None:
    options = stage(root, SETTINGS, tmp_path / "stage", root / SHOWN)
    assert "--LabApp.default_url=/doc/tree/notebooks/02_data_parallelism.ipynb" in options
    lab = tmp_path / "stage" / "lab"
    for file, source in {"lab/overrides.json": "overrides.json", "custom/lab.css": "custom/custom.css"}.items():
        assert (tmp_path / "stage" / file).read_bytes() == (SETTINGS / source).read_bytes()
    themes = json.loads((lab / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings").read_bytes())
    assert themes["overrides"]["content-font-size1"] == "28px"


def test_whoever_has_no_token_gets_nothing_but_styles(root: Path, tmp_path: Path) -> None:
    """The server gives everything below `static_custom_path` to everybody."""
    config = traitlets.config.Config()
    settings = SETTINGS / "jupyter_server_config.py"
    exec(settings.read_text(encoding="utf-8"), {"get_config": lambda: config, "__file__": str(settings)})
    options = stage(root, SETTINGS, tmp_path / "stage", root / SHOWN)
    (given,) = (option.partition("static_custom_path=")[2] for option in options if "static_custom_path" in option)
    for folder in (Path(config.ServerApp.tornado_settings["static_custom_path"]), Path(given)):
        assert {path.suffix for path in folder.rglob("*")} == {".css"}
