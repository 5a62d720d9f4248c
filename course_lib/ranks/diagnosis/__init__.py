"""The diagnosis of a run: one plain sentence about what went wrong, and at which line, from what the ranks noted."""
