"""Jupyter's server keeps the view of a widget while its kernel runs, and the lasting outputs in the file."""

from __future__ import annotations

import copy
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter
from traitlets.config import Config

from course_lib import Span, Timeline
from course_lib.classroom.widgets import play
from lessons import Card

SETTINGS = Path(__file__).parents[1] / "lessons" / "jupyterlab" / "jupyter_server_config.py"
EXPORT = SETTINGS.with_name("jupyter_config.py")
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def server() -> SimpleNamespace:
    """The definitions in the settings file, with its settings in `config`."""
    config = SimpleNamespace(**{name: SimpleNamespace() for name in ("ServerApp", "LabApp", "ContentsManager")})
    return SimpleNamespace(**runpy.run_path(str(SETTINGS), {"get_config": lambda: config}))


def notebook(data: dict[str, Any]) -> dict[str, Any]:
    output = {"output_type": "display_data", "data": data, "metadata": {}}
    content = {"metadata": {}, "cells": [{"outputs": [output]}, {"source": "text"}]}
    return {"type": "notebook", "content": content}


def shown(model: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = model["content"]["cells"][0]["outputs"][0]["data"]
    return data


def bundles() -> dict[str, dict[str, Any]]:
    player, _ = play(Timeline([Span(0, "forward", "", 0.0, 1.0)], 1, "modelled"))._repr_mimebundle_()
    return {"card": Card("Q4")._repr_mimebundle_(), "player": player}


@pytest.mark.parametrize("kind", bundles())
def test_the_file_has_what_lasts_and_the_page_has_the_view_while_its_process_runs(
    server: SimpleNamespace, kind: str
) -> None:
    data = bundles()[kind]
    saved = notebook(copy.deepcopy(data))
    server.config.ContentsManager.pre_save_hook(saved)
    assert shown(saved) == {name: value for name, value in data.items() if name != VIEW}
    for process, is_live in ((os.getpid(), True), (os.getpid() + 1, False), (None, False)):
        opened = copy.deepcopy(saved)
        server.bring_views_back(opened, process)
        assert (VIEW in shown(opened)) is is_live
        assert opened["content"]["cells"][0]["outputs"][0]["metadata"] == {}
        assert not is_live or shown(opened) == data


def test_a_notebook_that_was_only_opened_is_saved_as_it_was(server: SimpleNamespace) -> None:
    model = notebook({"text/plain": "4"})
    before = copy.deepcopy(model["content"]) | {"metadata": {"language_info": {"name": "python"}}}
    model["content"]["metadata"]["language_info"] = {"name": "python", "version": "3.13.1"}  # as the kernel says
    server.config.ContentsManager.pre_save_hook(model)
    assert model["content"] == before


def test_a_view_that_is_all_there_is_stays_and_other_files_are_left_alone(server: SimpleNamespace) -> None:
    for model in (notebook({VIEW: {"model_id": "a"}, "text/plain": "Box()"}), {"type": "file", "content": "text"}):
        before = copy.deepcopy(model)
        server.config.ContentsManager.pre_save_hook(model)
        server.bring_views_back(model, os.getpid())
        assert model == before


def test_an_exported_page_has_stored_pictures_and_formulas_without_the_network() -> None:
    config, made = Config(), nbformat.v4
    runpy.run_path(str(EXPORT), {"get_config": lambda: config})
    text = "All $x^2$ and $$y_1$$, but not `$HOME`, `$PATH`."
    output = made.new_output("display_data", bundles()["player"])
    page = made.new_notebook(cells=[made.new_markdown_cell(text), made.new_code_cell(outputs=[output])])
    html, _ = HTMLExporter(config=config).from_notebook_node(page)
    assert all(part in html for part in ("<msup>", 'display="block"', "$HOME", "$PATH", "data:image/svg+xml"))
    assert "x^2$" not in html and VIEW not in html
