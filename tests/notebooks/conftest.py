"""Kernels of this step, nbval's too, show what ranks print once they are done, however long a busy machine takes."""

import os

os.environ["COURSE_PATIENCE"] = "600"  # nbval compares what a cell shows first, and not what that becomes
