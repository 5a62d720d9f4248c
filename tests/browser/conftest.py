"""A real JupyterLab in a real browser, for tests that do what a student does.

    def test_the_slider_moves_the_chart(lab):
        notebook = lab.open("notebooks/02_data_parallelism.ipynb")
        notebook.run_all()
        notebook.page.get_by_role("slider").press("ArrowRight")

The server works on a copy of the notebooks, keeps its settings apart from the user's, and the page
reaches nothing but the server. A failing test leaves a picture in .course/screenshots.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from playwright.sync_api import BrowserContext, Page, ViewportSize, expect, sync_playwright

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "lessons" / "jupyterlab"
SCREENSHOTS = ROOT / ".course" / "screenshots"
ON_PATH = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
INSTALLED = {
    "Darwin": (
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    ),
    "Windows": (
        r"C:\Program Files\Google\Chrome\Application\chrome.exe",
        r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
    ),
}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]
SCREEN: ViewportSize = {"width": 1280, "height": 800}
COMMAND = [
    *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port=0",  # the server picks a free port when it begins to listen
    "--LabApp.expose_app_in_browser=True",
]
PATIENCE = 90_000  # milliseconds for JupyterLab and a kernel to come up on two busy cores
expect.set_options(timeout=30_000)  # by default: a kernel may have to answer


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser. Without one the tests are skipped, but not in continuous integration."""
    candidates = [shutil.which(name) for name in ON_PATH]
    candidates += [path for path in INSTALLED.get(platform.system(), ()) if Path(path).exists()]
    for path in candidates:
        if path:
            return path
    reason = "there is no Chromium, Chrome or Edge on this machine to test with"
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"CI is set, and {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[BrowserContext]:
    """One browser for all tests, so that JupyterLab's files are fetched only once."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started.new_context(viewport=SCREEN, color_scheme="light")
        started.close()


@dataclass(frozen=True)
class Server:
    """A running JupyterLab. folder: the copy that it shows."""

    url: str
    token: str
    folder: Path

    @property
    def answers(self) -> Path:
        """The file of the students' answers."""
        return self.folder.parent / "answers"

    def call(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE / 1000) as answer:
            return json.loads(answer.read() or b"null")

    def end_kernels(self) -> None:
        for session in self.call("GET", "sessions"):
            self.call("DELETE", f"sessions/{session['id']}")

    def begin_to_end_kernels(self) -> None:
        """Begin to end all kernels; the next test does not wait until they and their ranks are gone."""
        for session in self.call("GET", "sessions"):
            threading.Thread(target=self._end, args=(session["id"],)).start()

    def _end(self, session: str) -> None:
        with contextlib.suppress(OSError):  # what takes too long ends with the server
            self.call("DELETE", f"sessions/{session}")


@pytest.fixture(scope="session")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("jupyter")
    for name in ("notebooks", "exercises", "solutions"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, base / "course" / name)
    (base / "course" / "notebooks").mkdir(parents=True, exist_ok=True)
    prefer(base / "settings")
    folder = base / "course"
    with running(base, folder, [f"--ServerApp.root_dir={folder}", f"--LabApp.app_settings_dir={SETTINGS}"]) as started:
        yield started


@contextlib.contextmanager
def running(base: Path, folder: Path, options: list[str], **variables: str) -> Iterator[Server]:
    """A JupyterLab with these options, which show this folder; its own files lie in `base`.

    variables: of its kernels' environment.
    """
    token = secrets.token_hex(16)
    own = {**surroundings(base, token), **variables}
    with open(base / "log.txt", "wb") as log:
        process = subprocess.Popen([*COMMAND, *options], env=own, stdout=log, stderr=log)
        try:
            started = Server(address(base, process), token, folder)
            yield started
            with contextlib.suppress(OSError):  # what takes too long ends with the server
                started.end_kernels()
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def prefer(settings: Path) -> None:
    """JupyterLab's settings: follow the browser's theme, and save nothing by itself."""
    own = {
        "apputils-extension/themes": '{"adaptive-theme": true}',
        "docmanager-extension/plugin": '{"autosave": false}',
    }
    for name, text in own.items():
        file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")


def surroundings(base: Path, token: str) -> dict[str, str]:
    """Environment variables that hide the user's own settings, and use ours, which an installation puts into .venv."""
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
        "COURSE_STATE": "answers",
    }
    ours = {name: str(base / place) for name, place in places.items()}
    return {**os.environ, **ours, "COURSE_POLL": "", "JUPYTER_TOKEN": token, "JUPYTER_CONFIG_PATH": str(SETTINGS)}


def address(base: Path, process: subprocess.Popen[bytes]) -> str:
    """The server's address, from the file that it writes when it listens."""
    file = base / "runtime" / f"jpserver-{process.pid}.json"
    deadline = time.monotonic() + PATIENCE / 1000
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not yet written, or only in part
            return f"http://127.0.0.1:{json.loads(file.read_text(encoding='utf-8'))['port']}"
        time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start:\n{(base / 'log.txt').read_text(errors='replace')[-2000:]}")


