"""A plugin for pytest: ranks of all its workers, and of all kernels that they start, come from one fork server.

It imports torch and our modules for seconds, which each worker and each kernel would otherwise repeat.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver
from typing import Any

from course_lib.ranks.parent import fork_server


def pytest_configure() -> None:
    fork_server.warm_up()  # pytest's workers join the one of the process that has started them
    if fork_server.start_method() == "forkserver":
        server: Any = forkserver._forkserver
        os.environ[fork_server.SHARED] = server._forkserver_address
