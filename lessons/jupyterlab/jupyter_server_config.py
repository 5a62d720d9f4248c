"""What Jupyter's server does with a notebook before it is written to the disk, and after it is read.

The view of a widget ends with its kernel: opened again, it is nothing but "model not found". So it is put away where
the output has something that lasts, and the notebook shows next day what it shows before it is ever run. It is brought
back when the page is loaded again while that kernel still runs.

It lies in `.venv/etc/jupyter`, and `overrides.json` in `share/jupyter/lab/settings`, so that a plain `jupyter lab` of
this environment does the same. Of the folder beside it, with `custom.css`, the server gives everything to everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from tornado.web import HTTPError

VIEW = "application/vnd.jupyter.widget-view+json"
AWAY = "course-view"  # in the metadata of an output, where nobody shows it


def put_views_away(model: dict[str, Any], **_: Any) -> None:
    """Take the views of widgets out of a notebook's outputs, where there is a picture or text instead."""
    for output in outputs(model):
        data = output.get("data", {})
        if VIEW in data and set(data) - {VIEW, "text/plain"}:
            output["metadata"][AWAY] = data.pop(VIEW)


def bring_views_back(model: dict[str, Any], process: int | None) -> None:
    """process: the id of the notebook's kernel. A kernel that was started anew is another process."""
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
        """Of the kernel of the notebook there; None if there is none, or if it is not on this machine."""
        try:
            session = await self.parent.session_manager.get_session(path=path)
        except HTTPError:
            return None
        kernel = self.parent.kernel_manager.get_kernel(session["kernel"]["id"])
        return getattr(kernel.provisioner, "pid", None)


config = get_config()  # type: ignore[name-defined]  # noqa: F821
config.ServerApp.contents_manager_class = Contents
config.ContentsManager.pre_save_hook = put_views_away
config.ServerApp.tornado_settings = {"static_custom_path": str(Path(__file__).parent / "custom")}
config.LabApp.custom_css = True
