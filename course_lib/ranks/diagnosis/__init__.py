"""From what the ranks noted to one plain sentence: what went wrong, and at whose line."""