@dataclass(frozen=True)
class Notebook:
    """A notebook open in the browser, its kernel ready."""

    page: Page

    def choose(self, menu: str, entry: str) -> None:
        self.page.get_by_role("menuitem", name=menu, exact=True).click()
        self.page.get_by_role("menuitem", name=entry, exact=True).click()

    def clear(self) -> None:
        """Clear the stored outputs and the numbers of all cells."""
        self.choose("Edit", "Clear Outputs of All Cells")
        self.page.wait_for_function(f"() => {PROMPTS}.every(text => text === '[ ]:')")

    def run_all(self, timeout: float = 180) -> None:
        """Clear stored outputs, run every cell, wait until all are done. timeout in seconds."""
        self.clear()
        self._run("await run('notebook:run-all-cells');", timeout)

    def run_cells(self, words: str, timeout: float = 180) -> None:
        """Clear the stored outputs, run the cells with these words (a regular expression), and wait for their end."""
        self.clear()
        cells = f"""
            const {{ content }} = jupyterapp.shell.currentWidget;
            for (const [place, cell] of content.widgets.entries()) {{
                if (cell.model.type !== "code" || !cell.model.sharedModel.source.match({json.dumps(words)})) continue;
                content.activeCellIndex = place;
                content.deselectAll();
                await run("notebook:run-cell");
            }}"""
        self._run(cells, timeout)

    def _run(self, script: str, timeout: float) -> None:
        """Run a script in the page, until JupyterLab reports its end, after the last answer of the kernel."""
        run = "const run = id => jupyterapp.commands.execute(id).catch(() => {});"
        self.page.evaluate(f"() => {{ isDone = false; (async () => {{ {run} {script} isDone = true; }})(); }}")
        self.page.wait_for_function("() => isDone", timeout=timeout * 1000)
        self.wait_until_idle(timeout)

    def save(self) -> None:
        """Save the notebook, and wait until it is written."""
        self.page.locator(".jp-NotebookPanel-toolbar [data-jp-item-name=save]").click()
        self.page.locator(".lm-DockPanel-tabBar .lm-mod-current:not(.jp-mod-dirty)").wait_for()

    def restart(self) -> None:
        """Restart the kernel, and wait until it is ready."""
        self.page.evaluate(
            """() => {
                isDone = false;
                let hasEnded = false;
                jupyterapp.shell.currentWidget.sessionContext.statusChanged.connect((_, status) => {
                    hasEnded ||= status === "restarting";
                    isDone ||= hasEnded && status === "idle";
                });
            }"""
        )
        self.page.locator(".jp-NotebookPanel-toolbar [data-jp-item-name=restart]").click()
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.wait_for_function("() => isDone", timeout=PATIENCE)
        self.wait_until_idle()

    def wait_until_idle(self, timeout: float = PATIENCE / 1000) -> None:
        """Wait for the status bar, as the page calls a kernel idle before there is one. timeout in seconds."""
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(timeout=timeout * 1000)

    def output(self, cell: int) -> Any:
        """The output of a cell, by its number among all cells, as a Playwright locator."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-OutputArea-output")

    @property
    def errors(self) -> list[str]:
        """The text of every error shown in the notebook."""
        printed = self.page.locator(".jp-Notebook [data-mime-type='application/vnd.jupyter.stderr']")
        return printed.filter(has_text="Traceback (most recent call last)").all_inner_texts()


PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].map(prompt => prompt.textContent)"


@dataclass(frozen=True)
class Lab:
    """JupyterLab as one test sees it: with nothing open, and nothing answered. name: of the test."""

    server: Server
    page: Page
    name: str

    def open(self, path: str, anew: bool = False) -> Notebook:
        """Open a notebook, by its path in the project, and wait for its kernel.

        anew: load the page, though it shows JupyterLab already. That takes longer than anything else here.
        """
        if anew or not self.page.url.startswith(self.server.url):
            where = f"{self.server.url}/lab/workspaces/{self.name}/tree/{path}"
            self.page.goto(f"{where}?reset&token={self.server.token}", timeout=PATIENCE)
        else:
            self.page.evaluate("async path => { await jupyterapp.commands.execute('docmanager:open', { path }) }", path)
        notebook = Notebook(self.page)
        notebook.wait_until_idle()
        return notebook

    def close(self) -> None:
        """Close the open notebook without saving it."""
        self.page.evaluate("[...jupyterapp.shell.widgets('main')].forEach(tab => tab.dispose())")
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for(state="hidden")

    def write(self, path: str, *cells: str) -> None:
        """Add a notebook of these code cells to the server's folder."""
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        made.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
        nbformat.write(made, self.server.folder / path)


@pytest.fixture
def lab(server: Server, page: Page, request: pytest.FixtureRequest) -> Iterator[Lab]:
    shutil.rmtree(server.answers, ignore_errors=True)
    opened = Lab(server, page, name_of(request))
    yield opened
    if not has_failed(request):
        opened.close()
    server.begin_to_end_kernels()


@pytest.fixture
def page(browser: BrowserContext, request: pytest.FixtureRequest) -> Iterator[Page]:
    """One page for all tests until a test fails, so that JupyterLab is loaded only once."""
    page = browser.pages[0] if browser.pages else browser.new_page()
    page.set_viewport_size(SCREEN)
    with photographed_if_it_fails(page, request):
        yield page
    if has_failed(request):
        page.close()


@contextlib.contextmanager
def photographed_if_it_fails(page: Page, request: pytest.FixtureRequest) -> Iterator[Page]:
    yield page
    if has_failed(request):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name_of(request)}.png", full_page=True)


def has_failed(request: pytest.FixtureRequest) -> bool:
    return request.node.stash.get(FAILED, False)


def name_of(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name).strip("-")


FAILED: pytest.StashKey[bool] = pytest.StashKey()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the test that needs a fresh JupyterLab to the front, so that no other loads it before."""
    items.sort(key=lambda item: item.path.name != "test_lab.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report
