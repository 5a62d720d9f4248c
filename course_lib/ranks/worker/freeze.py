"""Imported last by the fork server: all that it has imported stays, so nobody has to look for garbage there."""

from __future__ import annotations

import gc

from course_lib.ranks.worker import changes

changes.watch_all()
gc.freeze()  # so that a worker's garbage collector does not copy the shared pages
gc.enable()  # without a collection, which would take a tenth of the time and find a few MB that all workers share
