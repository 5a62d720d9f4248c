"""The hooks of Jupyter's server that change a notebook before it is written to disk, and after it is read.

The view of a widget ends with its kernel: opened again, it only says "model not found". So the view is removed if the
output has a picture or a text, and the next day the notebook shows those, as before it was first run. The view is
restored if the page is loaded again while that kernel still runs. A notebook that was only opened is saved as it was.

This file is copied to `.venv/etc/jupyter`, and `overrides.json` to `share/jupyter/lab/settings`, so that a plain
`jupyter lab` of this environment does the same. The server gives everything in the folder beside it, with `custom.css`,
to everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from tornado.web import HTTPError

VIEW = "application/vnd.jupyter.widget-view+json"
AWAY = "course-view"  # in the metadata of an output, which no page shows


def before_saving(model: dict[str, Any], **_: Any) -> None:
    put_views_away(model)
    leave_out_version(model)


def leave_out_version(model: dict[str, Any]) -> None:
    """Keep the name alone of what a kernel says of its language: opening a lesson leaves its file as it was."""
    metadata = model["content"]["metadata"] if model["type"] == "notebook" and model["content"] else {}
    if "language_info" in metadata:
        metadata["language_info"] = {"name": metadata["language_info"]["name"]}


def put_views_away(model: dict[str, Any]) -> None:
    """Move the views of widgets out of a notebook's outputs that have a picture or text instead."""
    for output in outputs(model):
        data = output.get("data", {})
        if VIEW in data and set(data) - {VIEW, "text/plain"}:
            output["metadata"][AWAY] = data.pop(VIEW)


def bring_views_back(model: dict[str, Any], process: int | None) -> None:
    """Restore the views of widgets that belong to a running kernel. process: the kernel's process id."""
    for output in outputs(model):
        view = output.get("metadata", {}).pop(AWAY, {})
        if process and view.get("process") == process:
            output["data"][VIEW] = view


def outputs(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if model["type"] == "notebook" and model["content"]:
        for cell in model["content"]["cells"]:
            yield from cell.get("outputs", [])


class Contents(AsyncLargeFileManager):
    async def get(self, path: str, *words: Any, **options: Any) -> dict[str, Any]:
        model: dict[str, Any] = await super().get(path, *words, **options)
        bring_views_back(model, await self._process(path.strip("/")) if model["type"] == "notebook" else None)
        return model

    async def _process(self, path: str) -> int | None:
        """The process of a notebook's kernel; None if there is no kernel, or it runs on another machine."""
        try:
            session = await self.parent.session_manager.get_session(path=path)
        except HTTPError:
            return None
        kernel = self.parent.kernel_manager.get_kernel(session["kernel"]["id"])
        return getattr(kernel.provisioner, "pid", None)


config = get_config()  # type: ignore[name-defined]  # noqa: F821
config.ServerApp.contents_manager_class = Contents
config.ContentsManager.pre_save_hook = before_saving
config.ServerApp.tornado_settings = {"static_custom_path": str(Path(__file__).parent / "custom")}
config.LabApp.custom_css = True
