"""What Jupyter's server does with a notebook before it is written to the disk.

The view of a widget ends with its kernel: opened again, it is nothing but "model not found". So it is not kept where
the output has something that lasts, and the notebook shows next day what it shows before it is ever run.

It lies in `.venv/etc/jupyter`, with `overrides.json` in `share/jupyter/lab/settings`, so that a plain `jupyter lab` of
this environment does the same.
"""

from __future__ import annotations

from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"


def keep_what_lasts(model: dict[str, Any], **_: Any) -> None:
    """Take the views of widgets out of a notebook's outputs, where there is a picture or text instead."""
    if model["type"] != "notebook":
        return
    for cell in model["content"]["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if set(data) - {VIEW, "text/plain"}:
                data.pop(VIEW, None)


get_config().ContentsManager.pre_save_hook = keep_what_lasts  # type: ignore[name-defined]  # noqa: F821
