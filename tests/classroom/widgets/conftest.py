"""The fixtures of explorers."""

from tests.lessons.conftest import begun, called, no_pause, one_piece  # noqa: F401
