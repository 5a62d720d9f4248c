"""A setting for all kernels here, also nbval's: show what ranks print once they are done, even on a busy machine."""

import os

os.environ["COURSE_PATIENCE"] = "600"  # nbval compares a cell's first output, and not its updates
