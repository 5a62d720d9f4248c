"""The cell magic %%ranks: runs a cell on every rank, and keeps its variables."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.magic import Magics, cell_magic, magics_class

from course_lib.ranks import errors
from course_lib.ranks.parent import pool
from course_lib.ranks.parent.run import check_arguments, run_on
from course_lib.ranks.worker.cells import remember_source, run_cell

_PURPOSE = "cells"
_TIMEOUT = 60.0  # seconds after which a cell is ended
_GONE = "The ranks begin anew with the next %%ranks cell: variables of earlier ones are gone, so run those cells again."


@magics_class
class RanksMagic(Magics):
    """The magic %%ranks."""

    held = False  # whether the ranks hold variables of earlier cells

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on every rank, with rank, world_size, dist and torch defined.

        Its variables stay on the ranks for the next %%ranks cell with the same number of ranks.
        """
        assert self.shell is not None
        if not line.strip().isdigit():
            raise ValueError("write the number of ranks behind it, as in %%ranks 4")
        world_size = int(line)
        check_arguments(run_cell, world_size, (), _TIMEOUT, None, "cpu")
        source = f"#%%ranks {line}\n{cell}"  # the same line numbers as in the notebook
        filename = f"cell In[{len(self.shell.user_ns['In']) - 1}]"
        remember_source(filename, source)
        compile(source, filename, "exec")  # so that a slip in the syntax is shown here, where it is
        if self.held and pool.last_world_size(_PURPOSE) != world_size:
            print(f"These are {world_size} new ranks: variables of earlier %%ranks cells are gone.")
        try:
            run_on(_PURPOSE, run_cell, world_size, (source, filename), _TIMEOUT, None, uses_gpu=False)
        except errors.RunError as error:
            error.details += _advice(error, self.shell.user_ns)
            if self.held and pool.last_world_size(_PURPOSE) is None:
                error.details += f"\n{_GONE}"
            raise
        finally:
            self.held = pool.last_world_size(_PURPOSE) is not None


def _advice(error: errors.RunError, notebook: dict[str, Any]) -> str:
    """Advice about the usual surprise: a rank does not see the notebook's variables."""
    undefined = re.search(r"NameError: name '(\w+)' is not defined", error.message)
    if not undefined or undefined[1] not in notebook:
        return ""
    return f"\n{undefined[1]!r} is a variable of the notebook. Ranks have their own: define it in a %%ranks cell."
