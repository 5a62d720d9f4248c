"""The last import of the fork server: everything imported before stays, and is no garbage to look for."""

from __future__ import annotations

import gc

from course_lib.ranks.worker import changes

changes.watch_all()
gc.freeze()  # so that a worker's garbage collector does not copy the shared pages
gc.enable()  # without a collection, which would take a tenth of the time and find a few MB that all workers share
