"""JupyterLab as course.py starts it, seen from the browser."""

from __future__ import annotations

import re
import sys
from typing import Any

from tests.browser.hands import MOVE

CELLS = (
    "import sys\nprint(sys.prefix)",
    "import ipywidgets\n"
    "slider, label = ipywidgets.IntSlider(3, description='ranks'), ipywidgets.Label()\n"
    "slider.observe(lambda change: setattr(label, 'value', f'now {change.new} ranks'), 'value')\n"
    "ipywidgets.VBox([slider, label])",
    "raise ValueError('no')",
)


def test_cells_run_in_our_environment_and_widgets_answer_the_keyboard(lab: Any) -> None:
    asked: list[str] = []
    lab.page.on("request", lambda request: asked.append(request.url))
    lab.write("notebooks/tiny.ipynb", *CELLS)
    notebook = lab.open("notebooks/tiny.ipynb", anew=True)
    nothing_asks_for_news_or_is_fetched_from_elsewhere(lab, asked)
    notebook.run_all()
    assert notebook.output(0).inner_text().strip() == sys.prefix
    assert len(notebook.errors) == 1 and "ValueError" in notebook.errors[0]
    notebook.page.get_by_role("slider").press("ArrowRight")
    notebook.page.get_by_text("now 4 ranks").wait_for(timeout=MOVE)


def nothing_asks_for_news_or_is_fetched_from_elsewhere(lab: Any, asked: list[str]) -> None:
    assert lab.page.get_by_text(re.compile("would you like to get notified|latest news", re.IGNORECASE)).count() == 0
    assert [url for url in asked if not url.startswith((lab.server.url, "data:", "blob:"))] == []
