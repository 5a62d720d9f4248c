"""Time from releasing a control to the new picture: JupyterLab in a browser, with or without ranks behind it.

Measured in the page, from the control's change event until the last new picture has been painted (two animation frames
after it arrived). Each explorer with real ranks is moved from its opening setting and from its largest one, always to a
setting that it has not shown yet. (Those that train for hundreds of steps at every move are left out.) One that
prepares the settings around is moved twice: at once, and after a look at the picture.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser import conftest as jupyter

OPENING, LARGEST, MODELLED_TARGET = 150, 300, 200  # milliseconds, medians
PAUSE = 0.3  # seconds between moves: less than the pause after which an explorer makes further views
READ = 6.0  # seconds between moves of one who looks at a picture before making the next
RIGHT, LEFT = "ArrowRight", "ArrowLeft"


class Explorer(NamedTuple):
    """An explorer to measure. largest: its largest setting.  moves: from there, and by default from the opening one.

    prepares: whether it runs the settings around while one looks.
    """

    make: str
    largest: str
    moves: list[tuple[str, str]]
    from_opening: list[tuple[str, str]] | None = None
    prepares: bool = False


STAGES_AND_OVERHEADS = [("stages", RIGHT), ("overhead", RIGHT), ("stages", RIGHT), ("overhead", LEFT)]
RANKS = {
    "L02_data_parallelism.explorer": Explorer(
        "DataParallelExplorer", "8, 64, 2", [("overlap", LEFT), ("link speed", RIGHT), ("overlap", RIGHT)]
    ),
    "L05_pipeline_parallelism.explorer": Explorer(
        "PipelineExplorer", "8, 16", [("schedule", RIGHT)] * 3 + [("cut", RIGHT)] * 2
    ),
    "L05_pipeline_parallelism.explorer_micro_batches": Explorer(
        "MicroBatchExplorer", "1, 8, 0.016", [("overhead", LEFT)] * 3, STAGES_AND_OVERHEADS
    ),
    "L04_layerwise_model_parallelism.explorer": Explorer(
        "LayerWiseExplorer", "8, 64, 4000", [("units", LEFT), ("cut", RIGHT), ("units", RIGHT)]
    ),
    "L06_tensor_parallelism.explorer": Explorer(
        "TensorParallelExplorer", "8, 128", [("cut", RIGHT)] * 3 + [("sequence", RIGHT)]
    ),
    "L08_combining_mechanisms.explorer": Explorer(
        "MeshExplorer", "(1, 4, 2), 8, 'gpipe'", [("precision", RIGHT), ("schedule", RIGHT)], prepares=True
    ),
}
MODELLED = {  # module: (function, moves to settings not shown before)
    ("L01_one_machine_is_not_enough.explorer", "memory_explorer"): [
        ("model", RIGHT),
        ("device", RIGHT),
        ("at a time", RIGHT),
    ]
    * 2,
    ("L09_planning.explorer", "refresh_explorer"): [
        ("nodes", RIGHT),
        ("network", RIGHT),
        ("devices", LEFT),
        ("nodes", LEFT),
    ],
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
    """Print the median time of several moves: in a row, and with pauses in which the curve is measured."""
    browser = next(filter(None, map(jupyter.shutil.which, jupyter.ON_PATH)), None)
    if not browser:
        print("There is no Chromium, Chrome or Edge on this machine, so there is nothing to measure in.")
        return 0
    with sync_playwright() as playwright, served() as server:
        page = playwright.chromium.launch(executable_path=browser, args=jupyter.FLAGS).new_page()
        lab = jupyter.Lab(server, page, "benchmark")
        print("From a move to the new picture, JupyterLab in a browser")
        print(f"{'explorer':<55}{'moves':>8}{'median':>12}{'slowest':>12}{'target':>12}")
        for module, explorer in RANKS.items():
            for pause, when in {PAUSE: "", **({READ: ", after a look"} if explorer.prepares else {})}.items():
                page = open_explorer(lab, module, f"{explorer.make}()")
                moves = explorer.from_opening or explorer.moves
                report(f"{module}, opening{when}", [time_of(page, *move, pause) for move in moves], OPENING)
                page = open_explorer(lab, module, f"{explorer.make}({explorer.largest})")
                report(f"{module}, largest{when}", [time_of(page, *move, pause) for move in explorer.moves], LARGEST)
        for (module, make), moves in MODELLED.items():
            page = open_explorer(lab, module, f"{make}()")
            report(f"{module}, no ranks", [time_of(page, *move) for move in moves], MODELLED_TARGET)
    return 0


def open_explorer(lab: jupyter.Lab, module: str, make: str) -> Page:
    lab.server.end_kernels()
    lab.write("notebooks/explorer.ipynb", f"import lessons.{module} as module\nmodule.{make}")
    lab.open("notebooks/explorer.ipynb", anew=True).run_all()
    lab.page.get_by_role("slider").first.wait_for()
    return lab.page


@contextlib.contextmanager
def served() -> Iterator[jupyter.Server]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        folder = Path(base) / "course"
        (folder / "notebooks").mkdir(parents=True)
        with jupyter.running(Path(base), folder, [f"--ServerApp.root_dir={folder}"]) as server:
            yield server


def time_of(page: Page, control: str, key: str, pause: float = PAUSE) -> float:
    """Milliseconds from a move to its picture."""
    time.sleep(pause)
    page.evaluate(WATCH)
    page.get_by_role("slider", name=control).press(key)
    return page.evaluate("() => window.picture")


def report(name: str, times: list[float], target: int) -> None:
    median, slowest = statistics.median(times), max(times)
    print(f"{name:<55}{len(times):>8}{median:>9.0f} ms{slowest:>9.0f} ms{target:>9} ms", flush=True)


if __name__ == "__main__":
    sys.exit(main())
