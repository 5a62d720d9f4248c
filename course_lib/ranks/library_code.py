"""Library code and the student's code: which of the two a file holds."""

from __future__ import annotations

import os
import sysconfig

from course_lib import preloading

RANKS = os.path.dirname(__file__) + os.sep
COURSE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INSTALLED = tuple({path + os.sep for key, path in sysconfig.get_paths().items() if key.endswith(("lib", "stdlib"))})


def is_library(filename: str) -> bool:
    """Whether a file belongs to Python, an installed package or the course, not to the student."""
    return filename.startswith((COURSE, "<frozen", *_INSTALLED, *preloading.folders))
