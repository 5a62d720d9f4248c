"""All questions of the course, by name."""

from __future__ import annotations

import lessons  # noqa: F401  (it opens its rooms)
from course_lib.classroom.questions.catalog import pages

ASKED = {name: page for name, page in pages().items() if page.asks}
