"""The subject itself, one file per mechanism: the idea first, then the few functions that are the idea."""
