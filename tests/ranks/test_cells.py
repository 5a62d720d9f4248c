"""%%ranks in a notebook: a cell on every rank, with variables that stay."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from course_lib import Deadlock, RankFailed, RankTimeout
from course_lib.ranks import discard_all


class Notebook:
    """A notebook that runs cells and remembers the end of the last one."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.shell = InteractiveShell()
        self.capsys = capsys
        self.run("%load_ext course_lib")

    def run(self, cell: str) -> list[str]:
        """The output of a cell that must not fail, line by line and in order of ranks."""
        result = self.shell.run_cell(cell, store_history=True)
        result.raise_error()
        return sorted(self.capsys.readouterr().out.splitlines())

    def fails(self, cell: str) -> Any:
        """The error that the cell ends in."""
        result = self.shell.run_cell(cell, store_history=True)
        self.capsys.readouterr()
        return result.error_in_exec

    def __getitem__(self, name: str) -> Any:
        return self.shell.user_ns[name]


@pytest.fixture
def notebook(capsys: pytest.CaptureFixture[str]) -> Iterator[Notebook]:
    discard_all()
    yield Notebook(capsys)
    InteractiveShell.clear_instance()


def test_a_cell_runs_on_every_rank_with_the_basics_defined(notebook: Notebook) -> None:
    shown = notebook.run("%%ranks 3\nt = torch.tensor(rank)\ndist.all_reduce(t)\nprint(rank, world_size, int(t))")
    assert shown == ["rank 0 | 0 3 3", "rank 1 | 1 3 3", "rank 2 | 2 3 3"]


def test_variables_functions_and_imports_stay_for_the_next_cell(notebook: Notebook) -> None:
    notebook.run("%%ranks 2\nimport math\nmine = 10 * rank\ndef double():\n    return 2 * mine")
    notebook.run("%%ranks 2\nmine += 1")
    assert notebook.run("%%ranks 2\nprint(mine, double(), math.floor(1.5))") == ["rank 0 | 1 2 1", "rank 1 | 11 22 1"]


def test_the_value_of_a_last_expression_is_shown(notebook: Notebook) -> None:
    assert notebook.run("%%ranks 2\nrank + 1") == ["rank 0 | 1", "rank 1 | 2"]
    assert notebook.run("%%ranks 2\nNone") == []
    assert notebook.run("%%ranks 2\nx = 1") == []


def test_another_number_of_ranks_begins_anew_and_says_so(notebook: Notebook) -> None:
    notebook.run("%%ranks 2\nmine = rank")
    shown = notebook.run("%%ranks 3\n'mine' in globals()")
    assert shown[-1] == "rank 2 | False"
    assert any("3 new ranks" in line for line in shown)


def test_the_notebook_keeps_its_own_variables(notebook: Notebook) -> None:
    notebook.run("mine, rank = 'notebook', 7")
    notebook.run("%%ranks 2\nmine = rank")
    assert (notebook["mine"], notebook["rank"]) == ("notebook", 7)


def test_a_launch_between_two_cells_leaves_their_variables_alone(notebook: Notebook) -> None:
    notebook.run("%%ranks 2\nmine = rank")
    notebook.run("from course_lib import launch\nlaunch(lambda rank: rank, 3)")
    assert notebook.run("%%ranks 2\nmine") == ["rank 0 | 0", "rank 1 | 1"]


def test_an_error_names_the_rank_and_the_line_of_the_cell(notebook: Notebook) -> None:
    error = notebook.fails("%%ranks 2\nx = 1\nif rank == 1:\n    raise ValueError('too much')")
    assert isinstance(error, RankFailed)
    assert error.rank == 1
    first = str(error).splitlines()[0]
    assert "raised ValueError: too much (cell In[2], line 4: raise ValueError('too much'))" in first


def test_a_slip_in_the_syntax_is_shown_at_its_line_and_nothing_is_run(notebook: Notebook) -> None:
    notebook.run("%%ranks 2\nmine = rank")
    error = notebook.fails("%%ranks 2\nmine = 7\nprint(rank")
    assert (type(error), error.filename, error.lineno) == (SyntaxError, "cell In[3]", 3)
    assert notebook.run("%%ranks 2\nmine") == ["rank 0 | 0", "rank 1 | 1"]


@pytest.mark.parametrize("number", ["", " two", " 2.5"])
def test_a_cell_without_a_number_of_ranks_says_where_it_belongs(notebook: Notebook, number: str) -> None:
    assert "%%ranks 4" in str(notebook.fails(f"%%ranks{number}\nrank"))


def test_a_variable_of_the_notebook_is_explained(notebook: Notebook) -> None:
    notebook.run("batch = [1, 2]")
    assert "'batch' is a variable of the notebook" in str(notebook.fails("%%ranks 2\nprint(batch)"))
    assert "is a variable of the notebook" not in str(notebook.fails("%%ranks 2\nprint(nowhere)"))


def test_a_deadlock_ends_and_the_next_cell_says_that_variables_are_gone(notebook: Notebook) -> None:
    notebook.run("%%ranks 2\nmine = rank")
    error = notebook.fails("%%ranks 2\ndist.recv(torch.zeros(1), 1 - rank)")
    assert isinstance(error, Deadlock)
    assert "0 waits to receive from 1, 1 waits to receive from 0" in str(error).splitlines()[0]
    assert "run those cells again" in str(error)
    assert notebook.run("%%ranks 2\n'mine' in globals()") == ["rank 0 | False", "rank 1 | False"]


def test_ranks_that_are_spawned_before_the_next_cell_know_nothing_either(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are forked here instead of spawned; test_launch shows that they can be spawned."""
    forks = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks)
    monkeypatch.setenv("COURSE_LIB_START_METHOD", "spawn")
    notebook.run("%%ranks 1\nmine = rank")
    assert "run those cells again" in str(notebook.fails("%%ranks 1\nimport os\nos._exit(1)"))
    waiting = {process.pid for process in multiprocessing.active_children()}
    (shown,) = notebook.run("%%ranks 1\nimport os\nprint('mine' in globals(), os.getpid())")
    assert {int(shown.removeprefix("rank 0 | False "))} == waiting
    discard_all()


def test_an_endless_cell_ends_at_its_time_limit(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("course_lib.ranks.parent.magic._TIMEOUT", 0.5)
    error = notebook.fails("%%ranks 2\nwhile True:\n    pass")
    assert isinstance(error, RankTimeout)
    assert "after 0.5 s" in str(error).splitlines()[0]


def outputs_of(cells: list[str]) -> list[dict[str, str]]:
    """The output of the last of these cells in a real kernel."""
    from jupyter_client.manager import start_new_kernel

    shown: list[dict[str, str]] = []
    manager, client = start_new_kernel()
    try:
        for cell in cells:
            shown.clear()
            client.execute_interactive(cell, timeout=60, output_hook=lambda m: shown.append(m["content"].get("data")))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return [data for data in shown if data]


def test_a_notebook_shows_each_rank_in_a_fold_and_rank_0_open() -> None:
    shown = outputs_of(["%load_ext course_lib", "%%ranks 2\nprint('<b>', rank)"])
    html, plain = shown[-1]["text/html"], shown[-1]["text/plain"]
    assert plain == "rank 0 | <b> 0\nrank 1 | <b> 1"
    assert "<details open><summary>rank 0</summary><pre>&lt;b&gt; 0</pre></details>" in html
    assert "<details><summary>rank 1</summary><pre>&lt;b&gt; 1</pre></details>" in html
