"""nbgrader's settings for these exercises; copy this file into your class's folder, as notebooks/README.md says."""

from __future__ import annotations

import os
from typing import Any

import psutil
from nbclient.exceptions import DeadKernelError
from nbformat import v4
from nbgrader.converters import Autograde
from nbgrader.preprocessors import Execute

SECONDS = 60  # for a cell, on an idle machine; a check gives up after ten


def seconds(cell: Any) -> int:
    """The time limit of a cell in seconds, longer if several programs share each core."""
    return int(SECONDS * max(1.0, psutil.getloadavg()[0] / (os.cpu_count() or 1)))


class ExecuteUntilDeath(Execute):
    """A preprocessor for kernels that die: cells before keep their points, cells after say why they get none."""

    death = ""

    def preprocess(self, nb: Any, resources: Any = None, km: Any = None) -> Any:
        self.death = ""
        return super().preprocess(nb, resources, km)

    def preprocess_cell(self, cell: Any, resources: Any, index: int) -> Any:
        if not self.death:
            try:
                return super().preprocess_cell(cell, resources, index)
            except DeadKernelError:
                self.death = f"The kernel died in cell {index + 1} of this notebook."
        if cell.cell_type == "code":
            reason = f"{self.death} This cell could not be run to its end."
            cell.outputs = [v4.new_output("error", ename="KernelDied", evalue=reason, traceback=[reason])]
        return cell, resources


c = get_config()  # type: ignore[name-defined]  # noqa: F821  (nbgrader gives it to this file)
c.CourseDirectory.course_id = "distributed_training"
c.Execute.timeout_func = seconds
# Files from learning platforms: the student, anything between, the exercise, perhaps "-1" or "(2)".
c.FileNameCollectorPlugin.named_regexp = r".*[/\\](?P<student_id>[^/\\_]+)_(.*_)?(?P<file_id>\d\d_[a-z_]+)[^/\\]*$"
steps = Autograde.class_traits()["autograde_preprocessors"].default()
c.Autograde.autograde_preprocessors = [ExecuteUntilDeath if step is Execute else step for step in steps]
