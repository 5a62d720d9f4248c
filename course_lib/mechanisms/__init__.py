"""The subject itself, one file per mechanism. Each reads like a chapter: the idea, then the few functions that are it."""
