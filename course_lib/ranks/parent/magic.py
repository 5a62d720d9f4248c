"""The cell magic %%ranks: runs a cell on every rank, and keeps its variables."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from course_lib.ranks import errors
from course_lib.ranks.parent import pool
from course_lib.ranks.parent.run import check_arguments, run_on
from course_lib.ranks.worker.cells import remember_source, run_cell

_PURPOSE = "cells"
_GONE = "The ranks begin anew with the next %%ranks cell: variables of earlier ones are gone, so run those cells again."


@magics_class
class RanksMagic(Magics):
    """The magic %%ranks."""

    held = False  # whether the ranks hold variables of earlier cells

    @magic_arguments()
    @argument("world_size", type=int, help="how many ranks")
    @argument("--timeout", type=float, default=60.0, help="seconds after which the cell is ended")
    @argument("--run", metavar="NAME", help="keep the Run, with its timeline, in this variable of the notebook")
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on every rank, with rank, world_size, dist and torch defined.

        Its variables stay on the ranks for the next %%ranks cell with the same number of ranks.
        """
        assert self.shell is not None
        options = parse_argstring(self.ranks, line)
        check_arguments(run_cell, options.world_size, (), options.timeout, None, "cpu")
        source = f"#%%ranks {line}\n{cell}"  # the same line numbers as in the notebook
        filename = f"cell In[{self.shell.execution_count}]"
        remember_source(filename, source)
        if self.held and pool.last_world_size(_PURPOSE) != options.world_size:
            print(f"These are {options.world_size} new ranks: variables of earlier %%ranks cells are gone.")
        arguments = (source, filename)
        try:
            run = run_on(_PURPOSE, run_cell, options.world_size, arguments, options.timeout, None, uses_gpu=False)
        except errors.RunError as error:
            error.details += _advice(error, self.shell.user_ns)
            if self.held and pool.last_world_size(_PURPOSE) is None:
                error.details += f"\n{_GONE}"
            raise
        finally:
            self.held = pool.last_world_size(_PURPOSE) is not None
        if options.run:
            self.shell.user_ns[options.run] = run


def _advice(error: errors.RunError, notebook: dict[str, Any]) -> str:
    """Advice about the usual surprise: a rank does not see the notebook's variables."""
    undefined = re.search(r"NameError: name '(\w+)' is not defined", error.message)
    if not undefined or undefined[1] not in notebook:
        return ""
    return f"\n{undefined[1]!r} is a variable of the notebook. Ranks have their own: define it in a %%ranks cell."
