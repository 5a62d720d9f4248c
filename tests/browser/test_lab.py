"""JupyterLab as course.py starts it, seen from the browser."""

from __future__ import annotations

import re
import sys
from typing import Any


def test_run_all_shows_what_the_cells_print(lab: Any) -> None:
    lab.write("notebooks/tiny.ipynb", "answer = 6 * 7", "print(f'the answer is {answer}')", "raise ValueError('no')")
    notebook = lab.open("notebooks/tiny.ipynb")
    notebook.run_all()
    assert notebook.output(1).inner_text().strip() == "the answer is 42"
    assert len(notebook.errors) == 1 and "ValueError" in notebook.errors[0]


def test_a_widget_answers_the_keyboard(lab: Any) -> None:
    lab.write(
        "notebooks/slider.ipynb",
        "import ipywidgets\n"
        "slider, label = ipywidgets.IntSlider(3, description='ranks'), ipywidgets.Label()\n"
        "slider.observe(lambda change: setattr(label, 'value', f'now {change.new} ranks'), 'value')\n"
        "ipywidgets.VBox([slider, label])",
    )
    notebook = lab.open("notebooks/slider.ipynb")
    notebook.run_all()
    notebook.page.get_by_role("slider").press("ArrowRight")
    notebook.page.get_by_text("now 4 ranks").wait_for(timeout=10_000)


def test_the_kernel_is_the_one_that_runs_the_tests(lab: Any) -> None:
    lab.write("notebooks/where.ipynb", "import sys; print(sys.prefix)")
    notebook = lab.open("notebooks/where.ipynb")
    notebook.run_all()
    assert notebook.output(0).inner_text().strip() == sys.prefix


def test_nothing_asks_for_news_or_is_fetched_from_elsewhere(lab: Any) -> None:
    asked: list[str] = []
    lab.page.on("request", lambda request: asked.append(request.url))
    lab.write("notebooks/quiet.ipynb", "1")
    lab.open("notebooks/quiet.ipynb")
    assert lab.page.get_by_text(re.compile("would you like to get notified|latest news", re.IGNORECASE)).count() == 0
    assert [url for url in asked if not url.startswith((lab.server.url, "data:", "blob:"))] == []
