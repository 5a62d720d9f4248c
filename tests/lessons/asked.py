"""All questions of the course, by name."""

from __future__ import annotations

import lessons  # noqa: F401  (it says where its rooms are)
from course_lib.classroom.questions.catalog import pages

ASKED = {name: page for name, page in pages().items() if page.asks}
