"""Time from letting go of a control to the new picture: JupyterLab in a browser, with or without ranks behind it.

Measured in the page, from the control's change event until the last new picture has been painted (two animation frames
after it arrived). With ranks, the step itself is paced, so a part of this time is emulated work that could not be
shorter. Without, it is calculated.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from course_lib.widgets.live import PAUSE
from tests.browser import conftest as jupyter

TARGET = 400  # milliseconds, median, with four real ranks
MODELLED_TARGET = 200  # and without
MOVES = (  # there and back, with the ranks left at four
    ("link speed", "ArrowRight"),
    ("overlap", " "),
    ("batch size", "ArrowRight"),
    ("link speed", "ArrowLeft"),
    ("overlap", " "),
    ("batch size", "ArrowLeft"),
)
LONG_PAUSE = PAUSE + 4  # seconds; the rest of the curve is measured by then
EXPLORER = "from course_lib.widgets.data_parallel import DataParallelExplorer\nDataParallelExplorer()"
MODELLED = {  # module, and moves to settings that were not shown before
    "one_machine": [("model", "ArrowRight"), ("device", "ArrowRight"), ("at a time", "ArrowRight")] * 2,
    "refresh": [("nodes", "ArrowRight"), ("network", "ArrowRight"), ("devices", "ArrowLeft"), ("nodes", "ArrowLeft")],
}
WATCH = """() => {  // pictures come one by one, and only those that changed; after a quiet moment all are there
    window.picture = new Promise((done, give_up) => {
        let moved, painted, last;
        const quiet = 150, patience = 20000;  // milliseconds
        document.addEventListener("change", () => { moved = performance.now(); }, {capture: true, once: true});
        const observer = new MutationObserver(() => requestAnimationFrame(() => requestAnimationFrame(() => {
            painted = performance.now();
            clearTimeout(last);
            last = setTimeout(() => { observer.disconnect(); done(painted - moved); }, quiet);
        })));
        for (const place of document.querySelectorAll(".widget-html-content"))
            observer.observe(place, {childList: true, subtree: true});
        setTimeout(() => give_up(new Error("no new picture came")), patience);
    });
}"""


def main() -> int:
    """Print the median of several moves: in a row, and with pauses in which the curve is measured."""
    browser = next(filter(None, map(jupyter.shutil.which, jupyter.ON_PATH)), None)
    if not browser:
        print("There is no Chromium, Chrome or Edge on this machine, so there is nothing to measure in.")
        return 0
    with sync_playwright() as playwright, served() as server:
        page = playwright.chromium.launch(executable_path=browser, args=jupyter.FLAGS).new_page()
        lab = jupyter.Lab(server, page, "benchmark")
        lab.write("notebooks/explorer.ipynb", EXPLORER)
        lab.open("notebooks/explorer.ipynb").run_all()
        page.get_by_role("slider", name="ranks").wait_for()
        print("From a move to the new picture, 4 real ranks, JupyterLab in a browser")
        print(f"{'moves':<24}{'number':>8}{'median':>12}{'slowest':>12}    target: median under {TARGET} ms")
        report("one after another", [time_of(page, *move) for move in MOVES * 2])
        report("after a pause each", [time_of(page, *move, pause=LONG_PAUSE) for move in MOVES])
        print(f"No ranks, everything modelled{'target: median under':>48} {MODELLED_TARGET} ms")
        for module, moves in MODELLED.items():
            page = open_explorer(lab, module)
            report(module, [time_of(page, *move, pause=0.5) for move in moves])
    return 0


def open_explorer(lab: jupyter.Lab, module: str) -> Page:
    lab.server.end_kernels()
    lab.write(f"notebooks/{module}.ipynb", f"from course_lib.widgets import {module} as module\nmodule.explorer()")
    lab.open(f"notebooks/{module}.ipynb").run_all()
    lab.page.get_by_role("slider").first.wait_for()
    return lab.page


@contextlib.contextmanager
def served() -> Iterator[jupyter.Server]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        base = Path(folder)
        (base / "course" / "notebooks").mkdir(parents=True)
        url = f"http://127.0.0.1:{jupyter.free_port()}"
        server = jupyter.Server(url, secrets.token_hex(16), base / "course")
        log = base / "log.txt"
        with open(log, "wb") as file:
            command, variables = jupyter.command(server), jupyter.surroundings(base, server.token)
            process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
            try:
                jupyter.wait_for(server, process, log)
                yield server
            finally:
                server.end_kernels()
                process.terminate()
                process.wait(20)


def time_of(page: Page, control: str, key: str, pause: float = 0.0) -> float:
    """Milliseconds from this move to its picture."""
    time.sleep(pause)
    page.evaluate(WATCH)
    moved = page.get_by_role("slider", name=control).or_(page.get_by_role("checkbox", name=control))
    moved.press(key)
    return page.evaluate("() => window.picture")


def report(name: str, times: list[float]) -> None:
    print(f"{name:<24}{len(times):>8}{statistics.median(times):>9.0f} ms{max(times):>9.0f} ms", flush=True)


if __name__ == "__main__":
    sys.exit(main())
